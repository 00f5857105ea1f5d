"""The Vision Transformer of Dosovitskiy et al. 2021, "An Image is Worth 16x16 Words", equations 1 to 4."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from vitascope.errors import UserError
from vitascope.model.config import ViTConfig, check_multiple
from vitascope.model.encoder import Encoder
from vitascope.model.heads import classification_head, pooling
from vitascope.model.initialization import initialize_paper, initialize_timm
from vitascope.model.patches import patch_embedding
from vitascope.model.positions import LearnedPositions
from vitascope.model.trace import Trace


class VisionTransformer(nn.Module):
    """Images (B, C, H, W), normalized floats, to logits (B, K).

    B images, C colours, N patches, T = N + 1 tokens with the class token (N without), D = `embed_dim`,
    K classes. Any H and W that are multiples of the patch are taken: positions are interpolated.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embedding = patch_embedding(config)  # E
        has_token = config.num_prefix_tokens == 1
        self.class_token = nn.Parameter(torch.zeros(1, 1, config.embed_dim)) if has_token else None  # x_class
        self.positions = LearnedPositions(config.grid, config.num_prefix_tokens, config.embed_dim)  # E_pos
        self.dropout = nn.Dropout(config.dropout)
        self.encoder = Encoder(config)
        self.norm = nn.LayerNorm(config.embed_dim, eps=config.norm_eps)
        self.pool = pooling(config)
        self.head = classification_head(config)
        {"paper": initialize_paper, "timm": initialize_timm}[config.init](self)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, K) of images (B, C, H, W); with `head="none"`, the pooled features (B, D)."""
        return self.head(self.embed(images))

    def embed(self, images: Tensor) -> Tensor:
        """The pooled representation y of equation 4: (B, C, H, W) -> (B, D)."""
        z0 = self.embeddings(images)  # (B, T, D)
        zL = self.encoder(z0, read=self.pool.read)  # (B, 1, D) with a class token
        return self.pool(self.norm(zL))

    def forward_features(self, images: Tensor) -> Tensor:
        """Every token after the final norm: (B, C, H, W) -> (B, T, D)."""
        return self.norm(self.encoder(self.embeddings(images)))

    def trace(self, images: Tensor, attention: bool = False) -> Trace:
        """The forward pass with every intermediate kept, and the attention weights if asked for."""
        trace = Trace(attention=attention)
        features = self.norm(self.encoder(self.embeddings(images, trace), trace))
        pooled = self.pool(features)
        trace.keep("features", features)
        trace.keep("pooled", pooled)
        trace.keep("logits", self.head(pooled))
        return trace

    def embeddings(self, images: Tensor, trace: Trace | None = None) -> Tensor:
        """z_0 = [x_class; x_p^1 E; ...; x_p^N E] + E_pos, equation 1: (B, C, H, W) -> (B, T, D)."""
        grid = self.grid_of(images)
        tokens = self.patch_embedding(images)  # (B, N, D)
        if trace is not None:
            trace.keep("patch_embeddings", tokens)
        if self.class_token is not None:
            class_token = self.class_token.to(tokens.dtype).expand(tokens.shape[0], -1, -1)
            tokens = torch.cat([class_token, tokens], dim=1)  # (B, T, D)
        tokens = self.dropout(self.positions(tokens, grid))
        if trace is not None:
            trace.keep("embeddings", tokens)
        return tokens

    def resize(self, image_size: int | tuple[int, int]) -> None:
        """Make another image size the model's own: positions are interpolated, for good."""
        self.config = dataclasses.replace(self.config, image_size=image_size)
        self.positions.resize(self.config.grid)

    def grid_of(self, images: Tensor) -> tuple[int, int]:
        """Rows and columns of patches in images (B, C, H, W).

        Raises:
            UserError: raw pixels, another number of dimensions or colours, or a size that patches do not
                tile.
        """
        if not images.is_floating_point():
            raise UserError(
                f"images must be normalized floats, not {images.dtype}; see `Preprocess.normalize`"
            )
        if images.ndim != 4 or images.shape[1] != self.config.in_channels:
            raise UserError(
                f"images must be (batch, {self.config.in_channels}, height, width), not {tuple(images.shape)}"
            )
        check_multiple((images.shape[2], images.shape[3]), self.config.patch_hw)
        return images.shape[2] // self.config.patch_hw[0], images.shape[3] // self.config.patch_hw[1]
