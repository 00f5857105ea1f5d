import ast
import errno
import math
from pathlib import Path

import pytest
import torch

from tests.models import small_model
from tests.test_walkthrough import HAN
from vitascope.errors import UserError
from vitascope_lessons.checking import SHAPE_OF_INPUTS, check, inputs_of, logits_and_loss, model_and_images
from vitascope_lessons.exercises import (
    NAMES,
    TO_WRITE,
    docstrings,
    exercise_text,
    path_of,
    solution_text,
    write_exercises,
)
from vitascope_lessons.places import place_functions
from vitascope_lessons.practice import practice
from vitascope_lessons.solutions import SOLUTIONS


@pytest.mark.parametrize("name", NAMES)
def test_exercise_is_the_solution_without_its_body_and_to_do_in_every_language(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    english, solution = exercise_text(name), solution_text(name)
    start = english.index(TO_WRITE)
    assert english[:start] == solution[:start]
    assert english[start:].count("\n") == 1
    ours, theirs = (ast.parse(text).body[-1] for text in (solution, english))
    assert isinstance(ours, ast.FunctionDef)
    assert isinstance(theirs, ast.FunctionDef)
    assert (ours.name, ast.dump(ours.args)) == (name, ast.dump(theirs.args))
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    chinese = exercise_text(name)
    for said, translated in zip(docstrings(english), docstrings(chinese), strict=True):
        assert HAN.search(translated)
        english = english.replace(said, translated)
    assert chinese.split(TO_WRITE)[0] == english.split(TO_WRITE)[0]
    path_of(tmp_path, name).write_text(chinese, encoding="utf-8")
    for language in ("zh_CN.UTF-8", "C.UTF-8"):
        monkeypatch.setenv("LC_ALL", language)
        assert check(tmp_path, name).state == "to do"


def test_exercises_that_exist_are_not_written_again(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "learn"
    written = write_exercises(folder)
    assert written == [path_of(folder, name) for name in NAMES] == sorted(folder.iterdir())
    written[0].write_text("mine")
    written[1].unlink()
    assert write_exercises(folder) == [written[1]]
    assert written[0].read_text() == "mine"


def test_full_disk_leaves_no_part_of_an_exercise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_half(path: Path, text: str, encoding: str) -> None:
        path.write_bytes(text[:20].encode(encoding))
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(Path, "write_text", write_half)
        with pytest.raises(UserError, match="the exercises cannot be written: No space"):
            write_exercises(tmp_path)
    assert not any(tmp_path.iterdir())
    assert len(write_exercises(tmp_path)) == len(NAMES)


def test_folder_of_other_files_is_left_alone_but_for_files_that_another_call_is_writing(tmp_path) -> None:
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(UserError, match="name a new folder"):
        write_exercises(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    (tmp_path / "thesis.txt").rename(tmp_path / ".123.1_patches.py")
    assert len(write_exercises(tmp_path)) == len(NAMES)
    assert [tuple(one.shape) for one in inputs_of("attention")] == [(3, 2, 9, 12)] * 3


@pytest.mark.parametrize("names", [*((name,) for name in NAMES), NAMES], ids="+".join)
def test_functions_in_their_places_give_the_logits_and_the_loss_of_the_model(names: tuple[str, ...]) -> None:
    model, images, labels = model_and_images(2, SHAPE_OF_INPUTS)
    before = logits_and_loss(model, {}, images, labels)
    keys = list(model.state_dict())
    calls = []

    def counted(name):
        return lambda *inputs: calls.append(name) or SOLUTIONS[name](*inputs)

    after = logits_and_loss(model, {name: counted(name) for name in names}, images, labels)
    assert set(calls) == set(names)
    assert list(model.state_dict()) == keys
    for ours, theirs in zip(before, after, strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-5)


def test_other_models_keep_their_parts() -> None:
    model, other = small_model().eval(), small_model().eval()
    images = torch.randn(2, 3, *model.config.image_hw)
    before = other(images)
    place_functions(model, {"mlp": lambda z, W_1, W_2: 1 / 0})
    with pytest.raises(ZeroDivisionError):
        model(images)
    assert torch.equal(other(images), before)


def test_practice_trains_a_model_with_the_functions() -> None:
    values = []

    def loss(logits, labels):
        assert len(labels) == 32
        values.append(SOLUTIONS["loss"](logits, labels))
        return values[-1]

    lines: list[str] = []
    accuracy = practice({"loss": loss}, lines.append, epochs=1)
    assert len(values) == (1293 // 32)
    assert values[0].item() == pytest.approx(math.log(10))  # a head of zeros
    assert values[-1] != values[0]
    assert len(lines) == 1
    assert 0 < accuracy < 1
