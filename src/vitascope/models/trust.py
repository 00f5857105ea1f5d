"""What a classifier knows about its own answers, from its validation images: sets of classes that hold the
right one at an asked rate, and how familiar a picture is.

A `Trust` belongs to one model and its saved weights: `model.trust`. The temperature is part of the head.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from vitascope.arguments import Range
from vitascope.errors import UserError

COVERAGE = 0.95
"""Share of pictures whose set of classes holds the right one, by default."""
FAMILIAR = 0.99
"""Share of the validation images that pass as familiar, by default."""
PER_CLASS = 100
"""Validation images of every class from which on each class has its own limit: it then covers at most one
percent more than it is asked for."""


def masses_above(probabilities: Tensor) -> Tensor:
    """The probability of all classes before each, most probable first: (B, K) -> (B, K).

    It is 0 for the most probable class. Of equally probable classes the first one comes first.
    """
    ordered = probabilities.sort(dim=1, descending=True, stable=True)
    before = ordered.values.cumsum(dim=1) - ordered.values  # (B, K)
    return torch.zeros_like(probabilities).scatter(1, ordered.indices, before)


@dataclasses.dataclass(frozen=True, eq=False)
class PredictionSets:
    """Adaptive prediction sets (Romano, Sesia and Candes 2020, section 2), split conformal, without chance.

    A class belongs to the set of a picture if the mass of the classes before it, `masses_above`, is at most a
    limit: the quantile of the true classes' masses in the validation images. So the most probable class
    always does.
    """

    masses: Tensor
    """Of the true classes of the validation images, ascending, float32 (n,); or of each class (K, n), with
    infinity after its last."""
    counts: Tensor
    """Validation images, int64 () or, of each class, (K,). `masses` has every one, or n ranks of them."""
    ambiguous: Tensor
    """The share of them whose set at `COVERAGE` has several classes, float32 (); 0 if they are too few."""

    @classmethod
    def fitted(cls, probabilities: Tensor, labels: Tensor, most: int = 1000) -> Self:
        """The sets of validation images with probabilities (N, K) and true classes int64 (N,).

        `most` is the number of masses that are kept.
        """
        K = probabilities.shape[1]
        masses = masses_above(probabilities.double()).gather(1, labels[:, None])[:, 0].float()  # (N,)
        counts, nothing = labels.bincount(minlength=K), torch.tensor(0.0)
        if counts.min() < PER_CLASS:
            sets = cls(ranked(masses, most), torch.tensor(len(masses)), nothing)
        else:
            parts = [ranked(masses[labels == k], max(PER_CLASS, most // K)) for k in range(K)]
            rows = nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=math.inf)
            sets = cls(rows, counts, nothing)
        members = sets.contain(probabilities, COVERAGE)
        if members is None:
            return sets
        return dataclasses.replace(sets, ambiguous=(members.sum(dim=1) > 1).float().mean())

    def check(self, classes: int) -> None:
        """Reject masses that are not in order, and numbers of another number of classes, as a `UserError`."""
        masses, counts = self.masses, self.counts
        kept = masses.isfinite().sum(dim=-1)
        fits = (masses.dtype, counts.dtype) == (torch.float32, torch.int64)
        fits = fits and self.ambiguous.shape == () and 0 <= float(self.ambiguous) <= 1
        fits = fits and counts.shape in ((), (classes,)) and masses.shape[:-1] == counts.shape
        if not fits or not ((kept > 0) & (kept <= counts)).all() or not _ascends(masses) or masses.min() < 0:
            raise UserError(
                f"masses {list(masses.shape)} and counts are not those of sets of {classes} classes"
            )

    def to_json(self) -> dict[str, Any]:
        """The masses of all, or a list for each class, and the counts, as values of JSON."""
        masses = self.masses.tolist()
        if self.masses.ndim == 2:
            masses = [[mass for mass in row if mass < math.inf] for row in masses]
        return {"masses": masses, "counts": self.counts.tolist(), "ambiguous": float(self.ambiguous)}

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`; a KeyError, TypeError or ValueError for other values."""
        masses, counts = values["masses"], torch.tensor(values["counts"])
        rows = [torch.tensor(row, dtype=torch.float32) for row in (masses if counts.ndim else [masses])]
        if len(rows) != max(1, counts.numel()) or not all(len(row) for row in rows):
            raise ValueError(f"masses of {len(rows)} classes, and counts of {counts.numel()}")
        padded = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=math.inf)
        return cls(padded if counts.ndim else padded[0], counts, torch.tensor(float(values["ambiguous"])))

    def contain(self, probabilities: Tensor, coverage: float) -> Tensor | None:
        """Whether each class belongs to the set of each picture, bool (B, K), by probabilities (B, K).

        None if the validation images are too few for this coverage.

        Raises:
            UserError: a coverage outside of (0, 1).
        """
        limits = self.limits(coverage)
        return None if limits is None else masses_above(probabilities.double()).float() <= limits

    @staticmethod
    def needed(coverage: float) -> int:
        """The validation images that a coverage needs."""
        return math.ceil(coverage / (1 - coverage) - 1e-9)

    def limits(self, coverage: float) -> Tensor | None:
        """The limit of the mass before a class, () or (K,); None if the images are too few for it.

        It is the ceil((n + 1) coverage)-th of n masses, or the next one that is kept.
        """
        Range(gt=0, lt=1).check("coverage", coverage)
        if int(self.counts.min()) < self.needed(coverage):
            return None
        kept = self.masses.isfinite().sum(dim=-1)  # () or (K,)
        rank = ((self.counts + 1) * coverage - 1e-9).ceil()
        place = (rank * kept / self.counts - 1e-9).ceil().long().clamp(max=kept) - 1
        return self.masses.gather(-1, place[..., None])[..., 0]


SETS = tuple(field.name for field in dataclasses.fields(PredictionSets))


def class_distances(features: Tensor, center: Tensor, projection: Tensor, means: Tensor) -> Tensor:
    """The squared distances to the means (K, r), after a projection (D, r): (B, D) -> (B, K)."""
    z = (features - center) @ projection  # (B, r)
    return (means**2).sum(dim=1) - 2 * z @ means.T + (z**2).sum(dim=1, keepdim=True)


def nearest_class(features: Tensor, center: Tensor, projection: Tensor, means: Tensor) -> Tensor:
    """The smallest of `class_distances`: (B, D) -> (B,)."""
    return class_distances(features, center, projection, means).min(dim=1).values


def _ascends(values: Tensor) -> bool:
    """Whether each row (..., n) is in order; NaN is in none."""
    return torch.equal(values.sort(dim=-1).values, values)


def ranked(values: Tensor, most: int) -> Tensor:
    """The values (N,) in order, or `most` of them at even ranks, the last one among them."""
    ordered, N = values.sort().values, len(values)
    if most >= N:
        return ordered
    ranks = (torch.arange(1, most + 1) * N / most).ceil().long()
    return ordered[ranks - 1]


class Familiarity(nn.Module):
    """How familiar a picture is: the share of pictures such as the validation images that are less like the
    training images. It is a conformal p-value (Vovk et al. 2005): 1 / (n + 1) for one less so than all n.

    Likeness is the squared Mahalanobis distance of the features to the nearest class, with one covariance for
    all classes (Lee et al. 2018, equations 1 and 2), in the directions of the smallest variance, which tell
    the most about other pictures (Kamoi and Kobayashi 2020).
    """

    center: Tensor
    """The mean of the training images' features, float32 (D,)."""
    projection: Tensor
    """From there to directions in which the classes have unit variance, (D, r)."""
    means: Tensor
    """Of the classes, there: (K, r)."""
    levels: Tensor
    """Distances of validation images, descending, at least two."""
    steps: Tensor
    """From each level to the next one, or so little that rounding is less."""
    images: Tensor
    """The number n of validation images, float32 (): `levels` has every one, or some at even ranks."""

    NAMES = ("center", "projection", "means", "levels", "images")

    def __init__(self, **values: Tensor) -> None:
        super().__init__()
        for name in self.NAMES:
            self.register_buffer(name, values[name])
        levels = torch.atleast_1d(self.levels.float())
        self.register_buffer("steps", (levels[:-1] - levels[1:]).clamp(min=1e-3 * float(levels.mean())))

    def fits(self, features: int) -> bool:
        """Whether these are whole numbers of a model of so many features."""
        _, projection, means, levels, images = tensors = [getattr(self, name) for name in self.NAMES]
        rank, n = projection.shape[1:2], levels.shape[:1]
        shapes = [(features,), (features, *rank), (*means.shape[:1], *rank), (*n,), ()]
        fits = (
            [tuple(values.shape) for values in tensors] == shapes and means.numel() > 0 and levels.numel() > 1
        )
        fits = fits and all(values.dtype == torch.float32 and values.isfinite().all() for values in tensors)
        return fits and _ascends(-levels) and bool(levels[0] > levels[-1]) and bool(images >= len(levels))

    def forward(self, features: Tensor) -> Tensor:
        """Features (B, D) of `model.embed` to familiarity in [0, 1], (B,): linear between two levels, so that
        rounding changes it by rounding."""
        return (1 + self.less_familiar(features)) / (1 + self.images)

    def less_familiar(self, features: Tensor) -> Tensor:
        """The number of the n images that are less like the training images, (B,), for features (B, D)."""
        distances = nearest_class(features, self.center, self.projection, self.means)
        passed = (self.levels[:-1] - distances[:, None]) / self.steps  # (B, levels - 1)
        return self.images * passed.clamp(0, 1).mean(dim=1)

    def tensors(self) -> dict[str, Tensor]:
        """All numbers by name."""
        return {name: getattr(self, name) for name in self.NAMES}


class CrossFamiliarity(nn.Module):
    """The familiarity of a picture to the M members of an ensemble: the cross-conformal p-value (Vovk 2015,
    section 2). Each member has validation images of its own, none of its training images."""

    def __init__(self, members: Sequence[Familiarity]) -> None:
        super().__init__()
        self.members: Sequence[Familiarity] = cast("Any", nn.ModuleList(members))

    def forward(self, features: Tensor) -> Tensor:
        """Features (B, M D) of `Ensemble.embed` to familiarity in [0, 1], (B,)."""
        parts = zip(self.members, features.chunk(len(self.members), dim=1), strict=True)
        less = torch.stack([member.less_familiar(part) for member, part in parts]).sum(dim=0)  # (B,)
        return (1 + less) / (1 + torch.stack([member.images for member in self.members]).sum())

    def tensors(self) -> dict[str, Tensor]:
        """All numbers, by the number of the member and their names."""
        return {
            f"{number}.{name}": tensor
            for number, member in enumerate(self.members)
            for name, tensor in member.tensors().items()
        }


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Trust:
    """What is known about the answers of a classifier of one class per image.

    Attributes:
        temperature: by which the logits of its head were divided.
        sets: the sets of classes.
        familiarity: None for too few validation images.
    """

    temperature: float
    sets: PredictionSets
    familiarity: Familiarity | CrossFamiliarity | None = None

    def lacks(self) -> list[str]:
        """Lines about what the validation images were too few for, at the default rates."""
        images, lines = int(self.sets.counts.sum()), []
        if self.sets.limits(COVERAGE) is None:
            lines.append(f"sets of {COVERAGE:.0%} need {PredictionSets.needed(COVERAGE)} validation images")
        if (needed := PredictionSets.needed(FAMILIAR)) > images:
            lines.append(f"unfamiliar pictures at {1 - FAMILIAR:.0%} false alarms need {needed}")
        few = [f"{' and '.join(lines)}: there are {images}"] if lines else []
        usual = "no familiarity: the features of the validation images do not differ"
        return few + [usual] * (self.familiarity is None)

    def tensors(self) -> dict[str, Tensor]:
        """All numbers, for a file of tensors."""
        named = {"temperature": torch.tensor(self.temperature)}
        named |= {name: getattr(self.sets, name) for name in SETS}
        return named | ({} if self.familiarity is None else self.familiarity.tensors())

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Tensor], classes: int, features: int, members: int = 1) -> Self:
        """The inverse of `tensors`, for a model of so many classes, features and members.

        Raises:
            UserError: numbers of another model, or broken ones.
        """
        always, prefixes = {"temperature", *SETS}, [""]
        if members > 1 and "levels" not in tensors:
            prefixes = [f"{number}." for number in range(members)]
        of_familiarity = {f"{prefix}{name}" for prefix in prefixes for name in Familiarity.NAMES}
        error = UserError(f"its numbers are broken, or another model's: {', '.join(sorted(tensors))}")
        if set(tensors) not in (always, always | of_familiarity):
            raise error
        named = {name: tensor.clone() for name, tensor in tensors.items()}
        temperature, sets = named["temperature"], PredictionSets(**{name: named[name] for name in SETS})
        parts = [
            Familiarity(**{name: named[f"{prefix}{name}"] for name in Familiarity.NAMES})
            for prefix in (prefixes if set(tensors) > always else ())
        ]
        sets.check(classes)
        fits = temperature.shape == () and 0 < temperature < math.inf
        if not fits or not all(part.fits(features // len(prefixes)) for part in parts):
            raise error
        familiarity = CrossFamiliarity(parts) if len(parts) > 1 else parts[0] if parts else None
        return cls(temperature=float(temperature), sets=sets, familiarity=familiarity)
