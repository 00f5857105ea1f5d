"""The promises of a checkpoint family, checked on one example.

An example is a small random model of the library that the checkpoints come from, with its file. The peer is
that library's model; a `Library` knows how to save it, to run it, and to load it from what we write.
"""

from __future__ import annotations

import abc
import copy
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from tests.models import random_images
from tests.models.weights import assert_same_state
from tests.peers.comparison import relative_error
from vitascope.errors import UserError
from vitascope.models.config import OPTIONS, ViTConfig
from vitascope.models.preprocess import Preprocess
from vitascope.models.vit import VisionTransformer
from vitascope.models.weights.all_families import FAMILIES
from vitascope.models.weights.files import CheckpointError
from vitascope.models.weights.identification import identify, open_source, read_config
from vitascope.models.weights.loading import load_source, save_pretrained
from vitascope.models.weights.mapping import Family, Source, State, misfit, rows, to_family
from vitascope.models.weights.preprocess import preprocess_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """A peer's results; those that it does not have are None or left out."""

    outputs: Tensor | None = None  # logits or pooled features, (B, K)
    features: Tensor | None = None  # every token after the last norm, (B, T, D)
    pooled: Tensor | None = None  # what the head reads, (B, D)
    map: Tensor | None = None  # (B, D, grid_h, grid_w)
    blocks: Sequence[Tensor] = ()  # the tokens after each block, (B, T, D)
    attention: Sequence[Tensor | None] = ()  # of each block, (B, heads, T, T)


class Library(abc.ABC):
    """How a peer is saved, run, and loaded."""

    family: ClassVar[str]
    keeps_preprocess: ClassVar[bool] = True  # whether the file that we write shows the same

    @abc.abstractmethod
    def save(self, peer: Any, folder: Path) -> Path:
        """Save a peer into an existing folder as its own code does; returns the MODEL argument."""

    @abc.abstractmethod
    def answer(self, peer: Any, images: Tensor, ours: VisionTransformer) -> Answer:
        """Run a peer in float64, with the images (B, C, H, W) of any size that it takes."""

    def load(self, folder: Path, ours: VisionTransformer, peer: Any) -> Any:
        """Load what we wrote with the library, strictly; `peer` is None where ours came first."""
        raise NotImplementedError  # for files that are read only

    def preprocess(self, peer: Any) -> Mapping[str, Any]:
        """The preprocessing of the peer's own code, by the names of our settings."""
        return {}

    def carried(self, ours: VisionTransformer) -> Preprocess:
        """A preprocessing that the files hold completely."""
        assert ours.preprocess is not None
        return ours.preprocess


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """One model of a library, and what is promised for it."""

    library: Library
    build: Callable[[], Any]  # the peer, every parameter random
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of ours, read from the file
    sizes: Sequence[tuple[int, int]] = ()  # of other images, at which the peer interpolates its positions
    tolerance: float = 1e-10  # of all results, relative to the largest
    resized: float = 1e-6  # the same at other sizes
    attention: float = 1e-5  # the softmax of many libraries is in float32
    others: Mapping[str, Callable[[Any, Source], Source]] = dataclasses.field(default_factory=dict)
    """Other files of the same model, by what is different in them."""
    alone: str = ""  # the error for the weights without their settings, where those are necessary
    named: bool = False  # whether the user has to name the family of the file
    family: str = ""  # the library's by default
    identical: bool = True  # whether what is written and read back has the same tensors, not just results


def images_for(config: ViTConfig) -> Tensor:
    return random_images(2, config.in_channels, *config.image_hw)


def load(path: Path | str, family: str | None = None) -> VisionTransformer:
    """Our model of a MODEL argument."""
    model = load_source(*identify(path, family=family))
    assert isinstance(model, VisionTransformer)
    return model


@torch.no_grad()
def check_family(example: Example, folder: Path) -> None:
    """Check every promise: recognized, read, equal, strict, named in errors, and written back."""
    peer, theirs = example.build(), folder / "theirs"
    theirs.mkdir(parents=True)
    path, family = example.library.save(peer, theirs), example.family or example.library.family
    if example.named:
        with pytest.raises(CheckpointError, match=re.escape(f"timm:{path} ")):
            identify(path)
    source, kind = identify(path, family=family if example.named else None)
    assert FAMILIES[family].of(source) == kind
    ours = load_source(source, kind)
    assert isinstance(ours, VisionTransformer)
    check_settings(ours, example, peer)
    check_equal(ours, peer, example)
    for what, other in example.others.items():
        found = other(peer, source)
        assert_same_state(load_source(kind.before_reading(found), kind), ours), what
    if example.alone:
        check_weights_alone(ours, path, family, example.alone)
    check_faults(source, kind, ours.config)
    if FAMILIES[family].read_only:
        with pytest.raises(CheckpointError, match=f"{family} files are read, not written"):
            save_pretrained(ours, folder / "ours", format=family)
    else:
        check_written(ours, example, folder / "ours", peer)


def check_settings(ours: VisionTransformer, example: Example, peer: Any) -> None:
    """The options and the preprocessing that the file shows."""
    for option, value in example.options.items():
        assert ours.config.option(option) == value, option
    (height, width), (ph, pw) = ours.config.image_hw, ours.config.patch_hw
    assert (ours.config.remainder == "cut") == bool(height % ph or width % pw)
    for name, value in example.library.preprocess(peer).items():
        assert getattr(ours.preprocess, name) == value, name


def check_equal(ours: VisionTransformer, peer: Any, example: Example) -> None:
    """Compare in float64, at the size of the model and at others, which a model that is resized has, too."""
    ours = copy.deepcopy(ours).double()
    compare(ours, example.library, peer, images_for(ours.config).double(), example.tolerance, example)
    for size in example.sizes:
        images = random_images(2, ours.config.in_channels, *size).double()
        compare(ours, example.library, peer, images, example.resized, example)
        tuned = copy.deepcopy(ours)
        tuned.resize(size)
        assert relative_error(tuned(images), ours(images)) < example.resized


def compare(
    ours: VisionTransformer, library: Library, peer: Any, images: Tensor, tolerance: float, example: Example
) -> None:
    """Compare outputs, features, and the tokens and the attention of every block."""
    theirs = library.answer(peer, images, ours)
    results = {"outputs": ours, "features": ours.forward_features, "pooled": ours.embed}
    results["map"] = ours.feature_map
    for name, compute in results.items():
        if (expected := getattr(theirs, name)) is not None:
            assert relative_error(compute(images), expected) < tolerance, name
    trace = ours.trace(images, attention=True)
    for index, tokens in enumerate(theirs.blocks):
        assert relative_error(trace[f"block{index}"], tokens) < tolerance, f"block{index}"
    assert len(theirs.attention) in (0, len(trace.attention))
    for own, other in zip(trace.attention, theirs.attention, strict=False):
        assert other is None or relative_error(own, other) < example.attention


def check_weights_alone(ours: VisionTransformer, path: Path, family: str, reason: str) -> None:
    """Weights without their settings are rejected, and load with a configuration."""
    alone = path.with_name("alone.safetensors")
    (path / "model.safetensors").rename(alone)
    source, kind = identify(alone, family=family)
    with pytest.raises(CheckpointError, match=f"^{re.escape(source.name)}: .*{reason}"):
        load_source(source, kind)
    assert_same_state(load_source(source, kind, ours.config), ours)
    alone.rename(path / "model.safetensors")


def check_faults(source: Source, kind: Family, config: ViTConfig) -> None:
    """A missing, a misshapen and a superfluous tensor are named, with the file."""
    ours = f"encoder.blocks.{config.depth - 1}.norm2.weight"
    [name] = next(stored.names for key, _, stored in rows(kind, config) if key == ours)
    shape = (1, *source.shape(name))
    for change, fault in (
        ({name: None}, f"missing {name}"),
        ({name: torch.zeros(shape)}, f"{name} is {shape}"),
        ({"surprise": torch.zeros(2, 3)}, "extra surprise (2, 3)"),
    ):
        with pytest.raises(CheckpointError) as raised:
            load_source(with_tensors(source, change), kind)
        assert str(raised.value).startswith(f"{source.name}: ")
        assert fault in str(raised.value)
        assert "\n" not in str(raised.value)


def with_tensors(source: Source, change: Mapping[str, Tensor | None]) -> Source:
    """A checkpoint with other tensors; None takes one away."""
    tensors: dict[str, Tensor | None] = {**source.tensors, **change}
    state: State = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    return dataclasses.replace(source, tensors=state)


MISSHAPEN: tuple[tuple[int, ...], ...] = ((), (3,), (128, 0), (1, 1, 5))
"""The shapes that tensors get in turn."""


def check_misshapen(path: Path | str, family: str) -> None:
    """Every tensor of the wrong shape is rejected in one line that names the file."""
    whole, (source, kind) = open_source(path), identify(path, family=family)
    config = read_config(source, kind)
    assert isinstance(config, ViTConfig)
    names = {
        name for key, _, stored in rows(kind, config) for name in stored.names if ".blocks.1." not in key
    }

    def changed(change: Mapping[str, Tensor]) -> Source:
        if whole.tensors.keys() >= change.keys():
            return kind.before_reading(with_tensors(whole, change))
        return with_tensors(source, change)  # reading gives it another name

    for name, shape in zip(sorted(names & source.tensors.keys()), itertools.cycle(MISSHAPEN)):
        with pytest.raises(UserError) as raised:
            load_source(changed({name: torch.zeros(shape)}), kind)
        message = str(raised.value)
        assert message.startswith(f"{source.name}: "), (name, shape)
        # facebook's are named as timm's; a mask belongs to the bias that it bars.
        told = (name, "positions", "reg_token", "qkv.bias")
        assert any(word in message for word in told), (name, shape, message)
        assert "\n" not in message


@torch.no_grad()
def check_written(ours: VisionTransformer, example: Example, folder: Path, peer: Any = None) -> None:
    """Our model, written for the library, has its outputs there, and is read back unchanged."""
    library, family = example.library, example.family or example.library.family
    ours = copy.deepcopy(ours)
    ours.preprocess = library.carried(ours)
    save_pretrained(ours, folder, format=family)
    source, kind = identify(folder, family=family if example.named else None)
    assert FAMILIES[family].of(source) == kind
    again = load_source(source, kind)
    assert isinstance(again, VisionTransformer)
    if example.identical:
        assert runs_as(again.config) == runs_as(FAMILIES[family].fixed_there(ours.config))
        assert_same_state(again, ours)
    assert again.config.class_names == ours.config.class_names or family not in ("timm", "huggingface")
    assert again.preprocess == ours.preprocess or not library.keeps_preprocess
    loaded = library.load(folder, ours, peer)
    images = images_for(again.config).double()
    for model in (again,) if example.identical else (again, settled(ours, family)):
        compare(model.double(), library, loaded, images, example.tolerance, example)


def settled(model: VisionTransformer, family: str) -> VisionTransformer:
    """The same model with the options that the library fixes."""
    with torch.device("meta"):
        other = VisionTransformer(FAMILIES[family].fixed_there(model.config))
    other.load_state_dict(model.state_dict(), assign=True)
    return other.eval()


def runs_as(config: ViTConfig) -> dict[str, Any]:
    """The options that, besides the weights, determine the output of a trained model."""
    options = {name: config.option(name) for name, group in OPTIONS.items() if group != "regularization"}
    spellings = {
        "layer_scale": options["layer_scale"] is not None,
        "class_token": config.readout.has_class_token,
        "position_prefix": config.num_prefix_tokens == 0 or options["position_prefix"],
        "num_classes": 0 if options["head"] == "none" else options["num_classes"],
        "mlp_ratio": config.mlp_dim,
    }
    if str(options["positions"]).startswith("rotary") and options["absolute"] == "none":
        del options["resample"]  # of no positions
    return options | spellings


def check_refused(family: str, model: VisionTransformer, options: Iterable[str], folder: Path) -> None:
    """A model that the library cannot run is rejected by an option of it, and nothing is written."""
    reason = misfit(FAMILIES[family], model.config)
    assert reason.startswith(f"{family} has no model with ")
    assert any(option in reason for option in options), reason
    with pytest.raises(CheckpointError, match=re.escape(reason)):
        to_family(FAMILIES[family], model, preprocess_of(model), folder / "never")
    assert not (folder / "never").exists()
