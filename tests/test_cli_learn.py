"""`vitascope learn`: its files, its output and its errors."""

import sys
from functools import partial
from pathlib import Path

import pytest

from vitascope.cli import main
from vitascope_lessons import command
from vitascope_lessons.exercises import NAMES, path_of, solution_text


@pytest.fixture(autouse=True)
def _readers_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "practice", partial(command.practice, epochs=1))


def learn(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["learn", *arguments]) == 0
    return capsys.readouterr().out


def solve(*names: str) -> None:
    for name in names:
        path_of(Path("learn"), name).write_text(solution_text(name))


def test_first_call_writes_the_exercises_and_names_the_next_step(capsys) -> None:
    said = learn(capsys)
    assert said.count("wrote learn/") == len(NAMES)
    assert said.endswith("Open the first, write its equation, and run `vitascope learn` again.\n")


def test_answers_are_listed_with_their_hints_and_the_next_file(capsys) -> None:
    learn(capsys)
    solve("patches", "attention")
    path = path_of(Path("learn"), "attention")
    path.write_text(path.read_text().replace("** 0.5", "").replace("    A =", "    print(q.shape)\n    A ="))
    lines = learn(capsys).splitlines()
    assert lines[:2] == ["1 patches     right", "2 positions   to do"]
    assert lines[2:5] == [
        "3 attention   wrong",
        "    | torch.Size([3, 2, 9, 12])",
        "    the scores are divided by D_h; divide them by its square root",
    ]
    assert lines[-1] == "Next: learn/2_positions.py"


def test_all_answers_are_trained_in_the_places_of_ours(capsys) -> None:
    learn(capsys)
    solve(*NAMES)
    path = path_of(Path("learn"), "mlp")
    path.write_text(path.read_text().replace("    return", "    print('a line')\n    return"))
    assert "The model is yours now. `vitascope learn --train` trains it." in learn(capsys)
    said = learn(capsys, "--train")
    assert f"training with 8 of your parts: {', '.join(NAMES)}\n" in said
    assert "a line" not in said.split("training")[1]
    assert said.endswith("% of 360 test images are right\n")


def test_solution_is_printed(capsys) -> None:
    assert learn(capsys, "--solution", "multi_head") == solution_text("multi_head")
    assert not Path("learn").exists()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--solution", "atention"], "unknown exercise 'atention'; nearest: attention"),
        (["--solution", "mlp", "--train"], "give --train or --solution, not both"),
        (["taken"], "taken is a file"),
    ],
)
def test_requests_that_cannot_be_met_are_one_line(arguments: list[str], error: str, capsys) -> None:
    Path("taken").touch()
    assert main(["learn", *arguments]) == 2
    assert error in capsys.readouterr().err


def test_missing_package_is_named_with_the_command_that_installs_it(capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "vitascope_lessons", None)
    assert main(["learn"]) == 2
    line, _ = capsys.readouterr().err.splitlines()
    assert line.endswith("vitascope-lessons, a package in the repository of vitascope: pip install ./lessons")
    assert not Path("learn").exists()
