"""From a model and pictures to those that are to be labelled next, as `vitascope next` prints them."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Annotated, Any

import numpy as np
import torch

from vitascope.analysis.labelling.order import UNSURE, Features, Floats, Mask, doubts, next_pictures
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
from vitascope.models.engines.engine import Engine, TorchEngine
from vitascope.models.engines.runtimes import as_engine
from vitascope.models.vision_model import left_as_it_was
from vitascope.models.weights.identification import reject_model
from vitascope.training.run.run import Run


@dataclasses.dataclass(frozen=True, kw_only=True)
class PicturesToLabel:
    """The pictures to label next, in their order."""

    rows: Sequence[Mapping[str, Any]]
    """Of each its path, `image`, the `reason` in words, and the paths of its `copies`."""
    images: int
    """The readable pictures of the data."""
    labelled: int
    """Those of them that have a label in the run, or are near-copies of such pictures."""
    unreadable: tuple[str, ...] = ()


@checked
def pictures_to_label(
    model: Model,
    data: Data,
    *,
    count: Annotated[int, Range(ge=1)] = 50,
    table: TableOptions = AS_RECOGNIZED,
    compute: Compute = DEFAULT,
) -> PicturesToLabel:
    """Choose the pictures whose labels tell the most, as `vitascope next` does.

    Images that have a label in a run, and their near-copies, are not offered, and the run tells what it is
    unsure of. Of another MODEL, such as `cifar10`, the head is not used: its classes are others.

    Args:
        model: as for `embed`.
        data: a DATA argument or a DataFrame; labels and names of folders are not read.
        count: the most pictures.
        table: how a table is read.
        compute: how features are computed, as for `embed`.

    Raises:
        UserError: as `embed`.
    """
    reject_model(data, "the model comes first, then the data")
    run = Run.of_model(model) if isinstance(model, str | os.PathLike) else None
    with ExitStack() as opened:
        opened.enter_context(left_as_it_was(model))
        engine = as_engine(model, precision=compute.precision, device=compute.device)
        everything = opened.enter_context(opened_images(data, table))
        looks = look_at(everything)
        readable = np.flatnonzero(looks["width"])
        unread = np.flatnonzero(looks["width"] == 0)
        reasons = [f"{everything.names[n]}: {looks['reason'][n]}" for n in unread]
        Faults.of(len(looks), reasons).check_some()
        images = ImageSet("all", everything).subset("all", readable)
        own = dataclasses.replace(compute, precision="auto", device="auto")  # of the engine
        embeddings = embed(engine, images.sources, compute=own)
        features = embeddings.features
        margins, words = (None, []) if run is None else _doubts(engine, features)
        if embeddings.unreadable:
            raise UserError(f"{embeddings.unreadable[0]}; it was readable before: repair or remove the image")
        groups = groups_of(near_duplicates(looks[readable], features), len(readable))
        labelled, labels = (np.zeros(len(readable), np.bool_), 0) if run is None else _labelled(run, images)
        chosen = next_pictures(
            features, count, labelled=labelled, labels=labels, margins=margins, groups=groups
        )
        names = [everything.names[n] for n in readable.tolist()]
    return PicturesToLabel(
        rows=[
            {
                "image": names[one.index],
                "reason": words[one.index] if one.reason == UNSURE else one.reason,
                "copies": [names[copy] for copy in one.copies],
            }
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


def _doubts(engine: Engine, features: Features) -> tuple[Floats | None, list[str]]:
    """The margins of pictures with features (N, D), (N,), and the two most probable classes in words, by the
    head of a run that predicts one class of several; else None."""
    if not isinstance(engine, TorchEngine) or engine.num_classes < 2 or engine.thresholds:
        return None, []
    with torch.inference_mode():
        logits = engine.model.head(torch.from_numpy(features).to(engine.device)).float()
    probabilities = logits.softmax(dim=1).cpu()
    top = probabilities.topk(2, dim=1).values
    words = doubts(probabilities.numpy(), [engine.label(k) for k in range(engine.num_classes)])
    return (top[:, 0] - top[:, 1]).double().numpy(), words
