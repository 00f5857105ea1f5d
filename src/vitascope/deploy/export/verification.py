"""Comparison of an exported model's outputs with those of the model in torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vitascope.data.decoding import ImageSource
from vitascope.data.preprocess import Preprocess
from vitascope.errors import UserError
from vitascope.model.vision_model import VisionModel
from vitascope.predict.runtimes import ExportedEngine
from vitascope.weights.agreement import TOLERANCE, Agreement, Compared, agreement

TOLERANCES = {"tensors": TOLERANCE, "pictures": 1e-2}
"""The largest difference of outputs that counts as rounding, as a share of the largest one, by input mode.

Pixels that a resize rounds the other way make about 1e-4.
"""


def check_agreement(found: Agreement, name: str) -> None:
    """Reject an exported model whose outputs differ from its model's."""
    if not found.is_rounding:
        raise UserError(
            f"{name} is not kept, because its outputs differ from the model's: {found.summary}; differences "
            f"of up to {found.tolerance * found.scale:.2g} are allowed"
        )


@torch.inference_mode()
def compare_outputs(
    engine: ExportedEngine, model: VisionModel, preprocess: Preprocess, pictures: Sequence[ImageSource]
) -> Agreement:
    """Compare an exported model with the model in torch, picture by picture; the first also twice at once."""
    classifies = engine.num_classes > 0

    def outputs(given: Tensor) -> Tensor:
        return engine.answers(given)[0] if classifies else engine.outputs(given)

    own, other = [], []
    for picture in pictures:
        ready = torch.from_numpy(preprocess.pixels(picture))[None]  # (1, C, h, w)
        given = ready
        if engine.input == "pictures":
            given = torch.from_numpy(preprocess.whole_pixels(picture))[None]  # (1, C, H, W)
        images = preprocess.normalize(ready)
        own.append(model(images) if classifies else model.embed(images))  # (1, K) or (1, D)
        other.append(outputs(given))
        if len(own) == 1 and not torch.allclose(
            outputs(given.expand(2, -1, -1, -1)), other[0].expand(2, -1), atol=1e-4, rtol=1e-4
        ):
            raise UserError(
                f"{engine.path.name} is not kept, because a batch of two gets other outputs than one picture"
            )
    compared: Compared = "logits" if classifies else "features"
    return agreement(torch.cat(own), torch.cat(other), TOLERANCES[engine.input], compared)


def sample_pictures() -> list[ImageSource]:
    """The two photographs in scikit-learn and parts of them, 16 uint8 (H, W, C) of 8 sizes."""
    from sklearn.datasets import load_sample_images

    found: list[ImageSource] = []
    for photograph in load_sample_images().images:  # a temple and a flower, (427, 640, 3)
        H, W = photograph.shape[:2]
        quarters = [
            photograph[top : top + H // 2, left : left + W // 2]
            for top in (0, H // 2)
            for left in (0, W // 2)
        ]
        middle, strip = photograph[:, W // 4 : W // 4 + H], photograph[H // 3 : 2 * H // 3]
        small = photograph[H // 2 : H // 2 + 90, W // 3 : W // 3 + 120]  # below most models' input size
        found += [photograph, *quarters, middle, strip, small]
    return found
