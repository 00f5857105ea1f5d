"""Pictures that are unreadable, dark, bright, blurred, empty, of an odd shape, or grey among coloured ones.

A picture is listed if a fixed limit says so and it is also unusual among these data: in a set
of X-rays, night pictures or scanned texts nothing is listed that all of them have, but pictures of one shade.
"""

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from vitascope.data.finding import Finding, Issue
from vitascope.data.looks import Looks

Floats = npt.NDArray[np.float64]

LISTED = 0.5
"""The score from which on a picture is listed."""
_UNUSUAL = 2.5  # distances between the 10% quantile and the median, below the median
_RARE = 0.01  # share of grey pictures up to which these are listed
_GREY = 0.004  # mean difference between channels, about that of a grey JPEG
_LEVEL = 1 / 255
_SMALL = 128  # pixels of a side: smaller pictures are tiny if the others are four times as large
_ODD = np.log2(2.5)  # times the proportions of the usual picture
_LOW: Mapping[Issue, tuple[Callable[[Looks], Floats], float, float]] = {
    "dark": (lambda looks: np.log2(looks["brightest"] + _LEVEL), -2, 4),
    "bright": (lambda looks: np.log2(1 - looks["darkest"] + _LEVEL), -2, 4),
    "blurred": (lambda looks: looks["sharpness"], 1.4, 0.8),
    "empty": (lambda looks: np.log2(looks["brightest"] - looks["darkest"] + _LEVEL), np.log2(7 * _LEVEL), 4),
}
"""Measures that are low in bad pictures, the limit, and how far below it the score is 1."""
_DETAILS: Mapping[Issue, str] = {
    "unreadable": "a {look[format]} named {look[misnamed]}",
    "dark": "hardly a pixel is brighter than {look[brightest]:.0%}, usual is {usual[brightest]:.0%}",
    "bright": "hardly a pixel is darker than {look[darkest]:.0%}, usual is {usual[darkest]:.0%}",
    "blurred": "sharpness {look[sharpness]:.2f}, usual is {usual[sharpness]:.2f}",
    "empty": "one shade, of {look[brightness]:.0%} luminance",
    "grey": "grey among coloured pictures",
    "shape": "{look[width]} x {look[height]} pixels, usual is {usual[width]:.0f} x {usual[height]:.0f}",
}


def grey_is_rare(looks: Looks) -> bool:
    """Whether so few pictures are grey that these are listed."""
    return bool((looks["saturation"] < _GREY).sum() <= max(1, _RARE * len(looks)))


def quality_scores(looks: Looks, usual: Looks | None = None) -> dict[Issue, Floats]:
    """The scores of N readable pictures, (N,) per issue, from 0 to 1; a picture is listed from 0.5 on.

    Args:
        looks: of the pictures to judge.
        usual: of the data among which they are judged, at least one; None for the same pictures.
    """
    usual = looks if usual is None else usual

    def low(measure: Callable[[Looks], Floats], limit: float, width: float) -> Floats:
        """Scores of values below a limit, 1 from `width` below it on, and as far below the usual ones."""
        middle, lower = np.quantile(measure(usual), (0.5, 0.1))
        by_limit = 0.5 + (limit - measure(looks)) / (2 * width)
        by_others = (middle - measure(looks)) / max(middle - lower, width / 8) / (2 * _UNUSUAL)
        return np.minimum(by_limit, by_others).clip(0, 1)

    proportions, side = np.median(_proportions(usual)), np.median(_side(usual))
    scores = {issue: low(*judgement) for issue, judgement in _LOW.items()}
    scores["empty"] = np.maximum(scores["empty"], looks["plain"])  # however many there are
    shapes = [
        low(lambda some: -np.abs(_proportions(some) - proportions), -_ODD, 2),
        low(lambda some: np.log2(_side(some)), np.log2(min(_SMALL, side / 4)), 2),
    ]
    grey = (looks["saturation"] < _GREY) & grey_is_rare(usual)
    scores["grey"] = np.where(grey, LISTED, 0.0)
    for issue in scores.keys() - {"empty"}:  # a picture of one colour is in one list
        scores[issue][scores["empty"] >= LISTED] = 0
    misnamed = LISTED * looks["misnamed"].astype(bool)
    return {**scores, "unreadable": misnamed, "shape": np.max(shapes, axis=0)}


def quality_findings(looks: Looks, scores: Mapping[Issue, Floats]) -> list[Finding]:
    """A finding for each picture that cannot be read, and for each issue of another with a score of at least
    0.5. `scores` are from `quality_scores`, of those that can be read: at least one."""
    unreadable, readable = np.flatnonzero(looks["width"] == 0), np.flatnonzero(looks["width"])
    findings = [
        Finding("unreadable", 1.0, looks["reason"][image], image, drop=True) for image in unreadable.tolist()
    ]
    numbers = ("brightest", "darkest", "sharpness", "width", "height")
    usual = {name: np.median(looks[name][readable]) for name in numbers}
    for issue, values in scores.items():
        for score, image in zip(values.tolist(), readable.tolist(), strict=True):
            if score >= LISTED:
                detail = _DETAILS[issue].format(look=looks[image], usual=usual)
                findings.append(Finding(issue, score, detail, image, drop=issue == "empty"))
    return findings


def _proportions(looks: Looks) -> Floats:
    """The binary logarithm of width by height."""
    return np.log2(looks["width"] / looks["height"])


def _side(looks: Looks) -> Floats:
    """The side of a square with as many pixels."""
    return np.sqrt(looks["width"] * looks["height"])
