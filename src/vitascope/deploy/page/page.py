"""`page`: a model as one HTML file that computes in the browser, proved there before it gets its name.

A page may have two models. What concerns one of them is a function of a `HeldModel`.
"""

import dataclasses
import json
import logging
import os
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save

from vitascope.analysis.explain.methods import METHODS
from vitascope.arguments import checked
from vitascope.deploy.export.export import default_path, evenly_spaced, images_to_compare, own_tests
from vitascope.deploy.export.formats import check_path
from vitascope.deploy.page.browser import MissingBrowserError
from vitascope.deploy.page.document import EXPLORER, LEARNING, Site, document, programs
from vitascope.deploy.page.packing import (
    BYTES,
    INSTEAD,
    Rounding,
    body_of,
    check_held,
    packed,
    position_weights,
    program_options,
    rounded,
)
from vitascope.deploy.page.proof import HeldModel, Proof, compared_picture, model_outputs, naming_model, prove
from vitascope.deploy.page.samples import Samples, choose_samples
from vitascope.deploy.server.attention_pack import NO_HEAD, token_names, what_fits
from vitascope.errors import UserError
from vitascope.models.config import ViTConfig
from vitascope.models.decoding import ImageSource
from vitascope.models.engines.engine import TorchEngine
from vitascope.models.engines.features import OWN
from vitascope.models.engines.runtimes import name_of, sets_of
from vitascope.models.heads import output_layers
from vitascope.models.sizes import architecture_record
from vitascope.models.vision_model import VisionModel
from vitascope.models.vit import VisionTransformer
from vitascope.models.weights.agreement import Agreement, agreement
from vitascope.models.weights.families.own import MODEL_TYPE
from vitascope.models.weights.preprocess import preprocess_of
from vitascope.storage import check_room, make_folder, replacing
from vitascope.training.linear.head import headed, with_head
from vitascope.training.run.run import load_with_run

log = logging.getLogger(__name__)
MOST_MB = 256
"""Of a page; a browser holds its text, and the weights as float32 beside it."""
COMPARED = 8
"""Pictures that a page is proved on."""
CARRIED = 256 * 2**20
"""Bytes of attention that the page keeps per picture."""
FIRST_METHOD = "occlusion"
"""The class map that a page opens with: the most faithful one of those that a browser computes, in
benchmarks/results/2026-11-28-heatmaps.md."""


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
    learn: bool = False,
) -> PageResult:
    """Write a model as one HTML file: the attention explorer, with the model computing in the browser.

    With `learn` it is a page of the model's body instead, in which one labels pictures and gets a classifier.

    The file needs no server and no network. It gets its name only if a headless browser, opening it from the
    disk, computes the outputs of torch, of both models if there are two. Without Playwright (the extra
    `page`) or a browser, it is written unproved, with a warning.

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
        learn: the page labels pictures. Its `samples`, none by default, are offered by the pages that it
            exports.

    Raises:
        CheckpointError: as `from_pretrained`.
        UserError: a model that a page cannot hold, or that is too large for one; a file that exists; a
            picture that cannot be read; a page that fails in the browser; outputs that differ.
    """
    if learn and beside is not None:
        raise UserError("a page that learns has one model: omit beside, or learn")
    path = default_path(model, "-learn.html" if learn else ".html") if path is None else Path(path)
    check_path(path, ".html")
    refs = [model] if beside is None else [model, beside]
    labels = [""] if beside is None else [reference(model) or "model", reference(beside) or "beside"]
    loaded = [load_with_run(ref) for ref in refs]
    vits = []
    for (vit, _), label in zip(loaded, labels, strict=True):
        with naming_model(label):
            vits.append(body_of(check_held(vit)) if learn else check_held(vit))
    check_page_size(vits, weights)
    tests = cache(lambda: own_tests(loaded[0][1]))
    sources, compared_on = images_to_compare(images, tests)
    models = [
        hold_model(vit, ref, label, weights, evenly_spaced(sources, COMPARED))
        for vit, ref, label in zip(vits, refs, labels, strict=True)
    ]
    offered = choose_samples([] if learn and samples is None else samples, models[0].engine, tests)
    site = LEARNING if learn else EXPLORER
    positions = position_weights(models[0].rounded) if learn else {}
    contents = [save(packed(each.rounded, weights) | positions) for each in models]
    make_folder(path.parent)
    check_room(path, sum(map(len, contents)) * 4 // 3)
    with replacing(path) as aside:
        with open(aside, "w", encoding="utf-8") as file:
            names = [each.engine.name or each.engine.architecture for each in models]
            title = f"{' and '.join(names)} – vitascope"  # until the explorer has started
            data = page_data(models, weights, offered, site)
            if learn:
                data |= {"learning": learning_data(models[0], weights, title)}
            file.writelines(document(title, data, contents, site))
        proofs: Sequence[Proof | None] = [None] * len(models)
        try:
            if not unproved:
                proofs = prove(None if browser is None else os.fspath(browser), aside, models, path.name)
        except MissingBrowserError as error:
            log.warning("%s is written, but not proved in a browser: %s, and write it again", path, error)
    first, *others = [
        ModelResult(
            rounding=agreement(
                model_outputs(each.engine.model, each.pictures), each.outputs, outputs=each.compared
            ),
            proof=proof,
        )
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


def hold_model(
    model: VisionTransformer,
    ref: VisionModel | str | os.PathLike[str],
    label: str,
    weights: Rounding,
    sources: Sequence[ImageSource],
) -> HeldModel:
    """Round a model, and compute its pixels and outputs of the pictures to compare on."""
    with naming_model(label):
        own, held = rounded(model, "fp32"), rounded(model, weights)
    engine = TorchEngine(own, device="cpu")
    engine.name = name_of(ref) if isinstance(ref, str | os.PathLike) else ""
    pictures = [compared_picture(own, source) for source in sources]
    return HeldModel(label, engine, held, pictures, model_outputs(held, pictures))


def check_page_size(models: Sequence[VisionTransformer], weights: Rounding) -> None:
    """Reject models whose page a browser could not hold."""
    parameters = sum(model.config.num_parameters for model in models)
    sizes = {other: parameters * bytes_each * 4 / 3 / 1e6 for other, bytes_each in BYTES.items()}  # of base64
    if sizes[weights] > MOST_MB:
        smaller = [other for other, size in sizes.items() if size <= MOST_MB]
        way_out = f"use weights {smaller[0]}, or `vitascope serve`" if smaller else INSTEAD
        counts = " and ".join(f"{model.config.num_parameters:,}" for model in models)
        raise UserError(
            f"a page of {counts} parameters in {weights} has {sizes[weights]:,.0f} MB; the limit is "
            f"{MOST_MB} MB: {way_out}"
        )


def page_data(models: Sequence[HeldModel], weights: Rounding, samples: Samples, site: Site) -> dict[str, Any]:
    """What `web/local.js` reads."""
    return {
        "models": [model_data(model.engine, weights) for model in models],
        "programs": programs(),
        "samples": samples.to_json(),
        "texts": json.loads(site.texts()["chinese.json"]),
    }


def learning_data(model: HeldModel, weights: Rounding, title: str) -> dict[str, Any]:
    """What `web/learn` reads: the name of its storage, by what the features depend on; the page and the model
    that it exports, but for the head."""
    body = model.rounded
    config = headed(body.config, OWN, ("", "other"), "exclusive")
    weight = np.zeros((2, body.config.feature_dim))
    answering = TorchEngine(with_head(body, config, weight, weight[:, 0]), device="cpu")
    answering.name = f"{model.engine.name} with a learned head".strip()
    begin, end = EXPLORER.frame(title)
    layers = output_layers(answering.model.head)
    record = {"model_type": MODEL_TYPE, **architecture_record(config)}
    return {
        "digest": f"{model.engine.body_digest} {weights}",
        "explorer": {
            **{"begin": begin, "end": end, "program": EXPLORER.programs()[1]},
            "texts": json.loads(EXPLORER.texts()["chinese.json"]),
        },
        "answering": model_data(answering, weights),
        "heads": [name for name, layer in answering.model.named_modules() if layer in layers],
        "model": {
            "shapes": {name: list(value.shape) for name, value in body.state_dict().items()},
            **{"config": record, "preprocessor": preprocess_of(body).to_dict()},
        },
    }


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
        about["methods"] = {name: method.title for name, method in METHODS.items() if method.in_browser}
        about["explained"] = {"method": FIRST_METHOD, "classes": []}
        about["thresholds"] = list(engine.thresholds) or None
        if engine.model.trust is not None:
            about["trust"] = sets_of(engine.model.trust)
    else:
        about["missing"] = NO_HEAD
    described = {"name": engine.name, "architecture": engine.architecture, "digest": engine.digest}
    return {"options": program_options(config), "about": about, "described": described}
