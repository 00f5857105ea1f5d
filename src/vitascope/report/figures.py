"""The figures of a finished run: what it learned and where it looks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from matplotlib.figure import Figure

from vitascope.data.preprocess import Preprocess
from vitascope.data.splits import ImageSet
from vitascope.explain import model_plots, plots, rollout
from vitascope.explain.learned import patch_filters, position_similarity
from vitascope.model.classifier import Classifier
from vitascope.model.patches import ConvPatches
from vitascope.model.vit import VisionTransformer
from vitascope.report.measures import score_of
from vitascope.run.run import Run
from vitascope.storage import replacing


def draw_figures(
    run: Run,
    model: Classifier,
    preprocess: Preprocess,
    images: ImageSet,
    probabilities: npt.NDArray[np.float32],
) -> dict[str, Path]:
    """Draw everything that a run shows into its `figures/`; returns the paths by name.

    A ResNet has no attention, positions or patch embedding, and so no figures of them.

    Args:
        run: its metrics give the curves.
        model: the finished model, on any device.
        preprocess: the model's.
        images: what it was measured on, all readable, in the order of `probabilities`.
        probabilities: the model's, (N, K).
    """
    figures: dict[str, Figure] = {"curves": plots.draw_curves(run.metrics)}
    K = len(images.class_names)
    guesses = probabilities.argmax(axis=1)
    confusion = np.bincount(images.labels * K + guesses, minlength=K * K).reshape(K, K)
    score = score_of(images.labels, guesses)
    title = (
        f"{images.name}: {score.right / score.total:.2%} of {len(images)} right "
        f"(commonest class: {score.majority:.2%})"
    )
    figures["confusion"] = plots.draw_confusion(confusion, images.class_names, title)

    shown = choose_shown(images.labels, probabilities)
    pixels = np.stack([preprocess.pixels(images.sources[index]) for index in shown])  # (n, C, H, W)
    pictures = [to_picture(tile) for tile in pixels]
    said: dict[str, Any] = {
        "truths": [images.class_names[images.labels[index]] for index in shown],
        "guesses": [images.class_names[guesses[index]] for index in shown],
        "confidences": [float(probabilities[index].max()) for index in shown],
    }
    figures["predictions"] = plots.draw_predictions(pictures, title=f"{images.name} predictions", **said)
    if isinstance(model, VisionTransformer):
        tiles = preprocess.normalize(torch.from_numpy(pixels)).to(next(model.parameters()).device)
        seen = [
            plots.overlay(plots.enlarged(picture, 96), heat)
            for picture, heat in zip(pictures, rollout(model, tiles).cpu().numpy(), strict=True)
        ]
        figures["attention"] = plots.draw_predictions(seen, title="the same under attention rollout", **said)
        figures |= draw_embedding(model)
    paths = {name: run.figures / f"{name}.png" for name in figures}
    for name, figure in figures.items():
        with replacing(paths[name]) as aside:
            plots.save_figure(figure, aside)
    return paths


def draw_embedding(model: VisionTransformer) -> dict[str, Figure]:
    """What equation 1 has learned, as far as it learns: `positions` and `filters`."""
    figures: dict[str, Figure] = {}
    if model.positions.table(model.config.grid) is not None:
        similarity = position_similarity(model).cpu().numpy()
        figures["positions"] = model_plots.draw_position_similarity(similarity)
    if model.config.in_channels in (1, 3) and isinstance(model.patch_embedding, ConvPatches):
        filters = patch_filters(model)
        components, shares = filters.components.cpu().numpy(), filters.shares.cpu().numpy()
        figures["filters"] = model_plots.draw_patch_filters(components, shares)
    return figures


def choose_shown(
    labels: npt.NDArray[np.int64], probabilities: npt.NDArray[np.float32], count: int = plots.MAX_GRID
) -> npt.NDArray[np.int64]:
    """Which images to show: spread evenly over the set, but up to a quarter are mistakes, surest first.

    On a good model an even choice alone would hide what it gets wrong; the title gives the true share.
    """
    guesses = probabilities.argmax(axis=1)
    wrong = np.flatnonzero(guesses != labels)
    wrong = wrong[np.argsort(-probabilities[wrong].max(axis=1), kind="stable")][: count // 4]
    rest = np.setdiff1d(np.arange(len(labels)), wrong)
    rest = rest[np.unique(np.linspace(0, len(rest) - 1, min(count - len(wrong), len(rest))).astype(int))]
    return np.concatenate([rest, wrong]).astype(np.int64)


def to_picture(pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """(C, H, W) to what matplotlib shows: (H, W) for one channel, (H, W, 3) for three."""
    return pixels[0] if pixels.shape[0] == 1 else np.ascontiguousarray(pixels.transpose(1, 2, 0))
