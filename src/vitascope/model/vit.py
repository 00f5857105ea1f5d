"""The Vision Transformer of Dosovitskiy et al. 2021, "An Image is Worth 16x16 Words", equations 1 to 4."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitascope.model.config import ViTConfig
from vitascope.model.encoder import PatchDropout, transformer_encoder
from vitascope.model.heads import classification_head, pooling
from vitascope.model.images import check_images
from vitascope.model.initialization import initialize
from vitascope.model.patches import patch_embedding
from vitascope.model.positions import position_embedding
from vitascope.model.preprocess import PreprocessLike
from vitascope.model.trace import Trace


class VisionTransformer(nn.Module):
    """Images (B, C, H, W), normalized floats, to logits (B, K).

    B images, C colours, N patches, T = N + 1 tokens with the class token (N without, more with registers),
    D = `embed_dim`, K classes. Any H and W that patches tile are taken: positions are interpolated.
    """

    preprocess: PreprocessLike | None = None
    """The preprocessing that the model was trained with; None if it was built from a configuration."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        D, eps, readout = config.embed_dim, config.block.norm_eps, config.readout

        def tokens(count: int) -> nn.Parameter | None:
            return nn.Parameter(torch.zeros(1, count, D)) if count else None

        def norm(wanted: bool) -> nn.Module:
            return nn.LayerNorm(D, eps=eps) if wanted else nn.Identity()

        self.patch_embedding = patch_embedding(config)  # E
        self.class_token = tokens(readout.has_class_token)  # x_class
        self.distillation_token = tokens(readout.distillation_token)
        self.registers = tokens(readout.num_registers)
        self.positions = position_embedding(config)  # E_pos
        self.dropout = nn.Dropout(config.training.dropout)
        self.patch_dropout = PatchDropout(config.training.patch_dropout)
        self.embedding_norm = norm(config.embedding.embedding_norm)
        self.encoder = transformer_encoder(config)
        pre_norm = config.block.norm == "pre"  # a post-norm encoder ends in a norm of its own
        self.norm = norm(pre_norm and readout.pool_norm == "before")
        self.pool = pooling(config)
        self.pool_norm = norm(pre_norm and readout.pool_norm == "after")
        self.head = classification_head(config)
        initialize(self)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, K) of images (B, C, H, W); with `head="none"`, what `embed` gives."""
        return self.head(self.embed(images))

    def embed(self, images: Tensor) -> Tensor:
        """The pooled representation y of equation 4: (B, C, H, W) -> (B, D).

        (B, 2D) where two are set side by side: class and distillation token, or class token and mean.
        """
        zL = self.encode(images, read=self.pool.read)  # (B, 1, D) with a class token
        return self.pool_norm(self.pool(self.norm(zL)))

    def forward_features(self, images: Tensor) -> Tensor:
        """Every token after the final norm: (B, C, H, W) -> (B, T, D).

        With `pool_norm="after"` the final norm is of the pooled vector, and these are without one.
        """
        return self.norm(self.encode(images))

    def trace(self, images: Tensor, attention: bool = False) -> Trace:
        """The forward pass with every intermediate kept, and the attention weights if asked for."""
        trace = Trace(attention=attention)
        self.answer(self.encode(images, trace), trace)
        return trace

    def answer(self, zL: Tensor, trace: Trace | None = None) -> tuple[Tensor, Tensor]:
        """The pooled representation and the logits of z_L, equation 4: (B, T, D) -> (B, D), (B, K)."""
        features = self.norm(zL)
        pooled = self.pool_norm(self.pool(features))
        logits = self.head(pooled)
        if trace is not None:
            trace.keep("features", features)
            trace.keep("pooled", pooled)
            trace.keep("logits", logits)
        return pooled, logits

    def encode(self, images: Tensor, trace: Trace | None = None, read: slice = slice(None)) -> Tensor:
        """z_L, equations 1 to 3: (B, C, H, W) -> (B, T, D), or only the tokens that `read` selects."""
        return self.encode_tokens(self.embeddings(images, trace), self.grid_of(images), trace, read)

    def encode_tokens(
        self,
        z0: Tensor,
        grid: tuple[int, int],
        trace: Trace | None = None,
        read: slice = slice(None),
        blocks: range | None = None,
    ) -> Tensor:
        """z_L from z_0 of a grid, equations 2 and 3: (B, T, D) -> (B, T, D), or what `read` selects.

        With `blocks`, those alone: z_j from z_i, as in evaluation, where no patches are dropped.
        """
        z0, layout = self.patch_dropout(z0, self.positions.layout(grid, z0.device))
        return self.encoder(z0, layout, trace, read, blocks)

    def embeddings(self, images: Tensor, trace: Trace | None = None) -> Tensor:
        """z_0 of images, equation 1: (B, C, H, W) -> (B, T, D)."""
        grid = self.grid_of(images)
        return self.assemble(self.patch_embedding(images), grid, trace)

    def assemble(self, patches: Tensor, grid: tuple[int, int], trace: Trace | None = None) -> Tensor:
        """z_0 = [x_class; x_p^1 E; ...; x_p^N E] + E_pos, equation 1: (B, N, D) -> (B, T, D).

        `patches` are what `patch_embedding` gives, x_p E of a grid; a task may change them on the way.
        """
        prefix = [self.class_token, self.distillation_token, self.registers]
        tokens = [
            part.to(patches.dtype).expand(patches.shape[0], -1, -1) for part in prefix if part is not None
        ]
        z0 = self.positions(torch.cat([*tokens, patches], dim=1), grid)  # (B, T, D)
        z0 = self.embedding_norm(self.dropout(z0))
        if trace is not None:
            trace.keep("patch_embeddings", patches)
            trace.keep("embeddings", z0)
        return z0

    def resize(self, image_size: int | tuple[int, int]) -> None:
        """Make another image size the model's own: positions are interpolated, for good."""
        self.config = self.config.replace(image_size=image_size)
        self.positions.resize(self.config.grid)
        if self.preprocess is not None:
            self.preprocess = self.preprocess.at_size(self.config.image_hw)

    def grid_of(self, images: Tensor) -> tuple[int, int]:
        """Rows and columns of patches in images (B, C, H, W).

        Raises:
            UserError: raw pixels, another number of dimensions or colours, or a size that patches do not
                tile.
        """
        check_images(images, self.config.in_channels)
        return self.config.grid_of((images.shape[2], images.shape[3]))
