"""`page`: a model as one HTML file that computes in the browser, proved there before it gets its name.

A page may have two models. What concerns one of them is a function of a `HeldModel`.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
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
from vitascope.deploy.page.browser import BrowserError, Tab, address_of, find_browser, opened
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
from vitascope.run.run import Run, load_with_run
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

SOURCES = ("", "beside/")
"""What the explorer calls the first model and the second."""

ASK = """
async ([base64, source]) => {
  const { fetchAttention } = vitascopeModules["server.js"];
  const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  const begun = performance.now();
  const { tensors } = await fetchAttention(new Blob([bytes], { type: "image/png" }), {}, undefined, source);
  const seconds = (performance.now() - begun) / 1000;
  const pixels = Array.from(tensors.pixels.data);
  return { seconds, pixels, outputs: Array.from(tensors.outputs.data, String) }; // JSON has no NaN
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

    outputs: Tensor
    """Logits (n, K) or, without a head, features (n, D), of n pictures."""
    pixels: int
    """The largest difference of two of the model's pixels from those in Python, of 255."""
    kernel: str
    """What computes there, in words."""
    unpacking: float
    """Seconds from opening the file, for the second model from asking for it, to a model that is ready."""
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
class ModelResult:
    """How a page's answers agree with those of its model."""

    rounding: Agreement
    """The model with the page's weights against the model, both in torch."""
    proof: Proof | None
    """None if the page was not tried in a browser."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PageResult(ModelResult):
    """A page, with the results of its first model and, `beside` it, of a second."""

    path: Path
    """The HTML file."""
    weights: Rounding
    """The numbers of the weights in it."""
    compared_on: str
    """The pictures of all agreements, in words."""
    samples: str
    """The pictures that the page offers, in words."""
    beside: ModelResult | None
    """The second model; None in a page of one."""

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.path.stat().st_size

    def __repr__(self) -> str:
        proofs = [each.proof for each in (self, self.beside) if each is not None]
        proved = ["unproved" if proof is None else proof.agreement.summary for proof in proofs]
        return f"PageResult({self.path}, {self.size / 1e6:,.1f} MB: {'; beside: '.join(proved)})"


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
    beside: VisionModel | str | os.PathLike[str] | None = None,
    weights: Rounding = "fp16",
    images: ImageSource | Iterable[ImageSource] | None = None,
    samples: ImageSource | Iterable[ImageSource] | None = None,
    browser: str | os.PathLike[str] | None = None,
    unproved: bool = False,
) -> PageResult:
    """Write a model as one HTML file: the attention explorer, with the model computing in the browser.

    The file needs no server and no network. It gets its name only if a headless browser, opening it from the
    disk, computes the outputs of torch, of both models if there are two.

    Args:
        model: a Vision Transformer, or a MODEL reference.
        path: a new file, `.html`. By default `RUN/export/model.html` for a run, and else the model's name in
            the working directory.
        beside: a second Vision Transformer or MODEL reference, which the explorer compares with the first on
            the same picture. It may be of another size, and have other classes.
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
    refs = [model] if beside is None else [model, beside]
    labels = [""] if beside is None else [reference(model) or "model", reference(beside) or "beside"]
    loaded = [load_held(ref, label) for ref, label in zip(refs, labels, strict=True)]
    check_size([vit for vit, _ in loaded], weights)
    tests = cache(lambda: own_tests(loaded[0][1]))
    sources, compared_on = images_to_compare(images, tests)
    models = [
        hold(vit, ref, label, weights, some(sources))
        for (vit, _), ref, label in zip(loaded, refs, labels, strict=True)
    ]
    offered = choose_samples(samples, models[0].engine, tests)
    contents = [save(packed(each.rounded, weights)) for each in models]
    make_folder(path.parent)
    check_room(path, sum(map(len, contents)) * 4 // 3)
    with replacing(path) as aside:
        with open(aside, "w", encoding="utf-8") as file:
            file.writelines(document(title_of(models), page_data(models, weights, offered), contents))
        proofs = [None] * len(models) if program is None else prove(program, aside, models, path.name)
    first, *others = [
        ModelResult(rounding=rounding_of(each), proof=proof)
        for each, proof in zip(models, proofs, strict=True)
    ]
    return PageResult(
        path=path,
        weights=weights,
        rounding=first.rounding,
        compared_on=compared_on,
        samples=offered.description,
        proof=first.proof,
        beside=others[0] if others else None,
    )


def reference(model: VisionModel | str | os.PathLike[str]) -> str:
    """A MODEL reference as a text; empty for a model."""
    return os.fspath(model) if isinstance(model, str | os.PathLike) else ""


def load_held(
    model: VisionModel | str | os.PathLike[str], label: str
) -> tuple[VisionTransformer, Run | None]:
    """A model that a page can hold, and its run."""
    loaded, run = load_with_run(model)
    with naming(label):
        return check_held(loaded), run


def hold(
    model: VisionTransformer,
    ref: VisionModel | str | os.PathLike[str],
    label: str,
    weights: Rounding,
    sources: Sequence[ImageSource],
) -> HeldModel:
    """Round a model, and compute its pixels of the pictures to compare on."""
    with naming(label):
        own, held = rounded(model, "fp32"), rounded(model, weights)
    engine = TorchEngine(own, device="cpu")
    engine.name = name_of(ref) if isinstance(ref, str | os.PathLike) else ""
    return HeldModel(label, engine, held, [compared_picture(own, source) for source in sources])


@contextmanager
def naming(label: str) -> Iterator[None]:
    """Put the label of a model, if it has one, before an error about it."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{label}: {error}" if label else str(error)) from None


def title_of(models: Sequence[HeldModel]) -> str:
    """The document's title until the explorer has started."""
    names = [each.engine.name or each.engine.architecture for each in models]
    return f"{' and '.join(names)} – vitascope"


def check_path(path: Path) -> None:
    """Reject what exists, and another suffix, which a browser would not open as a page."""
    if path.is_dir():
        raise UserError(f"{path} is a folder; name a new file: {path / 'model.html'}")
    if path.suffix not in (".html", ".htm"):
        raise UserError(f"{path}: a page ends in .html: {path.with_suffix('.html')}")
    if path.exists():
        raise UserError(f"{path} exists and is not overwritten; remove it, or choose another file")


def check_size(models: Sequence[VisionTransformer], weights: Rounding) -> None:
    """Reject models whose page a browser could not hold."""
    parameters = sum(each.config.num_parameters for each in models)
    size = megabytes(parameters, weights)
    if size > MOST_MB:
        smaller = [other for other in BYTES if megabytes(parameters, other) <= MOST_MB]
        way_out = f"use weights {smaller[0]}, or `vitascope serve`" if smaller else INSTEAD
        counts = " and ".join(f"{each.config.num_parameters:,}" for each in models)
        raise UserError(
            f"a page of {counts} parameters in {weights} has {size:,.0f} MB; the limit is {MOST_MB} MB: "
            f"{way_out}"
        )


def megabytes(parameters: int, weights: Rounding) -> float:
    """About the size of a page, in MB: base64 takes four thirds."""
    return parameters * BYTES[weights] * 4 / 3 / 1e6


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
def outputs_of(model: VisionModel, picture: ComparedPicture) -> Tensor:
    """Logits (1, K) or, without a head, features (1, D)."""
    outputs: Tensor = model(preprocess_of(model).normalize(picture.pixels))
    return outputs


def outputs_of_all(model: VisionModel, pictures: Sequence[ComparedPicture]) -> Tensor:
    """The same of n pictures, (n, K) or (n, D)."""
    return torch.cat([outputs_of(model, picture) for picture in pictures])


def compared(model: VisionTransformer) -> Compared:
    """What `outputs_of` returns."""
    return "logits" if model.config.gives_classes else "features"


def page_data(models: Sequence[HeldModel], weights: Rounding, samples: Samples) -> dict[str, Any]:
    """What `web/local.js` reads: the models and the samples."""
    return {"models": [model_data(each.engine, weights) for each in models], "samples": samples.to_json()}


def model_data(engine: TorchEngine, weights: Rounding) -> dict[str, Any]:
    """A model's options, and what the explorer shows of it.

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
    return {"options": program_options(config), "about": about, "described": described}


def prove(program: str, file: Path, models: Sequence[HeldModel], name: str) -> list[Proof]:
    """Compare what a page, to be called `name`, computes in a browser with its models in torch.

    Raises:
        BrowserError: errors in the page, requests over the network, or no answer.
        UserError: outputs that differ.
    """
    found = computed(program, file, [(each.rounded, each.pictures) for each in models])
    proofs = [proof_of(program, each, answers) for each, answers in zip(models, found, strict=True)]
    for each, proof in zip(models, proofs, strict=True):
        with naming(each.label):
            check_agreement(proof.agreement, name)
    return proofs


def computed(
    program: str, file: Path, models: Sequence[tuple[VisionTransformer, Sequence[ComparedPicture]]]
) -> list[Computed]:
    """Open a page from the disk in a browser without a network, and have each of its models compute its
    pictures, one by one; raises BrowserError as `prove`."""
    work = sum(len(pictures) * model.config.flops for model, pictures in models)
    with opened(program, address_of(file), len(models) * PATIENCE + work / SLOWEST) as tab:
        found = [
            computed_by(tab, source, model, pictures)
            for source, (model, pictures) in zip(SOURCES, models, strict=False)
        ]
        if tab.faults:
            raise BrowserError(f"the page failed in the browser: {tab.faults[0]}")
    return found


def computed_by(
    tab: Tab, source: str, model: VisionTransformer, pictures: Sequence[ComparedPicture]
) -> Computed:
    """Have one of a page's models compute pictures."""
    ready = tab.evaluate(f"({READY})({json.dumps(source)})")
    found = [
        tab.evaluate(f"({ASK})({json.dumps([base64.b64encode(picture.png).decode(), source])})")
        for picture in pictures
    ]
    height, width = model.config.tiled_hw(model.config.image_hw)
    seen = torch.stack([picture.pixels[0, :, :height, :width].flatten() for picture in pictures])
    return Computed(
        outputs=torch.tensor([list(map(float, each["outputs"])) for each in found]),
        pixels=int((torch.tensor([each["pixels"] for each in found]) - seen.int()).abs().max()),
        kernel=ready["kernel"],
        unpacking=ready["seconds"],
        answers=tuple(each["seconds"] for each in found),
    )


def proof_of(program: str, model: HeldModel, found: Computed) -> Proof:
    """Compare what a browser computed with a model in torch."""
    own = outputs_of_all(model.rounded, model.pictures)
    return Proof(
        browser=Path(program).name,
        computed=found,
        agreement=agreement(own, found.outputs, TOLERANCES["pictures"], compared(model.rounded)),
        probabilities=probabilities_apart(model.rounded, found.outputs, own),
    )


def rounding_of(model: HeldModel) -> Agreement:
    """The model with the page's weights against the model."""
    own, other = [outputs_of_all(each, model.pictures) for each in (model.engine.model, model.rounded)]
    return agreement(own, other, outputs=compared(model.rounded))


def probabilities_apart(model: VisionTransformer, one: Tensor, other: Tensor) -> float:
    """The largest difference of two probabilities, of outputs (n, K) each; 0 of a model without classes."""
    if not model.config.gives_classes:
        return 0.0
    return float((scores(one, model.config.outputs) - scores(other, model.config.outputs)).abs().max())
