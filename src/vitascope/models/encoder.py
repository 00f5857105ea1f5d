"""The Transformer encoder: MLP, block, and the stack of blocks (paper, equations 2 and 3)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitascope.errors import UserError
from vitascope.models.attention import EVERY_TOKEN, SelfAttention
from vitascope.models.config import ViTConfig
from vitascope.models.local_attention import LocalAttention
from vitascope.models.norms import norm_of
from vitascope.models.patches import take
from vitascope.models.positions import Layout
from vitascope.models.token_merging import MergingAttention, MergingLayout
from vitascope.models.trace import Trace


class DropPath(nn.Module):
    """Stochastic depth (Huang et al. 2016): in training, zero a share `rate` of the images of (B, T, D).

    The others are scaled, so that the mean stays.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, branch: Tensor) -> Tensor:
        if not self.training or self.rate == 0:
            return branch
        keep = torch.rand(branch.shape[0], 1, 1, device=branch.device) >= self.rate
        return branch * (keep / (1 - self.rate)).to(branch.dtype)


def keep_patches(tokens: Tensor, layout: Layout, visible: Tensor) -> tuple[Tensor, Layout]:
    """Keep the prefix and some patches of each image, by their indices (B, N'): (B, T, D) -> (B, T', D)."""
    prefix, patches = tokens[:, : layout.num_prefix_tokens], tokens[:, layout.num_prefix_tokens :]
    return torch.cat([prefix, take(patches, visible)], dim=1), layout.select(visible)


class PatchDropout(nn.Module):
    """In training, keep a random share of each image's patches, in order (Li et al. 2022, FLIP, section 3).

    The prefix stays: (B, T, D) -> (B, T', D).
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, tokens: Tensor, layout: Layout) -> tuple[Tensor, Layout]:
        if not self.training or self.rate == 0:
            return tokens, layout
        B, N = tokens.shape[0], tokens.shape[1] - layout.num_prefix_tokens
        num_kept = max(1, round(N * (1 - self.rate)))
        visible = torch.rand(B, N, device=tokens.device).argsort(dim=1)[:, :num_kept].sort(dim=1).values
        return keep_patches(tokens, layout, visible)


class QuickGELU(nn.Module):
    """x sigmoid(1.702 x), the approximation of OpenAI's CLIP."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


class MLP(nn.Module):
    """Two linear layers with a GELU between, for each token by itself: (B, T, D) -> (B, T, D).

    With `normalizes`, a norm precedes the second layer.
    """

    def __init__(self, config: ViTConfig, normalizes: bool = False) -> None:
        super().__init__()
        bias = config.block.linear_bias
        self.fc1 = nn.Linear(config.embed_dim, config.mlp_dim, bias=bias)
        self.activation = {
            "gelu": nn.GELU(),
            "gelu_tanh": nn.GELU(approximate="tanh"),
            "quick_gelu": QuickGELU(),
        }[config.block.mlp]
        self.norm = norm_of(config, config.mlp_dim) if normalizes else nn.Identity()
        self.fc2 = nn.Linear(config.mlp_dim, config.embed_dim, bias=bias)
        self.dropout = nn.Dropout(config.regularization.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.dropout(self.fc2(self.norm(self.dropout(self.activation(self.fc1(tokens))))))


class SwiGLU(nn.Module):
    """A linear layer times the SiLU of another (Shazeer 2020); one matrix holds both, the gate first."""

    def __init__(self, config: ViTConfig, normalizes: bool = False) -> None:
        super().__init__()
        bias = config.block.linear_bias
        self.fc1 = nn.Linear(config.embed_dim, 2 * config.mlp_dim, bias=bias)
        self.norm = norm_of(config, config.mlp_dim) if normalizes else nn.Identity()
        self.fc2 = nn.Linear(config.mlp_dim, config.embed_dim, bias=bias)
        self.dropout = nn.Dropout(config.regularization.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        gate, value = self.fc1(tokens).chunk(2, dim=-1)
        return self.dropout(self.fc2(self.norm(self.dropout(F.silu(gate) * value))))


class LayerScale(nn.Module):
    """A learned factor per channel, small at first (Touvron et al. 2021, "Going deeper", section 2)."""

    def __init__(self, embed_dim: int, start: float) -> None:
        super().__init__()
        self.start = start
        self.gamma = nn.Parameter(torch.full((embed_dim,), float(start)))

    def forward(self, branch: Tensor) -> Tensor:
        return branch * self.gamma.to(branch.dtype)  # float32 would spread to all tokens


class Block(nn.Module):
    """A pre-norm block: (B, T, D) -> (B, Q, D), the tokens that `queries` selects, which attend to all T."""

    def __init__(self, config: ViTConfig, drop_path: float) -> None:
        super().__init__()
        D, options = config.embed_dim, config.block
        scale = options.layer_scale
        kind = SelfAttention if options.attention == "global" else LocalAttention
        self.norm1 = norm_of(config, D)
        self.attention = MergingAttention(config) if options.token_merging else kind(config)
        self.scale1 = nn.Identity() if scale is None else LayerScale(D, scale)
        self.norm2 = norm_of(config, D)
        mlp = SwiGLU if options.mlp == "swiglu" else MLP
        self.mlp = mlp(config, normalizes=config.norms.inner_norm != "none")
        self.scale2 = nn.Identity() if scale is None else LayerScale(D, scale)
        self.drop_path = DropPath(drop_path)

    def forward(
        self, tokens: Tensor, layout: Layout, trace: Trace | None = None, queries: slice = EVERY_TOKEN
    ) -> Tensor:
        mixed = self.scale1(self.attention(self.norm1(tokens), layout, trace, queries))
        tokens = tokens[:, queries] + self.drop_path(mixed)  # equation 2
        if queries == EVERY_TOKEN:
            tokens = layout.merge(tokens)
        return tokens + self.drop_path(self.scale2(self.mlp(self.norm2(tokens))))  # equation 3


class PostNormBlock(Block):
    """A block of the Transformer of 2017, which normalizes each sum (Vaswani et al. 2017, section 3.1)."""

    def forward(
        self, tokens: Tensor, layout: Layout, trace: Trace | None = None, queries: slice = EVERY_TOKEN
    ) -> Tensor:
        mixed = self.scale1(self.attention(tokens, layout, trace, queries))
        tokens = self.norm1(tokens[:, queries] + self.drop_path(mixed))
        return self.norm2(tokens + self.drop_path(self.scale2(self.mlp(tokens))))


class BranchNormBlock(Block):
    """A block that normalizes each branch's result (Liu et al. 2022, Swin V2, "res-post-norm")."""

    def forward(
        self, tokens: Tensor, layout: Layout, trace: Trace | None = None, queries: slice = EVERY_TOKEN
    ) -> Tensor:
        mixed = self.scale1(self.norm1(self.attention(tokens, layout, trace, queries)))
        tokens = tokens[:, queries] + self.drop_path(mixed)
        return tokens + self.drop_path(self.scale2(self.norm2(self.mlp(tokens))))


class Encoder(nn.Module):
    """L blocks in sequence; if they merge tokens, the output has all tokens again."""

    checkpointing = False
    """Whether training recomputes each block for its gradient, to save memory; merging blocks never are."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        block = {"pre": Block, "post": PostNormBlock, "branch": BranchNormBlock}[config.block.norm]
        last = max(1, config.depth - 1)
        rates = [config.regularization.drop_path * index / last for index in range(config.depth)]
        self.blocks = nn.ModuleList(block(config, rate) for rate in rates)
        self.token_merging = config.block.token_merging

    def forward(
        self,
        tokens: Tensor,
        layout: Layout,
        trace: Trace | None = None,
        queries: slice = EVERY_TOKEN,
        blocks: range | None = None,
    ) -> Tensor:
        """z_0 -> z_L, or z_i -> z_j of `blocks`: (B, T, D) -> (B, Q, D).

        The last block computes only the tokens that `queries` selects, which changes outputs by rounding.
        """
        recompute = self.checkpointing and self.training and trace is None and not self.token_merging
        if self.token_merging:
            if blocks and blocks.start > 0:  # their input is merged tokens
                raise UserError(
                    f"with token_merging, block {blocks.start} cannot be run by itself, which this needs: "
                    "load the same weights with token_merging=0"
                )
            layout = MergingLayout(layout.grid, layout.num_prefix_tokens, pairs_per_block=self.token_merging)
        last = len(self.blocks) - 1
        for index in range(last + 1) if blocks is None else blocks:
            block = self.blocks[index]
            arguments = (tokens, layout.of_block(index), trace, queries if index == last else EVERY_TOKEN)
            tokens = checkpoint(block, *arguments, use_reentrant=False) if recompute else block(*arguments)
            if trace is not None:
                trace.keep(f"block{index}", layout.expand(tokens))
        return layout.expand(tokens)
