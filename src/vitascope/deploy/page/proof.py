"""The proof of a page: what a browser computes with it, opened from the disk, is compared with torch."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import io
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from vitascope.deploy.export.export import TOLERANCES, check_agreement
from vitascope.deploy.page.browser import BrowserError, Tab, opened
from vitascope.deploy.page.samples import shrunk
from vitascope.errors import UserError
from vitascope.models.decoding import ImageSource
from vitascope.models.engines.engine import TorchEngine
from vitascope.models.heads import scores
from vitascope.models.vision_model import VisionModel
from vitascope.models.vit import VisionTransformer
from vitascope.models.weights.agreement import Agreement, Compared, agreement
from vitascope.models.weights.preprocess import preprocess_of

LONGEST = 1000
"""Pixels of the longer side of the pictures that a page is proved on."""
PATIENCE = 120.0
"""Seconds for a browser to start and a model to be unpacked; each picture gets more by its operations."""
MOST_APART = 1e-2
"""The largest difference of two familiarities that counts as rounding."""
SLOWEST = 5e8
"""Operations per second of the slowest browser that is waited for."""

SOURCES = ("", "beside/")
"""What the explorer calls the first model and the second."""

ASK = """
async ([base64, source]) => {
  const { fetchAttention } = vitascopeModules["server.js"];
  const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  const begun = performance.now();
  const picture = new Blob([bytes], { type: "image/png" });
  const { tensors, about } = await fetchAttention(picture, {}, undefined, source);
  const seconds = (performance.now() - begun) / 1000;
  const pixels = Array.from(tensors.pixels.data);
  const outputs = Array.from(tensors.outputs.data, String); // JSON has no NaN
  return { seconds, pixels, outputs, familiarity: about.verdict?.familiarity ?? null };
}
"""
READY = """
async (source) => {
  const { computing } = vitascopeModules["server.js"];
  const begun = source ? performance.now() : 0;
  const kernel = await computing(source);
  return { seconds: (performance.now() - begun) / 1000, kernel };
}
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Computed:
    """What a browser computed with a page."""

    browser: str
    """Its name and version."""
    outputs: Tensor
    """Logits (n, K) or, without a head, features (n, D), of n pictures."""
    pixels: int
    """The largest difference of two of the model's pixels from those in Python, of 255."""
    kernel: str
    """What computes there, in words."""
    unpacking: float
    """Seconds from opening the file, for the second model from asking for it, to a model that is ready."""
    familiarity: Tensor | None
    """Of the pictures, (n,); None for a model that does not know it."""
    answers: tuple[float, ...]
    """Seconds from a picture to its prediction and attention, of every picture."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Proof:
    """What a browser computed with a page, beside torch."""

    computed: Computed
    """The browser's answers."""
    agreement: Agreement
    """The page against the model with the page's weights, in torch."""
    probabilities: float
    """The largest difference of two probabilities there; 0 of a model without classes."""


class HeldModel(NamedTuple):
    """A model as a page holds it."""

    label: str
    """Its reference or the argument's name, for errors; empty for the only one."""
    engine: TorchEngine
    """The model, on the CPU in float32."""
    rounded: VisionTransformer
    """The same with the page's weights."""
    pictures: Sequence[ComparedPicture]
    """Those that it is compared on."""
    outputs: Tensor
    """What `rounded` computes of them, (n, K) or (n, D)."""

    @property
    def compared(self) -> Compared:
        """What its outputs are."""
        return "logits" if self.rounded.config.gives_classes else "features"


class ComparedPicture(NamedTuple):
    """A picture that the page and torch compute."""

    png: bytes
    pixels: Tensor
    """uint8 (1, C, H, W), by the model's preprocessing."""


@contextmanager
def naming_model(label: str) -> Iterator[None]:
    """Put the label of a model, if it has one, before an error about it."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{label}: {error}" if label else str(error)) from None


def compared_picture(model: VisionTransformer, source: ImageSource) -> ComparedPicture:
    """A picture for the browser, without loss, and its pixels for torch."""
    preprocess = preprocess_of(model)
    image = shrunk(preprocess, source, LONGEST)
    png = io.BytesIO()
    image.save(png, "PNG")
    return ComparedPicture(png.getvalue(), torch.from_numpy(preprocess.pixels(image))[None])


@torch.inference_mode()
def model_outputs(model: VisionModel, pictures: Sequence[ComparedPicture]) -> Tensor:
    """Logits (n, K) of n pictures or, without a head, features (n, D)."""
    preprocess = preprocess_of(model)
    return torch.cat([model(preprocess.normalize(picture.pixels)) for picture in pictures])


def prove(program: str | None, file: Path, models: Sequence[HeldModel], name: str) -> list[Proof]:
    """Compare what a page, to be called `name`, computes in a browser with its models in torch.

    Raises:
        MissingBrowserError: no Playwright or no browser.
        BrowserError: errors in the page, requests over the network, or no answer.
        UserError: outputs that differ.
    """
    proofs = []
    all_answers = computed_in_browser(program, file, [(each.rounded, each.pictures) for each in models])
    for model, answers in zip(models, all_answers, strict=True):
        expected, outputs = model.outputs, answers.outputs
        proof = Proof(
            computed=answers,
            agreement=agreement(expected, outputs, TOLERANCES["pictures"], model.compared),
            probabilities=probabilities_apart(model.rounded, outputs, expected),
        )
        with naming_model(model.label):
            check_agreement(proof.agreement, name)
            check_familiarity(answers.familiarity, model, name)
        proofs.append(proof)
    return proofs


@torch.inference_mode()
def check_familiarity(found: Tensor | None, model: HeldModel, name: str) -> None:
    """Reject a page whose familiarity (n,) differs from its model's."""
    trust = model.rounded.trust
    if trust is None or trust.familiarity is None:
        return
    preprocess = preprocess_of(model.rounded)
    images = torch.cat([preprocess.normalize(picture.pixels) for picture in model.pictures])
    wanted = trust.familiarity(model.rounded.embed(images))
    if found is None or not torch.allclose(found, wanted, atol=MOST_APART):
        raise UserError(f"{name} is not kept, because its familiarity differs: {found}, not {wanted}")


def computed_in_browser(
    program: str | None, file: Path, models: Sequence[tuple[VisionTransformer, Sequence[ComparedPicture]]]
) -> list[Computed]:
    """Open a page from the disk in a browser without a network, and have each of its models compute its
    pictures, one by one; raises MissingBrowserError and BrowserError as `prove`."""
    patience = PATIENCE + max(model.config.flops for model, _ in models) / SLOWEST

    def compute() -> list[Computed]:
        with opened(program, file.absolute().as_uri(), patience) as tab:
            answers = [
                computed_by(tab, source, model, pictures)
                for source, (model, pictures) in zip(SOURCES, models, strict=False)
            ]
            if tab.faults:
                raise BrowserError(f"the page failed in the browser: {tab.faults[0]}")
        return answers

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return compute()
    with ThreadPoolExecutor(1) as pool:  # in a notebook, in whose thread Playwright does not work
        return pool.submit(compute).result()


def computed_by(
    tab: Tab, source: str, model: VisionTransformer, pictures: Sequence[ComparedPicture]
) -> Computed:
    """Have one of a page's models compute pictures."""
    ready = tab.evaluate(READY, source)
    found = [tab.evaluate(ASK, [base64.b64encode(picture.png).decode(), source]) for picture in pictures]
    height, width = model.config.tiled_hw(model.config.image_hw)
    seen = torch.stack([picture.pixels[0, :, :height, :width].flatten() for picture in pictures])
    return Computed(
        browser=tab.name,
        outputs=torch.tensor([list(map(float, each["outputs"])) for each in found]),
        pixels=int((torch.tensor([each["pixels"] for each in found]) - seen.int()).abs().max()),
        kernel=ready["kernel"],
        unpacking=ready["seconds"],
        familiarity=None
        if found[0]["familiarity"] is None
        else torch.tensor([float(each["familiarity"]) for each in found]),
        answers=tuple(each["seconds"] for each in found),
    )


def probabilities_apart(model: VisionTransformer, one: Tensor, other: Tensor) -> float:
    """The largest difference of two probabilities, of outputs (n, K) each; 0 of a model without classes."""
    if not model.config.gives_classes:
        return 0.0
    return float((scores(one, model.config.outputs) - scores(other, model.config.outputs)).abs().max())
