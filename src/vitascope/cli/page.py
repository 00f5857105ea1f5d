"""`vitascope page`: a model as one HTML file that computes in the browser."""

from __future__ import annotations

import dataclasses
import statistics
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from vitascope.cli.exits import exiting_if_stopped
from vitascope.cli.parsing import Flag, MaybePath, MaybeText, Model
from vitascope.errors import UserError

if TYPE_CHECKING:
    from vitascope.data.stored import ImageFile
    from vitascope.deploy.page.page import ModelResult


@dataclasses.dataclass(frozen=True, kw_only=True)
class Page:
    """Write a model as one HTML file that computes in the browser.

    Drop a picture into it: it shows the class and where the model looks.

    It needs no server and no network.

    A headless Chromium, Chrome or Edge proves that it computes what torch computes.
    """

    model: Model
    """A run folder, a model folder or file, or a hub id."""
    out: MaybePath = None
    """The new file.
    Default: export/model.html in a run folder, else the model's name in the working directory."""
    beside: Annotated[str | None, tyro.conf.arg(metavar="MODEL", help_behavior_hint="")] = None
    """A second model in the file, which the explorer compares with the first on the same picture."""
    weights: Literal["fp16", "int8", "fp32"] = "fp16"
    """Numbers of the weights: `int8` is half as large as `fp16`, and less exact; `fp32` is exact."""
    data: MaybeText = None
    """Images to compare on: an image, a folder, or any other DATA of `vitascope train`.
    Default: the run's test images, else parts of two photographs from scikit-learn."""
    samples: Annotated[tuple[str, ...], tyro.conf.arg(metavar="IMAGE ...", help_behavior_hint="")] = ()
    """Pictures that the page offers, at most 8: image files or folders of them.
    `none` puts in none, and `test` test images of the run.
    Default: photographs and digits of vitascope that the model knows."""
    browser: Annotated[str | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="")] = None
    """The browser's program. Default: the first Chromium, Chrome or Edge that is installed."""
    unproved: Flag = False
    """Keep the file without trying it in a browser."""

    def call(self) -> None:
        """Write, prove, print. SIGINT and SIGTERM end the browser too, and leave no file."""
        from vitascope.data.datasets import open_pictures
        from vitascope.deploy.export.export import spread
        from vitascope.deploy.page.page import page

        samples = self._given_samples()
        images = None if self.data is None else spread(open_pictures(self.data))
        with exiting_if_stopped("no page is kept"):
            done = page(
                self.model,
                self.out,
                beside=self.beside,
                weights=self.weights,
                images=images,
                samples=samples,
                browser=self.browser,
                unproved=self.unproved,
            )
        compared_on = done.compared_on if self.data is None else f"images of {self.data}"
        print(f"{done.path}  {done.size:,} bytes, {done.weights} weights")
        print(f"samples in it: {done.samples}")
        describe(done, done.weights, compared_on, "it is opened")
        if done.beside is not None:
            print(f"beside it, {self.beside}:")
            describe(done.beside, done.weights, compared_on, "it is asked for")
        if done.proof is None:
            print("unproved: not tried in a browser")

    def _given_samples(self) -> list[ImageFile] | str | None:
        """The pictures of --samples or `test`; None if the option is not given."""
        from vitascope.deploy.page.samples import TEST
        from vitascope.predict.predictor import find_images

        if not self.samples:
            return None
        if self.samples == ("none",):
            return []
        if self.samples == (TEST,):
            return TEST
        found = list(find_images(self.samples))
        if not found:
            raise UserError(f"--samples {' '.join(self.samples)}: no images found")
        return found


def describe(result: ModelResult, weights: str, compared_on: str, moment: str) -> None:
    """Print how a page's answers agree with those of a model, which the browser unpacks at a moment."""
    if weights != "fp32":
        print(f"{weights} against the model, on {compared_on}: {result.rounding.summary}")
    if result.proof is None:
        return
    proof, found = result.proof, result.proof.computed
    print(
        f"proved in {proof.browser}, {found.kernel}, against torch with these weights on {compared_on}: "
        f"{proof.agreement.summary}; probabilities differ by at most {proof.probabilities:.1g}, "
        f"pixels by at most {found.pixels} of 255"
    )
    print(
        f"ready {found.unpacking:.1f} s after {moment}; a picture takes "
        f"{statistics.median(found.answers):.2f} s on this machine, the first {found.answers[0]:.2f} s"
    )
