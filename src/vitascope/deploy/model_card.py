"""`push_to_hub`: upload a model to the Hugging Face hub, with a model card that states how good it is."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from pathlib import Path
from typing import Any

import yaml

from vitascope.arguments import checked
from vitascope.errors import UserError, printable
from vitascope.model.classifier import Classifier
from vitascope.run.run import Run, load_with_run
from vitascope.weights.preprocess import preprocess_of
from vitascope.weights.saving import save_pretrained

MAX_CLASSES = 50
"""Class names that a card lists; of more classes it states the number."""


@checked
def push_to_hub(
    model: Classifier | str | os.PathLike[str],
    repo_id: str,
    *,
    private: bool = False,
    token: str | None = None,
    format: str = "vitascope",
) -> str:
    """Upload a model folder with its model card to the hub, in one commit; create the repository if needed.

    The card has the architecture, the classes, the preprocessing, how to load the model, and, for a run, its
    options and its accuracy on the test images.

    Args:
        model: a model, or a MODEL argument; a run folder brings its numbers along.
        repo_id: `owner/name` on the hub; a name alone is a repository of the token's owner.
        private: make a new repository private.
        token: an access token; None uses the one that `hf auth login` saved.
        format: as for `save_pretrained`; "timm" and "huggingface" suit those libraries.

    Returns:
        The URL of the commit.

    Raises:
        UserError: the hub rejects the request (the id, the token, the rights), or cannot be reached.
        CheckpointError: as `from_pretrained` and `save_pretrained`.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, HTTPError  # type: ignore[attr-defined]

    model, run = load_with_run(model)
    with tempfile.TemporaryDirectory() as scratch:
        folder = save_pretrained(model, Path(scratch) / "model", format=format)
        api = HfApi(token=token)
        try:
            repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id  # with its owner
            (folder / "README.md").write_text(model_card(model, repo_id, run), encoding="utf-8")
            done = api.upload_folder(
                repo_id=repo_id, folder_path=folder, commit_message="Upload a vitascope model"
            )
        except (HTTPError, HFValidationError, OSError) as error:
            reason = " ".join(str(error).split())
            raise UserError(
                f"{repo_id}: the hub did not accept the model: {reason}; log in with `hf auth login`, or "
                "give a token that may write there"
            ) from error
    return str(done.commit_url)


def model_card(model: Classifier, repo_id: str, run: Run | None = None) -> str:
    """The README.md of a model on the hub: metadata in YAML, then Markdown, with the results of its run."""
    config = model.config
    values = dataclasses.asdict(preprocess_of(model))
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    preprocess = yaml.safe_dump(plain, sort_keys=False)
    parameters = sum(part.numel() for part in model.parameters())
    sections = [
        f"# {repo_id.rpartition('/')[2]}",
        f"{config.summary}; {parameters / 1e6:.2f} M parameters. Made with vitascope.",
        f"## Load\n\n```python\nimport vitascope as vs\n\npredictor = vs.Predictor({repo_id!r})\n"
        'predictor("image.jpg")\n```',
        f"## Preprocessing\n\nLoading the model loads it:\n\n```yaml\n{preprocess}```",
        f"## Classes\n\n{_classes(config.class_names, config.num_classes)}",
    ]
    metadata: dict[str, Any] = {
        "library_name": "vitascope",
        "tags": ["vision-transformer", "image-classification"],
    }
    if config.gives_classes:
        metadata["pipeline_tag"] = "image-classification"
    if run is not None and (tests := run.records("test")):
        result = tests[-1]
        data = Path(str(run.config["data"])).name  # the folders above it may name a person
        sections.append(_results(run, data, result))
        metadata["model-index"] = [  # the hub's pages show it as a table
            {
                "name": repo_id.rpartition("/")[2],
                "results": [
                    {
                        "task": {"type": "image-classification"},
                        "dataset": {"name": data, "type": data, "split": result["split"]},
                        "metrics": [{"type": "accuracy", "value": round(float(result["accuracy"]), 4)}],
                    }
                ],
            }
        ]
    return f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---\n\n" + "\n\n".join(sections) + "\n"


def _classes(names: tuple[str, ...], count: int) -> str:
    names = tuple(map(printable, names))
    if not names:
        return f"{count} classes without names." if count else "None: the model returns features."
    if len(names) > MAX_CLASSES:
        return f"{count} classes, from {names[0]} to {names[-1]}; `model.config.class_names` has them all."
    return ", ".join(names)


def _results(run: Run, data: str, result: dict[str, Any]) -> str:
    """The section about a run: its data, its length and its accuracy."""
    lines = [f"## Training and results\n\nTrained for {run.config['epochs']} epochs on `{printable(data)}`."]
    if "accuracy_low" in result:
        lines.append(
            f"Accuracy on {result['images']:,} {result['split']} images: {result['accuracy']:.2%} "
            f"(95% interval {result['accuracy_low']:.1%} to {result['accuracy_high']:.1%}; "
            f"always guessing the most frequent class: {result['majority']:.2%})."
        )
    return " ".join(lines)
