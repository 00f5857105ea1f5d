"""The figures of a finished run."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from PIL import Image

from tests.analysis.explain.figures import coarse, texts
from tests.data import noise
from tests.models import law, small_model, small_resnet
from vitascope.analysis.explain import plots
from vitascope.analysis.report import figures
from vitascope.analysis.report.figures import choose_shown, draw_masked_patches
from vitascope.data.splits import ImageSet
from vitascope.data.targets import ClassIndices
from vitascope.models.vision_model import VisionModel
from vitascope.models.weights.preprocess import default_preprocess
from vitascope.training.run.predictions import Predictions
from vitascope.training.run.run import Run
from vitascope.training.tasks.task import PatchPictures


def answers() -> tuple[np.ndarray, np.ndarray]:
    """Labels (12,) and probabilities (12, 5)."""
    draw = np.random.default_rng(0)
    return draw.integers(0, 5, 12), draw.dirichlet(np.ones(5), 12).astype(np.float32)


@law
@given(n=st.integers(1, 200), count=st.integers(4, 32), share=st.floats(0, 1), seed=st.integers(0, 10**6))
def test_shown_are_the_surest_mistakes_after_images_spread_evenly_over_the_others(
    n: int, count: int, share: float, seed: int
) -> None:
    draw = np.random.default_rng(seed)
    correct, confidences = draw.random(n) < share, draw.random(n)
    wrong = sorted(np.flatnonzero(~correct), key=lambda index: -confidences[index])[: count // 4]
    others, last = np.split(choose_shown(correct, confidences, count), [min(count, n) - len(wrong)])
    assert last.tolist() == wrong
    rest = np.setdiff1d(np.arange(n), wrong)
    places = np.searchsorted(rest, others)
    np.testing.assert_array_equal(rest[places], others)
    assert len(others) == min(count - len(wrong), len(rest))
    if len(places) > 1:
        assert (places[0], places[-1]) == (0, len(rest) - 1)
        assert np.ptp(np.diff(places)) <= 1


NAMES = ("a", "b", "c", "d", "e")
RESNET = {"stem": "resnet", "resnet_layers": (1, 1), "resnet_width": 32}


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        ({"in_channels": 1, "pool": "mean"}, set()),
        ({"image_size": (16, 32), "positions": "sincos_2d", "pool": "map"}, set()),
        ({"positions": "rotary", "attention": "axial"}, {"positions"}),  # no embedding is added
        ({"positions": "relative", "num_registers": 1, **RESNET}, {"positions", "filters"}),
    ],
)
def test_every_figure_is_drawn_and_not_blank(tmp_path, monkeypatch, options, missing) -> None:
    for chart in ("draw_curves", "draw_confusion"):  # equal for every model; the ResNet's are drawn
        monkeypatch.setattr(figures, chart, lambda *_, **__: Figure((1, 1), facecolor="black"))
    names = {"curves", "confusion", "predictions", "attention", "positions", "filters"}
    assert drawn(tmp_path, small_model(class_names=NAMES, **options)) == names - missing


def test_resnet_has_the_figures_that_need_no_attention(tmp_path: Path) -> None:
    model = small_resnet(class_names=NAMES, in_channels=1)
    assert drawn(tmp_path, model) == {"curves", "confusion", "predictions"}


def test_predictions_and_attention_are_drawn_on_the_photographs(tmp_path: Path, monkeypatch) -> None:
    grids: list[list[np.ndarray]] = []
    monkeypatch.setattr(plots, "draw_grid", lambda pictures, *_: grids.append(pictures) or Figure())
    drawn(tmp_path, small_model(class_names=NAMES), size=(120, 200), blank=True)
    assert [grid[0].shape for grid in grids] == [(120, 200, 3)] * 2
    labels, probabilities = answers()
    first = choose_shown(probabilities.argmax(axis=1) == labels, probabilities.max(axis=1))[0]
    photo = noise(120, 200, seed=first)
    np.testing.assert_array_equal(grids[0][0][:, 40:160], photo[:, 40:160])
    assert grids[0][0][:, :39].max() < 100  # dimmed


def drawn(
    folder: Path, model: VisionModel, *, size: tuple[int, int] = (20, 20), blank: bool = False
) -> set[str]:
    """Draw the figures of a run, and check that none is blank, unless that is expected."""
    run = Run(folder)
    record = {"kind": "epoch", "step": 2, "epoch": 1, "train_loss": 1.0, "val_loss": 1.2}
    record |= {"train_accuracy": 0.5, "val_accuracy": 0.4}
    run.config_file.write_text("task: classify\ndata: digits\nseed: 0\nkeep: best\n")
    model.preprocess = default_preprocess(model.config)
    run.metrics_file.write_text(json.dumps(record) + "\n")
    labels, probabilities = answers()
    sources = [noise(*size, seed=number) for number in range(12)]
    images = ImageSet("test", sources, ClassIndices(labels, NAMES))

    with coarse():
        made = figures.draw_figures(
            run, model, images, Predictions("test", np.arange(12), images.truth, probabilities)
        )

    for name, path in made.items():
        assert path == run.figures / f"{name}.png"
        pixels = np.asarray(Image.open(path).convert("RGB"))
        assert blank or (pixels != 255).any(axis=-1).mean() > 0.01, name
    return set(made)


def test_masked_patches_are_covered_and_framed_in_the_input_row(tmp_path: Path, monkeypatch) -> None:
    pixels = np.stack([noise(8, 12, seed=seed).transpose(2, 0, 1) for seed in (1, 2)])
    rows = dict.fromkeys(("image", "given", "predicted"), pixels)
    hidden, replaced, kept = np.zeros((3, 2, 2, 3), dtype=bool)
    hidden[0, 1, 2] = replaced[0, 0, 1] = kept[1, 0, 0] = kept[1, 1, 0] = True
    saved: list[Figure] = []
    monkeypatch.setattr(plots, "save_figure", lambda figure, path: saved.append(figure) or path.touch())
    draw_masked_patches(Run(tmp_path), PatchPictures(rows, hidden, replaced, kept))
    (figure,) = saved
    assert all(name in texts(figure) for name in rows)
    panels = figure.axes
    for panel, picture in zip(panels, [picture for row in rows.values() for picture in row], strict=True):
        np.testing.assert_array_equal(panel.images[0].get_array(), picture.transpose(1, 2, 0))
    assert [len(panel.images) for panel in panels] == [1, 1, 2, 2, 1, 1]
    assert all(name in texts(figure) for name in ("[mask]", "another patch", "unchanged, but predicted"))
    without = PatchPictures(rows, hidden, *np.zeros((2, 2, 2, 3), dtype=bool))
    draw_masked_patches(Run(tmp_path), without)
    assert "[mask]" in texts(saved[1])
    assert "another patch" not in texts(saved[1])  # the figure has none
    cover = panels[2].images[1]
    np.testing.assert_array_equal(cover.get_array()[..., 3], hidden[0])
    assert list(cover.get_extent()) == list(panels[2].images[0].get_extent())
    framed = [
        [(*box.get_xy(), box.get_width(), box.get_height()) for box in panel.patches] for panel in panels
    ]
    assert framed == [[], [], [(3.5, -0.5, 4, 4)], [(-0.5, -0.5, 4, 4), (-0.5, 3.5, 4, 4)], [], []]
    assert panels[2].patches[0].get_edgecolor() != panels[3].patches[0].get_edgecolor()
