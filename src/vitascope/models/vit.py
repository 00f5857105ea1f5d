"""The Vision Transformer of Dosovitskiy et al. 2021, "An Image is Worth 16x16 Words", equations 1 to 4."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, overload

import torch
from torch import Tensor, nn

from vitascope.arguments import checked
from vitascope.models.attention import EVERY_TOKEN
from vitascope.models.config import ViTConfig, check_layer
from vitascope.models.encoder import Encoder, PatchDropout, keep_patches
from vitascope.models.heads import classification_head, pooling
from vitascope.models.initialization import initialize
from vitascope.models.inputs import check_images
from vitascope.models.intervention import switched_off
from vitascope.models.norms import norm_of
from vitascope.models.patches import patch_embedding
from vitascope.models.relations import position_embedding
from vitascope.models.trace import Trace, keep
from vitascope.models.trust import Trust


class VisionTransformer(nn.Module):
    """Normalized images (B, C, H, W) to logits (B, K).

    B images, C colour channels, N patches, T = N + 1 tokens with the class token (N without, more with
    registers), D = `embed_dim`, K classes. H and W may be any that patches tile; positions are interpolated.
    """

    preprocess: Any = None
    """The `vitascope.Preprocess` that it was trained with; None if it was built from a configuration."""
    trust: Trust | None = None
    """What it knows about its answers; None if it was not calibrated."""

    @checked
    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        D, readout = config.embed_dim, config.readout

        def tokens(count: int) -> nn.Parameter | None:
            return nn.Parameter(torch.zeros(1, count, D)) if count else None

        def norm(exists: bool) -> nn.Module:
            return norm_of(config, D) if exists else nn.Identity()

        self.patch_embedding = patch_embedding(config)  # E
        self.class_token = tokens(readout.has_class_token)  # x_class
        self.distillation_token = tokens(readout.distillation_token)
        self.registers = tokens(readout.num_registers)
        self.positions = position_embedding(config)  # E_pos
        self.dropout = nn.Dropout(config.regularization.dropout)
        self.patch_dropout = PatchDropout(config.regularization.patch_dropout)
        self.embedding_norm = norm(config.embedding.embedding_norm)
        self.encoder = Encoder(config)
        self.norm = norm(config.final_norm == "before")
        self.pool = pooling(config)
        self.pool_norm = norm(config.final_norm == "after")
        self.head = classification_head(config)
        initialize(self, config.regularization.init, config.regularization.head_init)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, K) of images (B, C, H, W); with `head="none"`, the same as `embed`."""
        return self.forward_head(self.forward_features(images, queries=self.pool.queries))

    def embed(self, images: Tensor) -> Tensor:
        """The pooled representation y of equation 4: (B, C, H, W) -> (B, D), or (B, 2D) if two are joined."""
        return self.pool_features(self.forward_features(images, queries=self.pool.queries))

    def trace(self, images: Tensor, attention: bool = False) -> Trace:
        """The forward pass with every intermediate, and with the attention weights if requested."""
        trace = Trace(attention=attention)
        self.forward_head(self.forward_features(images, trace), trace)
        return trace

    @checked
    def intervene(
        self,
        *,
        heads: Iterable[tuple[int, int]] = (),
        attention: Iterable[int] = (),
        mlps: Iterable[int] = (),
        layers: Iterable[int] = (),
        patches: Iterable[int] = (),
    ) -> AbstractContextManager[None]:
        """A context in which parts are switched off, for every pass of this module: `forward`, `trace`,
        heatmaps and the lens; in other threads too. Contexts may be nested.

        Args:
            heads: pairs of layer and head, whose values count as zero before the output projection.
            attention, mlps: layers without this branch, whose result counts as zero before it is added.
            layers: those that return their input.
            patches: by number, row by row, for any image; no token attends to them, and no pooling reads
                them. Maps keep their places.

        A copy that is made in the context keeps the parts off. A pass that `torch.compile` has compiled
        before ignores the context.

        Raises:
            UserError: a part that does not exist, or all patches; patches beside windows or merged tokens,
                layers beside merged tokens.
        """
        return switched_off(self, self.config, heads, attention, mlps, layers, patches)

    @checked
    def forward_intermediates(
        self, images: Tensor, layers: Sequence[int], *, norm: bool = True
    ) -> list[Tensor]:
        """The outputs of some blocks, (B, T, D) each; the blocks after the last of them are not run.

        Blocks are numbered from 0, and from the last by negative numbers; `UserError` for others. With `norm`
        each output gets the final norm, where that is not part of the blocks or after the pooling.
        """
        numbers = [check_layer(self.config, layer) for layer in layers]
        trace = Trace(names=[f"block{number}" for number in numbers])
        grid, blocks = self.grid_of(images), range(max(numbers, default=-1) + 1)
        self.encode(self.prepare_tokens(images), grid, trace, blocks=blocks)
        outputs = [trace[f"block{number}"] for number in numbers]
        return [self.norm(tokens) for tokens in outputs] if norm else outputs

    def forward_features(
        self, images: Tensor, trace: Trace | None = None, queries: slice = EVERY_TOKEN
    ) -> Tensor:
        """The tokens after the final norm: (B, C, H, W) -> (B, T, D), or only those that `queries` selects.

        With `pool_norm="after"` the final norm follows the pooling, and these tokens have none.
        """
        z0 = self.prepare_tokens(images, trace)
        features = self.norm(self.encode(z0, self.grid_of(images), trace, queries))
        keep(trace, features=features)
        return features

    @overload
    def feature_map(self, images: Tensor, layers: None = None) -> Tensor: ...
    @overload
    def feature_map(self, images: Tensor, layers: Sequence[int], *, norm: bool = True) -> list[Tensor]: ...
    def feature_map(
        self, images: Tensor, layers: Sequence[int] | None = None, *, norm: bool = True
    ) -> Tensor | list[Tensor]:
        """The patches of `forward_features` as a map: (B, C, H, W) -> (B, D, grid_h, grid_w).

        With `layers`, a list of maps instead, of what `forward_intermediates` returns for them.
        Class token, distillation token and registers are left out.
        """
        if layers is None:
            return self._as_map(self.forward_features(images), images)
        return [self._as_map(z, images) for z in self.forward_intermediates(images, layers, norm=norm)]

    def _as_map(self, tokens: Tensor, images: Tensor) -> Tensor:
        """The patches of tokens (B, T, D) in their places: (B, D, grid_h, grid_w)."""
        patches = tokens[:, self.config.num_prefix_tokens :]  # (B, N, D)
        return patches.mT.unflatten(2, self.grid_of(images))

    def forward_head(self, features: Tensor, trace: Trace | None = None) -> Tensor:
        """The logits of `forward_features`' tokens: (B, T, D) -> (B, K)."""
        pooled = self.pool_features(features)
        logits = self.head(pooled)
        keep(trace, pooled=pooled, logits=logits)
        return logits

    def prepare_tokens(
        self, images: Tensor, trace: Trace | None = None, patches: Tensor | None = None
    ) -> Tensor:
        """z_0 = [x_class; x_p E] + E_pos, equation 1: (B, T, D). `patches` (B, N, D) replace x_p E."""
        grid = self.grid_of(images)
        patches = self.patch_embedding(images) if patches is None else patches
        prefix = [self.class_token, self.distillation_token, self.registers]
        B, parts = patches.shape[0], [part.to(patches.dtype) for part in prefix if part is not None]
        tokens = torch.cat([*(part.expand(B, -1, -1) for part in parts), patches], dim=1)
        z0 = self.embedding_norm(self.dropout(self.positions(tokens, grid)))  # (B, T, D)
        keep(trace, patch_embeddings=patches, embeddings=z0)
        return z0

    def encode(
        self,
        tokens: Tensor,
        grid: tuple[int, int],
        trace: Trace | None = None,
        queries: slice = EVERY_TOKEN,
        blocks: range | None = None,
        visible: Tensor | None = None,
    ) -> Tensor:
        """z_L of z_0, equations 2 and 3: (B, T, D) -> (B, T, D), or only the tokens that `queries` selects.

        With `blocks`, z_j of z_i: these blocks alone, where evaluation mode is assumed. With `visible`, the
        encoder gets the prefix and the patches of these indices (B, N') only.
        """
        layout = self.positions.layout(grid, tokens.device)
        if visible is not None:
            tokens, layout = keep_patches(tokens, layout, visible)
        tokens, layout = self.patch_dropout(tokens, layout)
        return self.encoder(tokens, layout, trace, queries, blocks)

    def pool_features(self, features: Tensor) -> Tensor:
        """y = LN(z_L^0), equation 4, of tokens that `norm` has normalized: (B, T, D) -> (B, D)."""
        return self.pool_norm(self.pool(features))

    def resize(self, image_size: int | tuple[int, int]) -> None:
        """Set the model's image size: positions are interpolated, the preprocessing follows, and `trust` is
        None, because other features need another one."""
        self.config = self.config.at_size(image_size)
        self.positions.resize(self.config.grid)
        if self.preprocess is not None:
            self.preprocess = self.preprocess.at_size(self.config.image_hw)
        self.trust = None

    def grid_of(self, images: Tensor) -> tuple[int, int]:
        """Rows and columns of patches in images (B, C, H, W); `UserError` for images that do not fit."""
        check_images(images, self.config.in_channels)
        return self.config.grid_of((images.shape[2], images.shape[3]))
