import re
from types import SimpleNamespace

import pytest

from vitascope.training import progress
from vitascope.training.progress import Progress


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    seconds = [0.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: seconds[0]))
    return seconds


@pytest.fixture(autouse=True)
def _no_time_passes(clock) -> None:
    """A line more is printed where an epoch takes seconds."""


def lines(epochs: int) -> None:
    bar = Progress(epochs, 10 * epochs)
    for epoch in range(1, epochs + 1):
        bar.advance(10)
        bar.epoch(epoch, train_loss=1.25, val={"loss": 1.0, "accuracy": 0.5, "majority": 0.625})
    bar.close()


@pytest.fixture(params=[False, True], ids=["file", "terminal"])
def terminal(request, monkeypatch) -> bool:
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: request.param, raising=False)
    return request.param


def test_each_epoch_of_a_short_run_prints_losses_accuracy_and_time(terminal: bool, capsys) -> None:
    lines(5)
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in out] == ["1/5", "2/5", "3/5", "4/5", "5/5"]
    assert re.fullmatch(
        r"epoch 5/5  loss 1\.250  val loss 1\.000, accuracy 50\.0% \(most frequent class 62\.5%\)"
        r"  [\d,]+ images/s  0:00:00, 0:00:00 left",
        out[-1],
    )


@pytest.mark.parametrize("epochs", [21, 100, 1000])
def test_long_run_prints_about_twenty_lines_including_the_last_epoch(terminal: bool, epochs, capsys) -> None:
    lines(epochs)
    out = capsys.readouterr().out.splitlines()
    assert 10 <= len(out) <= 22
    assert out[0].split()[1] == f"1/{epochs}"
    assert out[-1].split()[1] == f"{epochs}/{epochs}"


def test_the_bar_is_on_stderr_alone_and_no_control_characters_reach_stdout(monkeypatch, capsys) -> None:
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True, raising=False)
    lines(3)
    captured = capsys.readouterr()
    assert "images/s" in captured.err
    assert "left" in captured.err
    assert "epoch 2/3" in captured.err
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", captured.out)


def test_run_of_given_length_prints_the_rest_of_it_and_no_estimate_of_the_epochs(
    terminal: bool, clock, capsys
) -> None:
    bar = Progress(100, 1000, within_epochs=True)
    bar.plan(100, 1000, slowdown=2.0, seconds_left=60.0)
    for clock[0], images in ((20.0, 100), (50.0, 900)):
        bar.advance(images)
        bar.epoch(images / 10, train_loss=1.0, val={"loss": 1.0})
    bar.close()
    out = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch")]
    assert out[0].startswith("epoch  10.00  loss")
    assert out[0].endswith("  0:00:20, 0:00:40 left")
    assert out[1].endswith("  0:00:50, 0:00:00 left")


def test_long_epoch_without_a_terminal_prints_progress(clock, capsys) -> None:
    """A line after three seconds and then every half minute, and fewer in the later hours of a long run."""
    for duration, count in ((300, 10), (100_000, 100)):  # seconds
        clock[0] = 0.0
        bar = Progress(1, 1000)
        for number in range(1, 1000):
            clock[0] = duration * number / 1000
            bar.advance(1)
        out = capsys.readouterr().out.splitlines()
        assert 0.85 * count <= len(out) <= count
        assert re.match(r"\d+ of 1,000 images  ", out[0])


def test_unreadable_images_are_named_once(capsys) -> None:
    bar = Progress(2, 20)
    bar.left_out(["a.jpg: truncated"])
    bar.left_out(["a.jpg: truncated", "b.jpg: no picture"])
    assert capsys.readouterr().out == "left out: a.jpg: truncated\nleft out: b.jpg: no picture\n"


def test_only_the_first_process_prints(capsys) -> None:
    bar = Progress(1, 10, shown=False)
    bar.advance(10)
    bar.left_out(["a.jpg: truncated"])
    bar.note("stopped")
    bar.epoch(1, train_loss=1.0, val={"loss": 1.0})
    bar.close()
    assert capsys.readouterr() == ("", "")
