"""What `vitascope explain` does: each figure from a model and a picture, and the comparison."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

from vitascope import explain
from vitascope.data.datasets import open_pictures
from vitascope.data.decoding import ImageError, ImageSource
from vitascope.data.preprocess import Pixels, Preprocess
from vitascope.errors import UserError, printable
from vitascope.explain import model_plots, plots
from vitascope.explain.attention import attending
from vitascope.explain.forward import pooled_and_logits
from vitascope.explain.learned import uniform_distance
from vitascope.explain.methods import METHODS, methods_for
from vitascope.explain.targets import ClassDifference, FeatureCosine, TargetLike, class_index
from vitascope.model.classifier import Classifier
from vitascope.model.hardware import resolve_device
from vitascope.report.figures import to_picture
from vitascope.report.wording import counted
from vitascope.run.run import Run
from vitascope.weights.loading import from_pretrained
from vitascope.weights.preprocess import preprocess_of


@dataclasses.dataclass(frozen=True)
class Picture:
    """One picture, as the model sees it."""

    name: str
    pixels: Pixels
    images: Tensor
    """Normalized floats (1, C, H, W)."""
    truth: str | None = None
    """The name of its class, where that is known."""

    @property
    def shown(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """(H, W) or (H, W, 3)."""
        return to_picture(self.pixels)


@dataclasses.dataclass(frozen=True)
class Subject:
    """The model that is explained."""

    ref: str
    model: Classifier
    preprocess: Preprocess
    device: torch.device

    @classmethod
    def load(cls, ref: str, image_size: int | None, device: str) -> Subject:
        """The model of a MODEL argument; with `image_size`, it sees its pictures at that side."""
        where = resolve_device(device)
        model = from_pretrained(ref, device=device)
        preprocess = preprocess_of(model)
        if image_size is not None:
            if image_size < 1:
                raise UserError(f"--image-size must be at least 1, not {image_size}")
            preprocess = preprocess.at_size((image_size, image_size))
        return cls(ref, model, preprocess, where)

    def picture(self, source: ImageSource) -> Picture:
        """A picture, resized and normalized."""
        if isinstance(source, str | Path) and Path(source).is_dir():
            raise UserError(
                f"{source} is a folder: name a picture in it, or add --compare or --method distance"
            )
        pixels = self.preprocess.pixels(source)
        images = self.preprocess.normalize(torch.from_numpy(pixels)[None]).to(self.device)
        return Picture(Path(str(source)).name, pixels, images)

    def some_pictures(self, data: str | None, count: int, seed: int) -> Tensor:
        """Pictures of a DATA argument, by default of the run's test images, drawn by seed: (B, C, H, W)."""
        sources = self._sources(data)
        drawn = np.sort(np.random.default_rng(seed).permutation(len(sources))[:count])
        return torch.cat([self.picture(sources[index]).images for index in drawn])

    def _sources(self, data: str | None) -> Sequence[ImageSource]:
        if data is not None:
            return open_pictures(data)
        run = Run(Path(self.ref))
        if not run.exists:
            raise UserError(f"{self.ref} is not a run folder, so say on which pictures: give DATA")
        return run.test_images().sources

    def test_pictures(self) -> tuple[list[Picture], str]:
        """Up to 32 of the run's test images, drawn at random, and what they are called: "32 test images".

        Images that cannot be read are named on standard error.
        """
        run = Run(Path(self.ref))
        if not run.exists:
            raise UserError(f"{self.ref} is not a run folder, so has no test images: give a PICTURE")
        tests = run.test_images()
        order = np.random.default_rng(0).permutation(len(tests))
        pictures: list[Picture] = []
        for index in order:
            try:
                picture = self.picture(tests.sources[index])
            except ImageError as error:
                print(f"left out: {error}", file=sys.stderr)
                continue
            truth = tests.class_names[tests.labels[index]] if tests.class_names else None
            pictures.append(dataclasses.replace(picture, truth=truth))
            if len(pictures) == plots.MAX_GRID:
                break
        if not pictures:
            raise UserError(f"none of the test images of {self.ref} can be read")
        return pictures, counted(len(pictures), f"{tests.name} image")

    def class_name(self, index: int) -> str:
        """A class's name, or its number where it has none."""
        names = self.model.config.class_names
        return printable(names[index], 80) if names else str(index)


def as_asked(subject: Subject, target: str | None, versus: str | None, like: Path | None) -> TargetLike:
    """The target of --target, --versus and --like."""
    config = subject.model.config
    if like is not None:
        return FeatureCosine(pooled_and_logits(subject.model, subject.picture(like).images)[0])
    if target is None:
        return None
    if not config.gives_classes:
        raise UserError(f"{subject.ref} has no head, so no classes: explain a likeness, --like PICTURE")
    if versus is None:
        return class_index(target, config)
    both = (torch.tensor([class_index(name, config)]) for name in (target, versus))
    return ClassDifference(*both)


def draw_one(
    subject: Subject, picture: Picture, method: str, target: TargetLike, settings: Mapping[str, Any]
) -> tuple[Figure, str]:
    """A picture beside itself under one method's heatmap, and what to say of it."""
    heat = heatmap(subject, picture, method, target, settings)
    title = _title(subject, picture, _named(subject, method, target, settings))
    return plots.draw_explanation(picture.shown, heat, title), title


def heatmap(
    subject: Subject, picture: Picture, method: str, target: TargetLike, settings: Mapping[str, Any]
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """One method's heatmap of a picture, (gh, gw)."""
    model, chosen = subject.model, METHODS[method]
    if not chosen.has_target:
        return chosen.compute(model, picture.images, **settings)[0].cpu().numpy()
    if target is None and not model.config.gives_classes:
        raise UserError(
            f"{subject.ref} has no head, so no class for {method} to explain: explain a likeness, --like "
            "PICTURE, or show attention, --method rollout"
        )
    return chosen.compute(model, picture.images, target, **settings)[0].cpu().numpy()


def draw_tests(
    subject: Subject, method: str, target: TargetLike, settings: Mapping[str, Any]
) -> tuple[Figure, str]:
    """Test images of the run, each beside itself under one method's heatmap, and what to say of them."""
    tests, called = subject.test_pictures()
    shown = [
        plots.beside_itself(picture.shown, heatmap(subject, picture, method, target, settings))
        for picture in tqdm(tests, unit=" images", leave=False, disable=not sys.stderr.isatty())
    ]
    title = f"{_named(subject, method, target, settings)} over {called}"
    return plots.draw_grid(shown, [_caption(subject, picture) for picture in tests], title), title


def draw_features_of_tests(subject: Subject, layer: int | None) -> tuple[Figure, str]:
    """Test images of the run, and their patches in the colours of their features."""
    tests, called = subject.test_pictures()
    images = torch.cat([picture.images for picture in tests])
    colours = explain.feature_colours(subject.model, images, -1 if layer is None else layer)
    pictures = [picture.shown for picture in tests]
    title = f"the first three principal components of the patches' features in {called}"
    return model_plots.draw_feature_colours(pictures, colours.cpu().numpy()), title


def draw_all(subject: Subject, picture: Picture, target: TargetLike) -> tuple[Figure, str]:
    """The picture under every method's heatmap."""
    heatmaps = {
        method.title: method(subject.model, picture.images, target)[0].cpu().numpy()
        for method in methods_for(subject.model, target).values()
    }
    title = _title(subject, picture, f"every method{_about(subject, target)}")
    return plots.draw_explanations(picture.shown, heatmaps, title), title


def draw_patch(
    subject: Subject, picture: Picture, patch: tuple[int, int] | None, layer: int | None, head: int | None
) -> tuple[Figure, str]:
    """What one patch attends to; by default the one in the middle, in the last layer."""
    model = attending(subject.model)
    gh, gw = model.grid_of(picture.images)
    row, column = patch or (gh // 2, gw // 2)
    layer = -1 if layer is None else layer
    heat = explain.patch_attention(model, picture.images, (row, column), layer, head)[0]
    heads = "all heads" if head is None else f"head {head}"
    title = f"What the patch in row {row}, column {column} attends to: layer {layer}, {heads}"
    figure = plots.draw_explanation(picture.shown, heat.cpu().numpy(), title)
    plots.frame_patch(figure.axes[0], (gh, gw), (row, column))
    return figure, title


def draw_heads(subject: Subject, picture: Picture) -> tuple[Figure, str]:
    """What every head of every layer attends to."""
    maps = explain.head_maps(subject.model, picture.images)[0].cpu().numpy()
    title = f"what each of {maps.shape[1]} heads in {maps.shape[0]} layers attends to in {picture.name}"
    return model_plots.draw_heads(picture.shown, maps), title


def draw_features(subject: Subject, picture: Picture, layer: int | None) -> tuple[Figure, str]:
    """Patches in the colours of their features."""
    colours = explain.feature_colours(subject.model, picture.images, -1 if layer is None else layer)
    title = f"the first three principal components of the patches' features in {picture.name}"
    return model_plots.draw_feature_colours([picture.shown], colours.cpu().numpy()), title


def draw_distance(subject: Subject, data: str | None, *, images: int, seed: int) -> tuple[Figure, str]:
    """How far each head looks, the mean over pictures."""
    tensor = subject.some_pictures(data, images, seed)
    distances = explain.attention_distance(subject.model, tensor).cpu().numpy()
    title = f"mean attention distance of {distances.shape[1]} heads in {distances.shape[0]} layers"
    figure = model_plots.draw_attention_distance(distances, uniform_distance(subject.model, tensor))
    return figure, f"{title}, over {counted(len(tensor), 'picture')}"


def draw_positions(subject: Subject) -> tuple[Figure, str]:
    """How alike the positions of patches are."""
    similarity = explain.position_similarity(subject.model).cpu().numpy()
    return model_plots.draw_position_similarity(similarity), "similarity of the position embeddings"


def draw_filters(subject: Subject) -> tuple[Figure, str]:
    """What the patch embedding looks for."""
    filters = explain.patch_filters(subject.model)
    figure = model_plots.draw_patch_filters(filters.components.cpu().numpy(), filters.shares.cpu().numpy())
    return figure, "principal components of the patch embedding's filters"


def compare(subject: Subject, data: str | None, *, images: int, seed: int) -> explain.Comparison:
    """Measure every method on pictures, with a progress bar."""
    tensor = subject.some_pictures(data, images, seed)
    with tqdm(desc="variants", unit="", leave=False, disable=not sys.stderr.isatty()) as bar:

        def advance(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        methods = methods_for(subject.model)
        return explain.compare(subject.model, tensor, methods, seed=seed, progress=advance)


def _named(subject: Subject, method: str, target: TargetLike, settings: Mapping[str, Any]) -> str:
    """A method with its settings and what it explains."""
    chosen = METHODS[method]
    what = "".join([chosen.title, *(f", {name} {value}" for name, value in settings.items())])
    return what + (_about(subject, target) if chosen.has_target else "")


def _caption(subject: Subject, picture: Picture) -> tuple[str, str]:
    """What was predicted, with the truth where that is another class; and the colour of this text."""
    if not subject.model.config.gives_classes:
        return "", plots.INK
    score, index = _predicted(subject, picture)
    guess = subject.class_name(index)
    return plots.caption(guess, score, picture.truth)


def _predicted(subject: Subject, picture: Picture) -> tuple[float, int]:
    """The largest probability, and whose."""
    score, index = pooled_and_logits(subject.model, picture.images)[1][0].softmax(dim=0).max(dim=0)
    return float(score), int(index)


def _title(subject: Subject, picture: Picture, what: str) -> str:
    """What was predicted, and what is shown of it."""
    if not subject.model.config.gives_classes:
        return f"{what} over {picture.name}"
    score, index = _predicted(subject, picture)
    return f"{subject.class_name(index)} ({score:.0%}): {what}"


def _about(subject: Subject, target: TargetLike) -> str:
    """What a heatmap is about, where it is not the predicted class."""
    if isinstance(target, ClassDifference):
        ours, theirs = (subject.class_name(int(part[0])) for part in (target.classes, target.versus))
        return f" of {ours}, not {theirs}"
    if isinstance(target, FeatureCosine):
        return " of the likeness"
    return f" of {subject.class_name(target)}" if isinstance(target, int) else ""
