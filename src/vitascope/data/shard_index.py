"""Which shards a folder has, of which split: `index.json` of `vitascope pack` says it, else their names."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Mapping
from pathlib import Path

from vitascope.data.formats.folder import IMAGE_SUFFIXES, SPLIT_FOLDERS, split_folder
from vitascope.errors import UserError

INDEX = "index.json"
INDEX_VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard:
    """A line of the index."""

    file: str
    count: int
    """Images."""
    bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Index:
    """What `index.json` says of a folder of shards."""

    version: int = INDEX_VERSION
    class_names: tuple[str, ...]
    channels: int
    """1 where all pictures are grey, else 3."""
    splits: Mapping[str, tuple[Shard, ...]]

    def images(self, split: str) -> int:
        """Images in a split."""
        return sum(shard.count for shard in self.splits[split])

    def checked_files(self, folder: Path) -> dict[str, list[Path]]:
        """The shards of each split, which are there and have the size that they were written with.

        Raises:
            UserError: one that is missing or of another size.
        """
        for shard in itertools.chain.from_iterable(self.splits.values()):
            path = folder / shard.file
            size = path.stat().st_size if path.is_file() else None
            if size != shard.bytes:
                state = "missing" if size is None else f"{size:,} bytes"
                raise UserError(f"{path}: {state}, {INDEX} says {shard.bytes:,} bytes; copy it again")
        return {split: [folder / shard.file for shard in shards] for split, shards in self.splits.items()}

    def write(self, folder: Path) -> None:
        """Write it beside its shards."""
        (folder / INDEX).write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", "utf-8")


def read_index(folder: Path) -> Index | None:
    """The index of a folder; None where there is none.

    Raises:
        UserError: one of another version, or none of vitascope's.
    """
    path = folder / INDEX
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_bytes())
        version = values["version"]
        if version != INDEX_VERSION:
            raise UserError(f"{path}: version {version!r}, this vitascope reads {INDEX_VERSION}; update it")
        splits = {
            split: tuple(Shard(**line) for line in values["splits"][split])
            for split in SPLIT_FOLDERS
            if split in values["splits"]
        }
        index = Index(class_names=tuple(values["class_names"]), channels=values["channels"], splits=splits)
        lines = list(itertools.chain.from_iterable(splits.values()))
        whole = len(index.class_names) > 1 and index.channels in (1, 3) and bool(lines)
        named = all(isinstance(name, str) for name in index.class_names)
        plain = all(line.file == Path(line.file).name and line.count + line.bytes > 0 for line in lines)
    except (KeyError, TypeError, AttributeError, RecursionError, json.JSONDecodeError, UnicodeDecodeError):
        whole = named = plain = False
    if not (whole and named and plain):
        raise UserError(
            f"{path}: not an index of vitascope's; without it, the shards are read by their names"
        )
    return index


def shard_files(folder: Path) -> dict[str, list[Path]]:
    """The tars of each split, by name: of `train/`, or `train-00000.tar`, `imagenet-train-00000.tar`; or all.

    Raises:
        UserError: some names say a split, others don't.
    """
    return files_of_splits(folder, (".tar",))


def files_of_splits(folder: Path, suffixes: tuple[str, ...]) -> dict[str, list[Path]]:
    """Files that end so, by what a folder `train/` or the word `train` in the name says; else of split `all`.

    Raises:
        UserError: some names say a split, others don't.
    """
    found: dict[str, list[Path]] = {}
    for split in SPLIT_FOLDERS if folder.is_dir() else ():
        below = split_folder(folder, split)
        if below is not None and (files := _visible(below, suffixes)):
            found[split] = files
    for path in _visible(folder, suffixes):
        words = re.split(r"[-_.]", path.stem.lower())
        said = [split for split, names in SPLIT_FOLDERS.items() if any(name in words for name in names)]
        found.setdefault(said[0] if said else "all", []).append(path)
    if "all" in found and len(found) > 1:
        raise UserError(
            f"{found['all'][0]}: its name says no split, as others do; call it train-..., val-... or test-..."
        )
    return found


def has_class_folders(folder: Path) -> bool:
    """Whether there are images in folders of a folder: then files beside these are not what it is about."""
    inside = (path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    files = itertools.chain.from_iterable(path.rglob("*") for path in inside)
    return any(file.suffix.lower() in IMAGE_SUFFIXES for file in files)


def _visible(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    files = folder.iterdir() if folder.is_dir() else ()
    return sorted(p for p in files if p.suffix in suffixes and p.name[0] != "." and p.is_file())
