"""`similar`: the pictures in some data that are most similar to one, by the cosine of their features."""

import copy
import dataclasses
import functools
import io
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeAlias, TypedDict, Unpack, cast, overload

import numpy as np
import numpy.typing as npt
import torch

from vitascope.arguments import Range, checked
from vitascope.data.features import embed
from vitascope.data.features.cache import Features
from vitascope.data.features.embedding_file import EmbeddingColumns, OfImages, is_embedding_file
from vitascope.data.features.stream import BLOCK, FeatureStream, Indices
from vitascope.data.reading import Faults, readable
from vitascope.data.stored import as_pictures
from vitascope.data.table_options import AS_RECOGNIZED, TableOptions
from vitascope.errors import UserError, printable
from vitascope.formatting import counted, listed, pandas_library
from vitascope.models.decoding import (
    ImageError,
    ImageSource,
    Levels,
    is_one_picture,
    read_image,
    source_name,
)
from vitascope.models.engines.compute import DEFAULT, Compute
from vitascope.models.engines.engine import Engine
from vitascope.models.engines.features import FeaturePool, FeatureSpec
from vitascope.models.engines.runtimes import as_engine
from vitascope.models.hardware import PRECISIONS, reuse_freed_memory
from vitascope.models.text.zero_shot import ImagesAndWords, check_names
from vitascope.models.vision_model import left_as_it_was
from vitascope.models.weights.files import CheckpointError
from vitascope.models.weights.identification import reject_model

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ORDER = "the model comes first, then the picture, then the data"
MAX_DRAWN = 100
"""Similar pictures in a figure."""
LONGEST_DRAWN = 360
"""Longer side of a picture in a figure, in pixels."""

Similarities = npt.NDArray[np.float32]
Tile = npt.NDArray[np.uint8]
"""(H, W, 3)."""
Searched: TypeAlias = embed.Embeddings | embed.Data

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class SimilarPictures(OfImages):
    """The k pictures that are most similar to one picture, most similar first; a notebook shows them."""

    picture: str
    """The path of the picture, or its type where it has none; or the words."""
    similarities: Similarities
    """The cosine of the features of each and of the picture, in [-1, 1]: (k,)."""
    indices: Indices
    """The place of each in the data, or the row of `Embeddings`: (k,)."""
    columns: EmbeddingColumns
    """The names, labels and splits."""
    compared: int
    """The number of pictures in the data that could be read."""
    computed: int = 0
    """The number of pictures in the data whose features were not in the cache."""
    unreadable: tuple[str, ...] = ()
    """Why pictures in the data could not be read."""
    sources: tuple[ImageSource, ...]
    """The picture or the words, and then each of the similar pictures, to be drawn."""
    is_words: bool = False
    """Whether `picture` is words."""
    levels: Levels | None = None
    """The levels of grey of more than 8 bits, as in `Preprocess`."""

    def __len__(self) -> int:
        return len(self.similarities)

    def rows(self) -> list[dict[str, Any]]:
        """The values of each, by name."""
        numbers = {"similarity": self.similarities.tolist(), "index": self.indices.tolist()}
        values = numbers | self.columns.lists()
        names = [name for name in ("similarity", "label", "split", "image", "index") if name in values]
        return [
            {"rank": rank, **{name: values[name][rank - 1] for name in names}}
            for rank in range(1, len(self) + 1)
        ]

    def to_dataframe(self) -> Any:
        """One row per similar picture, by rank from 1; UserError without pandas."""
        return pandas_library().DataFrame(self.rows()).set_index("rank")

    def draw(self) -> "Figure":
        """The picture beside the similar ones, at most `MAX_DRAWN`, each above its similarity and its label;
        in data without labels, above its name.

        The place of an image that cannot be read is empty, with a warning. Save it with `Figure.savefig`.

        Raises:
            UserError: the picture, or all of the similar ones, cannot be read any more, such as images of
                features whose data are elsewhere.
        """
        from vitascope.analysis.explain.plots import draw_similar  # imports matplotlib, which takes a second

        count = min(len(self), MAX_DRAWN)
        labels = self.labels if self.labels is not None else [Path(name).name for name in self.images[:count]]
        captions = [
            (f"{value:z.3f}", printable(label, 80))
            for value, label in zip(self.similarities[:count].tolist(), labels, strict=False)
        ]
        name = printable(self.picture if self.is_words else Path(self.picture).name, 80)
        asked = f'"{name}"' if self.is_words else name
        title = f"{count} of {counted(self.compared, 'image')}, the most similar to {asked}"
        picture, *sources = self.sources[: count + 1]
        tile = None if self.is_words else _tile(picture, self.levels)
        tiles = _readable_tiles(sources, self.levels)
        return draw_similar(tile, name, tiles, captions, title)

    def _repr_png_(self) -> bytes | None:
        try:
            figure = self.draw()
        except UserError:  # the files are gone since: the notebook prints the repr
            return None
        file = io.BytesIO()
        figure.savefig(file, format="png")
        return file.getvalue()

    def __repr__(self) -> str:
        found = [
            f"{value:z.3f} {name}"
            for value, name in zip(self.similarities, self.images.tolist(), strict=True)
        ]
        return f"SimilarPictures({self.picture}: {listed(found)})"


def _tile(source: ImageSource, levels: Levels | None) -> Tile:
    """A picture of its own proportions; raises as `read_image`."""
    image = read_image(source, levels=levels).convert("RGB")
    image.thumbnail((LONGEST_DRAWN, LONGEST_DRAWN))
    return np.asarray(image)


def _readable_tiles(sources: Sequence[ImageSource], levels: Levels | None) -> list[Tile | None]:
    """Each picture, or None and a warning for one that cannot be read; a UserError if none can."""
    faults = Faults(len(sources))
    tiles = dict(readable(lambda source: _tile(source, levels), sources, faults))
    faults.check_some()
    if faults.count:
        log.warning("not drawn: %s", listed(faults.left_out))
    return [tiles.get(number) for number in range(len(sources))]


class _Options(TypedDict, total=False):
    """The options of `similar`, for type checkers."""

    k: int
    layer: int | None
    pool: FeaturePool | None
    table: TableOptions
    compute: Compute


@overload
def similar(  # type: ignore[overload-overlap] # a str is a sequence of str too, and means one path
    model: embed.Model, picture: ImageSource, data: Searched, **options: Unpack[_Options]
) -> SimilarPictures: ...


@overload
def similar(
    model: embed.Model, picture: Iterable[ImageSource], data: Searched, **options: Unpack[_Options]
) -> list[SimilarPictures]: ...


@checked
def similar(
    model: embed.Model,
    picture: ImageSource | Iterable[ImageSource],
    data: Searched,
    *,
    k: Annotated[int, Range(ge=1)] = 12,
    layer: int | None = None,
    pool: FeaturePool | None = None,
    table: TableOptions = AS_RECOGNIZED,
    compute: Compute = DEFAULT,
) -> SimilarPictures | list[SimilarPictures]:
    """Find the pictures that are most similar to one picture, or to words, as `vitascope similar` does.

    The similarity is the cosine of the features. Of equally similar pictures, the earlier one comes first. A
    picture that is in the data too, and its copies there, are found with similarity 1, without the cache up
    to rounding. Features are compared as they come, so data of any size can be searched.

    Args:
        model: as for `embed`.
        picture: one picture, or an iterable of pictures. With a MODEL that has a text model too (see
            `zero_shot`), also words, such as "a red car": a text that is no file and does not look like one.
        data: as for `embed`, or computed features of this model: `Embeddings`, or their file.
        k: the most pictures to find.
        layer, pool: as for `embed`; None with computed features: as these.
        table: how a table is read.
        compute: as for `embed`; the precision `auto` with computed features: as these.

    Returns:
        The similar pictures of one picture, most similar first; for several pictures, a list of these.

    Raises:
        ImageError: a picture cannot be read; the message names it.
        UserError: as `embed`; `k` is below 1; computed features of another model, preprocessing, layer or
            pool, or of numbers that are not finite.
    """
    pictures = as_pictures(picture)
    words = _are_words(model, pictures)
    if words and (layer, pool) != (None, None):
        raise UserError("words are compared with the model's own features: leave out layer and pool")
    if not words:
        _check_pictures(pictures)
    data = _opened(data, table)
    reuse_freed_memory()
    texts, both = cast("Sequence[str]", pictures), None
    if words:
        try:
            both = ImagesAndWords(cast("str", model), device=compute.device)
        except CheckpointError as error:
            raise UserError(f"{printable(texts[0], 80)!r}: no such file; as words: {error}") from error
        model = both.model
    with left_as_it_was(model), ExitStack() as opened:
        # Before the data are opened, which may be downloaded: it may be the data that were given first.
        precision = _precision_for(data, model, compute.precision)
        engine = as_engine(model, precision=precision, device=compute.device)
        columns_at: Callable[[Indices], EmbeddingColumns]
        if isinstance(data, embed.Embeddings):
            spec = _spec_as(data, engine, FeatureSpec(layer, pool))
            sources: Sequence[ImageSource] = data.images.tolist()
            columns_at = data.columns.subset
        else:
            spec = engine.resolved(FeatureSpec(layer, pool))
            sources = everything = opened.enter_context(embed.opened_images(data, table))
            columns_at = functools.partial(embed.columns_of, everything)
        if both is None:
            best = _Best.to(FeatureStream(engine, [spec], pictures, compute), k)
        else:
            best = _Best(both.vectors(both.texts.tokens(check_names(texts))).numpy(), k, both.projection)
        stream = None
        if isinstance(data, embed.Embeddings):
            best.add_embeddings(data)
        else:
            stream = FeatureStream(engine, [spec], sources, compute)  # whose cache has the pictures now
            with closing(embed.with_progress(stream)) as parts:  # at once after a failure too, for the cache
                for rows in parts:
                    best.add(rows.indices, rows.features[0])
        best.settle()
        found = [
            SimilarPictures(
                picture=source_name(asked_picture),
                similarities=similarities,
                indices=indices,
                columns=columns_at(indices),
                compared=best.compared,
                computed=0 if stream is None else stream.computed,
                unreadable=() if stream is None else stream.faults.left_out,
                sources=(asked_picture, *(sources[index] for index in indices.tolist())),
                is_words=words,
                levels=engine.preprocess.levels,
            )
            for asked_picture, similarities, indices in zip(
                pictures, best.similarities, best.indices, strict=True
            )
        ]
    return found[0] if is_one_picture(picture) else found


def _are_words(model: embed.Model, pictures: Sequence[ImageSource]) -> bool:
    """Whether what is asked for is words: texts that are no files, and have no ending and no folder."""
    texts = [picture for picture in pictures if isinstance(picture, str)]
    return (
        isinstance(model, str | os.PathLike)
        and 0 < len(texts) == len(pictures)
        and not any(os.path.exists(text) or os.sep in text or Path(text).suffix for text in texts)
    )


def _check_pictures(pictures: Sequence[ImageSource]) -> None:
    """Reject folders, which are usually data in the place of the picture."""
    if not len(pictures):
        raise UserError("no picture given")
    for path in (picture for picture in pictures if isinstance(picture, str | os.PathLike)):
        if os.path.isdir(path):
            raise UserError(f"{os.fspath(path)} is a folder, and no picture: {ORDER}")


def _opened(data: Searched, table: TableOptions) -> Searched:
    """The data; `Embeddings` for a file of features."""
    if isinstance(data, str | os.PathLike) and is_embedding_file(Path(data)):
        data = embed.Embeddings.load(data)
    reject_model(data, ORDER)
    if isinstance(data, embed.Embeddings) and table != AS_RECOGNIZED:
        about = (
            f"{table.given[0]} is about a table"
            if table.given
            else f"{table.about_images[0]} is about images"
        )
        raise UserError(f"{about}, and these features are computed already")
    return data


def _precision_for(data: Searched, model: embed.Model, asked: str) -> str:
    """The precision of the pictures' features: that of computed ones, unless another one is asked for, or the
    model is an engine, which has its own."""
    if asked != "auto" or isinstance(model, Engine) or not isinstance(data, embed.Embeddings):
        return asked
    own = str(data.made["precision"])
    return own if own in PRECISIONS else asked


def _spec_as(data: embed.Embeddings, engine: Engine, asked: FeatureSpec) -> FeatureSpec:
    """The representation of computed features, which must be of this model and of what is asked for."""
    spec = engine.resolved(FeatureSpec(data.made["layer"], data.made["pool"]))
    data.check_model(engine)
    if not asked.is_own and engine.resolved(asked) != spec:
        raise UserError(
            f"these features are of {spec}, not of {engine.resolved(asked)}: embed the images again"
        )
    made, own = data.made["preprocess"], engine.preprocess.to_dict()
    if made != own:
        name = next(name for name in {**own, **made} if made.get(name) != own.get(name))
        raise UserError(
            f"these features are of another preprocessing, {name} {made.get(name)}, not {own.get(name)}: "
            "embed the images again"
        )
    return spec


class _Best:
    """For each of Q pictures the k most similar ones, of features that come in parts.

    Args:
        features: of the Q pictures, (Q, D); or vectors (Q, P) of words.
        k: the most to keep.
        projection: from the features of pictures, D, to the space of words, P.
    """

    def __init__(self, features: Features, k: int, projection: torch.nn.Linear | None = None) -> None:
        self._queries, self._k = _unit(features), k
        self._projection = None if projection is None else copy.deepcopy(projection).cpu().double()
        self.similarities: Similarities = np.empty((len(features), 0), np.float32)
        """(Q, at most k), descending, once `settle` is called."""
        self.indices: Indices = np.empty((len(features), 0), np.int64)
        """(Q, at most k)."""
        self.compared = 0
        self._waiting: list[tuple[Similarities, Indices]] = []

    @classmethod
    def to(cls, stream: FeatureStream, k: int) -> Self:
        """For the pictures of a stream; an ImageError for one that cannot be read."""
        parts = [rows.features[0] for rows in stream]
        for reason in stream.faults.left_out:
            raise ImageError(reason)
        return cls(np.concatenate(parts), k)

    def add(self, indices: Indices, features: Features) -> None:
        """Take the features (n, D) of pictures; their indices (n,) are beyond all before."""
        # In double precision and then rounded, so that equal features have equal similarities wherever they
        # stand in a matrix product, and a picture has 1 to itself.
        if self._projection is not None:
            with torch.inference_mode():
                features = self._projection(torch.from_numpy(features.astype(np.float64))).numpy()
        similarities = (self._queries @ _unit(features).T).astype(np.float32)  # (Q, n)
        self._waiting.append((similarities, indices))
        self.compared += len(indices)
        if sum(len(part) for _, part in self._waiting) >= max(self._k, BLOCK):
            self.settle()

    def add_embeddings(self, data: embed.Embeddings) -> None:
        """Take computed features; a UserError if they are of another width, or not finite."""
        width = self._queries.shape[1] if self._projection is None else self._projection.in_features
        for features in data.blocks():
            indices = np.arange(self.compared, self.compared + len(features))
            if features.shape[1] != width:
                raise UserError(f"features of {features.shape[1]:,} numbers, and the model's have {width:,}")
            if not (finite := np.isfinite(features).all(axis=1)).all():
                name = data.images[indices[~finite][0]]
                raise UserError(f"{name}: its features are not finite numbers: embed the images again")
            self.add(indices, features)

    def settle(self) -> None:
        """Sort what was added among the best."""
        Q = len(self._queries)
        new = [(part, np.broadcast_to(indices, (Q, len(indices)))) for part, indices in self._waiting]
        similarities = np.concatenate([self.similarities, *(part for part, _ in new)], axis=1)
        indices = np.concatenate([self.indices, *(part for _, part in new)], axis=1)
        order = np.argsort(-similarities, axis=1, kind="stable")[:, : self._k]  # of equal ones, the earlier
        self.similarities = np.take_along_axis(similarities, order, axis=1)
        self.indices = np.take_along_axis(indices, order, axis=1)
        self._waiting = []


def _unit(features: Features) -> npt.NDArray[np.float64]:
    """Features (n, D) divided by their norms; zeros stay, and are similar to nothing."""
    exact = features.astype(np.float64)
    norms = np.linalg.norm(exact, axis=1, keepdims=True)
    return exact / np.where(norms == 0, 1, norms)
