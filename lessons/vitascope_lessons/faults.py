"""Common mistakes of each exercise: what they compute, and the hint for whoever computes the same.

A function with an exercise's name takes its inputs, and returns the outputs of wrong answers by their hint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Function = Callable[..., Tensor]
Faults = dict[str, Tensor | tuple[Tensor, ...]]


def _patches(images: Tensor, E: Tensor, P: int) -> Faults:
    B, C, H, W = images.shape
    tiles = images.reshape(B, C, H // P, P, W // P, P)

    def cut(*order: int) -> Tensor:
        return tiles.permute(*order).reshape(B, -1, C * P * P)  # (B, N, C * P * P)

    x_p = cut(0, 2, 4, 1, 3, 5)
    return {
        "a reshape alone does not cut patches: it takes pixels that follow each other in memory, along the "
        "rows of the whole image. Put the axes in order with `permute` before the last reshape": (
            cut(0, 1, 2, 3, 4, 5) @ E
        ),
        "the patches are numbered column by column; number them row by row": cut(0, 4, 2, 1, 3, 5) @ E,
        "within a patch, the channels come last; they come first: all of channel 0, then all of "
        "channel 1": cut(0, 2, 4, 3, 5, 1) @ E,
        "the pixels of each patch are transposed: within a patch, rows come before columns": cut(
            0, 2, 4, 1, 5, 3
        )
        @ E,
        "rows and columns are swapped, of the patches and within them": cut(0, 4, 2, 1, 5, 3) @ E,
        "these are the patches; the multiplication by E is missing": x_p,
        "swap the axes of patches and channels: (B, N, D)": (x_p @ E).mT,
        "join the rows and columns of patches to one axis: N patches": (x_p @ E).unflatten(1, (-1, W // P)),
        "keep the axis of the images: each image has its own patches": (x_p @ E).flatten(0, 1),
        "the channels stand before the patches, so that a row has pixels of one channel of several patches: "
        "put the rows and columns of patches first": cut(0, 1, 2, 4, 3, 5) @ E,
        "this is a map with rows and columns of patches: `flatten(2).transpose(1, 2)` makes a sequence": (
            x_p @ E
        ).mT.unflatten(2, (-1, W // P)),
    }


def _positions(embedded: Tensor, x_class: Tensor, E_pos: Tensor) -> Faults:
    def with_class(patches: Tensor) -> Tensor:
        return torch.cat([x_class.expand(len(patches), -1, -1), patches], dim=1)  # (B, N + 1, D)

    z = with_class(embedded)
    placed = with_class(embedded + E_pos[:, 1:])
    return {
        "the class token is missing": (embedded + E_pos[:, 1:], embedded + E_pos[:, :-1]),
        "the position embeddings are missing": z,
        "the class token needs its position embedding too: add E_pos after joining": placed,
        "the class token needs its position embedding too, the first one: add E_pos after "
        "joining": with_class(embedded + E_pos[:, :-1]),
        "the patches get their position embeddings twice": placed + E_pos,
        "the class token comes after the patches; put it first": (
            z.roll(-1, 1) + E_pos,
            (z + E_pos).roll(-1, 1),
        ),
        "position embeddings are added, not multiplied": z * E_pos,
        "the first token is empty: it should be x_class": F.pad(embedded, (0, 0, 1, 0)) + E_pos,
        "position embeddings are added to the tokens, not joined to them": torch.cat(
            [z, E_pos.expand(len(z), -1, -1)], dim=2
        ),
    }


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Faults:
    products, D_h = q @ k.mT, q.shape[-1]
    scores = products / D_h**0.5  # (B, heads, Q, T)
    A, powers = scores.softmax(-1), scores.exp()
    return {
        "the scale is missing: without 1/sqrt(D_h), the scores' standard deviation is sqrt(D_h) times "
        "larger, and softmax gives nearly all weight to one token": products.softmax(-1) @ v,
        "the scores are divided by D_h; divide them by its square root": (products / D_h).softmax(-1) @ v,
        "the scores are multiplied by sqrt(D_h); divide them by it": (products * D_h**0.5).softmax(-1) @ v,
        "the scores are divided by the root of the number of tokens; D_h is the width of a key, the last "
        "axis": (products / k.shape[-2] ** 0.5).softmax(-1) @ v,
        "the scores are divided by sqrt(D); D_h is the width of one head, D divided by the number of heads": (
            products / (q.shape[1] * D_h) ** 0.5
        ).softmax(-1)
        @ v,
        "the scale comes after the softmax, so that the weights do not sum to 1; scale the "
        "scores": products.softmax(-1) / D_h**0.5 @ v,
        "the weights sum to 1 over the queries, not over the keys: take the softmax over the last "
        "axis": scores.softmax(-2) @ v,
        "the weights sum to 1 over the heads, not over the keys: take the softmax over the last "
        "axis": scores.softmax(1) @ v,
        "the weights sum to 1 over the images, not over the keys: take the softmax over the last "
        "axis": scores.softmax(0) @ v,
        "the softmax is missing": scores @ v,
        "these are the weights A; the product with the values is missing": A,
        "queries and keys are swapped: row i of the scores belongs to query i": scores.mT.softmax(-1) @ v,
        "the weights are transposed before the product with the values": A.mT @ v,
        "the weights multiply the keys; they should multiply the values": A @ k,
        "this is the logarithm of the weights; use `softmax`": scores.log_softmax(-1) @ v,
        "the weights of a query do not sum to 1: use softmax, not the sigmoid": scores.sigmoid() @ v,
        "`** 0.5` is the square root; `* 0.5` is a half": (
            (products / D_h * 0.5).softmax(-1) @ v,
            (products / (D_h * 0.5)).softmax(-1) @ v,
        ),
        "the weights of a query do not sum to 1: divide the exponentials by their sum over the keys": (
            powers @ v,
            powers / powers.sum() @ v,
        ),
    }


def _multi_head(z: Tensor, U_qkv: Tensor, U_msa: Tensor, heads: int, attention: Function) -> Faults:
    numbers = z @ U_qkv  # (B, T, 3 D)

    def split(heads: int) -> Tensor:
        return numbers.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)  # (3, B, heads, T, D_h)

    def joined(answers: Tensor) -> Tensor:
        return answers.transpose(1, 2).flatten(2) @ U_msa

    parts = q, k, v = split(heads).unbind()
    answers = attention(q, k, v)  # (B, heads, T, D_h)
    reshaped = [part.reshape(len(z), heads, z.shape[1], -1) for part in numbers.chunk(3, -1)]
    orders = ((1, 0, 2), (0, 2, 1), (2, 1, 0), (1, 2, 0), (2, 0, 1))
    return {
        "the multiplication by U_msa is missing": answers.transpose(1, 2).flatten(2),
        "the heads' results are joined in the wrong order: swap the axes of heads and tokens before you "
        "join, so that each token has the results of its own heads": answers.reshape(z.shape) @ U_msa,
        "the 3 D numbers are split by head first; split them into queries, keys and values first, then by "
        "head": joined(attention(*numbers.unflatten(-1, (heads, 3, -1)).permute(3, 0, 2, 1, 4))),
        "a head has every k-th number; it should have D_h numbers that follow each other": joined(
            attention(*numbers.unflatten(-1, (3, -1, heads)).permute(2, 0, 4, 1, 3))
        ),
        "the results of the heads are interleaved; put them side by side": answers.permute(
            0, 2, 3, 1
        ).flatten(2)
        @ U_msa,
        "a reshape alone mixes tokens and heads: split the last axis, then swap the axes of tokens and "
        "heads": joined(attention(*reshaped)),
        "this is one head of width D: split queries, keys and values into heads": joined(
            attention(*split(1))
        ),
        "queries, keys and values are mixed up: they are the first, second and third D numbers": tuple(
            joined(attention(*(parts[part] for part in order))) for order in orders
        ),
        "attention runs over the heads of one token: the axis of tokens has to be the last but "
        "one": attention(*(part.transpose(1, 2) for part in parts)).flatten(2) @ U_msa,
        "every head has the result of the first one": joined(answers[:, [0] * heads]),
        "the residual connection is in the block, exercise 6: do not add z here": joined(answers) + z,
        "these are the values: call `attention(q, k, v)`": joined(v),
        "U_msa is transposed: multiply by U_msa itself": answers.transpose(1, 2).flatten(2) @ U_msa.mT,
    }


def _mlp(z: Tensor, W_1: Tensor, W_2: Tensor) -> Faults:
    x = z @ W_1  # (B, T, M)
    return {
        "the GELU is missing: two matrices without it are the same as one": x @ W_2,
        "this is a ReLU; use GELU": x.relu() @ W_2,
        "this is SiLU, x sigmoid(x); use GELU": F.silu(x) @ W_2,
        "this is tanh; use GELU": x.tanh() @ W_2,
        "this is the sigmoid; use GELU": x.sigmoid() @ W_2,
        'this is the tanh approximation of GELU; use the exact one, without `approximate="tanh"`': F.gelu(
            x, approximate="tanh"
        )
        @ W_2,
        "this is the sigmoid approximation of GELU; use the exact one": x * (1.702 * x).sigmoid() @ W_2,
        "the GELU comes after the second matrix; put it between the two": F.gelu(x @ W_2),
        "the GELU comes before the first matrix; put it between the two": F.gelu(z) @ W_1 @ W_2,
        "there is a second GELU after W_2; leave it out": F.gelu(F.gelu(x) @ W_2),
        "the second matrix, W_2, is missing": F.gelu(x),
        "the residual connection is in the block, exercise 6: do not add z here": F.gelu(x) @ W_2 + z,
    }


def _block(z: Tensor, LN_1: Function, MSA: Function, LN_2: Function, MLP: Function) -> Faults:
    def second(m: Tensor) -> Tensor:
        return MLP(LN_2(m)) + m

    a = MSA(LN_1(z))
    m = a + z  # the right first half
    bare, normalized = MSA(z) + z, LN_1(MSA(z) + z)
    late = LN_1(MSA(z)) + z
    twice = LN_2(a + LN_1(z))
    return {
        "both residual connections are missing: each half adds its input": MLP(LN_2(a)),
        "the residual connection of the first half is missing: add z to MSA(LN(z))": second(a),
        "the residual connection of the second half is missing: add z' to MLP(LN(z'))": MLP(LN_2(m)),
        "the second half adds z, the input of the block; it should add z', the result of the first half": MLP(
            LN_2(m)
        )
        + z,
        "the MLP reads z, the input of the block; it should read z', the result of the first half": MLP(
            LN_2(z)
        )
        + m,
        "attention is missing, or its result is lost: the second half should read z'": second(z),
        "the second half is missing: MLP(LN(z')) + z'": m,
        "this is a post-norm block, which normalizes the sums; here the layer norm comes before MSA and "
        "MLP": LN_2(MLP(normalized) + normalized),
        "the first half normalizes the sum; the layer norm comes before MSA, and nothing after it": second(
            normalized
        ),
        "the second half normalizes the sum; the layer norm comes before the MLP, and nothing after it": LN_2(
            MLP(m) + m
        ),
        "in the first half, the layer norm comes after MSA; put it before": second(late),
        "the layer norm comes after MSA and MLP; put it before them": LN_2(MLP(late)) + late,
        "both layer norms are missing": MLP(bare) + bare,
        "the layer norm before attention, LN_1, is missing": second(bare),
        "the layer norm before the MLP, LN_2, is missing": MLP(m) + m,
        "the second half uses the layer norm of the first; use LN_2": MLP(LN_1(m)) + m,
        "the two layer norms are swapped": MLP(LN_1(MSA(LN_2(z)) + z)) + MSA(LN_2(z)) + z,
        "the first half adds the normalized tokens; it should add z itself": second(a + LN_1(z)),
        "the second half adds the normalized tokens; it should add z' itself": MLP(LN_2(m)) + LN_2(m),
        "both halves add the normalized tokens; each should add its input itself": MLP(twice) + twice,
        "one residual connection spans both halves; each half needs its own": MLP(LN_2(a)) + z,
        "the MLP comes first; attention comes first": (
            MSA(LN_1(second(z))) + second(z),
            MSA(LN_2(MLP(LN_1(z)) + z)) + MLP(LN_1(z)) + z,
        ),
    }


def _pool(z: Tensor, LN: Function) -> Faults:
    return {
        "this is the mean of all tokens; take the class token, the first one": (LN(z).mean(1), LN(z.mean(1))),
        "this is the mean of the patches; take the class token, the first one": LN(z[:, 1:]).mean(1),
        "this is the last token; the class token is the first one": LN(z[:, -1]),
        "this is the first patch; the class token stands before it, at 0": LN(z[:, 1]),
        "the layer norm is missing": z[:, 0],
        "this is a layer norm without learned weights; call LN": F.layer_norm(z[:, 0], z.shape[-1:]),
        "the layer norm is applied twice": LN(LN(z[:, 0])),
        "this is the first image; take the first token of every image: the tokens are the second axis": LN(
            z[0]
        ),
        "remove the axis of tokens: `z[:, 0]` and not `z[:, :1]`": LN(z[:, :1]),
        "these are all tokens; take the class token of each image": LN(z),
        "this is the maximum over the tokens; take the class token": LN(z).amax(1),
        "this is channel 0 of every token; the tokens are the second axis": z[:, :, 0],
    }


def _loss(logits: Tensor, labels: Tensor) -> Faults:
    images = range(len(labels))
    each = F.cross_entropy(logits, labels, reduction="none")  # (B,)
    p, log_p = logits.softmax(-1), logits.log_softmax(-1)
    right = logits.argmax(-1) == labels
    return {
        "this is the sum over the images; take the mean": each.sum(),
        "take the mean over the images": (each, each[:, None]),
        "the sign is wrong: training minimizes the loss, and -log p is never below 0": -each.mean(),
        "the logarithm is missing": -p[images, labels].mean(),
        "the mean is inside the logarithm; take the logarithm of each image, then the mean": -p[
            images, labels
        ]
        .mean()
        .log(),
        "the softmax is missing: these are logits, not the logarithms of probabilities": -logits[
            images, labels
        ].mean(),
        "the probabilities sum to 1 over the images, not over the classes: use the last "
        "axis": -logits.log_softmax(0)[images, labels].mean(),
        "the softmax is applied twice": F.cross_entropy(p, labels),
        "this is the mean over all classes; take the class of the label": -log_p.mean(),
        "this is the sum over all classes; take the class of the label": -log_p.sum(-1).mean(),
        "`[:, labels]` takes the labels of all images from every row; take one number per row, `[rows, "
        "labels]`": -log_p[:, labels].mean(),
        "this is the logarithm to base 2; use the natural one": each.mean() / torch.tensor(2.0).log(),
        "this is the logarithm to base 10; use the natural one": each.mean() / torch.tensor(10.0).log(),
        "this is divided by the number of classes too; take the mean over the images only": each.mean()
        / logits.shape[1],
        "this is the share of wrong images, which has no gradient; take the mean of -log p(label)": (~right)
        .float()
        .mean(),
        "this is the accuracy, which has no gradient; take the mean of -log p(label)": right.float().mean(),
    }


FAULTS: dict[str, Callable[..., Faults]] = {
    function.__name__.removeprefix("_"): function
    for function in (_patches, _positions, _attention, _multi_head, _mlp, _block, _pool, _loss)
}
"""By exercise."""


def faults(name: str, inputs: Sequence[Any]) -> Iterator[tuple[str, Tensor]]:
    """The hint and the output of each fault of an exercise."""
    for hint, outputs in FAULTS[name](*inputs).items():
        for output in (outputs,) if isinstance(outputs, Tensor) else outputs:
            yield hint, output
