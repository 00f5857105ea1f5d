"""The figures of a finished run."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from PIL import Image

from tests.data import noise
from tests.explain.figures import coarse, texts
from tests.model import law, small_model, small_resnet
from vitascope.data.splits import ImageSet
from vitascope.data.targets import ClassIndices
from vitascope.explain import plots
from vitascope.model.vision_model import VisionModel
from vitascope.report import figures
from vitascope.report.figures import choose_shown, draw_masked_patches
from vitascope.run.predictions import Predictions
from vitascope.run.run import Run
from vitascope.weights.preprocess import default_preprocess


def answers(n: int, K: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Labels (n,) and probabilities (n, K)."""
    draw = np.random.default_rng(seed)
    return draw.integers(0, K, n), draw.dirichlet(np.ones(K), n).astype(np.float32)


def shown_of(labels: np.ndarray, probabilities: np.ndarray, count: int = 32) -> np.ndarray:
    return choose_shown(probabilities.argmax(axis=1) == labels, probabilities.max(axis=1), count)


@law
@given(n=st.integers(1, 200), K=st.integers(2, 5), count=st.integers(4, 32), seed=st.integers(0, 10**6))
def test_shown_images_are_from_the_set_without_duplicates(n: int, K: int, count: int, seed: int) -> None:
    labels, probabilities = answers(n, K, seed)
    shown = shown_of(labels, probabilities, count)
    assert len(set(shown.tolist())) == len(shown)
    assert set(shown.tolist()) <= set(range(n))
    assert 0 < len(shown) <= min(count, n)


@law
@given(n=st.integers(32, 200), K=st.integers(2, 5), seed=st.integers(0, 10**6))
def test_most_confident_mistakes_are_shown(n: int, K: int, seed: int) -> None:
    labels, probabilities = answers(n, K, seed)
    wrong = np.flatnonzero(probabilities.argmax(axis=1) != labels)
    surest = sorted(wrong, key=lambda index: -probabilities[index].max())[:8]
    assert set(surest) <= set(shown_of(labels, probabilities, 32).tolist())


@law
@given(n=st.integers(64, 300), mistakes=st.integers(0, 8), seed=st.integers(0, 10**6))
def test_other_images_are_spread_evenly_over_the_set(n: int, mistakes: int, seed: int) -> None:
    labels = np.zeros(n, dtype=np.int64)
    probabilities = np.tile(np.float32([0.9, 0.1]), (n, 1))
    wrong = np.random.default_rng(seed).choice(n, mistakes, replace=False)
    probabilities[wrong] = [0.2, 0.8]
    shown = shown_of(labels, probabilities, 32)
    assert len(shown) == 32
    rest = np.array([index for index in shown if index not in wrong])
    assert len(rest) == 32 - mistakes
    assert np.diff(rest).max() <= n / (len(rest) - 1) + mistakes + 1
    assert rest[0] <= mistakes
    assert rest[-1] >= n - 1 - mistakes


def test_few_images_are_all_shown() -> None:
    labels, probabilities = answers(5, 3, 0)
    assert sorted(shown_of(labels, probabilities).tolist()) == [0, 1, 2, 3, 4]


NAMES = ("a", "b", "c", "d", "e")
RESNET = {"stem": "resnet", "resnet_layers": (1, 1), "resnet_width": 32}


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        ({"in_channels": 1, "pool": "mean"}, set()),
        ({"position_prefix": False, "num_registers": 2, "stem": "overlap"}, set()),
        ({"positions": "learned_2d", "distillation_token": True}, set()),
        ({"image_size": (16, 32), "positions": "sincos_2d", "pool": "map"}, set()),
        ({"positions": "rotary", "attention": "axial"}, {"positions"}),  # no embedding is added
        ({"positions": "relative", "num_registers": 1, **RESNET}, {"positions", "filters"}),
    ],
)
def test_every_figure_is_drawn_and_not_blank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], missing: set[str]
) -> None:
    for chart in ("draw_curves", "draw_confusion"):  # equal for every model; the ResNet's are drawn
        monkeypatch.setattr(figures, chart, lambda *_, **__: Figure((1, 1), facecolor="black"))
    names = {"curves", "confusion", "predictions", "attention", "positions", "filters"}
    assert drawn(tmp_path, small_model(class_names=NAMES, **options)) == names - missing


def test_resnet_has_the_figures_that_need_no_attention(tmp_path: Path) -> None:
    model = small_resnet(class_names=NAMES, in_channels=1)
    assert drawn(tmp_path, model) == {"curves", "confusion", "predictions"}


def test_predictions_and_attention_are_drawn_on_the_photographs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grids: list[list[np.ndarray]] = []
    monkeypatch.setattr(plots, "draw_grid", lambda pictures, *_: grids.append(pictures) or Figure())
    drawn(tmp_path, small_model(class_names=NAMES), size=(120, 200), blank=True)
    assert [grid[0].shape for grid in grids] == [(120, 200, 3)] * 2
    photo = noise(120, 200, seed=shown_of(*answers(12, 5, 0))[0])
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
    labels, probabilities = answers(12, 5, 0)
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


def test_masked_patches_are_covered_and_framed_in_the_input_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = np.stack([noise(8, 12, seed=seed).transpose(2, 0, 1) for seed in (1, 2)])
    rows = dict.fromkeys(("image", "given", "predicted"), pixels)
    hidden, replaced, kept = np.zeros((3, 2, 2, 3), dtype=bool)
    hidden[0, 1, 2] = replaced[0, 0, 1] = kept[1, 0, 0] = kept[1, 1, 0] = True
    saved: list[Figure] = []
    monkeypatch.setattr(plots, "save_figure", lambda figure, path: saved.append(figure) or path.touch())
    draw_masked_patches(Run(tmp_path), rows, hidden, replaced, kept)
    (figure,) = saved
    assert all(name in texts(figure) for name in rows)
    panels = figure.axes
    for panel, picture in zip(panels, [picture for row in rows.values() for picture in row], strict=True):
        np.testing.assert_array_equal(panel.images[0].get_array(), picture.transpose(1, 2, 0))
    assert [len(panel.images) for panel in panels] == [1, 1, 2, 2, 1, 1]
    assert all(name in texts(figure) for name in ("[mask]", "another patch", "unchanged, but predicted"))
    draw_masked_patches(Run(tmp_path), rows, hidden, *np.zeros((2, 2, 2, 3), dtype=bool))
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
