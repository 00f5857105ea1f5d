"""`embed`: the features of images of any number, in memory or in a file."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from tqdm import tqdm

from vitascope._version import __version__
from vitascope.arguments import check_value, checked
from vitascope.data.all_images import SEPARATOR, AllImages, all_images
from vitascope.data.datasets import stream_of_folder
from vitascope.data.decoding import ImageSource
from vitascope.data.feature_cache import Features
from vitascope.data.frames import DataFrame, stored
from vitascope.data.stored import StoredImage, as_text
from vitascope.data.table_options import TableOptions
from vitascope.data.targets import ClassIndices, ClassSets, Targets
from vitascope.errors import UserError
from vitascope.formatting import counted
from vitascope.model.hardware import reuse_freed_memory
from vitascope.model.vision_model import VisionModel, left_as_it_was
from vitascope.predict.bulk import Job, embed_in_parts
from vitascope.predict.embedding_file import (
    EmbeddingColumns,
    Part,
    Text,
    check_out,
    read_blocks,
    read_columns,
    read_features,
    write_embeddings,
)
from vitascope.predict.engine import Engine
from vitascope.predict.feature_stream import BATCH_SIZE, BLOCK, FeatureRows, FeatureStream, Indices
from vitascope.predict.features import FeaturePool, FeatureSpec
from vitascope.predict.on_ray import compute_on_ray, connected
from vitascope.predict.parts import job_exists, parts_folder
from vitascope.predict.predictor import check_batch_size, check_workers
from vitascope.predict.result_formats import escaped
from vitascope.predict.runtimes import as_engine
from vitascope.remote.outputs import Output
from vitascope.storage import check_local, explaining_failure
from vitascope.weights.identification import reject_model

MEMORY_GB = 4.0
"""Features that are held in memory; more have to go into a file."""


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Embeddings:
    """Features of N images, with what is known of each image, and of how they were made."""

    columns: EmbeddingColumns
    made: dict[str, Any]
    """`model`, its name; `digest`, SHA-256 of the weights and options below the head; `layer`, `pool`,
    `preprocess` and `precision`; `file`, SHA-256 of the exported file if one computed them; `class_names`;
    `several`, whether an image may have several classes; and the versions of `vitascope` and `torch`."""
    unreadable: tuple[str, ...] = ()
    """Why images could not be read, which are left out."""
    computed: int = 0
    """The number of images whose features were not in the cache."""
    kept: Features | Path
    """The features, or the file that has them."""

    def __len__(self) -> int:
        return len(self.columns)

    @functools.cached_property
    def features(self) -> Features:
        """float32 (N, D), read from the file on first use.

        Raises:
            UserError: a damaged file.
        """
        if not isinstance(self.kept, Path):
            return self.kept
        found = read_features(self.kept)
        if len(found) != len(self):
            raise UserError(f"{self.kept}: {len(found):,} features of {counted(len(self), 'image')}")
        return found

    def blocks(self) -> Iterator[Features]:
        """The features, up to `BLOCK` images at a time; those of a file are read as they are taken.

        Raises:
            UserError: a damaged file.
        """
        if not isinstance(self.kept, Path):
            yield from (self.kept[start : start + BLOCK] for start in range(0, len(self), BLOCK))
            return
        count = 0
        for features in read_blocks(self.kept, BLOCK):
            count += len(features)
            yield features
        if count != len(self):
            raise UserError(f"{self.kept}: {count:,} features of {counted(len(self), 'image')}")

    @property
    def images(self) -> Text:
        """The path of each image, or its split and number, such as `test/17`: (N,)."""
        return self.columns.images

    @property
    def labels(self) -> Text | None:
        """The class of each image, or its classes with ";" between them, empty for an image without one:
        (N,). None without labels."""
        return self.columns.labels

    @property
    def splits(self) -> Text:
        """`train`, `val` or `test`, or `all` where the data are not divided: (N,)."""
        return self.columns.splits

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

    def subset(self, rows: npt.NDArray[Any]) -> Embeddings:
        """Some of the images, by their indices or by a mask (N,)."""
        return dataclasses.replace(self, columns=self.columns.subset(rows), kept=self.features[rows])

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
    def of_parts(cls, parts: Sequence[Part], made: dict[str, Any]) -> Embeddings:
        """Join parts, at least one."""
        columns = EmbeddingColumns.joined([columns for columns, _ in parts])
        return cls(columns=columns, made=made, kept=np.concatenate([features for _, features in parts]))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Embeddings:
        """Open a file of `vitascope embed`.

        Raises:
            UserError: no such file, or another one.
        """
        path = Path(path)
        columns, made = read_columns(path)
        if not isinstance(made, dict) or not made.keys() >= _MADE.keys():
            raise UserError(f"{path}: it does not say how its features were made; embed the images again")
        for name, kind in _MADE.items():
            check_value(f"{path}: {name}", made[name], kind)
        return cls(columns=columns, made=made, kept=path)

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
    model: Engine | VisionModel | str | os.PathLike[str],
    data: DataFrame | str | os.PathLike[str] | Sequence[ImageSource],
    *,
    out: str | os.PathLike[str] | None = None,
    layer: int | None = None,
    pool: FeaturePool | None = None,
    columns: Mapping[str, str] | Sequence[str] = (),
    images: str | os.PathLike[str] | None = None,
    labels: Literal["one", "several"] | None = None,
    label_separator: str | None = None,
    batch_size: int | None = None,
    workers: int | None = None,
    precision: str = "auto",
    device: str = "auto",
    cache: bool = True,
    engine: Literal["local", "ray"] = "local",
    ray_address: str | None = None,
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
        columns, images, labels, label_separator: how a table is read, as for `train`.
        batch_size: images per batch; by default 64, and on a GPU without Ray as many as keep it busy.
        workers: processes that read; 0 reads in this process, None means one per core.
        precision: `auto`, `fp32` or `bf16`.
        device: `auto`, or a torch device.
        cache: take features from the cache, and keep them there.
        engine: `ray` computes on the workers of Ray, into `out`, in parts that a repeated call continues, and
            without the cache.
        ray_address: with `ray`, `auto` for the cluster of this machine, or `HOST:PORT`; None for Ray on this
            machine alone.

    Raises:
        UserError: no such model, data, layer or pool; a file that exists or cannot be written; more features
            than fit into memory; features that are not finite; no image that can be read; with `ray`, images
            that are no files, no cluster, or no Ray.
    """
    table = TableOptions.of(columns, images, labels, label_separator)
    if engine == "ray":
        if out is None or isinstance(model, Engine):
            raise UserError("on Ray, features go into a file, out, and the model is a MODEL or in torch")
        path = Path(out)
        counts = embed_on_ray(
            *(model, data, path, ray_address),
            spec=FeatureSpec(layer, pool),
            table=table,
            batch_size=BATCH_SIZE if batch_size is None else batch_size,
            workers=workers,
            precision=precision,
            device=device,
        )
        found = Embeddings.load(path)
        return dataclasses.replace(found, unreadable=counts.unreadable, computed=counts.computed)
    if ray_address is not None:
        raise UserError("ray_address needs engine 'ray'")
    output = None if out is None else Output(out, afresh=True)
    with nullcontext() if output is None else output.named():
        _check(data, None if output is None else output.path, batch_size, workers)
    if output is not None and job_exists(output.path):
        folder = parts_folder(output.path)
        raise UserError(f"{folder} exists: continue it on Ray, remove it, or choose another file")
    reuse_freed_memory()
    with left_as_it_was(model), opened_images(data, table) as everything:
        spec = FeatureSpec(layer, pool)
        stream = FeatureStream(
            as_engine(model, precision=precision, device=device),
            [spec],
            everything,
            batch_size=batch_size,
            workers=workers,
            cached=cache,
        )
        made = _made(stream, everything)
        # Closed at once after a failure to write too, so that the cache gets what was computed.
        with closing(_parts(stream, everything, in_memory=output is None)) as parts:
            if output is None:
                found = Embeddings.of_parts(list(parts), made)
            else:
                kept = "the features in the cache are kept" if cache else "nothing is kept"
                advice = f"choose a file on another disk; {kept}"
                with output.named(), explaining_failure(output.path, "the features", advice):
                    write_embeddings(output.path, parts, len(everything), made)
                found = Embeddings.load(output.path)
    found = dataclasses.replace(found, unreadable=tuple(stream.unreadable.values()), computed=stream.computed)
    if output is not None:
        output.publish(found)
    return found


def _check(data: object, out: Path | None, batch_size: int | None, workers: int | None) -> None:
    """Reject what is wrong before a model is loaded."""
    check_batch_size(batch_size)
    check_workers(workers)
    if out is not None:
        check_out(out)
    reject_model(data, "the model comes first, then the data")


@dataclasses.dataclass(frozen=True)
class EmbeddedFile:
    """What a file of features came to, which may have more images than fit into memory."""

    images: int
    """In the file."""
    unreadable: tuple[str, ...]
    """Why images could not be read, which are left out."""
    computed: int
    """The number of images whose features were computed now."""

    def __len__(self) -> int:
        return self.images


def embed_on_ray(
    model: VisionModel | str | os.PathLike[str],
    data: DataFrame | str | os.PathLike[str] | Sequence[ImageSource],
    out: Path,
    address: str | None,
    *,
    spec: FeatureSpec,
    table: TableOptions,
    batch_size: int,
    workers: int | None,
    precision: str,
    device: str,
) -> EmbeddedFile:
    """As `embed`, in parts on the workers of Ray; a folder of class folders needs no memory per image."""
    check_local(out)
    _check(data, out, batch_size, workers)
    with connected(address), left_as_it_was(model), _listed(data, table) as listed:
        where = model if isinstance(model, VisionModel) else os.fspath(model)
        job = Job(
            *(where, out, compute_on_ray),
            batch_size=batch_size,
            workers=workers,
            precision=precision,
            device=device,
        )
        stream = FeatureStream(job.engine, [spec], [], batch_size=batch_size, cached=False)
        made = _made(stream, listed)
        unreadable, images, computed = embed_in_parts(job, stream.specs[0], listed.texts, made)
    return EmbeddedFile(images, tuple(unreadable), computed)


@dataclasses.dataclass(frozen=True)
class ListedImages:
    """Image files that can be listed several times."""

    texts: Callable[[], Iterator[tuple[str, ...]]]
    """Of each image its `as_text`, its label where there are labels, and its split."""
    class_names: tuple[str, ...]
    several: bool = False
    """Whether an image may have several classes."""


@contextmanager
def _listed(
    data: DataFrame | str | os.PathLike[str] | Sequence[ImageSource], table: TableOptions
) -> Iterator[ListedImages]:
    """Image files for workers; those of a folder of class folders are listed as they are taken."""
    if isinstance(data, str | os.PathLike) and not table.given:
        place = os.fspath(data)
        found = stream_of_folder(place) if os.path.isdir(os.path.expanduser(place)) else None
        if found is not None:
            yield ListedImages(
                lambda: ((path, escaped(name), split) for path, name, split in found), found.class_names
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
            as_text(source) if isinstance(source, StoredImage) else name
            for source, name in zip(everything, everything.names, strict=True)
        ]
        yield ListedImages(
            lambda: zip(files, *labels, everything.splits, strict=True),
            everything.class_names,
            everything.several,
        )


@contextmanager
def opened_images(
    data: DataFrame | str | os.PathLike[str] | Sequence[ImageSource], table: TableOptions
) -> Iterator[AllImages]:
    """The images of any data; the table of a DataFrame exists while the context lasts."""
    if isinstance(data, DataFrame | str | os.PathLike):
        with stored(data, table) as place:
            yield all_images(place, table)
    else:
        yield all_images(data)


def _made(stream: FeatureStream, everything: AllImages | ListedImages) -> dict[str, Any]:
    """How the features of one representation are made, see `Embeddings.made`."""
    return {
        "model": escaped(stream.engine.name),
        **stream.origins[0],
        "class_names": [escaped(name) for name in everything.class_names],
        "several": everything.several,
        "vitascope": __version__,
        "torch": torch.__version__,
    }


def _parts(stream: FeatureStream, everything: AllImages, *, in_memory: bool) -> Generator[Part, None, None]:
    """The features as they come, with what is known of their images."""
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


def columns_of(everything: AllImages, indices: Indices) -> EmbeddingColumns:
    """What is known of some images."""
    places, labels = indices.tolist(), everything.labels
    return EmbeddingColumns(
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
    if len(stream.unreadable) == total:
        reasons = list(stream.unreadable.values())
        raise UserError(f"none of {counted(total, 'image')} can be read: {'; '.join(reasons[:3])}")
