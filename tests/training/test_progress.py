import re

from vitascope.training import progress
from vitascope.training.progress import Progress


def test_without_a_terminal_first_and_last_epoch_are_lines(capsys) -> None:
    bar = Progress(epochs=5, images_per_epoch=10)
    for epoch in range(1, 6):
        bar.advance(10)
        bar.epoch(epoch, train_loss=1.25, val={"loss": 1.0, "accuracy": 0.5})
    bar.close()
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in out] == ["1/5", "5/5"]
    assert re.search(r"loss 1\.250  val 50\.0%  [\d,]+ images/s  0:00:00 left", out[-1])


def test_on_a_terminal_there_is_a_bar_with_speed_and_time_left(monkeypatch, capsys) -> None:
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True, raising=False)
    bar = Progress(epochs=2, images_per_epoch=10, done=10)
    bar.advance(5)
    bar.epoch(1, train_loss=0.5, val={"loss": 1.0, "accuracy": 0.75})
    bar.close()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "epoch 1/2  loss 0.500  val 75.0%" in captured.err
    assert "images/s" in captured.err
    assert "left" in captured.err


def test_speed_counts_this_process_only() -> None:
    bar = Progress(epochs=10, images_per_epoch=1000, done=9000)
    assert bar.images_per_second == 0


def test_a_long_epoch_without_a_terminal_is_not_silent(monkeypatch, capsys) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    bar = Progress(epochs=2, images_per_epoch=1000)
    bar.advance(128)
    assert capsys.readouterr().out.startswith("128 of 2,000 images  ")


def test_images_that_cannot_be_read_are_named_once(capsys) -> None:
    bar = Progress(epochs=2, images_per_epoch=10)
    bar.left_out({"a.jpg": "a.jpg: truncated"})
    bar.left_out({"a.jpg": "a.jpg: truncated", "b.jpg": "no picture"})
    assert capsys.readouterr().out == "left out: a.jpg: truncated\nleft out: b.jpg: no picture\n"


def test_only_the_first_of_several_processes_speaks(capsys) -> None:
    bar = Progress(epochs=1, images_per_epoch=10, shown=False)
    bar.advance(10)
    bar.left_out({"a.jpg": "a.jpg: truncated"})
    bar.epoch(1, train_loss=1.0, val={"loss": 1.0})
    bar.close()
    assert capsys.readouterr() == ("", "")
