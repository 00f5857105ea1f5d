"""The rows of result files: labels, probabilities of every class, and CSV for any names."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data import write_picture
from tests.models import labelling_model, law, small_model, with_trust
from vitascope.data.rows.cells import column_names, csv_text
from vitascope.data.rows.parts import loop_of
from vitascope.deploy.predict.predictor import Predictor, find_images
from vitascope.deploy.predict.result_file import PredictTask, predict_to_file
from vitascope.deploy.predict.result_formats import COLUMNS, VERDICT
from vitascope.models.engines.engine import Engine, TorchEngine
from vitascope.models.engines.selection import ClassSelection

NAMES = ("ant", "bee;wasp", 'a "cat", big', "line\nbreak\rand return")
CELLS = tuple(map(csv_text, NAMES))


def labelling(*probabilities: float, names: tuple[str, ...] = NAMES, **options: Any) -> Engine:
    return TorchEngine(labelling_model(*probabilities, class_names=names, **options), device="cpu")


def classifying(names: tuple[str, ...] = NAMES) -> Engine:
    return TorchEngine(small_model(class_names=names, num_classes=len(names)), device="cpu")


def predict(
    engine: Engine, out: Path, folder: Path, selection: ClassSelection | None = None, **options: Any
) -> Path:
    """Predict a picture with a comma in its name, and one that cannot be read."""
    paths = [str(write_picture(folder / "a, b.png")), str(folder / "z.png")]
    (folder / "z.png").write_text("none")
    task = PredictTask(batch_size=8, workers=0, selection=selection or ClassSelection(), **options)
    predict_to_file(out, engine, task, loop_of(engine), paths, find_images(paths))
    return out


def rows_of_csv(path: Path) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_csv_of_one_class_has_the_most_probable_one_and_all_probabilities_on_request(tmp_path: Path) -> None:
    engine = classifying()
    found, unreadable = rows_of_csv(predict(engine, tmp_path / "o.csv", tmp_path))
    (best, *_) = Predictor(engine)(str(tmp_path / "a, b.png"))
    assert found["image"] == str(tmp_path / "a, b.png")
    assert found["label"] == best.label
    assert float(found["score"]) == pytest.approx(best.score, abs=1e-6)
    assert unreadable == {"image": str(tmp_path / "z.png"), "label": "", "score": ""}
    found, unreadable = rows_of_csv(predict(engine, tmp_path / "all.csv", tmp_path, probabilities=True))
    assert tuple(found) == ("image", "label", "score", *CELLS)
    expected = Predictor(engine)(str(tmp_path / "a, b.png")).probabilities
    np.testing.assert_allclose([float(found[name]) for name in CELLS], expected, atol=1e-6)
    assert not any(unreadable[name] for name in CELLS)
    for probabilities in (False, True):
        out = predict(engine, tmp_path / f"{probabilities}.jsonl", tmp_path, probabilities=probabilities)
        row = json.loads(out.read_text().splitlines()[0])
        assert row.keys() == {"image", "predictions", *["probabilities"] * probabilities}
    assert sum(row["probabilities"].values()) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_every_format_says_what_a_calibrated_model_knows(suffix: str, tmp_path: Path) -> None:
    engine = TorchEngine(with_trust(small_model(class_names=NAMES, num_classes=4)), device="cpu")
    out = predict(engine, tmp_path / f"o{suffix}", tmp_path, ClassSelection(coverage=0.9))
    verdict = Predictor(engine)(str(tmp_path / "a, b.png"), coverage=0.9).verdict
    if suffix == ".csv":
        found, unreadable = rows_of_csv(out)
        assert (found["unknown"], found["set"]) == (verdict.unknown or "", csv_text(";".join(verdict.set)))
        assert [unreadable[name] for name in VERDICT] == [""] * 3
    else:
        if suffix == ".jsonl":
            found, unreadable = map(json.loads, out.read_text().splitlines())
        else:
            read = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed").read_table
            found, unreadable = read(out).to_pylist()
        assert (found["unknown"], tuple(found["set"])) == (verdict.unknown, verdict.set)
        assert [unreadable.get(name) for name in VERDICT] == [None] * 3
    assert float(found["familiarity"]) == pytest.approx(verdict.familiarity, abs=1e-5)


def test_several_classes_have_labels_and_every_probability_in_each_format(tmp_path: Path) -> None:
    engine = labelling(0.2, 0.9, 0.6, 0.1)
    found, unreadable = rows_of_csv(predict(engine, tmp_path / "o.csv", tmp_path))
    assert found["label"] == 'bee;wasp;a "cat", big'
    assert found["score"] == found["bee;wasp"]
    np.testing.assert_allclose([float(found[name]) for name in CELLS], [0.2, 0.9, 0.6, 0.1], atol=1e-6)
    assert not any(list(unreadable.values())[1:])
    first, _ = (
        predict(engine, tmp_path / "o.jsonl", tmp_path, ClassSelection(threshold=0.15))
        .read_text()
        .splitlines()
    )
    row = json.loads(first)
    assert row["labels"] == [NAMES[1], NAMES[2], NAMES[0]] == [each["label"] for each in row["predictions"]]
    assert list(row["probabilities"].values()) == pytest.approx([0.2, 0.9, 0.6, 0.1], abs=1e-6)
    parquet = pytest.importorskip("pyarrow.parquet")
    table = parquet.read_table(predict(engine, tmp_path / "o.parquet", tmp_path))
    assert table.column_names == ["image", "labels", "predictions", "error", *NAMES]
    row, unreadable = table.to_pylist()
    assert row["labels"] == [NAMES[1], NAMES[2]]
    assert [row[name] for name in NAMES] == pytest.approx([0.2, 0.9, 0.6, 0.1], abs=1e-6)
    assert [unreadable[name] for name in ("labels", *NAMES)] == [None] * 5


def test_image_of_no_class_is_a_row_without_labels(tmp_path: Path) -> None:
    engine = labelling(0.2, 0.4, 0.1, 0.1)
    found, _ = rows_of_csv(predict(engine, tmp_path / "o.csv", tmp_path))
    assert (found["label"], found["score"]) == ("", found["bee;wasp"])
    row, broken = map(json.loads, predict(engine, tmp_path / "o.jsonl", tmp_path).read_text().splitlines())
    assert (row["labels"], row["predictions"]) == ([], [])
    assert row["probabilities"].keys() == {*NAMES}
    assert broken.keys() == {"image", "error"}


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_every_format_names_columns_alike_where_names_are_taken(suffix: str, tmp_path: Path) -> None:
    names = ("image", "crane", "crane", "score")
    out = predict(labelling(0.1, 0.2, 0.3, 0.4, names=names), tmp_path / f"o{suffix}", tmp_path)
    expected = ["image (0)", "crane", "crane (2)", "score (3)"]
    if suffix == ".csv":
        found = list(rows_of_csv(out)[0])
    elif suffix == ".jsonl":
        found = list(json.loads(out.read_text().splitlines()[0])["probabilities"])
    else:
        found = pytest.importorskip("pyarrow.parquet").read_table(out).column_names
    assert found[-4:] == expected


@law
@given(st.lists(st.sampled_from(["label", "score", "a", "a (1)", "a (2)", "label (0)", ""]), max_size=8))
def test_column_names_are_distinct_and_those_of_distinct_classes_are_their_labels(labels: list[str]) -> None:
    found = column_names(labels, COLUMNS)
    assert len({*found, *COLUMNS}) == len(labels) + len(COLUMNS)
    for label, name in zip(labels, found, strict=True):
        assert name == label or label in COLUMNS or labels.count(label) > 1


def test_a_name_in_a_csv_file_is_no_formula_and_has_no_control_characters() -> None:
    for text in ("cat.png", "-1", "+1.5e-3", "é"):
        assert csv_text(text) == text
    for text in ("=1+1", "@a", "-x", "-1+2", " =1"):
        assert csv_text(text) == f"'{text}"
    assert csv_text("a\n\x1b=") == r"a\n\x1b="
    assert csv_text("\t=1") == r"\t=1"
    assert csv_text("a\u202egnp.exe\x9b") == r"a\u202egnp.exe\x9b"
