"""Masked patch prediction (Dosovitskiy et al. 2021, section 4.6 and appendix B.1.2): learning without labels.

Half of the patch embeddings are corrupted. The model predicts a target for each of them: its mean colour, the
colours of its 4x4 picture, or its pixels. The corruption is a function of the seed, the epoch and the image's
index, drawn on the CPU.

A masked autoencoder (He et al. 2022, "Masked Autoencoders Are Scalable Vision Learners") encodes the visible
patches only, a quarter of them by default. A small decoder gets their states and a mask token in place of
each hidden patch, and predicts the normalized pixels of the hidden patches.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from vitascope.data.changes import together
from vitascope.data.loading import Loader
from vitascope.data.randomness import fractions, random_bits, sorting_keys
from vitascope.data.splits import ImageSet
from vitascope.errors import UserError
from vitascope.models.config import ViTConfig
from vitascope.models.decoding import ImageError
from vitascope.models.encoder import Encoder
from vitascope.models.norms import LayerNorm
from vitascope.models.patches import patchify, put, take, unpatchify
from vitascope.models.positions import Layout, sincos_table
from vitascope.models.preprocess import Preprocess
from vitascope.models.vision_model import evaluation_mode
from vitascope.models.vit import VisionTransformer
from vitascope.training.distributed import print_first, sum_over_processes
from vitascope.training.evaluation.novelty import Novelty
from vitascope.training.options.groups import DECODER_HEAD, Masking
from vitascope.training.tasks.patch_targets import ColorTarget, NormalizedPixelTarget, PixelTarget, Target
from vitascope.training.tasks.task import Examples, Finished, Monitor, PatchEvaluation, PatchPictures, Sums

MASKED, REPLACED = 0.8, 0.1
"""The shares of the corrupted patches that become [mask] and another patch; the others stay."""
_STREAM = 0x6D61736B
"""Makes the corruption independent of the augmentation, which draws from the same seed and epoch."""


class Corruption(NamedTuple):
    """The n corrupted patches of each image and their replacements, (B, n) each."""

    places: Tensor
    """Positions of the corrupted patches, ascending; int64."""
    sources: Tensor
    """Positions of the patches whose embeddings are used instead, perhaps the same ones; int64."""
    masked: Tensor
    """Whether [mask] is used instead; boolean."""


class RandomMask(NamedTuple):
    """The n hidden and the N - n visible patches of each image."""

    places: Tensor
    """Positions of the hidden patches, ascending; int64 (B, n)."""
    visible: Tensor
    """Positions of the others, ascending; int64 (B, N - n)."""

    @property
    def sources(self) -> Tensor:
        """No patch is replaced by another: the positions of the hidden patches, (B, n)."""
        return self.places

    @property
    def masked(self) -> Tensor:
        """Every hidden patch becomes a mask token: true, boolean (B, n)."""
        return torch.ones_like(self.places, dtype=torch.bool)


def on_device(drawn: Corruption | RandomMask, device: torch.device) -> Corruption | RandomMask:
    """The same on a device."""
    return type(drawn)(*together([field.numpy() for field in drawn], device))


def num_corrupted(num_patches: int, share: float) -> int:
    """The number n of corrupted patches per image: the share, rounded."""
    count = round(share * num_patches)
    if not 0 < count < num_patches:
        raise UserError(
            f"corrupt {share:g} of {num_patches} patches is {count}: some must be hidden and some visible; "
            "choose another share or smaller patches"
        )
    return count


def corruption(
    seed: int, epoch: int, indices: npt.NDArray[np.int64], num_patches: int, share: float
) -> Corruption:
    """Draw the corruption of Dosovitskiy et al. 2021, appendix B.1.2."""
    # Another patch is an uncorrupted one of the same image: results do not depend on the batch, and no hidden
    # patch becomes visible elsewhere.
    N, n = num_patches, num_corrupted(num_patches, share)
    bits = random_bits(seed ^ _STREAM, epoch, indices, N + 2 * n)
    keys, mask = sorting_keys(bits[:, :N])
    shuffled = np.sort(keys, axis=1)
    places = _places(keys < shuffled[:, n : n + 1], n)  # (B, n): of the n smallest keys
    seen = (shuffled[:, n:] & mask).astype(np.int64)  # (B, N - n), in random order
    kind, other = np.split(fractions(bits[:, N:]), 2, axis=1)  # (B, n) each
    others = np.take_along_axis(seen, (other * (N - n)).astype(np.int64), axis=1)  # (B, n)
    replaced = (kind >= MASKED) & (kind < MASKED + REPLACED)
    sources = np.where(replaced, others, places)
    return Corruption(*(torch.from_numpy(field) for field in (places, sources, kind < MASKED)))


def random_mask(
    seed: int, epoch: int, indices: npt.NDArray[np.int64], num_patches: int, share: float
) -> RandomMask:
    """Draw the hidden patches of a masked autoencoder (He et al. 2022, section 3, "Masking")."""
    n = num_corrupted(num_patches, share)
    keys, _ = sorting_keys(random_bits(seed ^ _STREAM, epoch, indices, num_patches))
    hidden = keys < np.partition(keys, n, axis=1)[:, n : n + 1]  # (B, N): those with the n smallest keys
    parts = _places(hidden, n), _places(~hidden, num_patches - n)
    return RandomMask(*(torch.from_numpy(part) for part in parts))


def _places(marked: npt.NDArray[np.bool_], count: int) -> npt.NDArray[np.int64]:
    """The ascending positions of the marked patches, `count` in each image: (B, N) -> (B, count)."""
    images, patches = marked.shape
    return np.flatnonzero(marked).reshape(images, count) - patches * np.arange(images)[:, None]


# The model

DRAWN = 8
"""Images in the figure."""
UNMIXED = ("conv",)
"""The stems whose patches have no pixel in common."""


def body_config(config: ViTConfig) -> ViTConfig:
    """No head, and an explicit class token, so that a later classifier may pool it or the patches."""
    return config.replace(head="none", class_token=config.readout.has_class_token)


def check_body(body: VisionTransformer, stems: Sequence[str] = UNMIXED) -> None:
    """Reject a model whose hidden patches are visible elsewhere, or of which a part would not be trained."""
    stem = body.config.embedding.stem
    if stem not in stems:
        raise UserError(
            f"stem {stem!r}: its patches share pixels, so that a hidden patch is visible in its "
            f"neighbours; masked patch prediction needs the stem {' or '.join(stems)}"
        )
    if body.config.regularization.patch_dropout:
        raise UserError("patch_dropout drops patches that are to be predicted; set it to 0")
    idle = [name for name, _ in body.named_parameters() if name.startswith(("pool", "head."))]
    if idle:
        raise UserError(
            f"masked patch prediction would not train {idle[0]}, which belongs to pooling; "
            'use the pool "cls" or "mean", pool_norm "before" and head "none"'
        )


class MaskedPatchModel(nn.Module):
    """The model to pre-train, a [mask] embedding, and a linear layer with `outputs` per patch.

    [mask] and the layer start at zero, as the class token and the head in the paper's code.
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
        """Normalized images (B, C, H, W) and a `Corruption`'s fields (B, n) -> (B, n, outputs)."""
        body = self.body
        grid = body.grid_of(images)
        patches = body.patch_embedding(images)  # (B, N, D)
        mask = self.mask_token.to(patches.dtype)
        replacements = torch.where(masked[:, :, None], mask, take(patches, sources))  # (B, n, D)
        z0 = body.prepare_tokens(images, patches=put(patches, places, replacements))  # (B, T, D)
        zL = body.encode(z0, grid)
        return self.head(body.norm(take(zL[:, body.config.num_prefix_tokens :], places)))


# The task


@dataclasses.dataclass(frozen=True, kw_only=True)
class Masked:
    """Masked patch prediction as a `Task`."""

    monitor: ClassVar = Monitor()
    masking: Masking
    config: ViTConfig
    preprocess: Preprocess

    def __post_init__(self) -> None:
        num_corrupted(math.prod(self.config.grid), self.masking.share)
        self.target  # noqa: B018 - one that does not suit the model is an error now

    @functools.cached_property
    def target(self) -> Target:
        """The target for a hidden patch."""
        patch = self.config.patch_hw
        if self.masking.target == "pixels":
            return PixelTarget(patch=patch, preprocess=self.preprocess)
        side = {"mean_color": 1, "downsampled": 4}[self.masking.target]
        return ColorTarget(side=side, patch=patch, channels=self.config.in_channels)

    def module(self, model: VisionTransformer) -> nn.Module:
        """The trained module around a model without a head.

        It maps normalized images (B, C, H, W) and the fields of `hidden` to outputs (B, n, outputs).
        """
        return MaskedPatchModel(model, self.target.outputs)

    def hidden(self, seed: int, epoch: int, indices: npt.NDArray[np.int64]) -> Corruption | RandomMask:
        """The hidden patches of each image, a function of the seed, the epoch and its index; on the CPU."""
        return corruption(seed, epoch, indices, math.prod(self.config.grid), self.masking.share)

    def loss(self, module: nn.Module, examples: Examples) -> tuple[Tensor, Sums]:
        """The mean loss of the corrupted patches, and sums of the images' means, as `Target.measure` has."""
        means = self._means(module, examples.images, examples.seed, examples.epoch, examples.indices)
        loss = means["loss"].sum() / max(1, len(examples.images))
        return loss, {name: values.detach().sum() for name, values in means.items()}

    @torch.inference_mode()
    def validate(self, module: nn.Module, loader: Loader, precision: torch.dtype) -> dict[str, float]:
        """The means over a split: `loss`, and `accuracy` if patches are classified."""
        sums: Sums = {}
        with evaluation_mode(module):
            for batch in loader.epoch():
                with torch.autocast(batch.pixels.device.type, precision, enabled=precision != torch.float32):
                    images = batch.pixels.float() / 255
                    means = self._means(module, images, 0, 0, batch.indices)  # the same corruption every time
                sums = {name: sums.get(name, 0) + values.double().sum() for name, values in means.items()}
        sums = sum_over_processes(sums)
        if not sums.get("count"):
            raise UserError(f"no image of the {loader.images.name} set could be read")
        return {name: float(value / sums["count"]) for name, value in sums.items() if name != "count"}

    def calibrate(self, finished: Finished) -> list[Novelty]:
        """Nothing follows from the validation images."""
        return []

    def test(self, finished: Finished) -> PatchEvaluation:
        """Evaluate the trained module, and print the result: the saved model has no `head`."""
        images = finished.loader.images
        metrics = self.validate(finished.module, finished.loader, finished.precision)
        accuracy = f", {metrics['accuracy']:.2%} of their colours right" if "accuracy" in metrics else ""
        print_first(
            f"{images.name:<6} loss {metrics['loss']:.3f} for hidden patches{accuracy}, after "
            f"{finished.seconds:.1f} s of training"
        )
        return PatchEvaluation(images.name, len(images), metrics, self.pictures(finished.module, images))

    @torch.inference_mode()
    def pictures(self, module: nn.Module, images: ImageSet) -> PatchPictures:
        """Predictions for `DRAWN` images, spread evenly over a set.

        Every process computes, since each may hold a part of the module.
        """
        device, arrays = next(module.parameters()).device, []
        for index in images.spread(DRAWN):
            with contextlib.suppress(ImageError):  # the loader has reported it
                arrays.append(self.preprocess.pixels(images.sources[index]))
        pixels = torch.from_numpy(np.stack(arrays)).to(device) / 255  # (n, C, H, W)
        drawn = on_device(self.hidden(0, 0, np.arange(len(pixels))), device)
        with evaluation_mode(module):
            outputs = module(self.preprocess.normalize(pixels), *drawn)
        target, (patch, grid) = self.target, (self.config.patch_hw, self.config.grid)
        patches = patchify(pixels, patch)  # (n, N, C * ph * pw)

        def with_patches(others: Tensor) -> npt.NDArray[np.uint8]:
            """The images with `others` in place of the corrupted patches."""
            whole = unpatchify(put(patches, drawn.places, others), grid, patch)
            return (whole * 255).round().byte().cpu().numpy()

        targets, answers = take(target.targets(pixels), drawn.places), take(patches, drawn.places)
        rows = {
            "image": with_patches(answers),
            "given": with_patches(take(patches, drawn.sources)),
            target.caption: with_patches(target.pictures(target.predictions(outputs), answers).flatten(2)),
            "right answer": with_patches(target.pictures(targets, answers).flatten(2)),
        }
        replaced = drawn.sources != drawn.places  # (n, corrupted)
        nothing = patches.new_zeros(patches.shape[:2], dtype=torch.bool)  # (n, N)
        marks = [
            nothing.scatter(1, drawn.places, mark).unflatten(1, grid).cpu().numpy()
            for mark in (drawn.masked, replaced, ~replaced & ~drawn.masked)
        ]
        return PatchPictures(rows, *marks)

    def _means(
        self, module: nn.Module, images: Tensor, seed: int, epoch: int, indices: npt.NDArray[np.int64]
    ) -> dict[str, Tensor]:
        """The mean measures of each image's corrupted patches, and a `count` of 1, (B,) each."""
        drawn = on_device(self.hidden(seed, epoch, indices), images.device)
        outputs = module(self.preprocess.normalize(images), *drawn)  # (B, n, outputs)
        means = self.target.measure(outputs, take(self.target.targets(images), drawn.places))
        return {**means, "count": torch.ones_like(means["loss"])}


CONVOLUTIONAL = ("resnet", "tokenizer")
"""The stems that would see pixels of hidden patches: these are erased."""


class MaskedAutoencoder(nn.Module):
    """The encoder to pre-train, and a plain ViT's blocks as its decoder (section 3).

    Initialized as in the authors' code: Xavier in linear layers, deviation 0.02 for the mask token. Names of
    parameters beside `body` differ from those of the body.
    """

    def __init__(self, body: VisionTransformer, outputs: int, masking: Masking) -> None:
        super().__init__()
        check_body(body, (*UNMIXED, *CONVOLUTIONAL))
        check_encoder(body.config)
        d = masking.decoder_dim
        config = ViTConfig(
            image_size=body.config.image_size,
            patch_size=body.config.patch_size,
            remainder=body.config.remainder,
            embed_dim=d,
            depth=masking.decoder_depth,
            num_heads=d // DECODER_HEAD,
            norm_eps=body.config.norms.norm_eps,
        )
        self.body = body
        self.decoder_embedding = nn.Linear(body.config.embed_dim, d)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, d))
        self.decoder = Encoder(config)
        self.decoder.checkpointing = body.encoder.checkpointing
        self.decoder_norm = LayerNorm(d, eps=config.norms.norm_eps)
        self.head = nn.Linear(d, outputs)
        nn.init.normal_(self.mask_token, std=0.02)
        for part in (self.decoder_embedding, self.decoder, self.head):
            for layer in part.modules():
                if isinstance(layer, nn.Linear):
                    nn.init.xavier_uniform_(layer.weight)
                    nn.init.zeros_(layer.bias)

    def forward(self, images: Tensor, places: Tensor, visible: Tensor) -> Tensor:
        """Normalized images (B, C, H, W) and a `RandomMask`'s fields -> (B, n, outputs) for `places`."""
        body, grid = self.body, self.body.grid_of(images)
        P, n = body.config.num_prefix_tokens, places.shape[1]
        if body.config.embedding.stem in CONVOLUTIONAL:
            images = erased(images, places, grid)
        zL = body.norm(body.encode(body.prepare_tokens(images), grid, visible=visible))  # (B, P + N - n, D)
        seen = self.decoder_embedding(zL)  # (B, P + N - n, d)
        E_pos = sincos_table("sincos_2d", grid, seen.shape[2], seen.device, seen.dtype)[0]  # (N, d)
        hidden = self.mask_token.to(seen.dtype) + E_pos[places]  # (B, n, d)
        # The order of tokens does not matter to attention: hidden patches are last.
        tokens = torch.cat([seen[:, :P], seen[:, P:] + E_pos[visible], hidden], dim=1)  # (B, P + N, d)
        decoded = self.decoder(tokens, Layout(grid, P))
        return self.head(self.decoder_norm(decoded[:, -n:]))


def erased(images: Tensor, places: Tensor, grid: tuple[int, int]) -> Tensor:
    """Normalized images (B, C, H, W) with the pixels of some patches, (B, n), at zero, the mean colour."""
    (H, W), (gh, gw) = images.shape[2:], grid
    kept = images.new_ones(len(images), gh * gw).scatter_(1, places, 0.0).view(-1, 1, gh, gw)
    return images * kept.repeat_interleave(H // gh, dim=2).repeat_interleave(W // gw, dim=3)


def check_encoder(config: ViTConfig) -> None:
    """Reject an encoder that needs the whole grid of patches, or has patches without a variance."""
    if config.in_channels * math.prod(config.patch_hw) == 1:
        raise UserError(
            "patch_size 1: a patch of one grey pixel has no variance, and a masked autoencoder normalizes "
            "each patch by its own; set patch_size to 2 or more, or choose another target"
        )
    positions, attention = config.embedding.positions, config.block.attention
    reason = f"{attention} attention" if attention != "global" else f"{positions} positions"
    if attention != "global" or config.embedding.relative:
        raise UserError(
            f"with {reason}, the encoder needs every patch, and a masked autoencoder leaves out most of "
            "them: use global attention and other positions, or another target"
        )


class MaskedAutoencoding(Masked):
    """A masked autoencoder as a `Task`."""

    @functools.cached_property
    def target(self) -> Target:
        """The pixels of a hidden patch, normalized by its own mean and variance."""
        return NormalizedPixelTarget(patch=self.config.patch_hw, preprocess=self.preprocess)

    def module(self, model: VisionTransformer) -> nn.Module:
        """The encoder with a new decoder."""
        return MaskedAutoencoder(model, self.target.outputs, self.masking)

    def hidden(self, seed: int, epoch: int, indices: npt.NDArray[np.int64]) -> RandomMask:
        """The hidden and the visible patches of each image."""
        return random_mask(seed, epoch, indices, math.prod(self.config.grid), self.masking.share)
