"""Explanations accept pictures and normalized tensors."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitascope as vs
from tests.data import noise
from tests.models import small_model
from vitascope import explain
from vitascope.analysis.explain.inputs import as_images, chosen_pictures
from vitascope.errors import UserError
from vitascope.models.preprocess import Preprocess
from vitascope.models.vit import VisionTransformer

PICTURES = [noise(40, 50, seed=1), noise(32, 32, seed=2)]


def model_with_preprocess(**options: Any) -> VisionTransformer:
    model = small_model(**options)
    model.preprocess = Preprocess(image_size=(32, 32), mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
    return model


def normalized(model: VisionTransformer, pictures: list[Any]) -> torch.Tensor:
    pixels = np.stack([model.preprocess.pixels(picture) for picture in pictures])
    return model.preprocess.normalize(torch.from_numpy(pixels))


def test_one_picture_of_any_kind_is_a_batch_of_one(tmp_path: Path) -> None:
    path, model = tmp_path / "picture.png", model_with_preprocess()
    Image.fromarray(PICTURES[0]).save(path)
    with Image.open(path) as opened:
        for picture in (path, str(path), path.read_bytes(), opened, PICTURES[0]):
            for pictures in (picture, [picture]):
                assert torch.equal(as_images(model, pictures), normalized(model, PICTURES[:1]))


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


def test_sample_is_drawn_by_seed_and_keeps_the_order() -> None:
    names = [f"{number}.png" for number in range(100, 140)]
    chosen = chosen_pictures(names, 10, seed=3)
    assert chosen == sorted(chosen)
    assert len(set(chosen)) == 10
    assert set(chosen) <= set(names)
    assert chosen == chosen_pictures(names, 10, seed=3) != chosen_pictures(names, 10, seed=4)
    assert chosen_pictures(names, 100) == names


def test_sample_rejects_empty_sets_and_negative_seeds() -> None:
    for count, seed in ((0, 0), (1, -1)):
        with pytest.raises(UserError):
            chosen_pictures(["a.png"], count, seed)
