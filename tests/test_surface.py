"""The size of the surface, as a record that only goes down.

A change that needs more says what goes instead; only an issue that names the number may raise a record.
"""

import ast
import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import vitascope as vs
from tests.cli import SHAPE
from tests.test_architecture import FILES, ROOT, layer_of, nodes_of
from vitascope.analysis.explain.methods import METHODS
from vitascope.cli import COMMANDS
from vitascope.cli.parsing import fields_of
from vitascope.data.samples import PHOTOS
from vitascope.data.table_options import TableOptions
from vitascope.deploy.server.settings import Settings
from vitascope.models.config import ViTConfig
from vitascope.training.options.recipes import GROUP_OF

TESTS = Path(__file__).parent
SLACK = {"lines of Python": 150, "lines of tests": 150, "lines of JavaScript": 30, "modules of": 2}
"""By how much a number may be below its record; others are equal to it."""
RECORD: dict[str, int] = {
    "options of training": 88,
    "options of the model": 61,
    "options of tables": 8,
    "fields of the command line": 151,
    "settings of the server": 26,
    "commands": 24,
    "heatmap methods": 9,
    "public names": 66,
    "lines of Python": 58851,
    "lines of JavaScript": 5989,
    "lines of tests": 58400,
    "raise sites": 925,
    "constructions of TrainConfig": 5,
    "questions after the kind of labels": 20,
    "calls of is_url": 0,
    "modules of a prediction": 72,
    "modules of a training": 192,
    "modules of the server": 78,
}


def lines_of(folder: Path, ending: str) -> int:
    return sum(len(path.read_bytes().splitlines()) for path in folder.rglob(f"*.{ending}"))


def counted(kind: type[ast.AST], *layers: str, measure: Any = lambda node: 1) -> int:
    """The nodes of the syntax trees, of some layers or of all, or the sum of a measure of them."""
    files = [path for path in FILES if not layers or layer_of(path) in layers]
    return sum(measure(node) for path in files for node in nodes_of(path) if isinstance(node, kind))


def is_call_of(*names: str) -> Any:
    """Whether a call is of a function, or of a method of a class, of these names."""

    def condition(node: Any) -> bool:
        called = node.func.value if isinstance(node.func, ast.Attribute) else node.func
        return isinstance(called, ast.Name) and called.id in names

    return condition


def asks_kind_of_labels(node: Any) -> bool:
    """Whether an attribute or a text asks for one class per image or several."""
    return (
        getattr(node, "attr", "") in ("exclusive", "several") or getattr(node, "value", "") == "independent"
    )


def surface() -> dict[str, int]:
    return {
        "options of training": len(GROUP_OF),
        "options of the model": len(ViTConfig.groups()),
        "options of tables": len(dataclasses.fields(TableOptions)),
        "fields of the command line": sum(
            not field.is_group for command in COMMANDS.values() for field in fields_of(command)
        ),
        "settings of the server": len(dataclasses.fields(Settings)),
        "commands": len(COMMANDS),
        "heatmap methods": len(METHODS),
        "public names": len(vs.__all__) + len(vs.explain.__all__),
        "lines of Python": lines_of(ROOT, "py"),
        "lines of JavaScript": lines_of(ROOT, "js"),
        "lines of tests": lines_of(TESTS, "py"),
        "raise sites": counted(ast.Raise),
        "constructions of TrainConfig": counted(
            ast.Call, "training", measure=is_call_of("TrainConfig", "configuration")
        ),
        "questions after the kind of labels": counted(ast.expr, measure=asks_kind_of_labels)
        - sum(map(asks_kind_of_labels, nodes_of(ROOT / "data" / "targets.py"))),
        "calls of is_url": counted(ast.Call, measure=is_call_of("is_url"))
        - counted(ast.Call, "remote", measure=is_call_of("is_url")),
    }


PREDICTION = f"import vitascope as vs; vs.Predictor('cifar10')({str(PHOTOS['horse'])!r})"
TRAINING = f"""
from vitascope.cli import main
main(['train', '--data', 'digits', '--steps', '1', '--run', 'run', *{SHAPE}])
"""
SERVER = """
from vitascope.deploy.server.app import create_app
from vitascope.deploy.server.settings import Settings
from vitascope.models.engines.runtimes import open_engine
create_app({"": lambda: open_engine('cifar10')}, Settings())
"""
LOADED = {
    "modules of a prediction": PREDICTION,
    "modules of a training": TRAINING,
    "modules of the server": SERVER,
}


def modules_of(code: str, folder: Path) -> int:
    """The modules of the package that are loaded by a program, late ones too."""
    names = "[name for name in sys.modules if name.startswith('vitascope')]"
    program = f"import json, sys\n{code}\nprint(json.dumps({names}))"
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return len(json.loads(done.stdout.splitlines()[-1]))


def judge(name: str, number: int) -> str:
    """What is wrong with a number beside its record; empty if nothing is."""
    slack = next((slack for start, slack in SLACK.items() if name.startswith(start)), 0)
    if number > RECORD[name]:
        return f"{name}: {number:,}, and the record is {RECORD[name]:,}: say what goes instead"
    if number < RECORD[name] - slack:
        return f"{name}: {number:,}, and the record is {RECORD[name]:,}: lower the record"
    return ""


def test_surface_is_the_recorded_one() -> None:
    found = surface()
    assert found.keys() | LOADED.keys() == RECORD.keys()
    assert not list(filter(None, (judge(name, number) for name, number in found.items())))


@pytest.mark.parametrize("name", LOADED)
def test_programs_load_the_recorded_modules(name: str, tmp_path: Path) -> None:
    assert not judge(name, modules_of(LOADED[name], tmp_path))


def test_larger_and_smaller_numbers_than_the_record_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECORD, "commands", 7)
    assert judge("commands", 8) == "commands: 8, and the record is 7: say what goes instead"
    assert judge("commands", 6) == "commands: 6, and the record is 7: lower the record"
    assert judge("commands", 7) == ""
