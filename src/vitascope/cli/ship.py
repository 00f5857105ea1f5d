"""`vitascope export`, `page` and `serve`: a model for another runtime, for a browser, behind HTTP."""

from __future__ import annotations

import dataclasses
import statistics
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from vitascope.cli.exits import exiting_if_stopped
from vitascope.cli.parsing import Device, Flag, Model, Precision, Views
from vitascope.deploy.server.settings import Settings
from vitascope.errors import UserError
from vitascope.formatting import aligned, counted
from vitascope.models.weights.builtin import DEFAULT

if TYPE_CHECKING:
    from vitascope.data.stored import ImageFile
    from vitascope.deploy.export.quantize import Measured, QuantizationResult
    from vitascope.deploy.page.page import ModelResult


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
    out: Path | None = None
    """The new file.
    Default: export/model.onnx in a run folder, else the model's name in the working directory."""
    data: str | None = None
    """Images to compare on: an image, a folder, or any other DATA of `vitascope train`.
    Default: the run's test images, else parts of two photographs from scikit-learn."""
    input: Literal["pictures", "tensors"] = "pictures"
    """`pictures` of any size, which the file crops and resizes, or `tensors` of the model's size, uint8."""
    dynamic_resolution: Flag = False
    """With `--input tensors`: any height and width that patches tile, not the model's own only."""
    features: Flag = False
    """Return the features of the body, for `vitascope embed`, instead of probabilities.
    The default name is export/model-features.onnx."""
    explain: Literal["attention", "rollout", "lens"] | None = None
    """Return a heatmap too: `attention` of the last layer, `rollout` of all, or the `lens`.
    The lens reads the predicted class from each patch."""
    views: Views = 1
    int8: Flag = False
    """Compute in 8-bit integers: a quarter of the size, and faster.
    The accuracy is compared with fp32 on `--data`, which then needs one folder per class.
    By default also on a run's validation images, if it has less than 1,000 test images.
    The default name is export/model-int8.onnx (.xml)."""
    calibration: str | None = None
    """With `--int8`: DATA without labels, from which the ranges of activations are computed.
    Default: the run's training images, else the training part of `--data`."""
    images: int = 300
    """With `--int8`: calibration images to use."""
    max_drop: float = 0.01
    """With `--int8`: the accuracy, or the mAP of several classes per image, that may be lost, as a share.
    If more is lost, nothing is written.
    A warning tells if the images are too few to be sure."""

    def call(self) -> dict[str, object]:
        """Export, compare, print."""
        common: dict[str, Any] = {n: getattr(self, n) for n in ("format", "input", "dynamic_resolution")}
        if self.int8:
            return self._quantize(common)
        if self.calibration is not None:
            raise UserError("--calibration needs --int8")
        from vitascope.data.datasets import open_pictures
        from vitascope.deploy.export.export import evenly_spaced, export

        images = None if self.data is None else evenly_spaced(open_pictures(self.data))
        common |= {"features": self.features, "explain": self.explain, "views": self.views}
        done = export(self.model, self.out, images=images, **common)
        compared_on = done.compared_on if self.data is None else f"images of {self.data}"
        for file in done.files:
            print(f"{file}  {file.stat().st_size:,} bytes")
        print(f"takes {done.takes}")
        print(f"returns {done.returns}")
        print(f"compared with the model on {compared_on}: {done.agreement.summary}")
        if done.heatmaps is not None:
            print(f"its heatmaps: {done.heatmaps.summary}")
        print(f"\nTo use it without vitascope:\n{textwrap.indent(done.program, '    ')}")
        return {"feature_file" if self.features else "file": done.files[0]}

    def _quantize(self, common: dict[str, Any]) -> dict[str, object]:
        """Write the file in 8-bit integers, and print its comparison with fp32."""
        from vitascope.deploy.export.quantize import quantize

        for option in ("features", "views", "explain"):
            if getattr(self, option) != getattr(Export, option):
                raise UserError(f"--{option} is for files in float32, but --int8 was given: omit one")
        common |= {name: getattr(self, name) for name in ("data", "calibration", "max_drop")}
        found = quantize(self.model, self.out, calibration_images=self.images, **common)
        print("\n".join(comparison_lines(found)))
        return {"file": found.files[0]}


def comparison_lines(done: QuantizationResult) -> list[str]:
    """The files, the attempts, and a table of fp32 and int8."""
    both = done.comparison
    lines = [f"{file}  {file.stat().st_size:,} bytes" for file in done.files]
    for attempt, share in zip(done.attempts[:-1], ("every layer", "7/8 of the layers"), strict=False):
        lines.append(f"{share} in int8: loses {attempt.paired}, too much; tried again")
    which = f"{counted(done.layers, 'layer')} in int8"
    if done.float_layers:
        which += f", {len(done.float_layers)} with the largest rounding error left in float"
    lines.append(f"{which}; ranges from {counted(done.calibration_images, 'image')}")
    lines += [f"left out: {reason}" for reason in both.unreadable]
    rows = [
        ("", both.paired.name, "95% interval", "bytes", "images/s at batch 1"),
        *map(row, (both.before, both.after), both.paired.rows()),
    ]
    lines += aligned(rows, left=())
    faster = both.before.seconds / both.after.seconds
    images = counted(both.paired.total, f"{done.measured_on} image")
    return [
        *lines,
        f"int8 loses {both.paired}, on {images}",
        f"agreement: the same prediction for {both.same} of {both.paired.total:,}, {both.agreement:.2%}; "
        f"{both.before.size / both.after.size:.1f} times smaller, {faster:.1f} times as fast",
    ]


def row(measured: Measured, quality: tuple[str, str]) -> tuple[str, ...]:
    """One file's line of the table."""
    return (measured.precision, *quality, f"{measured.size:,}", f"{1 / measured.seconds:,.1f}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Page:
    """Write a model as one HTML file that computes in the browser.

    Drop a picture into it: it shows the class and where the model looks.

    It needs no server and no network.

    A headless Chromium, Chrome or Edge proves that it computes what torch computes.

    That needs an extra: pip install 'vitascope[page]'.
    """

    model: Model
    """A run folder, a model folder or file, or a hub id."""
    out: Path | None = None
    """The new file.
    Default: export/model.html in a run folder, else the model's name in the working directory."""
    beside: Annotated[str | None, tyro.conf.arg(metavar="MODEL")] = None
    """A second model in the file, which the explorer compares with the first on the same picture."""
    weights: Literal["fp16", "int8", "fp32"] = "fp16"
    """Numbers of the weights: `int8` is half as large as `fp16`, and less exact; `fp32` is exact."""
    data: str | None = None
    """Images to compare on: an image, a folder, or any other DATA of `vitascope train`.
    Default: the run's test images, else parts of two photographs from scikit-learn."""
    samples: Annotated[tuple[str, ...], tyro.conf.arg(metavar="IMAGE ...")] = ()
    """Pictures that the page offers, at most 8: image files or folders of them.
    `none` puts in none, and `test` test images of the run.
    Default: photographs and digits of vitascope that the model knows."""
    browser: Annotated[str | None, tyro.conf.arg(metavar="PATH")] = None
    """The browser's program. Default: the first Chromium, Chrome or Edge that is installed."""
    unproved: Flag = False
    """Keep the file without trying it in a browser."""
    learn: Flag = False
    """A page that labels pictures and gets a classifier of them, with the frozen body of the model.
    It keeps them in the browser. The default name is export/model-learn.html."""

    def call(self) -> dict[str, object]:
        """Write, prove, print. SIGINT and SIGTERM end the browser too, and leave no file."""
        from vitascope.data.datasets import open_pictures
        from vitascope.deploy.export.export import evenly_spaced
        from vitascope.deploy.page.page import page

        samples = self._given_samples()
        images = None if self.data is None else evenly_spaced(open_pictures(self.data))
        with exiting_if_stopped("no page is kept"):
            options = {n: getattr(self, n) for n in ("beside", "weights", "browser", "unproved", "learn")}
            done = page(self.model, self.out, images=images, samples=samples, **options)
        compared_on = done.compared_on if self.data is None else f"images of {self.data}"
        print(f"{done.path}  {done.size:,} bytes, {done.weights} weights")
        print(f"samples in it: {done.samples}")
        describe(done, done.weights, compared_on, "it is opened")
        if done.beside is not None:
            print(f"beside it, {self.beside}:")
            describe(done.beside, done.weights, compared_on, "it is asked for")
        if done.proof is None:
            print("unproved: not tried in a browser")
        return {"page": done.path}

    def _given_samples(self) -> list[ImageFile] | str | None:
        """The pictures of --samples or `test`; None if the option is not given."""
        from vitascope.deploy.page.samples import TEST
        from vitascope.deploy.predict.predictor import find_images

        if not self.samples:
            return None
        if self.samples == ("none",):
            return []
        if self.samples == (TEST,):
            return TEST
        files = list(find_images(self.samples))
        if not files:
            raise UserError(f"--samples {' '.join(self.samples)}: no images found")
        return files


def describe(result: ModelResult, weights: str, compared_on: str, moment: str) -> None:
    """Print how a page's answers agree with those of a model, which the browser unpacks at a moment."""
    if weights != "fp32":
        print(f"{weights} against the model, on {compared_on}: {result.rounding.summary}")
    if result.proof is None:
        return
    proof, computed = result.proof, result.proof.computed
    print(
        f"proved in {computed.browser}, {computed.kernel}, against torch with these weights on "
        f"{compared_on}: {proof.agreement.summary}; probabilities differ by at most "
        f"{proof.probabilities:.1g}, pixels by at most {computed.pixels} of 255"
    )
    print(
        f"ready {computed.unpacking:.1f} s after {moment}; a picture takes "
        f"{statistics.median(computed.answers):.2f} s on this machine, the first {computed.answers[0]:.2f} s"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Serve:
    """Serve a model over HTTP, with the attention explorer at /.

    Pictures go to /v1/predict, /v1/explain and /v1/embed; /docs has examples.

    Of several, `a=runs/a b=runs/b`, each is at /models/NAME/, the first here too.

    Needs an extra: pip install 'vitascope[server]'.

    SIGTERM or Ctrl-C stops it after all accepted requests are answered.
    """

    FIRST = ("models", "beside", "host", "port", "workers", "token_file", "device")
    """The options of the short help."""

    models: tyro.conf.Positional[
        Annotated[tuple[str, ...], tyro.conf.arg(metavar="[MODEL | NAME=MODEL ...]")]
    ] = (DEFAULT,)
    """A run folder, a model folder or file, a hub id, or an exported file. Default: the built-in cifar10."""
    beside: Annotated[str | None, tyro.conf.arg(metavar="MODEL")] = None
    """Another model, which the explorer compares with this one on the same picture."""
    precision: Precision = "auto"
    device: Device = "auto"
    settings: Annotated[Settings, tyro.conf.arg(name="server")] = dataclasses.field(default_factory=Settings)

    def call(self) -> None:
        """Serve until SIGTERM or Ctrl-C."""
        from vitascope.deploy.server.server import serve

        serve(self.models, self.settings, beside=self.beside, precision=self.precision, device=self.device)
