"""The data of a run, with the splits that the run recorded."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Collection
from pathlib import Path

from vitascope.data.datasets import list_images, open_data
from vitascope.data.split_record import Restored, SplitRecord, restore
from vitascope.data.splits import ImageSet, Splits
from vitascope.errors import UserError

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

        Args:
            class_names: the classes that labels are indices of; None for the run's own.

        Raises:
            UserError: no image is left unchanged, or one has a class of another name.
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


def open_run_data(
    run: Path,
    data: str,
    record: SplitRecord | None,
    *,
    now: str | None = None,
    seed: int,
    labelled: bool,
    check: Collection[str] | None = None,
) -> RunData:
    """Open the data of a run, split as the run recorded it; arguments are as for `Run.open_data`."""
    if record is None:
        where = data if now is None else now
        splits = open_data(where, seed=seed, labelled=labelled)
        note = (
            f"{run}: an older run, without a record of its split: whether the images of {where} are still "
            "those that it was trained and tested on cannot be verified"
        )
        return RunData(splits, None, note)
    where = _find_data(run, data, record) if now is None else now
    restored = restore(record, list_images(where, seed=seed), [record.final] if check is None else check)
    if not any((found >= 0).any() for found in restored.found.values()):
        raise UserError(
            f"{where}: none of the {record.images():,} images that {run} was trained and tested on is there; "
            "these are other data"
        )
    changes = restored.note()
    note = f"{where} has changed since {run} began: {changes}" if changes else ""
    return RunData(restored.as_recorded(), restored, note)


def _find_data(run: Path, data: str, record: SplitRecord) -> str:
    """The run's DATA argument; if it is gone, the same relative to where the run is now."""
    if record.place and not Path(data).expanduser().exists():
        moved = Path(os.path.normpath(run.absolute() / record.place))
        if moved.exists():
            return str(moved)
    return data
