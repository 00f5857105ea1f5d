"""Numbers as text, for the console, the server and the report."""

from __future__ import annotations

import datetime


def counted(count: int, noun: str) -> str:
    """A count with its noun: `1 epoch`, `1,000 epochs`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def duration(seconds: float) -> str:
    """A time: `12.3 s`, or `0:02:05` from two minutes on."""
    return f"{seconds:.1f} s" if seconds < 120 else str(datetime.timedelta(seconds=round(seconds)))


def speed(images_per_second: float) -> str:
    """A speed with at least two digits: `1,234 images/s`, `0.042 images/s`."""
    digits = ",.0f" if images_per_second >= 10 else ".2g"
    return f"{images_per_second:{digits}} images/s"
