"""`probe`: from bodies and labelled images to the best classifier on frozen features, as a finished run."""

import dataclasses
import os
import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vitascope.analysis.probing.curve import LearningCurve, learning_curve
from vitascope.analysis.probing.page import write_page
from vitascope.analysis.report.write import write_report
from vitascope.arguments import checked
from vitascope.data.datasets import open_data
from vitascope.data.features.cache import Features
from vitascope.data.features.embed import MEMORY_GB, with_progress
from vitascope.data.features.stream import FeatureStream, Indices
from vitascope.data.folds import division_of
from vitascope.data.frames import DataFrame, data_place
from vitascope.data.splits import ImageSet, Splits
from vitascope.data.table_options import AS_RECOGNIZED, TableOptions
from vitascope.data.targets import Targets
from vitascope.errors import UserError
from vitascope.formatting import counted, duration
from vitascope.models.config import ViTConfig
from vitascope.models.decoding import ImageSource
from vitascope.models.engines.compute import DEFAULT, Compute
from vitascope.models.engines.engine import TorchEngine
from vitascope.models.engines.features import FeaturePool, FeatureSpec
from vitascope.models.engines.runtimes import name_of
from vitascope.models.hardware import reuse_freed_memory
from vitascope.models.sizes import ModelConfig, architecture_of, architecture_record
from vitascope.models.vision_model import VisionModel, left_as_it_was
from vitascope.models.weights.identification import reject_model
from vitascope.models.weights.loading import from_pretrained, save_pretrained
from vitascope.models.weights.transfer import check_single
from vitascope.storage import explaining_failure
from vitascope.training.evaluation import calibrate
from vitascope.training.evaluation.calibration import Temperature, mean_loss, sharpness
from vitascope.training.evaluation.measure import Evaluation, data_frame, html_table
from vitascope.training.linear.classifiers import Floats
from vitascope.training.linear.head import headed, representations, with_head
from vitascope.training.linear.selection import (
    SCORES_HEAD,
    Candidate,
    ProbeScore,
    ProbeSelection,
    in_words,
    select,
)
from vitascope.training.run.run import Run, lasting_path, new_run

if TYPE_CHECKING:
    import pandas


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class ProbeResult:
    """A finished probe, and the run of its model."""

    run: Path
    """The run folder: the model, its predictions and report, and `probe.html`."""
    model: VisionModel
    """The body of the best linear classifier, up to its layer, with this classifier as its head."""
    selection: ProbeSelection
    """All classifiers, the best first."""
    curve: LearningCurve
    """Of the best one, with the forecast for more labels."""
    evaluation: Evaluation
    """Of the model, on the test images."""
    calibration: calibrate.CalibrationResult | None
    """What it knows about its answers, by cross-validation; None where an image may have several classes."""
    lines: list[str]
    """For each body, the number of representations and the time for their features."""
    seconds: float
    page: Path
    report: Path
    url: str | None = None
    """Of a run in a store, where it is there; the local copy lasts as long as this result."""

    @property
    def best(self) -> ProbeScore:
        """The classifier of the highest cross-validated accuracy, or mAP."""
        return self.selection.best

    def to_dataframe(self) -> "pandas.DataFrame":
        """All scores as text, one row each, the best first; UserError without pandas."""
        return data_frame(dict(zip(SCORES_HEAD, zip(*self.selection.rows(), strict=True), strict=True)))

    def __repr__(self) -> str:
        return f"ProbeResult({self.url or str(self.run)!r}, {self.best.name}: {in_words(self.best.tested)})"

    def _repr_html_(self) -> str:
        found = {"run": self.url or self.run, "best": self.best.name, "test": in_words(self.best.tested)}
        return html_table(found | {"labels": "; ".join(self.curve.lines()), "page": self.page})


@dataclasses.dataclass(frozen=True, eq=False)
class Body:
    """A model whose representations are compared.

    Attributes:
        name: in the table, different from those of other bodies.
        reference: the MODEL argument; empty for a model of the caller's.
        representations: resolved, or the body's own.
        heads: the configuration of the model that each makes with a head.
    """

    name: str
    reference: str
    model: VisionModel
    representations: list[FeatureSpec]
    heads: list[ModelConfig]


@checked
def probe(
    models: VisionModel | str | os.PathLike[str] | Sequence[VisionModel | str | os.PathLike[str]],
    data: DataFrame | str | os.PathLike[str],
    *,
    run: str | os.PathLike[str] | None = None,
    layers: Sequence[int] | None = None,
    pools: Sequence[FeaturePool] | None = None,
    seed: int = 0,
    table: TableOptions = AS_RECOGNIZED,
    compute: Compute = DEFAULT,
) -> ProbeResult:
    """Find the best classifier on frozen features, as `vitascope probe` does.

    For each body, some layers and poolings, classifiers are compared by cross-validation on the training and
    validation images. The test images are measured once, after the choice; data without a test split are
    tested on their validation images. Images that cannot be read are left out.

    Args:
        models: one or several bodies: MODEL arguments or models, with or without classes.
        data: a DATA argument with labels, or a DataFrame, which the run keeps.
        run: the new run folder, or its URL; None names it after the data, in runs/.
        layers: to compare, in 0 to depth - 1; negative ones count from the last. None: the last one, and the
            one at two thirds of the depth.
        pools: to compare, of `cls`, `mean` and `cls_mean`; None: all that a body has.
        seed: of the splits that the data do not have, and of the folds.
        table: how a table is read.
        compute: how features are computed, as for `embed`.

    Raises:
        UserError: no such model, data, layer or pool; a run folder that exists; one class, or one with fewer
            images than two folds need; features that are not finite, or too many for the memory.
    """
    began = time.monotonic()
    if not 0 <= seed < 2**63:
        raise UserError(f"seed must be in [0, 2**63), not {seed}")
    reject_model(data, "models come first, then the data")
    given = [models] if isinstance(models, VisionModel | str | os.PathLike) else list(models)
    if not given:
        raise UserError("no body to probe: give at least one MODEL")
    if run is not None:
        new_run(run)  # an error comes before anything that takes time
    reuse_freed_memory()
    with ExitStack() as left, data_place(data, table) as place:
        splits = fitting(open_data(place, seed=seed, labelled=True, table=table).identified())
        division_of(splits.train).fold_count()
        for model in given:
            left.enter_context(left_as_it_was(model))
        bodies = _opened(given, layers, pools, splits.train.truth)
        compared = _compared(bodies, splits, compute, seed=seed)
        weights = lasting_path(compared.body.reference) or compared.body.name
        options = {
            "task": "probe",
            "data": place,
            "bodies": [lasting_path(body.reference) or body.name for body in bodies],
            "weights": weights,
            "run": None if run is None else os.fspath(run),
            "layers": layers and list(layers),
            "pools": pools and list(pools),
            **dataclasses.asdict(table),
            "columns": list(table.columns),
            "seed": seed,
            "batch_size": compute.batch_size,
            "precision": compute.precision,
            "device": compute.device,
        }
        created = Run.create(options, compared.plan(), keep_data=isinstance(data, DataFrame))
    return _written(created, compared, splits, device=compute.device, seconds=time.monotonic() - began)


def fitting(splits: Splits) -> Splits:
    """The same images with one part to fit on: cross-validation needs no validation images beside a test."""
    if splits.test is None:
        return splits
    train = dataclasses.replace(splits.train.followed_by(splits.val), name="train")
    return dataclasses.replace(splits, train=train, val=splits.val.subset("val", np.arange(0)))


def _opened(
    given: Sequence[VisionModel | str | os.PathLike[str]],
    layers: Sequence[int] | None,
    pools: Sequence[FeaturePool] | None,
    truth: Targets,
) -> list[Body]:
    """The bodies, with the representations of each and the models that these would make."""
    for option, values in (("layers", layers), ("pools", pools)):
        if values is not None and not len(values):
            raise UserError(f"{option}: none given; name some, or leave the option out")
    found: list[Body] = []
    places: set[str] = set()
    for number, each in enumerate(given, 1):
        if isinstance(each, str | os.PathLike):
            reference = os.fspath(each)
            if (place := lasting_path(reference)) in places:
                raise UserError(f"{reference} is given more than once; give each body once")
            places.add(place)
            model = from_pretrained(each)
            name = name_of(reference)
        else:
            model, reference = each, ""
            name = architecture_of(model.config) or f"model {number}"
        if name in (body.name for body in found):
            name = reference or f"{name}, model {number}"
        check_single(reference or name, model.config)
        with naming_body(name):
            specs = representations(model.config, layers, pools)
            heads = [headed(model.config, spec, truth.class_names, truth.outputs) for spec in specs]
        found.append(Body(name, reference, model, specs, heads))
    return found


@contextmanager
def naming_body(body: str) -> Iterator[None]:
    """Name the body in errors about it."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{body}: {error}") from error


def _features(
    body: Body, sources: Sequence[ImageSource], compute: Compute, room: float
) -> tuple[Indices, list[Features], FeatureStream]:
    """The images that can be read, their features of each representation, and where these come from.

    Raises:
        UserError: more than `room` GB of features; features that are not finite.
    """
    engine = TorchEngine(body.model, precision=compute.precision, device=compute.device)
    stream = FeatureStream(engine, body.representations, sources, compute)
    blocks = []
    with naming_body(body.name), closing(with_progress(stream)) as rows:
        for block in rows:
            width = sum(features.shape[1] for features in block.features)
            if (size := 4e-9 * len(sources) * width) > room:
                raise UserError(
                    f"{len(body.representations)} representations of {len(sources):,} images take "
                    f"{size:,.1f} GB, and {room:,.1f} of {MEMORY_GB:g} GB are left: name fewer layers, "
                    "pools or bodies, or give fewer images"
                )
            blocks.append(block)
    indices = np.concatenate([block.indices for block in blocks])
    columns = zip(*(block.features for block in blocks), strict=True)
    return indices, [np.concatenate(column) for column in columns], stream


@dataclasses.dataclass(frozen=True, eq=False)
class _Comparison:
    """All classifiers, and the model that the best linear one makes of a body."""

    selection: ProbeSelection
    curve: LearningCurve
    known: ImageSet
    """The images that can be read, to fit on."""
    body: Body
    model: VisionModel
    evaluation: Evaluation
    calibration: calibrate.CalibrationResult | None
    """Where one class applies."""
    lines: list[str]
    """One about each body."""

    def plan(self) -> dict[str, Any]:
        """For the run's `plan.json`: the model, and what the data have chosen."""
        linear = self.selection.linear
        return {
            "asked": {},
            "model": architecture_record(self.model.config),
            "chosen": {"representation": linear.candidate.place, "classifier": linear.name},
            "reason": f"the best cross-validated linear classifier of {len(self.selection.scores)}, "
            f"{in_words(linear.validated)}",
            "note": "",
        }


def _compared(bodies: Sequence[Body], splits: Splits, compute: Compute, *, seed: int) -> _Comparison:
    train, test = splits.train, splits.measured
    sources = [*train.sources, *test.sources]
    candidates: list[Candidate] = []
    heads: list[tuple[Body, ModelConfig]] = []  # of each candidate
    readable, unreadable, lines, room = np.arange(0), tuple[str, ...](), list[str](), MEMORY_GB
    for number, body in enumerate(bodies):
        started = time.monotonic()
        indices, features, stream = _features(body, sources, compute, room)
        if number == 0:
            readable, unreadable = indices, stream.faults.left_out
        elif not np.array_equal(indices, readable):
            raise UserError(
                f"{body.name} can read {len(indices):,} of the images, {bodies[0].name} {len(readable):,}: "
                "leave out the images that not all bodies can read"
            )
        room -= sum(vectors.nbytes for vectors in features) / 1e9
        fits = readable < len(train)
        for spec, head, vectors in zip(body.representations, body.heads, features, strict=True):
            place = _in_table(body.model.config, spec)
            candidates.append(Candidate(body.name, *place, vectors[fits], vectors[~fits]))
            heads.append((body, head))
        lines.append(
            f"{body.name}: {counted(len(features), 'representation')} of {counted(len(readable), 'image')}, "
            f"{stream.computed:,} computed now, {duration(time.monotonic() - started)}{_seen(body, splits)}"
        )
    tested = readable[~fits] - len(train)
    known, measured = train.subset("train", readable[fits]), test.subset(test.name, tested)
    division = division_of(known)
    selection = select(candidates, division, measured.truth, seed=seed)
    best, linear = selection.best, selection.linear
    body, head = next(
        own for own, candidate in zip(heads, candidates, strict=True) if candidate is linear.candidate
    )
    model, probabilities = _model(linear, body, head, known.truth)
    calibration = _calibrated(model, selection, known, compute) if known.truth.trusted else None
    familiarity = None if model.trust is None else model.trust.familiarity
    tested_features = torch.from_numpy(linear.candidate.test)
    evaluation = Evaluation(
        split=measured.name,
        indices=tested,
        targets=measured.truth,
        probabilities=probabilities.astype(np.float32),
        thresholds=measured.truth.thresholds(model.config.thresholds),
        loss=mean_loss(measured.truth, measured.truth.logits(probabilities)),
        familiarity=None if familiarity is None else familiarity(tested_features).numpy(),
        sets=None if model.trust is None else model.trust.sets,
        unreadable=unreadable,
    )
    curve = learning_curve(best.classifier, best.candidate.train, division, selection.folds, seed=seed)
    return _Comparison(selection, curve, known, body, model, evaluation, calibration, lines)


def _written(run: Run, compared: _Comparison, splits: Splits, *, device: str, seconds: float) -> ProbeResult:
    try:
        advice = "make room, then run the same command again; the features in the cache are kept"
        with explaining_failure(run.path, "the finished model", advice):
            run.record_split(splits)
            writer = run.write_metrics()
            for novelty in compared.calibration.novelties if compared.calibration is not None else ():
                writer.record("novelty", 0, novelty.to_dict())
            writer.record("test", 0, {**compared.evaluation.summary(), "seconds": round(seconds, 2)})
            writer.close()
            run.save_predictions(compared.evaluation)
            save_pretrained(compared.model, run.model_folder)
    except BaseException:
        shutil.rmtree(run.path)
        raise
    later = (
        f"the model is saved: make room, then run `vitascope report {shlex.quote(str(run.path))}`, or the "
        "same command with another --run for probe.html too"
    )
    with run.named(), explaining_failure(run.path, "the pages", later):
        try:
            page = write_page(
                run, compared.selection, compared.curve, compared.known, compared.model, compared.lines
            )
            report = write_report(run, splits=splits, device=device)
            if run.store is not None:
                run.store.finish("copy it there, or run the same command with another --run")
        except KeyboardInterrupt:
            shutil.rmtree(run.path)  # so that the same command, with the cached features, makes it whole
            raise
    result = ProbeResult(
        run=run.path,
        model=compared.model.cpu(),
        selection=compared.selection,
        curve=compared.curve,
        evaluation=compared.evaluation,
        calibration=compared.calibration,
        lines=compared.lines,
        seconds=seconds,
        page=page,
        report=report,
        url=run.url,
    )
    if run.store is not None:
        run.store.remove_with(result)
    return result


def _seen(body: Body, splits: Splits) -> str:
    """The doubt about a body that was trained on these images; empty for others."""
    run = Run.of_model(body.reference) if body.reference else None
    if run is None:
        return ""
    record = run.split_record()
    count = sum(int(record.trained_on(images).sum()) for images in (splits.train, splits.measured))
    trained = f"; it was trained on {counted(count, 'image')} of them, so cross-validation and forecast"
    return f"{trained} are too good" if count else ""


def _in_table(config: ModelConfig, spec: FeatureSpec) -> tuple[str, str]:
    """A representation's layer and pooling."""
    if not isinstance(config, ViTConfig):
        return "", "own"
    if spec.layer is None:
        return str(config.depth - 1), config.readout.pool
    return str(spec.layer), str(spec.pool)


def _model(score: ProbeScore, body: Body, config: ModelConfig, truth: Targets) -> tuple[VisionModel, Floats]:
    """The model with a linear classifier as its head, and its probabilities of the test images, (M, K).

    Its logits are scaled, see `sharpness`: least squares and class means have no confidence of their own.
    """
    assert score.head is not None
    weight, bias = score.head
    factor = sharpness(truth, truth.logits(score.held_out))
    thresholds = truth.tuned_thresholds(truth.sharpened(score.held_out, factor))
    model = with_head(body.model, config.replace(thresholds=thresholds), factor * weight, factor * bias)
    return model, truth.sharpened(score.probabilities, factor)


def _calibrated(
    model: VisionModel, selection: ProbeSelection, known: ImageSet, compute: Compute
) -> calibrate.CalibrationResult:
    """Set what the model knows about its answers, by cross-validation; its head has its temperature."""
    score, targets = selection.linear, selection.train.targets
    factor = sharpness(targets, targets.logits(score.held_out))
    temperature = Temperature(np.full(len(targets.class_names), 1 / factor), len(targets), out_of_fold=True)
    held_out = targets.sharpened(score.held_out, factor)
    some = calibrate.images_to_know(known)
    features = torch.from_numpy(score.candidate.train[some])
    likeness = calibrate.cross_fitted(features, targets.labels[some], selection.folds[some])
    engine = TorchEngine(model, precision="fp32", device=compute.device)
    model.trust = calibrate.trust_of(temperature, held_out, targets.labels, likeness)
    return calibrate.CalibrationResult(
        temperature, model.trust.lacks(), calibrate.novelties_of(engine, likeness)
    )
