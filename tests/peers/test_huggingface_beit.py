"""transformers' BEiT and Data2VecVision load as ours, and ours written for transformers load there."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.model import randomize, small_config, small_model
from tests.peers.comparison import relative_error
from tests.peers.timm_models import assert_same_state, images_for
from vitascope.model.vit import VisionTransformer
from vitascope.weights.families.huggingface.beit import Beit
from vitascope.weights.files import CheckpointError
from vitascope.weights.identification import FAMILIES, identify
from vitascope.weights.loading import from_pretrained
from vitascope.weights.mapping import misfit, to_family
from vitascope.weights.preprocess import preprocess_of

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SIZES: dict[str, Any] = {
    **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48},
    **{"image_size": 32, "patch_size": 8, "attn_implementation": "sdpa", "num_labels": 5},
}
OWN, SHARED = {"use_relative_position_bias": True}, {"use_shared_relative_position_bias": True}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "BEiT": ("BeitForImageClassification", {**OWN, "use_mask_token": True}),
    "class token": ("BeitForImageClassification", {**SHARED, "use_mean_pooling": False}),
    "learned positions": (
        "BeitForImageClassification",
        {"use_absolute_position_embeddings": True, "layer_scale_init_value": 0.0},
    ),
    "learned positions too": (
        "BeitForImageClassification",
        {
            **OWN,
            "use_absolute_position_embeddings": True,
            "image_size": 32,
            "hidden_act": "gelu_pytorch_tanh",
        },
    ),
    "body": ("BeitModel", OWN),
    "body, class token": ("BeitModel", {**SHARED, "use_mean_pooling": False}),
    "Data2Vec": ("Data2VecVisionForImageClassification", OWN),
    "Data2Vec, shared": ("Data2VecVisionForImageClassification", {**SHARED, "use_mean_pooling": False}),
    "Data2Vec's body": ("Data2VecVisionModel", OWN),
}


def model(case: str, folder: Path) -> tuple[Any, VisionTransformer]:
    name, options = MODELS[case]
    kind = "Beit" if name.startswith("Beit") else "Data2VecVision"
    peer = getattr(transformers, name)(getattr(transformers, f"{kind}Config")(**{**SIZES, **options}))
    randomize(peer).eval().save_pretrained(folder)
    ours = from_pretrained(folder)
    assert isinstance(ours, VisionTransformer)
    return peer.double(), ours.double()


@torch.no_grad()
def assert_alike(ours: VisionTransformer, peer: nn.Module) -> None:
    images = images_for(ours.config).double()
    theirs, trace = peer(images, output_hidden_states=True), ours.trace(images)
    for index in range(ours.config.depth):
        assert relative_error(trace[f"block{index}"], theirs.hidden_states[index + 1]) < 1e-10
    if ours.config.readout.head == "linear":
        assert relative_error(trace["logits"], theirs.logits) < 1e-10
    else:
        assert relative_error(trace["features"], theirs.last_hidden_state) < 1e-10
        if theirs.pooler_output is not None:
            assert relative_error(trace["pooled"], theirs.pooler_output) < 1e-10


@pytest.mark.parametrize("case", MODELS)
def test_model_of_transformers_has_its_outputs(case: str, tmp_path: Path) -> None:
    peer, ours = model(case, tmp_path)
    assert identify(tmp_path)[1].name == "huggingface"
    assert_alike(ours, peer)


@torch.no_grad()
@pytest.mark.parametrize("case", ["BEiT", "class token", "body"])
def test_attention_weights_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    peer, ours = model(case, tmp_path)
    images = images_for(ours.config).double()
    peer.set_attn_implementation("eager")  # its softmax is in float32
    theirs, attention = peer(images, output_attentions=True).attentions, ours.trace(images, True).attention
    assert attention is not None
    for mine, other in zip(attention, theirs, strict=True):
        assert relative_error(mine, other) < 1e-6


def written(ours: VisionTransformer, folder: Path) -> nn.Module:
    """The model that transformers loads strictly from a folder of ours."""
    to_family(FAMILIES["huggingface"], ours.float(), preprocess_of(ours), folder)
    config = transformers.AutoConfig.from_pretrained(folder)
    kind = getattr(transformers, config.architectures[0])
    peer, found = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(found.values()), found
    return peer.eval().double()


@pytest.mark.parametrize("case", MODELS)
def test_model_written_for_transformers_loads_there_strictly_and_back_here_unchanged(
    case: str, tmp_path: Path
) -> None:
    _, ours = model(case, tmp_path / "theirs")
    peer = written(ours, tmp_path / "ours")
    assert_alike(ours.double(), peer)
    read = from_pretrained(tmp_path / "ours")
    assert read.config == ours.config
    assert_same_state(read.state_dict(), ours.float().state_dict())


@pytest.mark.parametrize(
    "options",
    [
        {"positions": "relative_by_block", "norm_eps": 1e-12},
        {
            "positions": "relative",
            "pool": "mean",
            "class_token": True,
            "pool_norm": "after",
            "layer_scale": 0.1,
        },
        {"positions": "relative", "absolute": "all", "mlp": "quick_gelu", "class_names": tuple("abcde")},
    ],
)
def test_our_models_have_equal_outputs_in_transformers(options: dict[str, Any], tmp_path: Path) -> None:
    ours = small_model(qkv_bias="no_key", **options)
    peer = written(ours, tmp_path)
    assert_alike(ours.double(), peer)
    assert from_pretrained(tmp_path).config.class_names == ours.config.class_names


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"qkv_bias": "all"}, "qkv_bias 'all'"),
        ({"mlp": "swiglu"}, "mlp 'swiglu'"),
        ({"pool_norm": "after"}, "pool 'cls', pool_norm 'after' and head 'linear'"),
        ({"image_size": (32, 24)}, "positions of an oblong grid, (4, 3)"),
        ({"patch_size": (8, 4), "image_size": (32, 16)}, "patches that are not square"),
    ],
)
def test_what_transformers_has_not_is_rejected_with_the_option(options: dict[str, Any], reason: str) -> None:
    config = small_config(**{"positions": "relative", "qkv_bias": "no_key"} | options)
    assert misfit(Beit(), config) == f"huggingface has no model with {reason}"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({**OWN, **SHARED}, "relative positions of all blocks beside those of each"),
        ({**OWN, "hidden_act": "relu"}, "hidden_act 'relu'"),
        ({**OWN, "image_size": [32, 24]}, r"distorts the positions of an oblong grid, \(4, 3\)"),
    ],
)
def test_what_no_model_here_has_is_rejected(options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    config = transformers.BeitConfig(**{**SIZES, **options})
    transformers.BeitForImageClassification(config).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=reason):
        from_pretrained(tmp_path)


def test_masked_pre_training_gives_the_body(tmp_path: Path) -> None:
    peer = transformers.BeitForMaskedImageModeling(transformers.BeitConfig(**SIZES, **OWN, vocab_size=9))
    randomize(peer).eval().save_pretrained(tmp_path)
    ours = from_pretrained(tmp_path).double()
    images = images_for(ours.config).double()
    with torch.no_grad():
        body = peer.double().beit(images).last_hidden_state
        assert relative_error(ours.forward_features(images), peer.layernorm(body)) < 1e-10


def test_preprocessing_is_that_of_the_processor(tmp_path: Path) -> None:
    _, ours = model("BEiT", tmp_path)
    assert preprocess_of(ours).interpolation == "bicubic"  # without a file: the defaults of its class
    assert preprocess_of(ours).mean == (0.5, 0.5, 0.5)
