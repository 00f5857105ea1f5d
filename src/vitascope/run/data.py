"""The data of a run, with the splits that the run recorded."""

from __future__ import annotations

import dataclasses
import logging

from vitascope.data.split_record import Restored
from vitascope.data.splits import ImageSet, Splits

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class RunData:
    """The data of a run, opened again.

    Attributes:
        splits: as in training; an image that no longer exists is replaced by a `Gone`.
        restored: how the images were found. None for a run without a record of its split, whose `splits` are
            those that its data and seed give now.
        note: one line about what differs, or why this is unknown; empty if nothing differs.
    """

    splits: Splits
    restored: Restored | None
    note: str

    def test_images(self, class_names: tuple[str, ...] | None = None) -> ImageSet:
        """The unchanged images among those that the run's model is measured on.

        Labels are indices into `class_names`, by default the run's. It is a `UserError` if no image is left
        unchanged, or one has a class of another name.
        """
        final = self.splits.final
        if self.restored is None:
            return final
        names = final.class_names if class_names is None else class_names
        images = self.restored.present(self.restored.record.final, names)
        if len(images) < len(final):
            log.warning(
                "measured on %s of the run's %s %s images: those that are there unchanged",
                f"{len(images):,}",
                f"{len(final):,}",
                images.name,
            )
        return images
