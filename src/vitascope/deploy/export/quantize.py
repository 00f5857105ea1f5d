"""int8: an exported file's layers in 8-bit whole numbers, and proof that it still answers as well.

Ranges of activations come from pictures of the user's own. The result is measured against the file that it
was made of, on labelled pictures, and gets its name only when it loses no more accuracy than allowed. If it
loses more, it is made again with the layers whose inputs suffer most from rounding left in float.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

from vitascope.data.decoding import ImageSource, as_pictures
from vitascope.data.splits import ImageSet
from vitascope.deploy.export.accuracy import Comparison, compare, size_of
from vitascope.deploy.export.calibration import Calibration
from vitascope.deploy.export.formats import FORMATS as EXPORTED
from vitascope.deploy.export.formats import check_path, check_room, settled
from vitascope.deploy.export.quantize_onnx import write_onnx_int8
from vitascope.deploy.export.quantize_openvino import write_openvino_int8
from vitascope.deploy.predict.exported_model import ExportedEngine, Metadata
from vitascope.deploy.predict.runtimes import OnnxEngine, OpenVinoEngine
from vitascope.errors import UserError

CALIBRATION_IMAGES = 300
MAX_DROP = 0.01
"""The share of the pictures by which the accuracy may drop."""
FLOAT_SHARES = (0.0, 1 / 8, 1 / 4)
"""The shares of the layers that are left in float, tried in this order until the accuracy is kept."""


@dataclasses.dataclass(frozen=True)
class Format:
    """A file format that can hold int8."""

    write: Callable[[Path, Path, Calibration, Collection[str], Mapping[str, str]], dict[str, float]]
    """From a file to its int8 file; gives what rounding takes from each int8 layer's input."""
    open: Callable[..., ExportedEngine]
    """The runtime of a path; takes `precision`."""


FORMATS: dict[str, Format] = {
    ".onnx": Format(write_onnx_int8, OnnxEngine),
    ".xml": Format(write_openvino_int8, OpenVinoEngine),
}
"""By the ending of the file's name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantization:
    """What was written, and how it compares with its source."""

    files: list[Path]
    """The file that is opened, and what it needs beside it."""
    calibration_images: int
    """Pictures that the ranges were taken from."""
    layers: int
    """Layers with weights."""
    float_layers: tuple[str, ...]
    """Those of them left in float, by their names in the graph."""
    attempts: tuple[Comparison, ...]
    """Every setting's comparison; the last is that of the file."""

    @property
    def comparison(self) -> Comparison:
        """The file's."""
        return self.attempts[-1]


def quantize(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    calibration: ImageSource | Iterable[ImageSource],
    test: ImageSet,
    calibration_images: int = CALIBRATION_IMAGES,
    max_drop: float = MAX_DROP,
    seed: int = 0,
) -> Quantization:
    """Write an exported file's int8 file, and measure both.

    Layers with weights compute in int8: weights in a range for each output channel, activations in one range
    for each layer, from `calibration`. The preprocessing, the patch embedding, attention's own products,
    softmax, norms and activation functions stay in float: the patch embedding is a hundredth of the work and
    the layer that suffers most from rounding, and the others gain nothing. Where the
    accuracy drops by more than `max_drop`, an eighth and then a quarter of the layers return to float: those
    whose inputs' channels lose the largest shares of their energy to rounding.

    Args:
        source: an ONNX or OpenVINO file of `export`.
        target: a new file of the same format.
        calibration: pictures of the kind that the model will see; their labels are not needed.
        test: labelled pictures, none of them in `calibration`, that accuracies are measured on.
        calibration_images: how many of `calibration` to use, drawn by `seed`.
        max_drop: the share of `test` by which the accuracy may drop.
        seed: of the draw.

    Raises:
        UserError: a format that holds no int8, a file that exists, a library that is not installed, no
            picture that can be read, or an accuracy that drops too far.
        ExportedModelError: a source that cannot be used.
    """
    source, target = Path(source), Path(target)
    kind = check(source, target, max_drop)
    plain = kind.open(source, precision="fp32")  # what it was made for, though the runtime may know better
    if plain.about.precision != "fp32":
        raise UserError(f"{source} is {plain.about.precision} already")
    pictures = Calibration(plain.about, as_pictures(calibration), calibration_images, seed)
    texts = described(plain.about, len(pictures))
    attempts: list[Comparison] = []
    target.parent.mkdir(parents=True, exist_ok=True)
    check_room(target, size_of(source))  # an ONNX file is written once more in fp32
    with tempfile.TemporaryDirectory(prefix=".int8-", dir=target.parent) as aside:
        losses: dict[str, float] = {}
        for share in FLOAT_SHARES:
            folder = Path(aside) / f"{len(attempts)}"
            folder.mkdir()
            in_float = worst(losses, share)
            found = kind.write(source, folder / target.name, pictures, in_float, texts)
            losses = losses or found
            attempts.append(compare(plain, kind.open(folder / target.name), test))
            if attempts[-1].drop <= max_drop:
                return Quantization(
                    files=settled(folder, target),
                    calibration_images=len(pictures),
                    layers=len(losses),
                    float_layers=in_float,
                    attempts=tuple(attempts),
                )
    tried = ", ".join(f"{attempt.drop:.2%}" for attempt in attempts)
    raise UserError(
        f"{target.name} is not kept: on {attempts[0].images} {test.name} images int8 loses {tried} of the "
        f"accuracy with 0, 1/8 and 1/4 of the layers in float, and {max_drop:.2%} are allowed; calibrate "
        "with more pictures, or with such as the model will see, or allow more with --max-drop"
    )


def check(source: Path, target: Path, max_drop: float) -> Format:
    """The format of two files, if they are of one."""
    if source.suffix not in FORMATS:
        raise UserError(f"{source}: int8 is for files that end in {' or '.join(FORMATS)}")
    if target.suffix != source.suffix:
        raise UserError(f"{target}: the int8 file of {source.name} ends in {source.suffix}")
    check_path(target, next(kind for kind in EXPORTED.values() if kind.suffix == target.suffix))
    if not 0 <= max_drop <= 1:
        raise UserError(f"max_drop is a share from 0 to 1, not {max_drop:g}")
    return FORMATS[source.suffix]


def described(about: Metadata, calibration_images: int) -> dict[str, str]:
    """What the int8 file tells about itself: what its source does, and that it is int8."""
    texts = dataclasses.replace(about, precision="int8").to_texts()
    return texts | {"calibration_images": str(calibration_images)}


def worst(losses: Mapping[str, float], share: float) -> tuple[str, ...]:
    """The share of the layers that lose most, in the graph's order."""
    count = -(-len(losses) * share // 1)  # rounded up
    ranked = sorted(losses, key=lambda name: losses[name], reverse=True)[: int(count)]
    return tuple(name for name in losses if name in ranked)
