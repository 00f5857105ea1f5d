"""Teachers: trained classifiers of ours, of timm or of transformers, called in the same way."""

from __future__ import annotations

import dataclasses
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]
from PIL import Image
from safetensors import SafetensorError
from torch import Tensor, nn

from vitascope.data.preprocess import Preprocess
from vitascope.errors import UserError
from vitascope.training.distributed import is_first
from vitascope.weights.loading import from_pretrained

# Raised by timm, transformers, the hub's client and the readers of weights for a model that they cannot load.
_FAULTS = (
    *(ImportError, OSError, ValueError, RuntimeError, LookupError, TypeError, AttributeError),
    *(AssertionError, EOFError, pickle.UnpicklingError, SafetensorError, HTTPError),
)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Teacher:
    """A frozen classifier. It gets whole images, resized and not cropped."""

    name: str
    model: nn.Module
    """Normalized images to logits; it has a `preprocess`."""
    order: Tensor | None = None
    """For each class of the data, the index of the model's output, int64 (K,); None if they agree."""
    precision: torch.dtype = torch.float32

    @property
    def preprocess(self) -> Preprocess:
        """The preprocessing of the model."""
        return cast("Preprocess", self.model.preprocess)

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Logits float32 (B, K), in the data's class order, for images in [0, 1], floats (B, C, H, W)."""
        if images.shape[2:] != self.preprocess.image_size:
            images = F.interpolate(images, self.preprocess.image_size, mode="bilinear", antialias=True)
        with torch.autocast(images.device.type, self.precision, enabled=self.precision != torch.float32):
            logits = self.model(self.preprocess.normalize(images)).float()  # (B, K)
        return logits if self.order is None else logits[:, self.order]


def open_teacher(
    ref: str,
    class_names: tuple[str, ...],
    *,
    device: torch.device | str,
    precision: torch.dtype = torch.float32,
) -> Teacher:
    """Load a teacher, whose logits are in the order of the data's `class_names`.

    `ref` is a MODEL, as for `from_pretrained`; `timm:NAME`, a name of `timm.create_model` or a folder saved
    by timm; or `transformers:NAME`, a hub id or folder of an image classifier.
    """
    library, _, name = ref.partition(":")
    if library == "transformers":
        model, names = _from_transformers(ref, name)
    elif library == "timm" and not Path(name).is_file():  # a file is a MODEL in timm's format
        model, names = _from_timm(ref, name)
    else:
        model = from_pretrained(ref)
        names = model.config.class_names
        if not model.config.gives_classes:
            raise UserError(f"teacher {ref} returns features, not classes: a teacher needs a head")
    model = model.float().eval().requires_grad_(False).to(device)
    teacher = Teacher(name=ref, model=model, precision=precision)
    shape = (1, teacher.preprocess.channels, *teacher.preprocess.image_size)
    try:
        output = teacher(torch.zeros(shape, device=device))
    except (RuntimeError, ValueError) as error:
        raise UserError(f"teacher {ref} does not take images {shape}: {_line(error)}") from error
    if output.ndim != 2:
        raise UserError(f"teacher {ref} returns {tuple(output.shape[1:])} for an image, which are not logits")
    order = class_order(ref, names, output.shape[1], class_names)
    places = None if order is None else torch.tensor(order, device=device)
    return dataclasses.replace(teacher, order=places)


def class_order(ref: str, theirs: tuple[str, ...], count: int, ours: tuple[str, ...]) -> list[int] | None:
    """For each class of the data, the index of the teacher's class; None if both have the same order."""
    if len(theirs) != count or theirs == tuple(f"LABEL_{index}" for index in range(count)):
        theirs = ()  # LABEL_0 and so on are placeholders of transformers
    if theirs == ours:
        return None
    if len(theirs) == len(ours) and set(theirs) == set(ours):
        place = {name: index for index, name in enumerate(theirs)}
        return [place[name] for name in ours]
    # ImageNet's folders have WordNet ids as names, its models words; both are in the order of the ids.
    by_id = [bool(names) and all(re.fullmatch(r"n\d{8}", name) for name in names) for names in (ours, theirs)]
    other_language = by_id == [True, False]
    if count == len(ours) and (not theirs or other_language):
        why = "names its classes in words, the data by WordNet ids" if theirs else "has no class names"
        if is_first():
            print(f"teacher {ref} {why}: its {count} are assumed to be in the data's order", flush=True)
        return None
    if not theirs:
        raise UserError(f"teacher {ref} has {count} classes, without names; the data have {len(ours)}")
    unknown, superfluous = (sorted(set(one) - set(other)) for one, other in ((ours, theirs), (theirs, ours)))
    raise UserError(
        f"teacher {ref} has {count} classes, which are not the {len(ours)} of the data: it lacks "
        f"{_some(unknown)}; the data lack {_some(superfluous)}"
    )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more or "none"


class _Foreign(nn.Module):
    """A model of another library: normalized images (B, C, H, W) -> logits (B, K)."""

    def __init__(self, model: nn.Module, preprocess: Preprocess) -> None:
        super().__init__()
        self.model = model
        self.preprocess: Any = preprocess

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images)


class _ForeignTransformer(_Foreign):
    def forward(self, images: Tensor) -> Tensor:
        return self.model(pixel_values=images).logits


def _from_timm(ref: str, name: str) -> tuple[nn.Module, tuple[str, ...]]:
    folder = Path(name).expanduser()
    name = f"local-dir:{folder}" if (folder / "config.json").is_file() else name
    with _explaining("timm", ref):
        import timm

        model = timm.create_model(name, pretrained=True)
        data = timm.data.resolve_model_data_config(model)
    channels, height, width = data["input_size"]
    preprocess = Preprocess(
        image_size=(height, width), channels=channels, mean=tuple(data["mean"]), std=tuple(data["std"])
    )
    return _Foreign(model, preprocess), tuple(model.pretrained_cfg.get("label_names") or ())


def _from_transformers(ref: str, name: str) -> tuple[nn.Module, tuple[str, ...]]:
    colours = torch.tensor([[0, 0, 0], [1, 1, 1], [1, 0, 0]]).view(3, 3, 1, 1)
    with _explaining("transformers", ref):
        import transformers

        model, loading = transformers.AutoModelForImageClassification.from_pretrained(
            name, output_loading_info=True, trust_remote_code=False
        )
        processor = transformers.AutoImageProcessor.from_pretrained(name, backend="pil")
        pictures = [Image.new("RGB", (224, 224), colour) for colour in ("black", "white", "red")]
        outputs = processor(images=pictures, return_tensors="pt")["pixel_values"]  # (3, C, H, W)
    unset = sorted({*loading["missing_keys"], *(key for key, *_ in loading["mismatched_keys"])})
    if unset:  # transformers initializes them at random with a warning
        raise UserError(f"teacher {ref} has no weights for {_some(unset)}: is it a classifier?")
    names = tuple(model.config.id2label[index] for index in sorted(model.config.id2label))
    return _ForeignTransformer(model, _probed_preprocess(ref, outputs, colours)), names


def _probed_preprocess(ref: str, outputs: Tensor, colours: Tensor) -> Preprocess:
    """The size, mean and std of any of the dozens of processors, from its outputs for uniform images."""
    size = (outputs.shape[2], outputs.shape[3])
    black, white = outputs[:2].double().amin(dim=(2, 3))  # (C,) each, the same at every pixel
    if outputs.shape[1] == 3 and bool((white > black).all()):
        std = 1 / (white - black)
        preprocess = Preprocess(image_size=size, mean=tuple((-black * std).tolist()), std=tuple(std.tolist()))
        if torch.allclose(preprocess.normalize(colours).expand_as(outputs), outputs.float(), atol=1e-4):
            return preprocess
    raise UserError(f"teacher {ref}: its processor does more than resize, crop and normalize")


@contextmanager
def _explaining(library: str, ref: str) -> Iterator[None]:
    """Turn the errors of a library that is imported, or loads a model, into one line."""
    try:
        yield
    except _FAULTS as error:
        if isinstance(error, ModuleNotFoundError) and error.name == library:
            raise UserError(
                f'teacher {ref} needs {library}, which is not installed: pip install "vitascope[peers]"'
            ) from error
        cause: BaseException = error  # transformers imports its modules late, and hides why one fails
        while cause.__cause__ is not None:
            cause = cause.__cause__
        because = "" if str(cause) in str(error) else f" (because of {_line(cause)})"
        raise UserError(f"teacher {ref} cannot be loaded by {library}: {_line(error)}{because}") from error


def _line(error: BaseException) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
