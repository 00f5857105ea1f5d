"""Words for numbers in what the commands print."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """`1 picture`, `2,000 pictures`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
