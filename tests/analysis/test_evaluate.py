import dataclasses
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from sklearn.metrics import confusion_matrix

from tests.data import read_tree, write_tree
from tests.models import small_model
from tests.training import tiny_config, undrawn, write_folder
from vitascope import runs
from vitascope.analysis.evaluate import evaluate, splits_of_data, splits_of_run
from vitascope.cli import main
from vitascope.data.loading import Loader
from vitascope.data.split_record import SplitRecord
from vitascope.errors import UserError
from vitascope.layout import SPLIT
from vitascope.models.engines.engine import TorchEngine
from vitascope.models.weights.loading import save_pretrained
from vitascope.models.weights.preprocess import default_preprocess
from vitascope.training.evaluation.measure import measure
from vitascope.training.run.run import Run


@pytest.fixture
def loader(tmp_path):
    images = read_tree(write_folder(tmp_path / "data", per_class=5, side=32))
    config = small_model(num_classes=2).config
    return Loader(images, default_preprocess(config), batch_size=3)


def measured(model, loader):
    model.preprocess = loader.preprocess
    return measure(TorchEngine(model, precision="fp32", device="cpu"), loader)


def test_every_image_is_evaluated_once_in_the_order_of_the_split(loader) -> None:
    model = small_model(num_classes=2)
    found = measured(model, loader)
    pixels = np.stack([loader.preprocess.pixels(source) for source in loader.images.sources])
    logits = model(loader.preprocess.normalize(torch.from_numpy(pixels))).detach()
    np.testing.assert_allclose(found.probabilities, logits.softmax(dim=1), atol=1e-6)
    np.testing.assert_array_equal(found.labels, loader.images.labels)
    labels = torch.from_numpy(found.labels)
    assert found.loss == pytest.approx(float(torch.nn.functional.cross_entropy(logits, labels)), rel=1e-5)
    assert found.accuracy == int((logits.argmax(dim=1) == labels).sum()) / len(labels)
    np.testing.assert_array_equal(found.confusion, confusion_matrix(found.labels, found.classes))


def test_mode_and_dtype_of_the_callers_model_are_restored(tmp_path) -> None:
    root = write_folder(tmp_path / "data", per_class=3, side=32)
    model = small_model(num_classes=2, class_names=("dark", "light")).train().bfloat16()
    model.preprocess = default_preprocess(model.config)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    evaluate(model, str(root), device="cpu")
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_mean_of_views_is_measured_beside_one_view(tmp_path) -> None:
    root = write_folder(tmp_path / "data", per_class=5, side=32)
    shutil.copytree(root, tmp_path / "mirrored")
    for path in (tmp_path / "mirrored").glob("*/*.png"):
        ImageOps.mirror(Image.open(path)).save(path)
    model = small_model(num_classes=2, class_names=("dark", "light"))
    model.preprocess = default_preprocess(model.config)
    one, other = (evaluate(model, tmp_path / name, device="cpu") for name in ("data", "mirrored"))
    both = evaluate(model, root, device="cpu", views=2)
    assert one.averaged is None
    assert dataclasses.replace(both, averaged=None) == one
    expected = (one.probabilities + other.probabilities) / 2
    np.testing.assert_allclose(both.averaged.probabilities, expected, atol=1e-6)
    assert np.abs(one.probabilities - other.probabilities).max() > 1e-4
    assert both.summary()["averaged"] == both.averaged.summary()


def test_evaluations_are_equal_if_their_values_are(tmp_path) -> None:
    write_folder(tmp_path / "photos", per_class=4)
    model = small_model(num_classes=2, class_names=("dark", "light"))
    one, same = (evaluate(model, tmp_path / "photos", device="cpu") for _ in range(2))
    assert one == same
    assert one != dataclasses.replace(same, probabilities=same.probabilities / 2)
    assert one != dataclasses.replace(same, thresholds=np.ones(2, np.float32))
    assert one != one.summary()


def test_unreadable_images_are_named_and_not_counted(tmp_path) -> None:
    root = write_folder(tmp_path / "data", per_class=12, side=32)
    (root / "dark" / "broken.png").write_text("no picture")
    loader = Loader(read_tree(root), default_preprocess(small_model().config), batch_size=8)
    found = measured(small_model(num_classes=2), loader)
    assert found.summary()["images"] == 24
    assert found.summary()["unreadable"] == 1
    assert ["broken.png" in reason for reason in found.unreadable] == [True]


def test_model_folder_without_data_and_impossible_batches_are_rejected(tmp_path) -> None:
    save_pretrained(small_model(num_classes=2), tmp_path / "m")
    with pytest.raises(UserError, match="not a run folder with test images of its own: set data"):
        evaluate(tmp_path / "m")
    for size in (0, 10**23):
        with pytest.raises(UserError, match=rf"batch_size must be in \[1, 100000\], not {size}"):
            evaluate(tmp_path / "m", "digits", batch_size=size)


def test_classes_are_matched_by_name(tmp_path) -> None:
    root = write_folder(tmp_path / "data", per_class=3, side=32, classes=("a", "b", "c"))
    swapped = small_model(num_classes=3, class_names=("c", "a", "b"))
    save_pretrained(swapped, tmp_path / "m")
    found = evaluate(tmp_path / "m", str(root), device="cpu")
    assert found.labels.tolist() == [1, 1, 1, 2, 2, 2, 0, 0, 0]


@pytest.mark.parametrize(("folders", "named"), [(("train", "val"), "8 train"), (("",), "")])
def test_images_of_other_splits_are_named(tmp_path, caplog, folders: tuple[str, ...], named: str) -> None:
    for number, folder in enumerate(folders):
        write_folder(tmp_path / "data" / folder, per_class=4 - 2 * number, side=32, classes=("a", "b"))
    save_pretrained(small_model(num_classes=2, class_names=("a", "b")), tmp_path / "m")
    found = evaluate(tmp_path / "m", str(tmp_path / "data"), device="cpu")
    assert len(found.labels) == (4 if named else 8)
    assert (f"measures 4 val images, not the others ({named})" in caplog.text) == bool(named)


# --- data that changed under a run


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A project, `photos/` and `runs/photos/`, trained inside it with a relative path."""
    project = tmp_path_factory.mktemp("made") / "project"
    write_tree(project / "photos", {"cat": 30, "dog": 30}, size=(16, 16))
    with pytest.MonkeyPatch.context() as patch, undrawn():
        patch.chdir(project)
        runs.train(tiny_config(Path("photos"), run="runs/photos", epochs=1, keep="last"))
    return project


@pytest.fixture
def project(made, tmp_path, monkeypatch) -> Path:
    """A copy of the project that tests may change, without the original, outside the current folder."""
    copy = Path(shutil.copytree(made, tmp_path / "project"))
    made.rename(made.with_name("away"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    yield copy
    made.with_name("away").rename(made)


def paths(project: Path, split: str) -> list[Path]:
    names = SplitRecord.read(project / "runs" / "photos" / SPLIT).parts[split].names
    return [project / "photos" / name for name in names]


def test_training_images_are_not_evaluated(project, caplog) -> None:
    run = project / "runs" / "photos"
    before = evaluate(run, device="cpu")
    unchanged = {"missing": 0, "changed": 0, "renamed": 0, "new": 0}
    assert (before.summary()["images"], before.changes) == (6, unchanged)
    assert not caplog.records
    deleted = [paths(project, "train")[0], paths(project, "test")[2], paths(project, "val")[-1]]
    for path in deleted:
        path.unlink()
    after = evaluate(run, device="cpu")
    assert after.changes == unchanged | {"missing": 3}
    np.testing.assert_allclose(after.probabilities, np.delete(before.probabilities, 2, axis=0), atol=1e-6)
    message = [record.getMessage() for record in caplog.records]
    assert "3 missing (1 train, 1 val, 1 test)" in message[0]
    assert "measured on 5 of the run's 6 test images" in message[1]
    trained = {path.read_bytes() for path in paths(project, "train") if path.exists()}
    assert not [path for path in Run.open(run).test_images().sources if path.read_bytes() in trained]


def copied(project: Path, *images: Path) -> Path:
    other = project / "other"
    for number, path in enumerate(images):
        (other / path.parent.name).mkdir(parents=True, exist_ok=True)
        shutil.copy(path, other / path.parent.name / f"copy{number}.png")
    return other


def test_training_images_in_other_data_are_left_out_and_counted(project, capsys, caplog) -> None:
    run = project / "runs" / "photos"
    other = copied(project, *paths(project, "train")[:7], *paths(project, "test")[:2])
    assert main(["evaluate", str(run), "--data", str(other), "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["images"], found["trained_on"]) == (2, 7)
    assert "was trained on 7 of these 9 images, which are left out; 2 remain" in caplog.text
    best = shutil.copytree(run / "model", run / "checkpoints" / "best", dirs_exist_ok=True)
    for model in (run / "model", best):
        assert evaluate(model, str(other), device="cpu").trained_on == 7


def test_images_that_set_what_is_measured_on_them_are_counted(project, capsys) -> None:
    """Validation images set the temperature and the sets; test images do not."""
    run, val = project / "runs" / "photos", paths(project, "val")
    assert evaluate(run, device="cpu").fitted_to == 0
    for images, words in (
        (val, "these images also set the temperature"),
        ([*val[:2], *paths(project, "test")], "2 of them also set the temperature"),
        (paths(project, "test"), ""),
    ):
        other = copied(project, *images)
        assert main(["evaluate", str(run), "--data", str(other), "--device", "cpu"]) == 0
        out = capsys.readouterr().out
        assert words in out if words else "also set" not in out
        shutil.rmtree(other)


def test_accuracy_on_training_images_alone_is_labelled_so(project, caplog) -> None:
    other = copied(project, *paths(project, "train")[:7])
    found = evaluate(project / "runs" / "photos", str(other), device="cpu")
    assert (len(found.labels), found.trained_on) == (7, 7)
    assert "was trained on all 7 of these images" in caplog.text


def test_smaller_models_are_measured_on_unchanged_images_and_on_each_once(project) -> None:
    run, names = Run.open(project / "runs" / "photos"), ("cat", "dog")
    train_images, measured = splits_of_run(run, names)
    assert (len(train_images), len(measured)) == (48, 12)  # with few test images, those of validation too
    for split in ("val", "test"):
        shutil.copy(paths(project, "train")[0], paths(project, split)[0])
    assert len(splits_of_run(run, names)[1]) == 10
    for side, part in ((17, "train"), (18, "val")):
        write_tree(project / "other" / part, {"cat": 4, "dog": 3}, size=(side, side))
    assert len(splits_of_data(str(project / "other"), names)[1]) == 7


def test_moved_project_finds_its_own_data_only(project, caplog) -> None:
    run = project / "runs" / "photos"
    write_tree(Path("photos"), {"cat": 30, "dog": 30}, size=(18, 18))  # the current folder
    sources = Run.open(run).test_images().sources
    assert [os.path.samefile(*pair) for pair in zip(sources, paths(project, "test"), strict=True)]
    assert not caplog.records
    shutil.rmtree(project / "photos")
    with pytest.raises(UserError, match=r"photos: no such folder"):
        Run.open(run).test_images()
    shutil.copytree("photos", project / "photos")
    with pytest.raises(UserError, match="none of the 6 test images of the run exists unchanged: 6 changed"):
        Run.open(run).test_images().sources  # noqa: B018


def test_copied_project_measures_its_own_images_and_says_so(made, tmp_path, monkeypatch, caplog) -> None:
    copy = Path(shutil.copytree(made, tmp_path / "copy"))
    monkeypatch.chdir(tmp_path)
    deleted = paths(copy, "test")[0]
    deleted.unlink()
    opened = Run.open(copy / "runs" / "photos").open_data()
    assert opened.splits.root == str(copy / "photos")
    original = made / "photos"
    assert f"uses the data beside the run, {copy / 'photos'}, not those in {original}" in opened.note
    assert len(evaluate(copy / "runs" / "photos", device="cpu").labels) == 5
    assert caplog.text.count("beside the run") == 1
    assert Run.open(made / "runs" / "photos").open_data().note == ""
    shutil.rmtree(copy / "photos")  # a run that was copied alone
    assert Run.open(copy / "runs" / "photos").open_data().splits.root == str(original)


def test_renamed_class_folder_is_an_unknown_class_until_it_is_named(project) -> None:
    run, photos = project / "runs" / "photos", project / "photos"
    (photos / "dog").rename(photos / "hound")
    with pytest.raises(UserError, match="1 of 2 classes are not among the 2 known classes: hound"):
        evaluate(run, device="cpu")
    found = evaluate(run, photos, rename={"hound": "dog"}, device="cpu")
    assert (found.trained_on, len(found.labels)) == (48, 12)


def test_classes_of_other_data_are_renamed_on_request(project, capsys) -> None:
    run, other = project / "runs" / "photos", project / "other"
    write_tree(other, {"cat": 4, "dogs": 5}, size=(17, 17))
    arguments = ["evaluate", str(run), "--data", str(other), "--device", "cpu", "--json"]
    assert main(arguments) == 2
    assert (
        "nearest: dog; if dogs is one of them under another name, add --rename dogs="
        in capsys.readouterr().err
    )
    assert main([*arguments, "--rename", "dogs=dog"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["classes"], found["images"]) == (["cat", "dog"], 9)
    assert np.sum(found["confusion"], axis=1).tolist() == [4, 5]
    for rename, message in (
        ("dogs=dig", "unknown class of the model 'dig'; nearest: dog"),
        ("dogs", "--rename dogs: expected NAME=CLASS"),
        ("wolf=dog", "no images of a class 'wolf'"),
    ):
        extra = ["dogs=dog"] if rename.startswith("wolf") else []
        assert main([*arguments, "--rename", *extra, rename]) == 2
        assert message in capsys.readouterr().err
    assert main(["evaluate", str(run), "--rename", "dogs=dog"]) == 2
    assert "rename is about the classes of other data: set data" in capsys.readouterr().err
