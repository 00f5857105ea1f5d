"""Token merging: every block merges the most similar patches (Bolya et al. 2023, ToMe).

Between attention and MLP, the patches are dealt in turn into two sets. Each patch of the first set is matched
with the one of the second whose key, averaged over the heads, is most similar; the `r` most similar pairs
become one token each, the mean of all their patches (section 3, "Bipartite soft matching"). Attention counts
a token as often as it has patches ("proportional attention", equation 1). The prefix is never merged. There
are no weights, so any trained model can be shortened.

The encoder's output has all tokens again: each patch has the state of the token that it was merged into.
"""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from vitascope.models.attention import SelfAttention
from vitascope.models.patches import take
from vitascope.models.positions import Layout


@dataclasses.dataclass
class MergingLayout(Layout):
    """The layout of one pass through merging blocks, which update it: of T tokens, Q are left."""

    pairs_per_block: int = 0
    """The number of pairs that every block merges."""
    keys: Tensor | None = None
    """The keys in the last attention, averaged over the heads: (B, Q, hd)."""
    sizes: Tensor | None = None
    """The number of tokens merged into each, float32 (B, Q); None before the first merge."""
    owners: Tensor | None = None
    """The index among the Q tokens that each of the T was merged into: (B, T); None before."""

    def merge(self, tokens: Tensor) -> Tensor:
        assert self.keys is not None, "attention comes before merging"
        P = self.num_prefix_tokens
        count = min(self.pairs_per_block, (tokens.shape[1] - P) // 2)
        if count == 0:
            return tokens
        prefix = torch.arange(P, device=tokens.device).expand(tokens.shape[0], -1)
        stay, leave, join = match(self.keys[:, P:], count)
        stay = torch.cat([prefix, P + stay], dim=1)  # (B, Q - count)
        leave, join = P + leave, P + join  # (B, count)
        sizes = torch.ones(tokens.shape[:2], device=tokens.device) if self.sizes is None else self.sizes
        staying, leaving = sizes.gather(1, stay), sizes.gather(1, leave)
        self.sizes = staying.scatter_add(1, join, leaving)
        places = torch.arange(stay.shape[1], device=tokens.device)
        # A matrix product, not a scatter: as cheap for so few tokens, and every runtime has it.
        into = (join[:, None] == places[:, None]).to(tokens.dtype)  # (B, Q - count, count)
        parts = leaving / self.sizes.gather(1, join)
        share = (staying / self.sizes).to(tokens.dtype)[:, :, None]
        owners = stay.new_zeros(tokens.shape[:2]).scatter(1, stay, places.expand_as(stay))
        owners = owners.scatter(1, leave, join)
        self.owners = owners if self.owners is None else owners.gather(1, self.owners)
        return take(tokens, stay) * share + into @ (take(tokens, leave) * parts.to(tokens.dtype)[:, :, None])

    def expand(self, tokens: Tensor) -> Tensor:
        if self.owners is None or self.sizes is None or tokens.shape[1] < self.sizes.shape[1]:
            return tokens  # none was merged, or the prefix is read alone
        return take(tokens, self.owners)

    def expand_weights(self, weights: Tensor) -> Tensor:
        if self.owners is None or self.sizes is None:
            return weights
        B, H, rows, Q = weights.shape
        T = self.owners.shape[1]
        shared = weights / self.sizes.to(weights.dtype)[:, None, None]  # equally among a token's patches
        columns = shared.gather(3, self.owners[:, None, None].expand(B, H, rows, T))
        if rows != Q:
            return columns  # of the prefix alone
        return columns.gather(2, self.owners[:, None, :, None].expand(B, H, T, T))


def match(keys: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Find the pairs to merge, by keys of patches (B, N, hd), in float32.

    Returns indices: of the patches that stay (B, N - count), the first set before the second; of those that
    leave, all of the first set; and, among those that stay, of those that they join (B, count).
    """
    directions = F.normalize(keys.detach().float(), dim=-1)
    first, second = directions[:, 1::2], directions[:, ::2]
    likeness, nearest = (first @ second.mT).max(dim=2)  # (B, N // 2)
    order = likeness.argsort(dim=1, descending=True)
    merged, kept = order[:, :count], order[:, count:].sort(dim=1).values
    others = torch.arange(second.shape[1], device=keys.device).expand(keys.shape[0], -1)
    stay = torch.cat([2 * kept + 1, 2 * others], dim=1)
    return stay, 2 * merged + 1, kept.shape[1] + nearest.gather(1, merged)


class MergingAttention(SelfAttention):
    """Proportional attention, A = softmax(q k^T / sqrt(hd) + log s), equation 1."""

    def bias(self, k: Tensor, layout: Layout) -> Tensor | None:
        """log s, (B, 1, 1, Q), or None before the first merge; also hands the keys to the layout."""
        assert isinstance(layout, MergingLayout)
        layout.keys = k.mean(dim=1)
        return None if layout.sizes is None else layout.sizes.log()[:, None, None]
