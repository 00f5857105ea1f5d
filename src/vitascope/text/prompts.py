"""Prompts: the texts in which a class is named, as `a photo of a {}.`"""

from __future__ import annotations

from collections.abc import Sequence

from vitascope.errors import UserError, nearest

ONE = "a photo of {}."
"""The template of `zero_shot`, for names that begin with their article, such as `a cat`."""

PROMPTS: dict[str, tuple[str, ...]] = {
    "name": ("{}",),
    "photo": ("a photo of a {}.",),
    "photos": (
        "a photo of a {}.",
        "a close-up of a {}.",
        "a {} seen from far away.",
        "a bright picture of a {}.",
        "a dark picture of a {}.",
        "a blurred picture of a {}.",
        "a small picture of a {}.",
        "part of a {}.",
        "several pictures of a {}.",
        "a drawing of a {}.",
    ),
}
"""Sets of templates by name."""
MAX_TEMPLATES = 1_000


def templates(prompts: str | Sequence[str] | None) -> tuple[str, ...]:
    """One or several templates, or names in `PROMPTS` of several; None is `ONE`.

    Raises:
        UserError: none, too many, or one without exactly one `{}`.
    """
    given = (ONE,) if prompts is None else (prompts,) if isinstance(prompts, str) else tuple(prompts)
    given = tuple(template for one in given for template in PROMPTS.get(one, (one,)))
    if not 0 < len(given) <= MAX_TEMPLATES:
        raise UserError(f"{len(given)} prompts: give 1 to {MAX_TEMPLATES}, such as {ONE!r}")
    for template in given:
        if template.count("{}") != 1:
            hint = nearest(template, PROMPTS) if "{" not in template else ""
            raise UserError(
                f"prompt {template[:100]!r} has not one {{}} for the name of a class{hint}; sets with a name "
                f"are {', '.join(PROMPTS)}"
            )
    return given
