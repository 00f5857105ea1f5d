"""Common mistakes of each exercise: what they compute, and the hint for whoever computes the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Function = Callable[..., Tensor]


@dataclasses.dataclass(frozen=True)
class Fault:
    """A wrong version of an exercise's function. An answer with the same output gets the hint."""

    function: Function
    hint: str


def cut(images: Tensor, P: int, *order: int) -> Tensor:
    """Patches as rows, from the axes (B, C, rows, P, columns, P) in some order: (B, N, C * P * P)."""
    B, C, H, W = images.shape
    tiles = images.reshape(B, C, H // P, P, W // P, P)
    return tiles.permute(*order).reshape(B, -1, C * P * P)


def with_class(embedded: Tensor, x_class: Tensor) -> Tensor:
    """The class token before the patches: (B, N + 1, D)."""
    return torch.cat([x_class.expand(len(embedded), -1, -1), embedded], dim=1)


def scores(q: Tensor, k: Tensor) -> Tensor:
    """q k^T / sqrt(D_h): (B, heads, Q, T)."""
    return q @ k.mT / q.shape[-1] ** 0.5


def split(z: Tensor, U_qkv: Tensor, heads: int) -> tuple[Tensor, ...]:
    """Queries, keys and values, (B, heads, T, D_h) each."""
    return (z @ U_qkv).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind()


def joined(answers: Tensor) -> Tensor:
    """(B, heads, T, D_h) -> (B, T, D)."""
    return answers.transpose(1, 2).flatten(2)


ROWS = (0, 2, 4, 1, 3, 5)
"""The right order of the axes in `cut`."""

FAULTS: dict[str, tuple[Fault, ...]] = {
    "patches": (
        Fault(
            lambda images, E, P: cut(images, P, *range(6)) @ E,
            "a reshape alone does not cut patches: it takes pixels that follow each other in memory, along "
            "the rows of the whole image. Put the axes in order with `permute` before the last reshape",
        ),
        Fault(
            lambda images, E, P: cut(images, P, 0, 4, 2, 1, 3, 5) @ E,
            "the patches are numbered column by column; number them row by row",
        ),
        Fault(
            lambda images, E, P: cut(images, P, 0, 2, 4, 3, 5, 1) @ E,
            "within a patch, the channels come last; they come first: all of channel 0, then all of "
            "channel 1",
        ),
        Fault(
            lambda images, E, P: cut(images, P, 0, 2, 4, 1, 5, 3) @ E,
            "the pixels of each patch are transposed: within a patch, rows come before columns",
        ),
        Fault(
            lambda images, E, P: cut(images, P, 0, 4, 2, 1, 5, 3) @ E,
            "rows and columns are swapped, of the patches and within them",
        ),
        Fault(
            lambda images, E, P: cut(images, P, *ROWS),
            "these are the patches; the multiplication by E is missing",
        ),
        Fault(
            lambda images, E, P: (cut(images, P, *ROWS) @ E).mT,
            "swap the axes of patches and channels: (B, N, D)",
        ),
        Fault(
            lambda images, E, P: (cut(images, P, *ROWS) @ E).unflatten(1, (-1, images.shape[3] // P)),
            "join the rows and columns of patches to one axis: N patches",
        ),
        Fault(
            lambda images, E, P: (cut(images, P, *ROWS) @ E).flatten(0, 1),
            "keep the axis of the images: each image has its own patches",
        ),
        Fault(
            lambda images, E, P: cut(images, P, 0, 1, 2, 4, 3, 5) @ E,
            "the channels stand before the patches, so that a row has pixels of one channel of several "
            "patches: put the rows and columns of patches first",
        ),
        Fault(
            lambda images, E, P: (cut(images, P, *ROWS) @ E).mT.unflatten(2, (-1, images.shape[3] // P)),
            "this is a map with rows and columns of patches: `flatten(2).transpose(1, 2)` makes a sequence",
        ),
    ),
    "positions": (
        Fault(
            lambda embedded, x_class, E_pos: embedded + E_pos[:, 1:],
            "the class token is missing",
        ),
        Fault(
            lambda embedded, x_class, E_pos: embedded + E_pos[:, :-1],
            "the class token is missing",
        ),
        Fault(
            lambda embedded, x_class, E_pos: with_class(embedded, x_class),
            "the position embeddings are missing",
        ),
        Fault(
            lambda embedded, x_class, E_pos: with_class(embedded + E_pos[:, 1:], x_class),
            "the class token needs its position embedding too: add E_pos after joining",
        ),
        Fault(
            lambda embedded, x_class, E_pos: with_class(embedded + E_pos[:, :-1], x_class),
            "the class token needs its position embedding too, the first one: add E_pos after joining",
        ),
        Fault(
            lambda embedded, x_class, E_pos: with_class(embedded + E_pos[:, 1:], x_class) + E_pos,
            "the patches get their position embeddings twice",
        ),
        Fault(
            lambda embedded, x_class, E_pos: with_class(embedded, x_class).roll(-1, 1) + E_pos,
            "the class token comes after the patches; put it first",
        ),
        Fault(
            lambda embedded, x_class, E_pos: (with_class(embedded, x_class) + E_pos).roll(-1, 1),
            "the class token comes after the patches; put it first",
        ),
        Fault(
            lambda embedded, x_class, E_pos: with_class(embedded, x_class) * E_pos,
            "position embeddings are added, not multiplied",
        ),
        Fault(
            lambda embedded, x_class, E_pos: with_class(embedded, 0 * x_class) + E_pos,
            "the first token is empty: it should be x_class",
        ),
        Fault(
            lambda embedded, x_class, E_pos: torch.cat(
                [with_class(embedded, x_class), E_pos.expand(len(embedded), -1, -1)], 2
            ),
            "position embeddings are added to the tokens, not joined to them",
        ),
    ),
    "attention": (
        Fault(
            lambda q, k, v: (q @ k.mT).softmax(-1) @ v,
            "the scale is missing: without 1/sqrt(D_h), the scores' standard deviation is sqrt(D_h) times "
            "larger, and softmax gives nearly all weight to one token",
        ),
        Fault(
            lambda q, k, v: (q @ k.mT / q.shape[-1]).softmax(-1) @ v,
            "the scores are divided by D_h; divide them by its square root",
        ),
        Fault(
            lambda q, k, v: (q @ k.mT * q.shape[-1] ** 0.5).softmax(-1) @ v,
            "the scores are multiplied by sqrt(D_h); divide them by it",
        ),
        Fault(
            lambda q, k, v: (q @ k.mT / k.shape[-2] ** 0.5).softmax(-1) @ v,
            "the scores are divided by the root of the number of tokens; D_h is the width of a key, "
            "the last axis",
        ),
        Fault(
            lambda q, k, v: (q @ k.mT / (q.shape[1] * q.shape[-1]) ** 0.5).softmax(-1) @ v,
            "the scores are divided by sqrt(D); D_h is the width of one head, D divided by the "
            "number of heads",
        ),
        Fault(
            lambda q, k, v: (q @ k.mT).softmax(-1) / q.shape[-1] ** 0.5 @ v,
            "the scale comes after the softmax, so that the weights do not sum to 1; scale the scores",
        ),
        Fault(
            lambda q, k, v: scores(q, k).softmax(-2) @ v,
            "the weights sum to 1 over the queries, not over the keys: take the softmax over the last axis",
        ),
        Fault(
            lambda q, k, v: scores(q, k).softmax(1) @ v,
            "the weights sum to 1 over the heads, not over the keys: take the softmax over the last axis",
        ),
        Fault(
            lambda q, k, v: scores(q, k).softmax(0) @ v,
            "the weights sum to 1 over the images, not over the keys: take the softmax over the last axis",
        ),
        Fault(lambda q, k, v: scores(q, k) @ v, "the softmax is missing"),
        Fault(
            lambda q, k, v: scores(q, k).softmax(-1),
            "these are the weights A; the product with the values is missing",
        ),
        Fault(
            lambda q, k, v: scores(k, q).softmax(-1) @ v,
            "queries and keys are swapped: row i of the scores belongs to query i",
        ),
        Fault(
            lambda q, k, v: scores(q, k).softmax(-1).mT @ v,
            "the weights are transposed before the product with the values",
        ),
        Fault(
            lambda q, k, v: scores(q, k).softmax(-1) @ k,
            "the weights multiply the keys; they should multiply the values",
        ),
        Fault(
            lambda q, k, v: scores(q, k).log_softmax(-1) @ v,
            "this is the logarithm of the weights; use `softmax`",
        ),
        Fault(
            lambda q, k, v: scores(q, k).sigmoid() @ v,
            "the weights of a query do not sum to 1: use softmax, not the sigmoid",
        ),
        *(
            Fault(function, "`** 0.5` is the square root; `* 0.5` is a half")
            for function in (
                lambda q, k, v: (q @ k.mT / q.shape[-1] * 0.5).softmax(-1) @ v,
                lambda q, k, v: (q @ k.mT / (q.shape[-1] * 0.5)).softmax(-1) @ v,
            )
        ),
        *(
            Fault(
                function,
                "the weights of a query do not sum to 1: divide the exponentials by their sum over the keys",
            )
            for function in (
                lambda q, k, v: scores(q, k).exp() @ v,
                lambda q, k, v: scores(q, k).exp() / scores(q, k).exp().sum() @ v,
            )
        ),
    ),
    "multi_head": (
        Fault(
            lambda z, U_qkv, U_msa, heads, attention: joined(attention(*split(z, U_qkv, heads))),
            "the multiplication by U_msa is missing",
        ),
        Fault(
            lambda z, U_qkv, U_msa, heads, attention: (
                attention(*split(z, U_qkv, heads)).reshape(z.shape) @ U_msa
            ),
            "the heads' results are joined in the wrong order: swap the axes of heads and tokens before you "
            "join, so that each token has the results of its own heads",
        ),
        Fault(
            lambda z, U_qkv, U_msa, heads, attention: (
                joined(attention(*(z @ U_qkv).unflatten(-1, (heads, 3, -1)).permute(3, 0, 2, 1, 4))) @ U_msa
            ),
            "the 3 D numbers are split by head first; split them into queries, keys and values "
            "first, then by head",
        ),
        Fault(
            lambda z, U_qkv, U_msa, heads, attention: (
                joined(attention(*(z @ U_qkv).unflatten(-1, (3, -1, heads)).permute(2, 0, 4, 1, 3))) @ U_msa
            ),
            "a head has every k-th number; it should have D_h numbers that follow each other",
        ),
        Fault(
            lambda z, U_qkv, U_msa, heads, attention: (
                attention(*split(z, U_qkv, heads)).permute(0, 2, 3, 1).flatten(2) @ U_msa
            ),
            "the results of the heads are interleaved; put them side by side",
        ),
        Fault(
            lambda z, U_qkv, U_msa, heads, attention: (
                joined(
                    attention(
                        *(part.reshape(len(z), heads, z.shape[1], -1) for part in (z @ U_qkv).chunk(3, -1))
                    )
                )
                @ U_msa
            ),
            "a reshape alone mixes tokens and heads: split the last axis, then swap the axes of "
            "tokens and heads",
        ),
        Fault(
            lambda z, U_qkv, U_msa, heads, attention: joined(attention(*split(z, U_qkv, 1))) @ U_msa,
            "this is one head of width D: split queries, keys and values into heads",
        ),
        *(
            Fault(
                lambda z, U_qkv, U_msa, heads, attention, order=order: (
                    joined(attention(*(split(z, U_qkv, heads)[part] for part in order))) @ U_msa
                ),
                "queries, keys and values are mixed up: they are the first, second and third D numbers",
            )
            for order in ((1, 0, 2), (0, 2, 1), (2, 1, 0), (1, 2, 0), (2, 0, 1))
        ),
        Fault(
            lambda z, U_qkv, U_msa, heads, attention: (
                attention(*(part.transpose(1, 2) for part in split(z, U_qkv, heads))).flatten(2) @ U_msa
            ),
            "attention runs over the heads of one token: the axis of tokens has to be the last but one",
        ),
        Fault(
            lambda z, U_qkv, U_msa, heads, attention: (
                joined(attention(*split(z, U_qkv, heads))[:, [0] * heads]) @ U_msa
            ),
            "every head has the result of the first one",
        ),
        Fault(
            lambda z, U_qkv, U_msa, heads, attention: joined(attention(*split(z, U_qkv, heads))) @ U_msa + z,
            "the residual connection is in the block, exercise 6: do not add z here",
        ),
        Fault(
            lambda z, U_qkv, U_msa, heads, attention: joined(split(z, U_qkv, heads)[2]) @ U_msa,
            "these are the values: call `attention(q, k, v)`",
        ),
        Fault(
            lambda z, U_qkv, U_msa, heads, attention: joined(attention(*split(z, U_qkv, heads))) @ U_msa.mT,
            "U_msa is transposed: multiply by U_msa itself",
        ),
    ),
    "mlp": (
        Fault(
            lambda z, W_1, W_2: z @ W_1 @ W_2,
            "the GELU is missing: two matrices without it are the same as one",
        ),
        Fault(lambda z, W_1, W_2: (z @ W_1).relu() @ W_2, "this is a ReLU; use GELU"),
        Fault(lambda z, W_1, W_2: F.silu(z @ W_1) @ W_2, "this is SiLU, x sigmoid(x); use GELU"),
        Fault(lambda z, W_1, W_2: (z @ W_1).tanh() @ W_2, "this is tanh; use GELU"),
        Fault(lambda z, W_1, W_2: (z @ W_1).sigmoid() @ W_2, "this is the sigmoid; use GELU"),
        Fault(
            lambda z, W_1, W_2: F.gelu(z @ W_1, approximate="tanh") @ W_2,
            'this is the tanh approximation of GELU; use the exact one, without `approximate="tanh"`',
        ),
        Fault(
            lambda z, W_1, W_2: (x := z @ W_1) * (1.702 * x).sigmoid() @ W_2,
            "this is the sigmoid approximation of GELU; use the exact one",
        ),
        Fault(
            lambda z, W_1, W_2: F.gelu(z @ W_1 @ W_2),
            "the GELU comes after the second matrix; put it between the two",
        ),
        Fault(
            lambda z, W_1, W_2: F.gelu(z) @ W_1 @ W_2,
            "the GELU comes before the first matrix; put it between the two",
        ),
        Fault(
            lambda z, W_1, W_2: F.gelu(F.gelu(z @ W_1) @ W_2),
            "there is a second GELU after W_2; leave it out",
        ),
        Fault(lambda z, W_1, W_2: F.gelu(z @ W_1), "the second matrix, W_2, is missing"),
        Fault(
            lambda z, W_1, W_2: F.gelu(z @ W_1) @ W_2 + z,
            "the residual connection is in the block, exercise 6: do not add z here",
        ),
    ),
    "block": (
        Fault(
            lambda z, LN_1, MSA, LN_2, MLP: MLP(LN_2(MSA(LN_1(z)))),
            "both residual connections are missing: each half adds its input",
        ),
        Fault(
            lambda z, LN_1, MSA, LN_2, MLP: (lambda m: MLP(LN_2(m)) + m)(MSA(LN_1(z))),
            "the residual connection of the first half is missing: add z to MSA(LN(z))",
        ),
        Fault(
            lambda z, LN_1, MSA, LN_2, MLP: MLP(LN_2(MSA(LN_1(z)) + z)),
            "the residual connection of the second half is missing: add z' to MLP(LN(z'))",
        ),
        Fault(
            lambda z, LN_1, MSA, LN_2, MLP: MLP(LN_2(MSA(LN_1(z)) + z)) + z,
            "the second half adds z, the input of the block; it should add z', the result of the first half",
        ),
        Fault(
            lambda z, LN_1, MSA, LN_2, MLP: MLP(LN_2(z)) + MSA(LN_1(z)) + z,
            "the MLP reads z, the input of the block; it should read z', the result of the first half",
        ),
        Fault(
            lambda z, LN_1, MSA, LN_2, MLP: MLP(LN_2(z)) + z,
            "attention is missing, or its result is lost: the second half should read z'",
        ),
        Fault(
            lambda z, LN_1, MSA, LN_2, MLP: MSA(LN_1(z)) + z,
            "the second half is missing: MLP(LN(z')) + z'",
        ),
        Fault(
            lambda z, LN_1, MSA, LN_2, MLP: (lambda m: LN_2(MLP(m) + m))(LN_1(MSA(z) + z)),
            "this is a post-norm block, which normalizes the sums; here the layer norm comes before "
            "MSA and MLP",
        ),
        Fault(
            lambda z, LN_1, MSA, LN_2, MLP: (lambda m: MLP(LN_2(m)) + m)(LN_1(MSA(z) + z)),
            "the first half normalizes the sum; the layer norm comes before MSA, and nothing after it",
        ),
        Fault(
            lambda z, LN_1, MSA, LN_2, MLP: (lambda m: LN_2(MLP(m) + m))(MSA(LN_1(z)) + z),
            "the second half normalizes the sum; the layer norm comes before the MLP, and nothing after it",
        ),
        Fault(
            lambda z, LN_1, MSA, LN_2, MLP: (lambda m: MLP(LN_2(m)) + m)(LN_1(MSA(z)) + z),
            "in the first half, the layer norm comes after MSA; put it before",
        ),
        Fault(
            lambda z, LN_1, MSA, LN_2, MLP: (lambda m: LN_2(MLP(m)) + m)(LN_1(MSA(z)) + z),
            "the layer norm comes after MSA and MLP; put it before them",
        ),
        Fault(
            lambda z, LN_1, MSA, LN_2, MLP: (lambda m: MLP(m) + m)(MSA(z) + z),
            "both layer norms are missing",
        ),
        Fault(
            lambda z, LN_1, MSA, LN_2, MLP: (lambda m: MLP(LN_2(m)) + m)(MSA(z) + z),
            "the layer norm before attention, LN_1, is missing",
        ),
        Fault(
            lambda z, LN_1, MSA, LN_2, MLP: (lambda m: MLP(m) + m)(MSA(LN_1(z)) + z),
            "the layer norm before the MLP, LN_2, is missing",
        ),
        Fault(
            lambda z, LN_1, MSA, LN_2, MLP: (lambda m: MLP(LN_1(m)) + m)(MSA(LN_1(z)) + z),
            "the second half uses the layer norm of the first; use LN_2",
        ),
        Fault(
            lambda z, LN_1, MSA, LN_2, MLP: (lambda m: MLP(LN_1(m)) + m)(MSA(LN_2(z)) + z),
            "the two layer norms are swapped",
        ),
        Fault(
            lambda z, LN_1, MSA, LN_2, MLP: (lambda m: MLP(LN_2(m)) + m)(MSA(LN_1(z)) + LN_1(z)),
            "the first half adds the normalized tokens; it should add z itself",
        ),
        Fault(
            lambda z, LN_1, MSA, LN_2, MLP: (lambda m: MLP(LN_2(m)) + LN_2(m))(MSA(LN_1(z)) + z),
            "the second half adds the normalized tokens; it should add z' itself",
        ),
        Fault(
            lambda z, LN_1, MSA, LN_2, MLP: (lambda m: MLP(m) + m)(LN_2(MSA(LN_1(z)) + LN_1(z))),
            "both halves add the normalized tokens; each should add its input itself",
        ),
        Fault(
            lambda z, LN_1, MSA, LN_2, MLP: MLP(LN_2(MSA(LN_1(z)))) + z,
            "one residual connection spans both halves; each half needs its own",
        ),
        *(
            Fault(function, "the MLP comes first; attention comes first")
            for function in (
                lambda z, LN_1, MSA, LN_2, MLP: (lambda m: MSA(LN_1(m)) + m)(MLP(LN_2(z)) + z),
                lambda z, LN_1, MSA, LN_2, MLP: (lambda m: MSA(LN_2(m)) + m)(MLP(LN_1(z)) + z),
            )
        ),
    ),
    "pool": (
        Fault(
            lambda z, LN: LN(z).mean(1),
            "this is the mean of all tokens; take the class token, the first one",
        ),
        Fault(
            lambda z, LN: LN(z.mean(1)),
            "this is the mean of all tokens; take the class token, the first one",
        ),
        Fault(
            lambda z, LN: LN(z[:, 1:]).mean(1),
            "this is the mean of the patches; take the class token, the first one",
        ),
        Fault(lambda z, LN: LN(z[:, -1]), "this is the last token; the class token is the first one"),
        Fault(lambda z, LN: LN(z[:, 1]), "this is the first patch; the class token stands before it, at 0"),
        Fault(lambda z, LN: z[:, 0], "the layer norm is missing"),
        Fault(
            lambda z, LN: F.layer_norm(z[:, 0], z.shape[-1:]),
            "this is a layer norm without learned weights; call LN",
        ),
        Fault(
            lambda z, LN: LN(LN(z[:, 0])),
            "the layer norm is applied twice",
        ),
        Fault(
            lambda z, LN: LN(z[0]),
            "this is the first image; take the first token of every image: the tokens are the second axis",
        ),
        Fault(
            lambda z, LN: LN(z[:, :1]),
            "remove the axis of tokens: `z[:, 0]` and not `z[:, :1]`",
        ),
        Fault(lambda z, LN: LN(z), "these are all tokens; take the class token of each image"),
        Fault(lambda z, LN: LN(z).amax(1), "this is the maximum over the tokens; take the class token"),
        Fault(lambda z, LN: z[:, :, 0], "this is channel 0 of every token; the tokens are the second axis"),
    ),
    "loss": (
        Fault(
            lambda logits, labels: F.cross_entropy(logits, labels, reduction="sum"),
            "this is the sum over the images; take the mean",
        ),
        Fault(
            lambda logits, labels: F.cross_entropy(logits, labels, reduction="none"),
            "take the mean over the images",
        ),
        Fault(
            lambda logits, labels: -F.cross_entropy(logits, labels),
            "the sign is wrong: training minimizes the loss, and -log p is never below 0",
        ),
        Fault(
            lambda logits, labels: -logits.softmax(-1)[range(len(labels)), labels].mean(),
            "the logarithm is missing",
        ),
        Fault(
            lambda logits, labels: -logits.softmax(-1)[range(len(labels)), labels].mean().log(),
            "the mean is inside the logarithm; take the logarithm of each image, then the mean",
        ),
        Fault(
            lambda logits, labels: -logits[range(len(labels)), labels].mean(),
            "the softmax is missing: these are logits, not the logarithms of probabilities",
        ),
        Fault(
            lambda logits, labels: -logits.log_softmax(0)[range(len(labels)), labels].mean(),
            "the probabilities sum to 1 over the images, not over the classes: use the last axis",
        ),
        Fault(
            lambda logits, labels: F.cross_entropy(logits.softmax(-1), labels),
            "the softmax is applied twice",
        ),
        Fault(
            lambda logits, labels: -logits.log_softmax(-1).mean(),
            "this is the mean over all classes; take the class of the label",
        ),
        Fault(
            lambda logits, labels: -logits.log_softmax(-1).sum(-1).mean(),
            "this is the sum over all classes; take the class of the label",
        ),
        Fault(
            lambda logits, labels: -logits.log_softmax(-1)[:, labels].mean(),
            "`[:, labels]` takes the labels of all images from every row; take one number per row, "
            "`[rows, labels]`",
        ),
        Fault(
            lambda logits, labels: F.cross_entropy(logits, labels) / torch.tensor(2.0).log(),
            "this is the logarithm to base 2; use the natural one",
        ),
        Fault(
            lambda logits, labels: F.cross_entropy(logits, labels) / torch.tensor(10.0).log(),
            "this is the logarithm to base 10; use the natural one",
        ),
        Fault(
            lambda logits, labels: F.cross_entropy(logits, labels) / logits.shape[1],
            "this is divided by the number of classes too; take the mean over the images only",
        ),
        Fault(
            lambda logits, labels: F.cross_entropy(logits, labels, reduction="none")[:, None],
            "take the mean over the images",
        ),
        Fault(
            lambda logits, labels: (logits.argmax(-1) != labels).float().mean(),
            "this is the share of wrong images, which has no gradient; take the mean of -log p(label)",
        ),
        Fault(
            lambda logits, labels: (logits.argmax(-1) == labels).float().mean(),
            "this is the accuracy, which has no gradient; take the mean of -log p(label)",
        ),
    ),
}
"""By exercise."""
