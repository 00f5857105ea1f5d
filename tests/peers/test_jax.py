"""The original JAX checkpoints: arrays in the names and layouts of vit_jax and big_vision, both ways.

Our model is compared with the paper's equations in NumPy (`numpy_vit`) and with timm's reading of the files.
"""

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.contracts.family import Answer, Example, Library, check_family, check_misshapen, load
from tests.models import random_images, small_model
from tests.peers import numpy_vit
from tests.peers.comparison import relative_error
from vitascope.models.vit import VisionTransformer
from vitascope.models.weights.families.jax import Jax
from vitascope.models.weights.files import CheckpointError
from vitascope.models.weights.identification import identify
from vitascope.models.weights.loading import load_source, save_pretrained
from vitascope.models.weights.mapping import Source

JAX = Jax()
Arrays = dict[str, NDArray[Any]]


class Draw:
    """Random float32 arrays by name."""

    def __init__(self, prefix: str) -> None:
        self.prefix, self.arrays = prefix, {}  # type: tuple[str, Arrays]
        self.random = np.random.default_rng(0)

    def add(self, name: str, *shape: int, spread: float = 0.5, middle: float = 0.0) -> None:
        self.arrays[self.prefix + name] = self.random.normal(middle, spread, shape).astype(np.float32)

    def kernel(self, name: str, *shape: int, outputs: tuple[int, ...] | None = None) -> None:
        """A kernel and its bias; the bias has the shape of `outputs`, by default the kernel's last axis."""
        outputs = shape[-1:] if outputs is None else outputs
        spread = float((np.prod(outputs) / np.prod(shape)) ** 0.5)
        self.add(f"{name}/kernel", *shape, spread=spread)
        self.add(f"{name}/bias", *outputs, spread=0.3)

    def norm(self, name: str, *shape: int) -> None:
        self.add(f"{name}/scale", *shape, spread=0.3, middle=1.0)
        self.add(f"{name}/bias", *shape, spread=0.3)

    def mlp(self, name: str, width: int, hidden: int) -> None:
        self.kernel(f"{name}/Dense_0", width, hidden)
        self.kernel(f"{name}/Dense_1", hidden, width)

    def attention(self, name: str, width: int, heads: int) -> None:
        split = (heads, width // heads)
        for part in ("query", "key", "value"):
            self.kernel(f"{name}/{part}", width, *split, outputs=split)
        self.kernel(f"{name}/out", *split, width)

    def resnet(self, channels: int, layers: tuple[int, ...]) -> int:
        """The stem of a hybrid; returns its channels. Published norms are (1, 1, 1, C)."""
        inputs = 32
        convolutions = {"conv_root": (7, 7, channels, inputs)}
        for stage, units in enumerate(layers, 1):
            C = 32 * 2 ** (stage - 1)
            for unit in range(1, units + 1):
                name = f"block{stage}/unit{unit}/conv"
                convolutions |= {f"{name}_proj": (1, 1, inputs, 4 * C)} if unit == 1 else {}
                convolutions |= {f"{name}1": (1, 1, inputs, C), f"{name}2": (3, 3, C, C)}
                convolutions |= {f"{name}3": (1, 1, C, 4 * C)}
                inputs = 4 * C
        for name, shape in convolutions.items():
            self.add(f"{name}/kernel", *shape)
            self.norm(name.replace("conv", "gn"), 1, 1, 1, shape[-1])
        return inputs


def scanned(arrays: Arrays, prefix: str, depth: int) -> Arrays:
    """The blocks' arrays, stacked."""
    first = f"{prefix}Transformer/encoderblock_0/"
    parts = [name.removeprefix(first) for name in arrays if name.startswith(first)]
    stacks = {
        f"{prefix}Transformer/encoderblock/{part}": np.stack(
            [arrays[f"{prefix}Transformer/encoderblock_{index}/{part}"] for index in range(depth)]
        )
        for part in parts
    }
    return {name: array for name, array in arrays.items() if "encoderblock_" not in name} | stacks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """A checkpoint of random arrays: its layout and its model."""

    prefix: str = ""
    names: str = "first"  # "first" (numbered by place), "today" or "scanned"
    place: str | None = "Transformer/posembed_input/pos_embedding"
    covers_class_token: bool = True
    pool: str = "cls"  # "cls", "mean", "map" or "map inlined"
    pre_logits: bool = False
    classes: int | None = 5
    resnet: tuple[int, ...] | None = None
    channels: int = 3
    patch: tuple[int, int] = (8, 8)
    side: int = 4
    width: int = 32
    heads: int = 4
    hidden: int = 56
    depth: int = 2
    image: tuple[int, int] | None = None  # by default, derived from the positions

    def arrays(self) -> Arrays:
        if self.names == "scanned":
            return scanned(dataclasses.replace(self, names="today").arrays(), self.prefix, self.depth)
        D, today = self.width, self.names == "today"
        draw = Draw(self.prefix)
        inputs = self.channels if self.resnet is None else draw.resnet(self.channels, self.resnet)
        draw.kernel("embedding", *self.patch, inputs, D)
        if self.pool == "cls":
            draw.add("cls", 1, 1, D)
        if self.place:
            prefix = self.pool == "cls" and self.covers_class_token
            draw.add(self.place, 1, prefix + self.side**2, D)
        for index in range(self.depth):
            block = f"Transformer/encoderblock_{index}"
            draw.norm(f"{block}/LayerNorm_0", D)
            draw.attention(f"{block}/MultiHeadDotProductAttention_{0 if today else 1}", D, self.heads)
            draw.norm(f"{block}/LayerNorm_{1 if today else 2}", D)
            draw.mlp(f"{block}/MlpBlock_{0 if today else 3}", D, self.hidden)
        draw.norm("Transformer/encoder_norm", D)
        if self.pool.startswith("map"):
            place = "" if "inlined" in self.pool else "MAPHead_0/"
            draw.add(f"{place}probe", 1, 1, D)
            draw.attention(f"{place}MultiHeadDotProductAttention_0", D, self.heads)
            draw.norm(f"{place}LayerNorm_0", D)
            draw.mlp(f"{place}MlpBlock_0", D, self.hidden)
        if self.pre_logits:
            draw.kernel("pre_logits", D, D)
        if self.classes:
            draw.kernel("head", D, self.classes)
        return draw.arrays

    def image_size(self) -> tuple[int, int]:
        step = 1 if self.resnet is None else 4 * 2 ** max(0, len(self.resnet) - 1)
        return self.image or (self.side * step * self.patch[0], self.side * step * self.patch[1])

    def as_written(self) -> "Layout":
        only_big_vision = (
            self.pool.startswith("map")
            or self.place is None
            or (self.pool == "cls" and not self.covers_class_token)
        )
        names, place = "first", "Transformer/posembed_input/pos_embedding"
        if only_big_vision:
            names, place = "today", "pos_embedding"
        return dataclasses.replace(
            self,
            prefix="",
            names=names,
            place=self.place and place,
            pool="map" if self.pool.startswith("map") else self.pool,
        )


BIG_VISION: dict[str, Any] = {"names": "today", "place": "pos_embedding"}
LAYOUTS = {
    "vit_jax": Layout(),
    "vit_jax, opt/target": Layout(prefix="opt/target/"),
    "vit_jax, pre_logits": Layout(pre_logits=True, depth=3),
    "vit_jax, pre_logits without head": Layout(pre_logits=True, classes=None),
    "vit_jax, no head": Layout(classes=None),
    "vit_jax, mean": Layout(pool="mean"),
    "vit_jax, one channel": Layout(channels=1),
    "vit_jax, patches not square": Layout(patch=(8, 4), side=3),
    "flax's names of today": Layout(names="today"),
    "params, scanned": Layout(prefix="params/", names="scanned", depth=3),
    "big_vision, positions in the encoder": Layout(
        names="today", place="Transformer/pos_embedding", pool="mean"
    ),
    "big_vision, mean": Layout(**BIG_VISION, pool="mean", prefix="params/"),
    "big_vision, class token without position": Layout(**BIG_VISION, covers_class_token=False),
    "big_vision, class token with position": Layout(**BIG_VISION),
    "big_vision, map": Layout(**BIG_VISION, pool="map", hidden=53),
    "big_vision, map inlined": Layout(**BIG_VISION, pool="map inlined"),
    "siglip": Layout(**BIG_VISION, pool="map", prefix="params/img/", classes=None),
    "siglip, scanned": Layout(
        names="scanned", place="pos_embedding", pool="map", prefix="params/img/", classes=None
    ),
    "i1k-s16": Layout(
        names="today", place=None, pool="mean", pre_logits=True, patch=(32, 32), image=(224, 224)
    ),
    "big_vision, fixed positions, class token": Layout(
        names="today", place=None, patch=(30, 56), image=(210, 224)
    ),
    "hybrid, root alone": Layout(resnet=(), patch=(4, 4)),
    "hybrid, stride 4": Layout(resnet=(1,), patch=(2, 2), prefix="opt/target/"),
    "hybrid, stride 8": Layout(resnet=(1, 1), patch=(1, 1), pre_logits=True),
    "hybrid, stride 16": Layout(resnet=(1, 1, 2), patch=(1, 1), side=5, names="today"),
    "hybrid, mean": Layout(resnet=(2, 1), patch=(1, 1), pool="mean"),
}


def source_of(layout: Layout, change: Arrays | None = None) -> Source:
    arrays = {**layout.arrays(), **(change or {})}
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return JAX.before_reading(Source(name="theirs.npz", tensors=tensors))


def channels_last(images: torch.Tensor) -> NDArray[np.float64]:
    return images.double().permute(0, 2, 3, 1).numpy()


def in_numpy(arrays: Arrays, images: torch.Tensor, prefix: str = "") -> numpy_vit.Answer:
    inside = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
    return numpy_vit.forward(inside, channels_last(images))


def save(arrays: Arrays, folder: Path) -> Path:
    np.savez(folder / "theirs.npz", **arrays)  # type: ignore[arg-type]
    return folder / "theirs.npz"


class JaxLibrary(Library):
    """The peer is a dict of arrays, and the equations that run it."""

    family = "jax"
    keeps_preprocess = False  # which follows from the layout, and another may be written

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def save(self, peer: Arrays, folder: Path) -> Path:
        return save(peer, folder)

    def load(self, folder: Path, ours: VisionTransformer, peer: Any) -> Arrays:
        """What we wrote: their names and shapes, and identical values."""
        expected, written = self.layout.as_written().arrays(), dict(np.load(folder / "model.npz"))
        assert written.keys() == expected.keys()
        for name, array in expected.items():
            array = array.flatten() if "gn" in name else array  # as in current flax
            assert written[name].dtype == np.float32
            assert np.array_equal(written[name], array), name
        assert all(parameter.is_contiguous() for parameter in ours.parameters())
        return {self.layout.prefix + name: array for name, array in written.items()}

    def answer(self, peer: Arrays, images: Tensor, ours: VisionTransformer) -> Answer:
        found = in_numpy(peer, images, self.layout.prefix)
        attention = [torch.from_numpy(weights) for weights in found.attention]
        return Answer(outputs=torch.from_numpy(found.logits), attention=attention)

    def preprocess(self, peer: Arrays) -> dict[str, Any]:
        """A crop of 224 of 256 in big_vision; vit_jax and SigLIP squash."""
        layout, half = self.layout, (0.5,) * self.layout.channels
        told = {"image_size": layout.image_size(), "interpolation": "bilinear", "mean": half, "std": half}
        place = layout.place or "pos_embedding"
        if "posembed_input" in place or "img" in layout.prefix:
            return told | {"resize": "squash"}
        told |= {"resize": "crop", "side_rounding": "nearest", "crop_rounding": "down"}
        rows, columns = layout.image_size()
        return told | ({"resize_to": (round(rows * 256 / 224),) * 2} if rows == columns else {})


OPTIONS: dict[str, dict[str, Any]] = {
    "vit_jax": {"pool": "cls", "head": "linear", "position_prefix": True, "num_classes": 5, "embed_dim": 32},
    "vit_jax, pre_logits": {"head": "mlp", "depth": 3, "num_heads": 4, "mlp_ratio": 56 / 32},
    "vit_jax, pre_logits without head": {"head": "pre_logits"},
    "vit_jax, no head": {"head": "none"},
    "vit_jax, mean": {"pool": "mean", "pool_norm": "before", "class_token": None},
    "vit_jax, one channel": {"in_channels": 1},
    "vit_jax, patches not square": {"patch_size": (8, 4), "image_size": (24, 12)},
    "big_vision, class token without position": {"pool": "cls", "position_prefix": False},
    "big_vision, class token with position": {"position_prefix": True},
    "siglip": {"pool": "map", "head": "none", "class_token": None},
    "i1k-s16": {"positions": "sincos_2d_big_vision", "pool": "mean", "head": "mlp"},
    "hybrid, stride 16": {
        "stem": "resnet",
        "resnet_layers": (1, 1, 2),
        "resnet_width": 32,
        "resnet_dialect": "jax",
        "patch_size": (16, 16),
        "image_size": (80, 80),
    },
    "hybrid, root alone": {"resnet_layers": (), "patch_size": (16, 16)},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_family(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    always = {"mlp": "gelu_tanh", "norm_eps": 1e-6, "resample": "jax", "image_size": layout.image_size()}
    check_family(
        Example(
            library=JaxLibrary(layout),
            build=layout.arrays,
            options={**always, **OPTIONS.get(name, {})},
            tolerance=1e-6,
            attention=1e-6,
        ),
        tmp_path,
    )


@pytest.mark.parametrize("name", ["vit_jax, pre_logits", "big_vision, map"])
def test_misshapen_arrays_are_rejected(name: str, tmp_path: Path) -> None:
    check_misshapen(save(LAYOUTS[name].arrays(), tmp_path), "jax")


def test_bfloat16_is_read_from_numpys_storage(tmp_path: Path) -> None:
    halves = {name: torch.from_numpy(array).bfloat16() for name, array in LAYOUTS["siglip"].arrays().items()}
    stored = {name: tensor.view(torch.int16).numpy().view("V2") for name, tensor in halves.items()}
    model = load(save(stored, tmp_path))
    images = random_images(2, 3, 32, 32)
    theirs = in_numpy(
        {name: tensor.float().numpy() for name, tensor in halves.items()}, images, "params/img/"
    )
    with torch.no_grad():
        assert relative_error(model.float()(images), theirs.logits) < 1e-5


@pytest.mark.parametrize(
    ("dtype", "stored"), [(torch.bfloat16, "float32"), (torch.float16, "float16"), (torch.float64, "float64")]
)
def test_other_precisions_are_written_without_loss(dtype: torch.dtype, stored: str, tmp_path: Path) -> None:
    model = small_model(mlp="gelu_tanh").to(dtype)
    file = save_pretrained(model, tmp_path, format="jax") / "model.npz"
    assert {str(array.dtype) for array in np.load(file).values()} == {stored}
    again = load(file).state_dict()
    for name, parameter in model.state_dict().items():
        assert torch.equal(again[name].double(), parameter.double()), name


def test_arrays_outside_the_image_model_are_ignored(tmp_path: Path) -> None:
    layout = LAYOUTS["siglip"]
    text = {
        "params/txt/Encoder_0/encoderblock_0/LayerNorm_0/scale": np.ones(3, np.float32),
        "params/t": np.ones((), np.float32),
        "params/b": np.ones((), np.float32),
        "opt/0/mu/img/embedding/kernel": np.ones((8, 8, 3, 32), np.float32),
    }
    assert load(save(layout.arrays() | text, tmp_path)).config.readout.pool == "map"
    layout = LAYOUTS["vit_jax, opt/target"]
    optimizer = {
        "opt/state/step": np.ones((), np.float32),
        "opt/state/param_states/embedding/kernel/momentum": np.ones(3, np.float32),
        "step": np.ones((), np.float32),
    }
    assert load(save(layout.arrays() | optimizer, tmp_path)).config.readout.pool == "cls"


def test_big_vision_crops_384_of_448_and_grey_models_have_one_statistic() -> None:
    source = source_of(Layout(**BIG_VISION, pool="mean", patch=(16, 16), side=24, channels=1))
    preprocess = JAX.read_preprocess(source, JAX.read_config(source))
    assert (preprocess.image_size, preprocess.resize_to) == ((384, 384), (448, 448))
    assert (preprocess.channels, preprocess.mean, preprocess.std) == (1, (0.5,), (0.5,))


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ("pos_embedding", "Transformer/posembed_input/pos_embedding twice"),
        ("Transformer/encoderblock_0/MlpBlock_0/Dense_0/bias", "encoderblock_0/MlpBlock_3/Dense_0/bias"),
        ("Transformer/encoderblock/LayerNorm_0/scale", "extra Transformer/encoderblock/LayerNorm_0/scale"),
        ("MAPHead_0/probe", "missing MAPHead_0/MultiHeadDotProductAttention_0/query/kernel"),
    ],
)
def test_duplicate_part_is_rejected(extra: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=re.escape(told)):
        load(save(Layout().arrays() | {extra: np.ones((2, 32), np.float32)}, tmp_path))


def test_non_square_positions_need_an_architecture(tmp_path: Path) -> None:
    arrays = Layout().arrays()
    place = "Transformer/posembed_input/pos_embedding"
    arrays[place] = np.random.default_rng(1).normal(0, 0.5, (1, 1 + 2 * 3, 32)).astype(np.float32)
    path = save(arrays, tmp_path)
    with pytest.raises(CheckpointError, match=r"7 positions do not form a square grid.*config=ViTConfig"):
        load(path)
    config = JAX.read_config(source_of(Layout())).replace(image_size=(16, 24))
    images = random_images(2, 3, 16, 24)
    with torch.no_grad():
        assert (
            relative_error(load_source(*identify(path), config)(images), in_numpy(arrays, images).logits)
            < 1e-5
        )
