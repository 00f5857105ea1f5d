"""Jobs in parts: their files are those of one process, whatever dies or is interrupted in between."""

import dataclasses
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from tests.data import write_tree
from tests.forked import ending, fork
from tests.model import labelling_model, small_model
from tests.stores import Store
from vitascope.cli import main
from vitascope.data.formats.table import column_digests
from vitascope.errors import UserError
from vitascope.model.vision_model import VisionModel
from vitascope.predict import bulk
from vitascope.predict import embed as embed_module
from vitascope.predict import parts as parts_module
from vitascope.predict.bulk import compute_here, predict_in_parts
from vitascope.predict.embed import Embeddings, embed
from vitascope.predict.engine import TorchEngine
from vitascope.predict.part_worker import PartDone, PartTask, PartWorker
from vitascope.predict.parts import MOST_DEATHS, Parts, parts_folder
from vitascope.predict.predictor import ImageResult, Predictor, find_images
from vitascope.predict.result_file import ResultFile
from vitascope.predict.selection import ClassSelection
from vitascope.weights.loading import from_pretrained, save_pretrained

HERE = {"device": "cpu", "workers": 0, "precision": "fp32", "batch_size": 2}


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts_module, "UNIT_IMAGES", 3)  # parts of 4 images, two batches


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pictures, one of which is unreadable, and a model."""
    root = tmp_path_factory.mktemp("bulk")
    write_tree(root / "pictures", {"a": 6, "b": 5})
    (root / "pictures" / "a" / "002.png").write_bytes(b"text")
    write_tree(root / "divided" / "train", {"cat": 3, "ant": 4})
    write_tree(root / "divided" / "test", {"ant": 2})
    rows = [f"pictures/{name}/00{number}.png,{name};day" for name in "ab" for number in (4, 1, 2)]
    (root / "labels.csv").write_text("\n".join(["path,labels", *rows]))
    save_pretrained(small_model(), root / "model")
    return root


@pytest.fixture
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(place)
    return place


def alone(model: VisionModel, out: Path, **options: bool) -> bytes:
    """The file that one process writes of the pictures."""
    engine = TorchEngine(model, precision="fp32", device="cpu")
    with ResultFile(out, engine, **options) as file:
        for result in Predictor(engine, batch_size=2).stream(find_images(["pictures"]), workers=0):
            file.write(result)
        file.finish()
    return out.read_bytes()


def in_parts(out: Path, compute: bulk.Compute = compute_here, **options: object) -> tuple[int, int, int]:
    """Predict in parts; the numbers of images, of unreadable ones and of those computed now."""
    options = {"model": "model", "places": ["pictures"], **HERE, **options}
    names = ("selection", "probabilities", "resume", "kept")
    given = {name: options.pop(name) for name in names if name in options}
    places = options.pop("places")
    tally, computed = predict_in_parts(
        bulk.Job(options.pop("model"), out, compute, **options), places, **given
    )
    return tally.images, tally.unreadable, computed


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
@pytest.mark.parametrize("probabilities", [False, True])
def test_file_is_bitwise_that_of_one_process(
    here: Path, tmp_path: Path, suffix: str, probabilities: bool
) -> None:
    if suffix == ".parquet":
        pytest.importorskip("pyarrow", reason="pyarrow is not installed (vitascope[parquet])")
    one, out = tmp_path / f"one{suffix}", tmp_path / f"out{suffix}"
    expected = alone(small_model(), one, probabilities=probabilities)
    assert in_parts(out, probabilities=probabilities) == (11, 1, 11)
    assert out.read_bytes() == expected
    beside = f"{suffix}.fingerprint.json"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [f"one{suffix}", f"out{suffix}", *([f"one{beside}", f"out{beside}"] if suffix != ".parquet" else [])]
    )


def test_columns_of_a_table_are_kept_in_parts(here: Path, tmp_path: Path) -> None:
    found = list(find_images(["pictures"]))
    table = tmp_path / "t.csv"
    table.write_text(
        "path,note\n" + "".join(f"{Path(path).resolve()},n{n}\n" for n, path in enumerate(found))
    )
    out = tmp_path / "out.jsonl"
    assert in_parts(out, places=[str(table)], kept=column_digests(table)) == (11, 1, 11)
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [(row["image"], row["table"]["note"]) for row in rows] == [
        (str(Path(path).resolve()), f"n{n}") for n, path in enumerate(found)
    ]


def test_several_classes_per_image_and_a_model_in_memory(here: Path, tmp_path: Path) -> None:
    model = labelling_model(0.3, 0.9, 0.6, class_names=("ant", "bee", "cat"), spread=1.0)
    expected = alone(model, tmp_path / "one.jsonl")
    in_parts(tmp_path / "out.jsonl", model=model)
    assert (tmp_path / "out.jsonl").read_bytes() == expected


def test_finished_file_can_grow_in_one_process(here: Path, tmp_path: Path) -> None:
    in_parts(tmp_path / "out.jsonl")
    engine = TorchEngine(small_model(), precision="fp32", device="cpu")
    with ResultFile(tmp_path / "out.jsonl", engine, resume=True) as file:
        assert list(file.remaining([*find_images(["pictures"]), "new.png"])) == ["new.png"]


def test_killed_worker_costs_its_part(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = alone(small_model(), tmp_path / "one.jsonl")
    began: list[int] = []

    def compute(parts: Parts, task: PartTask, wanted: Sequence[int]) -> Iterator[PartDone]:
        worker = PartWorker(parts, task)
        for part in wanted:
            began.append(part)
            if part == 1:  # a process of its own, killed when it has written a line
                assert ending(fork(lambda: dying_at("pictures/a/005.png", monkeypatch, worker, 1))) == -9
                began.append(part)
            yield worker.compute(part)

    with caplog.at_level(logging.WARNING):
        assert in_parts(tmp_path / "out.jsonl", compute) == (11, 1, 11)
    assert began == [0, 1, 1, 2]
    assert (tmp_path / "out.jsonl").read_bytes() == expected
    assert "1 worker died at part 2 of 3" in caplog.text


def dying_at(name: str, monkeypatch: pytest.MonkeyPatch, worker: PartWorker, part: int) -> None:
    """Compute a part in a process that is killed when it writes the line of an image."""
    line = bulk.Rows.line

    def killing(rows: bulk.Rows, result: ImageResult) -> str:
        if result.image == name:
            os.kill(os.getpid(), 9)
        return line(rows, result)

    monkeypatch.setattr(bulk.Rows, "line", killing)
    worker.compute(part)


def test_interrupted_job_computes_the_missing_parts_only(here: Path, tmp_path: Path) -> None:
    expected, out = alone(small_model(), tmp_path / "one.jsonl"), tmp_path / "out.jsonl"
    with pytest.raises(KeyboardInterrupt):
        in_parts(out, stopping_after(2))
    assert not out.exists()
    with pytest.raises(UserError, match="exists: resume it"):
        in_parts(out)
    assert in_parts(out, resume=True) == (11, 1, 3)
    assert out.read_bytes() == expected


def stopping_after(count: int) -> bulk.Compute:
    """Computes so many parts, and is interrupted."""

    def compute(parts: Parts, task: PartTask, wanted: Sequence[int]) -> Iterator[PartDone]:
        yield from compute_here(parts, task, wanted[:count])
        raise KeyboardInterrupt

    return compute


def test_resume_begins_a_job_that_was_not_listed_completely(here: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    parts_folder(out).mkdir()
    (parts_folder(out) / "images").write_bytes(b"pictures/a/000.png\0")
    assert in_parts(out, resume=True) == (11, 1, 11)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"places": ["pictures/a"]}, "the images were pictures, not pictures/a"),
        ({"selection": ClassSelection(2)}, "top_k was 5, not 2"),
        ({"probabilities": True}, "probabilities was False, not True"),
        ({"model": small_model(1)}, "its model gave class"),
    ],
)
def test_another_job_does_not_resume(here: Path, tmp_path: Path, options: dict, message: str) -> None:
    out = tmp_path / "out.jsonl"
    with pytest.raises(KeyboardInterrupt):
        in_parts(out, stopping_after(1))
    with pytest.raises(UserError, match=message):
        in_parts(out, resume=True, **options)
    assert in_parts(out, resume=True) == (11, 1, 7)


def test_options_are_checked_before_anything_is_written(here: Path, tmp_path: Path) -> None:
    for options, message in (
        ({"batch_size": 0}, "batch_size must be at least 1, not 0"),
        ({"workers": -1}, "workers must not be negative"),
        ({"selection": ClassSelection(threshold=0.5)}, "a threshold is for models"),
        ({"model": small_model(head="none")}, "no head for classes"),
    ):
        with pytest.raises(UserError, match=message):
            in_parts(tmp_path / "out.jsonl", **options)
    with pytest.raises(UserError, match=r"ends in \.jsonl"):
        in_parts(tmp_path / "out.txt")
    assert list(tmp_path.iterdir()) == []


def test_one_machine_and_parts_do_not_resume_each_other(here: Path, tmp_path: Path) -> None:
    alone(small_model(), tmp_path / "one.jsonl")
    for resume in (False, True):
        with pytest.raises(UserError, match="was begun on one machine"):
            in_parts(tmp_path / "one.jsonl", resume=resume)
    with pytest.raises(KeyboardInterrupt):
        in_parts(tmp_path / "out.jsonl", stopping_after(1))
    engine = TorchEngine(small_model(), device="cpu")
    with pytest.raises(UserError, match="continue it on Ray"):
        ResultFile(tmp_path / "out.jsonl", engine, resume=True)


def test_part_at_which_workers_die_stops_the_job_and_names_its_images(here: Path, tmp_path: Path) -> None:
    def compute(parts: Parts, task: PartTask, wanted: Sequence[int]) -> Iterator[PartDone]:
        for _ in range(MOST_DEATHS):
            parts.begin(1)
        return compute_here(parts, task, wanted)

    with pytest.raises(
        UserError, match=r"5 workers died at the images from pictures/a/004\.png to pictures/b/"
    ):
        in_parts(tmp_path / "out.jsonl", compute)
    assert in_parts(tmp_path / "out.jsonl", resume=True) == (11, 1, 7)


def test_part_that_was_cut_short_is_not_taken_for_whole(here: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"

    def compute(parts: Parts, task: PartTask, wanted: Sequence[int]) -> Iterator[PartDone]:
        yield from compute_here(parts, task, wanted)
        lines = parts.file(2).read_text().splitlines(keepends=True)
        parts.file(2).write_text("".join(lines[:-1]))

    with pytest.raises(UserError, match=r"00002\.jsonl: 2 results of 3 images; remove it"):
        in_parts(out, compute)
    assert not out.exists()
    (parts_folder(out) / "00002.jsonl").unlink()
    assert in_parts(out, resume=True) == (11, 1, 3)


def test_parts_that_nothing_computed_are_told(here: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="2 of 3 parts are not computed"):
        in_parts(tmp_path / "o.jsonl", lambda parts, task, wanted: compute_here(parts, task, wanted[:1]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"versions": {"vitascope": "0.0.1", "torch": "2.0"}}, r"the command vitascope 0\.0\.1, torch 2\.0"),
        ({"home": "/no/such/folder"}, "a folder that all nodes share"),
        ({"digest": "f" * 64}, "another model here: SHA-256"),
        ({"model": "no-model"}, "no-model"),
        ({"device": "abacus"}, "abacus"),
    ],
)
def test_worker_that_is_not_like_the_others_stops_the_job_in_one_line(
    here: Path, tmp_path: Path, change: dict, message: str
) -> None:
    def compute(parts: Parts, task: PartTask, wanted: Sequence[int]) -> Iterator[PartDone]:
        return compute_here(parts, dataclasses.replace(task, **change), wanted)

    with pytest.raises(UserError, match=message) as caught:
        in_parts(tmp_path / "out.jsonl", compute)
    assert str(caught.value).startswith(f"{os.uname().nodename}: ")


def test_images_that_a_node_does_not_see_are_not_taken_for_unreadable(here: Path, tmp_path: Path) -> None:
    write_tree(tmp_path / "photos", {"a": 9})

    def compute(parts: Parts, task: PartTask, wanted: Sequence[int]) -> Iterator[PartDone]:
        (tmp_path / "photos" / "a" / "001.png").unlink()  # one that has vanished
        yield from compute_here(parts, task, wanted[:1])
        (tmp_path / "photos").rename(tmp_path / "elsewhere")
        yield from compute_here(parts, task, wanted[1:])

    out = tmp_path / "out.jsonl"
    with pytest.raises(UserError, match=r"none of the images from .*004\.png to .*007\.png is here"):
        in_parts(out, compute, places=[str(tmp_path / "photos")])
    (tmp_path / "elsewhere").rename(tmp_path / "photos")
    assert in_parts(out, places=[str(tmp_path / "photos")], resume=True) == (9, 1, 5)


def test_lines_with_an_error_are_known_whatever_stands_in_names(here: Path, tmp_path: Path) -> None:
    folder = tmp_path / 'a", "error": "b'
    write_tree(folder, {"c": 2})
    names = ('", "error": "', "error")
    save_pretrained(small_model(num_classes=2, class_names=names), tmp_path / "m")
    found = in_parts(
        tmp_path / "o.jsonl", model=str(tmp_path / "m"), places=[str(folder)], probabilities=True
    )
    assert found == (2, 0, 2)
    assert len((tmp_path / "o.jsonl").read_text().splitlines()) == 2


@pytest.fixture
def embedded_in_parts(monkeypatch: pytest.MonkeyPatch) -> Callable[[bulk.Compute], None]:
    """Let `embed` compute without Ray."""
    monkeypatch.setattr(embed_module, "connected", lambda address: nullcontext())

    def use(compute: bulk.Compute) -> None:
        monkeypatch.setattr(embed_module, "compute_on_ray", compute)

    use(compute_here)
    return use


@pytest.mark.parametrize("data", ["pictures", "pictures/b", "labels.csv", "divided"])
@pytest.mark.parametrize("suffix", [".npz", ".npy", ".parquet"])
def test_features_are_bitwise_those_of_one_process(
    here: Path, tmp_path: Path, embedded_in_parts: Callable, data: str, suffix: str
) -> None:
    if suffix == ".parquet":
        pytest.importorskip("pyarrow", reason="pyarrow is not installed (vitascope[parquet])")
    one = embed("model", data, out=tmp_path / f"one{suffix}", cache=False, **HERE)
    found = embed("model", data, out=tmp_path / f"out{suffix}", engine="ray", **HERE)
    assert found.made == one.made
    assert np.array_equal(found.features, one.features)
    assert (found.labels is None) == (one.labels is None) == (data == "pictures/b")
    for column in ("images", "labels", "splits"):
        assert np.array_equal(getattr(found, column), getattr(one, column))
    assert (found.unreadable, found.computed) == (one.unreadable, one.computed)
    assert not parts_folder(tmp_path / f"out{suffix}").exists()


def test_command_embeds_on_ray(here: Path, tmp_path: Path, embedded_in_parts: Callable, capsys) -> None:
    out = tmp_path / "f.npz"
    argv = ["embed", "model", "pictures", "--out", str(out), "--device", "cpu", "--precision", "fp32"]
    with pytest.raises(SystemExit, match="1"):  # of the image that cannot be read
        main([*argv, "--batch-size", "2", "--engine", "ray", "--json"])
    assert json.loads(capsys.readouterr().out) == {
        "out": str(out),
        "images": 10,
        "unreadable": 1,
        "computed": 10,
    }
    assert len(Embeddings.load(out)) == 10
    assert main([*argv, "--engine", "ray"]) == 2
    assert "is not overwritten" in capsys.readouterr().err


def test_repeated_embed_continues_and_other_options_are_rejected(
    here: Path, tmp_path: Path, embedded_in_parts: Callable
) -> None:
    out = tmp_path / "f.npz"
    embedded_in_parts(stopping_after(1))
    with pytest.raises(KeyboardInterrupt):
        embed("model", "pictures", out=out, engine="ray", **HERE)
    embedded_in_parts(compute_here)
    for options, message in (
        ({"pool": "mean"}, "pool was None"),
        ({"engine": "local"}, "continue it on Ray"),
    ):
        with pytest.raises(UserError, match=message):
            embed("model", "pictures", out=out, **{"engine": "ray", **HERE, **options})
    with pytest.raises(UserError, match="other images"):
        embed("model", str(here / "pictures"), out=out, engine="ray", **HERE)
    assert embed("model", "pictures", out=out, engine="ray", **HERE).computed == 7
    assert len(Embeddings.load(out)) == 10


def test_precisions_of_several_machines_are_not_mixed(
    here: Path, tmp_path: Path, embedded_in_parts: Callable
) -> None:
    def compute(parts: Parts, task: PartTask, wanted: Sequence[int]) -> Iterator[PartDone]:
        yield from compute_here(parts, task, wanted[:1])
        yield from compute_here(parts, dataclasses.replace(task, precision="bf16"), wanted[1:])

    embedded_in_parts(compute)
    with pytest.raises(UserError, match=r"several precisions, fp32 \(.*\), bf16 \(.*\)"):
        embed("model", "pictures", out=tmp_path / "f.npz", engine="ray", **HERE)


def test_features_of_no_readable_image_are_an_error(
    here: Path, tmp_path: Path, embedded_in_parts: Callable
) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "a.png").write_bytes(b"text")
    with pytest.raises(UserError, match=r"none of 1 image can be read: .*a\.png"):
        embed("model", str(tmp_path / "broken"), out=tmp_path / "f.npz", engine="ray", **HERE)


def test_pictures_in_a_store_are_those_that_were_listed(
    here: Path, web_store: Store, embedded_in_parts: Callable
) -> None:
    shutil.copytree("pictures", web_store.folder / "pictures")
    url, out = web_store.add("pictures"), web_store.folder / "results"
    out.mkdir()
    engine = TorchEngine(from_pretrained("model"), precision="fp32", device="cpu")
    with ResultFile(out / "one.jsonl", engine) as file:
        for result in Predictor(engine, batch_size=2).stream(find_images([url]), workers=0):
            file.write(result)
        file.finish()
    assert in_parts(out / "parts.jsonl", places=[url]) == (11, 1, 11)
    assert (out / "parts.jsonl").read_bytes() == (out / "one.jsonl").read_bytes()
    one = embed("model", url, out=out / "one.npz", cache=False, **HERE)
    found = embed("model", url, out=out / "parts.npz", engine="ray", **HERE)
    assert np.array_equal(found.features, one.features)
    assert found.images.tolist() == one.images.tolist()
    assert found.images[0].startswith(url)

    def changed_in_between(parts: Parts, task: PartTask, wanted: Sequence[int]) -> Iterator[PartDone]:
        changed = web_store.folder / "pictures" / "a" / "001.png"
        changed.write_bytes((web_store.folder / "pictures" / "b" / "001.png").read_bytes())
        web_store.add("pictures")
        shutil.rmtree(web_store.folder / "cache")
        return compute_here(parts, task, wanted)

    assert in_parts(out / "changed.jsonl", changed_in_between, places=[url]) == (11, 2, 11)
    assert "changed since it was listed" in (out / "changed.jsonl").read_text()


def test_what_cannot_travel_to_workers_is_rejected(
    here: Path, tmp_path: Path, embedded_in_parts: Callable
) -> None:
    out = tmp_path / "f.npz"
    with pytest.raises(UserError, match="is no image file"):
        embed("model", "digits", out=out, engine="ray", **HERE)
    with pytest.raises(UserError, match="features go into a file"):
        embed("model", "pictures", engine="ray", **HERE)
    with pytest.raises(UserError, match="needs engine 'ray'"):
        embed("model", "pictures", out=out, ray_address="auto", **HERE)
    assert not out.exists()


def test_damaged_part_of_features_is_named(here: Path, tmp_path: Path, embedded_in_parts: Callable) -> None:
    def compute(parts: Parts, task: PartTask, wanted: Sequence[int]) -> Iterator[PartDone]:
        yield from compute_here(parts, task, wanted)
        parts.file(1).write_bytes(parts.file(1).read_bytes()[:-40])

    embedded_in_parts(compute)
    with pytest.raises(UserError, match=r"00001\.npz: damaged"):
        embed("model", "pictures", out=tmp_path / "f.npz", engine="ray", **HERE)


def test_fingerprint_of_the_file_is_that_of_one_process(here: Path, tmp_path: Path) -> None:
    alone(small_model(), tmp_path / "one.csv")
    in_parts(tmp_path / "out.csv")
    one, out = (
        json.loads((tmp_path / f"{name}.csv.fingerprint.json").read_text()) for name in ("one", "out")
    )
    assert one == out
