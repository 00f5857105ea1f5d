"""transformers' vision encoders, also within whole models, against our models in float64, both ways."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.model import random_images, randomize, small_model
from tests.peers.comparison import relative_error
from tests.peers.test_huggingface import (
    FAMILY,
    loaded_by_peer,
    ours_from,
    preprocess_of,
    read_folder,
)
from vitascope.errors import UserError
from vitascope.model.vit import VisionTransformer
from vitascope.weights.families.huggingface.family import KINDS, reason
from vitascope.weights.files import CheckpointError
from vitascope.weights.identification import identify
from vitascope.weights.loading import from_pretrained, save_pretrained
from vitascope.weights.mapping import Source, misfit, to_family

transformers = pytest.importorskip(
    "transformers", minversion="5", reason="transformers 5 is not installed (vitascope[peers])"
)

TEXT = {"vocab_size": 9, "max_position_embeddings": 5, "hidden_size": 8, "intermediate_size": 12}
TEXT |= {"num_hidden_layers": 1, "num_attention_heads": 2, "bos_token_id": 1, "eos_token_id": 2}

# transformers' classes; the options of ours.
ENCODERS: dict[str, dict[str, Any]] = {
    "CLIPVisionModel": {"embedding_norm": True, "patch_bias": False, "head": "none", "mlp": "quick_gelu"},
    "CLIPVisionModelWithProjection": {"outputs": "embedding", "head": "linear", "num_classes": 6},
    "CLIPForImageClassification": {
        "pool": "mean",
        "pool_norm": "none",
        "class_token": True,
        "num_classes": 6,
    },
    "CLIPModel": {"outputs": "embedding", "head": "linear", "num_classes": 6, "norm_eps": 1e-5},
    "MetaClip2VisionModelWithProjection": {"outputs": "embedding", "num_classes": 6},
    "MetaClip2Model": {"outputs": "embedding", "num_classes": 6},
    "SiglipVisionModel": {"pool": "map", "head": "none", "mlp": "gelu_tanh", "norm_eps": 1e-6},
    "SiglipModel": {"pool": "map", "position_prefix": False},
    "SiglipForImageClassification": {"pool": "mean", "head": "linear", "num_classes": 6},
    "Aimv2VisionModel": {"norm_type": "rms", "patch_norm": True, "linear_bias": False, "pool": "mean"},
    "ViTMAEModel": {"head": "none", "norm_eps": 1e-12},
    "ViTMAEForPreTraining": {"head": "none", "position_prefix": True},
    "ViTMSNModel": {"head": "none", "norm_eps": 1e-6},
    "ViTMSNForImageClassification": {"head": "linear", "num_classes": 6},
    "IJepaModel": {"pool": "mean", "class_token": None, "head": "none"},
    "IJepaForImageClassification": {"pool": "mean", "head": "linear", "num_classes": 6},
    "ViTForMaskedImageModeling": {"head": "none"},
    "DeiTForMaskedImageModeling": {"head": "none", "num_registers": 1},
    "Dinov2Backbone": {"head": "none"},
    "Dinov2WithRegistersBackbone": {"head": "none", "num_registers": 4},
    "DINOv3ViTBackbone": {"head": "none", "positions": "rotary"},
}
OBLONG = ("ViT", "DeiT", "IJepa", "DINOv3")


def random_sizes(name: str, seed: int) -> dict[str, Any]:
    """A small architecture; for some seeds with images that patches do not tile, or oblong ones."""
    rng = random.Random(seed)
    heads, patch = rng.choice([1, 2, 4]), rng.choice([4, 6])
    side = patch * rng.randint(2, 4) + (seed % 3) * ("MAE" not in name)
    oblong = seed == 1 and name.startswith(OBLONG) and not name.endswith("Modeling") and "MAE" not in name
    sizes = {"hidden_size": 8 * heads, "num_hidden_layers": 2, "num_attention_heads": heads}
    sizes |= {"image_size": [side, side + patch] if oblong else side, "patch_size": patch}
    return sizes if name.startswith("Dinov2") else sizes | {"intermediate_size": rng.randint(9, 30)}


def peer_model(name: str, seed: int = 0, **changes: Any) -> nn.Module:
    """A small model of transformers, every parameter random."""
    cls, sizes = getattr(transformers, name), random_sizes(name, seed) | changes
    options: dict[str, Any] = {"num_labels": 6}
    if "projection" in name.lower() or name in ("CLIPModel", "MetaClip2Model"):
        options["projection_dim"] = 6
    if "vision_config" in (getattr(cls.config_class, "sub_configs_defaults", None) or {}):
        text = TEXT | {key: value for key, value in options.items() if key == "projection_dim"}
        config = cls.config_class(vision_config=sizes, text_config=text, **options)
    else:
        config = cls.config_class(**sizes, **options)
    if name == "Aimv2VisionModel":
        config.use_head, config.is_native = False, seed == 1
    if name.endswith("Modeling"):
        config.encoder_stride = config.patch_size
    if "MAE" in name:
        config.mask_ratio = 0.0
    return randomize(cls(config), seed).eval()


@torch.no_grad()
def peer_outputs(peer: nn.Module, images: Tensor) -> dict[str, Any]:
    """transformers' outputs of images: the head's, each block's tokens, the attention."""
    name, asked = type(peer).__name__, {"output_hidden_states": True, "output_attentions": True}
    if hasattr(peer, "get_image_features"):
        result = peer.get_image_features(images, **asked)
        found = {"outputs": result.pooler_output}
    elif "MAE" in name:
        body = peer.vit if hasattr(peer, "vit") else peer
        patches = body.embeddings.patch_embeddings.num_patches
        result = body(images, noise=torch.arange(float(patches)).expand(len(images), -1), **asked)
        found = {"outputs": result.last_hidden_state[:, 0]}
    elif name.endswith("Backbone"):
        result = peer(images, **asked)
        found = {"feature_map": result.feature_maps[-1]}
    elif name.endswith("Modeling"):
        body = peer.base_model
        result = body(images, **asked)
        found = {"outputs": result.last_hidden_state[:, 0]}
    else:
        result = peer(images, **asked)
        found = {"outputs": next((result[key] for key in ("logits", "image_embeds") if key in result), None)}
        if found["outputs"] is None and "pooler_output" in result:
            found["outputs"] = result.pooler_output
        if found["outputs"] is None:
            last = result.last_hidden_state
            found["outputs"] = last.mean(dim=1) if name.startswith(("IJepa", "Aimv2")) else last[:, 0]
    return {**found, "tokens": result.hidden_states, "attention": result.attentions}


@torch.no_grad()
def assert_equal(ours: VisionTransformer, peer: nn.Module) -> None:
    """Outputs and tokens within 1e-10 in float64; attention within 1e-5: their softmax is in float32."""
    images = random_images(2, ours.config.in_channels, *ours.config.image_hw).double()
    ours, peer = ours.double(), peer.double()
    peer.set_attn_implementation("sdpa")
    found = peer_outputs(peer, images)
    # Angles, the class token plus its position, and RMS norms are in float32 there.
    rounded = ("DINOv3", "Dinov2WithRegisters", "Aimv2")
    exact = 1e-6 if type(peer).__name__.startswith(rounded) else 1e-10
    if "feature_map" in found:
        patches = ours.forward_features(images)[:, ours.config.num_prefix_tokens :]  # (B, N, D)
        assert relative_error(patches, found["feature_map"].flatten(2).mT) < exact
    else:
        assert relative_error(ours(images), found["outputs"]) < exact
    trace, tokens = ours.trace(images, attention=True), found["tokens"]
    assert len(tokens) == ours.config.depth + 1
    for index in range(ours.config.depth - 1):  # some classes have their last norm on the last
        assert relative_error(trace[f"block{index}"], tokens[index + 1]) < exact
    peer.set_attn_implementation("eager")
    attention = peer_outputs(peer, images)["attention"]
    assert trace.attention is not None
    assert len(trace.attention) == len(attention) == ours.config.depth
    for own, theirs in zip(trace.attention, attention, strict=True):
        assert relative_error(own, theirs) < 1e-5
    ours.float(), peer.float()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", ENCODERS)
def test_encoder_equals_transformers_in_float64_both_ways(name: str, seed: int, tmp_path: Path) -> None:
    peer = peer_model(name, seed)
    peer.save_pretrained(tmp_path / "theirs")
    ours = ours_from(read_folder(tmp_path / "theirs"))
    for option, value in ENCODERS[name].items():
        assert ours.config.option(option) == value, option
    (height, width), (ph, pw) = ours.config.image_hw, ours.config.patch_hw
    assert (ours.config.remainder == "cut") == bool(height % ph or width % pw)
    assert_equal(ours, peer)

    to_family(FAMILY, ours, preprocess_of(ours.config), tmp_path / "back")
    again = loaded_by_peer(ours.config, tmp_path / "back")
    assert_equal(ours, again)
    back = ours_from(read_folder(tmp_path / "back"))
    assert back.config == FAMILY.fixed_there(ours.config)
    for key, tensor in back.state_dict().items():
        assert torch.equal(tensor, ours.state_dict()[key]), key


@pytest.mark.parametrize("name", ENCODERS)
def test_names_in_memory_are_read(name: str, tmp_path: Path) -> None:
    peer = peer_model(name)
    peer.save_pretrained(tmp_path)
    expected = ours_from(read_folder(tmp_path)).state_dict()
    in_memory = Source(name="in memory", tensors=peer.state_dict(), config=peer.config.to_dict())
    for key, tensor in ours_from(in_memory).state_dict().items():
        assert torch.equal(tensor, expected[key]), key


@pytest.mark.parametrize("name", ["CLIPVisionModel", "SiglipVisionModel"])
def test_a_vision_model_with_the_prefix_of_version_4_is_read(name: str, tmp_path: Path) -> None:
    peer_model(name).save_pretrained(tmp_path)
    source = read_folder(tmp_path)
    expected = ours_from(source).state_dict()
    tensors = {f"vision_model.{key}": tensor for key, tensor in source.tensors.items()}
    tensors["vision_model.embeddings.position_ids"] = torch.arange(5)[None]
    old = Source(name="version 4", tensors=tensors, config=source.config)
    for key, tensor in ours_from(old).state_dict().items():
        assert torch.equal(tensor, expected[key]), key


@pytest.mark.parametrize(
    "name", ["SiglipVisionModel", "CLIPVisionModel", "IJepaModel", "ViTMSNModel", "ViTMAEModel"]
)
@torch.no_grad()
def test_other_image_sizes_equal_transformers(name: str, tmp_path: Path) -> None:
    peer = peer_model(name)
    peer.save_pretrained(tmp_path)
    ours = ours_from(read_folder(tmp_path))
    side = ours.config.patch_hw[0] * 5
    images, asked = random_images(2, 3, side, side), {"interpolate_pos_encoding": True}
    if "MAE" in name:
        asked["noise"] = torch.arange(25.0).expand(2, -1)
    result = peer(images, **asked)
    block = "features" if name != "CLIPVisionModel" else "block1"
    assert relative_error(ours.trace(images)[block], result.last_hidden_state) < 1e-5


@pytest.mark.parametrize(
    "name", ["CLIPVisionModel", "SiglipVisionModel", "IJepaModel", "ViTMAEModel", "ViTMSNModel"]
)
def test_empty_configuration_means_the_defaults_of_its_class(name: str, tmp_path: Path) -> None:
    peer_model(name).save_pretrained(tmp_path)
    source = read_folder(tmp_path)
    defaults = getattr(transformers, name).config_class()
    told = Source(name="silent", tensors=source.tensors, config={"model_type": source.config["model_type"]})
    config = FAMILY.read_config(FAMILY.before_reading(told))
    assert (config.embed_dim, config.depth) == (defaults.hidden_size, defaults.num_hidden_layers)
    assert (config.num_heads, config.mlp_dim) == (defaults.num_attention_heads, defaults.intermediate_size)
    assert config.image_hw == (defaults.image_size,) * 2
    assert config.patch_hw == (defaults.patch_size,) * 2
    assert config.norms.norm_eps == defaults.layer_norm_eps
    expected = {"quick_gelu": "quick_gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
    assert config.block.mlp == expected[defaults.hidden_act]


def test_siglip_without_its_head_pools_by_the_mean(tmp_path: Path) -> None:
    peer = peer_model("SiglipVisionModel", vision_use_head=False)
    peer.save_pretrained(tmp_path)
    ours = ours_from(read_folder(tmp_path))
    images = random_images(2, 3, *ours.config.image_hw)
    with torch.no_grad():
        expected = peer(images).last_hidden_state.mean(dim=1)
        assert relative_error(ours(images), expected) < 1e-5


@torch.no_grad()
def in_patches(peer: nn.Module, images: Tensor) -> Any:
    """SigLIP 2's outputs of images (B, C, H, W), which its processor cuts into patches."""
    vision = getattr(peer.config, "vision_config", peer.config)
    patch, (B, _, height, width) = vision.patch_size, images.shape
    grid = height // patch, width // patch
    cut = images.unflatten(2, (grid[0], patch)).unflatten(4, (grid[1], patch))
    patches = cut.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)  # (B, N, rows columns C)
    shapes = torch.tensor([grid]).expand(B, -1)
    mask = torch.ones(patches.shape[:2], dtype=torch.int64)
    return peer(patches, pixel_attention_mask=mask, spatial_shapes=shapes)


@pytest.mark.parametrize(
    "options", [{}, {"vision_use_head": False}, {"hidden_act": "gelu", "num_channels": 1}]
)
@torch.no_grad()
def test_siglip_2_of_any_proportions_is_a_siglip_at_its_square(
    options: dict[str, Any], tmp_path: Path
) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.Siglip2VisionConfig(**sizes, patch_size=6, num_patches=9, **options)
    peer = randomize(transformers.Siglip2VisionModel(config), 1).eval()
    peer.save_pretrained(tmp_path / "theirs")
    transformers.Siglip2ImageProcessorPil(patch_size=6, max_num_patches=9).save_pretrained(
        tmp_path / "theirs"
    )
    ours = from_pretrained(tmp_path / "theirs")
    assert (ours.preprocess.image_size, ours.preprocess.resize) == ((18, 18), "squash")
    images = random_images(2, config.num_channels, 18, 18)
    expected = in_patches(peer.double(), images.double())
    tokens = expected.last_hidden_state
    outputs = tokens.mean(dim=1) if "vision_use_head" in options else expected.pooler_output
    ours.double()
    assert relative_error(ours.forward_features(images.double()), tokens) < 1e-10
    assert relative_error(ours(images.double()), outputs) < 1e-10

    save_pretrained(ours.float(), tmp_path / "back", format="huggingface")
    back: Any = loaded_by_peer(ours.config, tmp_path / "back").double()
    back.set_attn_implementation("sdpa")
    assert relative_error(back(images.double()).last_hidden_state, tokens) < 1e-10


@torch.no_grad()
def test_classifier_of_siglip_2_equals_transformers(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    vision = {**sizes, "patch_size": 6, "num_patches": 9}
    config = transformers.Siglip2Config(vision_config=vision, text_config=TEXT, num_labels=6)
    peer = randomize(transformers.Siglip2ForImageClassification(config), 1).eval()
    peer.save_pretrained(tmp_path)
    images = random_images(2, 3, 18, 18)
    assert relative_error(from_pretrained(tmp_path)(images), in_patches(peer, images).logits) < 1e-5


def test_projection_with_a_bias_is_not_written(tmp_path: Path) -> None:
    options = {"embedding_norm": True, "patch_bias": False, "outputs": "embedding", "num_classes": 6}
    ours = small_model(**options)
    assert not misfit(FAMILY, ours.config)
    with pytest.raises(CheckpointError, match="projection has a bias"):
        to_family(FAMILY, ours, preprocess_of(ours.config), tmp_path / "never")
    ours.head.bias.data.zero_()
    to_family(FAMILY, ours, preprocess_of(ours.config), tmp_path / "written")
    assert_equal(ours, loaded_by_peer(ours.config, tmp_path / "written"))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "pool 'cls', pool_norm 'before', class_token True with classes"),
        ({"pool": "mean", "pool_norm": "none"}, "pool_norm 'none', class_token False with classes"),
        ({"pool": "mean", "class_token": True, "head": "none"}, "pool 'mean'.* without classes"),
    ],
)
def test_clips_with_another_readout_are_not_written(options: dict[str, Any], reason: str) -> None:
    ours = small_model(embedding_norm=True, patch_bias=False, **options)
    assert re.search(reason, misfit(FAMILY, ours.config))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"pooler_act": "relu"}, "pooler_act 'relu'"),
        ({"pooler_output_size": 4}, "pooler of 4 outputs"),
    ],
)
def test_other_poolers_are_rejected_with_the_way_out(
    changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    peer_model("ViTModel", **changed).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=f"{message}.*add_pooling_layer=False"):
        ours_from(read_folder(tmp_path))


def test_pooler_of_i_jepa_is_rejected(tmp_path: Path) -> None:
    cls = transformers.IJepaModel
    cls(cls.config_class(**random_sizes("IJepa", 0)), add_pooling_layer=True).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="reads the first patch"):
        ours_from(read_folder(tmp_path))


@pytest.mark.parametrize("kind", ["swin", "hiera", "levit", "mobilevit", "pvt", "convnext", "aimv2", "mlcd"])
def test_models_of_another_kind_are_rejected_by_name(kind: str, tmp_path: Path) -> None:
    assert kind not in KINDS
    peer_model("ViTModel").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": kind}))
    with pytest.raises(
        CheckpointError, match=f"model_type is '{kind}'; vitascope has no such model"
    ) as error:
        identify(tmp_path)
    assert reason(kind) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"vision_config": [1]}, "vision_config"),
        ({"vision_config": {"hidden_act": "relu"}}, "hidden_act 'relu'"),
        ({"vision_config": {"hidden_act": ["gelu"]}}, "hidden_act"),
        ({"vision_config": {"image_size": None}}, "not a size"),
        ({"vision_config": {"hidden_size": float("inf")}}, "hidden_size inf"),
        ({"vision_config_dict": "B/16"}, "vision_config_dict"),
        ({"vision_config": {"num_attention_heads": "two"}}, "num_heads"),
    ],
)
def test_broken_configuration_of_a_whole_model_is_rejected(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    peer_model("SiglipModel").save_pretrained(tmp_path)
    source = read_folder(tmp_path)
    with pytest.raises(UserError, match=message):
        ours_from(Source(name="broken", tensors=source.tensors, config={**source.config, **config}))


def test_whole_model_is_loaded_with_its_preprocessing(tmp_path: Path) -> None:
    peer = peer_model("CLIPModel")
    peer.save_pretrained(tmp_path)
    model = from_pretrained(tmp_path)
    assert model.preprocess.mean[0] == 0.48145466
    assert (model.preprocess.resize, model.preprocess.interpolation) == ("crop", "bicubic")
    assert not model.config.gives_classes


def test_parts_of_a_whole_model_do_not_overrule_what_describes_the_whole(tmp_path: Path) -> None:
    names = {str(index): name for index, name in enumerate("abcdef")}
    peer_model("SiglipForImageClassification").save_pretrained(tmp_path)
    source = read_folder(tmp_path)
    repeated = {"id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "problem_type": "regression"}
    vision = {**source.config["vision_config"], **repeated}
    config = {**source.config, "id2label": names, "vision_config": vision}
    ours = ours_from(Source(name="version 4", tensors=source.tensors, config=config))
    assert ours.config.class_names == tuple("abcdef")
    to_family(FAMILY, ours, preprocess_of(ours.config), tmp_path / "back")
    assert loaded_by_peer(ours.config, tmp_path / "back").config.id2label == dict(enumerate("abcdef"))


def test_an_older_description_of_the_vision_model_overrules_the_newer_as_in_transformers(
    tmp_path: Path,
) -> None:
    peer_model("CLIPModel").save_pretrained(tmp_path)
    source = read_folder(tmp_path)
    vision = source.config["vision_config"]
    old = {key: vision[key] for key in vision if key not in ("hidden_act", "layer_norm_eps")}
    newer = {**vision, "layer_norm_eps": 0.1, "num_hidden_layers": 7}
    config = {**source.config, "vision_config": newer, "vision_config_dict": old}
    expected = transformers.CLIPConfig(**config).vision_config
    ours = ours_from(Source(name="older", tensors=source.tensors, config=config)).config
    assert (ours.depth, ours.norms.norm_eps) == (expected.num_hidden_layers, expected.layer_norm_eps)


@pytest.mark.parametrize(
    "name", ["CLIPVisionModelWithProjection", "SiglipVisionModel", "IJepaForImageClassification"]
)
@torch.no_grad()
def test_conversion_to_timm_and_back_is_bitwise(name: str, tmp_path: Path) -> None:
    peer_model(name, seed=2).save_pretrained(tmp_path / "theirs")
    ours = from_pretrained(tmp_path / "theirs")
    ours.config = ours.config.replace(norm_eps=1e-5 if name.startswith("CLIP") else 1e-6)  # timm's
    images = random_images(2, 3, *ours.config.image_hw)
    save_pretrained(ours, tmp_path / "timm", format="timm")
    between = from_pretrained(tmp_path / "timm")
    assert between.config.remainder == ours.config.remainder == "cut"
    assert between.config.outputs == ours.config.outputs
    save_pretrained(between, tmp_path / "back", format="huggingface")
    back = from_pretrained(tmp_path / "back")
    assert torch.equal(back(images), between(images))
    for key, tensor in back.state_dict().items():
        assert torch.equal(tensor, ours.state_dict()[key]), key


@pytest.mark.parametrize("name", ENCODERS)
def test_weights_without_config_json_load_with_a_given_architecture(name: str, tmp_path: Path) -> None:
    peer_model(name).save_pretrained(tmp_path)
    ours = from_pretrained(tmp_path)
    (tmp_path / "config.json").unlink()
    bare = from_pretrained(tmp_path / "model.safetensors", config=ours.config)
    for key, tensor in bare.state_dict().items():
        assert torch.equal(tensor, ours.state_dict()[key]), key
