import ast
import faulthandler
import os
import pdb  # noqa: T100 - to replace it
import select
from pathlib import Path

import pytest
import torch

from vitascope_lessons import processes
from vitascope_lessons.exercises import NAMES, path_of, solution_text, write_exercises
from vitascope_lessons.processes import check_all, hint_for_end

FIRST = "    import os, torch, torch.nn.functional as F\n    "
HARMFUL = {
    "patches": ("os._exit(0)", "your file ends Python with status 0: leave out `os._exit` and the like"),
    "positions": (
        "os.kill(os.getpid(), 9)",
        "your file ends Python by SIGKILL; does it need too much memory?",
    ),
    "attention": ("raise KeyboardInterrupt", "raise KeyboardInterrupt\nKeyboardInterrupt"),
    "multi_head": ("torch.set_default_dtype(torch.float64)", "changes torch's default dtype or switches"),
    "mlp": ("F.gelu = F.relu; torch.set_num_threads(3)", ""),
    "block": ("torch.set_grad_enabled(False)", "which every other function shares: leave that out"),
    "pool": ("torch.manual_seed(0)", "your function draws random numbers"),
}


def write(folder: Path, name: str, first: str) -> None:
    """Write a solved exercise whose function runs some statements first."""
    text = solution_text(name)
    function = ast.parse(text).body[-1]
    assert isinstance(function, ast.FunctionDef)
    lines = text.splitlines(keepends=True)
    lines.insert(function.body[1].lineno - 1, f"{FIRST}{first}\n")
    path_of(folder, name).write_text("".join(lines), encoding="utf-8")


def test_no_file_ends_or_changes_another_check(tmp_path: Path) -> None:
    write_exercises(tmp_path)
    for name, (first, _) in HARMFUL.items():
        write(tmp_path, name, first)
    write(tmp_path, "loss", "print('x' * 10**7)")
    threads, seed = torch.get_num_threads(), torch.initial_seed()
    *answers, loss = check_all(tmp_path)
    assert [answer.name for answer in answers] == list(HARMFUL)
    for answer in answers:
        assert HARMFUL[answer.name][1] in answer.hint
        assert answer.state == ("wrong" if answer.hint else "right")
    assert (loss.state, loss.printed) == ("right", "x" * 1000)
    assert (torch.get_num_threads(), torch.initial_seed()) == (threads, seed)
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()


def test_file_that_waits_is_stopped_and_unreadable_ones_are_shown(tmp_path: Path, monkeypatch) -> None:
    write_exercises(tmp_path)
    path_of(tmp_path, "mlp").write_text("import time\ntime.sleep(1e6)\n")
    for name in ("patches", "loss"):
        path_of(tmp_path, name).unlink()
    path_of(tmp_path, "patches").mkdir()
    path_of(tmp_path, "loss").symlink_to("nothing")
    assert not write_exercises(tmp_path)
    monkeypatch.setattr(processes, "SECONDS", 0.5)
    answers = {answer.name: answer for answer in check_all(tmp_path)}
    assert "TimeoutError: this ran for" in answers["mlp"].hint
    assert [name for name in NAMES if answers[name].state == "to do"] == [
        name for name in NAMES if name not in ("patches", "mlp", "loss")
    ]


def test_processes_of_an_exercise_end_with_its_check(tmp_path: Path) -> None:
    write_exercises(tmp_path)
    reads, writes = os.pipe()
    forks = f"os.set_inheritable({writes}, True); os.fork() or (os.write({writes}, b'.'), signal.pause())"
    write(tmp_path, "mlp", f"import signal; {forks}")
    check_all(tmp_path)
    os.close(writes)
    found = b"."
    while found:  # until no process has the other side
        assert select.select([reads], [], [], 100)[0], "a process of the exercise lives on"
        found = os.read(reads, 9)
    os.close(reads)


def test_timeout_is_shown_with_the_line_that_ran(tmp_path: Path) -> None:
    path = tmp_path / "5_mlp.py"
    path.write_text("import time\ntime.sleep(1e6)\n")
    text = f'Timeout (0:00:10)!\nThread 0x1 (most recent call first):\n  File "{path}", line 2 in <module>\n'
    assert hint_for_end(path, 1, text).startswith(f"{path}, line 2: time.sleep(1e6)\nTimeoutError: this ran")
    assert hint_for_end(path, 1, "Timeout").startswith(f"{path}: TimeoutError")


def test_debugger_has_no_limit_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(processes, "TERMINAL", os.devnull)
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: calls.append("no limit"))
    monkeypatch.setattr(os, "setpgid", lambda *_: None)
    monkeypatch.setattr(pdb.Pdb, "set_trace", lambda self, frame: calls.append(frame.f_code.co_name))
    processes.debug()
    assert calls == ["no limit", "test_debugger_has_no_limit_of_time"]
