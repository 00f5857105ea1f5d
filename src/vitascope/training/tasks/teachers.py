"""Teachers: trained classifiers of ours or of another library, called in the same way."""

import dataclasses
import re
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitascope.errors import UserError
from vitascope.models.options import Outputs
from vitascope.models.preprocess import Preprocess
from vitascope.models.weights.foreign import ForeignClassifier, fault_in_one_line, open_foreign, some
from vitascope.models.weights.loading import from_pretrained
from vitascope.models.weights.mapping import class_names as known_names
from vitascope.training.distributed import is_first


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
    outputs: Outputs = "exclusive",
    device: torch.device | str,
    precision: torch.dtype = torch.float32,
) -> Teacher:
    """Load a teacher, whose logits are in the order of the data's `class_names` and have the same meaning.

    `ref` is a MODEL, as for `from_pretrained`, or a name of another library, as for `open_foreign`.
    """
    model = open_foreign(ref, "teacher") or from_pretrained(ref)
    names = model.class_names if isinstance(model, ForeignClassifier) else model.config.class_names
    if not isinstance(model, ForeignClassifier) and not model.config.gives_classes:
        raise UserError(f"teacher {ref} returns features, not classes: a teacher needs a head")
    theirs: Outputs = "exclusive" if isinstance(model, ForeignClassifier) else model.config.outputs
    if theirs != outputs:
        raise UserError(
            f"the outputs of teacher {ref} are {theirs}, those of the student {outputs}: an image has one "
            "class, or several, for both"
        )
    model = model.float().eval().requires_grad_(False).to(device)
    teacher = Teacher(name=ref, model=model, precision=precision)
    shape = (1, teacher.preprocess.channels, *teacher.preprocess.image_size)
    try:
        output = teacher(torch.zeros(shape, device=device))
    except (RuntimeError, ValueError) as error:
        raise UserError(f"teacher {ref} does not take images {shape}: {fault_in_one_line(error)}") from error
    if output.ndim != 2:
        raise UserError(f"teacher {ref} returns {tuple(output.shape[1:])} for an image, which are not logits")
    order = class_order(ref, names, output.shape[1], class_names)
    places = None if order is None else torch.tensor(order, device=device)
    return dataclasses.replace(teacher, order=places)


def class_order(ref: str, theirs: tuple[str, ...], count: int, ours: tuple[str, ...]) -> list[int] | None:
    """For each class of the data, the index of the teacher's class; None if both have the same order."""
    theirs = known_names(theirs, count)
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
    parts = (("it lacks", ours, theirs), ("the data lack", theirs, ours))
    lacking = [f"{who} {some(names)}" for who, one, other in parts if (names := sorted({*one} - {*other}))]
    text = f"teacher {ref} has {count} classes, which are not the {len(ours)} of the data"
    raise UserError(": ".join([text, "; ".join(lacking)]))
