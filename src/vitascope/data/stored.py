"""Image files, here and in stores, with the cells of their row in a table; pictures as arguments."""

from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Self, TypeAlias, TypeVar, cast

from vitascope.data.listing import IMAGE_SUFFIXES, is_system_folder, suffix_of
from vitascope.models.decoding import ImageSource, is_one_picture, not_a_picture
from vitascope.remote import StoredImage, cache, objects_at, source_at

S = TypeVar("S")


class TableImage(str):
    """The path of an image, with the cells of its row."""

    __slots__ = ("cells",)
    cells: tuple[str, ...]

    @classmethod
    def of(cls, path: str, cells: Sequence[str]) -> Self:
        """The image of a path, with these cells."""
        image = cls(path)
        image.cells = tuple(cells)
        return image


ImageFile: TypeAlias = str | StoredImage
"""A path, or a picture in a store."""


def as_pictures(images: ImageSource | Iterable[ImageSource]) -> Sequence[ImageSource]:
    """A list of one picture, or the pictures themselves as a sequence; URLs become pictures in a store."""
    if is_one_picture(images):
        return [source_at(cast("ImageSource", images))]
    if isinstance(images, Sequence) and not isinstance(images, list | tuple):
        return cast("Sequence[ImageSource]", images)  # places, which are read one by one
    if isinstance(images, Iterable):
        return list(map(source_at, images))
    raise not_a_picture(images)


def stored_images(place: str) -> Iterator[StoredImage] | None:
    """The object of a URL, or the images below its folder, in the order of `visible_files`; None for a local
    path.

    Raises:
        StoreError: no such object or folder, or the store does not answer.
    """
    objects = objects_at(place)
    if objects is None:
        return None
    return (
        StoredImage(object.url, object)
        for names, object in objects
        if not names or suffix_of(names[-1]) in IMAGE_SUFFIXES
        if not any(map(is_system_folder, names[:-1]))
    )


def fetched_ahead(sources: Iterable[S]) -> Generator[S, None, None]:
    """The sources, while the next ones are fetched from their store by threads."""
    return cache.prefetched(
        sources, lambda source: source.object if isinstance(source, StoredImage) else None
    )
