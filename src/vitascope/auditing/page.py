"""The page of an audit: findings beside their images, and decisions on these, downloaded as CSV."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import math
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from markupsafe import Markup
from PIL import Image

from vitascope._version import __version__
from vitascope.auditing.finding import Finding, Issue
from vitascope.data.decisions import CHOICES, COLUMNS, SEPARATOR, decided_names
from vitascope.data.decoding import ImageError, ImageSource, read_image
from vitascope.data.splits import ImageSet
from vitascope.language import language, say
from vitascope.network import in_threads
from vitascope.report.page import jinja
from vitascope.report.thumbnails import SIDE, data_uri
from vitascope.storage import replacing

CARDS = 100
"""Findings of a section that are shown, of images and as many others."""
MEGABYTES = 12
"""Of all thumbnails together, about: many of them are smaller."""
_PER_PIXEL = 0.35  # bytes of a thumbnail as base64
_LOSSLESS = 32  # the longest side of an image that is stored as PNG


@dataclasses.dataclass(frozen=True)
class Section:
    """The findings of an issue.

    Attributes:
        headline: how much of the issue the check finds, measured on planted errors.
    """

    issue: Issue
    headline: str
    findings: Sequence[Finding]


def write_audit_page(
    path: Path,
    *,
    title: str,
    tiles: Sequence[tuple[str, str]],
    sections: Sequence[Section],
    images: ImageSet,
    parts: Sequence[str],
    root: Path | str | None,
) -> None:
    """Write the page, one file without links to others.

    Args:
        tiles: numbers and what they count.
        sections: in the order of the page; their worst findings come first.
        images: of all parts, one after the other, N.
        parts: the name of each image's part, (N,).
        root: as in `image_name`.
    """
    images = images.identified()
    contents = list(map(bytes.decode, images.contents.tolist()))
    names = decided_names(images.sources, root, images.contents)
    labels = None if images.targets is None else images.targets.names()
    worst = [_worst(section.findings) for section in sections]
    wanted = [image for findings in worst for finding in findings for image in _images(finding)]
    thumbnails = _thumbnails(images.sources, wanted)

    def described(image: int) -> dict[str, Any]:
        label = "" if labels is None else SEPARATOR.join(labels[image])
        found = {"index": image, "name": names[image], "content": contents[image], "part": parts[image]}
        return found | {"label": label, "thumbnail": thumbnails[image]}

    words = {
        "audit": hashlib.blake2b("\0".join([*names, *contents]).encode(), digest_size=12).hexdigest(),
        "columns": COLUMNS,
        "separator": SEPARATOR,
        "classes": sorted(images.class_names),
        "several": images.targets is not None and not images.targets.exclusive,
        "choices": {choice: say(choice) for choice in CHOICES},
        "decided": say("{count} decided: keep {keep}, drop {drop}, relabel {relabel}"),
        "undecided": say("no decision"),
        "new": say("new label"),
        "unsaved": say("This browser does not store the decisions: download them before you leave."),
    }
    page = jinja().from_string(_read(__package__, "audit.html"))
    text = page.render(
        title=title,
        tiles=tiles,
        sections=[
            {
                "issue": section.issue,
                "headline": section.headline,
                "total": len(section.findings),
                "cards": [(each, list(map(described, _images(each)))) for each in shown if _images(each)],
                "rows": [each for each in shown if not _images(each)],
            }
            for section, shown in zip(sections, worst, strict=True)
        ],
        words=words,
        style=_read("vitascope.report", "style.css"),
        script=_read(__package__, "audit.js"),
        version=__version__,
        language={"en": "en", "zh": "zh-CN"}[language()],
    )
    with replacing(path) as aside:
        aside.write_bytes(text.strip().encode("utf-8", "backslashreplace") + b"\n")


def _read(package: str, name: str) -> Markup:
    return Markup(files(package).joinpath(name).read_text(encoding="utf-8"))


def _worst(findings: Sequence[Finding]) -> list[Finding]:
    """The worst findings of images, and the worst of others."""
    ordered = sorted(findings, key=lambda finding: -finding.score)
    kinds = ([each for each in ordered if bool(_images(each)) == pictured] for pictured in (True, False))
    return [each for kind in kinds for each in kind[:CARDS]]


def _images(finding: Finding) -> list[int]:
    return [image for image in (finding.image, finding.other) if image is not None]


def _thumbnails(sources: Sequence[ImageSource], wanted: Sequence[int]) -> dict[int, Markup | None]:
    """The thumbnails of the images that are shown, once or several times each; None for an unreadable one."""
    side = int(min(SIDE, math.sqrt(MEGABYTES * 2**20 / _PER_PIXEL / max(1, len(wanted)))))
    some = list(dict.fromkeys(wanted))
    return dict(zip(some, in_threads(lambda image: _thumbnail(sources[image], side), some), strict=True))


def _thumbnail(source: ImageSource, side: int) -> Markup | None:
    try:
        picture = read_image(source)
    except ImageError:
        return None
    picture.thumbnail((side, side), Image.Resampling.LANCZOS)
    coarse = max(picture.size) <= _LOSSLESS
    kind, written = "png" if coarse else "jpeg", io.BytesIO()
    picture.save(written, kind, optimize=True)
    return Markup('<img src="{}" alt="" class="{}">').format(
        data_uri(written.getvalue(), kind), "coarse" if coarse else "smooth"
    )
