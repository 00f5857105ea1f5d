"""Pictures that are unreadable, dark, bright, blurred, empty, of an odd shape, or grey among coloured ones.

A picture is listed if a fixed limit says so and it is also unusual among these data: in a set
of X-rays, night pictures or scanned texts nothing is listed that all of them have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from vitascope.auditing.finding import Finding, Issue, Suggestion
from vitascope.auditing.looks import Looks
from vitascope.data.decoding import ImageSource, source_name
from vitascope.data.listing import suffix_of

Floats = npt.NDArray[np.float64]

LISTED = 0.5
"""The score from which on a picture is listed."""
_UNUSUAL = 2.5  # distances between the 10% quantile and the median, below the median
_RARE = 0.01  # share of grey pictures, and of those turned by EXIF data, up to which these are listed
_GREY = 0.004  # mean difference between channels, about that of a grey JPEG
_LEVEL = 1 / 255
_SMALL = 128  # pixels of a side: smaller pictures are tiny if the others are four times as large
_ODD = np.log2(2.5)  # times the proportions of the usual picture


def quality_scores(looks: Looks, usual: Looks | None = None) -> dict[Issue, Floats]:
    """The scores of N pictures, (N,) per issue, from 0 to 1; a picture is listed from 0.5 on.

    Args:
        looks: of the pictures to judge; of those that cannot be read, all scores but "unreadable" are 0.
        usual: of the data among which they are judged; None for the same pictures.
    """
    usual = looks if usual is None else usual
    usual = usual.take(np.flatnonzero(usual.readable))

    def low(measure: Callable[[Looks], Floats], limit: float, width: float) -> Floats:
        """Scores of values below a limit, 1 from `width` below it on, and as far below the usual ones."""
        if not len(usual):
            return np.zeros(len(looks))
        values, others = measure(looks), measure(usual)
        middle, lower = np.quantile(others, (0.5, 0.1))
        by_limit = 0.5 + (limit - values) / (2 * width)
        by_others = (middle - values) / max(middle - lower, width / 8) / (2 * _UNUSUAL)
        return np.nan_to_num(np.minimum(by_limit, by_others).clip(0, 1))

    def rare(measure: Callable[[Looks], npt.NDArray[np.bool_]]) -> Floats:
        return LISTED * measure(looks) * (measure(usual).sum() <= max(1, _RARE * len(usual)))

    proportions = float(np.median(_proportions(usual))) if len(usual) else 0.0
    side = float(np.median(_side(usual))) if len(usual) else 0.0
    scores: dict[Issue, Floats] = {
        "unreadable": np.where(looks.readable, LISTED * looks.misnamed, 1.0),
        "dark": low(lambda some: np.log2(some.brightest + _LEVEL), -2, 4),
        "bright": low(lambda some: np.log2(1 - some.darkest + _LEVEL), -2, 4),
        "blurred": low(lambda some: some.sharpness, 1.4, 0.8),
        "empty": low(lambda some: np.log2(some.brightest - some.darkest + _LEVEL), np.log2(7 * _LEVEL), 4),
        "shape": np.max(
            [
                low(lambda some: -np.abs(_proportions(some) - proportions), -_ODD, 2),
                low(lambda some: np.log2(_side(some)), np.log2(min(_SMALL, max(side, 1) / 4)), 2),
                rare(lambda some: some.turned),
            ],
            axis=0,
        ),
        "grey": rare(lambda some: some.saturation < _GREY),
    }
    scores["blurred"][scores["empty"] >= LISTED] = 0  # one colour has no edges
    judged = {issue: np.where(looks.readable, some, 0.0) for issue, some in scores.items()}
    return judged | {"unreadable": scores["unreadable"]}


def quality_findings(looks: Looks, sources: Sequence[ImageSource]) -> list[Finding]:
    """A finding for each picture and issue with a score of at least 0.5, the worst first."""
    usual = looks.take(np.flatnonzero(looks.readable))
    findings = []
    for issue, scores in quality_scores(looks).items():
        for image in np.flatnonzero(scores >= LISTED).tolist():
            suggestion: Suggestion = "drop" if issue == "empty" or image in looks.reasons else "look"
            detail = _detail(issue, image, looks, usual, sources)
            findings.append(Finding(issue, float(scores[image]), detail, image, suggestion=suggestion))
    return sorted(findings, key=lambda finding: -finding.score)


def _proportions(looks: Looks) -> Floats:
    """The binary logarithm of width by height."""
    return np.log2(np.maximum(looks.width, 1) / np.maximum(looks.height, 1))


def _side(looks: Looks) -> Floats:
    """The side of a square with as many pixels; at least 1."""
    return np.sqrt(np.maximum(looks.width * looks.height, 1).astype(np.float64))


def _detail(issue: Issue, image: int, looks: Looks, usual: Looks, sources: Sequence[ImageSource]) -> str:
    """What was measured, and what is usual."""
    if image in looks.reasons:
        return looks.reasons[image]
    usually = {name: np.median(getattr(usual, name)) for name in ("brightest", "darkest", "sharpness")}
    match issue:
        case "unreadable":
            return f"a {looks.format[image]} named {suffix_of(source_name(sources[image]))}"
        case "dark":
            bright = looks.brightest[image]
            return f"hardly a pixel is brighter than {bright:.0%}, usual is {usually['brightest']:.0%}"
        case "bright":
            dark = looks.darkest[image]
            return f"hardly a pixel is darker than {dark:.0%}, usual is {usually['darkest']:.0%}"
        case "blurred":
            return f"sharpness {looks.sharpness[image]:.2f}, usual is {usually['sharpness']:.2f}"
        case "empty":
            return f"one shade, of {looks.brightness[image]:.0%} luminance"
        case "grey":
            return "grey among coloured pictures"
        case _:
            turned = ", turned by its EXIF data" if looks.turned[image] else ""
            size = f"{looks.width[image]} x {looks.height[image]} pixels{turned}"
            return f"{size}, usual is {np.median(usual.width):.0f} x {np.median(usual.height):.0f}"
