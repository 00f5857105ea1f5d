"""The page's program in node, beside torch and Pillow: every option, on every kernel."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load, save_file

from tests.data import noise
from tests.models import VARIANTS, labelling_model, small_model, with_trust
from vitascope.deploy.page.document import EXPLORER, programs
from vitascope.deploy.page.packing import check_held, packed, program_options, rounded
from vitascope.deploy.page.page import model_data
from vitascope.deploy.server.attention_pack import pack_attention, pack_heatmap, pack_picture, pack_without
from vitascope.errors import UserError
from vitascope.models.engines.engine import TorchEngine
from vitascope.models.engines.selection import AUTO
from vitascope.models.preprocess import Preprocess
from vitascope.models.vit import VisionTransformer

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="the page's program needs node here")


def held(options: dict[str, Any]) -> bool:
    try:
        check_held(small_model(**options))
    except UserError:
        return False
    return True


HELD = {name: options for name, options in VARIANTS.items() if held(options)}
EXPLORED = ("plain", "class token and mean", "distillation", "mean", "map", "post-norm", "norm of branches")
EXPLORED += ("rotary with registers", "rotary with learned frequencies", "relative", "class token, then norm")
EXPLORED += ("no other biases", "norm of queries and keys", "norm of queries and keys, RMS, rotary")
EXPLORED += ("map, swiglu, registers, mlp head", "map of every token", "mean, then norm", "cosine head")
EXPLORED += ("sequence", "sequence beside a class token, then norm")
CALIBRATED = ("distillation", "class token, then norm")
"""Models whose whole answers are compared."""
LAYER = 1
OFF = "head0.1,mlp0,layer1,attention2,patch0,patch5"

RULES: dict[str, dict[str, Any]] = {
    **{f"crop, {name}": {"interpolation": name} for name in ("nearest", "bilinear", "bicubic", "lanczos")},
    "squash": {"resize": "squash", "crop_pct": 0.875},
    "enlarged": {"image_size": (90, 70)},
    "height first": {"image_size": (9, 70)},
    "height first, squash": {"image_size": (9, 60), "resize": "squash", "interpolation": "bilinear"},
    "grey": {"channels": 1, "mean": (0.5,), "std": (0.5,)},
    "whole pixels": {"resize_to": (20, 20), "side_rounding": "down"},
    "whole pixels, nearest side": {
        "resize_to": (21, 21),
        "side_rounding": "nearest",
        "crop_rounding": "down",
    },
    "whole pixels, padded": {"resize_to": (9, 10)},
    "border": {"resize": "border", "resize_to": (16, 24), "mean": (0.2, 0.5, 0.9), "crop_rounding": "down"},
    "whole pixels, squash": {"resize": "squash", "resize_to": (30, 31)},
}


def class_map(engine: TorchEngine, picture: np.ndarray, method: str, target: int) -> torch.Tensor:
    return load(pack_heatmap(engine, engine.pixels(picture), method, target))["heatmaps"].flatten()


def target_of(engine: TorchEngine, picture: np.ndarray) -> int:
    """The class for which most patches are evidence; other maps have little to compare."""
    maps = [class_map(engine, picture, "grad-cam", target) for target in range(engine.num_classes)]
    return max(range(len(maps)), key=lambda target: int((maps[target] > 0).sum()))


def held(name: str) -> VisionTransformer:
    """The model of that name; two of them are calibrated."""
    model = small_model(**HELD[name])
    return with_trust(model) if name in CALIBRATED else model


def case_of(model: VisionTransformer, folder: Path, number: int, rounding: Any = "fp32") -> dict[str, Any]:
    """What node needs of a model, and what torch computes, which is not written."""
    vit = rounded(model, rounding)
    file = f"{number}.safetensors"
    save_file(packed(vit, rounding), folder / file)
    height, width = vit.config.image_hw
    generator = torch.Generator().manual_seed(number)
    image = torch.randn(1, vit.config.in_channels, height, width, generator=generator)
    with torch.inference_mode():
        trace = vit.trace(image, attention=True)
    rows, columns = vit.config.tiled_hw((height, width))
    return {
        "file": file,
        "options": program_options(vit.config),
        "image": image[0, :, :rows, :columns].flatten().tolist(),
        "expected": (trace["logits"][0], torch.stack(trace.attention).flatten()),
    }


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The models and pictures, and in `found` what node computes of all of them."""
    folder = tmp_path_factory.mktemp("program")
    (folder / "package.json").write_text('{"type": "module"}')
    for name, source in EXPLORER.modules().items():
        (folder / name).write_text(source)
    shutil.copy(Path(__file__).with_name("cases.js"), folder)
    models = {name: case_of(held(name), folder, number) for number, name in enumerate(HELD)}
    models["fp16"] = case_of(small_model(), folder, 1000, "fp16")
    models["int8"] = case_of(small_model(), folder, 1001, "int8")
    models["several"] = case_of(labelling_model(0.2, 0.7), folder, 1002)
    picture = noise(41, 58, seed=4)
    engines = {}
    for name in (*EXPLORED, "several"):
        model = labelling_model(0.2, 0.7) if name == "several" else held(name)
        engines[name] = TorchEngine(model, precision="fp32", device="cpu")
        models[name] |= {
            "about": model_data(engines[name], "fp32")["about"],
            "pixels": engines[name].pixels(picture).flatten().tolist(),
            "layer": LAYER % model.config.depth,
            "target": target_of(engines[name], picture),
            "off": OFF.split(","),
        }
    rules = {name: Preprocess(**{"image_size": (17, 23), **rule}) for name, rule in RULES.items()}
    rgba = np.concatenate([picture, np.full((*picture.shape[:2], 1), 255, np.uint8)], axis=2)
    pictures = {
        name: {
            "rgba": rgba.flatten().tolist(),
            "height": picture.shape[0],
            "width": picture.shape[1],
            "framing": {**rule.to_dict(), "border": rule.border},
        }
        for name, rule in rules.items()
    }
    written = {
        name: {key: value for key, value in case.items() if key != "expected"}
        for name, case in models.items()
    }
    (folder / "cases.json").write_text(
        json.dumps({"models": written, "pictures": pictures, "programs": programs()})
    )
    ran = subprocess.run(["node", "cases.js"], cwd=folder, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    return {
        "models": models,
        "engines": engines,
        "pixels": {name: rule.pixels(Image.fromarray(picture)) for name, rule in rules.items()},
        "picture": picture,
        "found": json.loads(ran.stdout),
    }


@pytest.mark.parametrize("kernel", ["plain", "simd"])
@pytest.mark.parametrize("name", [*HELD, "fp16", "int8"])
def test_logits_and_attention_are_those_of_torch(cases: dict[str, Any], name: str, kernel: str) -> None:
    logits, attention = cases["models"][name]["expected"]
    found = cases["found"]["models"][f"{kernel} {name}"]
    torch.testing.assert_close(torch.tensor(found["logits"]), logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.tensor(found["attention"]), attention, atol=1e-5, rtol=0)


def test_kernels_differ(cases: dict[str, Any]) -> None:
    assert cases["found"]["kernels"] == ["plain arrays", "WebAssembly SIMD"]


@pytest.mark.parametrize("rule", RULES)
def test_pixels_are_those_of_pillow(cases: dict[str, Any], rule: str) -> None:
    np.testing.assert_array_equal(cases["found"]["pictures"][rule], cases["pixels"][rule].flatten())


@pytest.mark.parametrize(("which", "off"), [("whole", ""), ("without", OFF)])
@pytest.mark.parametrize("name", [*EXPLORED, "several"])
def test_answer_is_that_of_the_server(cases: dict[str, Any], name: str, which: str, off: str) -> None:
    engine = cases["engines"][name]
    expected = load(pack_without(off, pack_picture, engine, engine.pixels(cases["picture"])))
    scale = expected.pop("features_scale")[:, None]  # a page has the numbers themselves
    found = {**cases["found"]["models"][f"answers {name}"][which]}
    features = torch.tensor(found.pop("features")).view(len(scale), -1)
    assert ((features - expected.pop("features") * scale).abs() <= 0.51 * scale).all()
    assert set(expected) - {"heatmaps"} == set(found) - {"outputs"}
    for tensor in found.keys() - {"outputs"}:
        levels = (
            1 if expected[tensor].dtype == torch.uint8 and tensor != "pixels" else 0
        )  # one rounds otherwise
        np.testing.assert_allclose(
            found[tensor], expected[tensor].flatten(), atol=levels or 1e-6, err_msg=tensor
        )


@pytest.mark.parametrize("name", [*EXPLORED, "several"])
def test_lens_is_that_of_the_server(cases: dict[str, Any], name: str) -> None:
    engine, target = cases["engines"][name], cases["models"][name]["target"]
    for off, found in zip((OFF, ""), cases["found"]["models"][f"answers {name}"]["lens"], strict=True):
        expected = pack_without(off, pack_heatmap, engine, engine.pixels(cases["picture"]), "lens", target)
        for tensor, values in load(expected).items():
            np.testing.assert_allclose(found[tensor], values.flatten(), atol=1e-5, err_msg=f"{tensor} {off}")


@pytest.mark.parametrize("name", ["plain", *CALIBRATED])
def test_verdict_is_that_of_the_server(cases: dict[str, Any], name: str) -> None:
    engine = cases["engines"][name]
    found = cases["found"]["models"][f"answers {name}"]["verdict"]
    if name == "plain":
        assert found is None
        return
    answers = engine.predict([engine.pixels(cases["picture"])])
    (wanted,) = AUTO.judged(engine, answers.probabilities, answers.familiarity)
    assert (found["unknown"], tuple(found["set"])) == (wanted.unknown, wanted.set)
    assert found["familiarity"] == pytest.approx(wanted.familiarity, abs=1e-4)


@pytest.mark.parametrize(("part", "head"), [("layer", None), ("mean", "mean"), ("head", 1)])
def test_layer_is_that_of_the_server(cases: dict[str, Any], part: str, head: Any) -> None:
    engine = cases["engines"]["plain"]
    expected = load(pack_attention(engine, engine.pixels(cases["picture"]), LAYER, head))
    found = cases["found"]["models"]["answers plain"][part]
    np.testing.assert_allclose(found["attention"], expected["attention"].flatten(), atol=1)
    np.testing.assert_allclose(found["attention_scale"], expected["attention_scale"].flatten(), atol=1e-6)


@pytest.mark.parametrize("name", EXPLORED)
def test_class_maps_are_those_of_the_server(cases: dict[str, Any], name: str) -> None:
    engine = cases["engines"][name]
    maps = cases["found"]["models"][f"answers {name}"]["maps"]
    assert list(maps) == ["grad-cam", "occlusion"]
    for method, found in maps.items():
        expected = class_map(engine, cases["picture"], method, cases["models"][name]["target"])
        assert method != "grad-cam" or (expected > 0).sum() > 4
        np.testing.assert_allclose(found, expected, atol=1e-3, err_msg=method)
