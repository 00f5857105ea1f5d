"""Predictions in a file: none twice or lost after any interruption, and only the same job resumes it."""

import dataclasses
import json
import os
from pathlib import Path

import pytest

from tests.data import write_picture, write_tree
from tests.model import small_model, with_preprocess
from vitascope.errors import UserError
from vitascope.predict import result_file
from vitascope.predict.engine import Engine, TorchEngine
from vitascope.predict.predictor import ImageResult, Prediction, Predictor, find_images
from vitascope.predict.result_file import ResultFile
from vitascope.predict.result_formats import Rows
from vitascope.predict.selection import ClassSelection
from vitascope.weights.preprocess import default_preprocess

NAMES = ("ant", "bee", "cat", "dog", "eel")


def engine_of(seed: int = 0, names: tuple[str, ...] = NAMES, **preprocess: object) -> Engine:
    model = small_model(seed, class_names=names, num_classes=len(names))
    fit = dataclasses.replace(default_preprocess(model.config), **preprocess)
    return TorchEngine(with_preprocess(model, fit), precision="fp32", device="cpu")


@pytest.fixture(scope="module")
def engine() -> Engine:
    return engine_of()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = write_tree(tmp_path_factory.mktemp("bulk") / "pictures", {"a": 6, "b": 5})
    (root / "a" / "002.png").write_bytes(b"text")
    return root


def predict(
    engine: Engine, folder: Path, out: Path, *, stop_after: int = 99, top_k: int = 5, resume: bool = False
) -> ResultFile:
    """Predict a folder into a file, as the command line does, up to a number of results."""
    with ResultFile(out, engine, ClassSelection(top_k), resume=resume) as file:
        paths = file.remaining(find_images([folder]))
        for number, answer in enumerate(Predictor(engine, batch_size=4).stream(paths, top_k, workers=0)):
            if number == stop_after:
                return file
            file.write(answer)
        file.finish()
    return file


def rows(out: Path) -> list[dict[str, object]]:
    """The rows of either format as plain values; scores rounded so that batches of any size agree."""
    if out.suffix == ".jsonl":
        found = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    else:
        parquet = pytest.importorskip("pyarrow.parquet")
        found = [
            {k: v for k, v in row.items() if v is not None} for row in parquet.read_table(out).to_pylist()
        ]
    for row in found:
        for guess in row.get("predictions", []):
            guess["score"] = round(guess["score"], 4)
    return found


@pytest.fixture(scope="module")
def whole(engine: Engine, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    """The rows of an uninterrupted job."""
    out = tmp_path_factory.mktemp("whole") / "o.jsonl"
    file = predict(engine, folder, out)
    assert (file.tally.images, file.tally.unreadable) == (11, 1)
    assert "002.png" in file.tally.reasons[0]
    return rows(out)


def test_each_picture_has_a_line_in_order_and_unreadable_ones_a_reason(
    whole: list[dict[str, object]], folder: Path, engine: Engine
) -> None:
    assert [row["image"] for row in whole] == list(find_images([folder]))
    for row in whole:
        if str(row["image"]).endswith("a/002.png"):
            assert row.keys() == {"image", "error"}
        else:
            assert row.keys() == {"image", "predictions"}
    (guesses,) = Predictor(engine)([whole[0]["image"]])
    expected = [{"label": g.label, "index": g.index, "score": round(g.score, 4)} for g in guesses]
    assert whole[0]["predictions"] == expected


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff"])
def test_broken_fingerprint_is_one_clear_line(
    content: bytes, engine: Engine, folder: Path, tmp_path: Path
) -> None:
    predict(engine, folder, tmp_path / "o.jsonl", stop_after=2)
    (tmp_path / "o.jsonl.fingerprint.json").write_bytes(content)
    with pytest.raises(UserError, match=r"o\.jsonl: its fingerprint is broken; choose another file"):
        predict(engine, folder, tmp_path / "o.jsonl", resume=True)


@pytest.mark.parametrize(
    "damage",
    [
        {"test_answers": []},
        {"test_answers": [[1]] * 16},
        {"test_answers": [[99, 0.5]] * 16},
        {"test_answers": [["ant", 0.5]] * 16},
        {"test_answers": [[0, "half"]] * 16},
        {"class_names": 5},
        {"thresholds": None},
        {"preprocess": []},
        {"num_classes": None},
    ],
)
def test_fingerprint_with_damaged_values_is_one_clear_line(
    damage: dict[str, object], engine: Engine, folder: Path, tmp_path: Path
) -> None:
    predict(engine, folder, tmp_path / "o.jsonl", stop_after=2)
    stored = tmp_path / "o.jsonl.fingerprint.json"
    stored.write_text(json.dumps(json.loads(stored.read_text()) | damage))
    with pytest.raises(UserError, match=r"o\.jsonl: its fingerprint is broken; choose another file"):
        predict(engine, folder, tmp_path / "o.jsonl", resume=True)


@pytest.mark.parametrize("torn", [0, 1, 40])
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_job_interrupted_anywhere_resumes_with_each_picture_once(
    suffix: str, torn: int, engine: Engine, folder: Path, tmp_path: Path, whole: list[dict[str, object]]
) -> None:
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    out = tmp_path / f"o{suffix}"
    predict(engine, folder, out, stop_after=7)
    assert out.exists() == (suffix == ".jsonl")  # Parquet is complete or missing
    lines = out if suffix == ".jsonl" else tmp_path / "o.parquet.partial.jsonl"
    os.truncate(lines, lines.stat().st_size - torn)  # as after SIGKILL
    file = predict(engine, folder, out, resume=True)
    assert rows(out) == whole
    assert (file.tally.images, file.tally.unreadable) == (11, 1)
    left = {"o.jsonl", "o.jsonl.fingerprint.json"} if suffix == ".jsonl" else {"o.parquet"}
    assert {path.name for path in tmp_path.iterdir()} == left


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_finished_file_is_unchanged_when_resumed(
    suffix: str, engine: Engine, folder: Path, tmp_path: Path
) -> None:
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    out = tmp_path / f"o{suffix}"
    predict(engine, folder, out)
    before = out.read_bytes()
    assert predict(engine, folder, out, resume=True).tally.images == 11
    assert out.read_bytes() == before


def test_new_pictures_are_appended_to_jsonl_and_rejected_by_finished_parquet(
    engine: Engine, tmp_path: Path
) -> None:
    pytest.importorskip("pyarrow")
    folder = write_tree(tmp_path / "pictures", {"b": 3})
    for suffix in (".jsonl", ".parquet"):
        predict(engine, folder, tmp_path / f"o{suffix}")
    late = str(write_picture(folder / "a.png"))
    predict(engine, folder, tmp_path / "o.jsonl", resume=True)
    assert [row["image"] for row in rows(tmp_path / "o.jsonl")].count(late) == 1
    assert len(rows(tmp_path / "o.jsonl")) == 4
    with pytest.raises(UserError, match=r"o\.parquet is finished, and .*a\.png is not in it"):
        predict(engine, folder, tmp_path / "o.parquet", resume=True)


def test_picture_listed_twice_is_predicted_twice_after_resume(engine: Engine, tmp_path: Path) -> None:
    path = str(write_picture(tmp_path / "a.png"))
    (answer,) = Predictor(engine).stream([path], workers=0)
    with ResultFile(tmp_path / "o.jsonl", engine) as file:
        file.write(answer)
    with ResultFile(tmp_path / "o.jsonl", engine, resume=True) as file:
        assert list(file.remaining([path, path])) == [path]


@pytest.mark.parametrize(
    ("other", "top_k", "message"),
    [
        ({}, 3, "top_k was 5, not 3"),
        ({"seed": 1}, 5, "its model gave class"),
        ({"names": ("ant", "bee", "cat", "dog", "fly")}, 5, "class 4 was 'eel', not 'fly'"),
        ({"names": NAMES[:4]}, 5, "num_classes was 5, not 4"),
        ({"crop_pct": 0.5}, 5, "crop_pct was 1.0, not 0.5"),
    ],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_resume_with_other_model_preprocessing_or_top_k_is_rejected_with_the_difference(
    other: dict[str, object],
    top_k: int,
    message: str,
    suffix: str,
    engine: Engine,
    folder: Path,
    tmp_path: Path,
) -> None:
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    out = tmp_path / f"o{suffix}"
    predict(engine, folder, out)
    before = out.read_bytes()
    with pytest.raises(UserError, match=message):
        predict(engine_of(**other), folder, out, top_k=top_k, resume=True)
    assert out.read_bytes() == before


def test_existing_file_is_rejected_and_not_touched(engine: Engine, tmp_path: Path) -> None:
    for name, there in (("o.jsonl", "o.jsonl"), ("o.parquet", "o.parquet.partial.jsonl")):
        (tmp_path / there).write_text("mine")
        with pytest.raises(UserError, match=f"{there} exists: resume it"):
            ResultFile(tmp_path / name, engine)
        with pytest.raises(UserError, match=r"cannot be resumed without .*json, which is missing"):
            ResultFile(tmp_path / name, engine, resume=True)
        assert (tmp_path / there).read_text() == "mine"


@pytest.mark.parametrize(
    "line",
    [
        "{}",
        "null",
        "text",
        '["image"]',
        "[" * 100_000,
        '{"image": "a.png"}',
        '{"image": "a.png", "predictions": []}',
        '{"image": "a.png", "predictions": [{"label": "ant"}]}',
        '{"image": "a.png", "predictions": [{"label": 3, "index": 0, "score": 0.5}]}',
        '{"image": "a.png", "predictions": [{"label": "ant", "index": 0, "score": "high"}]}',
        '{"image": "a.png", "predictions": [{"label": "ant", "index": 0, "score": 1}], '
        '"probabilities": {"ant": 1}}',
        '{"image": "a.png", "error": null}',
        '{"image": 3, "error": "gone"}',
    ],
)
def test_invalid_line_is_named(line: str, engine: Engine, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.jsonl"
    predict(engine, folder, out, stop_after=2)
    with open(out, "a", encoding="utf-8") as file:
        file.write(line + "\n")
    with pytest.raises(UserError, match=r"o\.jsonl, line 3: not a prediction"):
        ResultFile(out, engine, resume=True)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("o.txt", r"ends in \.jsonl, \.parquet or \.csv"),
        ("no/o.jsonl", "no: no such folder"),
        ("d.jsonl", "a folder"),
    ],
)
def test_invalid_output_path_is_rejected(name: str, message: str, engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").mkdir()
    with pytest.raises(UserError, match=message):
        ResultFile(tmp_path / name, engine, resume=True)


def test_parquet_without_its_library_is_rejected_before_anything_is_predicted(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'vitascope\[parquet\]'"):
        ResultFile(tmp_path / "o.parquet", engine)
    assert not list(tmp_path.iterdir())


def test_second_writer_is_rejected(engine: Engine, tmp_path: Path) -> None:
    with (
        ResultFile(tmp_path / "o.jsonl", engine),
        pytest.raises(UserError, match="is in use by another process"),
    ):
        ResultFile(tmp_path / "o.jsonl", engine, resume=True)
    ResultFile(tmp_path / "o.jsonl", engine, resume=True).__exit__(None)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_full_disk_is_reported_once_with_advice(engine: Engine, tmp_path: Path) -> None:
    message = r"o\.jsonl: predictions cannot be written: No space left .*can be resumed"
    with pytest.raises(UserError, match=message), ResultFile(tmp_path / "o.jsonl", engine) as file:
        fill_disk(file)


def fill_disk(file: ResultFile) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, file._file.fileno())
    os.close(full)
    for number in range(1000):
        file.write(ImageResult(f"{number}.png", [], "x" * 100))


def test_names_that_are_not_utf8_survive_in_both_formats(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    odd, label = os.fsdecode(b"\xe9.png"), os.fsdecode(b"\xe9t\xe9")  # the picture's folder is its class
    engine = engine_of(names=(label, *NAMES[1:]))
    answer = ImageResult(odd, [Prediction(label, 0, 0.5)])
    line = json.loads(Rows().line(answer).encode("utf-8"))
    assert (line["image"], line["predictions"][0]["label"]) == (odd, label)
    for suffix in (".jsonl", ".parquet"):
        with ResultFile(tmp_path / f"o{suffix}", engine) as file:
            file.write(answer)
            file.finish()
        with ResultFile(tmp_path / f"o{suffix}", engine, resume=True) as file:
            assert list(file.remaining([odd, "other.png"])) == ["other.png"]
    row = rows(tmp_path / "o.parquet")[0]
    assert (row["image"], row["predictions"][0]["label"]) == (r"\udce9.png", r"\udce9t\udce9")


def test_reasons_are_kept_for_a_few_and_counted_for_all() -> None:
    tally = result_file.Tally()
    for number in range(100):
        tally.add(f"{number}.png: broken")
    assert (tally.images, tally.unreadable, len(tally.reasons)) == (100, 100, result_file.NAMED)
