"""Models of transformers, in its own folders, against our loaded models, both ways."""

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.model import random_images, randomize, small_model
from tests.peers.comparison import relative_error
from vitascope.data.preprocess import Preprocess
from vitascope.errors import UserError
from vitascope.model.config import ViTConfig
from vitascope.model.vit import VisionTransformer
from vitascope.predict.engine import TorchEngine
from vitascope.weights.families.huggingface.family import HuggingFace
from vitascope.weights.files import CheckpointError
from vitascope.weights.loading import from_pretrained, save_pretrained
from vitascope.weights.mapping import Source, changes, from_family, to_family

transformers = pytest.importorskip(
    "transformers", minversion="5", reason="transformers 5 is not installed (vitascope[peers])"
)
transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

FAMILY = HuggingFace()
Saved = Callable[[str], tuple[nn.Module, Path]]
SIZES = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
MLP = {"intermediate_size": 80}
SEVEN = {"num_labels": 7}

VIT, DEIT, TEACHER = (
    "ViTForImageClassification",
    "DeiTForImageClassification",
    "DeiTForImageClassificationWithTeacher",
)
DINOV2, REGISTERS = "Dinov2ForImageClassification", "Dinov2WithRegistersForImageClassification"
NO_BIAS = {"query_bias": False, "key_bias": False, "value_bias": False}
ALL_BIASES = {"query_bias": True, "key_bias": True, "value_bias": True}
GATED = {"use_gated_mlp": True, "hidden_act": "silu"}

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
}


def peer_model(case: str, **changes: Any) -> nn.Module:
    """transformers' model of a case, every parameter random."""
    name, options, _ = CASES[case]
    options = {**SIZES, **SEVEN, **options, **changes}
    pooling = (
        {"add_pooling_layer": options.pop("add_pooling_layer")} if "add_pooling_layer" in options else {}
    )
    cls = getattr(transformers, name)
    config = cls.config_class(**options, attn_implementation="eager")  # the one that returns weights
    return randomize(cls(config, **pooling)).eval()


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """transformers' model of a case and its saved folder, both only to read."""

    @functools.cache
    def save(case: str) -> tuple[nn.Module, Path]:
        peer, folder = peer_model(case), tmp_path_factory.mktemp("theirs")
        peer.save_pretrained(folder)
        return peer, folder

    return save


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
    peer, report = automatic.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager", **options
    )
    assert not any(report.values()), report
    return peer.eval()


def outputs(peer: nn.Module, images: Tensor, **options: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    """transformers' logits or pooled features, and its attention weights."""
    result = peer(images, output_attentions=True, **options)
    logits = result.get("logits")
    if logits is None:
        logits = result.get("pooler_output")
    return result.last_hidden_state[:, 0] if logits is None else logits, result.attentions


def assert_agrees(ours: VisionTransformer, peer: nn.Module) -> None:
    images = random_images(2, ours.config.in_channels, *ours.config.image_hw)
    expected, attention = outputs(peer, images)
    assert relative_error(ours(images), expected) < 1e-5
    trace = ours.trace(images, attention=True)
    assert relative_error(trace["logits"], expected) < 1e-5
    assert trace.attention is not None
    assert len(trace.attention) == len(attention) == ours.config.depth
    for our_weights, their_weights in zip(trace.attention, attention, strict=True):
        assert relative_error(our_weights, their_weights) < 1e-5


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_outputs_and_attention_equal_transformers_both_ways(case: str, saved: Saved, tmp_path: Path) -> None:
    peer, folder = saved(case)
    ours = ours_from(read_folder(folder))
    for option, value in CASES[case][2].items():
        assert ours.config.option(option) == value, option
    assert_agrees(ours, peer)

    to_family(FAMILY, ours, preprocess_of(ours.config), tmp_path / "back")
    assert_agrees(ours, loaded_by_peer(ours.config, tmp_path / "back"))

    again = ours_from(read_folder(tmp_path / "back"))
    assert again.config == FAMILY.fixed_there(ours.config)
    expected = ours.state_dict()
    assert again.state_dict().keys() == expected.keys()
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("case", CASES)
def test_in_memory_names_of_version_5_are_read(case: str, saved: Saved) -> None:
    peer, folder = saved(case)
    expected = ours_from(read_folder(folder)).state_dict()
    in_memory = Source(name="in memory", tensors=peer.state_dict(), config=peer.config.to_dict())
    state = ours_from(in_memory).state_dict()
    assert state.keys() == expected.keys()
    for name, tensor in state.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("case", ["vit", "deit with teacher", "dinov2 classifier", "registers, classifier"])
def test_classifier_without_its_prefix_is_read(case: str, saved: Saved) -> None:
    source = read_folder(saved(case)[1])
    prefix = f"{source.config['model_type']}."
    bare = {name.removeprefix(prefix): tensor for name, tensor in source.tensors.items()}
    assert bare.keys() != source.tensors.keys()
    expected = ours_from(source).state_dict()
    for name, tensor in (
        ours_from(Source(name="bare", tensors=bare, config=source.config)).state_dict().items()
    ):
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("case", ["vit", "deit", "deit with teacher", "dinov2", "registers", "dinov3"])
@pytest.mark.parametrize("size", [(48, 48), (16, 40), (24, 16), (64, 16)])
@torch.no_grad()
def test_other_image_sizes_equal_transformers(case: str, size: tuple[int, int], saved: Saved) -> None:
    peer, folder = saved(case)
    images = random_images(2, 3, *size)
    asked = {"interpolate_pos_encoding": True} if case.startswith(("vit", "deit")) else {}
    expected, attention = outputs(peer, images, **asked)
    ours = ours_from(read_folder(folder))
    assert relative_error(ours(images), expected) < 1e-5
    trace = ours.trace(images, attention=True)
    assert trace.attention is not None
    for our_weights, their_weights in zip(trace.attention, attention, strict=True):
        assert relative_error(our_weights, their_weights) < 1e-5


@torch.no_grad()
def test_half_precision_with_registers_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    peer_model("registers").bfloat16().save_pretrained(tmp_path)
    peer = transformers.AutoModel.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    assert_agrees(ours_from(read_folder(tmp_path)), peer.eval())


# Models without a published checkpoint that their classes support.
HELD = {
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
}


@pytest.mark.parametrize("options", HELD.values(), ids=HELD)
@torch.no_grad()
def test_our_models_convert_to_transformers_and_back(options: dict[str, Any], tmp_path: Path) -> None:
    ours = small_model(**options)
    to_family(FAMILY, ours, preprocess_of(ours.config), tmp_path)
    peer = loaded_by_peer(ours.config, tmp_path)
    assert_agrees(ours, peer)
    assert_agrees(ours_from(read_folder(tmp_path)), peer)


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
        assert relative_error(ours_from(source)(images), outputs(peer, images)[0]) < 1e-5


@pytest.mark.parametrize(
    ("case", "changed", "reason"),
    [
        ("vit", {"hidden_act": "relu"}, "hidden_act 'relu'"),
        ("vit", {"hidden_size": "wide"}, "hidden_size 'wide'"),
        ("vit", {"hidden_size": 0}, "hidden_size 0"),
        ("vit", {"layer_norm_eps": None}, "layer_norm_eps None"),
        ("vit", {"num_attention_heads": 5}, "num_heads 5"),
        ("vit", {"image_size": [32, 32, 32]}, "not a size"),
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
    with pytest.raises(UserError, match=reason):
        FAMILY.read_config(told)


def test_without_config_json_the_architecture_must_be_given(saved: Saved) -> None:
    peer, folder = saved("deit")
    whole = FAMILY.before_reading(read_folder(folder))
    bare = Source(name="model.safetensors", tensors=load_file(folder / "model.safetensors"))
    assert FAMILY.recognizes(bare)
    bare = FAMILY.before_reading(bare)
    with pytest.raises(CheckpointError, match=r"config=ViTConfig\("):
        FAMILY.read_config(bare)
    config = FAMILY.read_config(whole)
    model = VisionTransformer(config).eval()
    model.load_state_dict(from_family(FAMILY, bare, config))
    with torch.no_grad():
        assert_agrees(model, peer)


def test_other_models_are_not_recognized() -> None:
    for config in ({"model_type": "swin"}, {"architecture": "vit_base_patch16_224"}, {"model_type": ["vit"]}):
        assert not FAMILY.recognizes(Source(name="other", tensors={}, config=config))
    assert not FAMILY.recognizes(Source(name="timm's", tensors={"patch_embed.proj.weight": torch.zeros(1)}))


@pytest.mark.parametrize("case", ["vit", "deit", "dinov2 classifier", "registers, classifier", "dinov3"])
def test_empty_configuration_means_the_defaults_of_its_class(case: str, saved: Saved) -> None:
    source = read_folder(saved(case)[1])
    defaults = getattr(transformers, CASES[case][0]).config_class()
    told = Source(name="silent", tensors=source.tensors, config={"model_type": source.config["model_type"]})
    config = FAMILY.read_config(FAMILY.before_reading(told))
    assert config.embed_dim == defaults.hidden_size
    assert config.depth == defaults.num_hidden_layers
    assert config.num_heads == defaults.num_attention_heads
    assert config.image_size == (defaults.image_size,) * 2
    assert config.patch_size == (defaults.patch_size,) * 2
    assert config.norms.norm_eps == defaults.layer_norm_eps
    assert config.block.layer_scale == getattr(defaults, "layerscale_value", None)
    assert config.block.qkv_bias == ("no_key" if case == "dinov3" else "all")
    assert config.mlp_dim == getattr(defaults, "intermediate_size", 4 * defaults.hidden_size)
    assert config.readout.num_registers == (case == "deit") + getattr(defaults, "num_register_tokens", 0)


def test_class_names_survive_a_round_trip(tmp_path: Path) -> None:
    names = ("crane", "drake", "crane", "1", "", "ö", "x")  # ImageNet has two cranes
    peer_model("vit", id2label=dict(enumerate(names))).save_pretrained(tmp_path / "theirs")
    ours = ours_from(read_folder(tmp_path / "theirs"))
    assert ours.config.class_names == names
    to_family(FAMILY, ours, preprocess_of(ours.config), tmp_path / "back")
    assert loaded_by_peer(ours.config, tmp_path / "back").config.id2label == dict(enumerate(names))


def test_generic_class_names_are_ignored(saved: Saved) -> None:
    source = read_folder(saved("vit")[1])
    assert source.config["id2label"]["6"] == "LABEL_6"
    assert ours_from(source).config.class_names == ()


def test_class_names_are_ordered_by_number(tmp_path: Path) -> None:
    peer_model("vit", num_labels=12).save_pretrained(tmp_path)
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


def a_picture(width: int, height: int, grain: int = 4) -> Image.Image:
    """Noise with spots of `grain` pixels."""
    values = np.random.default_rng(0).integers(0, 256, (height // grain, width // grain, 3), dtype=np.uint8)
    return Image.fromarray(values).resize((width, height), Image.Resampling.BICUBIC)


def read_preprocess(told: Mapping[str, Any], kind: str = "vit", **options: Any) -> Preprocess:
    source = Source(name="told", tensors={}, config={"model_type": kind}, preprocessor=told)
    return FAMILY.read_preprocess(source, ViTConfig.from_dict({"image_size": 64, "patch_size": 8, **options}))


PROCESSORS: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("ViTImageProcessorPil", {"size": {"height": 64, "width": 64}}),
    "vit, oblong": ("ViTImageProcessorPil", {"size": {"height": 48, "width": 64}, "resample": 3}),
    "vit, not normalized": (
        "ViTImageProcessorPil",
        {"size": {"height": 64, "width": 64}, "do_normalize": False},
    ),
    "vit, not rescaled": (
        "ViTImageProcessorPil",
        {
            "size": {"height": 64, "width": 64},
            "do_rescale": False,
            "image_mean": [100, 110, 120],
            "image_std": [50] * 3,
        },
    ),
    "vit, to [-1, 1]": (
        "ViTImageProcessorPil",
        {
            "size": {"height": 64, "width": 64},
            "rescale_factor": 1 / 127.5,
            "image_mean": [1] * 3,
            "image_std": [1] * 3,
        },
    ),
    "vit by default": ("ViTImageProcessorPil", {}),
    "deit": (
        "DeiTImageProcessorPil",
        {
            "size": {"height": 72, "width": 72},
            "crop_size": {"height": 64, "width": 64},
            "image_mean": [0.4, 0.5, 0.6],
        },
    ),
    "deit by default": ("DeiTImageProcessorPil", {}),
    "deit without crop": (
        "DeiTImageProcessorPil",
        {"size": {"height": 64, "width": 64}, "do_center_crop": False, "resample": 1},
    ),
    "bit": (
        "BitImageProcessorPil",
        {
            "size": {"shortest_edge": 72},
            "crop_size": {"height": 64, "width": 64},
            "image_std": [0.2, 0.3, 0.25],
        },
    ),
    "bit by default": ("BitImageProcessorPil", {}),
    "dinov3 by default": ("DINOv3ViTImageProcessor", {}),
}


def both_preprocessings(case: str, folder: Path) -> tuple[Preprocess, Any]:
    """Our preprocessing from a processor's file, and the processor."""
    name, options = PROCESSORS[case]
    if not name.endswith("Pil"):
        pytest.importorskip("torchvision", reason=f"{name} needs torchvision (vitascope[peers])")
    processor = getattr(transformers, name)(**options)
    processor.save_pretrained(folder)
    return read_preprocess(json.loads((folder / "preprocessor_config.json").read_text())), processor


def differences(ours: Preprocess, processor: Any, picture: Image.Image) -> Tensor:
    """The difference in levels of 256, per pixel."""
    expected = processor(picture, return_tensors="pt")["pixel_values"]
    actual = ours.normalize(torch.from_numpy(ours.pixels(picture))[None])
    assert actual.shape == expected.shape
    return (actual - expected).abs() * 255 * torch.tensor(ours.std).view(-1, 1, 1)


@pytest.mark.parametrize("case", PROCESSORS)
def test_preprocessing_of_a_square_picture_equals_transformers(case: str, tmp_path: Path) -> None:
    ours, processor = both_preprocessings(case, tmp_path)
    levels = differences(ours, processor, a_picture(288, 288))
    assert levels.max() < 1.01  # of 256: the steps round in between


@pytest.mark.parametrize("case", [case for case in PROCESSORS if case.endswith("by default")])
def test_empty_processor_file_means_the_processors_defaults(case: str, tmp_path: Path) -> None:
    whole, _ = both_preprocessings(case, tmp_path)
    told = json.loads((tmp_path / "preprocessor_config.json").read_text())
    assert read_preprocess({"image_processor_type": told["image_processor_type"]}) == whole


@pytest.mark.parametrize("step", ["do_resize", "do_center_crop", "do_rescale", "do_normalize"])
def test_null_step_is_skipped_as_in_transformers(step: str, tmp_path: Path) -> None:
    sides = {"height": 64, "width": 64}
    cropped = step != "do_resize"  # a crop requires it
    transformers.DeiTImageProcessorPil(
        size={"height": 72, "width": 72} if step != "do_center_crop" else sides,
        crop_size={"height": 48, "width": 48},
        do_center_crop=cropped,
    ).save_pretrained(tmp_path)
    file = tmp_path / "preprocessor_config.json"
    told = json.loads(file.read_text()) | {step: None}
    file.write_text(json.dumps(told))
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    assert differences(read_preprocess(told), processor, a_picture(64, 64)).max() < 1.01


@pytest.mark.parametrize("shape", [(288, 200), (200, 288)])
@pytest.mark.parametrize("case", ["vit", "vit, oblong", "bit"])
def test_preprocessing_of_an_oblong_picture_equals_transformers(
    case: str, shape: tuple[int, int], tmp_path: Path
) -> None:
    ours, processor = both_preprocessings(case, tmp_path)
    assert differences(ours, processor, a_picture(*shape)).max() < 0.01


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (  # the file of facebook/deit-base-distilled-patch16-224
            {
                "feature_extractor_type": "DeiTFeatureExtractor",
                "crop_size": 224,
                "do_center_crop": True,
                "do_normalize": True,
                "do_resize": True,
                "image_mean": [0.485, 0.456, 0.406],
                "image_std": [0.229, 0.224, 0.225],
                "resample": 3,
                "size": 256,
            },
            {
                "image_size": (224, 224),
                "resize": "squash",
                "resize_to": (256, 256),
                "mean": (0.485, 0.456, 0.406),
            },
        ),
        (  # and of facebook/dino-vits16
            {"feature_extractor_type": "ViTFeatureExtractor", "resample": 2, "size": 224},
            {"image_size": (224, 224), "resize": "squash", "interpolation": "bilinear"},
        ),
        (
            {"image_processor_type": "BitImageProcessor", "size": 96, "crop_size": 64},
            {"image_size": (64, 64), "resize": "crop", "resize_to": (96, 96)},
        ),
        (
            {"image_processor_type": "BitImageProcessor", "size": 96, "do_center_crop": False},
            {"image_size": (96, 96), "resize": "crop", "resize_to": (96, 96)},
        ),
        ({"do_resize": False}, {"image_size": (64, 64), "resize": "squash"}),
        ({"image_processor_type": "ViTImageProcessorFast", "size": [48, 64]}, {"image_size": (48, 64)}),
        ({"do_resize": True, "size": None, "crop_size": None}, {"image_size": (224, 224)}),
    ],
)
def test_older_processor_files_are_read(told: dict[str, Any], expected: dict[str, Any]) -> None:
    ours = read_preprocess(told)
    assert {name: getattr(ours, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ({"image_processor_type": "ConvNextImageProcessor"}, "ConvNextImageProcessor"),
        ({"resample": 4}, "resample 4"),
        ({"resample": [3]}, "resample"),
        ({"size": {"longest_edge": 3}}, "not a size"),
        ({"size": 0}, "0 is not a size"),
        ({"do_center_crop": True}, "None is not a size"),
        ({"do_center_crop": True, "do_resize": False, "crop_size": 64}, "crops but does not resize"),
        ({"size": {"shortest_edge": 64, "longest_edge": 96}}, "bounds both edges"),
        ({"image_mean": [0.1, 0.2]}, "does not fit a model of 3 channels"),
        ({"rescale_factor": 0}, "rescale_factor 0"),
        ({"rescale_factor": {}}, "rescale_factor {}"),
        ({"do_pad": True, "pad_size": {"height": 256, "width": 256}}, "no padding"),
        ({"image_std": "half"}, "not numbers"),
    ],
)
def test_unsupported_processors_are_rejected(told: dict[str, Any], reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        read_preprocess(told)


def test_equal_statistics_apply_to_one_channel() -> None:
    ours = read_preprocess({"image_mean": [0.5, 0.5, 0.5]}, in_channels=1)
    assert (ours.channels, ours.mean, ours.std) == (1, (0.5,), (0.5,))


@pytest.mark.parametrize(
    ("kind", "resize", "resize_to", "interpolation", "mean"),
    [
        ("vit", "squash", None, "bilinear", 0.5),
        ("deit", "crop", (73, 73), "bicubic", 0.485),
        ("dinov2", "crop", (73, 73), "bicubic", 0.485),
        ("dinov2_with_registers", "crop", (73, 73), "bicubic", 0.485),
        ("dinov3_vit", "squash", None, "bilinear", 0.485),
        ("clip", "crop", (64, 64), "bicubic", 0.48145466),
        ("siglip_vision_model", "squash", None, "bicubic", 0.5),
        ("vit_mae", "crop", (73, 73), "bicubic", 0.485),
        ("vit_msn", "crop", (73, 73), "bicubic", 0.485),
        ("ijepa", "crop", (73, 73), "bicubic", 0.485),
    ],
)
def test_published_preprocessing_is_the_default_without_a_file(
    kind: str, resize: str, resize_to: tuple[int, int] | None, interpolation: str, mean: float
) -> None:
    ours = read_preprocess({}, kind)
    assert ours.image_size == (64, 64)
    assert (ours.resize, ours.resize_to, ours.interpolation) == (resize, resize_to, interpolation)
    assert ours.mean[0] == mean
    assert read_preprocess({}, kind, in_channels=1).mean == (0.5,)


@pytest.mark.parametrize(
    "options",
    [
        {"resize": "squash", "interpolation": "bilinear"},
        {"resize": "squash", "image_size": (64, 32), "interpolation": "lanczos"},
        {"resize": "squash", "resize_to": (75, 70)},
        {"resize_to": (73, 73), "mean": (0.4, 0.5, 0.6), "std": (0.2, 0.3, 0.25)},
        {"resize_to": (64, 64), "interpolation": "nearest"},
        {"resize_to": (73, 73), "image_size": (64, 40)},
    ],
)
def test_written_preprocessing_equals_their_processors(options: dict[str, Any], tmp_path: Path) -> None:
    crop_rounding = "down" if "resize_to" in options else "even"
    preprocess = Preprocess(**{"image_size": (64, 64), "crop_rounding": crop_rounding, **options})
    to_family(FAMILY, small_model(), preprocess, tmp_path)
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    assert differences(preprocess, processor, a_picture(288, 211)).max() < 0.01
    again = FAMILY.read_preprocess(read_folder(tmp_path), small_model().config)
    assert again == preprocess


def test_a_crop_that_is_not_square_is_rejected_before_anything_is_written(tmp_path: Path) -> None:
    preprocess = Preprocess(image_size=(64, 32), resize="crop")
    with pytest.raises(CheckpointError, match=r'64x32.*resize="squash"'):
        to_family(FAMILY, small_model(image_size=(64, 32)), preprocess, tmp_path)
    assert not list(tmp_path.iterdir())


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
        assert engine.several
        pixels = torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8)
        expected = outputs(peer, engine.preprocess.normalize(pixels))[0].sigmoid()
        torch.testing.assert_close(engine.probabilities(pixels), expected, atol=1e-5, rtol=0)
