"""What holds for every test."""

import functools
import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.browser import NO_BROWSER
from tests.browser import browser as browser

pytest_plugins = ("tests.cli", "tests.coverage_summary", "tests.stores")  # their fixtures, and the summary
LONGEST = (
    "test_docs.py",
    "test_distributed.py",
    "test_cli_stores.py",
    "test_export.py",
    "test_resume.py",
    "test_on_ray.py",
    "test_stored_run.py",
    "test_server.py",
    "test_walkthrough.py",
    "test_quantize.py",
)


os.environ["LC_ALL"] = "C.UTF-8"  # the help and the reports are English, whatever the developer's language
settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any speed")
gc.disable()  # while 12,000 tests are collected; `pytest_collection_finish` enables it


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest, so that no process is left alone with one at the end."""
    rank = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(LONGEST)))


def pytest_collection_finish() -> None:
    """Exempt imported modules from garbage collection, which otherwise takes a tenth of the time."""
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what a machine without a browser has not shown."""
    skipped = [
        report for report in terminalreporter.stats.get("skipped", ()) if NO_BROWSER in str(report.longrepr)
    ]
    if skipped:
        terminalreporter.write_line(f"{len(skipped)} tests of pages were not run: {NO_BROWSER}")


@pytest.fixture(autouse=True, scope="session")
def _default_signals() -> Iterator[None]:
    """A job in the background ignores SIGINT, one of nohup SIGHUP, and child processes inherit that."""
    defaults = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {signum: signal.signal(signum, handler) for signum, handler in defaults.items()}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.fixture(autouse=True, scope="module")
def _no_fsync(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tiny runs would take a tenth of their time for it; the tests of it do."""
    with pytest.MonkeyPatch.context() as patch:
        if request.path.name != "test_folders.py":
            patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """Tensors this small gain nothing from a second thread, and wait for it on a machine that is busy."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of the test's own."""
    monkeypatch.setenv("VITASCOPE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def exported_file(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The file of `tests.exported`'s model by suffix, written when a test first needs it."""
    from tests.exported import export_small

    return functools.cache(functools.partial(export_small, tmp_path_factory.mktemp("exported")))
