"""A pack, read by safetensors, against the model's trace and the library's explanations."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load

from tests.analysis.explain import MODELS
from tests.data import noise
from tests.models import small_model, small_resnet
from vitascope import explain
from vitascope.deploy.server.attention_pack import pack_attention, pack_heatmap, pack_picture
from vitascope.errors import UserError
from vitascope.models.engines.engine import Answers, Engine, TorchEngine
from vitascope.models.preprocess import Pixels, Preprocess
from vitascope.models.vision_model import VisionModel
from vitascope.models.vit import VisionTransformer

NON_SQUARE = {"image_size": (16, 48), "num_registers": 2}


def engine_of(model: VisionModel) -> TorchEngine:
    return TorchEngine(model, precision="fp32", device="cpu")


def picture(model: VisionModel) -> Pixels:
    return np.ascontiguousarray(noise(*model.config.image_hw).transpose(2, 0, 1))


def images_of(engine: TorchEngine, pixels: Pixels) -> torch.Tensor:
    return engine.preprocess.normalize(torch.from_numpy(pixels)[None])


def unpacked(content: bytes) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    return load(content), json.loads(header["__metadata__"]["explorer"])


def truth_of(model: VisionTransformer, images: torch.Tensor) -> torch.Tensor:
    """Every layer's attention, (L, H, T, T)."""
    with torch.no_grad():
        traced = model.trace(images, attention=True).attention
    return torch.cat(traced)


def read_back(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    return tensors[name].float() * tensors[f"{name}_scale"][..., None]


@pytest.mark.parametrize("options", [*MODELS.values(), NON_SQUARE], ids=[*MODELS, "non-square"])
def test_pack_holds_attention_features_and_rollout_of_the_library(options: dict[str, Any]) -> None:
    model = small_model(**options)
    engine, pixels = engine_of(model), picture(model)
    tensors, about = unpacked(pack_picture(engine, pixels))
    images = images_of(engine, pixels)
    truth = truth_of(model, images)
    attention = read_back(tensors, "attention")
    half_a_step = truth.amax(dim=-1, keepdim=True) / 255 / 2
    assert ((attention - truth).abs() <= 1.001 * half_a_step + 1e-7).all()
    assert attention.shape[-1] == len(about["inside"]["tokens"]) + about["grid"][0] * about["grid"][1]
    assert about["grid"] == list(model.grid_of(images))
    torch.testing.assert_close(tensors["pixels"], torch.from_numpy(pixels))
    with torch.no_grad():
        features = model.feature_map(images)[0].flatten(1).mT  # (N, D)
    half_a_step = features.abs().amax(dim=-1, keepdim=True) / 127 / 2
    assert tensors["features"].shape == features.shape
    assert ((read_back(tensors, "features") - features).abs() <= 1.001 * half_a_step + 1e-7).all()
    P, grid = len(about["inside"]["tokens"]), about["grid"]

    def heat(row: torch.Tensor) -> torch.Tensor:
        patches = row[..., P:].unflatten(-1, grid)
        return patches / patches.amax(dim=(-2, -1), keepdim=True)

    heads = explain.head_maps(model, images)[0]
    torch.testing.assert_close(heat(read_back(tensors, "answer")), heads, atol=0.02, rtol=0)
    torch.testing.assert_close(heat(tensors["rollout_answer"]), explain.rollout(model, images)[0])
    rows = read_back(tensors, "rollout")
    torch.testing.assert_close(rows.sum(dim=-1), torch.ones(len(rows)), atol=0.05, rtol=0)
    if about["inside"]["reads"] == "class token":
        torch.testing.assert_close(rows[0], tensors["rollout_answer"], atol=float(rows.max()) / 255, rtol=0)


def test_pixels_that_the_model_cuts_are_left_out() -> None:
    model = small_model(image_size=(38, 45), patch_size=(7, 8), remainder="cut")
    model.preprocess = Preprocess(image_size=(38, 45), resize="squash")
    pixels = picture(model)
    tensors, about = unpacked(pack_picture(engine_of(model), pixels))
    assert about["grid"] == [5, 5]
    assert about["framing"]["image_size"] == [38, 45]
    assert np.array_equal(tensors["pixels"].numpy(), pixels[:, :35, :40])
    assert tensors["heatmaps"].shape[1:] == (5, 5)


@pytest.mark.parametrize(
    ("options", "tokens", "reads", "last"),
    [
        ({}, ["class token"], "class token", False),
        ({"pool": "mean"}, [], "all patches", True),
        ({"pool": "mean", "num_registers": 1}, ["register 1"], "all patches", True),
        (
            {"distillation_token": True, "num_registers": 2},
            ["class token", "distillation token", "register 1", "register 2"],
            "class and distillation tokens",
            False,
        ),
        ({"pool": "cls_mean"}, ["class token"], "class token and all patches", True),
    ],
)
def test_tokens_have_their_names_in_the_order_of_the_sequence(options, tokens, reads, last) -> None:
    model = small_model(**options)
    inside = unpacked(pack_picture(engine_of(model), picture(model)))[1]["inside"]
    assert inside["tokens"] == tokens
    assert (inside["reads"], inside["patches_read_last"]) == (reads, last)


# More tokens than the budget allows


def test_model_without_a_head_has_attention_only() -> None:
    engine = engine_of(small_model(head="none"))
    tensors, about = unpacked(pack_picture(engine, picture(engine.model)))
    assert {"pixels", "attention", "answer", "rollout", "features"} <= set(tensors)
    assert not {"probabilities", "heatmaps"} & set(tensors)
    assert about["grid"] == [4, 4]
    assert "no head" in about["missing"]
    with pytest.raises(UserError, match="no head"):
        pack_heatmap(engine, picture(engine.model), "grad-cam", 0)


@pytest.mark.parametrize("heads", [2, 1, 0])
def test_a_response_stays_within_the_budget(heads: int) -> None:
    model = small_model(image_size=64)
    engine, pixels = engine_of(model), picture(model)
    T = model.config.num_tokens
    budget = T * T * heads if heads else T * T - 1
    tensors, about = unpacked(pack_picture(engine, pixels, budget))
    assert about["inside"]["carried"] == {2: "layer", 1: "head", 0: "none"}[heads]
    assert "attention" not in tensors
    assert ("rollout" in tensors) == (heads > 0)
    assert max(tensor.numel() for tensor in tensors.values()) <= max(budget, 3 * 64 * 64)
    assert tensors["answer"].shape == (3, 2, T)  # the class token's rows are always included


@pytest.mark.parametrize("head", [None, 1, "mean"])
def test_single_layer_can_be_requested(head: Any) -> None:
    model = small_model(num_registers=1)
    engine, pixels = engine_of(model), picture(model)
    tensors, about = unpacked(pack_attention(engine, pixels, 1, head))
    truth = truth_of(model, images_of(engine, pixels))[1]
    expected = {None: truth, 1: truth[1:2], "mean": truth.mean(dim=0, keepdim=True)}[head]
    torch.testing.assert_close(read_back(tensors, "attention")[0], expected, atol=1 / 500, rtol=0)
    assert about == {"layer": 1, "head": head}
    size = 18 * 18 * (2 if head is None else 1)
    complaint = f"{size} bytes; the limit is {size - 1}" + "; ask for one head, or the mean" * (head is None)
    with pytest.raises(UserError, match=f"{complaint}$"):
        pack_attention(engine, pixels, 1, head, budget=size - 1)
    for missing in ((3, None), (-4, None), (0, 2), (0, -1)):
        with pytest.raises(UserError, match=r"no (layer|head)"):
            pack_attention(engine, pixels, *missing)


# Models without attention


def test_resnet_has_class_maps_and_the_reason_for_no_attention() -> None:
    model = small_resnet()
    engine, pixels = engine_of(model), picture(model)
    tensors, about = unpacked(pack_picture(engine, pixels))
    assert set(tensors) == {"pixels", "probabilities", "heatmaps"}
    assert "inside" not in about
    assert "no attention" in about["missing"]
    assert tuple(tensors["heatmaps"].shape[1:]) == tuple(about["grid"])
    assert "gradient-rollout" not in about["methods"]
    with pytest.raises(UserError, match="no attention"):
        pack_attention(engine, pixels, 0)


class Exported(Engine):
    def __init__(self) -> None:
        self.preprocess = Preprocess(image_size=(8, 8))
        self.class_names = ("a", "b")
        self.num_classes = 2

    @property
    def description(self) -> str:
        return "another runtime"

    def answers(self, pixels: torch.Tensor) -> Answers:
        probabilities = torch.tensor([[0.25, 0.75]]).expand(len(pixels), -1)
        return Answers(probabilities.log(), probabilities)


def test_exported_file_has_predictions_and_the_reason_for_no_attention() -> None:
    pixels = np.ascontiguousarray(noise(8, 8).transpose(2, 0, 1))
    tensors, about = unpacked(pack_picture(Exported(), pixels))
    assert set(tensors) == {"pixels", "probabilities"}
    assert "exported file" in about["missing"]
    for ask in (
        lambda: pack_attention(Exported(), pixels, 0),
        lambda: pack_heatmap(Exported(), pixels, "grad-cam", 0),
    ):
        with pytest.raises(UserError, match="exported file"):
            ask()


# The format


def test_tensors_are_aligned_for_typed_arrays(tmp_path: Any) -> None:
    """A typed array must begin at a multiple of its elements' size."""
    model = small_model(image_size=(16, 24), num_registers=1, class_names=("a", "bc", "def", "é", "名"))
    content = pack_picture(engine_of(model), picture(model))
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    for name, entry in header.items():
        if name != "__metadata__" and entry["dtype"] == "F32":
            assert (8 + length + entry["data_offsets"][0]) % 4 == 0
    (tmp_path / "pack.safetensors").write_bytes(content)
    with safe_open(tmp_path / "pack.safetensors", "pt") as file:
        assert "attention" in file.keys()  # noqa: SIM118
