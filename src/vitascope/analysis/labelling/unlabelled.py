"""From a model and pictures to those that are to be labelled next, as `vitascope next` prints them."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import torch

from vitascope.analysis.labelling.order import Features, Mask, Opinion, next_pictures
from vitascope.arguments import Range, checked
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
from vitascope.models.engines.selection import AUTO
from vitascope.models.vision_model import left_as_it_was
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

    A run has classes that were learned from labels, so it tells what it is unsure of, and its images are not
    offered. Another MODEL is a body: its classes, such as those of `cifar10`, are not the wanted ones.

    Args:
        model: a MODEL (run folder, model folder or file, hub id), an exported file of features, or a model.
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
    with left_as_it_was(model), opened_images(data, table) as everything:
        engine = as_engine(model, precision=compute.precision, device=compute.device)
        looks = look_at(everything)
        readable = np.flatnonzero(looks["width"])
        reasons = [
            f"{everything.names[n]}: {looks['reason'][n]}" for n in np.flatnonzero(looks["width"] == 0)
        ]
        Faults.of(len(looks), reasons).check_some()
        images = ImageSet("all", everything).subset("all", readable)
        own = dataclasses.replace(compute, precision="auto", device="auto")  # of the engine
        embeddings = embed(engine, images.sources, compute=own)
        if embeddings.unreadable:
            raise UserError(f"{embeddings.unreadable[0]}; it was readable before: repair or remove the image")
        groups = groups_of(near_duplicates(looks[readable], embeddings.features), len(readable))
        labelled = np.zeros(len(readable), np.bool_) if run is None else _labelled(run, images)
        opinion = None if run is None else _opinion(engine, embeddings.features)
        chosen = next_pictures(
            embeddings.features, count, labelled=labelled, opinion=opinion, groups=groups, seed=seed
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


def _labelled(run: Run, images: ImageSet) -> Mask:
    """Whether each image has the content of an image that had a label in the run, (N,)."""
    record = run.split_record()
    splits = {name for name, part, _ in record.lines() if part.targets is not None}
    identified = images.identified()
    return np.logical_or.reduce([record.among(identified, split) for split in splits or {"train"}])


def _opinion(engine: Engine, features: Features) -> Opinion | None:
    """What the classifier of a run says of images with features (N, D); None for a run without classes."""
    if not isinstance(engine, TorchEngine) or not engine.num_classes:
        return None
    answers = engine.answers_of(torch.from_numpy(features).to(engine.device))
    familiarity, unfamiliar = answers.familiarity, None
    if familiarity is not None and not AUTO.unchecked(engine):
        verdicts = AUTO.judged(engine, answers.probabilities.cpu(), familiarity.cpu())
        unfamiliar = np.array([verdict.unknown == "unfamiliar" for verdict in verdicts])
    names = [engine.label(k) for k in range(engine.num_classes)]
    return Opinion(answers.probabilities.cpu().numpy(), names, engine.thresholds, unfamiliar)
