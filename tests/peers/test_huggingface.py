"""transformers' models, in its own folders and within whole models, against ours, both ways."""

import dataclasses
import functools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.contracts import family as contract
from tests.contracts.family import Answer, Example, Library, check_family, check_refused, check_written, load
from tests.models import random_images, randomize, small_model
from tests.models.weights import assert_same_state, edit_config
from tests.peers.comparison import relative_error
from vitascope.errors import UserError
from vitascope.models.engines.engine import TorchEngine
from vitascope.models.preprocess import Preprocess
from vitascope.models.vit import VisionTransformer
from vitascope.models.weights.families.huggingface.family import KINDS, HuggingFace, reason
from vitascope.models.weights.files import CheckpointError
from vitascope.models.weights.identification import identify, open_source
from vitascope.models.weights.loading import from_pretrained, load_source, save_pretrained
from vitascope.models.weights.mapping import Source, misfit

transformers = pytest.importorskip(
    "transformers", minversion="5", reason="transformers 5 is not installed (vitascope[peers])"
)
transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

FAMILY = HuggingFace()
SIZES: dict[str, Any] = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"image_size": 32, "patch_size": 8}
MLP = {"intermediate_size": 80}
TEXT = {"vocab_size": 9, "max_position_embeddings": 5, "hidden_size": 8, "intermediate_size": 12}
TEXT |= {"num_hidden_layers": 1, "num_attention_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
NAMES = ("crane", "drake", "crane", "1", "", "ö", "x")  # ImageNet has two cranes

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

# transformers' models and their options.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": (VIT, MLP),
    "vit, image not square, tanh": (VIT, {**MLP, "image_size": [16, 40], "hidden_act": "gelu_pytorch_tanh"}),
    "vit, patch not square, new gelu": (VIT, {**MLP, "patch_size": [8, 16], "hidden_act": "gelu_new"}),
    "vit, one channel, quick gelu": (VIT, {**MLP, "num_channels": 1, "hidden_act": "quick_gelu"}),
    "vit without qkv bias, epsilon that matters": (VIT, {**MLP, "qkv_bias": False, "layer_norm_eps": 0.1}),
    "vit, several labels": (VIT, {**MLP, "problem_type": "multi_label_classification"}),
    "vit, class names": (VIT, {**MLP, "id2label": dict(enumerate(NAMES))}),
    "vit with pooler": ("ViTModel", MLP),
    "vit without pooler": ("ViTModel", {**MLP, "add_pooling_layer": False}),
    "deit": (DEIT, MLP),
    "deit with teacher": (TEACHER, MLP),
    "deit with pooler": ("DeiTModel", MLP),
    "deit without pooler": ("DeiTModel", {**MLP, "add_pooling_layer": False}),
    "dinov2": ("Dinov2Model", {}),
    "dinov2 classifier": (DINOV2, {"layerscale_value": 0.1}),
    "dinov2, swiglu of a rounded width": (
        DINOV2,
        {"use_swiglu_ffn": True, "hidden_size": 40, "patch_size": [8, 16]},
    ),
    "dinov2 without mask token": ("Dinov2Model", {"use_mask_token": False, "qkv_bias": False}),
    "registers": ("Dinov2WithRegistersModel", {"num_register_tokens": 3}),
    "registers, classifier": (REGISTERS, {"use_swiglu_ffn": True}),
    "registers, none of them": (REGISTERS, {"num_register_tokens": 0}),
    "dinov3": ("DINOv3ViTModel", {**MLP, "num_register_tokens": 4}),
    "dinov3, gated": ("DINOv3ViTModel", {**MLP, **GATED, "rope_theta": 50.0}),
    "dinov3, gated, without biases": (
        "DINOv3ViTModel",
        {**MLP, **GATED, **NO_BIAS, "num_register_tokens": 2},
    ),
    "dinov3, all biases, not square": (
        "DINOv3ViTModel",
        {**MLP, **ALL_BIASES, "image_size": [16, 40], "layerscale_value": 0.1},
    ),
    "beit": (BEIT, {**MLP, **OWN, "use_mask_token": True}),
    "beit, class token": (BEIT, {**MLP, **SHARED, **CLASS_TOKEN}),
    "beit, learned positions": (BEIT, {**MLP, **ABSOLUTE, "layer_scale_init_value": 0.0}),
    "beit, learned positions too": (BEIT, {**MLP, **OWN, **ABSOLUTE, "hidden_act": "gelu_pytorch_tanh"}),
    "beit, body": ("BeitModel", {**MLP, **OWN}),
    "beit, body, class token": ("BeitModel", {**MLP, **SHARED, **CLASS_TOKEN}),
    "data2vec": (DATA2VEC, {**MLP, **OWN}),
    "data2vec, shared": (DATA2VEC, {**MLP, **SHARED, **CLASS_TOKEN}),
    "siglip without its head": ("SiglipVisionModel", {**MLP, "vision_use_head": False}),
    "data2vec, body": ("Data2VecVisionModel", {**MLP, **OWN}),
}
# Options that outputs of one size do not show.
EXPECTED: dict[str, dict[str, Any]] = {
    "vit": {"resample": "huggingface", "class_names": ()},
    "vit, several labels": {"outputs": "independent", "thresholds": ()},
    "vit, class names": {"class_names": NAMES},
    "dinov2": {"resample": "huggingface"},
    "registers": {"resample": "timm"},
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
    name, options = CASES[case]
    options = {**SIZES, "num_labels": 7, **options, **changes}
    pooling = {key: options.pop(key) for key in ("add_pooling_layer",) if key in options}
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


class Transformers(Library):
    family = "huggingface"

    def save(self, peer: nn.Module, folder: Path) -> Path:
        peer.save_pretrained(folder)
        return folder

    def load(self, folder: Path, ours: VisionTransformer, peer: Any) -> nn.Module:
        """Load with transformers' automatic classes; every weight must be found and none left over."""
        config, written = ours.config, json.loads((folder / "config.json").read_text())
        automatic, options = transformers.AutoModelForImageClassification, {}
        if config.readout.head in ("none", "pre_logits"):
            automatic = transformers.AutoModel
            if written["model_type"] in ("vit", "deit"):
                options = {"add_pooling_layer": config.readout.head == "pre_logits"}
        elif config.outputs == "embedding":  # no automatic class has the projection
            automatic = getattr(transformers, written["architectures"][0])
        loaded, report = automatic.from_pretrained(folder, output_loading_info=True, **options)
        assert not any(report.values()), report
        if config.class_names:
            assert loaded.config.id2label == dict(enumerate(config.class_names))
        return loaded.eval()

    def carried(self, ours: VisionTransformer) -> Preprocess:
        channels = ours.config.in_channels
        numbers = {"mean": (0.1, 0.2, 0.3, 0.4)[:channels], "std": (0.5, 0.6, 0.7, 0.8)[:channels]}
        return Preprocess(image_size=ours.config.image_hw, channels=channels, resize="squash", **numbers)

    def answer(self, peer: nn.Module, images: Tensor, ours: VisionTransformer) -> Answer:
        name, config = type(peer).__name__, ours.config
        grows = images.shape[2:] != config.image_hw and not name.startswith(("Dino", "DINO"))
        asked = {"interpolate_pos_encoding": True} if grows else {}
        peer.double().set_attn_implementation("sdpa")
        result = run(peer, images, **asked, output_hidden_states=True)
        assert len(result["tokens"]) == config.depth + 1
        peer.set_attn_implementation("eager")
        attention = run(peer, images, **asked, output_attentions=True)["attention"]
        maps = result["outputs"] if isinstance(result["outputs"], tuple) else ()  # of a backbone
        return Answer(
            outputs=None if maps else result["outputs"],
            map=maps[-1] if maps else None,
            blocks=result["tokens"][1:-1],  # some classes have their last norm on the last
            attention=() if name.startswith("Data2Vec") else attention,  # whose are None
        )


def run(peer: nn.Module, images: Tensor, **asked: Any) -> dict[str, Any]:
    """transformers' outputs of images: the head's or the pooled ones, each block's tokens, the attention."""
    name = type(peer).__name__
    if hasattr(peer, "get_image_features"):
        result = peer.get_image_features(images, **asked)
        outputs = result.pooler_output
    elif "MAE" in name:
        body = peer.vit if hasattr(peer, "vit") else peer
        patches = images.shape[2] // body.config.patch_size * (images.shape[3] // body.config.patch_size)
        result = body(images, noise=torch.arange(float(patches)).expand(len(images), -1), **asked)
        outputs = result.last_hidden_state[:, 0]
    else:
        result = (peer.base_model if name.endswith("Modeling") else peer)(images, **asked)
        known = (result.get(key) for key in ("logits", "image_embeds", "pooler_output", "feature_maps"))
        outputs = next((value for value in known if value is not None), None)
        if outputs is None:
            last = result.last_hidden_state
            outputs = last[:, 0]
            if name.startswith(("IJepa", "Aimv2", "Siglip")):
                outputs = last.mean(dim=1)
            if name.startswith("Data2Vec"):
                outputs = last[:, 1:].mean(dim=1)
    return {"outputs": outputs, "tokens": result.hidden_states, "attention": result.attentions}


def in_memory(peer: nn.Module, source: Source) -> Source:
    return Source(name="in memory", tensors=peer.state_dict(), config=peer.config.to_dict())


def without_prefix(peer: nn.Module, source: Source) -> Source:
    """A classifier's names of its body without the prefix of the class."""
    found = open_source(source.folder)
    bare = found.renamed(lambda name: name.removeprefix(f"{source.config['model_type']}."))
    assert bare.tensors.keys() != found.tensors.keys()
    return bare


def of_version_4(peer: nn.Module, source: Source) -> Source:
    """A vision model with the prefix and the buffer that version 4 stored."""
    old = open_source(source.folder).renamed(lambda name: f"vision_model.{name}")
    old.tensors["vision_model.embeddings.position_ids"] = torch.arange(5)[None]
    return old


def with_pooler(peer: nn.Module, source: Source) -> Source:
    """A pooler beside a classifier, which does not read it."""
    pooler = {"vit.pooler.dense.weight": torch.ones(48, 48), "vit.pooler.dense.bias": torch.ones(48)}
    return contract.with_tensors(open_source(source.folder), pooler)


LIBRARY = Transformers()
OTHERS: dict[str, dict[str, Callable[[Any, Source], Source]]] = {
    "vit": {"no prefix": without_prefix, "a pooler": with_pooler},
    "deit with teacher": {"no prefix": without_prefix},
    "dinov2 classifier": {"no prefix": without_prefix},
    "registers, classifier": {"no prefix": without_prefix},
    "CLIPVisionModel-0": {"version 4": of_version_4},
    "SiglipVisionModel-0": {"version 4": of_version_4},
}
INTERPOLATED = ("vit", "deit", "deit with teacher", "dinov2", "registers", "dinov3", "SiglipVisionModel-0")
INTERPOLATED += ("CLIPVisionModel-0", "IJepaModel-0", "ViTMSNModel-0", "ViTMAEModel-0")


def example(case: str) -> Example:
    name, _, seed = case.partition("-")
    build = functools.partial(case_model, case) if case in CASES else lambda: encoder_model(name, int(seed))
    cls = CASES[case][0] if case in CASES else name
    # Angles, the class token plus its position, interpolated positions and RMS norms are in float32 there.
    rounded = cls.startswith(("DINOv3", "Dinov2WithRegisters", "Aimv2"))
    patch = 8 if case in CASES else random_sizes(name, int(seed))["patch_size"]
    return Example(
        library=LIBRARY,
        build=build,
        options=EXPECTED.get(case, {}) if case in CASES else ENCODERS[name],
        sizes=[(h * patch, w * patch) for h, w in ((6, 6), (2, 5), (3, 2)) if case in INTERPOLATED],
        tolerance=1e-6 if rounded else 1e-10,
        others={"in memory": in_memory, **OTHERS.get(case, {})},
        # The tensors of that BEiT alone are a ViT's.
        alone=r"config=ViTConfig\(" if case != "beit, learned positions" else "",
    )


PLAIN_SIZES = [f"{name}-0" for name in ENCODERS if f"{name}-0" in OTHERS.keys() | set(INTERPOLATED)]


@pytest.mark.parametrize("case", [*CASES, *PLAIN_SIZES, *(f"{name}-1" for name in ENCODERS)])
def test_family(case: str, tmp_path: Path) -> None:
    check_family(example(case), tmp_path)


@pytest.mark.parametrize("case", ["vit", "deit with teacher", "registers, classifier", "dinov3", "beit"])
def test_misshapen_tensors_are_rejected(case: str, tmp_path: Path) -> None:
    contract.check_misshapen(LIBRARY.save(case_model(case), tmp_path), "huggingface")


def saved(case: str, folder: Path, **changes: Any) -> Path:
    name, _, seed = case.partition("-")
    return LIBRARY.save(
        case_model(case, **changes) if case in CASES else encoder_model(name, int(seed or 0), **changes),
        folder,
    )


@torch.no_grad()
def test_half_precision_with_registers_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    case_model("registers").bfloat16().save_pretrained(tmp_path)
    peer = transformers.AutoModel.from_pretrained(tmp_path, dtype=torch.float32).eval()
    contract.check_equal(load(tmp_path), peer, example("registers"))


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
    rounded = "registers" in str(options) or "rotary" in options.values()
    tolerance = 1e-6 if rounded else 1e-10
    given = Example(library=LIBRARY, build=dict, tolerance=tolerance, identical=False)
    check_written(small_model(**options), given, tmp_path)


@torch.no_grad()
def test_body_without_pooler_equals_a_classifier_without_classes(tmp_path: Path) -> None:
    ours, images = small_model(head="none"), random_images(2, 3, 32, 32)
    save_pretrained(ours, tmp_path, format="huggingface")
    automatic = transformers.AutoModelForImageClassification
    peer, report = automatic.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    assert relative_error(peer(images).logits, ours(images)) < 1e-5


DISTILLED, CLIP = {"distillation_token": True}, {"embedding_norm": True, "patch_bias": False}
# Reasons that name the way out: the model types that lack least, or a combination of options.
REFUSED: dict[str, dict[str, Any]] = {
    "stem 'overlap'": {"stem": "overlap"},
    "patch_bias False": {"patch_bias": False},
    "positions 'sincos_2d'": {"positions": "sincos_2d"},
    "norm 'post'": {"norm": "post"},
    "attention 'axial'": {"attention": "axial"},
    "pool_norm 'after'": {"pool_norm": "after"},
    "positions 'rotary'": {"distillation_token": True, "positions": "rotary"},
    "embedding_norm True": {"embedding_norm": True},
    "class_token True (ijepa)": {"pool": "mean", "class_token": True},
    "pool 'map' and head 'linear'": {"pool": "map"},
    "head 'mlp'": {"head": "mlp"},
    "positions 'rotary' (vit) or head 'linear' (dinov3_vit)": {"positions": "rotary"},
    "layer_scale 0.1 (vit) or head 'pre_logits' (dinov2)": {"layer_scale": 0.1, "head": "pre_logits"},
    "pool 'cls_mean' without a linear head": {"pool": "cls_mean", "head": "none"},
    "layer_scale 0.1 (vit) or mlp_ratio 1.5 (dinov2)": {"layer_scale": 0.1, "mlp_ratio": 1.5},
    "mlp 'swiglu' (vit) or mlp_ratio 2.7 (dinov2)": {"mlp": "swiglu", "mlp_ratio": 2.7},
    "image_size (32, 16) (dinov2)": {"layer_scale": 0.1, "image_size": (32, 16)},
    "distillation_token True": {"distillation_token": True, "num_registers": 2},
    "layer_scale 0.1 (deit) or distillation_token True (dinov2)": {**DISTILLED, "layer_scale": 0.1},
    "mlp 'swiglu' (deit)": {"distillation_token": True, "mlp": "swiglu"},
    "a distillation token and head 'none'": {"distillation_token": True, "head": "none"},
    "pool 'cls', pool_norm 'before', class_token True with classes": CLIP,
    "pool_norm 'none', class_token False with classes": {**CLIP, "pool": "mean", "pool_norm": "none"},
    "class_token True without classes": {**CLIP, "pool": "mean", "class_token": True, "head": "none"},
}


def test_model_that_transformers_cannot_run_is_rejected(tmp_path: Path) -> None:
    for options, values in REFUSED.items():
        check_refused("huggingface", small_model(**values), [options], tmp_path)


def test_projection_with_a_bias_is_not_written(tmp_path: Path) -> None:
    options = {"embedding_norm": True, "patch_bias": False, "outputs": "embedding", "num_classes": 6}
    ours = small_model(**options)
    assert not misfit(FAMILY, ours.config)
    with pytest.raises(CheckpointError, match="projection has a bias"):
        save_pretrained(ours, tmp_path / "never", format="huggingface")
    ours.head.bias.data.zero_()
    check_written(ours, Example(library=LIBRARY, build=dict), tmp_path / "written")


def test_name_with_and_without_prefix_is_rejected(tmp_path: Path) -> None:
    source = open_source(saved("vit", tmp_path))
    with pytest.raises(CheckpointError, match=r"layernorm\.bias twice"):
        FAMILY.before_reading(contract.with_tensors(source, {"layernorm.bias": torch.zeros(48)}))


@pytest.mark.parametrize(
    ("case", "changed", "reason"),
    [
        ("vit", {"hidden_act": "relu"}, "hidden_act 'relu'"),
        ("vit", {"hidden_size": "wide"}, "ValueError: invalid literal"),
        ("vit", {"layer_norm_eps": None}, "norm_eps must be a number"),
        ("vit", {"num_attention_heads": 5}, "num_heads 5"),
        ("vit", {"image_size": [32, 32, 32]}, "too many values"),
        ("vit with pooler", {"pooler_act": "relu"}, "pooler_act 'relu'.*add_pooling_layer=False"),
        ("dinov2", {"image_size": [32, 16]}, "32x16"),
        ("dinov3", {"value_bias": False}, "query_bias, key_bias and value_bias"),
        ("dinov3, gated", {"hidden_act": "gelu"}, "hidden_act 'gelu' of a gated MLP"),
        ("vit", {"model_type": "swin"}, "model_type"),
        ("beit", {"hidden_act": "relu"}, "hidden_act 'relu'"),
        ("SiglipModel", {"vision_config": [1]}, "is not a mapping"),
        ("SiglipModel", {"vision_config": {"hidden_act": "relu"}}, "hidden_act 'relu'"),
        ("SiglipModel", {"vision_config": {"hidden_act": ["gelu"]}}, "hidden_act"),
        ("SiglipModel", {"vision_config": {"image_size": None}}, "cannot unpack"),
        ("SiglipModel", {"vision_config_dict": "B/16"}, "is not a mapping"),
        ("SiglipModel", {"vision_config": {"num_attention_heads": "two"}}, "num_heads"),
    ],
)
def test_unsupported_configuration_is_rejected(
    case: str, changed: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    edit_config(saved(case, tmp_path), **changed)
    with pytest.raises(UserError, match=reason):
        load(tmp_path) if changed != {"model_type": "swin"} else load(tmp_path, "huggingface")


@pytest.mark.parametrize(
    ("case", "options", "reason"),
    [
        ("vit with pooler", {"pooler_output_size": 4}, "pooler of 4 outputs.*add_pooling_layer=False"),
        ("beit", SHARED, "relative positions of all blocks beside those of each"),
        ("beit", {"image_size": [32, 24]}, r"distorts the positions of an oblong grid, \(4, 3\)"),
    ],
)
def test_models_that_we_have_not_are_rejected(
    case: str, options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=reason):
        load(saved(case, tmp_path, **options))


def test_pooler_of_i_jepa_is_rejected(tmp_path: Path) -> None:
    cls = transformers.IJepaModel
    cls(cls.config_class(**random_sizes("IJepa", 0)), add_pooling_layer=True).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="reads the first patch"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("kind", "instead"),
    [
        *((kind, "") for kind in ("hiera", "levit", "mobilevit", "pvt", "convnext", "aimv2", "mlcd")),
        ("swin", "its windows shift; its classifiers can teach a model, --teacher transformers:MODEL$"),
        ("vit-hybrid", r"timm/vit_base_r50_s16_384\.orig_in21k_ft_in1k$"),
        ("vit_of_tomorrow", "vitascope reads vit, deit, dinov2, .* of transformers$"),
    ],
)
def test_models_of_another_kind_are_rejected_by_name(kind: str, instead: str, tmp_path: Path) -> None:
    assert kind not in KINDS
    edit_config(saved("ViTModel", tmp_path), model_type=kind)
    with pytest.raises(CheckpointError, match=f"its model_type is '{kind}'; .*{instead}") as error:
        identify(tmp_path)
    assert reason(kind) in str(error.value)
    assert "\n" not in str(error.value)


def test_class_names_are_ordered_by_number(tmp_path: Path) -> None:
    numbers = sorted(map(str, range(12)))  # "10" before "2", as in JSON with sorted keys
    edit_config(saved("vit", tmp_path, num_labels=12), id2label={it: f"class {it}" for it in numbers})
    theirs = transformers.AutoConfig.from_pretrained(tmp_path).id2label
    assert load(tmp_path).config.class_names == tuple(theirs[index] for index in range(12))


def test_probabilities_of_several_labels_are_the_sigmoids_of_transformers(tmp_path: Path) -> None:
    theirs = case_model("vit, several labels")
    read, written = LIBRARY.save(theirs, tmp_path / "read"), tmp_path / "written"
    ours = small_model(outputs="independent", thresholds=(0.2, 0.4, 0.5, 0.6, 0.7))
    save_pretrained(ours, written, format="huggingface")
    loaded: Any = LIBRARY.load(written, ours, None)
    assert loaded.config.problem_type == "multi_label_classification"
    for folder, peer in ((read, theirs), (written, loaded)):
        engine = TorchEngine(from_pretrained(folder), precision="fp32", device="cpu")
        assert engine.thresholds
        pixels = torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8)
        expected = peer(engine.preprocess.normalize(pixels)).logits.sigmoid().detach()
        torch.testing.assert_close(engine.probabilities(pixels), expected, atol=1e-5, rtol=0)


def test_parts_of_a_whole_model_do_not_overrule_what_describes_the_whole(tmp_path: Path) -> None:
    names = {str(index): name for index, name in enumerate("abcdef")}
    source = open_source(saved("SiglipForImageClassification", tmp_path / "theirs"))
    repeated = {"id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "problem_type": "regression"}
    vision = {**source.config["vision_config"], **repeated}
    config = {**source.config, "id2label": names, "vision_config": vision}
    ours = load_source(FAMILY.before_reading(dataclasses.replace(source, config=config)), FAMILY)
    assert ours.config.class_names == tuple("abcdef")
    check_written(ours, Example(library=LIBRARY, build=dict), tmp_path / "back")


def test_an_older_description_of_the_vision_model_overrules_the_newer_as_in_transformers(
    tmp_path: Path,
) -> None:
    source = open_source(saved("CLIPModel", tmp_path))
    vision = source.config["vision_config"]
    old = {key: vision[key] for key in vision if key not in ("hidden_act", "layer_norm_eps")}
    newer = {**vision, "layer_norm_eps": 0.1, "num_hidden_layers": 7}
    config = {**source.config, "vision_config": newer, "vision_config_dict": old}
    expected = transformers.CLIPConfig(**config).vision_config
    ours = FAMILY.read_config(FAMILY.before_reading(dataclasses.replace(source, config=config)))
    assert (ours.depth, ours.norms.norm_eps) == (expected.num_hidden_layers, expected.layer_norm_eps)


@pytest.mark.parametrize(
    "case",
    [
        *("vit", "deit", "dinov2 classifier", "registers, classifier", "dinov3", "CLIPVisionModel-0"),
        *("SiglipVisionModel-0", "IJepaModel-0", "ViTMAEModel-0", "ViTMSNModel-0"),
    ],
)
def test_empty_configuration_is_that_of_the_defaults_of_its_class(case: str, tmp_path: Path) -> None:
    source = open_source(saved(case, tmp_path))
    name = CASES[case][0] if case in CASES else case.partition("-")[0]
    defaults: Any = getattr(transformers, name).config_class()
    told = dataclasses.replace(source, config={"model_type": source.config["model_type"]})
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


@pytest.mark.parametrize(
    "name", ["CLIPVisionModelWithProjection", "SiglipVisionModel", "IJepaForImageClassification"]
)
@torch.no_grad()
def test_conversion_to_timm_and_back_is_bitwise(name: str, tmp_path: Path) -> None:
    ours = load(saved(f"{name}-2", tmp_path / "theirs"))
    ours.config = ours.config.replace(norm_eps=1e-5 if name.startswith("CLIP") else 1e-6)  # timm's
    images = random_images(2, 3, *ours.config.image_hw)
    save_pretrained(ours, tmp_path / "timm", format="timm")
    between = load(tmp_path / "timm")
    assert between.config.remainder == ours.config.remainder == "cut"
    assert between.config.outputs == ours.config.outputs
    save_pretrained(between, tmp_path / "back", format="huggingface")
    assert torch.equal(load(tmp_path / "back")(images), between(images))
    assert_same_state(load(tmp_path / "back"), ours)


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
    back: Any = LIBRARY.load(tmp_path / "back", ours, None).double()
    back.set_attn_implementation("sdpa")
    assert relative_error(back(images.double()).last_hidden_state, tokens) < 1e-10


def test_masked_pre_training_of_beit_gives_the_body(tmp_path: Path) -> None:
    config = transformers.BeitConfig(**SIZES, **MLP, **OWN, vocab_size=9)
    peer = randomize(transformers.BeitForMaskedImageModeling(config)).eval()
    peer.save_pretrained(tmp_path)
    ours = load(tmp_path).double()
    images = contract.images_for(ours.config).double()
    with torch.no_grad():
        body = peer.double().beit(images).last_hidden_state
        assert relative_error(ours.forward_features(images), peer.layernorm(body)) < 1e-10
