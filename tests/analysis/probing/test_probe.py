"""`probe`: from bodies and images to a finished run."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitascope as vs
from tests.models import small_model, small_resnet
from vitascope.analysis.probing import probe as module
from vitascope.analysis.probing.probe import probe
from vitascope.errors import UserError
from vitascope.models.engines.compute import Compute
from vitascope.models.ensemble import Ensemble
from vitascope.models.weights.loading import save_pretrained
from vitascope.runs import resume
from vitascope.training.run.run import Run

HERE = {"compute": Compute(device="cpu", workers=0, precision="fp32")}
NAME = "3 blocks of width 16, 16x16 pixels in patches of 8"
COLOURS = {"red": (170, 90, 90), "green": (90, 170, 90), "blue": (90, 90, 170)}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITASCOPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without report and page, which take most of the time."""
    monkeypatch.setattr(module, "write_report", lambda run, **_: run.report)
    monkeypatch.setattr(module, "write_page", lambda run, *_: run.probe)


def take_coloured(root: Path, count: int, *names: str, seed: int = 0) -> Path:
    """`count` noisy pictures of each colour, or of some: `root/red/00.png` and on."""
    generator = np.random.default_rng(seed)
    for name in names or COLOURS:
        (root / name).mkdir(parents=True)
        for number in range(count):
            pixels = np.clip(generator.normal(COLOURS[name], 40, (16, 16, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(root / name / f"{number:02}.png")
    return root


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return take_coloured(tmp_path / "photos", 20)


def body(**options: object) -> vs.VisionTransformer:
    return small_model(**{"image_size": 16, "patch_size": 8, "depth": 3, "num_classes": 5, **options})


def test_the_run_is_an_ordinary_one(photos: Path, tmp_path: Path) -> None:
    save_pretrained(body(), tmp_path / "body")
    result = probe(tmp_path / "body", photos, run="runs/probe", **HERE)
    run = Run.open("runs/probe")
    assert (run.finished, run.classifies, run.probes) == (True, True, True)
    assert {path.name for path in (result.page, result.report)} == {"probe.html", "report.html"}
    assert result.page.is_file()
    evaluation = vs.evaluate("runs/probe", device="cpu", precision="fp32")
    assert np.array_equal(evaluation.indices, run.predictions.indices)
    assert np.allclose(evaluation.probabilities, run.predictions.probabilities, atol=1e-5)
    assert evaluation.loss == pytest.approx(result.evaluation.loss, abs=1e-4)
    assert evaluation.accuracy == result.evaluation.accuracy > 0.8
    (prediction, *_) = vs.Predictor("runs/probe", device="cpu")(photos / "red" / "00.png")
    assert prediction.label in COLOURS
    text = result.report.read_text("utf-8")
    assert "by a linear head on frozen features" in text
    assert str(run.config["weights"]).endswith("body")


def test_every_body_layer_and_pooling_has_every_classifier(photos: Path, undrawn: None) -> None:
    result = probe([body(), body(pool="mean"), small_resnet()], photos, **HERE)
    places = {
        (score.candidate.body, score.candidate.layer, score.candidate.pooling)
        for score in result.selection.scores
    }
    assert len(places) == 6 + 2 + 1
    assert len(result.selection.scores) == 4 * len(places)
    assert len({name for name, *_ in places}) == 3  # also of models of the same shape
    assert len(result.lines) == 3
    assert len(result.to_dataframe()) == 36
    assert "ProbeResult('runs/photos', " in repr(result)
    assert result.best.name in result._repr_html_()


def test_test_images_choose_nothing(photos: Path, undrawn: None) -> None:
    """With other test labels the same classifier, trained on the same images, is chosen."""
    root = photos.parent / "divided"
    (root / "train").parent.mkdir()
    photos.rename(root / "train")
    take_coloured(root / "test", 8, seed=1)
    first = probe(body(), root, **HERE)
    red, blue = root / "test" / "red", root / "test" / "blue"
    red.rename(root / "other")
    blue.rename(red)
    (root / "other").rename(blue)
    second = probe(body(), root, **HERE)
    assert first.best.name == second.best.name
    assert torch.equal(first.model.head.weight, second.model.head.weight)
    assert second.evaluation.accuracy < 0.5 < first.evaluation.accuracy
    assert (len(first.selection.train.targets), len(first.selection.test)) == (60, 24)


def test_validation_images_beside_a_test_are_trained_on(photos: Path, undrawn: None) -> None:
    result = probe(body(), photos, **HERE)
    record = Run.open(result.run).split_record()
    assert {name: len(part.names) for name, part in record.parts.items()} == {
        "train": 54,
        "val": 0,
        "test": 6,
    }
    seen = photos.parent / "seen"
    for name in record.parts["train"].names:
        (seen / name).parent.mkdir(parents=True, exist_ok=True)
        (seen / name).write_bytes((photos / name).read_bytes())
    for name in record.parts["test"].names:
        (seen / name).write_bytes((photos / name).read_bytes())
    assert vs.evaluate(result.run, seen, device="cpu").trained_on == 54


def test_a_second_probe_computes_no_features(photos: Path, undrawn: None) -> None:
    first, second = (probe(body(), photos, **HERE) for _ in range(2))
    assert " 60 images, 60 computed now" in first.lines[0]
    assert " 60 images, 0 computed now" in second.lines[0]
    assert np.array_equal(first.best.probabilities, second.best.probabilities)
    assert second.run == Path("runs/photos-2")
    third = probe(body(), photos, compute=dataclasses.replace(HERE["compute"], cache=False))
    assert " 60 images, 60 computed now" in third.lines[0]


def test_copies_and_groups_are_in_one_fold(tmp_path: Path, undrawn: None) -> None:
    photos = take_coloured(tmp_path / "few", 12)
    for folder in photos.iterdir():  # each picture twice
        for path in sorted(folder.iterdir()):
            (folder / f"copy-{path.name}").write_bytes(path.read_bytes())
    result = probe(body(), photos, **HERE)
    contents = {}
    names = Run.open(result.run).split_record().parts["train"].names
    for name, fold in zip(names, result.selection.folds.tolist(), strict=True):
        contents.setdefault((photos / name).read_bytes(), set()).add(fold)
    assert all(len(folds) == 1 for folds in contents.values())


def test_several_classes_per_image(tmp_path: Path, undrawn: None) -> None:
    photos = take_coloured(tmp_path / "photos", 20)
    lines = ["image,labels"]
    for path in sorted(photos.rglob("*.png")):
        lines.append(f"{path},{path.parent.name}{';warm' if path.parent.name != 'blue' else ''}")
    (tmp_path / "labels.csv").write_text("\n".join(lines))
    result = probe(body(), tmp_path / "labels.csv", **HERE)
    config = result.model.config
    assert (config.outputs, len(config.thresholds), config.class_names) == (
        "independent",
        4,
        ("blue", "green", "red", "warm"),
    )
    evaluation = vs.evaluate(result.run, device="cpu", precision="fp32")
    assert np.allclose(evaluation.probabilities, Run.open(result.run).predictions.probabilities, atol=1e-5)
    assert evaluation.score.estimates["map"].value > 0.8


def test_data_frames_are_kept_in_the_run(photos: Path, undrawn: None) -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    paths = sorted(photos.rglob("*.png"))
    frame = pandas.DataFrame({"image": paths, "label": [path.parent.name for path in paths]})
    result = probe(body(), frame, run="runs/frame", **HERE)
    assert Run.open(result.run).config["data"].endswith("data.jsonl")
    assert vs.evaluate(result.run, device="cpu").accuracy > 0.8


def test_unreadable_images_are_left_out_and_named(photos: Path, undrawn: None) -> None:
    (photos / "red" / "03.png").write_bytes(b"broken")
    result = probe(body(), photos, **HERE)
    total = len(result.selection.train.targets) + len(result.selection.test)
    assert total == 59
    assert "03.png" in result.evaluation.unreadable[0]


def test_named_layers_and_pools_alone_are_compared_and_the_plan_names_the_choice(photos, undrawn) -> None:
    model = body().train()
    result = probe(model, photos, layers=[0], pools=["mean"], **HERE)
    place = f"{NAME}, layer 0, mean"
    assert {score.candidate.place for score in result.selection.scores} == {place}
    assert result.model.config.depth == 1
    plan = json.loads((result.run / "plan.json").read_text())
    assert plan["chosen"]["representation"] == place
    assert plan["reason"].startswith("the best cross-validated linear classifier of 4, ")
    assert model.training  # the caller's, left as it was


def test_a_probe_is_no_training_and_compared_with_one(photos: Path, undrawn: None) -> None:
    run = probe(body(), photos, run="runs/probed", **HERE).run
    for train in (lambda: vs.TrainConfig.from_yaml(run / "config.yaml"), lambda: resume(run)):
        with pytest.raises(UserError, match="options of a probe"):
            train()
    config = {name: value for name, value in Run.open(run).config.items() if name != "bodies"}
    other = Run.create({**config, "task": "classify", "run": "runs/trained", "epochs": 3, "lr": 0.1})
    comparison = vs.compare([run, other.path])
    assert "task" in comparison.options
    assert comparison.options.keys() & {"epochs", "lr"} == set()


def test_bad_input_is_one_line_and_leaves_no_run(photos: Path, tmp_path: Path) -> None:
    save_pretrained(body(), tmp_path / "runs" / "other")
    one = take_coloured(tmp_path / "one", 12, "green")
    few = tmp_path / "few"
    take_coloured(few / "train", 1, "red")
    take_coloured(few / "train", 12, "green", "blue")
    take_coloured(few / "val", 3, seed=1)
    before = sorted(tmp_path.rglob("*"))
    for options, reason in (
        ({"models": []}, "no body"),
        ({"data": "runs/other"}, "is a model, and no images"),
        ({"models": ["photos"]}, "photos"),
        ({"models": ["runs/other", "./runs/other"]}, "runs/other is given more than once"),
        ({"layers": []}, "layers: none given"),
        ({"pools": []}, "pools: none given"),
        ({"seed": -1}, "seed must be in"),
        ({"seed": 2**64}, "seed must be in"),
        ({"layers": [3]}, "layer"),
        ({"pools": ["map"]}, "pool 'map'"),
        ({"data": one}, "only one class, 'green'"),
        ({"data": few}, "class 'red' has 1 image"),
        ({"data": "nowhere"}, "nowhere"),
        ({"models": Ensemble.of([body(), body()])}, "is an ensemble of 2 models: name one of them instead"),
        ({"run": "photos"}, "photos exists"),
    ):
        with pytest.raises(UserError, match=reason) as caught:
            probe(**{"models": body(), "data": "photos", **options}, **HERE)
        assert "\n" not in str(caught.value)
        assert sorted(path for path in tmp_path.rglob("*") if "cache" not in path.parts) == before, reason


def test_too_many_features_are_refused_with_the_numbers(photos: Path, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "MEMORY_GB", 1e-5)
    with pytest.raises(UserError, match=r"6 representations of 60 images take 0.0 GB, .* name fewer layers"):
        probe(body(), photos, **HERE)
    monkeypatch.setattr(module, "MEMORY_GB", 4e-5)  # enough for one body
    with pytest.raises(UserError, match=r"6 representations of 60 images take 0.0 GB, .* name fewer layers"):
        probe([body(), body()], photos, **HERE)
    assert not list((tmp_path / "runs").glob("*"))


def test_features_that_are_not_finite_name_the_image(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = body()
    model.norm.weight.data[0] = float("nan")
    with pytest.raises(UserError, match=r"patches of 8: image 0, .*\.png: its features .* not finite"):
        probe(model, photos, **HERE)


@pytest.mark.parametrize("during", ["select", "write_page"])
def test_an_interrupted_probe_leaves_no_run_and_keeps_its_features(
    photos: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, during: str
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, during, interrupt)
        with pytest.raises(KeyboardInterrupt):
            probe(body(), photos, **HERE)
    assert not list((tmp_path / "runs").glob("*"))
    monkeypatch.setattr(module, "write_report", lambda run, **_: run.report)
    monkeypatch.setattr(module, "write_page", lambda run, *_: run.probe)
    assert ", 0 computed now" in probe(body(), photos, **HERE).lines[0]


def test_a_full_disk_after_the_model_keeps_it(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_page", full)
    with pytest.raises(UserError, match="the model is saved"):
        probe(body(), photos, run="runs/full", **HERE)
    assert Run.open("runs/full").finished


def test_a_body_that_has_seen_the_images_is_named(photos: Path, undrawn: None) -> None:
    first = probe(body(), photos, run="runs/first", **HERE)
    assert "trained on" not in first.lines[0]
    (line,) = probe("runs/first", photos, run="runs/again", **HERE).lines
    assert "it was trained on 54 images of them" in line
    others = take_coloured(photos.parent / "others", 5, seed=1)
    assert "trained on" not in probe("runs/first", others, run="runs/others", **HERE).lines[0]
