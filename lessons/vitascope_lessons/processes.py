"""Check each exercise in a process of its own.

A reader's file may stop there, end Python or change torch; the other exercises are checked all the same.
"""

from __future__ import annotations

import faulthandler
import json
import linecache
import multiprocessing
import os
import pdb  # noqa: T100 - for readers
import re
import signal
import sys
import tempfile
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from vitascope.language import say
from vitascope.storage import WINDOWS
from vitascope_lessons.checking import Answer, at_line, check
from vitascope_lessons.exercises import NAMES, is_begun, path_of

SECONDS = 10.0
"""Time after which a check is stopped, unless a debugger is used."""
TERMINAL = "CON" if WINDOWS else "/dev/tty"
"""Where a debugger reads and writes; a child process has no standard input."""
CONTEXT = (
    multiprocessing.get_context("fork") if sys.platform == "linux" else multiprocessing.get_context("spawn")
)
"""A fork has torch already. macOS's libraries do not survive it: there, each process imports torch again."""


def check_all(folder: Path) -> list[Answer]:
    """Check every exercise of a folder, all that are begun at the same time."""
    with tempfile.TemporaryDirectory() as results:
        begun = {
            name: started(folder, name, Path(results, name))
            for name in NAMES
            if is_begun(path_of(folder, name), name)
        }
        try:
            return [
                answer_of(folder, name, Path(results, name), begun[name])
                if name in begun
                else Answer(name, "to do")
                for name in NAMES
            ]
        finally:
            for process in begun.values():
                end(process)


def started(folder: Path, name: str, result: Path) -> BaseProcess:
    """A process that checks one exercise."""
    process = CONTEXT.Process(target=write_answer, args=(folder, name, result), daemon=True)
    process.start()
    return process


def end(process: BaseProcess) -> None:
    """Kill a process, which has nothing to lose, and those that the reader's file has started."""
    process.kill()
    if WINDOWS:  # which has no groups
        return
    assert process.pid is not None
    with suppress(ProcessLookupError, PermissionError):  # the whole group has ended
        os.killpg(process.pid, signal.SIGKILL)


def write_answer(folder: Path, name: str, result: Path) -> None:
    """The main function of a process: write the answer to a file, as JSON.

    After `SECONDS`, the process writes the lines of code that run at that time instead, and ends. This also
    works for code that waits and for loops in C.
    """
    if not WINDOWS:
        os.setpgid(0, 0)  # for `end`
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    sys.breakpointhook = debug
    with result.open("w", encoding="utf-8") as file:
        faulthandler.dump_traceback_later(SECONDS, exit=True, file=file)
        answer = check(folder, name)
        faulthandler.cancel_dump_traceback_later()
        json.dump([answer.state, answer.hint, answer.printed], file)
    os._exit(0)  # and not wait for threads of the reader's file


def debug() -> None:
    """`breakpoint()` in a reader's file: begin a debugger at the terminal, without a limit of time."""
    if not WINDOWS:
        os.setpgid(0, os.getpgid(os.getppid()))  # the terminal is for that group
    terminal = open(TERMINAL), open(TERMINAL, "w")  # noqa: SIM115 - open as long as the process lives
    faulthandler.cancel_dump_traceback_later()
    pdb.Pdb(stdin=terminal[0], stdout=terminal[1]).set_trace(sys._getframe(1))


def answer_of(folder: Path, name: str, result: Path, process: BaseProcess) -> Answer:
    """The answer of a process when it has ended."""
    process.join()
    text = result.read_text(encoding="utf-8", errors="replace") if result.exists() else ""
    if process.exitcode == 0 and text:
        return Answer(name, *json.loads(text))
    return Answer(name, "wrong", hint_for_end(path_of(folder, name), process.exitcode or 0, text))


def hint_for_end(path: Path, status: int, text: str) -> str:
    """The hint for a file whose process has ended without an answer, after writing a text."""
    if text.startswith("Timeout"):
        said = say("this ran for {seconds:g} s; does a loop never end?", seconds=SECONDS)
        if match := re.search(rf'{re.escape(path.name)}", line (\d+)', text):
            linecache.checkcache(str(path))
            number = int(match[1])
            return at_line(
                path, number, linecache.getline(str(path), number).strip(), f"TimeoutError: {said}"
            )
        return f"{path}: TimeoutError: {said}"
    if status < 0:
        name = signal.Signals(-status).name
        return say("your file ends Python by {name}; does it need too much memory?", name=name)
    return say("your file ends Python with status {status}: leave out `os._exit` and the like", status=status)
