"""`push_to_hub`: upload a model to the Hugging Face hub, with a model card that states how good it is."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined

from vitascope.arguments import checked
from vitascope.errors import UserError, printable
from vitascope.formatting import counted
from vitascope.models.vision_model import VisionModel
from vitascope.models.weights.loading import save_pretrained
from vitascope.models.weights.preprocess import preprocess_of
from vitascope.network import ask, client_errors, misunderstood, status_of, unreachable
from vitascope.storage import explaining_failure
from vitascope.training.run.run import Run, load_with_run

MAX_CLASSES = 50
"""Class names that a card lists; of more classes it states the number."""


@checked
def push_to_hub(
    model: VisionModel | str | os.PathLike[str],
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
    model, run = load_with_run(model)
    model_card(model, repo_id, run)  # what can fail in it, fails before anything is created
    place = Path(os.environ.get("TMPDIR") or "/tmp")
    with ExitStack() as stack:
        with explaining_failure(place, "the model", "make room, or set TMPDIR to another folder"):
            scratch = stack.enter_context(tempfile.TemporaryDirectory())
            folder = save_pretrained(model, Path(scratch) / "model", format=format)
        stack.enter_context(_explaining(repo_id))
        return _push(folder, repo_id, lambda created: model_card(model, created, run), private, token)


def _push(folder: Path, repo_id: str, card: Callable[[str], str], private: bool, token: str | None) -> str:
    """Create the repository, unless it exists, and upload the files with the card; the URL of the commit."""
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi(token=token)
    created = ask(lambda: api.create_repo(repo_id, private=private, exist_ok=True)).repo_id
    if repo_id.lower() not in (created.lower(), created.rpartition("/")[2].lower()):
        raise misunderstood(f"the repository {created}")
    contents = {path.name: path for path in sorted(folder.iterdir())}
    files = [CommitOperationAdd(name, path) for name, path in contents.items()]
    files.append(CommitOperationAdd("README.md", card(created).encode()))

    def commit() -> str:
        done = api.create_commit(created, files, commit_message="Upload a vitascope model")
        return str(done.commit_url)

    return ask(commit, size=sum(path.stat().st_size for path in contents.values()))


@contextmanager
def _explaining(repo_id: str) -> Iterator[None]:
    """Turn the exceptions of the hub's client into one line with the way out."""
    from huggingface_hub.errors import HFValidationError

    try:
        yield
    except client_errors() as error:
        reason = " ".join(str(error).split())
        if answer := unreachable(error):
            reason = f"{answer}; try again"
        elif isinstance(error, HFValidationError):
            reason += "; name it `owner/name`"
        elif status_of(error) in (401, 403, 404):
            reason += "; log in with `hf auth login`, or give a token that may write there"
        raise UserError(f"{repo_id}: the model was not uploaded: {reason}") from error


def model_card(model: VisionModel, repo_id: str, run: Run | None = None) -> str:
    """The README.md of a model on the hub: metadata in YAML, then `model_card.md`, with its run's results."""
    config = model.config
    task = "image-classification" if config.gives_classes else "image-feature-extraction"
    metadata: dict[str, Any] = {
        "library_name": "vitascope",
        "tags": ["vision-transformer", task],
        "pipeline_tag": task,
    }
    shown: dict[str, Any] = {
        "repo_id": repo_id,
        "name": repo_id.rpartition("/")[2],
        "config": config,
        "parameters": sum(part.numel() for part in model.parameters()),
        "preprocess": yaml.safe_dump(preprocess_of(model).to_dict(), sort_keys=False),
        "max_classes": MAX_CLASSES,
    }
    if run is not None and (tests := run.records("test")):
        data = Path(str(run.config["data"])).name  # the folders above it may name a person
        shown |= {"run": run, "data": data, "epochs": run.epochs_done, "result": tests[-1]}
        if run.classifies:
            metadata["model-index"] = [{"name": shown["name"], "results": [_indexed(data, tests[-1])]}]
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    environment.filters |= {"printable": printable, "repr": repr, "counted": counted}
    card = environment.from_string(files(__package__).joinpath("model_card.md").read_text("utf-8"))
    return f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---\n\n" + card.render(shown)


def _indexed(data: str, result: dict[str, Any]) -> dict[str, Any]:
    """The accuracy, or the mean average precision of several classes per image, for the hub's tables."""
    name, value = ("map", result["map"]) if "map" in result else ("accuracy", result["accuracy"])
    return {
        "task": {"type": "image-classification"},
        "dataset": {"name": data, "type": data, "split": result["split"]},
        "metrics": [{"type": name, "value": round(float(value), 4)}],
    }
