"""Checkpoint families: one table of tensor names for each, applied strictly in both directions.

The keys of a table are our names, its values theirs; `{i}` stands for a number and `*` for the rest
(`weight`, `bias`). A value that is not a plain name describes another layout of the tensor.
"""

import abc
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor

from vitascope.errors import UserError
from vitascope.models.config import OPTIONS, ViTConfig
from vitascope.models.configuration import traits
from vitascope.models.options import AppliesWith, pair
from vitascope.models.preprocess import Preprocess
from vitascope.models.resnet_config import ResNetConfig
from vitascope.models.sizes import ModelConfig
from vitascope.models.trust import Trust
from vitascope.models.vision_model import VisionModel, build, kind_of
from vitascope.models.weights.files import CheckpointError
from vitascope.models.weights.hub import CONFIG, weights_name
from vitascope.storage import WriteError, make_folder, settle, temporary_folder

State = dict[str, Tensor]

PROBLEMS: dict[str, str] = {
    "exclusive": "single_label_classification",
    "independent": "multi_label_classification",
}
"""transformers' `problem_type` of our `outputs`."""
MAX_BLOCKS = 1_000  # the deepest ViTs have about fifty
MAX_NUMBERS = 1 << 40  # the largest have about 22 billion
MAX_FAULTS = 200  # in an error; no architecture has as many kinds of tensors


@dataclasses.dataclass(frozen=True)
class Stored:
    """The names and the layout under which a family stores one of our tensors."""

    names: tuple[str, ...]  # theirs, with the key's placeholders
    join: Callable[[Sequence[Tensor]], Tensor] = lambda parts: parts[0]  # from their tensors to ours
    split: Callable[[Tensor], Sequence[Tensor]] = lambda tensor: [tensor]  # the inverse, bitwise


def stacked(*names: str) -> Stored:
    """Our tensor is the concatenation of theirs along the first axis, in equal parts."""

    def join(parts: Sequence[Tensor]) -> Tensor:
        if len({part.shape for part in parts}) > 1:
            raise ValueError("parts of different shapes")
        return torch.cat(tuple(parts))

    return Stored(names, join, lambda tensor: tensor.chunk(len(names)))


def reshaped(name: str, theirs: Callable[[Tensor], Tensor], ours: Callable[[Tensor], Tensor]) -> Stored:
    """Our tensor is theirs in another layout; `theirs` and `ours` convert into it."""
    return Stored((name,), lambda parts: ours(parts[0]), lambda tensor: [theirs(tensor)])


Table = Mapping[str, str | Stored]


def supporting(free: str, **values: tuple[Any, ...]) -> dict[str, tuple[Any, ...]]:
    """`Family.supports`: names of options that may have any value, and others with their possible values."""
    return dict.fromkeys(free.split(), ()) | values


PLAIN_VIT = supporting("mlp_ratio", class_token=(None, True))
"""The options in which the ViTs of most libraries differ from `ViTConfig()`, for `Family.supports`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """The content of a checkpoint."""

    name: str  # as the user wrote it, for messages
    tensors: State
    file: str = ""  # the name of the weights file
    folder: Path = Path()  # of that file and its settings
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of config.json, if there is one
    preprocessor: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of preprocessor_config.json
    training: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # `arch` and arguments of a script
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # that the user named with the file

    def shape(self, key: str, ndim: int | None = None) -> tuple[int, ...]:
        """The shape of a tensor; rejects a missing one, and any but `ndim` dimensions that are not empty."""
        if key not in self.tensors:
            raise CheckpointError(f"{self.name}: missing {key}")
        shape = tuple(self.tensors[key].shape)
        if ndim is not None and (len(shape) != ndim or 0 in shape):
            raise CheckpointError(
                f"{self.name}: {key} {shape} should have {ndim} dimensions, none of them empty"
            )
        return shape

    def has(self, key: str) -> bool:
        """Whether there is a tensor of this name."""
        return key in self.tensors

    def has_any(self, prefix: str) -> bool:
        """Whether the name of any tensor starts with a prefix."""
        return any(name.startswith(prefix) for name in self.tensors)

    def renamed(self, rename: Callable[[str], str]) -> Self:
        """The same with other names of tensors; rejects two tensors that get the same name."""
        tensors: State = {}
        for name, tensor in self.tensors.items():
            if (other := rename(name)) in tensors:
                raise CheckpointError(f"{self.name}: {other} twice, once as {name}")
            tensors[other] = tensor
        return dataclasses.replace(self, tensors=tensors)

    def count(self, pattern: str) -> int:
        """The number of different numbers at the `{i}` of a pattern: the depth, for example."""
        matches = (_regex(pattern).match(key) for key in self.tensors)
        return len({match["i"] for match in matches if match})


class Family(abc.ABC):
    """The checkpoints of one library: how to recognize, read and write them."""

    name: ClassVar[str]  # for users: `format=`, `family=`
    supports: ClassVar[Mapping[str, tuple[Any, ...]]]
    """For each option that may differ from `ViTConfig()`, the possible values; an empty tuple means any."""
    supports_every_kind: ClassVar[bool] = False
    read_only: ClassVar[bool] = False  # whether files are read only, not written
    ignored: ClassVar[tuple[str, ...]] = ()  # patterns of their tensors that a classifier does not need

    @abc.abstractmethod
    def recognizes(self, source: Source) -> bool:
        """Whether a checkpoint belongs to this family, by its tensors' names and its configuration."""

    @property
    def label(self) -> str:
        """Of a part of a library, in messages."""
        return self.name

    def reads(self, source: Source) -> bool:
        """Whether a checkpoint of this library is one of this part; see `families/library.py`."""
        return self.recognizes(source)

    @abc.abstractmethod
    def read_config(self, source: Source) -> ModelConfig:
        """The architecture, from their configuration and the shapes."""

    @abc.abstractmethod
    def read_preprocess(self, source: Source, config: ViTConfig) -> Preprocess:
        """The preprocessing that the weights were trained with."""

    def read_trust(self, source: Source, config: ModelConfig) -> Trust | None:
        """What the model knows about its answers, where the files can have it."""
        return None

    def write_trust(self, trust: Trust) -> State:
        """The tensors of it, where the files can have them."""
        return {}

    @abc.abstractmethod
    def table(self, config: ViTConfig) -> Table:
        """The place of each of our tensors; the first key that matches counts."""

    def write(self, config: ViTConfig, state: State, preprocess: Preprocess, folder: Path) -> list[Path]:
        """Write the files that the other library loads and return them; `state` has their names."""
        raise NotImplementedError  # of a family that is `read_only`

    def of(self, source: Source) -> "Family":
        """The part of this family that a checkpoint belongs to, if it has several."""
        return self

    def holding(self, config: ViTConfig) -> "Family":
        """The part of this family that a model is written as: the one that lacks least."""
        return self

    def reasons(self, config: ViTConfig) -> list[str]:
        """The options of `fixed_there(config)` that the library cannot run; none if it holds the model."""
        reasons, default, applying = [], ViTConfig(), traits(ViTConfig, AppliesWith)
        config = run_there(self, config)
        for option, group in OPTIONS.items():
            free = group in (None, "regularization") and option not in ("outputs", "remainder")
            if free or option == "resample":
                continue
            needs = applying.get(option)
            if needs is not None and not needs.holds(config.option(needs.option)):
                continue
            value = config.option(option)
            allowed = self.supports.get(option, (default.option(option),))
            if allowed and value not in allowed:
                reasons.append(f"{option} {value!r}")
        return reasons + self.conflicts(config)

    def guessed(self, source: Source, config: ViTConfig) -> str:
        """The options that `read_config` assumed because the checkpoint does not contain them, in words."""
        return ""

    def fixed_there(self, config: ViTConfig) -> ViTConfig:
        """The model that the other library will run: `config`, except for options that none of their files
        can express, such as the epsilon of a norm. A conversion reports the change."""
        return config

    def conflicts(self, config: ViTConfig) -> list[str]:
        """Combinations of options that the library cannot hold, although it can hold each of them."""
        return []

    def before_reading(self, source: Source) -> Source:
        """Changes before reading that a table cannot express: old names, layouts of whole models."""
        return source

    def before_writing(self, state: State, config: ViTConfig) -> State:
        """Changes before writing that a table cannot express."""
        return state


def from_family(family: Family, source: Source, config: ModelConfig) -> State:
    """Our tensors after `before_reading`; an error lists every tensor that does not fit."""
    check_claims(source, config)
    family = family.of(source)
    state: State = {}
    used: set[str] = set()
    faults = []
    for ours, shape, stored in rows(family, config):
        used |= set(stored.names)
        missing = [name for name in stored.names if not source.has(name)]
        if missing:
            faults += [f"missing {name}" for name in missing]
            continue
        try:
            tensor = stored.join([source.tensors[name] for name in stored.names])
        except (RuntimeError, IndexError, ValueError):  # from reshape, cat or permute
            tensor = None
        if tensor is None or tuple(tensor.shape) != shape:
            found = ", ".join(f"{name} is {source.shape(name)}" for name in stored.names)
            faults.append(f"{found}, the model's {ours} {shape}")
        elif not tensor.is_floating_point():  # quantized: its numbers mean something else
            faults.append(f"{', '.join(stored.names)} in {tensor.dtype}, not floating-point numbers")
        else:
            # Its own memory: a mapped file may change, and at an address where torch would not allocate, some
            # CPUs sum products in another order, so that a loaded model would differ from the one in memory.
            state[ours] = tensor.clone(memory_format=torch.contiguous_format)
    patterns = [_regex(pattern) for pattern in family.ignored]
    for name in sorted(source.tensors.keys() - used):
        if not any(pattern.match(name) for pattern in patterns):
            faults.append(f"extra {name} {source.shape(name)}")
    reject(faults, f"{source.name}: not a complete {family.name} checkpoint of this architecture")
    return state


def checked_config(source: Source, options: Mapping[str, Any]) -> ViTConfig:
    """The configuration of these options; options that contradict each other are the file's fault."""
    try:
        return ViTConfig.from_dict(options)
    except UserError as error:
        raise CheckpointError(f"{source.name}: {error}") from error


def check_claims(source: Source, config: ModelConfig) -> None:
    """Reject an architecture that no file could fill, before building it costs memory or overflows."""
    if isinstance(config, ResNetConfig):
        kind, blocks = "ResNet", config.members * sum(config.layers)
    else:
        kind, blocks = "ViT", config.members * (config.depth + sum(config.embedding.resnet_layers))
    if blocks > MAX_BLOCKS or max(config.num_parameters, config.num_tokens) > MAX_NUMBERS:
        raise CheckpointError(
            f"{source.name}: its configuration claims more than any {kind} has: over {MAX_BLOCKS} blocks, "
            f"or over {MAX_NUMBERS} tokens or parameters"
        )


def class_names(listed: object, count: int) -> tuple[str, ...]:
    """The names of classes in a list or a numbered mapping, if each has one; LABEL_0 and so on are none."""
    if isinstance(listed, Mapping):
        listed = [listed.get(str(index)) for index in range(len(listed))]
    names = list(listed) if isinstance(listed, list | tuple) else []
    nameless = all(name == f"LABEL_{index}" for index, name in enumerate(names))
    return () if nameless or None in names or len(names) != count else tuple(map(str, names))


def remainder(options: Mapping[str, Any]) -> str:
    """The option `remainder` of a library whose convolution cuts what its patches do not tile."""
    sides = zip(pair(options["image_size"]), pair(options["patch_size"]), strict=True)
    return "cut" if any(side % patch for side, patch in sides) else "rejected"


def check_setting(source: Source, name: str, value: object, choices: Iterable[str]) -> None:
    """Reject a setting of a checkpoint that is none of these."""
    if value not in list(choices):  # a list, because the value may have no hash
        raise CheckpointError(f"{source.name}: {name} {value!r} is none of {', '.join(choices)}")


def outputs_options(source: Source) -> dict[str, Any]:
    """Options `outputs` and `thresholds`, from `problem_type` and our own fields; rejects a regression."""
    own = {name: source.config[name] for name in ("outputs", "thresholds") if name in source.config}
    problem = source.config.get("problem_type")
    if problem is not None:
        meant = next((ours for ours, theirs in PROBLEMS.items() if theirs == problem), None)
        if meant is None:
            bare = ", add_pooling_layer=False" if source.config.get("model_type") in ("vit", "deit") else ""
            raise CheckpointError(
                f"{source.name}: problem_type {problem!r} is not supported: outputs here are classes. The "
                "body alone loads, from the folder that transformers writes with "
                f"AutoModel.from_pretrained(MODEL{bare}).save_pretrained(FOLDER)"
            )
        own["outputs"] = meant  # transformers keeps our fields when it trains the model for another problem
    if own.get("outputs") != "independent":
        own.pop("thresholds", None)
    return own


def to_family(family: Family, model: VisionModel, preprocess: Preprocess, folder: Path) -> list[Path]:
    """Write a model as a family's library loads it; rejects a model that the library cannot run."""
    if reason := misfit(family, model.config):
        raise CheckpointError(reason)
    family = family.holding(cast("ViTConfig", model.config))
    config = run_there(family, cast("ViTConfig", model.config))  # our own family takes a ResNet's too
    ours = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    state: State = {}
    for name, _, stored in rows(family, config):
        parts = stored.split(ours[name])
        for theirs, part in zip(stored.names, parts, strict=True):
            assert theirs not in state, f"the table of {family.name} names {theirs} twice"
            state[theirs] = part.contiguous()
    state = family.before_writing(state, config)
    if model.trust is not None:
        state |= family.write_trust(model.trust)
    make_folder(folder)
    with temporary_folder(folder) as aside:  # a full disk leaves nothing
        try:
            files = family.write(config, state, preprocess, aside)
        except (OSError, RuntimeError) as error:  # a full disk, as Python and as torch report it
            raise WriteError(f"{folder}: cannot be written: {error}") from error
        except WriteError as error:
            raise WriteError(str(error).replace(str(aside), str(folder))) from error
        return _move_in(files, folder)


def _move_in(files: Sequence[Path], folder: Path) -> list[Path]:
    """Move written files into their folder, so that new weights never stand beside old settings."""
    names = [file.name for file in files]
    try:
        read = weights_name(folder, {*names, *(path.name for path in folder.iterdir())})
    except CheckpointError:  # one of several: reading the folder reports it
        read = None
    if read is not None and read not in names:
        raise CheckpointError(f"{folder}: has {read}, which would be read instead of {names[0]}")
    for file in files:
        old = folder / file.name
        if file.suffix == ".json" and not (old.is_file() and old.read_bytes() == file.read_bytes()):
            (folder / CONFIG).unlink(missing_ok=True)
    for file in sorted(files, key=lambda file: file.name == CONFIG):  # last: without it a folder is rejected
        settle(file, folder / file.name)
    return [folder / name for name in names]


def run_there(family: Family, config: ViTConfig) -> ViTConfig:
    """`Family.fixed_there`, and exclusive classes in files that cannot say that any number may apply: the
    logits are the same, and their meaning is left to the caller."""
    family = family.holding(config)
    config, known = family.fixed_there(config), family.supports.get("outputs", ("exclusive",))
    if config.outputs == "independent" and known and config.outputs not in known:
        return config.replace(outputs="exclusive", thresholds=())
    return config


def misfit(family: Family, config: ModelConfig) -> str:
    """The reason why a family's library cannot run a model exactly, in words; empty if it can."""
    if isinstance(config, ResNetConfig) or config.members > 1:
        return (
            ""
            if family.supports_every_kind
            else f"{family.name} has no model like this one, {kind_of(config)}"
        )
    if family.read_only:
        return f"{family.name} files are read, not written"
    reasons = family.reasons(config)
    return f"{family.name} has no model with {', '.join(reasons)}" if reasons else ""


def changes(family: Family, config: ViTConfig) -> list[str]:
    """The options that the other library will change, in words."""
    there = run_there(family, config)
    return [
        f"{option} {config.option(option)!r} becomes {there.option(option)!r}: {family.name} has no other"
        for option in OPTIONS
        if config.option(option) != there.option(option) and option != "thresholds"  # it goes with `outputs`
    ]


def rows(family: Family, config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...], Stored]]:
    """The name and the shape of each of our tensors, and how the family stores it."""
    with torch.device("meta"):
        expected = build(config).state_dict()
    patterns = [
        (_regex(ours), stored if isinstance(stored, Stored) else Stored((stored,)))
        for ours, stored in family.table(cast("ViTConfig", config)).items()
    ]
    for ours, tensor in expected.items():
        for pattern, stored in patterns:
            match = pattern.match(ours)
            if match:
                found = match.groupdict()
                theirs = tuple(
                    part.replace("*", found.get("rest") or "").format(**found) for part in stored.names
                )
                yield ours, tuple(tensor.shape), dataclasses.replace(stored, names=theirs)
                break
        else:
            raise CheckpointError(f"{family.name} has no place for {ours}")


def _regex(pattern: str) -> re.Pattern[str]:
    """`{name}` stands for a number, `*` for the rest."""
    escaped = re.escape(pattern).replace(r"\*", "(?P<rest>.*)")
    return re.compile(re.sub(r"\\{(\w+)\\}", r"(?P<\1>\\d+)", escaped) + r"\Z")


def respelled(name: str, spellings: Iterable[tuple[str, str]]) -> str:
    """A tensor's name after each pattern's replacement, in order."""
    for pattern, spelling in spellings:
        name = re.sub(pattern, spelling, name)
    return name


def reject(faults: Sequence[str], what: str) -> None:
    """Raise CheckpointError with all faults, if there are any; those of several blocks stand together."""
    if not faults:
        return
    blocks: dict[tuple[str, str], list[int]] = {}  # numbers, by what stands before and after them
    for fault in faults:
        named = re.fullmatch(r"(?s)(.*?\.)(\d{1,4})(\..*)", fault)
        before, number, after = (fault, 0, "") if named is None else named.groups()
        blocks.setdefault((before, after), []).append(int(number))
    listed = [
        (f"{before}{_numbers(sorted(numbers))}{after}" if after else before)[:400]
        for (before, after), numbers in itertools.islice(blocks.items(), MAX_FAULTS)
    ]
    more = f"; and {len(blocks) - MAX_FAULTS} more" if len(blocks) > MAX_FAULTS else ""
    raise CheckpointError(f"{what}: {'; '.join(listed)}{more}")


def _numbers(ascending: list[int]) -> str:
    """The numbers of blocks: 3, or {0..11}, or {0,2,5}."""
    first, last = ascending[0], ascending[-1]
    if first == last:
        return str(first)
    is_range = ascending == list(range(first, last + 1))
    return f"{{{first}..{last}}}" if is_range else f"{{{','.join(map(str, ascending))}}}"
