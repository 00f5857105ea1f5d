"""`page`: a model as one HTML file that computes in the browser, proved there before it gets its name."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import os
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save
from torch import Tensor

from vitascope.arguments import checked
from vitascope.data.decoding import ImageSource
from vitascope.deploy.export.export import default_path, images_to_compare, own_tests
from vitascope.deploy.export.verification import TOLERANCES, check_agreement
from vitascope.deploy.page.browser import BrowserError, address_of, find_browser, opened
from vitascope.deploy.page.document import document
from vitascope.deploy.page.model_options import INSTEAD, check_held, program_options
from vitascope.deploy.page.samples import Samples, choose_samples, shrunk
from vitascope.deploy.page.weights import BYTES, Rounding, packed, rounded
from vitascope.deploy.server.attention_pack import NO_HEAD, token_names, what_fits
from vitascope.errors import UserError
from vitascope.explain.methods import METHODS
from vitascope.model.config import ViTConfig
from vitascope.model.heads import scores
from vitascope.model.vision_model import VisionModel
from vitascope.model.vit import VisionTransformer
from vitascope.predict.engine import TorchEngine
from vitascope.predict.runtimes import name_of
from vitascope.run.run import load_with_run
from vitascope.storage import check_room, make_folder, replacing
from vitascope.weights.agreement import Agreement, Compared, agreement
from vitascope.weights.preprocess import preprocess_of

MOST_MB = 256
"""Of a page; a browser holds its text, and the weights as float32 beside it."""
COMPARED = 8
"""Pictures that a page is proved on."""
LONGEST = 1000
"""Pixels of the longer side of these pictures."""
CARRIED = 256 * 2**20
"""Bytes of attention that the page keeps per picture."""
CLASS_MAPS = ("grad-cam", "occlusion")
"""The methods of `web/answers.js`."""
PATIENCE = 120.0
"""Seconds for a browser to start and a model to be unpacked; each picture gets more by its operations."""
SLOWEST = 5e8
"""Operations per second of the slowest browser that is waited for."""

ASK = """
async (base64) => {
  const { fetchAttention } = vitascopeModules["server.js"];
  const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  const begun = performance.now();
  const { tensors } = await fetchAttention(new Blob([bytes], { type: "image/png" }));
  const seconds = (performance.now() - begun) / 1000;
  const pixels = Array.from(tensors.pixels.data);
  return { seconds, pixels, outputs: Array.from(tensors.outputs.data, String) }; // JSON has no NaN
}
"""
READY = """
(async () => {
  const { computing, fetchModel } = vitascopeModules["server.js"];
  await fetchModel();
  return { seconds: performance.now() / 1000, kernel: computing() };
})()
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Computed:
    """What a browser computed with a page."""

    outputs: Tensor
    """Logits (n, K) or, without a head, features (n, D), of n pictures."""
    pixels: int
    """The largest difference of two of the model's pixels from those in Python, of 255."""
    kernel: str
    """What computes there, in words."""
    unpacking: float
    """Seconds from opening the file to a model that is ready."""
    answers: tuple[float, ...]
    """Seconds from a picture to its prediction and attention, of every picture."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Proof:
    """What a browser computed with a page, beside torch."""

    browser: str
    """The program."""
    computed: Computed
    """Its answers."""
    agreement: Agreement
    """The page against the model with the page's weights, in torch."""
    probabilities: float
    """The largest difference of two probabilities there; 0 of a model without classes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PageResult:
    """A model's page, and how its answers agree with the model's."""

    path: Path
    """The HTML file."""
    weights: Rounding
    """The numbers of the weights in it."""
    rounding: Agreement
    """The model with these weights against the model, both in torch."""
    compared_on: str
    """The pictures of both agreements, in words."""
    samples: str
    """The pictures that the page offers, in words."""
    proof: Proof | None
    """None if the page was not tried in a browser."""

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.path.stat().st_size

    def __repr__(self) -> str:
        proved = "unproved" if self.proof is None else self.proof.agreement.summary
        return f"PageResult({self.path}, {self.size / 1e6:,.1f} MB: {proved})"


class ComparedPicture(NamedTuple):
    """A picture that the page and torch compute."""

    png: bytes
    pixels: Tensor
    """uint8 (1, C, H, W), by the model's preprocessing."""


@checked
def page(
    model: VisionModel | str | os.PathLike[str],
    path: str | os.PathLike[str] | None = None,
    *,
    weights: Rounding = "fp16",
    images: ImageSource | Iterable[ImageSource] | None = None,
    samples: ImageSource | Iterable[ImageSource] | None = None,
    browser: str | os.PathLike[str] | None = None,
    unproved: bool = False,
) -> PageResult:
    """Write a model as one HTML file: the attention explorer, with the model computing in the browser.

    The file needs no server and no network. It gets its name only if a headless browser, opening it from the
    disk, computes the outputs of torch.

    Args:
        model: a Vision Transformer, or a MODEL reference.
        path: a new file, `.html`. By default `RUN/export/model.html` for a run, and else the model's name in
            the working directory.
        weights: the numbers of the weights in the file: `fp16`, `int8` with a scale per output, half as
            large, or `fp32`, exact.
        images: one picture or several to compare on, at most 8 of them; by default as `export`.
        samples: one picture or several for the page to offer, at most 8 of them, as small copies without
            metadata; `[]` for none, "test" for test images of the model's run. By default the photographs and
            digits of vitascope that the model knows.
        browser: the program of a Chromium, Chrome or Edge; by default the first that is installed.
        unproved: keep the file without trying it in a browser.

    Raises:
        CheckpointError: as `from_pretrained`.
        UserError: a model that a page cannot hold, or that is too large for one; a file that exists; no
            browser; a picture that cannot be read; outputs that differ.
    """
    path = default_path(model, ".html") if path is None else Path(path)
    check_path(path)
    program = None if unproved else find_browser(browser)
    loaded, run = load_with_run(model)
    vit = check_held(loaded)
    check_size(vit, weights)
    tests = cache(lambda: own_tests(run))
    sources, compared_on = images_to_compare(images, tests)
    own, held = rounded(vit, "fp32"), rounded(vit, weights)
    pictures = [compared_picture(own, source) for source in some(sources)]
    engine = TorchEngine(own, device="cpu")
    engine.name = name_of(model) if isinstance(model, str | os.PathLike) else ""
    offered = choose_samples(samples, engine, tests)
    content = save(packed(held, weights))
    make_folder(path.parent)
    check_room(path, len(content) * 4 // 3)
    with replacing(path) as aside:
        title = f"{engine.name or engine.architecture} – vitascope"
        with open(aside, "w", encoding="utf-8") as file:
            file.writelines(document(title, page_data(engine, weights, offered), content))
        proof = None if program is None else prove(program, aside, held, pictures)
        if proof is not None:
            check_agreement(proof.agreement, path.name)
    outputs = [torch.cat([outputs_of(one, picture) for picture in pictures]) for one in (own, held)]
    return PageResult(
        path=path,
        weights=weights,
        rounding=agreement(outputs[0], outputs[1], outputs=compared(own)),
        compared_on=compared_on,
        samples=offered.description,
        proof=proof,
    )


def check_path(path: Path) -> None:
    """Reject what exists, and another suffix, which a browser would not open as a page."""
    if path.is_dir():
        raise UserError(f"{path} is a folder; name a new file: {path / 'model.html'}")
    if path.suffix not in (".html", ".htm"):
        raise UserError(f"{path}: a page ends in .html: {path.with_suffix('.html')}")
    if path.exists():
        raise UserError(f"{path} exists and is not overwritten; remove it, or choose another file")


def check_size(model: VisionTransformer, weights: Rounding) -> None:
    """Reject a model whose page a browser could not hold."""
    size = megabytes(model, weights)
    if size > MOST_MB:
        smaller = [other for other in BYTES if megabytes(model, other) <= MOST_MB]
        way_out = f"use weights {smaller[0]}, or `vitascope serve`" if smaller else INSTEAD
        raise UserError(
            f"a page of {model.config.num_parameters:,} parameters in {weights} has {size:,.0f} MB; the "
            f"limit is {MOST_MB} MB: {way_out}"
        )


def megabytes(model: VisionTransformer, weights: Rounding) -> float:
    """About the size of a model's page, in MB: base64 takes four thirds."""
    return model.config.num_parameters * BYTES[weights] * 4 / 3 / 1e6


def some(sources: Sequence[ImageSource]) -> list[ImageSource]:
    """At most `COMPARED` of the pictures, from all parts of a sequence."""
    step = max(1, len(sources) // COMPARED)
    return list(sources[::step])[:COMPARED]


def compared_picture(model: VisionTransformer, source: ImageSource) -> ComparedPicture:
    """A picture for the browser, without loss, and its pixels for torch."""
    preprocess = preprocess_of(model)
    image = shrunk(preprocess, source, LONGEST)
    png = io.BytesIO()
    image.save(png, "PNG")
    return ComparedPicture(png.getvalue(), torch.from_numpy(preprocess.pixels(image))[None])


@torch.inference_mode()
def outputs_of(model: VisionTransformer, picture: ComparedPicture) -> Tensor:
    """Logits (1, K) or, without a head, features (1, D)."""
    outputs: Tensor = model(preprocess_of(model).normalize(picture.pixels))
    return outputs


def compared(model: VisionTransformer) -> Compared:
    """What `outputs_of` returns."""
    return "logits" if model.config.gives_classes else "features"


def page_data(engine: TorchEngine, weights: Rounding, samples: Samples) -> dict[str, Any]:
    """What `web/local.js` reads: the model's options, what the explorer shows of it, and the samples.

    `about` has the entries of `attention_pack`, without those that differ from picture to picture.
    """
    config, preprocess = engine.model.config, engine.preprocess
    assert isinstance(config, ViTConfig)
    about: dict[str, Any] = {
        "model": f"{weights} weights",
        "class_names": list(engine.class_names),
        "framing": {**preprocess.to_dict(), "border": list(preprocess.border)},
        "grid": list(config.grid),
        "inside": {**token_names(config), "carried": what_fits(config, config.grid, CARRIED)},
    }
    if engine.num_classes:
        about["methods"] = {name: METHODS[name].title for name in CLASS_MAPS}
        about["explained"] = {"method": CLASS_MAPS[0], "classes": []}
        about["thresholds"] = list(engine.thresholds) if engine.several else None
    else:
        about["missing"] = NO_HEAD
    described = {"name": engine.name, "architecture": engine.architecture, "digest": engine.digest}
    options = program_options(config)
    offered = samples.to_json()
    return {"options": options, "about": about, "samples": offered, "described": described}


def computed(
    program: str, file: Path, model: VisionTransformer, pictures: Sequence[ComparedPicture]
) -> Computed:
    """Open a page from the disk in a browser without a network, and have it compute pictures, one by one.

    Raises:
        BrowserError: errors in the page, requests over the network, or no answer.
    """
    patience = PATIENCE + len(pictures) * model.config.flops / SLOWEST
    with opened(program, address_of(file), patience) as tab:
        ready = tab.evaluate(READY)
        found = [
            tab.evaluate(f"({ASK})({json.dumps(base64.b64encode(picture.png).decode())})")
            for picture in pictures
        ]
        if tab.faults:
            raise BrowserError(f"the page failed in the browser: {tab.faults[0]}")
    height, width = model.config.tiled_hw(model.config.image_hw)
    seen = torch.stack([picture.pixels[0, :, :height, :width].flatten() for picture in pictures])
    return Computed(
        outputs=torch.tensor([list(map(float, each["outputs"])) for each in found]),
        pixels=int((torch.tensor([each["pixels"] for each in found]) - seen.int()).abs().max()),
        kernel=ready["kernel"],
        unpacking=ready["seconds"],
        answers=tuple(each["seconds"] for each in found),
    )


def prove(program: str, file: Path, model: VisionTransformer, pictures: Sequence[ComparedPicture]) -> Proof:
    """Compare what a page computes in a browser with a model in torch; raises as `computed`."""
    found = computed(program, file, model, pictures)
    own = torch.cat([outputs_of(model, picture) for picture in pictures])
    return Proof(
        browser=Path(program).name,
        computed=found,
        agreement=agreement(own, found.outputs, TOLERANCES["pictures"], compared(model)),
        probabilities=probabilities_apart(model, found.outputs, own),
    )


def probabilities_apart(model: VisionTransformer, one: Tensor, other: Tensor) -> float:
    """The largest difference of two probabilities, of outputs (n, K) each; 0 of a model without classes."""
    if not model.config.gives_classes:
        return 0.0
    return float((scores(one, model.config.outputs) - scores(other, model.config.outputs)).abs().max())
