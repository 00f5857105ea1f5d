"""The identity of a run: everything that must be the same for a checkpoint to be resumed."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from vitascope.data.decoding import source_name
from vitascope.data.splits import ImageSet
from vitascope.errors import UserError
from vitascope.model.sizes import ModelConfig
from vitascope.training.recipes import GROUP_OF, TrainConfig

_PLACES = ("data", "run", "weights", "teacher")  # files may be moved


def run_identity(config: TrainConfig, model_config: ModelConfig, images: ImageSet) -> dict[str, Any]:
    """Plain values by name: the training images, the model, and all options but engine options and paths."""
    names = [source_name(source).replace("\\", "/").rsplit("/", 1)[-1] for source in images.sources]
    content = json.dumps([names, images.labels.tolist()]).encode()
    model = model_config.to_dict()
    # An engine option may be an option of the model too. The architecture is compared as the model's own.
    excluded = {name for name, group in GROUP_OF.items() if group == "engine"} | {"class_names"}
    compared = [name for name, group in GROUP_OF.items() if group not in ("architecture", "engine")]
    return {
        "training images": len(images),
        "classes": list(images.class_names),
        "names and labels of the training images, SHA-256": hashlib.sha256(content).hexdigest()[:16],
        **{f"model: {name}": value for name, value in model.items() if name not in excluded},
        **{name: config.option(name) for name in compared if name not in _PLACES},
    }


def check_identity(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Reject a checkpoint with other data, another model or other options.

    Options that the checkpoint does not have are newer than it.
    """
    plain = json.loads(json.dumps(now))
    differences = [
        f"{name} was {value!r}, is {plain.get(name)!r}"
        for name, value in saved.items()
        if value != plain.get(name)
    ]
    if differences:
        raise UserError(
            f"the checkpoint is not of this run: {'; '.join(differences)}; restore the data and options, or "
            "start another run"
        )
