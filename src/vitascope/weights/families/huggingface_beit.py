"""transformers' BEiT and Data2VecVision, which have the same tensors.

Facts: transformers 5.23.0, `models/{beit,data2vec}`. Files keep the names of version 4, which every version
loads; in memory version 5 has others, and those are read too.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from vitascope.data.preprocess import Preprocess
from vitascope.errors import UserError
from vitascope.model.config import ViTConfig
from vitascope.storage import write_json
from vitascope.weights.families import huggingface_settings as settings
from vitascope.weights.families.huggingface_settings import sides
from vitascope.weights.families.relative_tables import (
    OFFSETS,
    join_tables,
    relative_names,
    split_tables,
)
from vitascope.weights.files import CheckpointError, write_safetensors
from vitascope.weights.mapping import (
    PLAIN_VIT,
    PROBLEMS,
    Family,
    Source,
    State,
    Table,
    class_names,
    outputs_options,
    respelled,
    stacked,
    supporting,
)

KINDS = {"beit": "beit.", "data2vec-vision": "data2vec_vision."}
"""The prefix of the body's tensors by `model_type`; the first is written."""
_BLOCK, _LAYER, _QKV = "encoder.blocks.{i}.", "encoder.layer.{i}.", ("query", "key", "value")
_ATTENTION = _LAYER + "attention.attention."
_OWN = "encoder.layer.{}.attention.attention.relative_position_bias."
_SHARED = "encoder.relative_position_bias."
BEIT: Table = {
    "patch_embedding.*": "embeddings.patch_embeddings.projection.*",
    "class_token": "embeddings.cls_token",
    "positions.weight": "embeddings.position_embeddings",
    _BLOCK + "norm1.*": _LAYER + "layernorm_before.*",
    _BLOCK + "attention.qkv.bias": stacked(
        *(f"{_LAYER}attention.attention.{part}.bias" for part in _QKV[::2])
    ),
    _BLOCK + "attention.qkv.weight": stacked(
        *(f"{_LAYER}attention.attention.{part}.weight" for part in _QKV)
    ),
    _BLOCK + "attention.proj.*": _LAYER + "attention.output.dense.*",
    _BLOCK + "scale{n}.gamma": _LAYER + "lambda_{n}",
    _BLOCK + "norm2.*": _LAYER + "layernorm_after.*",
    _BLOCK + "mlp.fc1.*": _LAYER + "intermediate.dense.*",
    _BLOCK + "mlp.fc2.*": _LAYER + "output.dense.*",
    "norm.*": "layernorm.*",
    "pool_norm.*": "pooler.layernorm.*",
    "head.*": "classifier.*",
}
_SPELLINGS = (
    (r"^(beit|data2vec_vision)\.", ""),
    (r"^shared_position_bias\.", _SHARED),
    (r"^layers\.(\d+)\.relative_position_bias\.", _OWN.format(r"\1")),
    (r"^layers\.(\d+)\.mlp\.fc1\.", r"encoder.layer.\1.intermediate.dense."),
    (r"^layers\.(\d+)\.mlp\.fc2\.", r"encoder.layer.\1.output.dense."),
    (r"^layers\.", "encoder.layer."),
    *((rf"^(encoder\..*\.attention)\.{it[0]}_proj\.", rf"\1.attention.{it}.") for it in _QKV),
    (r"^(encoder\..*\.attention)\.o_proj\.", r"\1.output.dense."),
)
_DEFAULTS: dict[str, Any] = {
    **{"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
    **{"image_size": 224, "patch_size": 16, "num_channels": 3, "hidden_act": "gelu", "layer_norm_eps": 1e-12},
    **{"layer_scale_init_value": 0.1, "use_mean_pooling": True},
}


class HuggingFaceBeit(Family):
    """transformers' Beit and Data2VecVision."""

    name = "huggingface"
    supports = PLAIN_VIT | supporting(
        "norm_eps layer_scale",
        positions=("relative", "relative_by_block", "learned", "none"),
        absolute=("none", "all"),
        qkv_bias=("no_key",),
        mlp=("gelu", "gelu_tanh", "quick_gelu"),
        pool=("cls", "mean"),
        pool_norm=("before", "after", "none"),
        head=("linear", "none"),
        outputs=("exclusive", "independent"),
    )
    ignored = ("embeddings.mask_token", "*relative_position_index", "lm_head.*")

    def fixed_there(self, config: ViTConfig) -> ViTConfig:
        return config.replace(resample="huggingface")

    def conflicts(self, config: ViTConfig) -> list[str]:
        readout, mean = config.readout, config.readout.pool == "mean"
        fits = {"after": mean, "before": not mean, "none": mean and readout.head == "none"}
        against = {
            "class_token False": not config.readout.has_class_token,
            f"pool {readout.pool!r}, pool_norm {readout.pool_norm!r} and head {readout.head!r}": not fits[
                readout.pool_norm
            ],
            "patches that are not square": config.patch_hw[0] != config.patch_hw[1],
            f"positions of an oblong grid, {config.grid}": _distorts(config),
        }
        return [reason for reason, stands in against.items() if stands]

    def recognizes(self, source: Source) -> bool:
        return source.config.get("model_type") in KINDS

    def before_reading(self, source: Source) -> Source:
        """The names of the table; each table of relative positions in two parts; of masked pre-training
        the body and its norm."""
        masked = source.has("lm_head.weight")
        source = source.renamed(lambda name: respelled(name, _SPELLINGS))
        tensors = dict(source.tensors)
        if masked:  # its norm and its decoder stand beside the body
            for name in [name for name in tensors if name.startswith("lm_head.")]:
                del tensors[name]
        values = {**_DEFAULTS, **source.config}
        height, width = sides(values["image_size"], source.name)
        ph, pw = sides(values["patch_size"], source.name)
        split_tables(tensors, (height // ph, width // pw))
        return dataclasses.replace(source, tensors=tensors)

    def before_writing(self, state: State, config: ViTConfig) -> State:
        state = dict(state)
        join_tables(state)
        prefix = KINDS["beit"] if config.readout.head == "linear" else ""
        heads = [name for name in state if name.startswith("classifier.")]
        return {name if name in heads else prefix + name: value for name, value in state.items()}

    def table(self, config: ViTConfig) -> Table:
        by_block = config.embedding.positions == "relative_by_block"
        return {**relative_names(by_block, config.depth, _OWN, _SHARED), **BEIT}

    def read_config(self, source: Source) -> ViTConfig:
        values = {**_DEFAULTS, **source.config}
        width = int(settings.number(source, values, "hidden_size", least=1))
        by_block, shared = source.has(_OWN.format(0) + OFFSETS), source.has(_SHARED + OFFSETS)
        if by_block and shared:
            raise CheckpointError(
                f"{source.name}: relative positions of all blocks beside those of each: vitascope has no "
                "model with both"
            )
        learned, scale = source.has("embeddings.position_embeddings"), values["layer_scale_init_value"]
        after = source.has("pooler.layernorm.weight")
        options: dict[str, Any] = {
            "image_size": sides(values["image_size"], source.name),
            "patch_size": sides(values["patch_size"], source.name),
            "in_channels": values["num_channels"],
            "embed_dim": width,
            "depth": values["num_hidden_layers"],
            "num_heads": values["num_attention_heads"],
            "norm_eps": settings.number(source, values, "layer_norm_eps"),
            "qkv_bias": "no_key",
            "mlp": settings.activation(source, values),
            "mlp_ratio": settings.number(source, values, "intermediate_size") / width,
            "layer_scale": float(scale) if source.has("encoder.layer.0.lambda_1") else None,
            "positions": "learned" if learned else "none",
            "class_token": True,
            "pool": "mean" if values["use_mean_pooling"] else "cls",
            "pool_norm": "after" if after else "before" if source.has("layernorm.weight") else "none",
            "resample": "huggingface",
            "head": "none",
        }
        if by_block or shared:
            options["positions"] = "relative_by_block" if by_block else "relative"
            options["absolute"] = "all" if learned else "none"
        if source.has("classifier.weight"):
            count = source.shape("classifier.weight", 2)[0]
            names = class_names(source.config.get("id2label"), count)
            options |= {"head": "linear", "num_classes": count, "class_names": names}
            options |= outputs_options(source)
        try:
            config = ViTConfig.from_dict(options)
        except UserError as error:
            raise CheckpointError(f"{source.name}: {error}") from error
        if _distorts(config):
            raise CheckpointError(
                f"{source.name}: transformers distorts the positions of an oblong grid, {config.grid}, and "
                "vitascope does not"
            )
        return config

    def read_preprocess(self, source: Source, config: ViTConfig) -> Preprocess:
        """The preprocessing of `preprocessor_config.json`, or of their processor's defaults."""
        return settings.read_processor(source.name, source.preprocessor, "beit", config)

    def write(self, config: ViTConfig, state: State, preprocess: Preprocess, folder: Path) -> list[Path]:
        embedding, block, classifies = config.embedding, config.block, config.readout.head == "linear"
        names = config.class_names or tuple(f"LABEL_{index}" for index in range(config.num_classes))
        names = names if classifies else ()
        # BeitModel has a pooler with a norm, Data2VecVisionModel has none.
        bare = config.readout.pool_norm == "none"
        body = "Data2VecVisionModel" if bare else "BeitModel"
        values: dict[str, Any] = {
            "architectures": ["BeitForImageClassification" if classifies else body],
            "model_type": "data2vec-vision" if bare else "beit",
            "hidden_size": config.embed_dim,
            "num_hidden_layers": config.depth,
            "num_attention_heads": config.num_heads,
            "intermediate_size": config.mlp_dim,
            "hidden_act": {"gelu_tanh": "gelu_pytorch_tanh"}.get(block.mlp, block.mlp),
            "layer_norm_eps": float(block.norm_eps),
            "image_size": settings.one_or_two(config.image_hw),
            "patch_size": config.patch_hw[0],
            "num_channels": config.in_channels,
            # 0 is none there, so a start at 0 needs another.
            "layer_scale_init_value": 0.0 if block.layer_scale is None else float(block.layer_scale) or 1e-5,
            "use_absolute_position_embeddings": embedding.learned == "all",
            "use_relative_position_bias": embedding.positions == "relative_by_block",
            "use_shared_relative_position_bias": embedding.positions == "relative",
            "use_mean_pooling": config.readout.pool == "mean",
            "id2label": {str(index): name for index, name in enumerate(names)},
            "label2id": {name: index for index, name in enumerate(names)},
        }
        if classifies and config.outputs == "independent":
            values["problem_type"] = PROBLEMS[config.outputs]
            if config.thresholds:
                values["thresholds"] = list(config.thresholds)  # for us: transformers has none
        weights = write_safetensors(folder / "model.safetensors", state)
        processor = settings.written_processor(preprocess)
        described = write_json(folder / "config.json", values)
        return [weights, described, write_json(folder / "preprocessor_config.json", processor)]


def _distorts(config: ViTConfig) -> bool:
    """Whether transformers exchanges the axes of a grid in its positions."""
    return config.embedding.positions != "none" and config.grid[0] != config.grid[1]
