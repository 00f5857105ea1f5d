"""`vitascope export`: a model as a file for another runtime, in float or in int8."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import TYPE_CHECKING, Any, Literal

from vitascope.cli.parsing import Flag, MaybePath, MaybeText, Model
from vitascope.errors import UserError
from vitascope.formatting import aligned, counted

if TYPE_CHECKING:
    from vitascope.deploy.export.quantize import Measured, QuantizationResult


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export:
    """Write a model for another runtime, and compare their outputs.

    The file takes raw pixels and returns probabilities, or features (`--features`).

    Needs an extra: pip install 'vitascope[onnx]' or 'vitascope[openvino]'.
    """

    model: Model
    """A run folder, a model folder or file, or a hub id."""
    format: Literal["onnx", "openvino", "torch"] = "onnx"
    """`onnx` runs nearly everywhere; `openvino` on CPUs, in bf16 if they support it; `torch` in PyTorch."""
    out: MaybePath = None
    """The new file.
    Default: export/model.onnx in a run folder, else the model's name in the working directory."""
    data: MaybeText = None
    """Images to compare on: an image, a folder, or any other DATA of `vitascope train`.
    Default: the run's test images, else parts of two photographs from scikit-learn."""
    input: Literal["pictures", "tensors"] = "pictures"
    """`pictures` of any size, which the file crops and resizes, or `tensors` of the model's size, uint8."""
    dynamic_resolution: Flag = False
    """With `--input tensors`: any height and width that patches tile, not the model's own only."""
    features: Flag = False
    """Return the features of the body, for `vitascope embed`, instead of probabilities.
    The default name is export/model-features.onnx."""
    int8: Flag = False
    """Compute in 8-bit integers: a quarter of the size, and faster.
    The accuracy is compared with fp32 on `--data`, which then needs one folder per class.
    By default also on a run's validation images, if it has less than 1,000 test images.
    The default name is export/model-int8.onnx (.xml)."""
    calibration: MaybeText = None
    """With `--int8`: DATA without labels, from which the ranges of activations are computed.
    Default: the run's training images, else the training part of `--data`."""
    images: int = 300
    """With `--int8`: calibration images to use."""
    max_drop: float = 0.01
    """With `--int8`: the accuracy, or the mAP of several classes per image, that may be lost, as a share.
    If more is lost, nothing is written.
    A warning tells if the images are too few to be sure."""

    def call(self) -> None:
        """Export, compare, print."""
        common: dict[str, Any] = {
            "format": self.format,
            "input": self.input,
            "dynamic_resolution": self.dynamic_resolution,
        }
        if self.int8:
            if self.features:
                raise UserError(
                    "--int8 is measured by the accuracy of classes, which --features leaves out: omit one"
                )
            from vitascope.deploy.export.quantize import quantize

            found = quantize(
                self.model,
                self.out,
                data=self.data,
                calibration=self.calibration,
                calibration_images=self.images,
                max_drop=self.max_drop,
                **common,
            )
            print("\n".join(comparison_lines(found)))
            return
        if self.calibration is not None:
            raise UserError("--calibration needs --int8")
        from vitascope.data.datasets import open_pictures
        from vitascope.deploy.export.export import export, spread

        images = None if self.data is None else spread(open_pictures(self.data))
        done = export(self.model, self.out, images=images, features=self.features, **common)
        compared_on = done.compared_on if self.data is None else f"images of {self.data}"
        for file in done.files:
            print(f"{file}  {file.stat().st_size:,} bytes")
        print(f"takes {done.takes}")
        print(f"returns {done.returns}")
        print(f"compared with the model on {compared_on}: {done.agreement.summary}")
        print(f"\nTo use it without vitascope:\n{textwrap.indent(done.program, '    ')}")


def comparison_lines(done: QuantizationResult) -> list[str]:
    """The files, the attempts, and a table of fp32 and int8."""
    found = done.comparison
    lines = [f"{file}  {file.stat().st_size:,} bytes" for file in done.files]
    for attempt, share in zip(done.attempts[:-1], ("every layer", "7/8 of the layers"), strict=False):
        lines.append(f"{share} in int8: loses {attempt.paired}, too much; tried again")
    which = f"{counted(done.layers, 'layer')} in int8"
    if done.float_layers:
        which += f", {len(done.float_layers)} with the largest rounding error left in float"
    lines.append(f"{which}; ranges from {counted(done.calibration_images, 'image')}")
    lines += [f"left out: {reason}" for reason in found.unreadable]
    rows = [
        ("", found.paired.name, "95% interval", "bytes", "images/s at batch 1"),
        *map(row, (found.before, found.after), found.paired.rows()),
    ]
    lines += aligned(rows, left=())
    faster = found.before.seconds / found.after.seconds
    images = counted(found.paired.total, f"{done.measured_on} image")
    return [
        *lines,
        f"int8 loses {found.paired}, on {images}",
        f"agreement: the same prediction for {found.same} of {found.paired.total:,}, {found.agreement:.2%}; "
        f"{found.before.size / found.after.size:.1f} times smaller, {faster:.1f} times as fast",
    ]


def row(measured: Measured, quality: tuple[str, str]) -> tuple[str, ...]:
    """One file's line of the table."""
    return (measured.precision, *quality, f"{measured.size:,}", f"{1 / measured.seconds:,.1f}")
