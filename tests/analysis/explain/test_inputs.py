"""Explanations accept pictures and normalized tensors."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitascope as vs
from tests.data import noise
from tests.models import random_images, small_model
from vitascope import explain
from vitascope.analysis.explain.inputs import as_images, before_each_forward, call_hook, chosen_pictures
from vitascope.analysis.explain.methods import METHODS
from vitascope.errors import UserError
from vitascope.models.preprocess import Preprocess
from vitascope.models.vit import VisionTransformer

PICTURES = [noise(40, 50, seed=1), noise(32, 32, seed=2)]


def model_with_preprocess(**options: Any) -> VisionTransformer:
    model = small_model(**options)
    model.preprocess = Preprocess(image_size=(32, 32), mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
    return model


def normalized(model: VisionTransformer, pictures: list[Any]) -> torch.Tensor:
    assert model.preprocess is not None
    pixels = np.stack([model.preprocess.pixels(picture) for picture in pictures])
    return model.preprocess.normalize(torch.from_numpy(pixels))


@pytest.mark.parametrize("kind", ["path", "text", "bytes", "Pillow", "array"])
def test_one_picture_of_any_kind_is_a_batch_of_one(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    Image.fromarray(PICTURES[0]).save(path)
    with Image.open(path) as opened:
        opened.load()
        one = {
            "path": path,
            "text": str(path),
            "bytes": path.read_bytes(),
            "Pillow": opened,
            "array": PICTURES[0],
        }[kind]
        model = model_with_preprocess()
        for pictures in (one, [one]):
            assert torch.equal(as_images(model, pictures), normalized(model, PICTURES[:1]))


def test_tensors_are_not_preprocessed() -> None:
    images = random_images(2, 3, 32, 32)
    assert as_images(small_model(), images) is images


def test_pictures_get_the_models_dtype() -> None:
    model = model_with_preprocess().to(torch.bfloat16)
    assert as_images(model, PICTURES).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "method",
    [
        explain.attention,
        explain.rollout,
        explain.gradient_rollout,
        explain.grad_cam,
        explain.integrated_gradients,
        explain.libra,
        explain.occlusion,
        explain.patching,
        explain.heatmap,
        explain.head_maps,
        explain.attention_distance,
        explain.feature_colours,
    ],
)
def test_every_method_explains_pictures_and_their_tensors_equally(method: Any) -> None:
    model = model_with_preprocess()
    assert torch.equal(method(model, PICTURES), method(model, normalized(model, PICTURES)))


def test_patch_attention_and_comparison_accept_pictures() -> None:
    model = model_with_preprocess()
    images = normalized(model, PICTURES)
    expected = explain.patch_attention(model, images, (1, 2))
    assert torch.equal(explain.patch_attention(model, PICTURES, (1, 2)), expected)
    only = {"rollout": explain.METHODS["rollout"]}
    found, same = (explain.compare(model, each, only, steps=2) for each in (PICTURES, images))
    assert found.scores["rollout"].merit == same.scores["rollout"].merit


def test_a_model_without_preprocessing_reads_no_pictures_and_is_not_saved(tmp_path: Path) -> None:
    model = small_model()
    model.preprocess = None
    for ask in (
        lambda: explain.rollout(model, PICTURES),
        lambda: vs.Predictor(model),
        lambda: vs.evaluate(model, "digits"),
        lambda: vs.export(model, tmp_path / "model.onnx"),
        lambda: vs.save_pretrained(model, tmp_path / "model"),
    ):
        with pytest.raises(UserError, match=r"no preprocessing.*model\.preprocess = vitascope\.Preprocess\("):
            ask()
    assert not list(tmp_path.iterdir())


def test_empty_list_of_pictures_is_rejected() -> None:
    with pytest.raises(UserError, match="no images: give at least one"):
        explain.rollout(model_with_preprocess(), [])


def test_sample_is_drawn_by_seed_and_keeps_the_order() -> None:
    names = [f"{number}.png" for number in range(100, 140)]
    chosen = chosen_pictures(names, 10, seed=3)
    assert chosen == sorted(chosen)
    assert len(set(chosen)) == 10
    assert set(chosen) <= set(names)
    assert chosen == chosen_pictures(names, 10, seed=3) != chosen_pictures(names, 10, seed=4)
    assert chosen_pictures(names, 100) == names


@pytest.mark.parametrize(("count", "seed", "message"), [(0, 0, "images must be"), (1, -1, "seed must be")])
def test_sample_rejects_empty_sets_and_negative_seeds(count: int, seed: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        chosen_pictures(["a.png"], count, seed)


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.many_passes])
def test_hook_runs_before_each_pass_and_can_end_the_method(name: str) -> None:
    model = small_model()
    images = torch.randn(1, 3, *model.config.image_hw)
    passes: list[int] = []
    pauses: list[int] = []
    pool = model.pool_features

    def counting(features: torch.Tensor) -> torch.Tensor:
        passes.append(len(features))
        return pool(features)

    def end_at_the_fourth() -> None:
        pauses.append(len(passes))
        if len(pauses) == 4:
            raise InterruptedError

    model.pool_features = counting  # type: ignore[method-assign]
    with before_each_forward(end_at_the_fourth), pytest.raises(InterruptedError):
        METHODS[name](model, images, 1, batch_size=2)
    assert max(passes) <= 2
    assert len(passes) == 3
    assert pauses == [0, 1, 2, 3]


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.many_passes])
def test_batch_size_does_not_change_heatmaps(name: str) -> None:
    torch.manual_seed(0)  # a model that hardly sees any evidence would scale up its rounding
    model = small_model()
    images = torch.randn(1, 3, *model.config.image_hw)
    expected = METHODS[name](model, images, 1)
    torch.testing.assert_close(METHODS[name](model, images, 1, batch_size=2), expected, atol=1e-4, rtol=0)


def test_hook_is_called_only_inside_its_block() -> None:
    calls: list[str] = []
    call_hook()
    with before_each_forward(lambda: calls.append("inside")):
        call_hook()
    call_hook()
    assert calls == ["inside"]
