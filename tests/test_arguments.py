"""Arguments of public functions are checked against their annotations."""

import inspect
import os
from collections.abc import Iterable
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

import vitascope as vs
from tests.models import small_model
from tests.test_public_api import FROZEN
from vitascope.arguments import checked

FUNCTIONS = [path for path in FROZEN if not path.startswith("VisionTransformer.") and path != "list_models"]
FREE = {"images", "picture", "pictures"}  # what reads pictures rejects others, with its own error


@checked
def call(
    count: int,
    share: float = 0.5,
    *,
    place: str | os.PathLike[str] | None = None,
    many: Iterable[str] = (),
    views: Literal[1, 2] = 1,
) -> tuple[Any, ...]:
    """A public function."""
    return count, share, place, many


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        (("3",), {}, "count must be a whole number, not '3'"),
        ((1.5,), {}, "count must be a whole number, not 1.5"),
        ((True,), {}, "count must be a whole number, not True"),
        ((1, "0.1"), {}, "share must be a number, not '0.1'"),
        ((1, float("nan")), {}, "share must be a number, not nan"),
        ((1, 10**400), {}, "share must be a number, not 1000"),
        ((1,), {"place": 5}, "place must be text or a path or null, not 5"),
        ((1,), {"many": None}, "many must be a list of text, not None"),
        ((1,), {"views": 3}, "views must be one of 1, 2, not 3"),
        ((1,), {"views": "2"}, "views must be one of 1, 2, not '2'"),
        ((1,), {"views": True}, "views must be one of 1, 2, not True"),
    ],
)
def test_another_type_is_named_with_the_accepted_ones(args: Any, options: Any, message: str) -> None:
    with pytest.raises(vs.UserError) as raised:
        call(*args, **options)
    assert str(raised.value).startswith(message)


def test_numbers_of_numpy_paths_and_the_signature_are_kept() -> None:
    assert call(np.int64(3), np.float32(0.25), place=Path("x"), many=["a"]) == (3, 0.25, Path("x"), ["a"])
    assert type(call(np.int64(3))[0]) is int  # torch rejects NumPy's
    assert list(inspect.signature(call).parameters) == ["count", "share", "place", "many", "views"]
    with pytest.raises(TypeError, match="missing"):
        call()  # type: ignore[call-arg]


def test_unknown_argument_is_named_with_the_nearest_one() -> None:
    with pytest.raises(vs.UserError, match=r"^call has no argument 'shar'; nearest: share$"):
        call(1, shar=0.5)  # type: ignore[call-arg]
    with pytest.raises(vs.UserError, match=r"^Predictor has no argument 'topk'; it takes model, precision, "):
        vs.Predictor("cifar10", topk=5)  # type: ignore[call-arg]


@pytest.mark.parametrize("path", FUNCTIONS)
def test_every_public_function_rejects_an_argument_of_another_type(path: str, tmp_path: Path) -> None:
    function = attrgetter(path)(vs)
    needed = {
        "model": "clip"
        if path in ("zero_shot", "calibrate")
        else small_model(),  # texts are read from its files
        "runs": [],
        "folder": tmp_path,
        "heatmap": torch.zeros(4, 4),
        "patch": (0, 0),
        "self": None,
        "config": {},
    }
    parameters = {
        name: each
        for name, each in inspect.signature(function).parameters.items()
        if each.kind != each.VAR_KEYWORD
    }
    wrong = object()
    for name in parameters.keys() - FREE - {"self"}:
        given = {
            other: needed.get(other, "cifar10")
            for other, each in parameters.items()
            if each.default is each.empty and other != name
        }
        with pytest.raises(vs.UserError, match=rf"\b{name}\b.*object"):
            function(**given, **{name: wrong})


def test_a_model_of_something_else_than_its_configuration_is_rejected() -> None:
    with pytest.raises(vs.UserError, match="config must be ViTConfig, not 'vit_b16'"):
        vs.VisionTransformer("vit_b16")  # type: ignore[arg-type]
