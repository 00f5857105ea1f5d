"""Line coverage of each folder of the package at the end of `make test`, where Python has sys.monitoring."""

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "vitascope"
LOW = 0.9


def summary(coverage: Any) -> Iterator[str]:
    """A line for each folder, and for the modules beside them, from an object like `coverage.Coverage`."""
    statements: Counter[str] = Counter()
    missing: Counter[str] = Counter()
    for path in sorted(PACKAGE.rglob("*.py")):
        folder = path.relative_to(PACKAGE).parts[0] if path.parent != PACKAGE else "root"
        _, of_file, _, missing_of_file, _ = coverage.analysis2(str(path))
        statements[folder] += len(of_file)
        missing[folder] += len(missing_of_file)
    for folder, count in statements.items():
        share = 1 - missing[folder] / count
        yield f"{folder:<9} {share:6.1%}{f', below {LOW:.0%}' * (share < LOW)}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    plugin = config.pluginmanager.get_plugin("_cov")
    if plugin is not None and plugin.cov_controller is not None:
        terminalreporter.section("line coverage")
        for line in summary(plugin.cov_controller.cov):
            terminalreporter.write_line(line)
    elif sys.version_info < (3, 12) and config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        terminalreporter.write_line("coverage: not measured; sys.monitoring needs Python 3.12")
