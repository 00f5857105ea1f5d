import dataclasses
import json
import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

import vitascope as vs
from tests.data import noise, write_picture, write_tree
from tests.deploy.predict import PARQUET
from tests.models import small_model
from vitascope.cli import main
from vitascope.data.features import embed as module
from vitascope.data.features.embed import Embeddings, embed
from vitascope.data.rows import parts as parts_module
from vitascope.data.rows.on_ray import RayLoop
from vitascope.data.rows.parts import PartDone, Parts, PartTask, parts_folder
from vitascope.data.table_options import TableOptions
from vitascope.errors import UserError
from vitascope.models.engines.compute import Compute
from vitascope.models.engines.engine import TorchEngine
from vitascope.models.engines.runtimes import ProgramEngine
from vitascope.models.weights.loading import save_pretrained

HERE = {"compute": Compute(device="cpu", workers=0, precision="fp32")}

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    write_tree(tmp_path / "photos" / "train", {"cat": 4, "dog": 3}, size=(40, 40))
    write_tree(tmp_path / "photos" / "test", {"dog": 2}, size=(40, 40))
    return tmp_path / "photos"


def test_features_are_bitwise_those_of_the_model_for_the_same_pixels(photos: Path) -> None:
    model = small_model()
    found = embed(model, photos, **HERE)
    pixels = torch.from_numpy(np.stack([model.preprocess.pixels(path) for path in found.images.tolist()]))
    with torch.inference_mode():
        own = model.embed(model.preprocess.normalize(pixels)).numpy()
    assert np.array_equal(found.features, own)
    assert found.splits.tolist() == ["train"] * 7 + ["test"] * 2
    assert found.labels.tolist() == ["cat"] * 4 + ["dog"] * 5
    assert found.targets.labels.tolist() == [0] * 4 + [1] * 5
    assert (found.computed, found.unreadable, len(found)) == (9, (), 9)
    assert found.made["preprocess"] == model.preprocess.to_dict()
    assert (found.made["layer"], found.made["pool"], found.made["precision"]) == (None, None, "fp32")
    test = found.subset(found.splits == "test")
    assert test.labels.tolist() == ["dog", "dog"]
    assert np.array_equal(test.features, found.features[7:])
    assert test.images.tolist() == found.images.tolist()[7:]


@pytest.mark.parametrize("place", [-1, 0.3])
def test_damaged_byte_in_the_cache_changes_no_feature(photos: Path, tmp_path, place: float, caplog) -> None:
    right = embed(small_model(), photos, **HERE).features
    (path,) = (tmp_path / "cache" / "features").glob("*/*.safetensors")
    content = bytearray(path.read_bytes())
    content[place if isinstance(place, int) else int(place * len(content))] ^= 64
    path.write_bytes(content)
    for computed in (9, 0):  # it is replaced
        found = embed(small_model(), photos, **HERE)
        assert np.array_equal(found.features, right)
        assert found.computed == computed
    assert f"{path} is damaged" in caplog.text


@pytest.mark.parametrize("suffix", [".npz", ".npy", PARQUET])
def test_file_has_what_is_returned_without_one(photos: Path, tmp_path: Path, suffix: str) -> None:
    out = tmp_path / f"f{suffix}"
    written = embed(small_model(), photos, out=out, layer=0, pool="cls_mean", **HERE)
    kept = embed(small_model(), photos, layer=0, pool="cls_mean", **HERE)
    assert (written.computed, kept.computed) == (9, 0)
    for found in (written, Embeddings.load(out)):
        assert np.array_equal(found.features, kept.features)
        assert found.features.shape == (9, 32)
        assert found.images.tolist() == kept.images.tolist()
        assert found.labels.tolist() == kept.labels.tolist()
        assert found.splits.tolist() == kept.splits.tolist()
        assert found.made == kept.made
    assert repr(written) == "Embeddings(9 images; a model, layer 0, pool cls_mean)"
    with pytest.raises(UserError, match="exists and is not overwritten"):
        embed(small_model(), photos, out=out, **HERE)


def test_pictures_and_folders_without_labels_are_data_too(tmp_path: Path) -> None:
    paths = [write_picture(tmp_path / "flat" / f"{number}.png", seed=number) for number in range(3)]
    whole = embed(small_model(), tmp_path / "flat", **HERE)
    assert whole.labels is None
    assert whole.targets is None
    assert whole.splits.tolist() == ["all"] * 3
    listed = embed(small_model(), paths, **HERE)
    assert np.array_equal(listed.features, whole.features)
    assert listed.computed == 0  # the content is the same
    one = embed(small_model(), paths[1], **HERE)
    assert np.array_equal(one.features, whole.features[1:2])
    pixels = embed(small_model(), [noise(8, 8, seed=1)], **HERE)
    assert pixels.images.tolist() == ["all/0"]
    np.testing.assert_allclose(pixels.features, one.features, atol=1e-6)


def test_table_with_several_labels_per_image(tmp_path: Path) -> None:
    for number in range(4):
        write_picture(tmp_path / f"{number}.png", seed=number)
    rows = "image,label\n0.png,cat;dog\n1.png,dog\n2.png,cat\n3.png,cat;dog\n"
    (tmp_path / "labels.csv").write_text(rows)
    several = {"labels": "several", "label_separator": ";"}
    found = embed(small_model(), tmp_path / "labels.csv", table=TableOptions(**several), **HERE)
    assert found.labels.tolist() == ["cat;dog", "dog", "cat", "cat;dog"]
    assert found.targets.labels.tolist() == [[True, True], [False, True], [True, False], [True, True]]
    frame = pytest.importorskip("pandas", reason="pandas is not installed").read_csv(tmp_path / "labels.csv")
    again = embed(small_model(), frame, table=TableOptions(images=tmp_path, **several), **HERE)
    assert np.array_equal(again.features, found.features)


@pytest.mark.parametrize("suffix", ["", ".npz", PARQUET])
def test_classes_whose_names_are_no_utf8_are_targets_too(tmp_path: Path, suffix: str) -> None:
    write_tree(tmp_path / "photos", {"caf\udcff": 2, "dog": 2})
    found = embed(small_model(), tmp_path / "photos", out=tmp_path / f"f{suffix}" if suffix else None, **HERE)
    assert found.made["class_names"] == [r"caf\udcff", "dog"]
    assert found.targets.labels.tolist() == [0, 0, 1, 1]
    write_picture(tmp_path / "photos" / "loose.png", seed=9)
    partly = embed(small_model(), tmp_path / "photos", **HERE)
    assert partly.labels.tolist().count("") == 1
    with pytest.raises(UserError, match="1 of 5 images have no label"):
        _ = partly.targets
    assert partly.subset(partly.labels != "").targets.labels.tolist() == [0, 0, 1, 1]


def test_unreadable_images_are_left_out_and_named(photos: Path, tmp_path: Path, monkeypatch) -> None:
    (photos / "train" / "cat" / "001.png").write_bytes(b"broken")
    for options in ({}, {"out": tmp_path / "f.npz"}):
        found = embed(small_model(), photos, **options, **HERE)
        assert found.features.shape[0] == len(found) == 8
        (reason,) = found.unreadable
        assert "001.png: not a picture" in reason
        assert not any(name.endswith("train/cat/001.png") for name in found.images)
    monkeypatch.chdir(tmp_path)
    Path("broken.png").write_bytes(b"broken")
    with pytest.raises(UserError, match=r"none of 1 image can be read: broken\.png: not a picture"):
        embed(small_model(), "broken.png", **HERE)


def test_features_that_fit_neither_into_memory_nor_on_the_disk_are_refused(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, size: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as small:
        small.setattr(module, "MEMORY_GB", 5e-7)
        with pytest.raises(UserError, match=r"9 features of 16 .* 0\.0 GB, and at most 5e-07 GB .*: set out"):
            embed(small_model(), photos, **HERE)
        assert len(embed(small_model(seed=1), photos, out=tmp_path / "f.npy", **HERE)) == 9
    with monkeypatch.context() as disk:
        disk.setattr("vitascope.data.features.embedding_file.check_room", full)
        with pytest.raises(UserError, match=r"No space left .*the features in the cache are kept") as failure:
            embed(small_model(), photos, out=tmp_path / "g.npy", **HERE)
    assert embed(small_model(), photos, **HERE).computed == 0
    assert failure.value is not None  # its traceback has held the frames of the failed call until here


def test_model_is_left_as_it_was_and_features_of_another_are_rejected(photos: Path, tmp_path: Path) -> None:
    model = small_model().double().train()
    embed(model, photos, **HERE)
    assert model.training
    assert next(model.parameters()).dtype == torch.float64
    for name, seed in (("one", 0), ("two", 1)):
        save_pretrained(small_model(seed=seed), tmp_path / name)
    found = embed(tmp_path / "one", photos, **HERE)
    assert len(found) == 9
    found.check_model(tmp_path / "one")
    found.check_model(small_model(num_classes=3))
    found.check_model(TorchEngine(small_model(), device="cpu"))
    with pytest.raises(UserError, match=r"these features are of one \(\w{12}\), not of two \(\w{12}\)"):
        found.check_model(tmp_path / "two")
    for data in (tmp_path / "one", tmp_path / "one" / "model.safetensors"):
        with pytest.raises(UserError, match="the model comes first, then the data"):
            embed(photos, data, **HERE)


def test_exported_features_are_embedded_and_cached_like_those_of_the_model(photos: Path, tmp_path) -> None:
    model, path = small_model(depth=1), tmp_path / "body.pt2"
    write_picture(photos / "train" / "cat" / "wide.png", size=(30, 50))
    (photos / "train" / "cat" / "001.png").write_bytes(b"broken")
    vs.export(model, path, format="torch", features=True, images=noise(40, 36))
    body = ProgramEngine(path)
    own = embed(model, photos, **HERE)
    for computed in (9, 0):  # those of the model are not taken for those of the file
        found = embed(body, photos, compute=Compute(workers=0, batch_size=4))
        assert found.images.tolist() == own.images.tolist()
        np.testing.assert_allclose(found.features, own.features, atol=5e-3)
        assert (found.computed, len(found.unreadable)) == (computed, 1)
    found.check_model(model)
    own.check_model(body)
    (tmp_path / "photo.png").write_bytes(b"broken")
    with pytest.raises(UserError):
        embed(body, tmp_path / "photo.png", compute=Compute(workers=0))


def test_impossible_requests_and_files_of_another_making_are_rejected(photos: Path, tmp_path: Path) -> None:
    for options in ({"pool": "max"}, {"layer": "last"}):
        with pytest.raises(UserError):
            embed(small_model(), photos, **{**HERE, **options})
    np.savez(tmp_path / "f.npz", image=["a"], split=["all"], feature=np.zeros((1, 2), np.float32), made="{}")
    with pytest.raises(UserError, match=r"f\.npz: not a file of features of `vitascope embed`: "):
        vs.Embeddings.load(tmp_path / "f.npz")
    embed(small_model(), photos, out=tmp_path / "f.npy", **HERE)
    np.save(tmp_path / "f.npy", np.zeros((3, 16), np.float32))
    with pytest.raises(UserError, match="3 features of 9 images"):
        _ = Embeddings.load(tmp_path / "f.npy").features


IN_PARTS = {"compute": Compute(device="cpu", workers=0, precision="fp32", batch_size=2), "ray": "local"}


def compute_here(loop: RayLoop, parts: Parts, task: PartTask, wanted: list[int]) -> Iterator[PartDone]:
    """In place of the workers of Ray."""
    return parts.compute(task, loop.engine, wanted)


@pytest.fixture
def without_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute in parts of 4 images, in this process, in a folder with pictures and a model."""
    monkeypatch.setattr(module, "connected", lambda address: nullcontext())
    monkeypatch.setattr(parts_module, "UNIT_IMAGES", 3)
    monkeypatch.setattr(RayLoop, "__call__", compute_here)
    write_tree(tmp_path / "pictures", {"a": 6, "b": 5})
    (tmp_path / "pictures" / "a" / "002.png").write_bytes(b"text")
    rows = [f"pictures/{name}/00{number}.png,{name};day" for name in "ab" for number in (4, 1, 2)]
    (tmp_path / "labels.csv").write_text("\n".join(["path,labels", *rows]))
    save_pretrained(small_model(), tmp_path / "model")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("data", "suffix"),
    [
        *(("pictures", ".npz"), ("pictures/b", ".npy"), ("labels.csv", ".npz"), ("photos", ".npy")),
        pytest.param("labels.csv", *PARQUET.values, marks=PARQUET.marks),
    ],
)
@pytest.mark.usefixtures("without_ray")
def test_file_is_bitwise_that_of_one_process(photos: Path, tmp_path: Path, data: str, suffix: str) -> None:
    names, compute = (f"one{suffix}", f"out{suffix}"), IN_PARTS["compute"]
    one = embed("model", data, out=names[0], compute=dataclasses.replace(compute, cache=False))
    found = embed("model", data, out=names[1], **IN_PARTS)
    assert Path(names[0]).read_bytes() == Path(names[1]).read_bytes() or suffix == ".npz"  # it has a time
    assert (found.made, found.count) == (one.made, one.count)
    for column in ("features", "images", "labels", "splits", "unreadable", "computed"):
        assert np.array_equal(getattr(found, column), getattr(one, column))
    assert not parts_folder(tmp_path / names[1]).exists()


@pytest.mark.usefixtures("without_ray")
def test_command_embeds_on_ray(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["embed", "model", "pictures", "--out", "f.npz", "--device", "cpu", "--precision", "fp32"]
    with pytest.raises(SystemExit, match="1"):  # of the image that cannot be read
        main([*argv, "--batch-size", "2", "--engine", "ray", "--json"])
    counts = {"out": "f.npz", "images": 10, "unreadable": 1, "computed": 10}
    assert json.loads(capsys.readouterr().out) == counts
    assert len(Embeddings.load("f.npz")) == 10
    assert main([*argv, "--engine", "ray"]) == 2
    assert "is not overwritten" in capsys.readouterr().err


@pytest.mark.usefixtures("without_ray")
def test_repeated_call_continues_and_other_options_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopping(loop: RayLoop, parts: Parts, task: PartTask, wanted: list[int]) -> Iterator[PartDone]:
        yield from compute_here(loop, parts, task, wanted[:1])
        raise KeyboardInterrupt

    monkeypatch.setattr(RayLoop, "__call__", stopping)
    with pytest.raises(KeyboardInterrupt):
        embed("model", "pictures", out="f.npz", **IN_PARTS)
    monkeypatch.setattr(RayLoop, "__call__", compute_here)
    for options, message in (
        ({"pool": "mean"}, "pool was None, not 'mean'"),
        ({"data": os.path.abspath("pictures")}, "the images were others"),
        ({"ray": None}, "continue it on Ray"),
    ):
        with pytest.raises(UserError, match=message):
            embed("model", **{"data": "pictures", "out": "f.npz", **IN_PARTS, **options})
    assert embed("model", "pictures", out="f.npz", **IN_PARTS).computed == 7
    assert len(Embeddings.load("f.npz")) == 10


@pytest.mark.usefixtures("without_ray")
def test_precisions_of_several_machines_are_not_mixed_and_a_damaged_part_is_named(monkeypatch) -> None:
    def mixing(loop: RayLoop, parts: Parts, task: PartTask, wanted: list[int]) -> Iterator[PartDone]:
        yield from compute_here(loop, parts, task, wanted[:1])
        yield from compute_here(dataclasses.replace(loop, precision="bf16"), parts, task, wanted[1:])

    def damaging(loop: RayLoop, parts: Parts, task: PartTask, wanted: list[int]) -> Iterator[PartDone]:
        yield from compute_here(loop, parts, task, wanted)
        parts.file(1).write_bytes(parts.file(1).read_bytes()[:-40])

    for out, loop, message in (
        ("f.npz", mixing, r"several precisions, fp32 \(.*\), bf16 \(.*\)"),
        ("g.npz", damaging, r"00001\.part: damaged"),
    ):
        monkeypatch.setattr(RayLoop, "__call__", loop)
        with pytest.raises(UserError, match=message):
            embed("model", "pictures", out=out, **IN_PARTS)


@pytest.mark.usefixtures("without_ray")
def test_what_no_other_process_can_read_is_rejected(tmp_path: Path) -> None:
    Path("broken").mkdir()
    Path("broken/a.png").write_bytes(b"text")
    for data, options, message in (
        ("digits", {}, "is no image file"),
        ("pictures", {"out": None}, "features go into a file"),
        ("broken", {}, r"none of 1 image can be read: .*a\.png"),
    ):
        with pytest.raises(UserError, match=message):
            embed("model", data, **{"out": "f.npz", **IN_PARTS, **options})
    assert not Path("f.npz").exists()
