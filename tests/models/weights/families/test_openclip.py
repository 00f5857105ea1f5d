import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import tests.torchvision_operators  # noqa: F401 - open_clip imports torchvision
import vitascope as vs
from tests.models import randomize
from vitascope.models.weights.families.timm import Timm
from vitascope.models.weights.files import CheckpointError
from vitascope.models.weights.mapping import rows

WIDTH, SHARED, DEPTH, CONTEXT, SIDE, PATCH, TOKENS = 128, 12, 2, 10, 32, 8, 40
VISION: dict[str, Any] = {
    "layers": DEPTH,
    "width": WIDTH,
    "patch_size": PATCH,
    "image_size": SIDE,
    "mlp_ratio": 0.3,
}
TEXT: dict[str, Any] = {
    "layers": DEPTH,
    "width": 24,
    "heads": 3,
    "context_length": CONTEXT,
    "vocab_size": TOKENS,
}
State = dict[str, Tensor]


def random_state(shapes: dict[str, tuple[int, ...]]) -> State:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator) / math.sqrt(shape[-1] if shape else 1)
        + ("ln_" in name and name.endswith("weight"))  # of norms
        for name, shape in shapes.items()
    }


def transformer(prefix: str, width: int, hidden: int, scaled: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(DEPTH):
        place = f"{prefix}transformer.resblocks.{layer}."
        shapes |= {f"{place}ln_{n}.{kind}": (width,) for n in (1, 2) for kind in ("weight", "bias")}
        shapes |= {f"{place}ls_{n}.gamma": (width,) for n in (1, 2) if scaled}
        linear = {"attn.in_proj_": (3 * width, width), "attn.out_proj.": (width, width)}
        linear |= {"mlp.c_fc.": (hidden, width), "mlp.c_proj.": (width, hidden)}
        for name, shape in linear.items():
            shapes |= {f"{place}{name}weight": shape, f"{place}{name}bias": shape[:1]}
    return shapes


def write(folder: Path, *, vision: dict[str, Any], text: dict[str, Any], **model: Any) -> State:
    """Write a file of OpenCLIP's with random weights; returns them."""
    vision, text = VISION | vision, TEXT | text
    custom = "text." if model.get("custom_text") else ""
    width, patches = text["width"], (SIDE // PATCH) ** 2
    shapes: dict[str, tuple[int, ...]] = {
        "visual.class_embedding": (WIDTH,),
        "visual.positional_embedding": (1 + patches, WIDTH),
        "visual.conv1.weight": (WIDTH, 3, PATCH, PATCH),
        "visual.proj": (WIDTH, SHARED),
        f"{custom}token_embedding.weight": (text["vocab_size"], width),
        f"{custom}positional_embedding": (CONTEXT, width),
        "logit_scale": (),
    }
    norms = [f"{custom}ln_final", "visual.ln_post", *(["visual.ln_pre"] * (not vision.get("no_ln_pre")))]
    for norm in norms:
        shapes |= {f"{norm}.{kind}": (WIDTH if "visual" in norm else width,) for kind in ("weight", "bias")}
    if text.get("proj_bias"):
        shapes |= {
            f"{custom}text_projection.weight": (SHARED, width),
            f"{custom}text_projection.bias": (SHARED,),
        }
    else:
        shapes[f"{custom}text_projection"] = (width, SHARED)
    if "init_logit_bias" in model:
        shapes["logit_bias"] = ()
    hidden = int(WIDTH * vision["mlp_ratio"])
    shapes |= transformer("visual.", WIDTH, hidden, bool(vision.get("ls_init_value")))
    shapes |= transformer(custom, width, 4 * width, bool(text.get("ls_init_value")))
    state = random_state(shapes)
    folder.mkdir(exist_ok=True)
    save_file(state, folder / "open_clip_model.safetensors")
    config = {"model_cfg": {"embed_dim": SHARED, "vision_cfg": vision, "text_cfg": text, **model}}
    config["preprocess_cfg"] = {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.4]}
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    return state


TANH = {"act_kwargs": {"approximate": "tanh"}, "norm_kwargs": {"eps": 1e-6}}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "quick GELU": ({}, {"quick_gelu": True}),
    "tanh, another epsilon": (TANH, {}),
    "scales, no first norm": ({"ls_init_value": 0.1, "no_ln_pre": True}, {}),
    "mean": ({"pool_type": "avg"}, {}),
    "mean, then norm": ({"pool_type": "avg", "final_ln_after_pool": True}, {}),
}


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_vectors_are_those_of_open_clip_of_the_preprocessing_of_the_file(tmp_path: Path, name: str) -> None:
    open_clip = pytest.importorskip("open_clip", reason="open_clip is not installed (vitascope[text])")
    vision, options = CASES[name]
    write(tmp_path / "clip", vision=vision, text={}, **options)
    model = vs.from_pretrained(tmp_path / "clip").double()
    theirs = open_clip.create_model(f"local-dir:{tmp_path / 'clip'}").double().eval()
    images = torch.randn(3, 3, SIDE, SIDE, dtype=torch.float64)
    torch.testing.assert_close(model(images), theirs.encode_image(images), rtol=0, atol=1e-10)
    assert (model.config.outputs, model.config.num_classes) == ("embedding", SHARED)
    assert model.preprocess == vs.Preprocess(
        image_size=(SIDE, SIDE), resize_to=(SIDE, SIDE), mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4)
    )


def test_vision_models_of_timm_have_timms_names(tmp_path: Path) -> None:
    state = write(tmp_path / "clip", vision={}, text={}, init_logit_bias=-10)
    config = vs.ViTConfig(
        **{"image_size": SIDE, "patch_size": PATCH, "embed_dim": 64, "num_heads": 1, "depth": 2},
        **{"pool": "map", "head": "none", "outputs": "embedding"},
    )
    trunk = randomize(vs.VisionTransformer(config).eval())
    weights = {name: tensor for name, tensor in state.items() if not name.startswith("visual.")}
    for ours, _, stored in rows(Timm(), config):
        parts = stored.split(trunk.state_dict()[ours])
        weights |= {
            f"visual.trunk.{name}": part.contiguous() for name, part in zip(stored.names, parts, strict=True)
        }
    save_file(weights, tmp_path / "clip" / "open_clip_model.safetensors")
    path = tmp_path / "clip" / "open_clip_config.json"
    content = json.loads(path.read_text())
    content["model_cfg"]["vision_cfg"] = {
        "timm_model_name": "vit_base_patch16_siglip_224",
        "timm_model_pretrained": False,
        "timm_pool": "map",
        "timm_proj": "none",
        "image_size": SIDE,
    }
    content["preprocess_cfg"] |= {"resize_mode": "squash"}
    path.write_text(json.dumps(content))
    model, images = vs.from_pretrained(tmp_path / "clip"), torch.randn(2, 3, SIDE, SIDE)
    assert model.config.outputs == "embedding"
    assert model.preprocess.resize == "squash"
    assert torch.equal(model(images), trunk(images))


SIGLIP = {"no_causal_mask": True, "proj_bias": True, "pool_type": "last", **TANH}
WORDS = 49_408
"""The tokens of OpenCLIP's own tokenizer."""


@pytest.mark.parametrize(
    ("text", "options"), [({}, {}), (SIGLIP, {"custom_text": True, "init_logit_bias": -10})]
)
@torch.no_grad()
def test_zero_shot_classifier_has_the_logits_of_open_clip(
    tmp_path: Path, text: dict[str, Any], options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    open_clip = pytest.importorskip("open_clip", reason="open_clip is not installed (vitascope[text])")
    write(tmp_path, vision={}, text={"vocab_size": WORDS, **text}, **options)
    names, handlers = ["a cat", "two dogs", "a very long name " * CONTEXT], logging.root.handlers[:]
    model = vs.zero_shot(tmp_path, names, prompts="{}")
    assert f"longer than {CONTEXT} tokens, and cut: 'a very long" in caplog.text
    assert logging.root.handlers == handlers
    theirs = open_clip.create_model(f"local-dir:{tmp_path}").eval()
    tokens = open_clip.get_tokenizer(f"local-dir:{tmp_path}")(names)
    images = torch.randn(2, 3, SIDE, SIDE)
    torch.testing.assert_close(model(images), theirs.get_logits(images, tokens)[0], rtol=0, atol=1e-5)
    assert model.config.outputs == ("independent" if options else "exclusive")


def test_tokenizer_of_another_model_is_named(tmp_path: Path) -> None:
    pytest.importorskip("open_clip", reason="open_clip is not installed (vitascope[text])")
    write(tmp_path, vision={}, text={})
    with pytest.raises(CheckpointError, match=f"a tokenizer of {WORDS} tokens for a text model of {TOKENS}"):
        vs.zero_shot(tmp_path, ["cat", "dog"])


def test_text_model_that_open_clip_cannot_load_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("open_clip", reason="open_clip is not installed (vitascope[text])")
    write(tmp_path, vision={}, text={})
    path = tmp_path / "open_clip_config.json"
    for change in ({"layers": 1}, {"surprise": 1}):
        config = json.loads(path.read_text())
        config["model_cfg"]["text_cfg"] |= change
        path.write_text(json.dumps(config))
        with pytest.raises(vs.UserError, match="cannot be loaded by open_clip: ") as caught:
            vs.zero_shot(tmp_path, ["cat", "dog"])
        assert "\n" not in str(caught.value)


UNREAD: dict[str, tuple[tuple[Any, str], ...]] = {  # values of vision_cfg, and the reason
    "attentional_pool": ((True, "only False is read"),),
    "layers": (([3, 4, 6, 3], "a ResNet: only ViTs are read"),),
    "qk_norm": ((True, "unknown qk_norm"),),
    "pool_type": (("none", "is none of tok, avg"), (["tok"], "is not a text")),
    "act_kwargs": (({"x": 1}, "act_kwargs"), ("tanh", "is not an object")),
    "norm_kwargs": (({"x": 1}, "norm_kwargs"), ([1], "is not an object")),
    "timm_model_name": (("vit_base_patch16_224", "only those with timm_pool 'map'"),),
    "width": (("128", "is not a number"), (0, "do not describe a model")),
    "no_ln_pre": (("no", "is not true or false"),),
    "head_width": ((1.5, "num_heads must be a whole number"),),
}
NO_PREPROCESSING: list[tuple[Any, str]] = [
    ([0.5], "do not describe a model"),
    ({"mean": 0.5}, "mean 0.5 in preprocess_cfg is not a list"),
    ({"mean": ["a"]}, "mean must be a list of numbers"),
    ({"size": "32"}, "size '32' in preprocess_cfg is not a number or a list"),
    ({"size": ["a"]}, "do not describe a model"),
    ({"resize_mode": []}, r"resize_mode \[\] in preprocess_cfg is not a text"),
    ({"interpolation": "area"}, "interpolation 'area'"),
]


def test_models_and_preprocessing_that_are_not_read_are_rejected_by_their_key(tmp_path: Path) -> None:
    write(tmp_path / "clip", vision={}, text={})
    path = tmp_path / "clip" / "open_clip_config.json"
    whole = path.read_text()

    def rejected(config: dict[str, Any], reason: str) -> None:
        path.write_text(json.dumps(config))
        with pytest.raises(vs.UserError, match=reason):
            vs.from_pretrained(tmp_path / "clip")

    for name, values in UNREAD.items():
        for value, reason in values:
            config = json.loads(whole)
            config["model_cfg"]["vision_cfg"][name] = value
            rejected(config, reason)
    for preprocess, reason in NO_PREPROCESSING:
        rejected(json.loads(whole) | {"preprocess_cfg": preprocess}, reason)
