"""Small faults drawn at random from the source, and how many of them the tests notice.

    python benchmarks/mutations.py draw --faults FILE --count 100 --seed 0
    python benchmarks/mutations.py reach --faults FILE --tree CHECKOUT
    python benchmarks/mutations.py judge --faults FILE --tree CHECKOUT --verdicts FILE

`draw` chooses the faults among all places in functions where one of these can be made: a comparison with its
bound or its opposite, another operation of arithmetic, `and` for `or`, a number one larger, `True` for
`False`, a condition without its `not`, a result that is `None`, a call that is left out.

`reach` runs the suite of a checkout once, in which every place writes down the tests that come by. `judge`
puts one fault at a time into a copy of a checkout, and runs those tests until one fails: first those of the
file of tests that belongs to the module, at most LIMIT of them. A fault whose tests all pass is missed. Each
fault has a process of its own, forked from one that has imported the libraries, which takes longer than most
tests.
"""

from __future__ import annotations

import argparse
import ast
import copy
import dataclasses
import importlib
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
SOURCE = Path("src", "vitascope")
OTHER: dict[type[Any], type[Any]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Div,
    ast.Mod: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
LIBRARIES = ("torch", "numpy", "scipy.stats", "sklearn.linear_model", "pytest", "hypothesis", "PIL.Image")
PATIENCE = 60.0
"""Seconds of the tests of a fault, by the run of `reach`."""
NEAREST = 4
"""Files of tests in which a fault is looked for with --files."""
ENDLESS = 600.0
"""Seconds after which tests are ended; the fault is noticed."""
PROBE = '''
import os

_REACHED = set()


def reach(number):
    """Write down that the present test has come by a place."""
    entry = (number, os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0])
    if entry not in _REACHED:
        _REACHED.add(entry)
        with open(FILE, "a", encoding="utf-8") as file:
            file.write(f"{number}\\t{entry[1]}\\n")
'''


@dataclasses.dataclass(kw_only=True)
class Fault:
    """A line of the source, and what stands there instead."""

    path: str  # from the root of the checkout
    line: int  # from 1
    before: str
    after: str
    statement: int  # the first line of the statement that it is in
    tests: dict[str, float] = dataclasses.field(default_factory=dict)
    """The tests that come by, and their seconds."""

    def parses(self) -> bool:
        """Whether the file is still Python with the fault in it."""
        lines = (ROOT / self.path).read_text(encoding="utf-8").split("\n")
        lines[self.line - 1] = self.after
        try:
            ast.parse("\n".join(lines))
        except SyntaxError:
            return False
        return True

    def plant(self, tree: Path) -> None:
        """Put the fault into a checkout, at the same text nearest to the line."""
        file = tree / self.path
        lines = file.read_text(encoding="utf-8").split("\n")
        same = [number for number, line in enumerate(lines, 1) if line == self.before]
        if not same:
            raise LookupError(f"{self.path} has no line {self.before.strip()!r}")
        lines[min(same, key=lambda number: abs(number - self.line)) - 1] = self.after
        file.write_text("\n".join(lines), encoding="utf-8")


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """What may stand in the place of a node."""
    other = copy.deepcopy(node)
    if isinstance(node, ast.Compare) and isinstance(other, ast.Compare):
        other.ops[0] = OTHER[type(node.ops[0])]()
    elif isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(node.op) in OTHER:
        other.op = OTHER[type(node.op)]()  # type: ignore[attr-defined]
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        other = ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        other = ast.Constant(node.value + 1)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        other = node.operand
    elif isinstance(node, ast.Return) and node.value is not None:
        other = ast.Return(ast.Constant(None))
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        other = ast.Pass()
    else:
        return
    yield other


def faults_of(path: Path) -> Iterator[Fault]:
    """Every fault that can be made in the functions of a file, within a line."""
    text = (ROOT / path).read_text(encoding="utf-8")
    lines = text.split("\n")

    def visit(node: ast.AST, statement: int, inside: bool) -> Iterator[Fault]:
        if isinstance(node, ast.stmt) and not lines[node.lineno - 1].lstrip().startswith("elif "):
            statement = min([node.lineno, *(mark.lineno for mark in getattr(node, "decorator_list", []))])
        line = getattr(node, "lineno", 0)
        if inside and line and line == getattr(node, "end_lineno", 0) and lines[line - 1].isascii():
            start, end = node.col_offset, node.end_col_offset  # type: ignore[attr-defined]
            before = lines[line - 1]
            for other in changes(node):
                text = ast.unparse(other)
                if isinstance(node, ast.expr):
                    text = f"({text})" if not isinstance(node, ast.Constant) else text
                after = before[:start] + text + before[end:]
                yield Fault(path=path.as_posix(), line=line, before=before, after=after, statement=statement)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list") or isinstance(node, ast.JoinedStr):
                continue
            within = inside or (isinstance(node, ast.FunctionDef) and name == "body")
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from visit(child, statement, within)

    yield from visit(ast.parse(text), 0, False)


def draw(count: int, seed: int) -> list[Fault]:
    """Faults drawn at random from the whole source."""
    files = sorted(path.relative_to(ROOT) for path in (ROOT / SOURCE).rglob("*.py"))
    faults = [fault for path in files for fault in faults_of(path)]
    random.Random(seed).shuffle(faults)
    return list(itertools.islice(filter(Fault.parses, faults), count))


def copy_of(tree: Path, folder: Path) -> Path:
    """A copy of a checkout without what git ignores."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=tree, capture_output=True, check=True)
    for name in listed.stdout.decode().split("\0"):
        if name and (tree / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(tree / name, folder / name)
    return folder


def paths(tree: Path) -> str:
    return os.pathsep.join(map(str, (tree / "src", tree / "lessons", tree)))


def reach(faults: list[Fault], tree: Path, jobs: int) -> None:
    """Run the suite of a checkout, and give each fault the tests that come by its statement."""
    with tempfile.TemporaryDirectory() as temporary:
        folder, written = copy_of(tree, Path(temporary, "tree")), Path(temporary, "reached")
        probe = folder / SOURCE / "_probe.py"
        probe.write_text(PROBE.replace("FILE", repr(str(written))), encoding="utf-8")
        for path in {fault.path for fault in faults}:
            lines = (folder / path).read_text(encoding="utf-8").split("\n")
            here = [(fault.statement, number) for number, fault in enumerate(faults) if fault.path == path]
            for statement, number in sorted(here, reverse=True):
                line = lines[statement - 1]
                indent = line[: len(line) - len(line.lstrip())]
                lines.insert(statement - 1, f'{indent}__import__("vitascope._probe")._probe.reach({number})')
            (folder / path).write_text("\n".join(lines), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-q", "-n", str(jobs), "--dist", "loadfile"]
        command += ["--junitxml", str(folder / "seconds.xml"), "-o", "junit_duration_report=total"]
        subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": paths(folder)}, check=False)
        seconds = seconds_of(folder / "seconds.xml")
        for entry in sorted(set(written.read_text(encoding="utf-8").splitlines())):
            place, _, test = entry.partition("\t")
            if test:
                faults[int(place)].tests[test] = seconds.get(test, PATIENCE)


def seconds_of(report: Path) -> dict[str, float]:
    """The seconds of each test in a report of pytest."""
    cases = ElementTree.parse(report).getroot().iter("testcase")
    return {
        f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}": float(case.get("time", 0))
        for case in cases
    }


def nearest_first(fault: Fault) -> list[str]:
    """The tests of a fault in their order, as many as fit."""
    module = Path(fault.path).relative_to(SOURCE)
    ranks = {test: module.stem not in Path(test.partition("::")[0]).stem for test in fault.tests}
    order = sorted(fault.tests, key=lambda test: (ranks[test], fault.tests[test], test))
    ends = itertools.accumulate(fault.tests[test] for test in order)
    return [test for test, end in zip(order, ends, strict=True) if end <= PATIENCE] or order[:1]


def judge(fault: Fault, folder: Path, tree: Path, *, files: bool) -> str:
    """The verdict on a fault in a copy of a checkout: "noticed", "missed", or why it could not be judged."""
    file = folder / fault.path
    try:
        fault.plant(folder)
    except (LookupError, FileNotFoundError) as error:
        return f"gone: {error}"
    tests = nearest_first(fault)
    if files:
        tests = list(dict.fromkeys(test.partition("::")[0] for test in tests))[:NEAREST]
    tests = [test for test in tests if (folder / test.partition("::")[0]).is_file()]
    process = os.fork() if tests else 0
    if tests and not process:
        run_tests(tests, folder)
    began, status = time.monotonic(), 0
    while tests and time.monotonic() - began < ENDLESS:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            break
        time.sleep(0.1)
    else:
        if tests:
            os.killpg(process, 9)
            os.waitpid(process, 0)
            status = 1
    shutil.copy2(tree / fault.path, file)
    if not tests:
        return "not reached"
    return "noticed" if status else "missed"


def run_tests(tests: list[str], folder: Path) -> None:
    """Run tests of a copy in this forked process, and end with pytest's status."""
    os.setsid()
    os.chdir(folder)
    os.environ.update(PYTHONPATH=paths(folder), PYTHONDONTWRITEBYTECODE="1")
    sys.dont_write_bytecode = True
    sys.path[:0] = paths(folder).split(os.pathsep)
    sys.argv = ["pytest"]
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
        options = ["-x", "-q", "-p", "no:cacheprovider"]
        status = importlib.import_module("pytest").main([*options, *tests])
    os._exit(0 if status in (0, 5) else 1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=("draw", "reach", "judge"))
    parser.add_argument("--faults", type=Path, required=True, help="JSON that draw and reach write")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tree", type=Path, default=ROOT, help="a checkout")
    parser.add_argument("--verdicts", type=Path, help="JSON of the verdicts, in the order of the faults")
    parser.add_argument(
        "--files", action="store_true", help="run the whole files of the tests, which may have changed"
    )
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.task == "draw":
        faults = draw(arguments.count, arguments.seed)
    else:
        faults = [Fault(**fault) for fault in json.loads(arguments.faults.read_text(encoding="utf-8"))]
    if arguments.task == "reach":
        reach(faults, arguments.tree.resolve(), arguments.jobs)
    if arguments.task != "judge":
        text = json.dumps([dataclasses.asdict(fault) for fault in faults], indent=1)
        arguments.faults.write_text(text, encoding="utf-8")
        return
    for name in LIBRARIES:
        importlib.import_module(name)
    assert "vitascope" not in sys.modules  # each fault's process imports that of the copy
    verdicts: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        tree = arguments.tree.resolve()
        folder = copy_of(tree, Path(temporary, "tree"))
        for fault in faults:
            verdicts.append(judge(fault, folder, tree, files=arguments.files))
            print(f"{verdicts[-1]:<11} {fault.path}:{fault.line} {fault.after.strip()}", flush=True)
            if arguments.verdicts is not None:
                arguments.verdicts.write_text(json.dumps(verdicts, indent=1), encoding="utf-8")
    noticed = verdicts.count("noticed")
    print(
        f"{noticed} of {len(faults)} faults noticed, {verdicts.count('missed')} missed, "
        f"{verdicts.count('not reached')} not reached"
    )


if __name__ == "__main__":
    main()
