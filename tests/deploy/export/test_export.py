"""Exported files: the model's predictions, in every runtime, from the file alone."""

import ast
import dataclasses
import itertools
import logging
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

from tests.contracts.engine import check_engine
from tests.data import exif_of, noise, write_picture
from tests.models import small_config, small_model, small_resnet, with_preprocess, with_trust
from vitascope.analysis.explain.rollout import rollout
from vitascope.deploy.export import export as exporting
from vitascope.deploy.export.export import check_agreement, default_path, evenly_spaced, export, usage
from vitascope.deploy.export.formats import FORMATS, Format
from vitascope.deploy.predict.predictor import Predictor
from vitascope.errors import UserError
from vitascope.models.engines.engine import TorchEngine
from vitascope.models.engines.runtimes import ExportedEngine, ProgramEngine, open_engine
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
    # of several labels per image, and cuts its images
    "torch": lambda: with_varied_predictions(
        small_model(
            **{"depth": 1, "image_size": 38, "patch_size": 7, "remainder": "cut"},
            outputs="independent",
            thresholds=(0.3, 0.5, 0.5, 0.5, 0.9),
            class_names=tuple("abcde"),
        )
    ),
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
    kind = request.param
    model = MODELS[kind]()
    fit = dataclasses.replace(fit_for(3), image_size=model.config.image_hw, **RULES[kind])
    model = with_preprocess(model, fit)
    return exported(kind, model if kind == "torch" else with_trust(model), tmp_path_factory.mktemp("export"))


@pytest.fixture(scope="module")
def body(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    model = with_preprocess(small_model(depth=1, head="none", pool="cls_mean", in_channels=1), fit_for(1))
    return exported("openvino", model, tmp_path_factory.mktemp("body"), features=True)


def test_engine(made: SimpleNamespace, tmp_path: Path) -> None:
    check_engine(made, pictures(), tmp_path)


def test_engine_of_features(body: SimpleNamespace, tmp_path: Path) -> None:
    check_engine(body, pictures(), tmp_path)


def printed(program: str, folder: Path) -> str:
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=280)
    return ended.stdout.strip()


@pytest.mark.parametrize("made", ["torch"], indirect=True)
def test_program_of_several_labels_prints_those_of_predict(made, tmp_path, monkeypatch, capsys) -> None:
    write_picture(tmp_path / "cat.jpg")
    predict = Predictor(made.engine)
    expected = {guess.label for guess in predict(tmp_path / "cat.jpg")}
    assert 0 < len(expected) < len(predict(tmp_path / "cat.jpg", threshold=0))
    monkeypatch.chdir(tmp_path)
    exec(made.done.program, {})  # noqa: S102 - our own program
    assert ast.literal_eval(capsys.readouterr().out) == sorted(expected)


@pytest.mark.parametrize("made", ["onnx"], indirect=True)
def test_printed_program_predicts_the_same_label_without_vitascope(made, tmp_path) -> None:
    Image.fromarray(pictures()[1]).save(tmp_path / "cat.jpg", exif=exif_of(6))
    answer = Predictor(TorchEngine(made.model, precision="fp32", device="cpu"))(tmp_path / "cat.jpg")
    program = made.done.program.replace("print(", "label = (", 1)  # with a character that is not Unicode
    program = program.replace('print("one of", ', "names = (")
    program += "\nimport sys; assert not {'vitascope', 'torch'} & {*sys.modules}; print(repr((label, names)))"
    label, names = ast.literal_eval(printed(program, tmp_path).splitlines()[-1])
    assert label == answer[0].label
    assert tuple(names) == answer.verdict.set


def test_full_disk_is_reported_before_anything_is_written(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=10_000))
    with pytest.raises(UserError, match=r"takes about 0\.\d MB, and the disk has 0\.0 MB free"):
        export(small_model(depth=1), tmp_path / "model.onnx", images=pictures())
    assert not list(tmp_path.iterdir())


@dataclasses.dataclass
class Answering:
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
def test_file_with_different_outputs_is_rejected_and_removed(answering, tmp_path, change, features) -> None:
    answering.change = change
    path = tmp_path / "model.pt2"
    with pytest.raises(UserError, match=r"model\.pt2 is not kept, because (its|a batch of two)"):
        export(answering.model, path, format="torch", images=noise(40, 30), features=features)
    assert not list(tmp_path.iterdir())


DYNAMIC = {"input": "tensors", "dynamic_resolution": True}


def test_dynamic_resolution_matches_the_model_at_other_sizes(tmp_path: Path) -> None:
    need("onnx")
    model = small_model(depth=1, positions="sincos_2d")
    path = tmp_path / "model.onnx"
    done = export(with_preprocess(model, fit_for(3)), path, images=pictures(), **DYNAMIC)
    assert done.takes == "tensors, uint8 (batch, height, width, 3)"
    engine = open_engine(path)
    for height, width in [(48, 32), (8, 72)]:
        fit = dataclasses.replace(fit_for(3), image_size=(height, width))
        pixels = torch.from_numpy(np.stack([fit.pixels(picture) for picture in pictures()]))
        with torch.no_grad():
            wanted = model(fit.normalize(pixels))
        torch.testing.assert_close(engine.answers(pixels)[0], wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("made", ["torch"], indirect=True)
def test_model_that_cuts_images_is_exported_for_its_own_size(made: SimpleNamespace, tmp_path: Path) -> None:
    assert made.done.agreement.is_rounding
    with pytest.raises(UserError, match=r"38x38.*35x35.*model.resize\(\(35, 35\)\)"):
        export(made.model, tmp_path / "other.onnx", **DYNAMIC)


def test_unsupported_operation_is_rejected_in_one_line(tmp_path: Path) -> None:
    need("openvino")
    model = small_model(depth=1)  # its learned positions are resampled against aliasing
    root = logging.getLogger()
    before = (root.level, [*root.filters], [*root.handlers])
    with pytest.raises(UserError, match=r"upsample_bicubic.*format onnx") as rejected:
        export(model, tmp_path / "model.xml", format="openvino", images=pictures(), **DYNAMIC)
    assert "\n" not in str(rejected.value)
    assert not list(tmp_path.iterdir())
    # OpenVINO changes them, and does not restore them after errors.
    assert (root.level, root.filters, root.handlers) == before


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


@pytest.mark.parametrize(
    ("options", "explain"),
    [
        ({"pool": "mean", "attention": "axial"}, "attention"),
        ({"pool": "map"}, "lens"),
    ],
)
def test_file_explains_as_the_model(options: dict[str, Any], explain: str, tmp_path: Path) -> None:
    model = with_varied_predictions(small_model(depth=1, **options))
    done = export(model, tmp_path / "a.pt2", format="torch", images=pictures(), explain=explain)
    assert done.heatmaps.images == len(SIZES)
    assert done.returns.endswith(f", and a heatmap by {explain}, float32 (batch, rows, columns)")
    engine = ProgramEngine(done.path)
    pixels = torch.tensor(pictures()[0]).permute(2, 0, 1)[None]
    assert engine.heatmaps(pixels).shape == (1, 4, 4)
    assert torch.equal(engine.answers(pixels).probabilities, engine.outputs(pixels))
    assert "heatmap = program" in done.program


def test_file_of_an_ensemble_explains_by_the_mean_of_its_members_maps(tmp_path: Path) -> None:
    members = [with_varied_predictions(small_model(depth=2, seed=seed, num_registers=2)) for seed in range(2)]
    done = export(
        Ensemble.of(members), tmp_path / "a.pt2", format="torch", images=pictures(), explain="rollout"
    )
    assert done.returns.endswith(", and a heatmap by rollout, float32 (batch, rows, columns)")
    pixels = torch.tensor(pictures()[0]).permute(2, 0, 1)[None]
    fit = preprocess_of(members[0])
    images = fit.normalize(torch.from_numpy(fit.pixels(pictures()[0]))[None])
    mean = torch.stack([rollout(member, images) for member in members]).mean(dim=0)
    torch.testing.assert_close(
        torch.as_tensor(ProgramEngine(done.path).heatmaps(pixels)), mean / mean.max(), atol=1e-4, rtol=1e-3
    )


def test_file_whose_heatmaps_differ_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "heatmap", lambda model, images, method: torch.zeros(1, 4, 4))
    with pytest.raises(UserError, match=r"a\.pt2 is not kept, .*: heatmaps differ by at most 1 "):
        export(small_model(depth=1), tmp_path / "a.pt2", format="torch", explain="attention")
    assert list(tmp_path.iterdir()) == []


def test_file_of_several_views_returns_their_mean_and_knows_no_more(tmp_path: Path) -> None:
    views = 6
    model = with_trust(with_preprocess(with_varied_predictions(small_resnet(layers=(1,))), fit_for(3)))
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


def test_example_program_for_tensors_and_unnamed_classes_compiles() -> None:
    fit = Preprocess(image_size=(32, 24), channels=1, mean=(0.5,), std=(0.5,), exif_orientation=False)
    for suffix, outputs in itertools.product([".onnx", ".xml", ".pt2"], ["exclusive", "independent"]):
        program = usage(Path(f"a{suffix}"), fit, small_config(outputs=outputs), "tensors")
        compile(program, "usage", "exec")
        assert ("thresholds = " in program) == ("import json" in program) == (outputs == "independent")
        assert "class_names)" not in program
        assert "exif_transpose" not in program
        assert 'convert("L")' in program
        assert "(24, 32)" in program


def test_pictures_to_compare_on_are_from_all_parts_of_the_images() -> None:
    for count in (0, 1, 7, 8, 9, 15, 16, 1000):
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
