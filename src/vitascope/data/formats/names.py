"""Classes in the names of files, such as `cat.1.jpg`: a name, then a number."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path

from vitascope.formatting import listed

_RULE = re.compile(r"(?P<label>[^\W\d_].*?)[ ._-]*\(?\d+\)?")
_NO_CLASSES = {
    *("img", "image", "images", "dsc", "dscn", "dscf", "dscfn", "dcim", "pxl", "mvimg", "gopr", "vid"),
    *("photo", "picture", "pic", "scan", "screenshot", "frame", "file", "untitled", "whatsapp"),
}
"""First words of the names that cameras, phones and other programs give."""
_FEWEST, _PER_CLASS = 2, 4


def classes_in_names(
    paths: Sequence[Path], known: Collection[str] | None = None
) -> dict[str, list[Path]] | str:
    """The paths by the classes in their names, sorted; or the reason why the rule is not plain.

    Every name has a class and then a number, no class is the name of a camera, and there are at least two
    classes, of at least two images each and four on average; or all classes are `known`.
    """
    matches = {path: _RULE.fullmatch(path.stem) for path in paths}
    if without := [path.name for path, match in matches.items() if match is None]:
        return (
            f"{len(without):,} of {len(paths):,} names have no class and number, as cat.1.jpg has: "
            f"{listed(without)}"
        )
    classes: dict[str, list[Path]] = {}
    for path, match in matches.items():
        assert match is not None
        classes.setdefault(match["label"], []).append(path)
    names = sorted(classes)
    if known is not None:
        others = [name for name in names if name not in known]
        return f"{listed(others)} are no classes of train" if others else {n: classes[n] for n in names}
    if programs := [name for name in names if _first_word(name) in _NO_CLASSES]:
        return f"their names are those that cameras and programs give: {listed(programs)}"
    if len(names) < 2:
        return f"their names have only one class, {names[0]!r}"
    if len({name.casefold() for name in names}) < len(names):
        return f"the classes in their names differ in case only: {listed(names)}"
    few = [name for name in names if len(classes[name]) < _FEWEST]
    if few or len(paths) < _PER_CLASS * len(names):
        return (
            f"{len(names):,} different words before the numbers in {len(paths):,} names are too many to be "
            f"classes: {listed(few or names)}"
        )
    return {name: classes[name] for name in names}


def _first_word(name: str) -> str:
    return re.split(r"[\W\d_]", name, maxsplit=1)[0].lower()
