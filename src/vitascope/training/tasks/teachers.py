"""Trained classifiers that teach another: ours, timm's or transformers', behind one call."""

from __future__ import annotations

import dataclasses
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]
from PIL import Image
from safetensors import SafetensorError
from torch import Tensor, nn

from vitascope.data.preprocess import Preprocess
from vitascope.errors import UserError
from vitascope.training.distributed import is_first
from vitascope.weights.preprocess import preprocess_of
from vitascope.weights.store import from_pretrained

# What timm and transformers, the hub's client and the readers of weights raise for what they cannot load.
_FAULTS = (
    ImportError,
    OSError,
    ValueError,
    RuntimeError,
    LookupError,
    TypeError,
    AttributeError,
    AssertionError,
    EOFError,
    pickle.UnpicklingError,
    SafetensorError,
    HTTPError,
)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Teacher:
    """A classifier that answers and never learns: it gets no gradients, and stays in evaluation mode.

    Whole pictures are shown to it: they are brought to its size, not cropped.
    """

    name: str
    """For messages."""
    model: nn.Module
    """Normalized images to logits; frozen, in evaluation mode, on its device."""
    preprocess: Preprocess
    """Its size, channels, mean and std."""
    order: Tensor | None = None
    """For each class of the data, which of the model's outputs it is: int64 (K,); None where they agree."""
    precision: torch.dtype = torch.float32
    """What it computes in, whatever the student does."""

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Logits float32 (B, K), in the data's order of classes, of images in [0, 1], floats (B, C, H, W)."""
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
    """The teacher behind `--teacher`, whose answers are in the order of the data's classes.

    Args:
        ref: a MODEL, as `from_pretrained` takes it; `timm:NAME`, any name of `timm.create_model` or a folder
            that timm saved; or `transformers:NAME`, a hub id or folder of an image classifier.
        class_names: of the data. A teacher that names the same in another order is taken; one that names
            none, but has as many, is taken as it is, and a line on stdout says so.
        device: where it answers.
        precision: what it computes in.

    Raises:
        UserError: one line: no such model, a library that is missing or broken, other classes than the
            data's (what differs is listed), or a model that is no classifier of images.
    """
    library, _, name = ref.partition(":")
    if library == "transformers":
        model, preprocess, names = _of_transformers(ref, name)
    elif library == "timm" and not Path(name).is_file():  # a file is a MODEL, in timm's layout
        model, preprocess, names = _of_timm(ref, name)
    else:
        model, preprocess, names = _of_ours(ref)
    model = model.float().eval().requires_grad_(False).to(device)
    teacher = Teacher(name=ref, model=model, preprocess=preprocess, precision=precision)
    order = class_order(ref, names, _count_classes(teacher, device), class_names)
    if order is None:
        return teacher
    return dataclasses.replace(teacher, order=torch.tensor(order, device=device))


def class_order(ref: str, theirs: tuple[str, ...], count: int, ours: tuple[str, ...]) -> list[int] | None:
    """For each class of the data, which of the teacher's it is; None where both have the same order.

    Args:
        ref: the teacher, for messages.
        theirs: its class names; those of another number of classes than it has count as none.
        count: its classes.
        ours: the data's class names, all different.

    Raises:
        UserError: other classes.
    """
    if len(theirs) != count or theirs == tuple(f"LABEL_{index}" for index in range(count)):
        theirs = ()  # LABEL_0 and so on are transformers' for a model without names
    if theirs == ours:
        return None
    if len(theirs) == len(ours) and set(theirs) == set(ours):
        place = {name: index for index, name in enumerate(theirs)}
        return [place[name] for name in ours]
    # ImageNet's folders are named by WordNet's ids and its models by words, both in the order of the ids.
    other_language = _are_wordnet_ids(ours) and not _are_wordnet_ids(theirs)
    if count == len(ours) and (not theirs or other_language):
        why = "names its classes in words, the data theirs by WordNet ids" if theirs else "names no classes"
        if is_first():
            print(
                f"teacher {ref} {why}: its {count} are taken to be the data's, in the same order", flush=True
            )
        return None
    if not theirs:
        raise UserError(f"teacher {ref} knows {count} classes, without names; the data have {len(ours)}")
    unknown, superfluous = (sorted(set(one) - set(other)) for one, other in ((ours, theirs), (theirs, ours)))
    raise UserError(
        f"teacher {ref} knows {count} other classes than the {len(ours)} of the data: of the data's, it does "
        f"not know {_some(unknown)}; of its own, the data do not have {_some(superfluous)}"
    )


def _are_wordnet_ids(names: tuple[str, ...]) -> bool:
    return bool(names) and all(re.fullmatch(r"n\d{8}", name) for name in names)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more or "none"


def _count_classes(teacher: Teacher, device: torch.device | str) -> int:
    """How many classes a teacher tells apart, asked with one black image.

    Raises:
        UserError: it takes no such image, or its answer is no list of logits.
    """
    shape = (1, teacher.preprocess.channels, *teacher.preprocess.image_size)
    try:
        answer = teacher(torch.zeros(shape, device=device))
    except (RuntimeError, ValueError) as error:
        raise UserError(f"teacher {teacher.name} takes no images {shape}: {_told(error)}") from error
    if answer.ndim != 2:
        raise UserError(f"teacher {teacher.name} answers an image with {tuple(answer.shape[1:])}, not logits")
    return answer.shape[1]


Opened = tuple[nn.Module, Preprocess, tuple[str, ...]]
"""A model, its preprocessing, the names of its classes."""


def _of_ours(ref: str) -> Opened:
    model = from_pretrained(ref)
    config = model.config
    if not config.gives_classes:
        raise UserError(f"teacher {ref} gives features, not classes: a teacher needs a head")
    return model, preprocess_of(model), config.class_names


def _of_timm(ref: str, name: str) -> Opened:
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
    return model, preprocess, tuple(model.pretrained_cfg.get("label_names") or ())


def _of_transformers(ref: str, name: str) -> Opened:
    colours = torch.tensor([[0, 0, 0], [1, 1, 1], [1, 0, 0]]).view(3, 3, 1, 1)
    with _explaining("transformers", ref):
        import transformers

        model, loading = transformers.AutoModelForImageClassification.from_pretrained(
            name, output_loading_info=True, trust_remote_code=False
        )
        processor = transformers.AutoImageProcessor.from_pretrained(name, backend="pil")
        pictures = [Image.new("RGB", (224, 224), colour) for colour in ("black", "white", "red")]
        answers = processor(images=pictures, return_tensors="pt")["pixel_values"]  # (3, C, H, W)
    unset = sorted({*loading["missing_keys"], *(key for key, *_ in loading["mismatched_keys"])})
    if unset:  # transformers draws them at random, and only warns
        raise UserError(f"teacher {ref} has no weights for {_some(unset)}: is it a classifier?")
    preprocess = _seen_through(ref, answers, colours)
    return _Logits(model), preprocess, tuple(model.config.id2label[i] for i in sorted(model.config.id2label))


def _seen_through(ref: str, answers: Tensor, colours: Tensor) -> Preprocess:
    """A processor's size, mean and std, from what it makes of a black and a white picture.

    Its settings would have to be read in the way of each of the processors, of which there are dozens.

    Args:
        ref: the teacher, for messages.
        answers: what it makes of pictures in three colours, (3, C, H, W).
        colours: black, white, red: (3, 3, 1, 1).

    Raises:
        UserError: red is not what black and white make of it: channels in another order, a border.
    """
    size = (answers.shape[2], answers.shape[3])
    black, white = answers[:2].double().amin(dim=(2, 3))  # (C,) each, the same at every pixel
    if answers.shape[1] == 3 and bool((white > black).all()):
        std = 1 / (white - black)
        preprocess = Preprocess(image_size=size, mean=tuple((-black * std).tolist()), std=tuple(std.tolist()))
        if torch.allclose(preprocess.normalize(colours).expand_as(answers), answers.float(), atol=1e-4):
            return preprocess
    raise UserError(f"teacher {ref}: its processor does more to a picture than resize, crop and normalize it")


class _Logits(nn.Module):
    """A model of transformers as a function of images."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model(pixel_values=images).logits  # (B, K)


@contextmanager
def _explaining(library: str, ref: str) -> Iterator[None]:
    """Turn what a library raises while it is imported, or loads a model, into one line."""
    try:
        yield
    except _FAULTS as error:
        if isinstance(error, ModuleNotFoundError) and error.name == library:
            raise UserError(
                f'teacher {ref} needs {library}, which is not installed: pip install "vitascope[peers]"'
            ) from error
        origin: Any = error  # transformers imports its parts late, and hides why it cannot
        while origin.__cause__ is not None:
            origin = origin.__cause__
        because = "" if str(origin) in str(error) else f" (because of {_told(origin)})"
        raise UserError(f"teacher {ref} cannot be loaded by {library}: {_told(error)}{because}") from error


def _told(error: BaseException) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
