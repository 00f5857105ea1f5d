"""`ModelType`: one model of transformers, as a family of its own.

A new one is a subclass in a file of its own with its table, added to `TYPES` in `family.py`. What is common
to all is here: `config.json`, the prefixes of whole models, the two files beside the weights.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from vitascope.models.config import ViTConfig
from vitascope.models.preprocess import Preprocess
from vitascope.models.weights.families.huggingface import processors
from vitascope.models.weights.families.huggingface.processors import Evaluation, sides
from vitascope.models.weights.files import CheckpointError, write_safetensors
from vitascope.models.weights.mapping import (
    PROBLEMS,
    Family,
    Source,
    State,
    Table,
    checked_config,
    class_names,
    outputs_options,
    remainder,
    respelled,
)
from vitascope.storage import write_json

BLOCK, QKV = "encoder.blocks.{i}.", ("query", "key", "value")
INPUT: dict[str, Any] = {"image_size": 224, "patch_size": 16, "num_channels": 3, "hidden_act": "gelu"}
BASE: dict[str, Any] = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
BASE |= {**INPUT, "intermediate_size": 3072, "layer_norm_eps": 1e-12, "qkv_bias": True}
"""The defaults of most configurations: ViT-B/16."""

_TANH = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_python_tanh", "gelu_accurate")
ACTIVATIONS = {"gelu": "gelu", "gelu_python": "gelu", "quick_gelu": "quick_gelu"}
ACTIVATIONS |= dict.fromkeys(_TANH, "gelu_tanh")  # one function, in five ways to compute it


class ModelType(Family):
    """One `model_type` of transformers, or several with the same tensors."""

    name = "huggingface"
    kinds: ClassVar[tuple[str, ...]]
    """The values of `model_type` that are read; the first is written."""
    defaults: ClassVar[Mapping[str, Any]]
    """Of its configuration."""
    body: ClassVar[str]
    """Its class without a head."""
    classifier: ClassVar[str] = ""
    """Its class with a linear head."""
    prefix: ClassVar[str] = ""
    """Of the body's tensors in whole models, as they are written."""
    spellings: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Patterns of other names for its tensors, with the names in the table."""
    names: ClassVar[Table]
    position_table: ClassVar[str] = "embeddings.position_embeddings"
    epsilon: ClassVar[str] = "layer_norm_eps"
    """The name of the epsilon of its norms."""
    rule: ClassVar[str] = "huggingface"
    """Its interpolation of positions."""
    processor: ClassVar[str] = "ViT"
    """The processor of a `preprocessor_config.json` that names none."""
    evaluation: ClassVar[Evaluation] = "crop"
    """The preprocessing of folders without that file."""

    @property
    def label(self) -> str:
        return self.kinds[0]

    def recognizes(self, source: Source) -> bool:
        return source.config.get("model_type") in self.kinds

    def table(self, config: ViTConfig) -> Table:
        return self.names

    def before_reading(self, source: Source) -> Source:
        """The names of the table, and without what only training needs; `change` does the rest."""
        tensors = source.renamed(lambda name: respelled(name, self.spellings)).tensors
        self.change(tensors)
        return dataclasses.replace(source, tensors=tensors)

    def change(self, tensors: State) -> None:
        """Changes of their tensors, in place, that a table cannot express."""

    def fixed_there(self, config: ViTConfig) -> ViTConfig:
        return config.replace(resample=self.rule)

    def read_config(self, source: Source) -> ViTConfig:
        if not source.config:
            raise CheckpointError(
                f"{source.name}: no config.json, and no shape shows the number of heads; give the "
                "architecture: from_pretrained(..., config=ViTConfig(...))"
            )
        values = {**self.defaults, **source.config}
        embed_dim = int(values["hidden_size"])
        options: dict[str, Any] = {
            "image_size": sides(values["image_size"]),
            "patch_size": sides(values["patch_size"]),
            "in_channels": values["num_channels"],
            "embed_dim": embed_dim,
            "depth": values["num_hidden_layers"],
            "num_heads": values["num_attention_heads"],
            "norm_eps": values[self.epsilon],
            "qkv_bias": "all" if values.get("qkv_bias", True) else "none",
            "mlp": self.mlp(source, values),
            "resample": self.rule,
        }
        if "intermediate_size" in values:
            options["mlp_ratio"] = values["intermediate_size"] / embed_dim
        options["remainder"] = remainder(options)
        if source.has(self.position_table):
            (height, width), (ph, pw) = options["image_size"], options["patch_size"]
            length = source.shape(self.position_table)[-2:-1]  # empty if it is misshapen, which is told later
            options["position_prefix"] = length != ((height // ph) * (width // pw),)
        options |= self.own_options(source, values)
        return checked_config(source, options)

    def mlp(self, source: Source, values: Mapping[str, Any]) -> str:
        """The option `mlp`."""
        return activation(source, values["hidden_act"])

    def own_options(self, source: Source, values: Mapping[str, Any]) -> dict[str, Any]:
        """The options of this model alone, from its configuration and its tensors: the head, for example."""
        return classifier_options(source)

    def read_preprocess(self, source: Source, config: ViTConfig) -> Preprocess:
        """The preprocessing of `preprocessor_config.json`, or of the authors' evaluation."""
        if not source.preprocessor:
            return processors.published(self.evaluation, config)
        return processors.read_processor(source.name, source.preprocessor, self.processor, config)

    def before_writing(self, state: State, config: ViTConfig) -> State:
        """The prefix of whole models."""
        prefix = self.prefix if config.readout.head == "linear" else ""
        heads = ("classifier.", "cls_classifier.", "distillation_classifier.", "visual_projection.")
        return {name if name.startswith(heads) else prefix + name: tensor for name, tensor in state.items()}

    def class_there(self, config: ViTConfig) -> str:
        """Its class for a configuration."""
        return self.classifier if config.readout.head == "linear" else self.body

    def own_config(self, config: ViTConfig) -> dict[str, Any]:
        """The values of its `config.json` that other models lack."""
        return {"intermediate_size": config.mlp_dim, "qkv_bias": config.block.qkv_bias == "all"}

    def written_config(self, config: ViTConfig) -> dict[str, Any]:
        """The content of `config.json`."""
        block, classifies = config.block, config.gives_classes
        # Without a head there are no classes, and their classifier returns features.
        names = config.class_names or tuple(f"LABEL_{index}" for index in range(config.num_classes))
        names = names if classifies else ()
        values: dict[str, Any] = {
            "architectures": [self.class_there(config)],
            "model_type": self.kinds[0],
            "hidden_size": config.embed_dim,
            "num_hidden_layers": config.depth,
            "num_attention_heads": config.num_heads,
            "hidden_act": {"swiglu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}.get(block.mlp, block.mlp),
            self.epsilon: float(config.norms.norm_eps),
            "image_size": _one_or_two(config.image_hw),
            "patch_size": _one_or_two(config.patch_hw),
            "num_channels": config.in_channels,
            "id2label": {str(index): name for index, name in enumerate(names)},
            "label2id": {name: index for index, name in enumerate(names)},
        }
        if classifies and config.decision_thresholds:
            values["problem_type"] = PROBLEMS[config.outputs]
            if config.thresholds:
                values["thresholds"] = list(config.thresholds)  # for us: transformers has none
        return values | self.own_config(config)

    def write(self, config: ViTConfig, state: State, preprocess: Preprocess, folder: Path) -> list[Path]:
        processor = processors.written_processor(preprocess)
        weights = write_safetensors(folder / "model.safetensors", state)
        described = write_json(folder / "config.json", self.written_config(config))
        return [weights, described, write_json(folder / "preprocessor_config.json", processor)]


def activation(source: Source, given: Any, known: Mapping[str, str] = ACTIVATIONS, of: str = "an MLP") -> str:
    """The option `mlp` of their `hidden_act`."""
    if not isinstance(given, str) or given not in known:
        raise CheckpointError(f"{source.name}: hidden_act {given!r} of {of} is none of {', '.join(known)}")
    return known[given]


def classifier_options(source: Source, tensor: str = "classifier.weight") -> dict[str, Any]:
    """The options of a linear head, or of none; its names, and what its outputs are."""
    if not source.has(tensor):
        return {"head": "none"}
    count = source.shape(tensor, 2)[0]
    names = class_names(source.config.get("id2label"), count)
    return {"head": "linear", "num_classes": count, "class_names": names, **outputs_options(source)}


def _one_or_two(size: tuple[int, int]) -> int | list[int]:
    """The side of a square: their ViT divides by it."""
    return size[0] if size[0] == size[1] else list(size)
