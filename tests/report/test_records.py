"""Reading what a run recorded."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vitascope.errors import UserError
from vitascope.report.records import (
    METRICS,
    Predictions,
    load_predictions,
    read_metrics,
    read_run,
    save_predictions,
    without_home,
)


def test_records_come_in_order(tmp_path: Path) -> None:
    (tmp_path / METRICS).write_text('{"step": 1, "name": "é"}\n{"step": 2}\n', encoding="utf-8")
    assert read_metrics(tmp_path) == [{"step": 1, "name": "é"}, {"step": 2}]


def test_last_line_that_a_crash_cut_off_is_left_out(tmp_path: Path) -> None:
    (tmp_path / METRICS).write_text('{"step": 1}\n{"step": 2}\n{"step": 3, "lo')
    assert read_metrics(tmp_path) == [{"step": 1}, {"step": 2}]


def test_run_that_recorded_nothing_has_no_records(tmp_path: Path) -> None:
    (tmp_path / METRICS).write_text("")
    assert read_metrics(tmp_path) == []


def some_predictions(**others: Any) -> Predictions:
    probabilities = np.random.default_rng(0).dirichlet(np.ones(3), 7).astype(np.float32)
    labels = np.array([0, 1, 2, 0, 1, 2, 0])
    values: dict[str, Any] = {
        "split": "test",
        "class_names": ('<b>&"', "猫", ""),
        "indices": np.array([0, 1, 2, 4, 5, 6, 9]),
        "labels": labels,
        "probabilities": probabilities,
        "unreadable": ("a/3.png: broken",),
    }
    return Predictions(**(values | others))


@pytest.mark.parametrize("unreadable", [(), ("a/3.png: broken", "é")])
def test_predictions_come_back_as_they_were(tmp_path: Path, unreadable: tuple[str, ...]) -> None:
    kept = some_predictions(unreadable=unreadable)
    assert save_predictions(tmp_path, kept) == tmp_path / "predictions.npz"
    back = load_predictions(tmp_path)
    assert back is not None
    assert (back.split, back.class_names, back.unreadable) == (kept.split, kept.class_names, unreadable)
    for name in ("indices", "labels", "probabilities"):
        np.testing.assert_array_equal(getattr(back, name), getattr(kept, name))
        assert getattr(back, name).dtype == getattr(kept, name).dtype
    assert [path.name for path in tmp_path.iterdir()] == ["predictions.npz"]


def test_predictions_are_read_without_pickle(tmp_path: Path) -> None:
    np.savez(tmp_path / "predictions.npz", split=np.array([{"a": 1}], dtype=object))
    with pytest.raises(UserError, match=r"predictions\.npz is broken"):
        load_predictions(tmp_path)


def test_what_is_no_archive_is_refused_without_advice_to_trust_it(tmp_path: Path) -> None:
    (tmp_path / "predictions.npz").write_text("x")
    with pytest.raises(UserError, match=r"is broken \(") as refusal:
        load_predictions(tmp_path)
    assert "allow_pickle" not in str(refusal.value)


def test_predictions_that_are_cut_off_are_refused_and_missing_ones_are_none(tmp_path: Path) -> None:
    assert load_predictions(tmp_path) is None
    path = save_predictions(tmp_path, some_predictions())
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(UserError, match=r"predictions\.npz is broken"):
        load_predictions(tmp_path)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (None, "not a run folder"),
        ("a: [1\nb: 2\n", "is broken"),
        ("[1, 2]", "not the configuration of a run"),
        ("task: classify\n", "not the configuration of a run"),
    ],
)
def test_what_is_no_run_is_refused(tmp_path: Path, config: str | None, said: str) -> None:
    if config is not None:
        (tmp_path / "config.yaml").write_text(config)
    with pytest.raises(UserError, match=said):
        read_run(tmp_path)


def test_a_run_that_has_only_begun_has_its_configuration_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("task: masked\ndata: digits\nseed: 0\n")
    run = read_run(tmp_path)
    assert (run.metrics, run.environment, run.predictions) == ([], {}, None)
    assert not run.finished
    assert not run.classifies


def test_home_folder_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: Path("/home/ada"))
    assert without_home("train --data /home/ada/photos") == "train --data ~/photos"
    monkeypatch.setattr(Path, "home", lambda: Path("/"))
    assert without_home("/data/photos") == "/data/photos"
