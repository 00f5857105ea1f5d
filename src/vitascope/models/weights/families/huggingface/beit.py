"""transformers' BEiT and Data2VecVision, which have the same tensors.

Facts: transformers 5.23.0, `models/{beit,data2vec}`. Files keep the names of version 4, which every version
loads; in memory version 5 has others, and those are read too.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from vitascope.models.config import ViTConfig
from vitascope.models.options import CLASSES
from vitascope.models.preprocess import Preprocess
from vitascope.models.weights.families import relative_tables
from vitascope.models.weights.families.huggingface import processors
from vitascope.models.weights.families.huggingface.model_type import (
    BASE,
    BLOCK,
    QKV,
    ModelType,
    classifier_options,
)
from vitascope.models.weights.families.huggingface.processors import sides
from vitascope.models.weights.families.huggingface.vit import LAYER, SPELLINGS, VIT
from vitascope.models.weights.files import CheckpointError
from vitascope.models.weights.mapping import PLAIN_VIT, Source, State, Table, stacked, supporting

_OWN = "encoder.layer.{}.attention.attention.relative_position_bias."
_SHARED = "encoder.relative_position_bias."
BEIT: Table = {
    BLOCK + "attention.qkv.bias": stacked(*(f"{LAYER}attention.attention.{part}.bias" for part in QKV[::2])),
    BLOCK + "scale{n}.gamma": LAYER + "lambda_{n}",
    "pool_norm.*": "pooler.layernorm.*",
    **VIT,
}
"""Keys have no bias."""
_SPELLINGS = (
    (r"^(beit|data2vec_vision)\.", ""),
    (r"^shared_position_bias\.", _SHARED),
    (r"^layers\.(\d+)\.relative_position_bias\.", _OWN.format(r"\1")),
    *SPELLINGS,
)


class Beit(ModelType):
    """transformers' Beit, and Data2VecVision, whose body has no pooler with a norm."""

    kinds = ("beit", "data2vec-vision")
    defaults: ClassVar[Mapping[str, Any]] = {
        **{name: value for name, value in BASE.items() if name != "qkv_bias"},
        "layer_scale_init_value": 0.1,
        "use_mean_pooling": True,
    }
    body, classifier, prefix = "BeitModel", "BeitForImageClassification", "beit."
    spellings = _SPELLINGS
    names = BEIT
    processor = "Beit"
    supports = PLAIN_VIT | supporting(
        "norm_eps layer_scale",
        positions=("relative", "relative_by_block", "learned", "none"),
        absolute=("none", "all"),
        qkv_bias=("no_key",),
        mlp=("gelu", "gelu_tanh", "quick_gelu"),
        pool=("cls", "mean"),
        pool_norm=("before", "after", "none"),
        head=("linear", "none"),
        outputs=CLASSES,
    )
    ignored = ("embeddings.mask_token", "*relative_position_index")

    def conflicts(self, config: ViTConfig) -> list[str]:
        readout, mean = config.readout, config.readout.pool == "mean"
        fits = {"after": mean, "before": not mean, "none": mean and readout.head == "none"}
        read = f"pool {readout.pool!r}, pool_norm {readout.pool_norm!r} and head {readout.head!r}"
        against = {
            "class_token False": not readout.has_class_token,
            read: not fits[readout.pool_norm],
            "patches that are not square": config.patch_hw[0] != config.patch_hw[1],
            f"positions of an oblong grid, {config.grid}": _distorts(config),
        }
        return [reason for reason, stands in against.items() if stands]

    def table(self, config: ViTConfig) -> Table:
        by_block = config.embedding.positions == "relative_by_block"
        return {**relative_tables.relative_names(by_block, config.depth, _OWN, _SHARED), **BEIT}

    def before_reading(self, source: Source) -> Source:
        """Each table of relative positions in two parts; of masked pre-training the body and its norm."""
        found = super().before_reading(source)
        grid = None  # without settings the user gives the architecture, of which only squares are read
        if source.config:
            values = {**self.defaults, **source.config}
            height, width = sides(values["image_size"])
            ph, pw = sides(values["patch_size"])
            grid = height // ph, width // pw
        relative_tables.split_tables(found.tensors, grid, source.name)
        return found

    def change(self, tensors: State) -> None:
        """The decoder of masked pre-training stands beside the body."""
        for name in [name for name in tensors if name.startswith("lm_head.")]:
            del tensors[name]

    def own_options(self, source: Source, values: Mapping[str, Any]) -> dict[str, Any]:
        learned, scale = source.has(self.position_table), values["layer_scale_init_value"]
        after = source.has("pooler.layernorm.weight")
        return {
            **classifier_options(source),
            "qkv_bias": "no_key",
            "layer_scale": float(scale) if source.has("encoder.layer.0.lambda_1") else None,
            "positions": "learned" if learned else "none",
            "position_prefix": True,
            "class_token": True,
            "pool": "mean" if values["use_mean_pooling"] else "cls",
            "pool_norm": "after" if after else "before" if source.has("layernorm.weight") else "none",
            **relative_tables.relative_options(source, _OWN, _SHARED, learned=learned),
        }

    def read_config(self, source: Source) -> ViTConfig:
        config = super().read_config(source)
        if _distorts(config):
            raise CheckpointError(
                f"{source.name}: transformers distorts the positions of an oblong grid, {config.grid}, and "
                "vitascope does not"
            )
        return config

    def read_preprocess(self, source: Source, config: ViTConfig) -> Preprocess:
        """The preprocessing of `preprocessor_config.json`, or of their processor's defaults."""
        return processors.read_processor(source.name, source.preprocessor, self.processor, config)

    def before_writing(self, state: State, config: ViTConfig) -> State:
        state = dict(state)
        relative_tables.join_tables(state)
        return super().before_writing(state, config)

    def class_there(self, config: ViTConfig) -> str:
        bare = config.readout.pool_norm == "none"
        return "Data2VecVisionModel" if bare else super().class_there(config)

    def own_config(self, config: ViTConfig) -> dict[str, Any]:
        embedding, scale = config.embedding, config.block.layer_scale
        return {
            "model_type": "data2vec-vision" if config.readout.pool_norm == "none" else "beit",
            "intermediate_size": config.mlp_dim,
            "patch_size": config.patch_hw[0],
            # 0 is none there, so a start at 0 needs another.
            "layer_scale_init_value": 0.0 if scale is None else float(scale) or 1e-5,
            "use_absolute_position_embeddings": embedding.learned == "all",
            "use_relative_position_bias": embedding.positions == "relative_by_block",
            "use_shared_relative_position_bias": embedding.positions == "relative",
            "use_mean_pooling": config.readout.pool == "mean",
        }


def _distorts(config: ViTConfig) -> bool:
    """Whether transformers exchanges the axes of a grid in its positions."""
    return config.embedding.positions != "none" and config.grid[0] != config.grid[1]
