"""The text model of CLIP (Radford et al. 2021, section 2.4) and of SigLIP (Zhai et al. 2023), and its
tables of names in transformers' and OpenCLIP's files.

Facts: transformers 5.23.0, `models/{clip,siglip,siglip2}`; open_clip 3, `model.py`, `transformer.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vitascope.model.config import ViTConfig
from vitascope.model.encoder import Encoder
from vitascope.model.positions import Layout
from vitascope.weights.families.huggingface.model_type import activation as activation_of
from vitascope.weights.families.openclip import (
    blocks,
    epsilon,
    known,
    open_clip_activation,
    section,
    transposed,
)
from vitascope.weights.files import CheckpointError
from vitascope.weights.mapping import (
    MAX_BLOCKS,
    MAX_NUMBERS,
    Source,
    Stored,
    Table,
    assemble,
    checked_config,
    placed,
    reshaped,
    stacked,
)

Readout = Literal["eos", "largest", "first", "last"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextConfig:
    """The options that determine a `TextTower`."""

    blocks: ViTConfig
    """Width, depth, heads and the options of the blocks; those of images are not used."""
    vocabulary: int
    """V, the number of different tokens."""
    context: int
    """The largest number of tokens."""
    embed_dim: int
    """P, the width of the space that images and texts share."""
    causal: bool
    """Whether a token attends only to itself and the tokens before it."""
    readout: Readout
    """The token whose state is the text's: the first `eos_id`, the one with the largest id, the first one or
    the last one."""
    eos_id: int | None = None
    """The id of the token that ends a text, for the readout "eos"."""
    projection_bias: bool
    """Whether the projection has a bias."""
    independent: bool
    """Whether a pair has a sigmoid of its own (SigLIP), with a learned bias, instead of a softmax (CLIP)."""


class TextTower(nn.Module):
    """Tokens (B, T) to vectors (B, P), whose cosine with the vectors of images means similarity.

    B texts, T tokens, D the width of a token's state, P `embed_dim`.
    """

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.config = config
        D, eps = config.blocks.embed_dim, config.blocks.norms.norm_eps
        self.token_embedding = nn.Embedding(config.vocabulary, D)
        self.positions = nn.Parameter(torch.zeros(config.context, D))
        self.encoder = Encoder(config.blocks)
        self.norm = nn.LayerNorm(D, eps=eps)
        self.projection = nn.Linear(D, config.embed_dim, bias=config.projection_bias)
        # Of a pair's logit: exp(scale) cos + bias.
        self.scale = nn.Parameter(torch.zeros(1))
        self.bias = nn.Parameter(torch.zeros(1)) if config.independent else None

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 (B, T) -> (B, P)."""
        T = tokens.shape[1]
        z = self.token_embedding(tokens) + self.positions[:T]  # (B, T, D)
        z = self.norm(self.encoder(z, self.layout(T, z)))
        return self.projection(z[torch.arange(len(z)), self.places(tokens)])

    def layout(self, length: int, like: Tensor) -> Layout:
        """T tokens in a row; -inf hides those that come later."""
        grid = (1, length)
        if not self.config.causal:
            return Layout(grid, 0)
        mask = torch.full((length, length), -torch.inf, dtype=like.dtype, device=like.device).triu(1)
        return Layout(grid, 0, biases={grid: mask[None, None]})

    def places(self, tokens: Tensor) -> Tensor:
        """The place of the token that is read: (B, T) -> (B,)."""
        readout = self.config.readout
        if readout == "eos":
            return tokens.eq(self.config.eos_id or 0).int().argmax(dim=1)
        if readout == "largest":
            return tokens.argmax(dim=1)
        return torch.full((len(tokens),), 0 if readout == "first" else tokens.shape[1] - 1)


def _number(name: str) -> Stored:
    """A number, which some libraries store without the axis of length 1."""
    return reshaped(name, lambda ours: ours, lambda theirs: theirs.reshape(1))


_BLOCK, _LAYER = "encoder.blocks.{i}.", "text_model.encoder.layers.{i}."
SIGLIP: Table = {
    "token_embedding.*": "text_model.embeddings.token_embedding.*",
    "positions": "text_model.embeddings.position_embedding.weight",
    _BLOCK + "norm{n}.*": _LAYER + "layer_norm{n}.*",
    _BLOCK + "attention.qkv.*": stacked(*(f"{_LAYER}self_attn.{part}_proj.*" for part in "qkv")),
    _BLOCK + "attention.proj.*": _LAYER + "self_attn.out_proj.*",
    _BLOCK + "mlp.*": _LAYER + "mlp.*",
    "norm.*": "text_model.final_layer_norm.*",
    "projection.*": "text_model.head.*",
    "scale": _number("logit_scale"),
    "bias": _number("logit_bias"),
}
CLIP: Table = {**SIGLIP, "projection.*": "text_projection.*"}
_OPEN_CLIP: Table = {
    "token_embedding.*": "token_embedding.*",
    "positions": "positional_embedding",
    **blocks(""),
    "norm.*": "ln_final.*",
    "scale": _number("logit_scale"),
    "bias": _number("logit_bias"),
}
_MATRIX: Table = {"projection.weight": transposed("text_projection")}
_VISION: tuple[str, ...] = (
    "vision_model.*",
    "visual_projection.*",
    "visual.*",
    "attn_mask",
    "text.attn_mask",
)
_VISION += ("text_model.embeddings.position_ids",)

# The defaults of configurations.
_SIZE: dict[str, Any] = {
    "vocab_size": 49408,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
}
_CLIP = {**_SIZE, "num_attention_heads": 8, "max_position_embeddings": 77, "eos_token_id": 49407}
_CLIP |= {"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}
_SIGLIP = {**_CLIP, "vocab_size": 32000, "hidden_size": 768, "intermediate_size": 3072}
_SIGLIP |= {"num_attention_heads": 12, "max_position_embeddings": 64}
_SIGLIP |= {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}
_DEFAULTS: dict[str, dict[str, Any]] = {"clip": _CLIP, "siglip": _SIGLIP, "siglip2": _SIGLIP}
_OPEN_CLIP_TEXT: dict[str, Any] = {
    "context_length": 77, "vocab_size": 49408, "width": 512, "heads": 8, "layers": 12, "mlp_ratio": 4.0,
    "ls_init_value": None, "pad_id": 0, "no_causal_mask": False, "final_ln_after_pool": False,
    "pool_type": "argmax", "proj_bias": False, "output_tokens": False, "act_kwargs": None,
    "norm_kwargs": None, "eos_id": 2, "hf_tokenizer_name": None, "tokenizer_kwargs": None,
    "hf_model_pretrained": True, "hf_proj_type": "mlp", "hf_pooler_type": "mean_pooler",
}  # fmt: skip
_OPEN_CLIP_FIXED = {"embed_cls": False, "hf_model_name": None, "proj_type": "linear"}
_READOUTS: dict[str, Readout] = {"argmax": "largest", "last": "last", "first": "first", "eos": "eos"}


def read_tower(source: Source) -> TextTower:
    """The text model of a checkpoint, in evaluation mode and in float32.

    Raises:
        CheckpointError: a checkpoint without a text model; an option that is not known; tensors that are
            missing, left over or of another shape.
    """
    if source.config.get("model_type") not in _DEFAULTS and "model_cfg" not in source.config:
        raise CheckpointError(
            f"{source.name}: no text model, which words need; give a CLIP or a SigLIP, as transformers "
            "(CLIPModel, SiglipModel) or OpenCLIP writes it"
        )
    if "model_cfg" in source.config:
        config, table, source = _open_clip(source)
    else:
        config, table = _transformers(source)
    with torch.device("meta"):
        tower = TextTower(config)
    what = f"{source.name}: not a complete text model of this architecture"
    state = assemble(source, placed(tower.state_dict(), table, "the table of text models"), _VISION, what)
    tower.load_state_dict(state, strict=True, assign=True)
    return tower.eval().float()


def _transformers(source: Source) -> tuple[TextConfig, Table]:
    kind = str(source.config["model_type"])
    values = _text_config(source, kind)
    act = values["hidden_act"]
    clip, eos = kind == "clip", values["eos_token_id"]
    if clip and type(eos) is not int:
        raise CheckpointError(f"{source.name}: eos_token_id {eos!r} in text_config is not one number")
    projection = "text_projection.weight" if clip else "text_model.head.weight"
    config = _checked(
        source,
        {
            "embed_dim": values["hidden_size"],
            "depth": values["num_hidden_layers"],
            "num_heads": values["num_attention_heads"],
            "norm_eps": values["layer_norm_eps"],
            "mlp": activation_of(source, act),
        },
        hidden=values["intermediate_size"],
        vocabulary=values["vocab_size"],
        context=values["max_position_embeddings"],
        embed_dim=source.shape(projection, 2)[0],
        causal=clip,
        # An old configuration says 2, and then the library takes the largest id.
        readout="last" if not clip else "largest" if eos == 2 else "eos",
        eos_id=eos if clip else None,
        projection_bias=not clip,
        independent=not clip,
    )
    return config, CLIP if clip else SIGLIP


def _open_clip(source: Source) -> tuple[TextConfig, Table, Source]:
    model = section(source, "model_cfg")
    given = section(source, "model_cfg", "text_cfg")
    values = known(source, "text_cfg", given, _OPEN_CLIP_TEXT, _OPEN_CLIP_FIXED)
    if values["pool_type"] not in _READOUTS:
        raise CheckpointError(f"{source.name}: pool_type {values['pool_type']!r} is none of {[*_READOUTS]}")
    if source.has_any("text."):  # a model with `custom_text`
        source = source.renamed(lambda name: name.removeprefix("text."))
    biased = bool(values["proj_bias"])  # a linear layer, otherwise a matrix
    projection: Table = {"projection.*": "text_projection.*"} if biased else _MATRIX
    shape = source.shape("text_projection.weight" if biased else "text_projection", 2)
    width = values["width"]
    config = _checked(
        source,
        {
            "embed_dim": width,
            "depth": values["layers"],
            "num_heads": values["heads"],
            "norm_eps": epsilon(source, values),
            "mlp": open_clip_activation(source, model, values),
            "layer_scale": values["ls_init_value"],
        },
        hidden=int(width * values["mlp_ratio"]),
        vocabulary=values["vocab_size"],
        context=values["context_length"],
        embed_dim=shape[0 if biased else 1],
        causal=not values["no_causal_mask"],
        readout=_READOUTS[values["pool_type"]],
        eos_id=values["eos_id"] if values["pool_type"] == "eos" else None,
        projection_bias=biased,
        independent=source.has("logit_bias"),
    )
    return config, {**_OPEN_CLIP, **projection}, source


def _checked(source: Source, options: Mapping[str, Any], *, hidden: int, **numbers: Any) -> TextConfig:
    """The configuration, if its sizes are such as a file could fill."""
    sizes = {"hidden": hidden, **{name: numbers[name] for name in ("vocabulary", "context")}}
    sizes |= {name: options[name] for name in ("embed_dim", "depth", "num_heads")}
    for name, size in sizes.items():
        if type(size) is not int or not 0 < size <= MAX_NUMBERS:
            raise CheckpointError(
                f"{source.name}: {name} {size!r} of the text model is not a positive number"
            )
    blocks, width = options["depth"], options["embed_dim"]
    numbers_of_all = width * (blocks * (4 * width + 2 * hidden) + numbers["vocabulary"] + numbers["context"])
    if blocks > MAX_BLOCKS or numbers_of_all > MAX_NUMBERS:
        raise CheckpointError(f"{source.name}: its text model claims more than any has")
    return TextConfig(blocks=checked_config(source, {**options, "mlp_ratio": hidden / width}), **numbers)


def _text_config(source: Source, kind: str) -> Mapping[str, Any]:
    """`text_config` of config.json over the defaults of `kind`.

    `text_config_dict` of older CLIP files overrules it as in transformers, missing keys included.
    """
    defaults = _DEFAULTS[kind]
    values = dict(defaults)
    for part in ("text_config", "text_config_dict") if kind == "clip" else ("text_config",):
        nested = source.config.get(part)
        if nested is None:
            continue
        if not isinstance(nested, Mapping):
            raise CheckpointError(f"{source.name}: {part} in config.json is not an object")
        values |= {**defaults, **nested}
    return values
