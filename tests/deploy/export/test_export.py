"""Exported files: the model's predictions, in every runtime, from the file alone."""

import ast
import copy
import dataclasses
import json
import logging
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from tests.data import encoded, exif_of, noise, write_picture
from tests.deploy.server.served import play, serving
from tests.models import small_config, small_model, small_resnet, with_preprocess, with_trust
from vitascope.analysis.explain.rollout import rollout
from vitascope.data.features.embed import embed
from vitascope.deploy.export import export as exporting
from vitascope.deploy.export.export import check_agreement, default_path, evenly_spaced, export, usage
from vitascope.deploy.export.formats import FORMATS, Format
from vitascope.deploy.predict.predictor import Predictor
from vitascope.errors import UserError
from vitascope.models.engines.compute import Compute
from vitascope.models.engines.engine import TorchEngine
from vitascope.models.engines.features import FeatureSpec
from vitascope.models.engines.runtimes import (
    ExportedEngine,
    ExportedModelError,
    ProgramEngine,
    metadata_of,
    open_engine,
)
from vitascope.models.engines.selection import ClassSelection
from vitascope.models.ensemble import Ensemble
from vitascope.models.preprocess import Preprocess
from vitascope.models.vision_model import VisionModel
from vitascope.models.vit import VisionTransformer
from vitascope.models.weights.agreement import agreement
from vitascope.models.weights.preprocess import preprocess_of

NAMES = ("ant\n\x00", "béè <&>", 'cat "x"', "\ud800", "eel")
SIZES = [(64, 40), (50, 90), (24, 24), (50, 90)]

MODELS = {
    # One model per format, with options whose graphs were hard to get right.
    "onnx": lambda: with_varied_predictions(
        small_model(
            depth=1,
            stem="resnet",
            resnet_layers=(1,),
            resnet_width=4,
            positions="relative",
            class_names=NAMES,
        )
    ),
    "openvino": lambda: with_varied_predictions(
        small_model(depth=1, positions="rotary", num_registers=2, distillation_token=True, class_names=NAMES)
    ),
    "torch": lambda: small_resnet(layers=(1,), in_channels=1, class_names=NAMES),
}


@torch.no_grad()
def with_varied_predictions(model: VisionTransformer) -> VisionTransformer:
    """Subtract the mean logits of the pictures, so that predictions depend on the picture."""
    fit = dataclasses.replace(fit_for(3), image_size=model.config.image_hw)
    ready = torch.stack([torch.from_numpy(fit.pixels(picture)) for picture in pictures()])
    common = model(fit.normalize(ready)).mean(dim=0)  # (K,)
    for head in (module for module in model.head.modules() if isinstance(module, torch.nn.Linear)):
        head.bias -= common
    return model


# And one per rule of resizing and cropping; ours is the default.
RULES: dict[str, dict[str, Any]] = {
    "onnx": {"crop_pct": 1.0, "resize_to": (37, 37), "crop_rounding": "down"},
    "openvino": {"crop_pct": 1.0, "resize": "border", "resize_to": (35, 35), "side_rounding": "nearest"},
    "torch": {},
}

NEEDED = {"onnx": ("onnxscript", "onnxruntime"), "openvino": ("openvino",), "torch": ()}


def fit_for(channels: int) -> Preprocess:
    half = (0.4,) * channels
    return Preprocess(image_size=(32, 32), channels=channels, crop_pct=0.9, mean=half, std=(0.3,) * channels)


def pictures() -> list[np.ndarray]:
    """Smooth pictures, as photographs are: coarse noise, enlarged."""
    coarse = (Image.fromarray(noise(6, 8, seed=seed)) for seed in range(len(SIZES)))
    return [
        np.asarray(small.resize(size[::-1], Image.Resampling.BICUBIC))
        for small, size in zip(coarse, SIZES, strict=True)
    ]


def exported(kind: str, model: VisionModel, folder: Path, **options: Any) -> SimpleNamespace:
    """A file of a model with its preprocessing, what `export` returned, and the engine of the file."""
    need(kind)
    path = folder / f"model{FORMATS[kind].suffix}"
    done = export(model, path, format=kind, images=pictures(), **options)
    engine = ProgramEngine(path) if kind == "torch" else open_engine(path, precision="fp32")
    return SimpleNamespace(kind=kind, model=model, fit=model.preprocess, done=done, path=path, engine=engine)


def need(kind: str) -> None:
    """Skip a test without the libraries of a format."""
    for library in NEEDED[kind]:
        pytest.importorskip(library, reason=f"{library} is not installed (vitascope[{kind}])")


@pytest.fixture(scope="module", params=list(MODELS))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A file of each format, and the exported model."""
    kind = request.param
    model = MODELS[kind]()
    fit = dataclasses.replace(fit_for(model.config.in_channels), **RULES[kind])
    return exported(kind, with_trust(with_preprocess(model, fit)), tmp_path_factory.mktemp("export"))


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A file of several labels per image, and the exported model, which cuts its images."""
    options = {
        **{"image_size": 38, "patch_size": 7, "remainder": "cut"},
        "outputs": "independent",
        "thresholds": (0.3, 0.5, 0.5, 0.5, 0.9),
        "class_names": tuple("abcde"),
    }
    model = with_varied_predictions(small_model(depth=1, **options))
    fit = dataclasses.replace(fit_for(3), image_size=(38, 38))
    return exported("torch", with_preprocess(model, fit), tmp_path_factory.mktemp("several"))


@pytest.fixture(scope="module")
def body(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A file of features, and the exported model."""
    model = with_preprocess(small_model(depth=1, head="none", pool="cls_mean"), fit_for(3))
    return exported("openvino", model, tmp_path_factory.mktemp("body"), features=True)


def test_file_matches_the_model_for_single_images_and_batches(made: SimpleNamespace) -> None:
    own = TorchEngine(made.model, precision="fp32", device="cpu")
    wanted = own.predict([own.pixels(picture) for picture in pictures()]).probabilities
    given = [made.engine.pixels(picture) for picture in pictures()]
    together = made.engine.predict(given).probabilities
    alone = torch.cat([made.engine.predict([picture]).probabilities for picture in given])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(together, wanted, atol=2e-3, rtol=0)
    assert torch.equal(together.argmax(dim=1), wanted.argmax(dim=1))
    assert np.ptp(together.numpy(), axis=0).max() > 1e-2  # the pictures do differ


def test_file_knows_as_much_as_the_model(made: SimpleNamespace) -> None:
    own, sets = TorchEngine(made.model, precision="fp32", device="cpu"), made.engine.sets
    wanted, found = (
        engine.predict([engine.pixels(picture) for picture in pictures()]) for engine in (own, made.engine)
    )
    assert wanted.familiarity is not None
    torch.testing.assert_close(found.familiarity, wanted.familiarity, atol=0.03, rtol=0)  # a resize rounds
    assert np.ptp(wanted.familiarity.numpy()) > 0.02  # the pictures do differ
    for coverage in (0.5, 0.95):
        torch.testing.assert_close(sets.limits(coverage), own.sets.limits(coverage), rtol=0, atol=0)
    (verdict, *_), (other, *_) = (
        ClassSelection(coverage=0.8).judged(engine, answers.probabilities, answers.familiarity)
        for engine, answers in ((own, wanted), (made.engine, found))
    )
    assert (verdict.set, verdict.unknown) == (other.set, other.unknown)
    assert json.loads(made.engine.metadata["sets"])["limit"] == sets.limits(0.95).tolist()


def test_metadata_holds_all_that_the_engine_needs(made: SimpleNamespace) -> None:
    assert made.engine.preprocess == made.fit
    assert made.engine.class_names == NAMES
    assert made.engine.num_classes == 5
    assert made.engine.metadata == metadata_of(
        made.model.config, made.fit, "pictures", trust=made.model.trust
    )


def test_file_of_several_labels_has_the_sigmoids_and_thresholds_of_the_model(
    several: SimpleNamespace,
) -> None:
    engine = several.engine
    own = TorchEngine(several.model, precision="fp32", device="cpu")
    wanted = own.predict([own.pixels(picture) for picture in pictures()]).probabilities
    found = engine.predict([engine.pixels(picture) for picture in pictures()]).probabilities
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)
    assert not torch.allclose(found.sum(dim=1), torch.ones(len(found)), atol=0.1)
    assert engine.thresholds
    assert engine.thresholds == pytest.approx(own.thresholds)
    labels = [[each.label for each in found] for found in Predictor(engine)(pictures())]
    assert labels == [[each.label for each in found] for found in Predictor(own)(pictures())]
    assert len({tuple(row) for row in labels}) > 1


def printed(program: str, folder: Path) -> str:
    """The output of a program that runs in a folder."""
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=280)
    return ended.stdout.strip()


def test_program_of_several_labels_prints_those_of_predict(several: SimpleNamespace, tmp_path: Path) -> None:
    write_picture(tmp_path / "cat.jpg")
    labels = [
        each.label for each in Predictor(several.engine, batch_size=1)(tmp_path / "cat.jpg", threshold=0)
    ]
    expected = {each.label for each in Predictor(several.engine)(tmp_path / "cat.jpg")}
    assert ast.literal_eval(printed(several.done.program, tmp_path)) == sorted(expected)
    assert 0 < len(expected) < len(labels)


def test_served_file_matches_predict(made: SimpleNamespace) -> None:
    sent = pictures()
    wanted = [answer[0] for answer in Predictor(made.engine)(sent, top_k=1)]

    async def story() -> None:
        async with serving(made.engine) as client:
            for picture, best in zip(sent, wanted, strict=True):
                response = await client.predict(encoded(picture))
                assert response.status_code == 200, response.text
                answer = response.json()["predictions"][0]
                assert (answer["label"], answer["index"]) == (best.label, best.index)
                assert answer["score"] == pytest.approx(best.score, abs=1e-5)
            assert (await client.post("/v1/explain", content=encoded(sent[0]))).status_code == 501

    play(story())


def test_export_reports_its_files_which_name_no_local_paths_and_are_not_overwritten(
    made: SimpleNamespace,
) -> None:
    assert made.done.path == made.path
    assert {file.name for file in made.path.parent.iterdir()} == {file.name for file in made.done.files}
    assert (made.done.agreement.images, made.done.agreement.same) == (4, 4)
    assert made.done.size == sum(file.stat().st_size for file in made.path.parent.iterdir())
    assert repr(made.done).startswith(f"ExportResult({made.path}, ")
    folders = [Path(exporting.__file__).parents[2], Path(torch.__file__).parents[1], made.path.parent]
    for file in made.done.files:
        content = file.read_bytes()
        assert not [folder for folder in folders if str(folder).encode() in content]
    before = made.path.read_bytes()
    with pytest.raises(UserError, match="exists and is not overwritten"):
        export(made.model, made.path, format=made.kind)
    assert made.path.read_bytes() == before


@pytest.mark.parametrize("made", ["onnx"], indirect=True)
def test_printed_program_predicts_the_same_label_without_vitascope(
    made: SimpleNamespace, tmp_path: Path
) -> None:
    Image.fromarray(pictures()[1]).save(tmp_path / "cat.jpg", exif=exif_of(6))
    answer = Predictor(TorchEngine(made.model, precision="fp32", device="cpu"))(tmp_path / "cat.jpg")
    program = made.done.program.replace(
        "print(", "label = (", 1
    )  # it may have a character that is not Unicode
    program = program.replace('print("one of", ', "names = (")
    program += (
        "\nimport sys; assert not {'vitascope', 'torch'} & set(sys.modules); print(repr((label, names)))"
    )
    label, names = ast.literal_eval(printed(program, tmp_path).splitlines()[-1])
    assert label == answer[0].label
    assert tuple(names) == answer.verdict.set


@pytest.mark.parametrize("made", ["openvino"], indirect=True)
def test_signals_work_after_engines_are_unloaded(made: SimpleNamespace) -> None:
    """OpenVINO's plugin sets the thread's signal stack, and removes it when it is unloaded."""
    code = f"""
import gc, pathlib, signal
from vitascope.models.engines.runtimes import OpenVinoEngine
path = pathlib.Path({str(made.path)!r})
engines = [OpenVinoEngine(path), OpenVinoEngine(path)]
while engines:
    engines.pop(0)
    gc.collect()
signal.signal(signal.SIGINT, lambda *_: print("heard"))
signal.raise_signal(signal.SIGINT)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "heard\n", "")


@pytest.mark.parametrize("share", [0.0, 0.3, 0.95])
def test_truncated_file_is_rejected_in_one_line(made: SimpleNamespace, tmp_path: Path, share: float) -> None:
    for file in made.done.files:
        (tmp_path / file.name).write_bytes(file.read_bytes())
    broken = tmp_path / made.path.name
    broken.write_bytes(made.path.read_bytes()[: int(share * made.path.stat().st_size)])
    with pytest.raises(ExportedModelError, match=broken.name) as rejected:
        ProgramEngine(broken) if made.kind == "torch" else open_engine(broken)
    assert "\n" not in str(rejected.value)


def test_full_disk_is_reported_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=10_000))
    with pytest.raises(UserError, match=r"takes about 0\.\d MB, and the disk has 0\.0 MB free"):
        export(small_model(depth=1), tmp_path / "model.onnx", images=pictures())
    assert not list(tmp_path.iterdir())


@dataclasses.dataclass
class Answering:
    """A format whose files return given logits."""

    change: float

    def write(self, program: object, path: Path, metadata: dict[str, str]) -> None:
        path.write_bytes(b"")
        self.metadata = metadata

    def open(self, path: Path) -> ExportedEngine:
        change, model, fit = self.change, self.model, self.fit

        class Other(ExportedEngine):
            description = "another"

            def run(self, pixels: np.ndarray) -> tuple[np.ndarray, ...]:
                with torch.no_grad():
                    ready = np.stack([fit.pixels(picture) for picture in pixels])
                    images = fit.normalize(torch.from_numpy(ready))
                    if not self.num_classes:
                        return ((model.embed(images) + change).numpy(),)
                    logits = model(images)
                logits[:, int(logits[0].argmin())] += change
                return logits.softmax(dim=1).numpy(), logits.numpy()

        return Other(path, self.metadata)


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Answering:
    fake = Answering(0.0)
    fake.fit = fit_for(3)
    fake.model = with_preprocess(small_model(depth=1), fake.fit)
    monkeypatch.setitem(FORMATS, "torch", Format(suffix=".pt2", write=fake.write, open=fake.open))
    monkeypatch.setattr(exporting, "traced", lambda *_: None)
    return fake


@pytest.mark.parametrize(
    ("change", "features"), [(100.0, False), (0.1, False), (float("nan"), False), (0.1, True)]
)
def test_file_with_different_outputs_is_rejected_and_removed(
    answering: Answering, tmp_path: Path, change: float, features: bool
) -> None:
    answering.change = change
    path = tmp_path / "model.pt2"
    with pytest.raises(UserError, match=r"model\.pt2 is not kept, because (its|a batch of two)"):
        export(answering.model, path, format="torch", images=noise(40, 30), features=features)
    assert not list(tmp_path.iterdir())


def test_file_with_equal_outputs_is_kept_and_the_callers_model_as_it_was(
    answering: Answering, tmp_path: Path
) -> None:
    model = copy.deepcopy(answering.model).double().train()
    done = export(model, tmp_path / "a" / "model.pt2", format="torch")
    assert {part.dtype for part in model.parameters()} == {torch.float64}
    assert model.training
    assert done.agreement.images == 16  # of scikit-learn's photographs
    assert [file.name for file in (tmp_path / "a").iterdir()] == ["model.pt2"]


DYNAMIC = {"input": "tensors", "dynamic_resolution": True}


def test_dynamic_resolution_matches_the_model_at_other_sizes(tmp_path: Path) -> None:
    need("onnx")
    model = small_model(depth=1, positions="sincos_2d")
    path = tmp_path / "model.onnx"
    done = export(with_preprocess(model, fit_for(3)), path, images=pictures(), **DYNAMIC)
    assert done.takes == "tensors, uint8 (batch, height, width, 3)"
    engine = open_engine(path)
    for height, width in [(32, 32), (48, 32), (8, 72)]:
        fit = dataclasses.replace(fit_for(3), image_size=(height, width))
        pixels = torch.from_numpy(np.stack([fit.pixels(picture) for picture in pictures()]))
        with torch.no_grad():
            wanted = model(fit.normalize(pixels))
        torch.testing.assert_close(engine.answers(pixels)[0], wanted, atol=1e-4, rtol=1e-4)


def test_model_that_cuts_images_is_exported_for_its_own_size(
    several: SimpleNamespace, tmp_path: Path
) -> None:
    assert several.done.agreement.is_rounding
    with pytest.raises(UserError, match=r"38x38.*35x35.*model.resize\(\(35, 35\)\)"):
        export(several.model, tmp_path / "other.onnx", **DYNAMIC)


def test_unsupported_operation_is_rejected_in_one_line(tmp_path: Path) -> None:
    need("openvino")
    model = small_model(depth=1)  # its learned positions are resampled against aliasing
    root = logging.getLogger()
    before = (root.level, [*root.filters], [*root.handlers])
    with pytest.raises(UserError, match=r"upsample_bicubic.*format onnx") as rejected:
        export(model, tmp_path / "model.xml", format="openvino", images=pictures(), **DYNAMIC)
    assert "\n" not in str(rejected.value)
    assert not list(tmp_path.iterdir())
    assert (
        root.level,
        root.filters,
        root.handlers,
    ) == before  # OpenVINO changes them, and does not restore them after errors


def test_invalid_export_is_rejected_before_anything_is_written(tmp_path: Path) -> None:
    model = small_model(depth=1)
    for reason, other, options in [
        ("no head for classes.*: set features", small_model(depth=1, head="none"), {}),
        ("end in .onnx", model, {"path": tmp_path / "model.xml"}),
        ("unknown format 'onx'; nearest: onnx", model, {"format": "onx"}),
        ("unknown input 'picture'; nearest: pictures", model, {"input": "picture"}),
        ("cannot be read|no such file", model, {"images": [tmp_path / "none.jpg"]}),
        ("input=tensors", model, {"dynamic_resolution": True}),
        ("one resolution", model, {**DYNAMIC, "format": "torch", "path": tmp_path / "model.pt2"}),
        ("a graph for each resolution", small_resnet(layers=(1,)), DYNAMIC),
        ("a graph for each resolution: set views=2", model, {**DYNAMIC, "views": 6}),
        ("features is of one view", model, {"features": True, "views": 2}),
        ("explain is of one view", model, {"explain": "lens", "views": 2}),
        ("a graph for each resolution", small_model(attention="window", window=2), DYNAMIC),
        ("a graph for each resolution", small_model(positions="relative"), DYNAMIC),
    ]:
        arguments = {"path": tmp_path / "model.onnx", "images": pictures(), **options}
        with pytest.raises(UserError, match=reason):
            export(other, **arguments)
    with pytest.raises(UserError, match=r"files of this format end in \.onnx: "):
        export(model, tmp_path)
    with pytest.raises(UserError, match="the model has 5"):
        export(small_model(depth=1, in_channels=5), tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_file_of_features_returns_those_of_the_model(body: SimpleNamespace) -> None:
    ready = torch.from_numpy(np.stack([fit_for(3).pixels(picture) for picture in pictures()]))
    with torch.no_grad():
        wanted = body.model.embed(fit_for(3).normalize(ready))
    (found,) = body.engine.features_of_pictures([body.engine.pixels(picture) for picture in pictures()])
    torch.testing.assert_close(found, wanted, atol=5e-3, rtol=0)
    assert np.ptp(wanted.numpy(), axis=0).max() > 0.1  # the pictures do differ
    assert body.done.returns == f"features, float32 (batch, {found.shape[1]})"
    assert body.done.agreement.same is None
    assert body.done.agreement.summary.startswith("features differ by at most")
    assert json.loads(body.engine.metadata["outputs"]) == body.engine.meaning == "embedding"
    with pytest.raises(UserError, match="no head for classes: it returns features"):
        Predictor(body.engine)
    with pytest.raises(UserError, match="an exported model has one representation"):
        body.engine.resolved(FeatureSpec(0))


def test_file_of_features_has_the_body_of_its_model(body: SimpleNamespace) -> None:
    own = TorchEngine(body.model, device="cpu")
    assert body.engine.body_digest == own.body_digest != body.engine.digest
    found = embed(body.engine, pictures(), compute=Compute(workers=0, cache=False))
    found.check_model(body.engine)
    found.check_model(own)
    assert (found.made["digest"], found.made["file"]) == (own.body_digest, body.engine.digest)
    with pytest.raises(UserError, match="embed the images with it"):
        found.check_model(small_model(seed=1, depth=1))


def test_program_of_features_prints_their_shape(body: SimpleNamespace, tmp_path: Path) -> None:
    write_picture(tmp_path / "cat.jpg")
    assert printed(body.done.program, tmp_path) in ("(1, 32)", "torch.Size([1, 32])")
    assert not {"json", "class_names", "probabilities", "texts"} & set(re.findall(r"\w+", body.done.program))


@pytest.mark.parametrize(
    ("options", "explain"),
    [
        ({"num_registers": 2}, "rollout"),
        ({"pool": "mean", "attention": "axial"}, "attention"),
        ({"pool": "map"}, "lens"),
    ],
)
def test_file_explains_as_the_model(options: dict[str, Any], explain: str, tmp_path: Path) -> None:
    model = with_varied_predictions(small_model(depth=2, **options))
    done = export(model, tmp_path / "a.pt2", format="torch", images=pictures(), explain=explain)
    assert done.heatmaps is not None
    assert done.heatmaps.images == len(SIZES)
    assert done.returns.endswith(f", and a heatmap by {explain}, float32 (batch, rows, columns)")
    engine = ProgramEngine(done.path)
    pixels = torch.tensor(pictures()[0]).permute(2, 0, 1)[None]
    assert engine.heatmaps(pixels).shape == (1, 4, 4)
    assert torch.equal(engine.answers(pixels).probabilities, engine.outputs(pixels))
    assert "heatmap = program" in done.program


def test_file_of_an_ensemble_explains_by_the_mean_of_its_members_maps(tmp_path: Path) -> None:
    members = [with_varied_predictions(small_model(depth=2, seed=seed)) for seed in range(2)]
    done = export(
        Ensemble.of(members), tmp_path / "a.pt2", format="torch", images=pictures(), explain="rollout"
    )
    assert done.heatmaps is not None
    pixels = torch.tensor(pictures()[0]).permute(2, 0, 1)[None]
    fit = preprocess_of(members[0])
    images = fit.normalize(torch.from_numpy(fit.pixels(pictures()[0]))[None])
    mean = torch.stack([rollout(member, images) for member in members]).mean(dim=0)
    torch.testing.assert_close(
        torch.as_tensor(ProgramEngine(done.path).heatmaps(pixels)), mean / mean.max(), atol=1e-4, rtol=1e-3
    )


def test_onnx_file_returns_features_and_rollout_of_any_size(tmp_path: Path) -> None:
    need("onnx")
    given = {"input": "tensors", "dynamic_resolution": True, "features": True, "images": pictures()}
    done = export(small_model(depth=2), tmp_path / "a.onnx", explain="rollout", **given)
    assert open_engine(done.path).heatmaps(torch.zeros(2, 3, 48, 32, dtype=torch.uint8)).shape == (2, 6, 4)


def test_file_whose_heatmaps_differ_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "heatmap", lambda model, images, method: torch.zeros(1, 4, 4))
    with pytest.raises(UserError, match=r"a\.pt2 is not kept, .*: heatmaps differ by at most 1 "):
        export(small_model(depth=1), tmp_path / "a.pt2", format="torch", explain="attention")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("views", [2, 6])
def test_file_of_several_views_returns_their_mean_and_knows_no_more(views: int, tmp_path: Path) -> None:
    model = with_trust(with_preprocess(with_varied_predictions(small_model(depth=1)), fit_for(3)))
    done = export(model, tmp_path / "a.pt2", format="torch", images=pictures(), views=views)
    engine = ProgramEngine(done.path)
    averaging = TorchEngine(model, precision="fp32", device="cpu", views=views)
    for picture in pictures():
        whole = torch.from_numpy(engine.pixels(picture))[None]
        expected = averaging.answers(torch.from_numpy(averaging.pixels(picture))[None])
        torch.testing.assert_close(engine.answers(whole).logits, expected.logits, atol=1e-2, rtol=1e-2)
    assert (engine.views, engine.sets, engine.output_names) == (views, None, ("probabilities", "logits"))
    assert f"(the mean of {views} views)" in done.returns
    assert "familiar" not in done.returns + done.program


def test_heatmaps_that_a_file_cannot_hold_are_rejected(exported_file, tmp_path: Path) -> None:
    model = small_model(depth=1)
    for other, options, message in (
        (model, {"explain": "occlusion"}, "unknown explain 'occlusion'"),
        (model, {"explain": "lens", "features": True}, "the lens reads classes, which features leave out"),
        (small_resnet(), {"explain": "rollout"}, "a ResNet has no attention and no tokens"),
        (Ensemble.of([model, model]), {"explain": "lens"}, "the lens reads the class of one model"),
    ):
        with pytest.raises(UserError, match=message):
            export(other, tmp_path / "a.pt2", format="torch", images=pictures(), **options)
    with pytest.raises(UserError, match="returns no heatmaps: export it with explain"):
        ProgramEngine(exported_file(".pt2")).heatmaps(torch.zeros(1, 3, 32, 32, dtype=torch.uint8))


def test_export_of_a_run_is_written_into_its_folder(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()
    assert default_path(str(tmp_path / "run"), ".onnx") == tmp_path / "run" / "export" / "model.onnx"
    assert default_path(tmp_path / "vit", ".xml") == Path("vit.xml")
    with pytest.raises(UserError, match="needs a path"):
        default_path(small_model(depth=1), ".onnx")


def random_picture(kind: str) -> Image.Image:
    """8 x 10 pixels of a mode, or grey numbers of a dtype."""
    random = np.random.default_rng(0)
    if kind in ("uint16", "int32", "float32"):
        return Image.fromarray((random.random((8, 10)) * 4500).astype(kind))
    if kind == "shares":
        return Image.fromarray(np.float32(random.integers(0, 256, (8, 10)) / 255))
    channels = Image.new(kind, (1, 1)).getbands()
    picture = Image.fromarray(random.integers(0, 256, (8, 10, 4), np.uint8), "RGBA")
    picture = Image.merge(kind, picture.split()[-len(channels) :]) if kind != "P" else picture.convert("P")
    if kind == "P":
        picture.info["transparency"] = 0
    return picture


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("kind", "levels"),
    [
        *((kind, (100, 3999.5)) for kind in ("uint16", "int32", "float32")),
        *((kind, None) for kind in ("uint16", "int32", "shares", "L", "LA", "P", "RGB", "RGBA", "CMYK")),
    ],
)
def test_example_program_prepares_every_kind_of_picture_as_the_model_does(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    levels: tuple[float, float] | None,
    channels: int,
) -> None:
    fit = Preprocess(
        image_size=(8, 10), levels=levels, channels=channels, mean=(0.5,) * channels, std=(0.5,) * channels
    )
    # The name that the program has; TIFFs of palettes lose their transparency.
    random_picture(kind).save(tmp_path / "cat.jpg", "PNG" if kind == "P" else "TIFF")
    program = usage(Path("a.onnx"), fit, small_config(), "pictures")
    upto = program[program.index("picture =") : program.index("probabilities")]
    monkeypatch.chdir(tmp_path)
    names = {"numpy": np, "Image": Image, "ImageOps": ImageOps}
    exec(upto, names)  # noqa: S102 - our own program
    np.testing.assert_array_equal(names["pixels"][0], fit.pixels(tmp_path / "cat.jpg").transpose(1, 2, 0))


@pytest.mark.parametrize("suffix", [".onnx", ".xml", ".pt2"])
def test_example_program_for_tensors_and_unnamed_classes_compiles(suffix: str) -> None:
    fit = Preprocess(image_size=(32, 24), channels=1, mean=(0.5,), std=(0.5,), exif_orientation=False)
    for outputs in ("exclusive", "independent"):
        program = usage(Path(f"a{suffix}"), fit, small_config(outputs=outputs), "tensors")
        compile(program, "usage", "exec")
        assert ("thresholds = " in program) == ("import json" in program) == (outputs == "independent")
    assert "class_names)" not in program
    assert "exif_transpose" not in program
    assert 'convert("L")' in program
    assert "(24, 32)" in program


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 15, 16, 1000])
def test_pictures_to_compare_on_are_from_all_parts_of_the_images(count: int) -> None:
    chosen = evenly_spaced(range(count), 8)
    assert len(chosen) == min(count, 8)
    gaps = [after - before for before, after in pairwise([*chosen, count])]
    assert all(count // 8 <= gap <= count // 8 + 1 for gap in gaps)
    assert chosen[:1] == list(range(count))[:1]


OWN = torch.tensor([[1.0, 2.0, 3.0], [4.0, 1.0, 0.0]])
"""Logits."""


def test_different_top_class_and_different_logits_are_rejected_with_the_numbers() -> None:
    other = OWN.clone()
    other[1] = torch.tensor([1.0, 4.0, 0.0])
    found = agreement(OWN, other)
    assert (found.same, found.images, found.difference) == (1, 2, 3)
    with pytest.raises(UserError, match=r"model\.onnx is not kept.*1 of 2 pictures; .*at most 3"):
        check_agreement(found, "model.onnx")
    found = agreement(OWN, OWN + 0.01)
    assert found.same == 2
    with pytest.raises(UserError, match="outputs differ from the model"):
        check_agreement(found, "model.onnx")
    check_agreement(agreement(OWN, OWN + 0.01, tolerance=0.01), "model.onnx")
