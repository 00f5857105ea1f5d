"""A library whose models need several tables: one class of `Family` for each, tried in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from vitascope.data.preprocess import Preprocess
from vitascope.model.config import OPTIONS, ViTConfig
from vitascope.model.sizes import ModelConfig
from vitascope.weights.mapping import Family, Source, State, Table, misfit, supporting


class Library(Family):
    """The classes of one library under one name.

    A checkpoint is read by the class that knows its architecture, by default the first. A model is written by
    the first that can run it exactly.
    """

    supports: ClassVar[Mapping[str, tuple[Any, ...]]] = supporting(" ".join(OPTIONS))  # see `conflicts`

    def __init__(self, name: str, classes: Sequence[Family]) -> None:
        self.name = name  # type: ignore[misc]  # of this library, not of all
        self.classes = tuple(classes)

    def reader(self, source: Source) -> Family:
        return next((it for it in self.classes[1:] if it.reads(source)), self.classes[0])

    def writer(self, config: ViTConfig) -> Family:
        """The class that writes a model: the first that holds it, or else the one that lacks the least."""
        return min(self.classes, key=lambda it: len(misfit(it, config)))

    def recognizes(self, source: Source) -> bool:
        return any(it.recognizes(source) for it in self.classes)

    def conflicts(self, config: ViTConfig) -> list[str]:
        reason = misfit(self.writer(config), config)
        return [reason.removeprefix(f"{self.name} has no model with ")] if reason else []

    def fixed_there(self, config: ViTConfig) -> ViTConfig:
        return self.writer(config).fixed_there(config)

    def table(self, config: ViTConfig) -> Table:
        return self.writer(config).table(config)

    def before_reading(self, source: Source) -> Source:
        return self.reader(source).before_reading(source)

    def before_writing(self, state: State, config: ViTConfig) -> State:
        return self.writer(config).before_writing(state, config)

    def read_config(self, source: Source) -> ModelConfig:
        return self.reader(source).read_config(source)

    def read_preprocess(self, source: Source, config: ViTConfig) -> Preprocess:
        return self.reader(source).read_preprocess(source, config)

    def guessed(self, source: Source, config: ViTConfig) -> str:
        return self.reader(source).guessed(source, config)

    def write(self, config: ViTConfig, state: State, preprocess: Preprocess, folder: Path) -> list[Path]:
        return self.writer(config).write(config, state, preprocess, folder)
