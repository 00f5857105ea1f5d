"""From a model and pictures to those that are to be labelled next, as `vitascope next` prints them."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np

from vitascope.analysis.labelling.order import Mask, next_pictures
from vitascope.arguments import Range, checked
from vitascope.data.contents import UNREADABLE
from vitascope.data.duplicates import groups_of, near_duplicates
from vitascope.data.features.embed import Data, Model, embed, opened_images
from vitascope.data.looks import look_at
from vitascope.data.reading import Faults
from vitascope.data.splits import ImageSet
from vitascope.data.table_options import AS_RECOGNIZED, TableOptions
from vitascope.errors import UserError
from vitascope.models.engines.compute import DEFAULT, Compute
from vitascope.models.weights.identification import reject_model
from vitascope.training.run.run import Run


@dataclasses.dataclass(frozen=True, kw_only=True)
class PicturesToLabel:
    """The pictures to label next, in their order.

    Attributes:
        rows: of each picture its path, `image`, the `reason` in words, and the paths of its `copies`.
        images: the number of readable pictures in the data.
        labelled: how many of them have a label in the run already, or are near-copies of such pictures.
        unreadable: why others could not be read.
    """

    rows: Sequence[Mapping[str, Any]]
    images: int
    labelled: int
    unreadable: tuple[str, ...] = ()


@checked
def pictures_to_label(
    model: Model,
    data: Data,
    *,
    count: Annotated[int, Range(ge=1)] = 50,
    seed: Annotated[int, Range(ge=0, lt=2**63)] = 0,
    table: TableOptions = AS_RECOGNIZED,
    compute: Compute = DEFAULT,
) -> PicturesToLabel:
    """Choose the pictures whose labels tell the most, as `vitascope next` does.

    The images that have a label in a run, and their near-copies, are not offered.

    Args:
        model: as for `embed`; its head is not used.
        data: a DATA argument or a DataFrame; labels and names of folders are not read.
        count: the most pictures.
        seed: of k-means.
        table: how a table is read.
        compute: how features are computed, as for `embed`.

    Raises:
        UserError: as `embed`.
    """
    reject_model(data, "the model comes first, then the data")
    run = Run.of_model(model) if isinstance(model, str | os.PathLike) else None
    with opened_images(data, table) as everything:
        looks = look_at(everything)
        readable = np.flatnonzero(looks["width"])
        reasons = [
            f"{everything.names[n]}: {looks['reason'][n]}" for n in np.flatnonzero(looks["width"] == 0)
        ]
        Faults.of(len(looks), reasons).check_some()
        images = ImageSet("all", everything).subset("all", readable)
        embeddings = embed(model, images.sources, compute=compute)
        if embeddings.unreadable:
            raise UserError(f"{embeddings.unreadable[0]}; it was readable before: repair or remove the image")
        groups = groups_of(near_duplicates(looks[readable], embeddings.features), len(readable))
        labelled, labels = (np.zeros(len(readable), np.bool_), 0) if run is None else _labelled(run, images)
        chosen = next_pictures(
            embeddings.features, count, labelled=labelled, labels=labels, groups=groups, seed=seed
        )
        names = [everything.names[n] for n in readable.tolist()]
    return PicturesToLabel(
        rows=[
            {"image": names[one.index], "reason": one.reason, "copies": [names[copy] for copy in one.copies]}
            for one in chosen
        ],
        images=len(readable),
        labelled=int(np.isin(groups, groups[labelled]).sum()),
        unreadable=tuple(reasons),
    )


def _labelled(run: Run, images: ImageSet) -> tuple[Mask, int]:
    """Whether each image has the content of an image that had a label in the run, (N,), and their number."""
    parts = [part for _, part, _ in run.split_record().lines() if part.targets is not None]
    contents = np.concatenate([np.array([], "S1"), *(part.contents for part in parts)])
    known = np.isin(images.identified().contents, contents[contents != UNREADABLE])
    return known, len(contents)
