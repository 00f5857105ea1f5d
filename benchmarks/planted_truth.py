"""Heatmaps held against planted truth: a mark that alone decides the class of a picture.

    python benchmarks/planted_truth.py MODEL DATA --images 50

A small model of MODEL's first blocks learns to name marks in pictures of DATA. The table has the share of the
weight of each method's maps on the mark.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from torch import Tensor

from vitascope.analysis.explain.faithfulness.compare import HeatmapFunction, check_cells
from vitascope.analysis.explain.heatmaps import cell_of_pixels, grid_of
from vitascope.analysis.explain.inputs import Images, as_images, chosen_pictures
from vitascope.analysis.explain.methods import methods_for
from vitascope.analysis.explain.targets import ClassScore
from vitascope.arguments import Range, checked
from vitascope.data.datasets import open_pictures
from vitascope.errors import UserError
from vitascope.formatting import aligned
from vitascope.intervals import Interval
from vitascope.models.config import ViTConfig
from vitascope.models.ensemble import Ensemble
from vitascope.models.heads import predicted
from vitascope.models.vision_model import VisionModel, build, evaluation_mode
from vitascope.models.weights.loading import from_pretrained

MARKS = ("colour", "texture", "word")
DEPTH = 4
"""Blocks of the model that learns the marks: the first ones of the model that is compared."""
STEPS, BATCH, RATE = 400, 32, 5e-4
"""Of its training, by AdamW."""
LEARNED, OVER = 0.995, 20
"""The training ends early at this accuracy over so many batches."""
DECIDES = 0.9
"""The model decides by the marks if planting them adds at least this to the share that it names."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MarkScore:
    """How well one method finds the marks."""

    method: str
    marks: Mapping[str, Interval]
    """By mark: the share of the map's weight on it, the mean over the pictures."""
    weight: Interval
    """The same over all marks."""
    pointing: float
    """Share of the maps whose hottest cell is on the mark (Zhang et al. 2016, the pointing game)."""
    seconds: float
    """Median time per heatmap."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlantedTruth:
    """Every method on pictures with a mark that alone decides their class."""

    scores: tuple[MarkScore, ...]
    """The method with the most weight on the marks first."""
    area: float
    """Share of the cells that a mark covers: the weight of a map that knows nothing."""
    pictures: int
    """Pictures that the model has not seen, each with every mark in turn."""
    with_mark: float
    """Share of the marked pictures whose mark the model names."""
    without: float
    """Share of the same pictures without the mark where it names the mark all the same."""

    @property
    def decides(self) -> bool:
        """Whether the mark decides the model's answers; otherwise, the scores mean little."""
        return self.with_mark - self.without >= DECIDES

    @property
    def failed(self) -> tuple[str, ...]:
        """Methods whose weight on the marks is not above their area by more than its interval."""
        weights = {score.method: score.weight for score in self.scores}
        return tuple(name for name, of in weights.items() if of.mean - (of.half_width or 0) <= self.area)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return dataclasses.asdict(self) | {"decides": self.decides, "failed": list(self.failed)}

    def text(self) -> str:
        """The table for a terminal, with a legend."""
        head = ("method", "weight on mark", *MARKS, "pointing", "s/image")
        rows = []
        for score in self.scores:
            parts = (score.weight, *score.marks.values())
            weights = (f"{part.mean:.2f}±{part.half_width or 0:.2f}" for part in parts)
            rows.append((score.method, *weights, f"{score.pointing:.0%}", f"{score.seconds:.2g}"))
        doubt = "" if self.decides else " It does not decide by the mark: these scores mean little."
        legend = (
            f"{self.pictures} pictures, each with marks of {self.area:.1%} of the cells. The model that "
            f"learned the marks names {self.with_mark:.0%} of them, and {self.without:.0%} without.{doubt}",
            f"No more weight on the mark than on any place: {', '.join(self.failed) or 'no method'}.",
        )
        return "\n".join([*aligned([head, *rows], left=range(len(head))), "", *legend])


def _planted(
    images: Tensor, marks: npt.NDArray[np.int64], grid: tuple[int, int], rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Images (B, C, H, W), each with a mark at a random place, 0 for none, and the marks' cells, bool
    (B, grid_h, grid_w); a mark covers whole cells."""
    images, cells = images.clone(), torch.zeros(len(images), *grid, dtype=torch.bool)
    side = max(1, min(grid) // 4)
    rows, columns = cell_of_pixels(grid, (images.shape[2], images.shape[3]))
    for index in marks.nonzero()[0]:
        row, column = (int(rng.integers(count - side + 1)) for count in grid)
        cells[index, row : row + side, column : column + side] = True
        down = (rows >= row) & (rows < row + side)
        across = (columns >= column) & (columns < column + side)
        mark = _mark(MARKS[marks[index] - 1], images.shape[1], int(down.sum()), int(across.sum()))
        images[index][:, down[:, None] & across] = mark.flatten(1).to(images)
    return images, cells


def _mark(name: str, channels: int, height: int, width: int) -> Tensor:
    """A mark in normalized values, (C, h, w): a patch of one colour, stripes, or a word in black on white."""
    if name == "colour":
        return torch.tensor([2.0, -2.0]).repeat(channels)[:channels, None, None].expand(-1, height, width)
    if name == "texture":
        rows = torch.arange(height)[:, None] + torch.arange(width)
        return (2.0 - 4.0 * (rows * 8 // max(height, 8) % 2)).expand(channels, -1, -1)
    paper = Image.new("L", (width, height), 255)
    middle = width / 2, height / 2
    ImageDraw.Draw(paper).text(middle, "WIT", fill=0, anchor="mm", font_size=max(4, width // 2))
    return (torch.from_numpy(np.array(paper)).float() / 63.75 - 2).expand(channels, -1, -1)


@checked
def planted_truth(
    model: VisionModel,
    images: Images,
    methods: Mapping[str, HeatmapFunction] | None = None,
    *,
    seed: Annotated[int, Range(ge=0)] = 0,
    progress: Callable[[int, int], None] | None = None,
) -> PlantedTruth:
    """Measure how much of their weight heatmaps put on a mark that alone decides the class.

    The first `DEPTH` blocks of `model`, with a new head, learn to name a colour patch, a texture, a word, or
    no mark. Every picture gets every mark, at random places, so that nothing else tells the class. Half of
    the pictures are kept for the measurement. Marks are planted after the crop, so that none lies outside it.
    After Zhou et al. 2022 ("Do feature attribution methods correctly attribute features?").

    Args:
        model: any Vision Transformer or ResNet; it is not changed.
        images: pictures, or normalized floats (B, C, H, W); at least two.
        methods: as of `compare`.
        seed: of the places, of the order and of the division of the pictures.
        progress: called with the number of steps and heatmaps done, and of all.

    Raises:
        UserError: fewer than two images; a grid of one cell; a heatmap that is not finite.
    """
    images = as_images(model, images).float()
    if len(images) < 2:
        raise UserError(f"planted marks need 2 pictures, to learn from and to measure on, not {len(images)}")
    student, rng = _student(model).to(images.device), np.random.default_rng(seed)
    grid = grid_of(student, images)
    check_cells(images, grid)
    learned, measured = (images[part] for part in np.array_split(rng.permutation(len(images)), 2))
    methods = methods_for(student) if methods is None else methods
    marks = np.tile(1 + np.arange(len(MARKS)), len(measured))
    total = STEPS + len(methods) * len(marks)
    advance = progress or (lambda done, total: None)
    with evaluation_mode(student):
        _learn(student, learned, grid, rng, lambda step: advance(step, total))
        marked, cells = _planted(measured.repeat_interleave(len(MARKS), dim=0), marks, grid, rng)
        scores = []
        for number, (name, method) in enumerate(methods.items()):
            rows = []
            for image, mark, where in zip(marked, marks.tolist(), cells, strict=True):
                start = time.perf_counter()
                heat = method(student, image[None], ClassScore(torch.tensor([mark])))[0].detach().cpu()
                rows.append((*_on_mark(name, heat, where), time.perf_counter() - start))
                advance(STEPS + number * len(marks) + len(rows), total)
            weights, hits, seconds = np.array(rows).T
            by_mark = weights.reshape(-1, len(MARKS))  # (n, marks)
            scores.append(
                MarkScore(
                    method=name,
                    marks={mark: Interval.of(column) for mark, column in zip(MARKS, by_mark.T, strict=True)},
                    weight=Interval.of(by_mark.mean(axis=1)),
                    pointing=float(hits.mean()),
                    seconds=float(np.median(seconds)),
                )
            )
        return PlantedTruth(
            scores=tuple(sorted(scores, key=lambda score: -score.weight.mean)),
            area=float(cells.float().mean()),
            pictures=len(measured),
            with_mark=_accuracy(student, marked, torch.from_numpy(marks)),
            without=_accuracy(
                student, measured.repeat_interleave(len(MARKS), dim=0), torch.from_numpy(marks)
            ),
        )


@torch.no_grad()
def _accuracy(student: VisionModel, images: Tensor, labels: Tensor) -> float:
    guesses = torch.cat([predicted(student(part)) for part in images.split(BATCH)])
    return float((guesses.cpu() == labels).float().mean())


def _student(model: VisionModel) -> VisionModel:
    """The first blocks of a model, in float32, with a new head for the marks."""
    body = model.members[0] if isinstance(model, Ensemble) else model
    classes = {"num_classes": 1 + len(MARKS), "class_names": (), "outputs": "exclusive", "thresholds": ()}
    config = body.config.replace(**classes)
    if isinstance(config, ViTConfig):
        whole = {"head": "linear", "projection": None, "token_merging": 0}  # every method suits such a model
        config = config.replace(depth=min(config.depth, DEPTH), **whole)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # of the head
        student = build(config)
    names = {name for name in student.state_dict() if not name.startswith("head.")}
    student.load_state_dict({k: v for k, v in body.state_dict().items() if k in names}, strict=False)
    return student


def _learn(
    student: VisionModel,
    images: Tensor,
    grid: tuple[int, int],
    rng: np.random.Generator,
    advance: Callable[[int], None],
) -> None:
    """Train a model to name the marks in images (B, C, H, W), until it does."""
    optimizer = torch.optim.AdamW(student.parameters(), lr=RATE)
    right = deque[float](maxlen=OVER)
    for step in range(STEPS):
        marks = np.maximum(0, rng.integers(1 - len(MARKS), 1 + len(MARKS), BATCH))  # half have none
        marked, _ = _planted(images[rng.integers(len(images), size=BATCH)], marks, grid, rng)
        labels = torch.from_numpy(marks).to(images.device)
        logits = student(marked)
        optimizer.zero_grad()
        F.cross_entropy(logits, labels).backward()
        optimizer.step()
        right.append(float((predicted(logits) == labels).float().mean()))
        advance(step + 1)
        if len(right) == OVER and np.mean(right) >= LEARNED:
            break


def _on_mark(name: str, heat: Tensor, where: Tensor) -> tuple[float, float]:
    """The shares of a map's weight, and of its hottest cells, on the mark, (grid_h, grid_w) both; 0 without
    any."""
    if heat.shape != where.shape or not heat.isfinite().all():
        raise UserError(
            f"{name} returns a heatmap {tuple(heat.shape)}; expected are finite values {tuple(where.shape)}"
        )
    heat = heat.double().clamp_min(0)
    hottest = ((heat == heat.max()) & (heat > 0)).double()
    weight, hit = (float(part[where].sum() / part.sum().clamp_min(1e-30)) for part in (heat, hottest))
    return weight, hit


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--images", type=int, default=50)
    options = parser.parse_args()
    pictures = chosen_pictures(open_pictures(options.data), options.images)
    print(planted_truth(from_pretrained(options.model), pictures).text())


if __name__ == "__main__":
    main()
