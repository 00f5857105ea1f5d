"""Check an answer in the model, and find the hint for a wrong one."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import io
import runpy
import sys
import traceback
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from itertools import permutations
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitascope.language import say
from vitascope.models.config import ViTConfig
from vitascope.models.vit import VisionTransformer
from vitascope_lessons.exercises import is_begun, path_of
from vitascope_lessons.faults import Function, faults
from vitascope_lessons.places import OPTIONS, place_functions
from vitascope_lessons.solutions import SOLUTIONS

SHAPE_OF_INPUTS: dict[str, Any] = {"image_size": (8, 16), "in_channels": 3, "patch_size": 4, "num_classes": 5}
SHAPE_OF_INPUTS |= {"embed_dim": 24, "depth": 2, "num_heads": 2, "mlp_ratio": 1.5}
"""Of the model that calls a reader's function for the first time. No two sizes are equal."""
OTHER_SHAPE: dict[str, Any] = {"image_size": (12, 8), "in_channels": 1, "patch_size": 2, "num_classes": 7}
OTHER_SHAPE |= {"embed_dim": 32, "depth": 2, "num_heads": 4, "mlp_ratio": 2.0}
"""For answers that are right for the first one only."""
TOLERANCE = 1e-5
"""Largest difference from our output, as a share of its largest number, that rounding explains."""
PRINTED = 1000
"""Characters of a reader's output that are kept."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """A reader's answer to one exercise.

    Attributes:
        state: `right`, `wrong`, or `to do`.
        hint: what is wrong, in one or more lines of the reader's language; empty for the others.
        printed: the beginning of what the reader's file and function print.
    """

    name: str
    state: str
    hint: str = ""
    printed: str = ""


class WrongAnswer(Exception):  # noqa: N818 - it is no error of the program
    """An answer is wrong; the message is the hint, `say` of a text and its values."""

    def __init__(self, text: str, **values: object) -> None:
        super().__init__(say(text, **values))


class Printed(io.TextIOBase):
    """Standard output that keeps the beginning of its text."""

    def __init__(self) -> None:
        self.text = ""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The one of the terminal, which `language` asks for."""
        return sys.__stdout__.encoding if sys.__stdout__ else "utf-8"

    def write(self, text: str) -> int:
        """Keep a part of a text, and tell its writer that all is written."""
        self.text += text[: PRINTED - len(self.text)]
        return len(text)


def check(folder: Path, name: str) -> Answer:
    """Run a reader's file, and compare its function with ours, by itself and in the model.

    The file may do anything to this process; `processes` gives it one of its own.
    """
    path = path_of(folder, name)
    if not is_begun(path, name):
        return Answer(name, "to do")
    printed = Printed()
    try:
        with redirect_stdout(printed), redirect_stderr(printed):
            inputs_of(name)  # before the reader's file changes torch
            check_function(path, name, function_in(path, name))
    except WrongAnswer as wrong:
        return Answer(name, "wrong", str(wrong), printed.text)
    except BaseException as error:  # noqa: BLE001 - whatever a reader's file raises, also KeyboardInterrupt
        return Answer(name, "wrong", own_error(error, path), printed.text)
    return Answer(name, "right", "", printed.text)


def function_in(path: Path, name: str) -> Function:
    """The function of a reader's file."""
    if not path.is_file():
        raise WrongAnswer(
            "{path} is a folder, a pipe or a link to nothing: remove it, and it is written again",
            path=path,
        )
    names = runpy.run_path(str(path))
    if not callable(names.get(name)):
        raise WrongAnswer("{path} has no function `{name}`: keep its name", path=path, name=name)
    return names[name]


def check_function(path: Path, name: str, function: Function) -> None:
    """Compare a function with ours, on the inputs that it gets in the model and then in the model."""
    inputs = inputs_of(name)
    random = torch.get_rng_state()
    given = [one.clone() if isinstance(one, Tensor) else one for one in inputs]
    yours = called(function, given, path, name)
    if torch.get_default_dtype() != torch.float32 or not torch.is_grad_enabled():
        raise WrongAnswer(
            "your file changes torch's default dtype or switches gradients off, which every other "
            "function shares: leave that out"
        )
    if not torch.equal(random, torch.get_rng_state()):
        raise WrongAnswer(
            "your function draws random numbers, such as those of dropout or of a new layer: compute "
            "with its inputs only"
        )
    ours = SOLUTIONS[name](*inputs)
    compare_output(name, inputs, yours, ours)
    for parameter, before, after in zip(parameters(name), inputs, given, strict=True):
        if isinstance(before, Tensor) and not torch.equal(before, after):
            raise WrongAnswer(
                "your function changes its input {parameter}, which others may need: write "
                "`{parameter} = {parameter} + ...`, not `{parameter} += ...`",
                parameter=parameter,
            )
    check_gradients(name, function, inputs)
    check_in_model(path, name, function)


def called(function: Function, inputs: list[Any], path: Path, name: str) -> Any:
    """The output of a reader's function."""
    try:
        return function(*inputs)
    except Exception as error:  # noqa: BLE001 - whatever a reader's file raises
        shapes = ", ".join(
            f"{parameter} {tuple(one.shape)}" if isinstance(one, Tensor) else f"{parameter} = {one}"
            for parameter, one in zip(parameters(name), inputs, strict=True)
            if isinstance(one, Tensor | int)
        )
        raise WrongAnswer(
            "{error}\nThe inputs were {shapes}.", error=own_error(error, path), shapes=shapes
        ) from None


def own_error(error: BaseException, path: Path) -> str:
    """An error in a reader's file, with the line in that file where it happened."""
    message = str(error).strip().splitlines()[0] if str(error).strip() else ""
    said = f"{type(error).__name__}: {message}" if message else type(error).__name__
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return at_line(path, error.lineno, (error.text or "").strip(), f"{type(error).__name__}: {error.msg}")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    if not frames:  # such as a function of too few arguments
        return f"{path}: {said}"
    return at_line(path, frames[-1].lineno, frames[-1].line, said)


def at_line(path: Path, number: int | None, code: str | None, said: str) -> str:
    """An error, below the line of code where it happened."""
    return say("{path}, line {number}: {code}\n{said}", path=path, number=number, code=code, said=said)


def compare_output(name: str, inputs: list[Any], yours: Any, ours: Tensor) -> None:
    """Raise the hint for an output that is not ours."""
    if yours is None:
        raise WrongAnswer("your function returns nothing: is `return` missing?")
    if not isinstance(yours, Tensor):
        raise WrongAnswer(
            "your function returns a {kind}; it should return a tensor of shape {shape}",
            kind=type(yours).__name__,
            shape=tuple(ours.shape),
        )
    if yours.dtype != ours.dtype:
        raise WrongAnswer(
            "your output has the dtype {yours}; expected {ours}",
            yours=str(yours.dtype),
            ours=str(ours.dtype),
        )
    yours = yours.detach()
    if equal(yours, ours):
        return
    found = next((say(hint) for hint, output in faults(name, inputs) if equal(yours, output)), None)
    if yours.shape != ours.shape:
        raise WrongAnswer(
            "your output has shape {yours}, expected {ours}: {hint}",
            yours=tuple(yours.shape),
            ours=tuple(ours.shape),
            hint=found or guess(name, inputs, yours, ours),
        )
    raise WrongAnswer(found or difference(yours, ours))


def equal(yours: Tensor, ours: Tensor) -> bool:
    """Whether outputs are the same but for rounding."""
    if yours.shape != ours.shape:
        return False
    return bool((yours.double() - ours.double()).abs().max() <= TOLERANCE * ours.double().abs().max())


def guess(name: str, inputs: list[Any], yours: Tensor, ours: Tensor) -> str:
    """A hint for a shape, if the values are none that we know."""
    same_sizes = sorted(yours.shape) == sorted(ours.shape)
    if same_sizes and any(equal(yours.permute(order), ours) for order in permutations(range(ours.ndim))):
        return say("the values are right, and the axes are in another order")
    for hint, output in faults(name, inputs):
        if output.shape == yours.shape:
            return say("perhaps {hint}", hint=say(hint))
    if same_sizes:
        return say("the axes are in another order, and the values differ too")
    return say("see the shapes in the docstring")


def difference(yours: Tensor, ours: Tensor) -> str:
    """Where an output of the right shape differs from ours."""
    if not yours.isfinite().all():
        kind = "nan" if yours.isnan().any() else "inf"
        return say("your output contains {kind}: something overflows, or zero is divided by zero", kind=kind)
    if ours.ndim == 0:
        return say(
            "the value is wrong: yours is {yours:.4g}, expected {ours:.4g}",
            yours=float(yours),
            ours=float(ours),
        )
    ratio = float((yours * ours).sum() / (ours * ours).sum())
    if equal(yours, ratio * ours) and ratio:
        return say("your numbers are {ratio:.4g} times the expected ones: a factor is wrong", ratio=ratio)
    gap = (yours - ours).abs()
    place = tuple(int(one) for one in torch.unravel_index(gap.argmax(), gap.shape))
    text = say(
        "the shape is right, the values are not: at {place} yours is {yours:.4g}, expected {ours:.4g}",
        place=list(place),
        yours=float(yours[place]),
        ours=float(ours[place]),
    )
    if ours.ndim == 3:
        right = gap.amax(dim=(0, 2)) <= TOLERANCE * ours.abs().max()  # by token
        if right.any():
            wrong = ", ".join(str(int(token)) for token in (~right).nonzero())
            text = say("{text}. Only these tokens are wrong: {wrong}", text=text, wrong=wrong)
    return text


def check_gradients(name: str, function: Function, inputs: list[Any]) -> None:
    """Raise a hint if training could not learn through the function."""
    for parameter, reached, expected in zip(
        parameters(name), gradients(function, inputs), gradients(SOLUTIONS[name], inputs), strict=True
    ):
        if expected is None:
            continue
        if reached is None or not equal(reached, expected):
            fault = (
                say("no gradient reaches {parameter}", parameter=parameter)
                if reached is None
                else say("a wrong gradient reaches {parameter}", parameter=parameter)
            )
            raise WrongAnswer(
                "the values are right, but {fault}, so it cannot be trained through it: leave out "
                "`detach`, `no_grad`, `item` and the like",
                fault=fault,
            )


def gradients(function: Function, inputs: list[Any]) -> list[Tensor | None]:
    """The gradient of a fixed weighted sum of the output, for each input; None where there is none."""
    leaves = [
        one.detach().clone().requires_grad_() if isinstance(one, Tensor) and one.is_floating_point() else one
        for one in inputs
    ]
    output = function(*leaves)
    if output.requires_grad:
        weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(0))
        (output * weights).sum().backward()
    return [one.grad if isinstance(one, Tensor) else None for one in leaves]


def check_in_model(path: Path, name: str, function: Function) -> None:
    """Compare logits and loss with the reader's function and with ours, in a model of another shape."""
    model, images, labels = model_and_images(2, OTHER_SHAPE)
    expected = logits_and_loss(model, {}, images, labels)
    at_fault = say(
        "Right for one model and 3 images, but not for a model of another width and 2 images of another "
        "size: take all sizes from the inputs"
    )
    try:
        yours = logits_and_loss(model, {name: function}, images, labels)
    except Exception as error:  # noqa: BLE001 - whatever a reader's file raises
        raise WrongAnswer(f"{own_error(error, path)}\n{at_fault}") from None
    if not all(map(equal, yours, expected)):
        raise WrongAnswer(at_fault)
    if name == "loss":
        large = [1000 * torch.eye(5)[1:3], torch.tensor([0, 1])]
        found = called(function, large, path, name)
        if not equal(found, SOLUTIONS[name](*large)):
            raise WrongAnswer(
                "for logits of 1000 your loss is {found:.4g}, expected 1000: use `log_softmax`, which "
                "does not overflow, and not the logarithm of the softmax",
                found=float(found),
            )


def logits_and_loss(
    model: VisionTransformer, functions: Mapping[str, Function], images: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor]:
    """The logits and the loss, with functions in the places of ours."""
    place_functions(model, functions)
    logits = model(images)
    return logits, functions.get("loss", F.cross_entropy)(logits, labels)


def model_and_images(batch: int, shape: Mapping[str, Any]) -> tuple[VisionTransformer, Tensor, Tensor]:
    """A small model with random numbers in all its parameters, so that none is without effect."""
    config = ViTConfig(**shape, **OPTIONS)
    random = torch.Generator().manual_seed(0)
    model = VisionTransformer(config).eval()
    for parameter in model.parameters():
        width = parameter[0].numel() if parameter.ndim == 2 else 4
        nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=width**-0.5, generator=random)
    H, W = config.image_hw
    wider = torch.randn(batch, config.in_channels, H, W + 1, generator=random)
    images = wider[..., 1:]  # a slice, as in training: `view` does not join its axes
    labels = torch.randint(0, config.num_classes, (batch,), generator=random)
    return model.requires_grad_(False), images, labels


@functools.cache
def inputs_of(name: str) -> list[Any]:
    """The inputs of an exercise's function when the model calls it for the first time."""
    found: list[list[Any]] = []

    def record(*inputs: Any) -> Tensor:
        found.append([one.clone() if isinstance(one, Tensor) else one for one in inputs])
        return SOLUTIONS[name](*inputs)

    model, images, labels = model_and_images(3, SHAPE_OF_INPUTS)
    logits_and_loss(model, {name: record}, images, labels)
    return found[0]


def parameters(name: str) -> list[str]:
    """The names of the inputs of an exercise's function."""
    return list(inspect.signature(SOLUTIONS[name]).parameters)
