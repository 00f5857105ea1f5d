"""`index.json`, which `vitascope pack` writes beside its shards."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping
from pathlib import Path

from vitascope.data.formats.folder import SPLIT_FOLDERS
from vitascope.errors import UserError

INDEX = "index.json"
INDEX_VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard:
    """A line of the index."""

    file: str
    count: int  # images
    bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Index:
    """Classes and shards of a folder."""

    version: int = INDEX_VERSION
    class_names: tuple[str, ...]
    channels: int  # 1 where all pictures are grey, else 3
    splits: Mapping[str, tuple[Shard, ...]]

    def images(self, split: str) -> int:
        """The number of images in a split."""
        return sum(shard.count for shard in self.splits[split])

    def checked_files(self, folder: Path) -> dict[str, list[Path]]:
        """The shards of each split, after a check of their sizes."""
        for shard in itertools.chain.from_iterable(self.splits.values()):
            path = folder / shard.file
            size = path.stat().st_size if path.is_file() else None
            if size != shard.bytes:
                state = "missing" if size is None else f"{size:,} bytes"
                raise UserError(f"{path}: {state}, {INDEX} has {shard.bytes:,} bytes; copy it again")
        return {split: [folder / shard.file for shard in shards] for split, shards in self.splits.items()}

    def write(self, folder: Path) -> None:
        """Write the index beside its shards."""
        (folder / INDEX).write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", "utf-8")


def read_index(folder: Path) -> Index | None:
    """The index of a folder, or None."""
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
