"""Predictions of a finished classifier, as the run keeps them."""

from __future__ import annotations

import dataclasses
import zipfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vitascope.errors import UserError
from vitascope.run.measures import Score, confusion_matrix, score_of
from vitascope.storage import replacing


@dataclasses.dataclass(frozen=True)
class Predictions:
    """Predictions on the split that a finished classifier is measured on.

    Attributes:
        split: the split's name.
        class_names: of the K classes.
        indices: indices in the split of the N images that could be read, int64 (N,).
        labels: their true classes, int64 (N,).
        probabilities: of the classes, float32 (N, K).
        unreadable: one line per image that could not be read: its path and the reason.
    """

    split: str
    class_names: tuple[str, ...]
    indices: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    probabilities: npt.NDArray[np.float32]
    unreadable: tuple[str, ...] = ()

    @property
    def classes(self) -> npt.NDArray[np.int64]:
        """The predicted class of each image, (N,): the most probable one."""
        return self.probabilities.argmax(axis=1)

    @property
    def confidences(self) -> npt.NDArray[np.float32]:
        """The probability of the predicted class, (N,)."""
        return self.probabilities.max(axis=1)

    @property
    def correct(self) -> npt.NDArray[np.bool_]:
        """Whether the predicted class is the true one, (N,)."""
        return self.classes == self.labels

    @property
    def score(self) -> Score:
        """The accuracy with its interval, and the numbers to compare it with."""
        return score_of(self.labels, self.probabilities)

    @property
    def confusion(self) -> npt.NDArray[np.int64]:
        """Counts (K, K): rows are true classes, columns are predicted classes."""
        return confusion_matrix(self.labels, self.classes, len(self.class_names))

    def save(self, path: Path) -> None:
        """Write an .npz file, whole or not at all; texts are NumPy's, so that nothing is pickled."""
        with replacing(path) as aside, aside.open("wb") as file:
            np.savez_compressed(
                file,
                split=np.array(self.split),
                class_names=np.array(self.class_names, dtype=np.str_),
                indices=self.indices,
                labels=self.labels,
                probabilities=self.probabilities,
                unreadable=np.array(self.unreadable, dtype=np.str_),
            )

    @classmethod
    def load(cls, path: Path) -> Predictions:
        """Read an .npz file; a broken one is a `UserError`."""
        try:
            with np.load(path, allow_pickle=False) as stored:
                return cls(
                    split=str(stored["split"]),
                    class_names=tuple(stored["class_names"].tolist()),
                    indices=stored["indices"],
                    labels=stored["labels"],
                    probabilities=stored["probabilities"],
                    unreadable=tuple(stored["unreadable"].tolist()),
                )
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            # NumPy takes any other file for a pickle and advises to trust it; this advice is cut off.
            reason = str(error).split(". If you trust")[0]
            raise UserError(
                f"{path} is broken ({reason}); remove it to get a report without predictions"
            ) from error
