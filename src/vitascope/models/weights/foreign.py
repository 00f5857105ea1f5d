"""Classifiers that timm and transformers load themselves."""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors import SafetensorError
from torch import Tensor, nn

from vitascope.errors import UserError
from vitascope.models.preprocess import Preprocess


def _faults() -> tuple[type[Exception], ...]:
    """What timm, transformers, the hub's client and readers of weights raise for a model they cannot load."""
    from huggingface_hub import errors  # imports an HTTP client

    return (
        *(ImportError, OSError, ValueError, RuntimeError, LookupError, TypeError, AttributeError),
        *(AssertionError, EOFError, pickle.UnpicklingError, SafetensorError),
        *(errors.HTTPError, errors.StrictDataclassError),  # type: ignore[attr-defined]
    )


class ForeignClassifier(nn.Module):
    """A classifier of another library: normalized images (B, C, H, W) -> logits (B, K)."""

    def __init__(self, model: nn.Module, preprocess: Preprocess, class_names: tuple[str, ...]) -> None:
        super().__init__()
        self.model = model
        self.preprocess: Any = preprocess
        self.class_names = class_names

    def forward(self, images: Tensor) -> Tensor:
        """The logits, which a model of transformers returns in an object."""
        outputs = self.model(images)
        return getattr(outputs, "logits", outputs)


def open_foreign(ref: str, role: str) -> ForeignClassifier | None:
    """Load the classifier `timm:NAME` or `transformers:NAME` with its own library; None for other MODELs.

    NAME is one of `timm.create_model`, a hub id, or a folder that the library wrote. Raises UserError, which
    calls the model by its `role`, if it cannot be loaded, or its preprocessing not be expressed.
    """
    library, _, name = ref.partition(":")
    if library == "transformers":
        return _from_transformers(f"{role} {ref}", name)
    if library == "timm" and not Path(name).is_file():
        return _from_timm(f"{role} {ref}", name)
    return None


def _from_timm(model_name: str, name: str) -> ForeignClassifier:
    folder = Path(name).expanduser()
    name = f"local-dir:{folder}" if (folder / "config.json").is_file() else name
    with explaining("timm", model_name):
        import timm

        model = timm.create_model(name, pretrained=True)
        data = timm.data.resolve_model_data_config(model)
    channels, height, width = data["input_size"]
    preprocess = Preprocess(
        image_size=(height, width), channels=channels, mean=tuple(data["mean"]), std=tuple(data["std"])
    )
    return ForeignClassifier(model, preprocess, tuple(model.pretrained_cfg.get("label_names") or ()))


def _from_transformers(model_name: str, name: str) -> ForeignClassifier:
    colours = torch.tensor([[0, 0, 0], [1, 1, 1], [1, 0, 0]]).view(3, 3, 1, 1)
    with explaining("transformers", model_name):
        import transformers

        model, loading = transformers.AutoModelForImageClassification.from_pretrained(
            name, output_loading_info=True, trust_remote_code=False
        )
        processor = transformers.AutoImageProcessor.from_pretrained(name, backend="pil")
        pictures = [Image.new("RGB", (224, 224), colour) for colour in ("black", "white", "red")]
        outputs = processor(images=pictures, return_tensors="pt")["pixel_values"]  # (3, C, H, W)
    unset = sorted({*loading["missing_keys"], *(key for key, *_ in loading["mismatched_keys"])})
    if unset:  # transformers initializes them at random with a warning
        raise UserError(f"{model_name} has no weights for {some(unset)}: is it a classifier?")
    names = tuple(model.config.id2label[index] for index in sorted(model.config.id2label))
    return ForeignClassifier(model, probed_preprocess(model_name, outputs, colours), names)


def probed_preprocess(model_name: str, outputs: Tensor, colours: Tensor) -> Preprocess:
    """The size, mean and std of any of the dozens of processors, from its outputs for uniform images."""
    size = (outputs.shape[2], outputs.shape[3])
    black, white = outputs[:2].double().amin(dim=(2, 3))  # (C,) each, the same at every pixel
    if outputs.shape[1] == 3 and bool((white > black).all()):
        std = 1 / (white - black)
        preprocess = Preprocess(image_size=size, mean=tuple((-black * std).tolist()), std=tuple(std.tolist()))
        if torch.allclose(preprocess.normalize(colours).expand_as(outputs), outputs.float(), atol=1e-4):
            return preprocess
    raise UserError(f"{model_name}: its processor does more than resize, crop and normalize")


@contextmanager
def explaining(library: str, model_name: str, extra: str = "peers") -> Iterator[None]:
    """Turn the errors of a library that is imported, or loads a model, into one line."""
    try:
        yield
    except UserError:
        raise
    except _faults() as error:
        if isinstance(error, ModuleNotFoundError) and error.name == library:
            raise UserError(
                f'{model_name} needs {library}, which is not installed: pip install "vitascope[{extra}]"'
            ) from error
        cause: BaseException = error  # transformers imports its modules late, and hides why one fails
        while cause.__cause__ is not None:
            cause = cause.__cause__
        because = "" if str(cause) in str(error) else f" (because of {fault_in_one_line(cause)})"
        reason = f"{fault_in_one_line(error)}{because}"
        raise UserError(f"{model_name} cannot be loaded by {library}: {reason}") from error


def some(names: list[str]) -> str:
    """The first names, and the number of the others."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more or "none"


def fault_in_one_line(error: BaseException) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
