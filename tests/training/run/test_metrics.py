import importlib.util
import json
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from vitascope.errors import UserError
from vitascope.training.run.metrics import MetricsWriter, read_metrics


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


@pytest.mark.parametrize("end", [b"", b'\n{"step": 3, "lo', b'\n{"step": 3, "name": "\xc3'])
def test_records_are_read_in_order_without_a_truncated_last_line(path: Path, end: bytes) -> None:
    lines = '{"kind": "step", "step": 1, "reason": "é"}\n{"kind": "step", "step": 2}'
    path.write_bytes(lines.encode() + end)
    assert read_metrics(path) == [{"kind": "step", "step": 1, "reason": "é"}, {"kind": "step", "step": 2}]


BROKEN = [
    *(b"{}", b"[]", b"3", b'{"kind": "st', b'{"kind": "\xff", "step": 2}', b"[" * 100_000),
    *(b'{"kind": [], "step": 2}', b'{"kind": "step", "step": "2"}', b'{"kind": "step"}'),
    *(b'{"kind": "epoch", "step": 2}', b'{"kind": "test", "step": 2, "split": "test"}'),
    *(
        b'{"kind": "step", "step": 2, "loss": %s}' % loss
        for loss in (b"null", b'"1"', b"NaN", b"true", b"[1]")
    ),
    *(b'{"kind": "step", "step": %s}' % step for step in (b"-1", b"2.0", b"1%s" % (b"0" * 400), b"true")),
    *(b'{"kind": "epoch", "step": 2, "epoch": %s}' % epoch for epoch in (b"0", b"Infinity", b"1e300")),
    b'{"kind": "epoch", "step": 2, "epoch": 1, "val_accuracy": "high"}',
    b'{"kind": "test", "step": 2, "split": 5, "images": 3, "loss": 0.5, "seconds": 1}',
    b'{"kind": "test", "step": 2, "split": "test", "images": 0, "loss": 0.5, "seconds": 1}',
    b'{"kind": "test", "step": 2, "split": "test", "images": 3, "correct": 4, "loss": 0.5, "seconds": 1}',
    b'{"kind": "test", "step": 2, "split": "test", "images": 3, "loss": 0.5, "seconds": -1}',
]


def test_a_line_that_is_not_a_record_is_rejected(path: Path) -> None:
    for line in BROKEN:
        path.write_bytes(b'{"kind": "step", "step": 1}\n%s\n{"kind": "step", "step": 3}\n' % line)
        with pytest.raises(UserError, match=r"line 2 of .*metrics\.jsonl is broken: .*; remove this line"):
            read_metrics(path)


def test_records_after_the_resumed_step_are_dropped(path: Path) -> None:
    first = MetricsWriter(path)
    for step in (10, 20, 30):
        first.record("step", step, {"loss": float(step)})
    first.record("test", 20, {"split": "test", "images": 3, "loss": 0.5, "seconds": 1.0})
    first.close()
    with path.open("a") as file:
        file.write('{"kind": "step", "st')  # a crash in the middle of a line
    second = MetricsWriter(path, step=20)
    second.record("step", 30, {"loss": -1.0})
    second.close()
    found = [(record["step"], record["loss"]) for record in read_metrics(path)]
    assert found == [(10, 10.0), (20, 20.0), (30, -1.0)]
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_tensorboard_gets_the_same_numbers(path: Path) -> None:
    writer = MetricsWriter(path)
    writer.record("epoch", 5, {"val_accuracy": 0.25, "split": "val"})
    writer.close()
    events = EventAccumulator(str(path.parent)).Reload()
    assert events.Tags()["scalars"] == ["epoch/val_accuracy"]
    point = events.Scalars("epoch/val_accuracy")[0]
    assert (point.step, point.value) == (5, 0.25)


def test_the_error_for_a_full_disk_names_the_command_to_resume(path, monkeypatch) -> None:
    writer = MetricsWriter(path)
    monkeypatch.setattr(writer, "_file", open("/dev/full", "w"))  # noqa: SIM115 - closed below
    with pytest.raises(UserError, match="No space left on device") as raised:
        writer.record("step", 1, {"loss": 1.0})
    text = str(raised.value)
    assert text.startswith(f"{path}: the metrics cannot be written: ")
    assert text.endswith(f"make room, then run `vitascope train --resume {path.parent}`")
    with pytest.raises(UserError):
        writer.close()


def test_metrics_need_no_tensorboard(path: Path, monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    writer = MetricsWriter(path)
    writer.record("step", 1, {"loss": 0.5})
    writer.close()
    assert read_metrics(path) == [{"kind": "step", "step": 1, "loss": 0.5}]
    assert [file.name for file in path.parent.iterdir()] == [path.name]
