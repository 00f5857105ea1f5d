"""Weights in forms that are not read, and how their library writes a form that is.

Facts: the file names of transformers (`utils/__init__.py`, `trainer.py`), peft (`utils/constants.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_MERGE = (
    "a LoRA adapter of PEFT, not a whole model; merge it into its base model: "
    "peft.PeftModel.from_pretrained(BASE, ADAPTER).merge_and_unload().save_pretrained(FOLDER)"
)
_CONVERT = (
    "weights of {library} alone; with transformers 4, write PyTorch's: "
    "AutoModelForImageClassification.from_pretrained(MODEL, {option}=True).save_pretrained(FOLDER)"
)
_FILES = {
    r"adapter_(config\.json|model\.(safetensors|bin))": _MERGE,
    r"tf_model\.h5": _CONVERT.format(library="TensorFlow", option="from_tf"),
    r"flax_model\.msgpack": _CONVERT.format(library="Flax", option="from_flax"),
    r".*\.onnx": "an ONNX graph, not a checkpoint; the model that it was exported from is needed",
    r"(training_args\.bin|(optimizer|scheduler|scaler)\.(pt|bin)|rng_state\w*\.pth)": (
        "a state of transformers' Trainer, not the model; the folder has model.safetensors beside it"
    ),
}


def described(names: Iterable[str]) -> str | None:
    """The description of the first file in a form that is not read, with the way out."""
    names = sorted(names)
    for pattern, reason in _FILES.items():
        for name in names:
            if re.fullmatch(pattern, name):
                return f"{name} is {reason}"
    if folders := [name for name in names if re.fullmatch(r"checkpoint-\d+", name)]:
        newest = max(folders, key=lambda name: int(name.partition("-")[2]))
        return (
            f"not a model, but transformers' Trainer left {len(folders)} in it; add the name of one: {newest}"
        )
    return None


def adapter_reason(names: Iterable[str]) -> str | None:
    """The reason that tensors of LoRA are no whole model; None for others."""
    return _MERGE if any(re.search(r"\blora_[AB]\b", name) for name in names) else None
