from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from torch import Tensor

from tests.models import (
    VARIANTS,
    law_of_models,
    random_images,
    randomize,
    small_model,
    small_resnet,
    valid_configs,
)
from vitascope.errors import UserError
from vitascope.models.config import ViTConfig
from vitascope.models.engines.engine import Engine, TorchEngine
from vitascope.models.engines.features import OWN, POOLS, FeatureSpec, features_of
from vitascope.models.vit import VisionTransformer


def images(model: VisionTransformer, count: int = 2) -> Tensor:
    return random_images(count, model.config.in_channels, *model.config.image_hw)


@torch.no_grad()
@pytest.mark.parametrize("name", VARIANTS)
def test_own_pooling_of_the_last_layer_is_the_embedding(name: str) -> None:
    model = small_model(**VARIANTS[name])
    (own,) = features_of(model, images(model), [OWN])
    assert torch.equal(own, model.embed(images(model)))
    if model.config.readout.pool in POOLS and not model.config.readout.distillation_token:
        for spec in (FeatureSpec(-1), FeatureSpec(2, model.config.readout.pool)):
            torch.testing.assert_close(features_of(model, images(model), [spec])[0], own)


@torch.no_grad()
@law_of_models
@given(valid_configs())
def test_every_pool_of_every_layer_is_read_from_its_tokens(config: ViTConfig) -> None:
    model = randomize(VisionTransformer(config)).eval()
    pools = [pool for pool in POOLS if pool == "mean" or config.readout.has_class_token]
    specs = [FeatureSpec(layer, pool) for layer in range(config.depth) for pool in pools]
    found = dict(zip(specs, features_of(model, images(model), specs), strict=True))
    trace = model.trace(images(model))
    for spec, features in found.items():
        tokens = model.norm(trace[f"block{spec.layer}"])
        parts = {"cls": tokens[:, 0], "mean": tokens[:, config.num_prefix_tokens :].mean(dim=1)}
        wanted = [model.pool_norm(parts[name]) for name in spec.pool.split("_")]
        torch.testing.assert_close(features, torch.cat(wanted, dim=1), atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_lower_layers_beside_it_leave_the_embedding_bitwise_the_same() -> None:
    model = small_model()
    lower, own, again = features_of(model, images(model), [FeatureSpec(0), OWN, FeatureSpec(-3)])
    assert torch.equal(own, model.embed(images(model)))
    assert torch.equal(lower, again)
    beside_last, _ = features_of(model, images(model), [OWN, FeatureSpec(-1, "mean")])
    torch.testing.assert_close(beside_last, own)


@pytest.mark.parametrize(
    ("options", "spec", "resolved"),
    [
        ({}, FeatureSpec(), FeatureSpec()),
        ({}, FeatureSpec(-1), FeatureSpec(2, "cls")),
        ({}, FeatureSpec(pool="mean"), FeatureSpec(2, "mean")),
        ({"pool": "mean"}, FeatureSpec(0), FeatureSpec(0, "mean")),
        ({"pool": "cls_mean"}, FeatureSpec(1), FeatureSpec(1, "cls_mean")),
        ({"pool": "map"}, FeatureSpec(1), FeatureSpec(1, "mean")),
        ({"pool": "sequence"}, FeatureSpec(-3), FeatureSpec(0, "mean")),
    ],
)
def test_defaults_are_those_of_the_model(options: dict, spec: FeatureSpec, resolved: FeatureSpec) -> None:
    assert spec.resolved(small_model(**options).config) == resolved


@pytest.mark.parametrize(
    ("options", "spec", "reason"),
    [
        ({}, FeatureSpec(3), "no layer 3: the model has 3, 0 to 2"),
        ({}, FeatureSpec(0, "max"), "unknown pool 'max'.*one of cls, mean, cls_mean"),
        ({"pool": "mean"}, FeatureSpec(0, "cls"), "no class token for the pool 'cls'"),
        ({"pool": "map"}, FeatureSpec(0, "cls_mean"), "no class token for the pool 'cls_mean'"),
    ],
)
def test_what_a_model_does_not_have_is_rejected(options: dict, spec: FeatureSpec, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        spec.resolved(small_model(**options).config)


@torch.no_grad()
def test_a_resnet_has_its_embedding_alone() -> None:
    model = small_resnet()
    pictures = random_images(2, 3, 32, 32)
    assert torch.equal(features_of(model, pictures, [OWN])[0], model.embed(pictures))
    for spec in (FeatureSpec(0), FeatureSpec(pool="mean")):
        with pytest.raises(UserError, match="a ResNet has no layers of tokens"):
            features_of(model, pictures, [spec])


def test_engine_gives_the_features_of_normalized_pixels_in_the_precision_of_full_batches() -> None:
    model = small_model()
    pixels = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    engine = TorchEngine(model, precision="fp32", device="cpu")
    with torch.inference_mode():
        assert torch.equal(engine.features(pixels)[0], model.embed(model.preprocess.normalize(pixels)))
    assert torch.equal(engine.embed(pixels), engine.features(pixels)[0])
    coarse = TorchEngine(model, precision="bf16", device="cpu")
    (found,) = coarse.features(pixels, [FeatureSpec(0)])
    assert found.dtype == torch.float32
    assert torch.equal(found, found.bfloat16().float())
    assert (engine.precision_for(1), coarse.precision_for(64)) == ("fp32", "bf16")


def test_precision_of_the_rest_of_a_batch_is_that_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_size(precision: str, config: object, device: object, size: int, **_: object) -> torch.dtype:
        return torch.bfloat16 if size >= 8 else torch.float32

    monkeypatch.setattr("vitascope.models.engines.engine.resolve_precision", by_size)
    engine = TorchEngine(small_model(), device="cpu")
    pixels = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    (alone,), (rest,) = engine.features(pixels), engine.features(pixels, batch_size=8)
    assert torch.equal(rest, rest.bfloat16().float())
    assert not torch.equal(alone, rest)
    assert engine.precision_for(8) == "bf16"


def test_digest_of_the_body_depends_on_all_below_the_head_and_on_nothing_else() -> None:
    def digest(seed: int = 0, **options: object) -> str:
        return TorchEngine(small_model(seed, **options), device="cpu").body_digest

    same = digest()
    model = small_model(class_names=tuple("abcde"), dropout=0.1)
    with torch.no_grad():
        model.head.weight.add_(1)
    assert TorchEngine(model, device="cpu").body_digest == same
    assert digest(num_classes=7, head="none") == same or digest(num_classes=7) != digest(seed=1)
    assert (
        len({same, digest(seed=1), digest(norm_eps=1e-5), digest(mlp="quick_gelu"), digest(pool="mean")}) == 5
    )


def test_own_features_of_an_exported_classifier_name_the_way_out() -> None:
    classifier, body = SimpleNamespace(num_classes=5, name="small.onnx"), SimpleNamespace(num_classes=0)
    with pytest.raises(UserError, match=r"small\.onnx returns .* file of `vitascope export --features`"):
        Engine.resolved(classifier, OWN)
    assert Engine.resolved(body, OWN) is OWN
    with pytest.raises(UserError, match="leave out layer and pool"):
        Engine.resolved(body, FeatureSpec(0))
