"""Names of ImageNet-1k's classes, for checkpoints with these classes that do not store their names."""

import functools
import re
from importlib import resources


@functools.cache
def imagenet_classes() -> tuple[str, ...]:
    """The 1000 names by the index of ILSVRC 2012: each synset's first word in WordNet."""
    # Two words name two synsets each, distinguished as in torchvision: "crane bird", "maillot tank suit".
    text = resources.files("vitascope.models.weights").joinpath("imagenet_classes.txt").read_text("utf-8")
    return tuple(text.splitlines())


def is_imagenet(tag: object) -> bool:
    """Whether timm's tag, such as "augreg_in21k_ft_in1k", names ImageNet-1k as the last training set."""
    return isinstance(tag, str) and re.search(r"(^|_)in1k$", tag) is not None
