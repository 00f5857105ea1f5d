"""transformers' models, in its own folders and within whole models, against ours, both ways.

Every case passes one contract: its folder loads as ours with equal outputs, tokens and attention; ours
written for transformers load there strictly, with the same; read back, nothing has changed.
"""

import functools
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.model import random_images, randomize, small_config, small_model
from tests.peers.comparison import relative_error
from tests.weights import assert_same_state
from vitascope.data.preprocess import Preprocess
from vitascope.errors import UserError
from vitascope.model.config import ViTConfig
from vitascope.model.vit import VisionTransformer
from vitascope.predict.engine import TorchEngine
from vitascope.weights.families.huggingface.beit import Beit
from vitascope.weights.families.huggingface.family import KINDS, HuggingFace, reason
from vitascope.weights.files import CheckpointError, explaining_settings
from vitascope.weights.identification import identify
from vitascope.weights.loading import from_pretrained, save_pretrained
from vitascope.weights.mapping import Source, changes, from_family, misfit, to_family

transformers = pytest.importorskip(
    "transformers", minversion="5", reason="transformers 5 is not installed (vitascope[peers])"
)
transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

FAMILY = HuggingFace()
SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
MLP = {"intermediate_size": 80}
SEVEN = {"num_labels": 7}
TEXT = {"vocab_size": 9, "max_position_embeddings": 5, "hidden_size": 8, "intermediate_size": 12}
TEXT |= {"num_hidden_layers": 1, "num_attention_heads": 2, "bos_token_id": 1, "eos_token_id": 2}

VIT, DEIT, TEACHER = (
    "ViTForImageClassification",
    "DeiTForImageClassification",
    "DeiTForImageClassificationWithTeacher",
)
DINOV2, REGISTERS = "Dinov2ForImageClassification", "Dinov2WithRegistersForImageClassification"
BEIT, DATA2VEC = "BeitForImageClassification", "Data2VecVisionForImageClassification"
NO_BIAS = {"query_bias": False, "key_bias": False, "value_bias": False}
ALL_BIASES = {"query_bias": True, "key_bias": True, "value_bias": True}
GATED = {"use_gated_mlp": True, "hidden_act": "silu"}
OWN, SHARED = {"use_relative_position_bias": True}, {"use_shared_relative_position_bias": True}
ABSOLUTE = {"use_absolute_position_embeddings": True}
CLASS_TOKEN = {"use_mean_pooling": False}

# transformers' models, and our options for them.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "vit": (VIT, MLP, {"norm_eps": 1e-12, "mlp_ratio": 80 / 48, "resample": "huggingface"}),
    "vit, image not square": (VIT, {**MLP, "image_size": [16, 40]}, {"image_size": (16, 40)}),
    "vit, patch not square": (VIT, {**MLP, "patch_size": [8, 16]}, {"patch_size": (8, 16)}),
    "vit, one channel": (VIT, {**MLP, "num_channels": 1}, {"in_channels": 1}),
    "vit without qkv bias": (VIT, {**MLP, "qkv_bias": False}, {"qkv_bias": "none"}),
    "vit, tanh gelu": (VIT, {**MLP, "hidden_act": "gelu_pytorch_tanh"}, {"mlp": "gelu_tanh"}),
    "vit, new gelu": (VIT, {**MLP, "hidden_act": "gelu_new"}, {"mlp": "gelu_tanh"}),
    "vit, quick gelu": (VIT, {**MLP, "hidden_act": "quick_gelu"}, {"mlp": "quick_gelu"}),
    "vit, epsilon 1e-6": (VIT, {**MLP, "layer_norm_eps": 1e-6}, {"norm_eps": 1e-6}),
    "vit, epsilon that matters": (VIT, {**MLP, "layer_norm_eps": 0.1}, {"norm_eps": 0.1}),
    "vit, several labels": (
        VIT,
        {**MLP, "problem_type": "multi_label_classification"},
        {"outputs": "independent", "thresholds": ()},
    ),
    "vit with pooler": ("ViTModel", MLP, {"head": "pre_logits"}),
    "vit without pooler": ("ViTModel", {**MLP, "add_pooling_layer": False}, {"head": "none"}),
    "deit": (DEIT, MLP, {"num_registers": 1, "distillation_token": False, "norm_eps": 1e-12}),
    "deit with teacher": (TEACHER, MLP, {"distillation_token": True, "num_registers": 0}),
    "deit with teacher, not square": (TEACHER, {**MLP, "image_size": [16, 40]}, {"image_size": (16, 40)}),
    "deit with pooler": ("DeiTModel", MLP, {"head": "pre_logits", "num_registers": 1}),
    "deit without pooler": ("DeiTModel", {**MLP, "add_pooling_layer": False}, {"head": "none"}),
    "dinov2": ("Dinov2Model", {}, {"head": "none", "layer_scale": 1.0, "resample": "huggingface"}),
    "dinov2 classifier": (DINOV2, {"layerscale_value": 0.1}, {"pool": "cls_mean", "layer_scale": 0.1}),
    "dinov2, swiglu": (DINOV2, {"use_swiglu_ffn": True}, {"mlp": "swiglu", "mlp_ratio": 128 / 48}),
    "dinov2, swiglu of a rounded width": (
        DINOV2,
        {"use_swiglu_ffn": True, "hidden_size": 40},
        {"mlp_ratio": 112 / 40},
    ),
    "dinov2 without mask token": ("Dinov2Model", {"use_mask_token": False, "qkv_bias": False}, {}),
    "dinov2, patch not square": (DINOV2, {"patch_size": [8, 16]}, {"patch_size": (8, 16)}),
    "registers": (
        "Dinov2WithRegistersModel",
        {"num_register_tokens": 3},
        {"num_registers": 3, "position_prefix": False, "resample": "timm", "norm_eps": 1e-6},
    ),
    "registers, classifier": (REGISTERS, {"use_swiglu_ffn": True}, {"num_registers": 4, "mlp": "swiglu"}),
    "registers, none of them": (REGISTERS, {"num_register_tokens": 0}, {"num_registers": 0}),
    "dinov3": (
        "DINOv3ViTModel",
        {**MLP, "num_register_tokens": 4},
        {"positions": "rotary", "num_registers": 4, "qkv_bias": "no_key", "norm_eps": 1e-5, "head": "none"},
    ),
    "dinov3, gated": ("DINOv3ViTModel", {**MLP, **GATED, "rope_theta": 50.0}, {"mlp": "swiglu"}),
    "dinov3, gated, without biases": (
        "DINOv3ViTModel",
        {**MLP, **GATED, **NO_BIAS, "num_register_tokens": 2},
        {"qkv_bias": "none", "rotary_base": 100.0},
    ),
    "dinov3, all biases, not square": (
        "DINOv3ViTModel",
        {**MLP, **ALL_BIASES, "image_size": [16, 40], "layerscale_value": 0.1},
        {"qkv_bias": "all", "image_size": (16, 40), "layer_scale": 0.1},
    ),
    "beit": (BEIT, {**MLP, **OWN, "use_mask_token": True}, {"positions": "relative_by_block"}),
    "beit, class token": (BEIT, {**MLP, **SHARED, **CLASS_TOKEN}, {"positions": "relative", "pool": "cls"}),
    "beit, learned positions": (
        BEIT,
        {**MLP, **ABSOLUTE, "layer_scale_init_value": 0.0},
        {"positions": "learned", "layer_scale": None},
    ),
    "beit, learned positions too": (
        BEIT,
        {**MLP, **OWN, **ABSOLUTE, "hidden_act": "gelu_pytorch_tanh"},
        {"absolute": "all", "mlp": "gelu_tanh"},
    ),
    "beit, body": ("BeitModel", {**MLP, **OWN}, {"head": "none", "pool_norm": "after"}),
    "beit, body, class token": ("BeitModel", {**MLP, **SHARED, **CLASS_TOKEN}, {"pool": "cls"}),
    "data2vec": (DATA2VEC, {**MLP, **OWN}, {"pool": "mean", "qkv_bias": "no_key"}),
    "data2vec, shared": (DATA2VEC, {**MLP, **SHARED, **CLASS_TOKEN}, {"pool": "cls"}),
    "data2vec, body": ("Data2VecVisionModel", {**MLP, **OWN}, {"pool_norm": "none"}),
}
# Classes of random sizes, of images that patches do not tile, and of oblong ones; the options of ours.
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


def case_model(case: str, **changes: Any) -> nn.Module:
    """transformers' model of a case, every parameter random."""
    name, options, _ = CASES[case]
    options = {**SIZES, **SEVEN, **options, **changes}
    pooling = (
        {"add_pooling_layer": options.pop("add_pooling_layer")} if "add_pooling_layer" in options else {}
    )
    cls = getattr(transformers, name)
    return randomize(cls(cls.config_class(**options), **pooling)).eval()


def encoder_model(name: str, seed: int = 0, **changes: Any) -> nn.Module:
    """A small model of a class of transformers, every parameter random."""
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
        config.mask_ratio, config.decoder_num_hidden_layers = 0.0, 1
        config.decoder_hidden_size = config.decoder_intermediate_size = 32
    return randomize(cls(config), seed).eval()


Saved = Callable[[str], tuple[nn.Module, Path]]
EVERY = [*CASES, *(f"{name}-{seed}" for name in ENCODERS for seed in range(2))]


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """transformers' model of a case and its saved folder, both only to read."""

    @functools.cache
    def save(case: str) -> tuple[nn.Module, Path]:
        name, _, seed = case.partition("-")
        peer = case_model(case) if case in CASES else encoder_model(name, int(seed))
        folder = tmp_path_factory.mktemp("theirs")
        peer.save_pretrained(folder)
        return peer, folder

    return save


def expected_options(case: str) -> dict[str, Any]:
    return CASES[case][2] if case in CASES else ENCODERS[case.partition("-")[0]]


def read_folder(folder: Path) -> Source:
    """A saved folder as a source."""
    files = {
        name: json.loads((folder / f"{name}.json").read_text()) if (folder / f"{name}.json").exists() else {}
        for name in ("config", "preprocessor_config")
    }
    return Source(
        name=str(folder),
        tensors=load_file(folder / "model.safetensors"),
        config=files["config"],
        preprocessor=files["preprocessor_config"],
    )


def ours_from(source: Source) -> VisionTransformer:
    assert FAMILY.recognizes(source)
    source = FAMILY.before_reading(source)
    config = FAMILY.read_config(source)
    with torch.device("meta"):
        model = VisionTransformer(config)
    model.load_state_dict(from_family(FAMILY, source, config), assign=True)
    return model.eval().float()


def preprocess_of(config: ViTConfig) -> Preprocess:
    half = (0.5,) * config.in_channels
    return Preprocess(
        image_size=config.image_hw, channels=config.in_channels, resize="squash", mean=half, std=half
    )


def loaded_by_peer(config: ViTConfig, folder: Path) -> nn.Module:
    """Load with transformers' automatic classes; every weight must be found and none left over."""
    written = json.loads((folder / "config.json").read_text())
    automatic, options = transformers.AutoModelForImageClassification, {}
    if config.readout.head in ("none", "pre_logits"):
        automatic = transformers.AutoModel
        if written["model_type"] in ("vit", "deit"):
            options = {"add_pooling_layer": config.readout.head == "pre_logits"}
    elif config.outputs == "embedding":  # no automatic class has the projection
        automatic = getattr(transformers, written["architectures"][0])
    peer, report = automatic.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(report.values()), report
    return peer.eval()


@torch.no_grad()
def peer_outputs(peer: nn.Module, images: Tensor, **options: Any) -> dict[str, Any]:
    """transformers' outputs of images: the head's or the pooled ones, each block's tokens, the attention."""
    name, asked = type(peer).__name__, {"output_hidden_states": True, "output_attentions": True} | options
    if hasattr(peer, "get_image_features"):
        result = peer.get_image_features(images, **asked)
        outputs = result.pooler_output
    elif "MAE" in name:
        body = peer.vit if hasattr(peer, "vit") else peer
        patches = body.embeddings.patch_embeddings.num_patches
        if "interpolate_pos_encoding" in options:
            patches = images.shape[2] * images.shape[3] // body.config.patch_size**2
        result = body(images, noise=torch.arange(float(patches)).expand(len(images), -1), **asked)
        outputs = result.last_hidden_state[:, 0]
    else:
        result = (peer.base_model if name.endswith("Modeling") else peer)(images, **asked)
        known = (result.get(key) for key in ("logits", "image_embeds", "pooler_output", "feature_maps"))
        outputs = next((value for value in known if value is not None), None)
        if outputs is None:
            last = result.last_hidden_state
            outputs = last[:, 0]
            if name.startswith(("IJepa", "Aimv2")):
                outputs = last.mean(dim=1)
            if name.startswith("Data2Vec"):
                outputs = last[:, 1:].mean(dim=1)
    return {"outputs": outputs, "tokens": result.hidden_states, "attention": result.attentions}


@torch.no_grad()
def assert_alike(ours: VisionTransformer, peer: nn.Module, images: Tensor, **options: Any) -> None:
    """Outputs and tokens within 1e-10 in float64; attention within 1e-5: their softmax is in float32."""
    ours, peer, images = ours.double(), peer.double(), images.double()
    peer.set_attn_implementation("sdpa")
    theirs = peer_outputs(peer, images, **options)
    # Angles, the class token plus its position, interpolated positions and RMS norms are in float32 there.
    rounded = ("DINOv3", "Dinov2WithRegisters", "Aimv2")
    exact = 1e-6 if type(peer).__name__.startswith(rounded) or options else 1e-10
    if isinstance(theirs["outputs"], tuple):  # the feature map of a backbone
        assert relative_error(ours.feature_map(images), theirs["outputs"][-1]) < exact
    else:
        assert relative_error(ours(images), theirs["outputs"]) < exact
    trace = ours.trace(images, attention=True)
    assert len(theirs["tokens"]) == ours.config.depth + 1
    for index in range(ours.config.depth - 1):  # some classes have their last norm on the last
        assert relative_error(trace[f"block{index}"], theirs["tokens"][index + 1]) < exact
    peer.set_attn_implementation("eager")
    attention = peer_outputs(peer, images, **options)["attention"]
    assert len(trace.attention) == len(attention) == ours.config.depth
    for own, other in zip(trace.attention, attention, strict=True):
        if not type(peer).__name__.startswith("Data2Vec"):  # whose are None
            assert relative_error(own, other) < 1e-5
    ours.float(), peer.float()


def images_for(config: ViTConfig) -> Tensor:
    return random_images(2, config.in_channels, *config.image_hw)


@pytest.mark.parametrize("case", EVERY)
def test_a_folder_has_transformers_outputs_both_ways(case: str, saved: Saved, tmp_path: Path) -> None:
    peer, folder = saved(case)
    ours = ours_from(read_folder(folder))
    for option, value in expected_options(case).items():
        assert ours.config.option(option) == value, option
    (height, width), (ph, pw) = ours.config.image_hw, ours.config.patch_hw
    assert (ours.config.remainder == "cut") == bool(height % ph or width % pw)
    assert identify(folder)[1].name == "huggingface"
    assert_alike(ours, peer, images_for(ours.config))

    to_family(FAMILY, ours, preprocess_of(ours.config), tmp_path)
    assert_alike(ours, loaded_by_peer(ours.config, tmp_path), images_for(ours.config))
    again = ours_from(read_folder(tmp_path))
    assert again.config == FAMILY.fixed_there(ours.config)
    assert_same_state(again, ours)


@pytest.mark.parametrize("case", EVERY)
def test_names_of_version_5_and_weights_without_config_json_are_read(case: str, saved: Saved) -> None:
    peer, folder = saved(case)
    expected = ours_from(read_folder(folder))
    in_memory = Source(name="in memory", tensors=peer.state_dict(), config=peer.config.to_dict())
    assert_same_state(ours_from(in_memory), expected)
    bare = Source(name="model.safetensors", tensors=load_file(folder / "model.safetensors"))
    with pytest.raises(CheckpointError, match=r"config=ViTConfig\("):
        FAMILY.read_config(FAMILY.before_reading(bare))
    loaded = from_pretrained(folder / "model.safetensors", family="huggingface", config=expected.config)
    assert_same_state(loaded, expected)


@pytest.mark.parametrize("case", ["vit", "deit with teacher", "dinov2 classifier", "registers, classifier"])
def test_classifier_without_its_prefix_is_read(case: str, saved: Saved) -> None:
    source = read_folder(saved(case)[1])
    bare = source.renamed(lambda name: name.removeprefix(f"{source.config['model_type']}."))
    assert bare.tensors.keys() != source.tensors.keys()
    assert_same_state(ours_from(bare), ours_from(source))


@pytest.mark.parametrize("case", ["CLIPVisionModel-0", "SiglipVisionModel-0"])
def test_a_vision_model_with_the_prefix_of_version_4_is_read(case: str, saved: Saved) -> None:
    source = read_folder(saved(case)[1])
    old = source.renamed(lambda name: f"vision_model.{name}")
    old.tensors["vision_model.embeddings.position_ids"] = torch.arange(5)[None]
    assert_same_state(ours_from(old), ours_from(source))


OTHER_SIZES = ["vit", "deit", "deit with teacher", "dinov2", "registers", "dinov3"]
OTHER_SIZES += [
    f"{it}-0" for it in ("SiglipVisionModel", "CLIPVisionModel", "IJepaModel", "ViTMSNModel", "ViTMAEModel")
]


@pytest.mark.parametrize("case", OTHER_SIZES)
@pytest.mark.parametrize("grid", [(6, 6), (2, 5), (3, 2), (8, 2)])
def test_other_image_sizes_equal_transformers(case: str, grid: tuple[int, int], saved: Saved) -> None:
    peer, folder = saved(case)
    ours = ours_from(read_folder(folder))
    (ph, pw), keeps = ours.config.patch_hw, case.startswith(("dinov", "registers"))
    asked = {} if keeps else {"interpolate_pos_encoding": True}
    assert_alike(ours, peer, random_images(2, 3, grid[0] * ph, grid[1] * pw), **asked)


@torch.no_grad()
def test_half_precision_with_registers_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    case_model("registers").bfloat16().save_pretrained(tmp_path)
    peer = transformers.AutoModel.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ours = ours_from(read_folder(tmp_path))
    assert_alike(ours, peer, images_for(ours.config))


# Models without a published checkpoint that their classes support.
HELD: dict[str, dict[str, Any]] = {
    "swiglu without layer scale": {"mlp": "swiglu", "head": "none"},
    "layer scale with a head on the class token": {"layer_scale": 0.1},
    "class token and mean without layer scale": {"pool": "cls_mean"},
    "registers with positions": {"num_registers": 3},
    "registers without positions": {"num_registers": 3, "position_prefix": False, "head": "none"},
    "a register without position": {"num_registers": 1, "position_prefix": False},
    "a register with position and layer scale": {"num_registers": 1, "layer_scale": 0.1},
    "a class token without position": {"position_prefix": False},
    "distillation without positions": {"position_prefix": False, "distillation_token": True},
    "distillation from zero": {"distillation_token": True, "head_init": "zero"},
    "head from zero": {"head_init": "zero"},
    "pre_logits": {"head": "pre_logits"},
    "rotary without registers and layer scale": {"positions": "rotary", "head": "none"},
    "relative positions": {"positions": "relative_by_block", "norm_eps": 1e-12, "qkv_bias": "no_key"},
    "shared relative positions, then the mean": {
        **{"positions": "relative", "qkv_bias": "no_key", "layer_scale": 0.1},
        **{"pool": "mean", "class_token": True, "pool_norm": "after"},
    },
    "learned positions beside relative ones": {
        **{"positions": "relative", "absolute": "all", "mlp": "quick_gelu", "qkv_bias": "no_key"},
        "class_names": tuple("abcde"),
    },
}


@pytest.mark.parametrize("options", HELD.values(), ids=HELD)
def test_our_models_convert_to_transformers_and_back(options: dict[str, Any], tmp_path: Path) -> None:
    ours = small_model(**options)
    to_family(FAMILY, ours, preprocess_of(ours.config), tmp_path)
    peer, images = loaded_by_peer(ours.config, tmp_path), images_for(ours.config)
    assert_alike(ours, peer, images)
    again = ours_from(read_folder(tmp_path))
    assert_alike(again, peer, images)
    assert again.config.class_names == ours.config.class_names


@torch.no_grad()
def test_body_without_pooler_equals_a_classifier_without_classes(tmp_path: Path) -> None:
    ours = small_model(head="none")
    to_family(FAMILY, ours, preprocess_of(ours.config), tmp_path)
    peer, report = transformers.AutoModelForImageClassification.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not any(report.values())
    images = random_images(2, 3, 32, 32)
    assert relative_error(peer(images).logits, ours(images)) < 1e-5


REFUSED = {
    "stem 'overlap'": {"stem": "overlap"},
    "patch_bias False": {"patch_bias": False},
    "positions 'sincos_2d'": {"positions": "sincos_2d"},
    "embedding_norm True": {"embedding_norm": True},
    "norm 'post'": {"norm": "post"},
    "attention 'axial'": {"attention": "axial"},
    "class_token True (ijepa)": {"pool": "mean", "class_token": True},
    "pool 'map' and head 'linear'": {"pool": "map"},
    "pool_norm 'after'": {"pool_norm": "after"},
    "head 'mlp'": {"head": "mlp"},
    "positions 'rotary' (vit) or head 'linear' (dinov3_vit)": {"positions": "rotary"},
    "layer_scale 0.1 (vit) or head 'pre_logits' (dinov2)": {"layer_scale": 0.1, "head": "pre_logits"},
    "pool 'cls_mean' without a linear head": {"pool": "cls_mean", "head": "none"},
    "layer_scale 0.1 (vit) or mlp_ratio 1.5 (dinov2)": {"layer_scale": 0.1, "mlp_ratio": 1.5},
    "mlp 'swiglu' (vit) or mlp_ratio 2.7 (dinov2)": {"mlp": "swiglu", "mlp_ratio": 2.7},
    "image_size (32, 16) (dinov2)": {"layer_scale": 0.1, "image_size": (32, 16)},
    "distillation_token True": {"distillation_token": True, "num_registers": 2},
    "positions 'rotary'": {"distillation_token": True, "positions": "rotary"},
    "layer_scale 0.1 (deit) or distillation_token True (dinov2)": {
        "distillation_token": True,
        "layer_scale": 0.1,
    },
    "mlp 'swiglu' (deit)": {"distillation_token": True, "mlp": "swiglu"},
    "a distillation token and head 'none'": {"distillation_token": True, "head": "none"},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_model_that_transformers_cannot_run_is_rejected_naming_the_option(
    reason: str, tmp_path: Path
) -> None:
    ours = small_model(**REFUSED[reason])
    with pytest.raises(CheckpointError) as refusal:
        to_family(FAMILY, ours, preprocess_of(ours.config), tmp_path / "never")
    assert reason in str(refusal.value)
    assert not (tmp_path / "never").exists()


def test_conversion_reports_the_changed_interpolation_rule() -> None:
    assert changes(FAMILY, ViTConfig()) == ["resample 'timm' becomes 'huggingface': huggingface has no other"]
    assert changes(FAMILY, ViTConfig().replace(resample="huggingface")) == []
    assert changes(FAMILY, ViTConfig().replace(positions="rotary", head="none")) == []


def test_name_with_and_without_prefix_is_rejected(saved: Saved) -> None:
    source = read_folder(saved("vit")[1])
    source.tensors["layernorm.bias"] = torch.zeros(48)
    with pytest.raises(CheckpointError, match=r"layernorm\.bias twice"):
        FAMILY.before_reading(source)


def test_a_pooler_beside_a_classifier_is_not_read(saved: Saved) -> None:
    peer, folder = saved("vit")
    source = read_folder(folder)
    source.tensors["vit.pooler.dense.weight"] = torch.ones(48, 48)
    source.tensors["vit.pooler.dense.bias"] = torch.ones(48)
    images = random_images(2, 3, 32, 32)
    with torch.no_grad():
        assert relative_error(ours_from(source)(images), peer(images).logits) < 1e-5


@pytest.mark.parametrize(
    ("case", "changed", "reason"),
    [
        ("vit", {"hidden_act": "relu"}, "hidden_act 'relu'"),
        ("vit", {"hidden_size": "wide"}, "ValueError: invalid literal"),
        ("vit", {"layer_norm_eps": None}, "norm_eps must be a number"),
        ("vit", {"num_attention_heads": 5}, "num_heads 5"),
        ("vit", {"image_size": [32, 32, 32]}, "ValueError: too many values"),
        ("vit with pooler", {"pooler_act": "relu"}, "pooler_act 'relu'"),
        ("dinov2", {"image_size": [32, 16]}, "32x16"),
        ("dinov3", {"value_bias": False}, "query_bias, key_bias and value_bias"),
        ("dinov3, gated", {"hidden_act": "gelu"}, "hidden_act 'gelu' of a gated MLP"),
        ("vit", {"model_type": "swin"}, "model_type"),
    ],
)
def test_unsupported_configuration_is_rejected(
    case: str, changed: dict[str, Any], reason: str, saved: Saved
) -> None:
    source = FAMILY.before_reading(read_folder(saved(case)[1]))
    told = Source(name="changed", tensors=source.tensors, config={**source.config, **changed})
    with pytest.raises(UserError, match=reason), explaining_settings("changed"):
        FAMILY.read_config(told)


def test_other_models_are_not_recognized() -> None:
    for config in ({"model_type": "swin"}, {"architecture": "vit_base_patch16_224"}, {"model_type": ["vit"]}):
        assert not FAMILY.recognizes(Source(name="other", tensors={}, config=config))
    assert not FAMILY.recognizes(Source(name="timm's", tensors={"patch_embed.proj.weight": torch.zeros(1)}))


def test_class_names_survive_a_round_trip(tmp_path: Path) -> None:
    names = ("crane", "drake", "crane", "1", "", "ö", "x")  # ImageNet has two cranes
    case_model("vit", id2label=dict(enumerate(names))).save_pretrained(tmp_path / "theirs")
    ours = ours_from(read_folder(tmp_path / "theirs"))
    assert ours.config.class_names == names
    to_family(FAMILY, ours, preprocess_of(ours.config), tmp_path / "back")
    assert loaded_by_peer(ours.config, tmp_path / "back").config.id2label == dict(enumerate(names))


def test_generic_class_names_are_ignored(saved: Saved) -> None:
    source = read_folder(saved("vit")[1])
    assert source.config["id2label"]["6"] == "LABEL_6"
    assert ours_from(source).config.class_names == ()


def test_class_names_are_ordered_by_number(tmp_path: Path) -> None:
    case_model("vit", num_labels=12).save_pretrained(tmp_path)
    numbers = sorted(map(str, range(12)))  # "10" before "2", as in JSON with sorted keys
    file = tmp_path / "config.json"
    names = {"id2label": {number: f"class {number}" for number in numbers}}
    file.write_text(json.dumps(json.loads(file.read_text()) | names))
    ours = ours_from(read_folder(tmp_path))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path).id2label
    assert ours.config.class_names == tuple(theirs[index] for index in range(12))
    assert ours.config.class_names[2] == "class 2"


@pytest.mark.parametrize("count", [6, 8])
def test_names_of_a_different_number_of_classes_are_ignored(count: int, saved: Saved) -> None:
    source = FAMILY.before_reading(read_folder(saved("vit")[1]))
    names = {str(index): f"class {index}" for index in range(count)}
    told = Source(name="renamed", tensors=source.tensors, config={**source.config, "id2label": names})
    assert FAMILY.read_config(told).class_names == ()


def test_probabilities_of_several_labels_are_the_sigmoids_of_transformers(
    saved: Saved, tmp_path: Path
) -> None:
    theirs, read = saved("vit, several labels")
    ours = small_model(outputs="independent", thresholds=(0.2, 0.4, 0.5, 0.6, 0.7))
    save_pretrained(ours, tmp_path, format="huggingface")
    written = loaded_by_peer(ours.config, tmp_path)
    assert written.config.problem_type == "multi_label_classification"
    for folder, peer in ((read, theirs), (tmp_path, written)):
        engine = TorchEngine(from_pretrained(folder), precision="fp32", device="cpu")
        assert engine.thresholds
        pixels = torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8)
        expected = peer(engine.preprocess.normalize(pixels)).logits.sigmoid().detach()
        torch.testing.assert_close(engine.probabilities(pixels), expected, atol=1e-5, rtol=0)


def test_siglip_without_its_head_pools_by_the_mean(tmp_path: Path) -> None:
    peer = encoder_model("SiglipVisionModel", vision_use_head=False)
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
    assert_alike(ours, loaded_by_peer(ours.config, tmp_path / "written"), images_for(ours.config))


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
    encoder_model("ViTModel", **changed).save_pretrained(tmp_path)
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
    encoder_model("ViTModel").save_pretrained(tmp_path)
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
        ({"vision_config": [1]}, "TypeError: .* not a mapping"),
        ({"vision_config": {"hidden_act": "relu"}}, "hidden_act 'relu'"),
        ({"vision_config": {"hidden_act": ["gelu"]}}, "hidden_act"),
        ({"vision_config": {"image_size": None}}, "TypeError: cannot unpack"),
        ({"vision_config": {"hidden_size": float("inf")}}, "OverflowError: "),
        ({"vision_config_dict": "B/16"}, "TypeError: .* not a mapping"),
        ({"vision_config": {"num_attention_heads": "two"}}, "num_heads"),
    ],
)
def test_broken_configuration_of_a_whole_model_is_rejected(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    encoder_model("SiglipModel").save_pretrained(tmp_path)
    source = read_folder(tmp_path)
    with pytest.raises(UserError, match=message), explaining_settings("broken"):
        ours_from(Source(name="broken", tensors=source.tensors, config={**source.config, **config}))


def test_parts_of_a_whole_model_do_not_overrule_what_describes_the_whole(tmp_path: Path) -> None:
    names = {str(index): name for index, name in enumerate("abcdef")}
    encoder_model("SiglipForImageClassification").save_pretrained(tmp_path)
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
    encoder_model("CLIPModel").save_pretrained(tmp_path)
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
    encoder_model(name, seed=2).save_pretrained(tmp_path / "theirs")
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
    assert_same_state(back, ours)


@pytest.mark.parametrize(
    "case",
    [
        *("vit", "deit", "dinov2 classifier", "registers, classifier", "dinov3", "CLIPVisionModel-0"),
        *("SiglipVisionModel-0", "IJepaModel-0", "ViTMAEModel-0", "ViTMSNModel-0"),
    ],
)
def test_empty_configuration_is_that_of_the_defaults_of_its_class(case: str, saved: Saved) -> None:
    peer, folder = saved(case)
    source, defaults = read_folder(folder), type(peer.config)()
    told = Source(name="silent", tensors=source.tensors, config={"model_type": source.config["model_type"]})
    config = FAMILY.read_config(FAMILY.before_reading(told))
    assert (config.embed_dim, config.depth) == (defaults.hidden_size, defaults.num_hidden_layers)
    assert config.num_heads == defaults.num_attention_heads
    assert config.image_hw == (defaults.image_size,) * 2
    assert config.patch_hw == (defaults.patch_size,) * 2
    assert config.norms.norm_eps == defaults.layer_norm_eps
    assert config.block.layer_scale == getattr(defaults, "layerscale_value", None)
    assert config.block.qkv_bias == ("no_key" if case == "dinov3" else "all")
    assert config.mlp_dim == getattr(defaults, "intermediate_size", 4 * defaults.hidden_size)
    assert config.readout.num_registers == (case == "deit") + getattr(defaults, "num_register_tokens", 0)
    mlps = {"quick_gelu": "quick_gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
    assert config.block.mlp == mlps[defaults.hidden_act]


# BEiT


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
def test_beit_that_transformers_has_not_is_rejected_with_the_option(
    options: dict[str, Any], reason: str
) -> None:
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
def test_beit_that_we_have_not_is_rejected(options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    config = transformers.BeitConfig(**{**SIZES, **MLP, **options})
    transformers.BeitForImageClassification(config).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=reason):
        from_pretrained(tmp_path)


def test_masked_pre_training_of_beit_gives_the_body(tmp_path: Path) -> None:
    config = transformers.BeitConfig(**SIZES, **MLP, **OWN, vocab_size=9)
    peer = randomize(transformers.BeitForMaskedImageModeling(config)).eval()
    peer.save_pretrained(tmp_path)
    ours = from_pretrained(tmp_path).double()
    images = images_for(ours.config).double()
    with torch.no_grad():
        body = peer.double().beit(images).last_hidden_state
        assert relative_error(ours.forward_features(images), peer.layernorm(body)) < 1e-10
