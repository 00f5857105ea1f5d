"""Predictions in a file: none twice or lost after any interruption, and only the same job resumes it."""

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.data import write_picture, write_tree
from tests.deploy.predict import PARQUET
from tests.models import labelling_model, small_model, with_preprocess
from tests.stores import Store
from vitascope.data.rows import parts as parts_module
from vitascope.data.rows.parts import Loop, PartDone, Parts, PartTask, loop_of, parts_folder
from vitascope.deploy.predict.predictor import ImageResult, Prediction, Predictor, find_images
from vitascope.deploy.predict.result_file import PredictTask, predict_to_file
from vitascope.deploy.predict.result_formats import Rows
from vitascope.errors import UserError
from vitascope.models.engines.engine import Engine, TorchEngine
from vitascope.models.engines.selection import ClassSelection
from vitascope.models.weights.preprocess import default_preprocess

NAMES = ("ant", "bee", "cat", "dog", "eel")


def engine_of(seed: int = 0, names: tuple[str, ...] = NAMES, views: int = 1, **preprocess: object) -> Engine:
    model = small_model(seed, class_names=names, num_classes=len(names))
    fit = dataclasses.replace(default_preprocess(model.config), **preprocess)
    return TorchEngine(with_preprocess(model, fit), precision="fp32", device="cpu", views=views)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return engine_of()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = write_tree(tmp_path_factory.mktemp("bulk") / "pictures", {"a": 6, "b": 5})
    (root / "a" / "002.png").write_bytes(b"text")
    return root


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts_module, "UNIT_IMAGES", 3)  # parts of 4 images, two batches


def predict(
    engine: Engine,
    place: Path | str,
    out: Path,
    loop: Loop | None = None,
    *,
    resume: bool = False,
    **options: Any,
) -> tuple[int, int, int]:
    """Predict a folder into a file; the numbers of images, of unreadable ones and of those computed now."""
    task = PredictTask(**{"batch_size": 2, "workers": 0, **options})
    places = [str(place)]
    faults, now = predict_to_file(
        out, engine, task, loop or loop_of(engine), places, find_images(places), resume=resume
    )
    return faults.images, faults.count, now


def stopping(parts: Parts, task: PartTask, wanted: Sequence[int]) -> Iterator[PartDone]:
    yield from parts.compute(task, engine_of(), wanted[:1])
    raise KeyboardInterrupt


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text("utf-8").splitlines()]


def test_each_picture_has_a_line_in_order_and_unreadable_ones_a_reason(engine, folder, tmp_path) -> None:
    out = tmp_path / "o.jsonl"
    task = PredictTask(batch_size=2, workers=1)
    faults, now = predict_to_file(out, engine, task, loop_of(engine), [str(folder)], find_images([folder]))
    assert (faults.images, faults.count, now) == (11, 1, 11)
    assert "002.png" in faults.left_out[0]
    found = rows(out)
    assert [row["image"] for row in found] == list(find_images([folder]))
    assert [row["image"] for row in found if row.keys() == {"image", "error"}] == [f"{folder}/a/002.png"]
    lines = map(Rows().line, Predictor(engine, batch_size=2).stream(find_images([folder]), workers=0))
    assert out.read_text() == "".join(lines)  # those of one stream, bitwise
    assert {path.name for path in tmp_path.iterdir()} == {"o.jsonl", "o.jsonl.fingerprint.json"}


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", PARQUET])
def test_interrupted_job_is_resumed_to_the_same_file(suffix: str, engine, folder, tmp_path) -> None:
    out, whole = tmp_path / f"o{suffix}", tmp_path / f"whole{suffix}"
    predict(engine, folder, whole)
    with pytest.raises(KeyboardInterrupt):
        predict(engine, folder, out, stopping)
    assert not out.exists()
    with pytest.raises(UserError, match=rf"o\{suffix}\.parts exists: continue it with --resume"):
        predict(engine, folder, out)
    assert predict(engine, folder, out, resume=True) == (11, 1, 7)
    assert out.read_bytes() == whole.read_bytes()
    assert not parts_folder(out).exists()
    before = out.read_bytes()
    assert predict(engine, folder, out, resume=True) == (11, 1, 0)  # it is finished
    assert out.read_bytes() == before
    with pytest.raises(UserError, match=f"o{suffix} exists: continue it with --resume"):
        predict(engine, folder, out)


@pytest.mark.parametrize("finished", [False, True])
def test_job_is_resumed_with_the_same_options_alone(finished: bool, engine, folder, tmp_path) -> None:
    out = tmp_path / "o.jsonl"
    if finished:
        predict(engine, folder, out)
    else:
        with pytest.raises(KeyboardInterrupt):
            predict(engine, folder, out, stopping)
    cases: tuple[tuple[dict[str, Any], dict[str, Any], str], ...] = (
        ({}, {"selection": ClassSelection(3)}, "top_k was 5, not 3"),
        ({}, {"probabilities": True}, "probabilities was False, not True"),
        ({"seed": 1}, {}, "its model gave class"),
        ({"names": ("ant", "bee", "cat", "dog", "fly")}, {}, "class 4 was 'eel', not 'fly'"),
        ({"names": NAMES[:4]}, {}, "num_classes was 5, not 4"),
        ({"crop_pct": 0.5}, {}, "crop_pct was 1.0, not 0.5"),
        ({"views": 2}, {}, "views was 1, not 2"),
    )
    for other, options, message in cases:
        with pytest.raises(UserError, match=message):
            predict(engine_of(**other), folder, out, resume=True, **options)
    with pytest.raises(UserError, match=f"the images were {folder}, not {folder}/a"):
        predict(engine, folder / "a", out, resume=True)
    assert predict(engine, folder, out, resume=True) == (11, 1, 0 if finished else 7)


def test_thresholds_belong_to_the_job(tmp_path: Path) -> None:
    engine = TorchEngine(labelling_model(0.2, 0.9, 0.6, 0.1, class_names=NAMES[:4]), device="cpu")
    predict(engine, write_picture(tmp_path / "a.png"), tmp_path / "o.csv")
    other = {"selection": ClassSelection(threshold=0.3), "resume": True}
    with pytest.raises(UserError, match=r"threshold 0 was 0\.5, not 0\.3; .*; 1 more thresholds differ"):
        predict(engine, tmp_path / "a.png", tmp_path / "o.csv", **other)


def test_broken_fingerprint_is_one_clear_line(engine: Engine, folder: Path, tmp_path: Path) -> None:
    out, beside = tmp_path / "o.jsonl", tmp_path / "o.jsonl.fingerprint.json"
    predict(engine, folder, out)
    known = json.loads(beside.read_text())
    damages = (
        *({"test_answers": [answer] * 16} for answer in ([1], [99, 0.5], [0, "half"])),
        *({"class_names": 5}, {"preprocess": None}, {"tally": {"pictures": 3}}),
    )
    texts = [json.dumps(known | damage) for damage in damages]
    texts.append(json.dumps({name: value for name, value in known.items() if name != "views"}))  # of 0.2.0
    for text in (*texts, "[]"):
        beside.write_text(text)
        with pytest.raises(UserError, match=r"o\.jsonl: its fingerprint is broken.*; choose another file"):
            predict(engine, folder, out, resume=True)
    beside.unlink()
    (tmp_path / "d.jsonl").mkdir()
    for path in (out, tmp_path / "d.jsonl"):  # and a folder of the file's name
        with pytest.raises(UserError, match=r"its fingerprint is broken or missing; choose"):
            predict(engine, folder, path, resume=True)
    assert {path.name for path in tmp_path.iterdir()} == {"d.jsonl", "o.jsonl"}


def test_pictures_that_came_later_are_warned_of(engine: Engine, tmp_path: Path, caplog) -> None:
    folder, out = write_tree(tmp_path / "pictures", {"b": 5}), tmp_path / "o.jsonl"
    with pytest.raises(KeyboardInterrupt):
        predict(engine, folder, out, stopping)
    write_picture(folder / "a.png")
    for now in (1, 0):
        caplog.clear()
        assert predict(engine, folder, out, resume=True) == (5, 0, now)
        assert "has the 5 images that were listed when it was begun, and there are 6 now" in caplog.text


def test_picture_listed_twice_is_predicted_twice(engine: Engine, tmp_path: Path) -> None:
    path, out = str(write_picture(tmp_path / "a.png")), tmp_path / "o.jsonl"
    task = PredictTask(batch_size=2, workers=0)
    predict_to_file(out, engine, task, loop_of(engine), [path, path], find_images([path, path]))
    assert [row["image"] for row in rows(out)] == [path, path]


def test_part_that_was_cut_short_is_not_taken_for_whole(engine: Engine, folder: Path, tmp_path: Path) -> None:
    def cutting(parts: Parts, task: PartTask, wanted: Sequence[int]) -> Iterator[PartDone]:
        yield from parts.compute(task, engine, wanted)
        parts.file(2).write_bytes(parts.file(2).read_bytes()[:-1])

    with pytest.raises(UserError, match=r"00002\.part: damaged .*; remove it, and resume"):
        predict(engine, folder, tmp_path / "o.jsonl", cutting)
    assert not (tmp_path / "o.jsonl").exists()


def test_lines_with_an_error_are_known_whatever_stands_in_names(tmp_path: Path) -> None:
    folder = write_tree(tmp_path / 'a", "error": "b', {"c": 2})
    engine = engine_of(names=('", "error": "', "error"))
    assert predict(engine, folder, tmp_path / "o.jsonl", probabilities=True) == (2, 0, 2)


def test_parquet_without_its_library_is_rejected(engine, folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'vitascope\[parquet\]'"):
        predict(engine, folder, tmp_path / "o.parquet")


def test_full_disk_is_reported_with_advice(engine: Engine, folder: Path, tmp_path: Path, monkeypatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(parts_module, "settle", full)
        with pytest.raises(UserError, match=r"a part cannot be written: No space left .*parts are kept"):
            predict(engine, folder, tmp_path / "o.jsonl")
        disk.undo()
        disk.setattr(Rows, "write", full)
        with pytest.raises(UserError, match=r"No space left .*the parts are kept and can be resumed"):
            predict(engine, folder, tmp_path / "o.jsonl", resume=True)
    assert predict(engine, folder, tmp_path / "o.jsonl", resume=True) == (11, 1, 0)


def test_names_that_are_not_utf8_survive(engine: Engine, tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    odd, label = os.fsdecode(b"\xe9.png"), os.fsdecode(b"\xe9t\xe9")  # the picture's folder is its class
    result = ImageResult(odd, [Prediction(label, 0, 0.5)])
    row = json.loads(Rows().line(result).encode("utf-8"))
    assert (row["image"], row["predictions"][0]["label"]) == (odd, label)
    Rows().write([Rows().encoded([result], ".parquet")], tmp_path / "o.parquet")
    (row,) = pq.read_table(tmp_path / "o.parquet").to_pylist()
    assert (row["image"], row["predictions"][0]["label"]) == (r"\udce9.png", r"\udce9t\udce9")


def test_pictures_in_a_store_are_those_that_were_listed(web_store: Store, engine: Engine) -> None:
    write_tree(web_store.folder / "pictures", {"a": 6, "b": 5})
    url, out = web_store.add("pictures"), web_store.folder / "results"
    out.mkdir()

    def changed_in_between(parts: Parts, task: PartTask, wanted: Sequence[int]) -> Iterator[PartDone]:
        changed = web_store.folder / "pictures" / "a" / "001.png"
        changed.write_bytes((web_store.folder / "pictures" / "b" / "001.png").read_bytes())
        web_store.add("pictures")
        return parts.compute(task, engine, wanted)

    assert predict(engine, url, out / "o.jsonl", changed_in_between) == (11, 1, 11)
    assert "changed since it was listed" in (out / "o.jsonl").read_text()
