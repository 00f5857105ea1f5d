"""A library whose models need several tables: parts, a family of its own for each."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from vitascope.models.config import ViTConfig
from vitascope.models.preprocess import Preprocess
from vitascope.models.sizes import ModelConfig
from vitascope.models.weights.mapping import Family, Source, State, Table


class Library(Family):
    """The parts of one library under one name.

    A checkpoint is read by the part that knows its architecture, by default the first. A model is written by
    the first that can run it exactly.
    """

    supports: ClassVar[Mapping[str, tuple[Any, ...]]] = {}  # see `reasons`

    def __init__(self, name: str, parts: Sequence[Family]) -> None:
        self.name = name  # type: ignore[misc]  # of this library, not of all
        self.parts = tuple(parts)

    def of(self, source: Source) -> Family:
        return next((part for part in self.parts[1:] if part.reads(source)), self.parts[0])

    def holding(self, config: ViTConfig) -> Family:
        return min(self.parts, key=lambda part: len(part.reasons(config)))  # the first of several

    def reasons(self, config: ViTConfig) -> list[str]:
        """Of the parts that lack least: what they lack, or none if one holds the model."""
        found = [(part, part.reasons(config)) for part in self.parts]
        fewest = min(len(reasons) for _, reasons in found)
        lacking: dict[str, str] = {}
        for part, reasons in found:
            if len(reasons) == fewest:
                lacking.setdefault(", ".join(reasons), part.label)
        if len(lacking) > 1:
            return [" or ".join(f"{reasons} ({label})" for reasons, label in lacking.items())]
        return [reasons for reasons in lacking if reasons]

    def recognizes(self, source: Source) -> bool:
        return any(part.recognizes(source) for part in self.parts)

    def before_reading(self, source: Source) -> Source:
        return self.of(source).before_reading(source)

    def read_config(self, source: Source) -> ModelConfig:
        return self.of(source).read_config(source)

    def read_preprocess(self, source: Source, config: ViTConfig) -> Preprocess:
        return self.of(source).read_preprocess(source, config)

    def guessed(self, source: Source, config: ViTConfig) -> str:
        return self.of(source).guessed(source, config)

    def table(self, config: ViTConfig) -> Table:
        return self.holding(config).table(config)

    def fixed_there(self, config: ViTConfig) -> ViTConfig:
        return self.holding(config).fixed_there(config)

    def before_writing(self, state: State, config: ViTConfig) -> State:
        return self.holding(config).before_writing(state, config)

    def write(self, config: ViTConfig, state: State, preprocess: Preprocess, folder: Path) -> list[Path]:
        return self.holding(config).write(config, state, preprocess, folder)
