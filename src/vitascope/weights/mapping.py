"""The engine of checkpoint families: one table of names a family, applied both ways, strict both ways.

A table says where a family keeps each of our tensors. Its keys are our names, its values theirs; `{i}` stands
for a number and `*` for whatever is left (`weight`, `bias`). A value that is not a plain name says how the
tensor is laid out there. Read with `from_family`, written with `to_family`: whatever is missing, left over or
of another shape is listed and refused.
"""

from __future__ import annotations

import abc
import dataclasses
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from vitascope.data.preprocess import Preprocess
from vitascope.model.config import OPTIONS, ViTConfig
from vitascope.model.options import DEPENDENT_OPTIONS
from vitascope.model.vit import VisionTransformer
from vitascope.storage import make_folder
from vitascope.weights.files import CheckpointError
from vitascope.weights.hub import SETTINGS, weights_name

State = dict[str, Tensor]

MAX_BLOCKS = 1_000  # the deepest ViTs have about fifty
MAX_NUMBERS = 1 << 40  # the largest have about 22 billion
MAX_ENLARGED = 4  # times the model's side: the largest pictures that it is given, 16 times as many tokens
SMALL_PICTURE = 512  # the side up to which pictures fit a model of any size


@dataclasses.dataclass(frozen=True)
class Stored:
    """How a family stores one of our tensors: under which names, and how to get from the one to the other."""

    names: tuple[str, ...]
    """Theirs, with the key's placeholders."""
    join: Callable[[Sequence[Tensor]], Tensor] = lambda parts: parts[0]
    """Theirs to ours."""
    split: Callable[[Tensor], Sequence[Tensor]] = lambda tensor: [tensor]
    """Ours to theirs: the inverse, bitwise."""


def stacked(*names: str) -> Stored:
    """Our one tensor is theirs one after another along the first axis, in equal parts."""

    def join(parts: Sequence[Tensor]) -> Tensor:
        if len({part.shape for part in parts}) > 1:
            raise ValueError("parts of different shapes")
        return torch.cat(tuple(parts))

    return Stored(names, join, lambda tensor: tensor.chunk(len(names)))


def reshaped(name: str, theirs: Callable[[Tensor], Tensor], ours: Callable[[Tensor], Tensor]) -> Stored:
    """Our tensor is theirs in another layout."""
    return Stored((name,), lambda parts: ours(parts[0]), lambda tensor: [theirs(tensor)])


Table = Mapping[str, str | Stored]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """A checkpoint as it was found."""

    name: str
    """What the user called it, for messages."""
    tensors: State
    """By their names."""
    file: str = ""
    """The weights file's own name."""
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """`config.json`, where there is one."""
    preprocessor: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """`preprocessor_config.json`, where there is one."""
    training: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What a training script saved in the weights file: `arch` and its arguments, where there are any."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Options of `ViTConfig` that the user named with the file, since it does not tell them."""

    def shape(self, key: str) -> tuple[int, ...]:
        """The shape of a tensor.

        Raises:
            CheckpointError: it is missing.
        """
        if key not in self.tensors:
            raise CheckpointError(f"{self.name}: missing {key}")
        return tuple(self.tensors[key].shape)

    def has(self, key: str) -> bool:
        """Whether there is such a tensor."""
        return key in self.tensors

    def has_any(self, prefix: str) -> bool:
        """Whether any tensor's name starts so."""
        return any(name.startswith(prefix) for name in self.tensors)

    def count(self, pattern: str) -> int:
        """How many different numbers stand at the `{i}` of a pattern: the depth, say."""
        matches = (_regex(pattern).match(key) for key in self.tensors)
        return len({match["i"] for match in matches if match})


class Family(abc.ABC):
    """One library's checkpoints: how to tell them, read them and write them."""

    name: ClassVar[str]
    """What `--to` and `family=` call it."""
    holds: ClassVar[Mapping[str, tuple[Any, ...]]]
    """For each option that may differ from `ViTConfig()`, the values that this family's models can have."""
    ignored: ClassVar[tuple[str, ...]] = ()
    """Patterns of their tensors that a classifier does not need."""

    @abc.abstractmethod
    def recognizes(self, source: Source) -> bool:
        """Whether a checkpoint is one of this family's, from its keys and its configuration."""

    @abc.abstractmethod
    def read_config(self, source: Source) -> ViTConfig:
        """The architecture, from their configuration and the shapes.

        Raises:
            CheckpointError: a model that is none of ours, or numbers that cannot be known.
        """

    @abc.abstractmethod
    def read_preprocess(self, source: Source, config: ViTConfig) -> Preprocess:
        """The preprocessing that the weights were trained with."""

    @abc.abstractmethod
    def table(self, config: ViTConfig) -> Table:
        """Where each of our tensors is kept; the first key that matches counts."""

    @abc.abstractmethod
    def write(self, config: ViTConfig, state: State, preprocess: Preprocess, folder: Path) -> list[Path]:
        """Write what the other library itself loads; `state` has their names. Returns the files."""

    def assumed(self, source: Source, config: ViTConfig) -> str:
        """What `read_config` took for granted since the checkpoint does not tell it, in words; else empty."""
        return ""

    def settled(self, config: ViTConfig) -> ViTConfig:
        """What the other library will run: `config`, but for small things that no file of theirs can say,
        such as the epsilon of a norm. A conversion tells the change."""
        return config

    def objections(self, config: ViTConfig) -> list[str]:
        """What stands against holding a model although each of its options alone could be held."""
        return []

    def arriving(self, source: Source) -> Source:
        """What is no matter of names, before reading: old spellings, and layouts of whole models."""
        return source

    def leaving(self, state: State, config: ViTConfig) -> State:
        """What is no matter of names, before writing."""
        return state


def from_family(family: Family, source: Source, config: ViTConfig) -> State:
    """A state of ours from a checkpoint of a family's (that has been through `arriving`).

    Raises:
        CheckpointError: listing, by their names, all that is missing, left over or misshapen.
    """
    check_claims(source, config)
    state: State = {}
    used: set[str] = set()
    faults = []
    for ours, shape, stored in rows(family, config):
        used |= set(stored.names)
        missing = [name for name in stored.names if not source.has(name)]
        if missing:
            faults += [f"missing {name}" for name in missing]
            continue
        tensor = joined(stored, source)
        if tensor is None or tuple(tensor.shape) != shape:
            found = ", ".join(f"{name} is {source.shape(name)}" for name in stored.names)
            faults.append(f"{found}, the model's {ours} {shape}")
        elif not tensor.is_floating_point():  # quantized: its numbers mean something else
            faults.append(f"{', '.join(stored.names)} in {tensor.dtype}, no floating-point numbers")
        else:
            state[ours] = tensor
    ignored = [_regex(pattern) for pattern in family.ignored]
    for name in sorted(source.tensors.keys() - used):
        if not any(pattern.match(name) for pattern in ignored):
            faults.append(f"extra {name} {source.shape(name)}")
    refuse(faults, f"{source.name}: not a whole {family.name} checkpoint of this architecture")
    return state


def check_claims(source: Source, config: ViTConfig) -> None:
    """Refuse an architecture that no file could fill, before building it costs memory or overflows.

    Raises:
        CheckpointError: with the limits.
    """
    blocks = config.depth + sum(config.embedding.resnet_layers)
    if blocks > MAX_BLOCKS or max(config.num_parameters, config.num_tokens) > MAX_NUMBERS:
        raise CheckpointError(
            f"{source.name}: its configuration claims more than any ViT has: over {MAX_BLOCKS} blocks, or "
            f"over {MAX_NUMBERS} tokens or parameters"
        )


def check_preprocess(name: str, preprocess: Preprocess, image_size: tuple[int, int]) -> Preprocess:
    """Refuse pictures far larger than the model's own, which cost gigabytes; returns the preprocessing.

    Raises:
        CheckpointError: naming the size of the pictures and that of the model.
    """
    limit = max(MAX_ENLARGED * max(image_size), SMALL_PICTURE)
    for rows, columns in (preprocess.image_size, preprocess.resize_to or (0, 0)):
        if not max(rows, columns) <= limit:  # so that NaN fails too
            raise CheckpointError(
                f"{name}: its preprocessing makes pictures of {rows}x{columns} pixels for a model of "
                f"{image_size[0]}x{image_size[1]}, which gets {limit} a side at most; correct the size in "
                "its preprocessing settings"
            )
    return preprocess


def check_labels(source: Source) -> None:
    """Refuse a head of transformers' whose classes are not exclusive, since softmax would be wrong.

    Raises:
        CheckpointError: `problem_type` says so.
    """
    problem = source.config.get("problem_type")
    if problem not in (None, "single_label_classification"):
        bare = ", add_pooling_layer=False" if source.config.get("model_type") in ("vit", "deit") else ""
        raise CheckpointError(
            f"{source.name}: problem_type {problem!r} is not supported yet: probabilities here are a softmax "
            "over exclusive classes. The body alone loads, from the folder that transformers writes with "
            f"AutoModel.from_pretrained(MODEL{bare}).save_pretrained(FOLDER)"
        )


def joined(stored: Stored, source: Source) -> Tensor | None:
    """Our tensor, made of theirs; None where their shapes do not even fit each other."""
    try:
        return stored.join([source.tensors[name] for name in stored.names])
    except (RuntimeError, IndexError, ValueError):  # what reshape, cat and permute raise
        return None


def to_family(family: Family, model: VisionTransformer, preprocess: Preprocess, folder: Path) -> list[Path]:
    """Write a model as a family's library itself loads it; returns the files.

    Raises:
        CheckpointError: the family has no such model; says which options it lacks.
    """
    config = family.settled(model.config)
    check_holds(family, config)
    ours = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    state: State = {}
    for name, _, stored in rows(family, config):
        parts = stored.split(ours[name])
        for theirs, part in zip(stored.names, parts, strict=True):
            assert theirs not in state, f"the table of {family.name} names {theirs} twice"
            state[theirs] = part.contiguous()
    make_folder(folder)
    with tempfile.TemporaryDirectory(prefix=".writing-", dir=folder) as aside:  # a full disk leaves nothing
        files = family.write(config, family.leaving(state, config), preprocess, Path(aside))
        return move_in(files, folder)


def move_in(files: Sequence[Path], folder: Path) -> list[Path]:
    """Move what was written aside into its folder, so that new weights never stand beside old settings.

    Raises:
        CheckpointError: other weights in the folder would be read instead.
    """
    names = [file.name for file in files]
    try:
        read = weights_name(folder, {*names, *(path.name for path in folder.iterdir())})
    except CheckpointError:  # one of several: reading the folder says so
        read = None
    if read is not None and read not in names:
        raise CheckpointError(f"{folder}: has {read}, which would be read instead of {names[0]}")
    last = sorted(files, key=lambda file: file.name == SETTINGS[0])  # without it a folder is refused
    if any(_differs(file, folder / file.name) for file in files if file.suffix == ".json"):
        (folder / SETTINGS[0]).unlink(missing_ok=True)
    for file in last:
        file.replace(folder / file.name)
    return [folder / name for name in names]


def _differs(file: Path, other: Path) -> bool:
    return not other.is_file() or file.read_bytes() != other.read_bytes()


def check_holds(family: Family, config: ViTConfig) -> None:
    """Refuse a model that a family's library cannot run exactly.

    Raises:
        CheckpointError: with every option that stands against it.
    """
    default = ViTConfig()
    reasons = []
    for option, group in OPTIONS.items():
        if group in (None, "training") or option == "resample":
            continue
        needs, value = DEPENDENT_OPTIONS.get(option, (None, None))
        if needs is not None and config.option(needs) != value:
            continue
        value = config.option(option)
        allowed = family.holds.get(option, (default.option(option),))
        if allowed and value not in allowed:
            reasons.append(f"{option} {value!r}")
    reasons += family.objections(config)
    if reasons:
        raise CheckpointError(f"{family.name} has no model with {', '.join(reasons)}")


def changes(family: Family, config: ViTConfig) -> list[str]:
    """What the other library will run otherwise, in words."""
    settled = family.settled(config)
    return [
        f"{option} {config.option(option)!r} becomes {settled.option(option)!r}: {family.name} has no other"
        for option in OPTIONS
        if config.option(option) != settled.option(option)
    ]


def rows(family: Family, config: ViTConfig) -> Iterable[tuple[str, tuple[int, ...], Stored]]:
    """Each of our tensors: its name, its shape, and how the family stores it."""
    with torch.device("meta"):
        expected = VisionTransformer(config).state_dict()
    table = [
        (_regex(ours), stored if isinstance(stored, Stored) else Stored((stored,)))
        for ours, stored in family.table(config).items()
    ]
    for name, tensor in expected.items():
        for pattern, stored in table:
            match = pattern.match(name)
            if match:
                theirs = tuple(_filled(template, match) for template in stored.names)
                yield name, tuple(tensor.shape), dataclasses.replace(stored, names=theirs)
                break
        else:
            raise CheckpointError(f"{family.name} has no place for {name}")


def _regex(pattern: str) -> re.Pattern[str]:
    """`{name}` stands for a number, `*` for the rest."""
    escaped = re.escape(pattern).replace(r"\*", "(?P<rest>.*)")
    return re.compile(re.sub(r"\\{(\w+)\\}", r"(?P<\1>\\d+)", escaped) + r"\Z")


def _filled(template: str, match: re.Match[str]) -> str:
    """A name of theirs, with what the placeholders of ours stood for."""
    return template.replace("*", match.groupdict().get("rest") or "").format(**match.groupdict())


def refuse(faults: Sequence[str], what: str) -> None:
    """Raise CheckpointError with a list of faults, if there are any."""
    if faults:
        more = f"; and {len(faults) - 8} more" if len(faults) > 8 else ""
        listed = "; ".join(fault[:400] for fault in faults[:8]) + more
        raise CheckpointError(f"{what}: {listed}")
