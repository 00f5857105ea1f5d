"""Photographs to try a model on: of five classes of CIFAR-10, but none of its images."""

from pathlib import Path

PHOTOS = {
    label: Path(__file__).parent / f"{label}.jpg"
    for label in ("horse", "cat", "dog", "airplane", "automobile")
}
"""JPEG files by class."""
SYNONYMS = {
    "horse": ("horse", "sorrel"),
    "cat": ("cat", "kitten"),
    "dog": ("dog", "puppy", "beagle"),
    "airplane": ("airplane", "aeroplane", "plane", "airliner", "aircraft"),
    "automobile": ("automobile", "car", "cab", "taxi"),
}
"""Words of other class names for the same."""
CREDIT = "Pexels, CC0"
"""Their source and licence; `README.md` beside them has each photograph's address."""
