"""`python -m vitascope.cli.sort FOLDER`: images with labels in their names to class folders."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path

from vitascope.data.formats.folder import labels_in_names
from vitascope.errors import UserError, printable


def sort_by_name(folder: str | os.PathLike[str]) -> dict[str, int]:
    """Move images like `dog.1.jpg` that lie directly in a folder into class folders, by the labels in their
    names; returns the number of images per class. Nothing is moved where a file would be overwritten."""
    labels = labels_in_names(Path(folder))
    if not labels:
        raise UserError(f"{folder}: the names of its images are not like dog.1.jpg and cat.2.jpg")
    targets = {path: path.parent / label / path.name for path, label in labels.items()}
    if taken := [target for target in targets.values() if target.exists() or target.parent.is_file()]:
        raise UserError(
            f"{taken[0]}: in the way is a file of that name or of its folder's; nothing was moved"
        )
    for path, target in targets.items():
        target.parent.mkdir(exist_ok=True)
        path.rename(target)
    return dict(Counter(labels.values()))


def main(folders: list[str]) -> int:
    """Sort a folder and print the number of images per class; the exit status is 2 for an invalid request."""
    try:
        if len(folders) != 1 or not Path(folders[0]).is_dir():
            raise UserError(f"give one folder of images, not {' '.join(folders) or 'nothing'}")
        counts = sort_by_name(folders[0])
    except (UserError, OSError) as error:
        print(f"vitascope: error: {printable(str(error))}", file=sys.stderr)
        return 2
    print(printable(", ".join(f"{label}: {count:,}" for label, count in counts.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
