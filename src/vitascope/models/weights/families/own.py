"""vitascope's own model folder: `config.json`, `model.safetensors`, `preprocessor_config.json`.

`config.json` holds the architecture and the class names; its "architecture" is "resnet", or "vit", which is
the default. No other family has ResNets.
"""

from pathlib import Path

from vitascope.models.config import OPTIONS
from vitascope.models.configuration import options_of
from vitascope.models.preprocess import Preprocess
from vitascope.models.sizes import ModelConfig, architecture_record, config_of
from vitascope.models.trust import Trust
from vitascope.models.weights.files import CheckpointError, write_safetensors
from vitascope.models.weights.hub import CONFIG, PREPROCESSOR
from vitascope.models.weights.mapping import Family, Source, State, Table
from vitascope.storage import write_json

WEIGHTS = "model.safetensors"
MODEL_TYPE = "vitascope"
TRUST = "trust."
"""Before the names of a `Trust`'s tensors."""


class Vitascope(Family):
    """Every Vision Transformer, every ResNet and every ensemble, under our own names."""

    name = MODEL_TYPE
    supports = dict.fromkeys(OPTIONS, ())
    supports_every_kind = True
    ignored = (f"{TRUST}*",)

    def recognizes(self, source: Source) -> bool:
        return source.config.get("model_type") == MODEL_TYPE

    def table(self, config: ModelConfig) -> Table:
        return {"*": "*"}

    def read_config(self, source: Source) -> ModelConfig:
        options = dict(source.config)
        options.pop("model_type", None)
        with options_of(source.folder / CONFIG):
            return config_of(options)

    def read_preprocess(self, source: Source, config: ModelConfig) -> Preprocess:
        if not source.preprocessor:
            raise CheckpointError(f"{source.name}: missing or empty {PREPROCESSOR}")
        with options_of(source.folder / PREPROCESSOR):
            return Preprocess.from_dict(source.preprocessor)

    def read_trust(self, source: Source, config: ModelConfig) -> Trust | None:
        names = [name for name in source.tensors if name.startswith(TRUST)]
        own = {name.removeprefix(TRUST): source.tensors[name] for name in names}
        with options_of(source.folder / WEIGHTS):
            sizes = config.num_classes, config.feature_dim, config.members
            return Trust.of_tensors(own, *sizes) if own else None

    def write_trust(self, trust: Trust) -> State:
        return {f"{TRUST}{name}": tensor.cpu() for name, tensor in trust.tensors().items()}

    def write(self, config: ModelConfig, state: State, preprocess: Preprocess, folder: Path) -> list[Path]:
        return [
            write_safetensors(folder / WEIGHTS, state),
            write_json(folder / PREPROCESSOR, preprocess.to_dict()),
            write_json(folder / CONFIG, {"model_type": MODEL_TYPE, **architecture_record(config)}),
        ]
