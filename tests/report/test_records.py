"""Reading what a run recorded."""

from pathlib import Path

from vitascope.report.records import METRICS, read_metrics


def test_records_come_in_order(tmp_path: Path) -> None:
    (tmp_path / METRICS).write_text('{"step": 1, "name": "é"}\n{"step": 2}\n', encoding="utf-8")
    assert read_metrics(tmp_path) == [{"step": 1, "name": "é"}, {"step": 2}]


def test_last_line_that_a_crash_cut_off_is_left_out(tmp_path: Path) -> None:
    (tmp_path / METRICS).write_text('{"step": 1}\n{"step": 2}\n{"step": 3, "lo')
    assert read_metrics(tmp_path) == [{"step": 1}, {"step": 2}]


def test_run_that_recorded_nothing_has_no_records(tmp_path: Path) -> None:
    (tmp_path / METRICS).write_text("")
    assert read_metrics(tmp_path) == []
