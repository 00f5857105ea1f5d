"""The page of an audit: findings beside their images, and decisions on these, downloaded as CSV."""

import hashlib
import math
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from vitascope.analysis.auditing.planted import Planted
from vitascope.analysis.report.page import jinja, rendered
from vitascope.analysis.report.thumbnails import SIDE, image_element
from vitascope.data.decisions import CHOICES, COLUMNS, decided_names
from vitascope.data.finding import ISSUES, Finding, Issue
from vitascope.data.reading import Faults, readable
from vitascope.data.splits import ImageSet
from vitascope.formatting import SEPARATOR
from vitascope.language import say
from vitascope.models.decoding import ImageSource, read_image
from vitascope.storage import replacing

CARDS = 100
"""Findings of a section that are shown, of images and as many others."""
MEGABYTES = 12
"""Of all thumbnails together, about: many of them are smaller."""
_PER_PIXEL = 0.35  # bytes of a thumbnail as base64


def write_audit_page(
    path: Path,
    title: str,
    findings: Sequence[Finding],
    planted: Sequence[Planted],
    *,
    images: ImageSet,
    parts: Sequence[str],
    root: Path | str | None,
) -> None:
    """Write the page, one file without links to others.

    Args:
        findings: the worst of each issue first.
        planted: how many planted errors the checks notice.
        images: of all parts, one after the other, N, identified.
        parts: the name of each image's part, (N,).
        root: as in `image_name`.
    """
    noticed = {errors.issue: errors for errors in planted}
    listed = {issue: [finding for finding in findings if finding.issue == issue] for issue in ISSUES}
    sections = [
        _section(issue, listed[issue], noticed.get(issue))
        for issue in ISSUES
        if issue in noticed or listed[issue]
    ]
    wanted = [image for section in sections for finding in section["cards"] for image in finding.images]
    contents = list(map(bytes.decode, images.contents.tolist()))
    names = decided_names(images.sources, root, images.contents)
    labels = [()] * len(images) if images.targets is None else images.targets.names()
    words = {
        "audit": hashlib.blake2b("\0".join([*names, *contents]).encode(), digest_size=12).hexdigest(),
        "columns": COLUMNS,
        "separator": SEPARATOR,
        "classes": sorted(images.class_names),
        "several": images.targets is not None and images.targets.strata is None,
        "choices": {choice: say(choice) for choice in CHOICES},
        "decided": say("{count} decided: keep {keep}, drop {drop}, relabel {relabel}"),
        "undecided": say("no decision"),
        "new": say("new label"),
        "unsaved": say("This browser does not store the decisions: download them before you leave."),
    }
    tiles = {
        say("images"): len(images),
        say("images with a finding"): len({finding.image for finding in findings} - {None}),
        say("findings"): len(findings),
    }
    here = files(__package__)
    text = rendered(
        jinja().from_string(here.joinpath("audit.html").read_text(encoding="utf-8")),
        title=title,
        tiles=tiles,
        sections=sections,
        names=names,
        contents=contents,
        parts=parts,
        labels=list(map(SEPARATOR.join, labels)),
        thumbnails=_thumbnails(images.sources, wanted),
        words=words,
        script=Markup(here.joinpath("audit.js").read_text(encoding="utf-8")),
    )
    with replacing(path) as aside:
        aside.write_text(text, encoding="utf-8")


def _section(issue: Issue, findings: Sequence[Finding], planted: Planted | None) -> dict[str, Any]:
    """The values of a section: the findings of images are cards, the others rows."""
    headline = "" if planted is None else str(planted)
    if planted is not None and planted.little:
        few = say("This check notices little in these data, so its findings are in audit.csv alone.")
        headline, findings = f"{few} {headline}", []
    cards = [finding for finding in findings if finding.images][:CARDS]
    rows = [finding for finding in findings if not finding.images][:CARDS]
    return {"issue": issue, "headline": headline, "total": len(findings), "cards": cards, "rows": rows}


def _thumbnails(sources: Sequence[ImageSource], wanted: Sequence[int]) -> dict[int, Markup | None]:
    """The thumbnails of the images that are shown, once or several times each; None for an unreadable one."""
    side = int(min(SIDE, math.sqrt(MEGABYTES * 2**20 / _PER_PIXEL / max(1, len(wanted)))))

    def thumbnail(image: int) -> Markup:
        return image_element(np.asarray(read_image(sources[image])), "", side)

    some = list(dict.fromkeys(wanted))
    drawn = readable(thumbnail, some, Faults(len(some)))
    return dict.fromkeys(some) | {some[number]: picture for number, picture in drawn}
