"""A body with a linear head is an ordinary model, whose probabilities are those of the classifier."""

import numpy as np
import pytest
import torch

from tests.models import small_model, small_resnet
from vitascope.errors import UserError
from vitascope.models.engines.features import OWN, FeatureSpec, features_of
from vitascope.models.vision_model import VisionModel
from vitascope.models.weights.loading import from_pretrained, save_pretrained
from vitascope.training.linear.head import headed, representations, with_head

NAMES = ("ant", "bee", "cow")
BODIES = {
    "class token": small_model(depth=3),
    "mean": small_model(depth=3, pool="mean"),
    "mean beside a class token": small_model(depth=3, pool="mean", class_token=True),
    "norm after pooling": small_model(depth=3, pool="mean", class_token=True, pool_norm="after"),
    "registers": small_model(depth=2, num_registers=2, positions="rotary"),
    "attention pooling": small_model(depth=2, pool="map"),
    "score pooling": small_model(depth=2, pool="sequence"),
    "distilled": small_model(depth=2, distillation_token=True),
    "pre-training head": small_model(depth=2, head="mlp"),
    "resnet": small_resnet(),
}


def images_of(model: VisionModel) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4, model.config.in_channels, *model.config.image_hw, generator=generator)


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_every_representation_with_a_head_is_a_model_with_its_logits(body: VisionModel, tmp_path) -> None:
    images, generator = images_of(body), np.random.default_rng(0)
    specs = representations(body.config)
    assert len(set(specs)) == len(specs) > 0
    for number, spec in enumerate(specs):
        with torch.inference_mode():
            (features,) = features_of(body.eval(), images, [spec])
        weight, bias = generator.normal(size=(3, features.shape[1])), generator.normal(size=3)
        model = with_head(body, headed(body.config, spec, NAMES, "exclusive"), weight, bias)
        save_pretrained(model, tmp_path / str(number))
        with torch.inference_mode():
            logits = from_pretrained(tmp_path / str(number))(images)
        expected = features.double() @ torch.from_numpy(weight).T + torch.from_numpy(bias)
        assert torch.allclose(logits.double(), expected, atol=1e-4)
        assert model.config.class_names == NAMES


def test_representations_are_of_two_layers_and_all_poolings() -> None:
    config = small_model(depth=6).config
    assert representations(config) == [
        OWN,
        FeatureSpec(5, "mean"),
        FeatureSpec(5, "cls_mean"),
        FeatureSpec(3, "cls"),
        FeatureSpec(3, "mean"),
        FeatureSpec(3, "cls_mean"),
    ]
    assert representations(config, layers=[-1], pools=["mean"]) == [FeatureSpec(5, "mean")]
    assert representations(config, pools=["cls"]) == [OWN, FeatureSpec(3, "cls")]
    assert representations(config, layers=[0, 0]) == [
        FeatureSpec(0, pool) for pool in ("cls", "mean", "cls_mean")
    ]
    assert representations(small_model(pool="map", depth=1).config) == [OWN, FeatureSpec(0, "mean")]
    assert representations(small_resnet().config) == [OWN]


def test_what_a_body_does_not_have_is_rejected() -> None:
    for body, options in (
        ("class token", {"layers": [3]}),
        ("mean", {"pools": ["cls"]}),
        ("resnet", {"layers": [0]}),
    ):
        with pytest.raises(UserError):
            representations(BODIES[body].config, **options)
    for body, spec in (
        ("norm after pooling", FeatureSpec(1, "cls_mean")),
        ("distilled", FeatureSpec(0, "mean")),
    ):
        with pytest.raises(UserError):
            headed(BODIES[body].config, spec, NAMES, "exclusive")


def test_a_class_without_images_has_a_finite_bias_and_no_probability() -> None:
    body = BODIES["mean"]
    weight, bias = np.zeros((3, body.config.embed_dim)), np.array([0.0, 1.0, -np.inf])
    model = with_head(body, headed(body.config, OWN, NAMES, "exclusive"), weight, bias)
    assert torch.isfinite(model.head.bias).all()
    with torch.inference_mode():
        assert model(images_of(body)).softmax(dim=1)[:, 2].max() == 0
