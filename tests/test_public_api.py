"""The public names, their parameters and their defaults."""

import inspect
import sys
from operator import attrgetter
from typing import Any

import pytest

import vitascope as vs

FROZEN = {
    "audit": "(data, *, out, bodies=('cifar10',), seed=0, table=TABLE, compute=COMPUTE)",
    "calibrate": "(model, data, out, *, device='auto')",
    "compare": "(runs, out=None)",
    "Compute": "(*, batch_size=None, workers=None, precision='auto', device='auto', cache=True)",
    "TableOptions": "(*, columns=(), images=None, labels=None, label_separator=None, blank='zero', "
    "audit=None, min_images=1, rare='reject')",
    "compress": "(model, out, *, merge=None, heads=None, mlp_ratio=None, data=None, num_images=512, "
    "batch_size=8, precision='auto', device='auto')",
    "convert": "(model, folder, *, format='vitascope', revision=None, images=())",
    "create_model": "(name, *, weights=None, **overrides)",
    "embed": "(model, data, *, out=None, layer=None, pool=None, table=TABLE, compute=COMPUTE, ray=None)",
    "evaluate": "(model, data=None, *, rename=None, table=TABLE, batch_size=None, precision='auto', "
    "device='auto', views=1)",
    "export": "(model, path=None, *, format='onnx', input='pictures', dynamic_resolution=False, images=None, "
    "features=False, explain=None, views=1)",
    "from_pretrained": "(ref, revision=None, *, family=None, config=None, dtype=None, device=None)",
    "list_models": "()",
    "page": "(model, path=None, *, beside=None, weights='fp16', images=None, samples=None, browser=None, "
    "unproved=False, learn=False)",
    "pretrain": "(config=None, *, recipe=None, **options)",
    "probe": "(models, data, *, run=None, layers=None, pools=None, seed=0, table=TABLE, compute=COMPUTE)",
    "push_to_hub": "(model, repo_id, *, private=False, token=None, format='vitascope')",
    "quantize": "(model, path=None, *, format='onnx', input='pictures', dynamic_resolution=False, data=None, "
    "calibration=None, calibration_images=300, max_drop=0.01)",
    "resume": "(run, *, missing='error', **options)",
    "save_pretrained": "(model, folder, *, format='vitascope')",
    "similar": "(model, picture, data, *, k=12, layer=None, pool=None, table=TABLE, compute=COMPUTE)",
    "train": "(config=None, *, recipe=None, **options)",
    "zero_shot": "(model, classes, *, prompts=None, outputs=None, revision=None, device='auto')",
    "Predictor.__init__": "(model, *, precision='auto', device='auto', batch_size=None, views=1)",
    "Predictor.from_pretrained": "(ref, *, revision=None, precision='auto', device='auto', batch_size=None, "
    "views=1)",
    "Predictor.__call__": "(images, top_k=None, *, threshold=None, coverage=None, familiar=None)",
    "Predictor.explain": "(images, *, method='integrated-gradients', target=None)",
    "Predictor.predict_folder": "(folder, top_k=None, *, threshold=None, coverage=None, familiar=None, "
    "workers=None)",
    "VisionTransformer.__init__": "(config)",
    "VisionTransformer.forward": "(images)",
    "VisionTransformer.forward_features": "(images, trace=None, queries=slice(None, None, None))",
    "VisionTransformer.forward_intermediates": "(images, layers, *, norm=True)",
    "VisionTransformer.feature_map": "(images, layers=None, *, norm=True)",
    "VisionTransformer.forward_head": "(features, trace=None)",
    "VisionTransformer.embed": "(images)",
    "VisionTransformer.intervene": "(*, heads=(), attention=(), mlps=(), layers=(), patches=())",
    "VisionTransformer.trace": "(images, attention=False)",
    "VisionTransformer.resize": "(image_size)",
    "Run.create": "(config, plan=None, *, processes=1, keep_data=False)",
    "Run.find": "(ref)",
    "Run.open": "(folder)",
    "Run.model": "()",
    "Run.open_data": "(data=None, *, check=None)",
    "Run.test_images": "(class_names=None)",
    "TrainConfig.from_recipe": "(recipe=None, **options)",
    "TrainConfig.from_yaml": "(path)",
    "explain.attention": "(model, images, layer=-1, head=None, *, scaled=True)",
    "explain.attention_distance": "(model, images)",
    "explain.compare": "(model, images, methods=None, *, target=None, steps=10, "
    "shares=(0.1, 0.3, 0.5, 0.7, 0.9), seed=0, batch_size=64, progress=None)",
    "explain.draw": "(model, pictures=None, method='integrated-gradients', target=None, *, truths=None, "
    "kind='picture', evidence=False, **settings)",
    "explain.evidence": "(model, image, heatmap, target=None, *, maps=99, steps=10, seed=0, batch_size=64)",
    "explain.feature_colours": "(model, images, layer=-1)",
    "explain.grad_cam": "(model, images, target=None, layer=None, variant='grad-cam', *, scaled=True)",
    "explain.gradient_rollout": "(model, images, target=None, *, scaled=True)",
    "explain.head_maps": "(model, images)",
    "explain.heatmap": "(model, images, method='integrated-gradients', target=None, *, batch_size=None, "
    "scaled=True, **settings)",
    "explain.integrated_gradients": "(model, images, target=None, *, steps=32, batch_size=16, scaled=True)",
    "explain.lens": "(model, images, target=None)",
    "explain.libra": "(model, images, target=None, *, scaled=True)",
    "explain.occlusion": "(model, images, target=None, *, window=1, batch_size=64, scaled=True)",
    "explain.patch_attention": "(model, images, patch, layer=-1, head=None)",
    "explain.patch_filters": "(model, count=28)",
    "explain.patching": "(model, images, target=None, *, layers=None, batch_size=64, scaled=True)",
    "explain.position_similarity": "(model)",
    "explain.rollout": "(model, images, fusion='mean', discard=0.0, *, scaled=True)",
}
"""Names and defaults of the parameters; a change here breaks programs of users."""


def signature_of(path: str) -> str:
    """The parameters of a public function, without types."""
    found = inspect.signature(attrgetter(path)(vs))
    given = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in found.parameters.values()
        if parameter.name != "self"
    ]
    text = str(found.replace(parameters=given, return_annotation=inspect.Signature.empty))
    return text.replace(repr(vs.TableOptions()), "TABLE").replace(repr(vs.Compute()), "COMPUTE")


@pytest.mark.parametrize("name", vs.__all__)
def test_every_public_name_resolves_and_is_listed(name: str) -> None:
    assert getattr(vs, name) is not None
    assert name in dir(vs)


@pytest.mark.parametrize("path", [*vs._HOMES, *(f"explain.{name}" for name in vs.explain.__all__)])
def test_public_names_lie_in_the_module_that_they_name(path: str) -> None:
    value, name = attrgetter(path)(vs), path.split(".")[-1]
    if not hasattr(value, "__module__"):
        assert name in ("METHODS", "DEFAULT_METHOD")
        return
    assert value.__name__ == name
    assert getattr(sys.modules[value.__module__], name) is value
    # The reference of the site (docs/site.py) takes the module from `_HOMES`.
    assert path.startswith("explain.") or value.__module__ == f"vitascope.{vs._HOMES[name]}"


def test_public_names_are_unique_and_all_of_dir() -> None:
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
    assert sorted(vs.explain.__all__) == dir(vs.explain)
    functions = {name for name in vs.explain.__all__ if inspect.isfunction(getattr(vs.explain, name))}
    kinds = {name for name in vs.explain.__all__ if inspect.isclass(getattr(vs.explain, name))}
    assert set(vs.explain.__all__) - functions - kinds == {"METHODS", "DEFAULT_METHOD"}
    assert vs.explain.DEFAULT_METHOD in vs.explain.METHODS
    assert {"attention", "rollout", "grad_cam"} <= functions


@pytest.mark.parametrize("path", FROZEN)
def test_public_function_takes_the_frozen_parameters(path: str) -> None:
    assert signature_of(path) == FROZEN[path]


def test_every_public_function_is_frozen() -> None:
    functions = {name for name in vs.__all__ if inspect.isfunction(getattr(vs, name))}
    functions |= {
        f"explain.{name}" for name in vs.explain.__all__ if inspect.isfunction(getattr(vs.explain, name))
    }
    assert functions <= set(FROZEN)


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


def test_options_are_set_and_read_by_flat_names() -> None:
    config = vs.ViTConfig(image_size=32).replace(pool="mean", positions="rotary", drop_path=0.1)
    assert (config.readout.pool, config.embedding.positions) == ("mean", "rotary")
    assert (config.option("image_size"), config.option("drop_path")) == ((32, 32), 0.1)
    assert config.to_dict()["pool"] == "mean"
    assert vs.ViTConfig.from_dict(config.to_dict()) == config
    assert vs.create_model("vit_ti16", depth=1, pool="mean").config.readout.pool == "mean"
    with pytest.raises(vs.UserError, match="nearest: pool"):
        config.replace(pol="mean")


def test_prediction_has_label_index_and_score_in_that_order() -> None:
    assert list(inspect.signature(vs.Prediction).parameters) == ["label", "index", "score"]


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
