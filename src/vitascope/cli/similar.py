"""`vitascope similar`: the images of DATA that are most similar to a picture."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from vitascope.cli.exits import exit_if_left_out
from vitascope.cli.features import Representation, exiting_with_cache
from vitascope.cli.parsing import Json, Model, arguments_of
from vitascope.data.table_options import DataOptions, TableOptions
from vitascope.errors import UserError, printable
from vitascope.formatting import aligned, counted
from vitascope.models.engines.compute import Compute
from vitascope.storage import explaining_failure

if TYPE_CHECKING:
    from vitascope.analysis.similar import SimilarPictures


@dataclasses.dataclass(frozen=True, kw_only=True)
class Similar:
    """Find the images that are most similar to a picture, or to words.

    The similarity is the cosine of their features, from -1 to 1.

    Computed features are cached: the next search in DATA takes them from there.
    """

    model: Model
    """A run folder, a model folder or file, or a hub id."""
    picture: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="PICTURE")]]
    """An image file; with a CLIP or SigLIP, also words, such as "a red car"."""
    data: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="DATA")]]
    """A folder of images, a table, another DATA, or a file of `vitascope embed`."""
    k: Annotated[int, tyro.conf.arg(aliases=["-k"])] = 12
    """The most images to find."""
    out: Path | None = None
    """Draw the picture and the images that are found, in this PNG; an existing file is replaced."""
    json: Json = False
    representation: Representation = dataclasses.field(default_factory=Representation)
    """What is read of the model."""
    table: DataOptions = dataclasses.field(default_factory=TableOptions)
    """How DATA are read."""
    compute: Compute = dataclasses.field(default_factory=Compute)
    """How images are read and features computed."""

    def call(self) -> None:
        """Search, print the table, and draw."""
        from vitascope.analysis.similar import similar

        if self.out is not None:
            self._check(self.out)
        with exiting_with_cache(self.compute):
            options = arguments_of(self, "out", "json", "representation")
            found = similar(**options, **dataclasses.asdict(self.representation))
        if self.out is not None:
            from vitascope.analysis.explain.plots import save_figure

            with explaining_failure(self.out, "the picture", "choose another place"):
                save_figure(found.draw(), self.out)
        if self.json:
            counts = {
                "images": found.compared,
                "unreadable": len(found.unreadable),
                "computed": found.computed,
            }
            out = {} if self.out is None else {"out": os.fspath(self.out)}
            print(json.dumps({"picture": self.picture, **counts, "nearest": found.rows(), **out}))
        else:
            print("\n".join(self._lines(found)))
        exit_if_left_out(found.compared, found.unreadable)

    def _check(self, out: Path) -> None:
        """Reject a file that is no PNG, is the picture, or would belong to DATA the next time."""
        if out.suffix.lower() != ".png":
            raise UserError(f"--out {out}: the picture is a PNG file, so the name has to end in .png")
        if out.exists() and os.path.exists(self.picture) and out.samefile(self.picture):
            raise UserError(f"--out {out} is the PICTURE, which would be lost; give another name")
        if os.path.isdir(self.data) and out.resolve().is_relative_to(Path(self.data).resolve()):
            raise UserError(f"--out {out} would be an image of {self.data}; choose another folder")

    def _lines(self, found: SimilarPictures) -> list[str]:
        """The table without columns that say nothing, the counts, and the file."""
        columns = ["rank", "similarity", "label", "split", "image"]
        if found.labels is None:
            columns.remove("label")
        if set(found.splits.tolist()) == {"all"}:
            columns.remove("split")
        rows = [[_cell(row[column]) for column in columns] for row in found.rows()]
        left = {place for place, column in enumerate(columns) if column in ("label", "split", "image")}
        lines = list(aligned([columns, *rows], left))
        lines.append(f"{counted(found.compared, 'image')} compared, {found.computed:,} of them computed now")
        return lines if self.out is None else [*lines, os.fspath(self.out)]


def _cell(value: float | int | str) -> str:
    return f"{value:z.4f}" if isinstance(value, float) else printable(str(value), 200)
