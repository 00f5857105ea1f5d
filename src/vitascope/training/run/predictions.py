"""Predictions of a finished classifier, as the run keeps them."""

import dataclasses
import functools
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from vitascope.data.measures import PairedMeasure, Score, predicted_classes
from vitascope.data.splits import OUT_OF_FOLD
from vitascope.data.targets import ClassIndices, ClassSets, Targets
from vitascope.errors import UserError
from vitascope.models.weights.files import read_npz
from vitascope.serialization import explaining_faults
from vitascope.storage import replacing

OPTIONAL = ("thresholds", "familiarity")
"""Arrays that not every classifier has."""
_ARRAYS: dict[str, tuple[Any, str]] = {
    **{"split": (np.str_, ""), "class_names": (np.str_, "K"), "unreadable": (np.str_, "U")},
    **{"indices": (np.int64, "N"), "labels": (np.int64, "N"), "probabilities": (np.float32, "NK")},
    **{"thresholds": (np.float32, "K"), "familiarity": (np.float32, "N")},
}
"""The dtypes and the sides of the arrays in a file, of N images and K classes."""
_SETS = {"labels": (np.bool_, "NK"), "unknown": (np.bool_, "NK")}
"""In their place for several classes per image."""


@dataclasses.dataclass(frozen=True, eq=False)
class Predictions:
    """Predictions on the split that a finished classifier is measured on.

    Attributes:
        split: the split's name.
        indices: indices in the split of the N images that could be read, int64 (N,).
        targets: their true classes, among K.
        probabilities: of the classes, float32 (N, K).
        thresholds: of the classes where any may apply, float32 (K,); None for 0.5.
        familiarity: of the images, float32 (N,); None if the classifier does not know it.
        unreadable: one line per image that could not be read: its path and the reason.
    """

    split: str
    indices: npt.NDArray[np.int64]
    targets: Targets
    probabilities: npt.NDArray[np.float32]
    thresholds: npt.NDArray[np.float32] | None = None
    familiarity: npt.NDArray[np.float32] | None = None
    unreadable: tuple[str, ...] = ()

    def __eq__(self, other: object) -> bool:
        """Whether all values are equal."""
        if type(self) is not type(other):
            return NotImplemented
        pairs = [
            (getattr(self, field.name), getattr(other, field.name)) for field in dataclasses.fields(self)
        ]
        return all(
            np.array_equal(*pair)
            if any(isinstance(value, np.ndarray) for value in pair)
            else pair[0] == pair[1]
            for pair in pairs
        )

    @property
    def fitted(self) -> bool:
        """Whether a run's temperature, and its sets or thresholds, were fitted to these predictions too."""
        return self.split in ("val", OUT_OF_FOLD)

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the K classes."""
        return self.targets.class_names

    @property
    def labels(self) -> npt.NDArray[Any]:
        """The labels of `targets`: int64 (N,) for one class per image, bool (N, K) for several."""
        return self.targets.labels

    @property
    def classes(self) -> npt.NDArray[np.int64]:
        """The most probable class of each image, (N,)."""
        return predicted_classes(self.probabilities)

    @property
    def confidences(self) -> npt.NDArray[np.float32]:
        """The probability of the predicted class, (N,)."""
        return self.probabilities.max(axis=1)

    @property
    def several(self) -> bool:
        """Whether an image may have several classes."""
        return not self.targets.exclusive

    @property
    def scored(self) -> npt.NDArray[np.float32]:
        """The probabilities to measure, see `Targets.scored`, (N, K)."""
        return self.targets.scored(self.probabilities).astype(np.float32, copy=False)

    @property
    def answers(self) -> npt.NDArray[Any]:
        """The predictions in the form of the labels: the most probable class of each image, int64 (N,), or
        the classes from their thresholds on, bool (N, K)."""
        return self.targets.answers(self.scored, self.thresholds)

    @property
    def correct(self) -> npt.NDArray[np.bool_]:
        """Whether the answer is the label, with several classes exactly, (N,)."""
        return self.targets.correct(self.answers)

    @functools.cached_property
    def score(self) -> Score:
        """The accuracy with its interval, and the numbers to compare it with, or the measures of several
        classes per image; UserError for no images, or for images without any of these."""
        if not len(self.targets):
            raise UserError(f"there are no predictions of {self.split} images, so they have no score")
        return self.targets.score(self.probabilities, self.thresholds, f"{self.split} image")

    @property
    def confusion(self) -> npt.NDArray[np.int64]:
        """As `Targets.confusion`."""
        return self.targets.confusion(self.classes)

    def save(self, path: Path) -> None:
        """Write an .npz file, whole or not at all; texts are NumPy's, so that nothing is pickled."""
        more = {name: getattr(self, name) for name in OPTIONAL if getattr(self, name) is not None}
        if self.targets.partial:
            more["unknown"] = self.targets.rows < 0
        with replacing(path) as aside, aside.open("wb") as file:
            np.savez_compressed(
                file,
                split=np.array(self.split),
                class_names=np.array(self.class_names, dtype=np.str_),
                indices=self.indices,
                labels=self.labels,
                probabilities=self.probabilities,
                **more,
                unreadable=np.array(self.unreadable, dtype=np.str_),
            )

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read an .npz file of `save`; another one is a `UserError`."""
        with explaining_faults(path, "remove it to get a report without predictions"):
            return cls(**_checked(read_npz(path)))


def paired(before: Predictions, after: Predictions) -> PairedMeasure:
    """Compare a classifier with the one made from it, on the same images: by accuracy, or with several
    classes per image by mean average precision."""
    return before.targets.paired(before.probabilities, after.probabilities)


def _checked(stored: dict[str, npt.NDArray[Any]]) -> dict[str, Any]:
    """The attributes of `Predictions` from a file's arrays; a ValueError for another shape or kind."""
    several = "labels" in stored and stored["labels"].dtype == np.bool_
    arrays: dict[str, Any] = {}
    lengths: dict[str, int] = {}
    for name, (dtype, sides) in (_ARRAYS | (_SETS if several else {})).items():
        if name not in stored:
            if name in (*OPTIONAL, "unknown"):
                continue
            raise ValueError(f"no {name}")
        array, kind = stored[name], np.dtype(dtype).kind
        lengths = dict(zip(sides, array.shape, strict=False)) | lengths
        expected = [lengths.get(side, 0) for side in sides]
        if array.dtype.kind not in ("iu" if kind == "i" else kind) or [*array.shape] != expected:
            shape = ", ".join(map(str, expected))
            raise ValueError(f"{name} of dtype {array.dtype} and shape {array.shape}, not ({shape})")
        arrays[name] = array.astype(dtype)
    labels, names = arrays.pop("labels"), tuple(arrays.pop("class_names").tolist())
    unknown = arrays.pop("unknown", None)
    targets: Targets = ClassSets(labels, names, unknown) if several else ClassIndices(labels, names)
    texts = {"split": str(arrays["split"]), "unreadable": tuple(arrays["unreadable"].tolist())}
    return {**arrays, **texts, "targets": targets}
