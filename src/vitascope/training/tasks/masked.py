"""Masked patch prediction (Dosovitskiy et al. 2021, section 4.6 and appendix B.1.2): learning without labels.

Half of the patch embeddings are corrupted, and the model says what was there: the patch's mean colour, a
small picture of it, or its pixels.
"""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from vitascope.data.decoding import ImageError
from vitascope.data.loading import Loader
from vitascope.data.preprocess import Preprocess
from vitascope.data.randomness import uniform
from vitascope.data.splits import ImageSet
from vitascope.errors import UserError
from vitascope.model.config import ViTConfig
from vitascope.model.modes import evaluation_mode
from vitascope.model.patches import patchify, unpatchify
from vitascope.model.vit import VisionTransformer
from vitascope.report.masked import draw_masked_patches
from vitascope.storage import explaining_failure
from vitascope.training.checkpoint.folders import to_resume
from vitascope.training.distributed import by_first, sum_over_processes
from vitascope.training.options import Masking
from vitascope.training.tasks.patch_targets import Target, target_of
from vitascope.training.tasks.task import Examples, Sums

MASKED, REPLACED = 0.8, 0.1
"""Of the corrupted patches, the shares that become [mask] and another patch; the rest stays as it is."""
_STREAM = 0x6D61736B
"""Keeps an image's corruption independent of its augmentation, which draws from the same seed and epoch."""


# What is corrupted


class Corruption(NamedTuple):
    """Which n of its N patches each image has corrupted, and what stands in their places: (B, n) each."""

    places: Tensor
    """The corrupted patches, in their order; int64."""
    sources: Tensor
    """Whose embedding stands there: another patch's, or the patch's own; int64."""
    masked: Tensor
    """Where [mask] stands instead; boolean."""

    def to(self, device: torch.device) -> Corruption:
        """The same on a device."""
        return Corruption(*(field.to(device, non_blocking=True) for field in self))


def num_corrupted(num_patches: int, share: float) -> int:
    """How many of an image's patches are corrupted: the share, rounded.

    Raises:
        UserError: none of them, or all.
    """
    count = round(share * num_patches)
    if not 0 < count < num_patches:
        raise UserError(
            f"corrupt {share:g} of {num_patches} patches is {count}: some must be hidden and some seen; "
            "take another share or smaller patches"
        )
    return count


def corruption(
    seed: int, epoch: int, indices: npt.NDArray[np.int64], num_patches: int, share: float
) -> Corruption:
    """What is corrupted in each image: a function of seed, epoch and the image's index, on the CPU.

    A corrupted patch becomes [mask] with probability 0.8, another patch with 0.1, and stays with 0.1. The
    other patch comes from the same image, so that an image's result does not depend on its batch, and is one
    that is not corrupted: what is hidden in one place does not show in another.

    Raises:
        UserError: a share that corrupts no patch, or all.
    """
    N, n = num_patches, num_corrupted(num_patches, share)
    draws = uniform(seed ^ _STREAM, epoch, indices, N + 2 * n)  # (B, N + 2n) in [0, 1)
    order, kind, other = np.split(draws, [N, N + n], axis=1)
    shuffled = order.argsort(axis=1, kind="stable")  # (B, N)
    places, seen = np.sort(shuffled[:, :n], axis=1), shuffled[:, n:]
    others = np.take_along_axis(seen, (other * (N - n)).astype(np.int64), axis=1)  # (B, n)
    replaced = (kind >= MASKED) & (kind < MASKED + REPLACED)
    sources = np.where(replaced, others, places)
    return Corruption(*(torch.from_numpy(field) for field in (places, sources, kind < MASKED)))


# What predicts


def body_config(config: ViTConfig) -> ViTConfig:
    """A model as it is pre-trained: without a head.

    Whether it has a class token is written down, so that a classifier that starts from it may read the class
    token or the mean of the patches.
    """
    return config.replace(head="none", class_token=config.readout.has_class_token)


def at(places: Tensor, patches: Tensor) -> Tensor:
    """Some of each image's patches: places (B, n) of (B, N, X) -> (B, n, X)."""
    return patches.gather(1, places[:, :, None].expand(-1, -1, patches.shape[2]))


def put(places: Tensor, patches: Tensor, others: Tensor) -> Tensor:
    """Patches (B, N, X) with others (B, n, X) at some places (B, n)."""
    return patches.scatter(1, places[:, :, None].expand(-1, -1, patches.shape[2]), others)


class MaskedPatchModel(nn.Module):
    """A Vision Transformer without a head, [mask], and one linear layer that says what a patch was.

    Both start at zero, as the class token and the head of the paper's code do.

    Args:
        body: what is pre-trained, and all that is kept.
        outputs: numbers to be said of a patch.

    Raises:
        UserError: a body whose patches share pixels, which leaves patches out, or part of which nothing here
            would train.
    """

    def __init__(self, body: VisionTransformer, outputs: int) -> None:
        super().__init__()
        check_body(body)
        D = body.config.embed_dim
        self.body = body
        self.mask_token = nn.Parameter(torch.zeros(1, 1, D))
        self.head = nn.Linear(D, outputs)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor, places: Tensor, sources: Tensor, masked: Tensor) -> Tensor:
        """What is said of the corrupted patches, (B, n, outputs).

        Args:
            images: normalized floats (B, C, H, W).
            places, sources, masked: the fields of a `Corruption`, (B, n).
        """
        body = self.body
        grid = body.grid_of(images)
        patches = body.patch_embedding(images)  # (B, N, D)
        mask = self.mask_token.to(patches.dtype)
        stand_ins = torch.where(masked[:, :, None], mask, at(sources, patches))  # (B, n, D)
        z0 = body.prepare_tokens(images, patches=put(places, patches, stand_ins))  # (B, T, D)
        zL = body.encode(z0, grid)
        return self.head(body.norm(at(places, zL[:, body.config.num_prefix_tokens :])))


def check_body(body: VisionTransformer) -> None:
    """Refuse a model that cannot learn by masked patch prediction.

    Raises:
        UserError: as `MaskedPatchModel`.
    """
    stem = body.config.embedding.stem
    if stem not in ("conv", "linear"):
        raise UserError(
            f"stem {stem!r}: its patches share pixels, so a hidden one shows in its neighbours; masked patch "
            'prediction needs the stem "conv" or "linear"'
        )
    if body.config.training.patch_dropout:
        raise UserError("patch_dropout leaves out patches that are to be predicted; set it to 0")
    idle = [name for name, _ in body.named_parameters() if name.startswith(("pool", "head."))]
    if idle:
        raise UserError(
            f"masked patch prediction would not train {idle[0]}, which only a pooled answer needs; "
            'take the pool "cls" or "mean", pool_norm "before" and head "none"'
        )


# The task


@dataclasses.dataclass(frozen=True, kw_only=True)
class Masked:
    """Masked patch prediction as a `Task`; see `MaskedPatchModel` for what is called.

    Raises:
        UserError: a target that the patches do not have, a share that corrupts none of them or all.
    """

    masking: Masking
    """What is predicted, and of how many patches."""
    config: ViTConfig
    """The model's."""
    preprocess: Preprocess
    """The model's."""
    target: Target = dataclasses.field(init=False)
    """What is said of a patch."""

    def __post_init__(self) -> None:
        """Refuse what cannot be predicted."""
        num_corrupted(self.num_patches, self.masking.corrupt)
        target = target_of(self.masking.target, self.config, self.preprocess)
        object.__setattr__(self, "target", target)

    @property
    def num_patches(self) -> int:
        """Patches of an image, N."""
        return self.config.grid[0] * self.config.grid[1]

    def module(self, model: VisionTransformer) -> MaskedPatchModel:
        """What is trained around a model without a head."""
        return MaskedPatchModel(model, self.target.outputs)

    def loss(self, module: nn.Module, examples: Examples) -> tuple[Tensor, Sums]:
        """The mean over the corrupted patches, and sums of the images' means.

        The sums are `loss`, `count` and, where patches are classified, `correct`: the shares of right ones.
        """
        drawn = self.corruption(examples.seed, examples.epoch, examples.indices)
        means = self._means(module, examples.images, drawn)
        loss = means["loss"].sum() / max(1, len(examples.images))
        means["count"] = torch.ones_like(means["loss"])
        return loss, {name: values.detach().sum() for name, values in means.items()}

    @torch.inference_mode()
    def validate(self, module: nn.Module, loader: Loader, precision: torch.dtype) -> dict[str, float]:
        """Means over a split, of all processes: `loss`, and `accuracy` where patches are classified.

        The same patches are corrupted every time.

        Raises:
            UserError: no image could be read.
        """
        sums: Sums = {}
        with evaluation_mode(module):
            for batch in loader.epoch():
                drawn = self.corruption(0, 0, batch.indices)
                with torch.autocast(batch.pixels.device.type, precision, enabled=precision != torch.float32):
                    means = self._means(module, batch.pixels.float() / 255, drawn)
                means["count"] = torch.ones_like(means["loss"])
                sums = {name: sums.get(name, 0) + values.double().sum() for name, values in means.items()}
        sums = sum_over_processes(sums)
        if not sums.get("count"):
            raise UserError(f"no image of the {loader.images.name} set could be read")
        names = {"loss": "loss", "correct": "accuracy"}
        return {names[name]: float(value / sums["count"]) for name, value in sums.items() if name in names}

    def corruption(self, seed: int, epoch: int, indices: npt.NDArray[np.int64]) -> Corruption:
        """`corruption` of the model's patches."""
        return corruption(seed, epoch, indices, self.num_patches, self.masking.corrupt)

    def _means(self, module: nn.Module, images: Tensor, drawn: Corruption) -> dict[str, Tensor]:
        """What is measured, a mean over the corrupted patches of each image: (B,) each."""
        drawn = drawn.to(images.device)
        predictions = module(self.preprocess.normalize(images), *drawn)  # (B, n, outputs)
        return self.target.measure(predictions, at(drawn.places, self.target.wanted(images)))


# The figure


@torch.inference_mode()
def draw_masked(
    run: Path, task: Masked, module: nn.Module, images: ImageSet, count: int = 8
) -> dict[str, Path]:
    """Draw what the model makes of corrupted images into the run's `figures/`; returns the path by its name.

    Every process computes, since each may hold a part of the model; the first one draws.

    Args:
        run: the run folder.
        task: what the model was trained for.
        module: the trained model, on any device.
        images: some of them are shown, spread evenly over the set; one that cannot be read is not.
        count: how many.
    """
    device = next(module.parameters()).device
    pixels = torch.from_numpy(_some_pixels(images, task.preprocess, count)).to(device) / 255  # (n, C, H, W)
    drawn = task.corruption(0, 0, np.arange(len(pixels))).to(device)
    with evaluation_mode(module):
        predictions = module(task.preprocess.normalize(pixels), *drawn)
    target, (patch, grid) = task.target, (task.config.patch_hw, task.config.grid)
    patches = patchify(pixels, patch)  # (n, N, C * ph * pw)

    def with_patches(others: Tensor) -> npt.NDArray[np.uint8]:
        """The images with others in the corrupted places."""
        whole = unpatchify(put(drawn.places, patches, others), grid, patch)
        return (whole * 255).round().byte().cpu().numpy()

    wanted = at(drawn.places, target.wanted(pixels))
    rows = {
        "image": with_patches(at(drawn.places, patches)),
        "given": with_patches(at(drawn.sources, patches)),
        "predicted": with_patches(target.pictures(target.said(predictions)).flatten(2)),
        "right answer": with_patches(target.pictures(wanted).flatten(2)),
    }
    borrowed = drawn.sources != drawn.places  # (n, corrupted)
    marks = (drawn.masked, borrowed, ~borrowed & ~drawn.masked)
    nothing = patches.new_zeros(patches.shape[:2], dtype=torch.bool)  # (n, N)
    hidden, replaced, kept = (
        nothing.scatter(1, drawn.places, mark).unflatten(1, grid).cpu().numpy() for mark in marks
    )

    def draw() -> dict[str, Path]:
        with explaining_failure(run, "the figures", to_resume(run)):
            return draw_masked_patches(run, rows, hidden, replaced, kept)

    return by_first(draw)


def _some_pixels(images: ImageSet, preprocess: Preprocess, count: int) -> npt.NDArray[np.uint8]:
    """Pixels (n, C, H, W) of images spread evenly over a set."""
    pixels = []
    for index in np.unique(np.linspace(0, len(images) - 1, min(count, len(images))).astype(int)):
        with contextlib.suppress(ImageError):  # the loader has counted and named it
            pixels.append(preprocess.pixels(images.sources[index]))
    return np.stack(pixels)
