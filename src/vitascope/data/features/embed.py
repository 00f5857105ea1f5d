"""`embed`: the features of images of any number, in memory or in a file."""

import dataclasses
import functools
import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from tqdm import tqdm

from vitascope._version import __version__
from vitascope.arguments import check_value, checked
from vitascope.data.all_images import AllImages, all_images
from vitascope.data.datasets import stream_of_folder
from vitascope.data.features import embedding_file
from vitascope.data.features.cache import Features
from vitascope.data.features.stream import BATCH_SIZE, BLOCK, FeatureRows, FeatureStream, Indices
from vitascope.data.frames import DataFrame, data_place
from vitascope.data.reading import Faults
from vitascope.data.rows.cells import escaped
from vitascope.data.rows.on_ray import RayLoop, connected
from vitascope.data.rows.parts import (
    Images,
    PartRows,
    Parts,
    PartTask,
    are_listed,
    computed,
    job_exists,
    parts_folder,
)
from vitascope.data.table_options import AS_RECOGNIZED, TableOptions
from vitascope.data.targets import ClassIndices, ClassSets, Targets
from vitascope.errors import UserError
from vitascope.formatting import SEPARATOR, counted
from vitascope.models.decoding import ImageSource
from vitascope.models.engines.compute import DEFAULT, Compute
from vitascope.models.engines.engine import Engine
from vitascope.models.engines.features import FeaturePool, FeatureSpec
from vitascope.models.engines.runtimes import as_engine
from vitascope.models.hardware import reuse_freed_memory
from vitascope.models.vision_model import VisionModel, left_as_it_was
from vitascope.models.weights.identification import reject_model
from vitascope.remote import StoredImage, source_at
from vitascope.remote.outputs import Output
from vitascope.storage import check_local, explaining_failure

MEMORY_GB = 4.0
"""Features that are held in memory; more have to go into a file."""

Model = Engine | VisionModel | str | os.PathLike[str]
Data = DataFrame | str | os.PathLike[str] | Sequence[ImageSource]


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Embeddings(embedding_file.OfImages):
    """Features of N images, with what is known of each image, and of how they were made."""

    made: dict[str, Any]
    """`model`, its name; `digest`, SHA-256 of the weights and options below the head; `layer`, `pool`,
    `preprocess` and `precision`; `file`, SHA-256 of the exported file if one computed them; `class_names`;
    `several`, whether an image may have several classes; and the versions of `vitascope` and `torch`."""
    unreadable: tuple[str, ...] = ()
    """Why images could not be read, which are left out."""
    computed: int = 0
    """The number of images whose features were not in the cache."""
    kept: tuple[embedding_file.EmbeddingColumns, Features] | Path
    """The images and their features, or the file that has them, which is read on first use."""
    count: int
    """N."""

    def __len__(self) -> int:
        return self.count

    @functools.cached_property
    def columns(self) -> embedding_file.EmbeddingColumns:  # type: ignore[override]
        """The names, labels and splits of the images; raises as `features`."""
        return embedding_file.read_columns(self.kept)[0] if isinstance(self.kept, Path) else self.kept[0]

    @functools.cached_property
    def features(self) -> Features:
        """float32 (N, D).

        Raises:
            UserError: a damaged file.
        """
        features = embedding_file.read_features(self.kept) if isinstance(self.kept, Path) else self.kept[1]
        self._check_count(len(features))
        return features

    def blocks(self) -> Iterator[Features]:
        """The features, up to `BLOCK` images at a time; those of a file are read as they are taken.

        Raises:
            UserError: a damaged file.
        """
        if not isinstance(self.kept, Path):
            yield from (self.features[start : start + BLOCK] for start in range(0, len(self), BLOCK))
            return
        count = 0
        for features in embedding_file.read_blocks(self.kept, BLOCK):
            count += len(features)
            yield features
        self._check_count(count)

    def _check_count(self, features: int) -> None:
        """Reject features of a file that are not of as many images as it names."""
        if features != len(self):
            raise UserError(f"{self.kept}: {features:,} features of {counted(len(self), 'image')}")

    @property
    def targets(self) -> Targets | None:
        """The labels as indices into `class_names`, or as sets of classes; None without labels.

        Raises:
            UserError: some images have no label.
        """
        if self.labels is None:
            return None
        texts, names = self.labels.tolist(), tuple(self.made["class_names"])
        if self.made["several"]:
            return ClassSets.of_names([tuple(filter(None, text.split(SEPARATOR))) for text in texts], names)
        if without := texts.count(""):
            raise UserError(f"{without:,} of {counted(len(self), 'image')} have no label: leave them out")
        return ClassIndices.of_names([(text,) for text in texts], names)

    def subset(self, rows: npt.ArrayLike) -> "Embeddings":
        """Some of the images, by their indices or by a mask bool (N,)."""
        chosen = np.asarray(rows)
        return Embeddings.of_parts([(self.columns.subset(chosen), self.features[chosen])], self.made)

    def check_model(self, model: Engine | VisionModel | str | os.PathLike[str]) -> None:
        """Reject a model with another body than the one that these features are of.

        A file of `export(..., features=True)` has the body of its model: their features differ by rounding.

        Raises:
            UserError: another body; also as `from_pretrained`.
        """
        engine = model if isinstance(model, Engine) else as_engine(model, device="cpu")
        if engine.body_digest != self.made["digest"]:
            raise UserError(
                f"these features are of {self.made['model'] or 'a model'} ({self.made['digest'][:12]}), not "
                f"of {engine.name or 'this model'} ({engine.body_digest[:12]}): embed the images with it"
            )

    @classmethod
    def of_parts(cls, parts: Sequence[embedding_file.Part], made: dict[str, Any]) -> Self:
        """Join parts, at least one."""
        columns = embedding_file.EmbeddingColumns.joined([columns for columns, _ in parts])
        features = np.concatenate([features for _, features in parts])
        return cls(kept=(columns, features), made=made, count=len(columns))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Open a file of `vitascope embed`.

        Raises:
            UserError: no such file, or another one.
        """
        path = Path(path)
        columns, made = embedding_file.read_columns(path)
        with embedding_file.explaining_damage(path):
            for name, kind in _MADE.items():
                check_value(f"{path}: {name}", made[name], kind)
        return cls(made=made, kept=path, count=len(columns))

    def __repr__(self) -> str:
        name, spec = self.made["model"] or "a model", FeatureSpec(self.made["layer"], self.made["pool"])
        return f"Embeddings({counted(len(self), 'image')}; {name}, {spec})"


_MADE: dict[str, Any] = {
    "model": str,
    "digest": str,
    "layer": int | None,
    "pool": FeaturePool | None,
    "preprocess": Mapping,
    "precision": str,
    "class_names": tuple[str, ...],
    "several": bool,
}
"""What a file has to say of its features, with the types."""


@checked
def embed(
    model: Model,
    data: Data,
    *,
    out: str | os.PathLike[str] | None = None,
    layer: int | None = None,
    pool: FeaturePool | None = None,
    table: TableOptions = AS_RECOGNIZED,
    compute: Compute = DEFAULT,
    ray: str | None = None,
) -> Embeddings:
    """Compute the features of images, as `vitascope embed` does.

    Without layer and pool they are those of `model.embed`. Computed features are cached, so a repeated call
    continues an interrupted one. Images that cannot be read are left out, and listed in `unreadable`.

    Args:
        model: a MODEL (run folder, model folder or file, hub id), an exported file of features, a model, or
            an `Engine`.
        data: a DATA argument, with or without labels, all its images; an image file, a list of pictures, or a
            DataFrame.
        out: a new file that ends in `.npz`, `.npy` (with a `.json` beside it) or `.parquet`, for any number
            of images, or its URL in a store. None returns up to 4 GB of features in memory.
        layer: whose output is read, under the model's final norm, in 0 to depth - 1; negative counts from
            the last.
        pool: `cls`, the class token; `mean`, the mean of the patches; `cls_mean`, both. None with a layer:
            that of the model where it is one of these, else `mean`.
        table: how a table is read.
        compute: batch size, reading processes, precision, device and cache.
        ray: compute on the workers of Ray, into `out`, in parts that a repeated call continues, and without
            the cache: `auto` for the cluster of this machine, `HOST:PORT`, or `local` for this machine alone.

    Raises:
        UserError: no such model, data, layer or pool; a file that exists or cannot be written; more features
            than fit into memory; features that are not finite; no image that can be read; with `ray`, images
            that are no files, no cluster, or no Ray.
    """
    if ray is not None and (out is None or isinstance(model, Engine)):
        raise UserError("on Ray, features go into a file, out, and the model is a MODEL or in torch")
    reject_model(data, "the model comes first, then the data")
    spec = FeatureSpec(layer, pool)
    if ray is not None:
        assert out is not None
        check_local(Path(out))
        embedding_file.check_out(Path(out))
        with connected(ray), left_as_it_was(model), _listed(data, table) as listed:
            place = model if isinstance(model, VisionModel) else os.fspath(model)  # type: ignore[arg-type]
            loop = RayLoop(place, compute.precision, compute.device)
            return _embed_in_parts(Path(out), loop, listed, spec, compute)
    output = None if out is None else Output(out, afresh=True)
    if output is not None:
        with output.named():
            embedding_file.check_out(output.path)
        if job_exists(output.path):
            folder = parts_folder(output.path)
            raise UserError(f"{folder} exists: continue it on Ray, remove it, or choose another file")
    reuse_freed_memory()
    with left_as_it_was(model), opened_images(data, table) as everything, ExitStack() as opened:
        engine = as_engine(model, precision=compute.precision, device=compute.device)
        stream = FeatureStream(engine, [spec], everything, compute)
        made = _made(stream, everything)
        # Closed at once after a failure to write too, so that the cache gets what was computed.
        parts = opened.enter_context(closing(_parts(stream, everything, in_memory=output is None)))
        if output is None:
            found = Embeddings.of_parts(list(parts), made)
        else:
            kept = "the features in the cache are kept" if compute.cache else "nothing is kept"
            advice = f"choose a file on another disk; {kept}"
            with output.named(), explaining_failure(output.path, "the features", advice):
                count = embedding_file.write_embeddings(output.path, parts, len(everything), made)
            found = Embeddings(kept=output.path, made=made, count=count)
    found = dataclasses.replace(found, unreadable=stream.faults.left_out, computed=stream.computed)
    if output is not None:
        output.publish(found)
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbedTask(PartTask):
    """Features of the readable images, float32 (m, D) in C order."""

    spec: FeatureSpec
    """Resolved."""

    def results(self, engine: Engine, parts: Iterator[Images]) -> Generator[PartRows, None, None]:
        """As `PartTask.results`."""
        compute = Compute(batch_size=self.batch_size, workers=self.workers, cache=False)
        for images in parts:
            stream = FeatureStream(engine, [self.spec], [source_at(texts[0]) for texts in images], compute)
            features = b"".join(block.features[0].tobytes() for block in stream)
            yield PartRows(features, dict(stream.faults.reasons), engine.precision_for(stream.batch_size))


@dataclasses.dataclass(frozen=True)
class ListedImages:
    """Image files, which are listed as they are taken."""

    texts: Iterable[tuple[str, ...]]
    """Of each image its `as_text`, its label where there are labels, and its split; taken once."""
    class_names: tuple[str, ...]
    several: bool = False
    """Whether an image may have several classes."""


def _embed_in_parts(
    out: Path, loop: RayLoop, listed: ListedImages, spec: FeatureSpec, compute: Compute
) -> Embeddings:
    batch_size = BATCH_SIZE if compute.batch_size is None else compute.batch_size
    stream = FeatureStream(loop.engine, [spec], [], Compute(batch_size=batch_size, cache=False))
    made = _made(stream, listed)
    # The precision that was asked for; that of this process says nothing of the others.
    about = {**made, "class_names": list(made["class_names"]), "precision": compute.precision}
    task = EmbedTask(batch_size=batch_size, workers=compute.workers, spec=stream.specs[0])

    def differences(before: Mapping[str, Any]) -> list[str]:
        changed = (name for name in about if before[name] != about[name])
        others = [] if are_listed(out, listed.texts) else ["the images were others"]
        return [*(f"{name} was {before[name]!r}, not {about[name]!r}" for name in changed), *others]

    with computed(out, task, loop, listed.texts, about, differences) as (parts, now):
        notes = [parts.read(part, rows=False) for part in range(len(parts))]
        reasons = tuple(reason for note in notes for reason in note.faults.values())
        Faults.of(parts.images, reasons).check_some()
        precisions = dict[str, int]()
        for part, note in enumerate(notes):
            precisions.setdefault(note.precision, part)
        if len(precisions) > 1:
            places = ", ".join(f"{name} ({parts.file(part)})" for name, part in precisions.items())
            raise UserError(
                f"parts were computed in several precisions, {places}: name one, and choose another file"
            )
        (made["precision"],) = precisions
        count = embedding_file.write_embeddings(out, _feature_parts(parts), parts.images, made)
        done = sum(parts.count(part) - len(notes[part].faults) for part in now)
    return Embeddings(kept=out, made=made, count=count, unreadable=reasons, computed=done)


def _feature_parts(parts: Parts) -> Iterator[embedding_file.Part]:
    """The features of all parts in order, up to `BLOCK` images at a time as one process writes them."""
    for part in range(len(parts)):
        results = parts.read(part)
        texts = [image for place, image in enumerate(parts.texts(part)) if place not in results.faults]
        features = np.frombuffer(results.rows, np.float32).reshape(len(texts) or 1, -1)
        for start in range(0, len(texts), BLOCK):
            names, *labels, splits = zip(*texts[start : start + BLOCK], strict=True)
            columns = embedding_file.EmbeddingColumns(
                images=np.array([str(source_at(name)) for name in names], np.str_),
                labels=np.array(labels[0], np.str_) if labels else None,
                splits=np.array(splits, np.str_),
            )
            yield columns, features[start : start + BLOCK]


@contextmanager
def _listed(data: Data, table: TableOptions) -> Iterator[ListedImages]:
    """Image files for workers; those of a folder of class folders are listed as they are taken."""
    if isinstance(data, str | os.PathLike) and table == AS_RECOGNIZED:
        place = os.fspath(data)
        found = stream_of_folder(place) if os.path.isdir(os.path.expanduser(place)) else None
        if found is not None:
            yield ListedImages(
                ((path, escaped(name), split) for path, name, split in found), found.class_names
            )
            return
    with opened_images(data, table) as everything:
        for number, source in enumerate(everything):
            if not isinstance(source, str | os.PathLike | StoredImage):
                raise UserError(
                    f"{everything.names[number]} is no image file, and on Ray images are files: unpack them, "
                    "or embed on one machine"
                )
        labels = [] if everything.labels is None else [list(map(escaped, everything.labels))]
        files = [
            source.as_text() if isinstance(source, StoredImage) else name
            for source, name in zip(everything, everything.names, strict=True)
        ]
        yield ListedImages(
            zip(files, *labels, everything.splits, strict=True),
            everything.class_names,
            everything.several,
        )


@contextmanager
def opened_images(data: Data, table: TableOptions) -> Iterator[AllImages]:
    """The images of any data; the table of a DataFrame exists while the context lasts."""
    if isinstance(data, DataFrame | str | os.PathLike):
        with data_place(data, table) as place:
            yield all_images(place, table)
    else:
        yield all_images(data)


def _made(stream: FeatureStream, everything: AllImages | ListedImages) -> dict[str, Any]:
    return {
        "model": escaped(stream.engine.name),
        **stream.origins[0],
        "class_names": [escaped(name) for name in everything.class_names],
        "several": everything.several,
        "vitascope": __version__,
        "torch": torch.__version__,
    }


def _parts(
    stream: FeatureStream, everything: AllImages, *, in_memory: bool
) -> Generator[embedding_file.Part, None, None]:
    total = len(everything)
    for rows in with_progress(stream):
        (features,) = rows.features
        size = total * features.itemsize * features.shape[1] / 1e9
        if in_memory and size > MEMORY_GB:
            raise UserError(
                f"{total:,} features of {features.shape[1]:,} numbers take {size:,.1f} GB, and at most "
                f"{MEMORY_GB:g} GB are held in memory: set out, a file"
            )
        yield columns_of(everything, rows.indices), features


def columns_of(everything: AllImages, indices: Indices) -> embedding_file.EmbeddingColumns:
    """What is known of some images."""
    places, labels = indices.tolist(), everything.labels
    return embedding_file.EmbeddingColumns(
        images=np.array([everything.names[index] for index in places], np.str_),
        labels=None if labels is None else np.array([escaped(labels[index]) for index in places], np.str_),
        splits=np.array([everything.splits[index] for index in places], np.str_),
    )


def with_progress(stream: FeatureStream) -> Generator[FeatureRows, None, None]:
    """The features of a stream, under a progress bar; a UserError at the end if no image could be read."""
    total, count = len(stream.sources), 0
    with tqdm(total=total, unit=" images", delay=3, leave=False, disable=None) as bar:
        for rows in stream:
            yield rows
            end = int(rows.indices[-1]) + 1
            bar.update(end - count)
            count = end
    stream.faults.check_some()
