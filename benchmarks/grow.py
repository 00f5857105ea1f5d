"""Make a trained ViT-B/16 without a download: grow a small trained ViT, with unchanged predictions.

    .venv/bin/python benchmarks/grow.py MODEL FOLDER [--size vit_b16] [--noise 0.1]

Benchmarks of precision, int8 and token merging report the agreement of predicted classes, which means nothing
for random weights. MODEL is a plain ViT (pre-norm, learned positions, a class token, one linear head), such
as one of `vitascope train --data cifar10 --patch-size 4 --embed-dim 128 --depth 8 --num-heads 4`. Its
positions are interpolated to the larger model's grid: for ViT-B/16 at 224 pixels, from images of 32 pixels in
patches of 4 to images of 56. It grows as in Net2Net (Chen et al. 2016), so its predictions stay the same:

- width: channels, heads and hidden neurons are repeated. Each layer that reads the copies divides the old
  weight among them at random, so no two rows of a matrix are equal;
- depth: the last matrices of new blocks are zero, so these blocks add nothing;
- patches: a box of new pixels replaces each old one, and the model reads the mean of the box.

Then every matrix gets noise in proportion to its size, so copies differ and every block has an effect.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import re
from pathlib import Path

import torch
from torch import Tensor

import vitascope as vs
from reports import note
from vitascope.models.config import ViTConfig
from vitascope.models.sizes import named_config
from vitascope.models.weights.loading import from_pretrained
from vitascope.models.weights.preprocess import preprocess_of

State = dict[str, Tensor]


def grown_config(small: ViTConfig, size: str) -> ViTConfig:
    """Return the configuration of a named size, with the small model's classes and channels.

    Raises:
        ValueError: the small model has parts that this script cannot repeat, or the large model's sizes are
            no multiples of the small model's.
    """
    classes = {"num_classes": small.num_classes, "class_names": small.class_names}
    large = named_config(size, in_channels=small.in_channels, **classes)
    if not isinstance(large, ViTConfig):
        raise ValueError(f"{size} is no Vision Transformer")
    if any(
        getattr(small, part) != getattr(large, part) for part in ("embedding", "block", "norms", "readout")
    ):
        raise ValueError("only a ViT with every option at its default grows")
    sizes = {
        "width": (small.embed_dim, large.embed_dim),
        "heads": (small.num_heads, large.num_heads),
        "width of a head": (small.head_dim, large.head_dim),
        "height of a patch": (small.patch_hw[0], large.patch_hw[0]),
        "width of a patch": (small.patch_hw[1], large.patch_hw[1]),
    }
    for name, (old, new) in sizes.items():
        if new % old:
            raise ValueError(f"{name}: {new} is no multiple of {old}")
    if large.depth < small.depth:
        raise ValueError(f"depth: {large.depth} is less than {small.depth}")
    return large


@dataclasses.dataclass(frozen=True)
class Growth:
    """Maps the tensors of a small ViT to those of a large one."""

    small: ViTConfig
    large: ViTConfig
    generator: torch.Generator

    @property
    def copies(self) -> int:
        """Copies of each channel and of each hidden neuron."""
        return self.large.embed_dim // self.small.embed_dim

    def state(self, old: State) -> State:
        """All tensors of the large model."""
        body = {name: self.widened(name, tensor) for name, tensor in old.items() if "blocks" not in name}
        for new, source, silent in self.blocks():
            for name, tensor in old.items():
                if name.startswith(f"encoder.blocks.{source}."):
                    wide = self.widened(name, tensor)
                    last = re.search(r"(proj|fc2)\.", name)
                    name = name.replace(f"blocks.{source}.", f"blocks.{new}.")
                    body[name] = torch.zeros_like(wide) if silent and last else wide
        return body

    def blocks(self) -> list[tuple[int, int, bool]]:
        """For each large block: its index, the index of its small block, and whether it adds nothing."""
        sources = [place * self.small.depth // self.large.depth for place in range(self.large.depth)]
        return [(place, source, source in sources[:place]) for place, source in enumerate(sources)]

    def widened(self, name: str, tensor: Tensor) -> Tensor:
        """Widen one tensor: repeat its outputs and divide its weights among copied inputs."""
        heads = (self.large.num_heads // self.small.num_heads, self.large.head_dim // self.small.head_dim)
        if name == "head.bias":
            return tensor.clone()
        if name == "head.weight":
            return self.shared(tensor)
        if name == "patch_embedding.weight":
            return self.spread(tensor).repeat(self.copies, 1, 1, 1)
        if "attention.qkv" in name:
            return self.widened_qkv(tensor, heads)
        if "attention.proj.weight" in name:
            return self.shared_heads(tensor, heads).repeat(self.copies, 1)
        if tensor.ndim == 2:  # the MLP's
            return self.shared(tensor).repeat(self.copies, 1)
        return tensor.repeat(*[1] * (tensor.ndim - 1), self.copies)  # biases, norms, tokens, positions

    def shared(self, weight: Tensor) -> Tensor:
        """(O, I) -> (O, copies I): random shares that sum to each weight."""
        parts = weight * self.shares(self.copies, weight)  # (copies, O, I)
        return parts.movedim(0, 1).flatten(1)

    def shares(self, copies: int, weight: Tensor) -> Tensor:
        """Random positive shares that sum to one, (copies, *weight.shape)."""
        shares = 0.5 + torch.rand(copies, *weight.shape, generator=self.generator)
        return shares / shares.sum(dim=0)

    def spread(self, weight: Tensor) -> Tensor:
        """(D, C, p, p) -> (D, C, P, P): the mean of a box instead of a pixel."""
        (ph, pw), (PH, PW) = self.small.patch_hw, self.large.patch_hw
        rows, columns = PH // ph, PW // pw
        return weight.repeat_interleave(rows, dim=2).repeat_interleave(columns, dim=3) / (rows * columns)

    def widened_qkv(self, tensor: Tensor, heads: tuple[int, int]) -> Tensor:
        """Repeat heads and the channels in each, of (3D, I) or (3D,), with unchanged scores.

        Products of queries and keys grow with the copies in a head and are divided by the root of its width.
        """
        if tensor.ndim == 2:
            tensor = self.shared(tensor)
        qkv = tensor.view(3, self.small.num_heads, self.small.head_dim, -1)
        qkv = qkv.repeat(1, heads[0], heads[1], 1)
        qkv[0] *= heads[1] ** -0.5
        return qkv.reshape(3 * self.large.embed_dim, *tensor.shape[1:])

    def shared_heads(self, weight: Tensor, heads: tuple[int, int]) -> Tensor:
        """U_msa (O, D) -> (O, copies D), with inputs in the order of `widened_qkv`."""
        parts = weight * self.shares(heads[0] * heads[1], weight)  # (copies, O, D)
        parts = parts.view(*heads, len(weight), self.small.num_heads, self.small.head_dim)
        return parts.permute(2, 0, 3, 1, 4).reshape(len(weight), -1)  # (O, copies x heads, copies x hd)


def add_noise(state: State, share: float, generator: torch.Generator) -> None:
    """Add noise to every matrix: a share of the largest root mean square of the same matrix in all blocks."""
    matrices = {name: tensor for name, tensor in state.items() if tensor.ndim in (2, 4)}
    kinds = {name: re.sub(r"\d+", "", name) for name in matrices}
    largest = dict.fromkeys(kinds.values(), 0.0)
    for name, kind in kinds.items():
        largest[kind] = max(largest[kind], float(matrices[name].square().mean().sqrt()))
    for name, kind in kinds.items():
        matrices[name] += share * largest[kind] * torch.randn(matrices[name].shape, generator=generator)


def grow(
    small: vs.VisionTransformer, config: ViTConfig, noise: float = 0.0, seed: int = 0
) -> vs.VisionTransformer:
    """Grow a model to the shape of `config`, from `grown_config`.

    Without noise, its logits equal the small model's, with positions interpolated to the same grid, for
    images whose pixels are repeated to boxes.
    """
    small = copy.deepcopy(small)
    (rows, columns), (ph, pw) = config.grid, small.config.patch_hw
    small.resize((rows * ph, columns * pw))
    generator = torch.Generator().manual_seed(seed)
    state = Growth(small.config, config, generator).state(small.state_dict())
    add_noise(state, noise, generator)
    grown = vs.VisionTransformer(config)
    grown.load_state_dict(state, strict=True)
    return grown.eval()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", metavar="MODEL", help="a run or model folder of vitascope")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="the model folder to write")
    parser.add_argument("--size", default="vit_b16", help="the named size to grow to (default vit_b16)")
    parser.add_argument(
        "--noise", type=float, default=0.1, help="noise as a share of each matrix (default 0.1)"
    )
    arguments = parser.parse_args()
    small = from_pretrained(arguments.model)
    if not isinstance(small, vs.VisionTransformer):
        raise SystemExit(f"{arguments.model} is no Vision Transformer")
    config = grown_config(small.config, arguments.size)
    grown = grow(small, config, arguments.noise)
    grown.preprocess = preprocess_of(small).at_size(config.image_hw)
    vs.save_pretrained(grown, arguments.folder)
    note(f"{arguments.folder}: {config.summary}")


if __name__ == "__main__":
    main()
