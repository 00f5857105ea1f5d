"""The names that users import: promised, so tested."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest

import vitascope as vs


def parameters(function: Callable[..., Any]) -> dict[str, Any]:
    """Names and defaults of what a caller gives."""
    found = inspect.signature(function).parameters.values()
    return {parameter.name: parameter.default for parameter in found if parameter.name != "self"}


def assert_promised(function: Callable[..., Any], **promised: Any) -> None:
    """Every promised parameter is there, with its default, in this order among those given by position."""
    found = parameters(function)
    for name, default in promised.items():
        assert name in found
        assert found[name] == default, name
    assert [name for name in found if name in promised] == list(promised)
    needed = [name for name, default in found.items() if default is REQUIRED and name not in promised]
    kinds = inspect.signature(function).parameters
    assert not [name for name in needed if kinds[name].kind is not inspect.Parameter.VAR_KEYWORD]


REQUIRED = inspect.Parameter.empty


@pytest.mark.parametrize("name", vs.__all__)
def test_every_public_name_resolves_and_is_listed(name: str) -> None:
    assert getattr(vs, name) is not None
    assert name in dir(vs)


def test_public_names_are_those_that_are_documented_and_no_others() -> None:
    assert len(set(vs.__all__)) == len(vs.__all__)
    assert set(vs._HOMES) | {"explain"} == set(vs.__all__)
    assert set(vs.__all__) | {"__version__"} == set(dir(vs))


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'vitascope' has no attribute 'ViT'"):
        vs.ViT  # noqa: B018
    with pytest.raises(ImportError):
        exec("from vitascope import nothing_of_the_kind")  # noqa: S102


def test_star_import_brings_the_public_names() -> None:
    names: dict[str, Any] = {}
    exec("from vitascope import *", names)  # noqa: S102
    assert set(vs.__all__) <= set(names)


def test_explain_is_a_module_with_its_methods() -> None:
    assert inspect.ismodule(vs.explain)
    assert set(vs.explain.__all__) <= set(dir(vs.explain))
    functions = {name for name in vs.explain.__all__ if inspect.isfunction(getattr(vs.explain, name))}
    kinds = {name for name in vs.explain.__all__ if inspect.isclass(getattr(vs.explain, name))}
    assert set(vs.explain.__all__) - functions - kinds == {"METHODS"}
    assert {"attention", "rollout", "grad_cam"} <= functions


def test_promised_functions_take_the_promised_parameters() -> None:
    assert_promised(vs.list_models)
    assert_promised(vs.create_model, name=REQUIRED, weights=None)
    assert_promised(vs.from_pretrained, ref=REQUIRED, revision=None, dtype=None, device=None)
    assert_promised(vs.save_pretrained, model=REQUIRED, folder=REQUIRED, format="vitascope")
    assert_promised(vs.train, config=None)
    assert_promised(vs.evaluate, model=REQUIRED, data=None)
    assert_promised(vs.export, model=REQUIRED, path=None, format="onnx", input="pictures")
    assert_promised(vs.Predictor.from_pretrained, ref=REQUIRED, precision="auto", device="auto")
    assert_promised(vs.Predictor.__call__, images=REQUIRED, top_k=5)
    assert_promised(vs.explain.attention, model=REQUIRED, images=REQUIRED, layer=-1, head=None)
    assert_promised(vs.explain.rollout, model=REQUIRED, images=REQUIRED)


def test_promised_methods_of_the_model_take_the_promised_parameters() -> None:
    assert_promised(vs.VisionTransformer, config=REQUIRED)
    assert_promised(vs.VisionTransformer.forward, images=REQUIRED)
    assert_promised(vs.VisionTransformer.forward_features, images=REQUIRED)
    assert_promised(vs.VisionTransformer.embed, images=REQUIRED)
    assert_promised(vs.VisionTransformer.trace, images=REQUIRED, attention=False)


def test_promised_example_runs() -> None:
    import torch

    config = vs.ViTConfig(image_size=32, patch_size=16, embed_dim=24, depth=2, num_heads=3)
    model = vs.VisionTransformer(config).eval()
    images = torch.randn(2, 3, 32, 32)
    assert model(images).shape == (2, 1000)
    assert model.forward_features(images).shape == (2, 5, 24)
    assert model.embed(images).shape == (2, 24)
    trace = model.trace(images, attention=True)
    assert isinstance(trace, vs.Trace)
    assert [weights.shape for weights in trace.attention] == [(2, 3, 5, 5)] * 2
    assert vs.explain.attention(model, images, layer=-1, head=None).shape == (2, 2, 2)
    assert vs.explain.rollout(model, images).shape == (2, 2, 2)


def test_configurations_take_options_by_name_only() -> None:
    for config in (vs.ViTConfig, vs.TrainConfig):
        kinds = {parameter.kind for parameter in inspect.signature(config).parameters.values()}
        assert kinds == {inspect.Parameter.VAR_KEYWORD}


def test_options_go_by_their_own_names_whatever_their_group() -> None:
    config = vs.ViTConfig(image_size=32).replace(pool="mean", positions="rotary", drop_path=0.1)
    assert (config.readout.pool, config.embedding.positions) == ("mean", "rotary")
    assert (config.option("image_size"), config.option("drop_path")) == ((32, 32), 0.1)
    assert config.to_dict()["pool"] == "mean"
    assert vs.ViTConfig.from_dict(config.to_dict()) == config
    assert vs.create_model("vit_ti16", depth=1, pool="mean").config.readout.pool == "mean"
    with pytest.raises(vs.UserError, match="nearest: pool"):
        config.replace(pol="mean")


def test_prediction_has_label_index_and_score_in_that_order() -> None:
    assert list(parameters(vs.Prediction)) == ["label", "index", "score"]


def test_promised_names_of_sizes_are_listed() -> None:
    promised = [
        "vit_ti16",
        "vit_s16",
        "vit_s32",
        "vit_b16",
        "vit_b32",
        "vit_b8",
        "vit_l16",
        "vit_l32",
        "vit_h14",
    ]
    assert set(promised) <= set(vs.list_models())


def test_user_errors_are_value_errors() -> None:
    assert issubclass(vs.UserError, ValueError)
