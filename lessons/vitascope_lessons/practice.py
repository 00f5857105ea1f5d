"""Train a model with a reader's functions on the digits."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitascope.data.datasets import open_data
from vitascope.data.splits import ImageSet
from vitascope.language import say
from vitascope.models.config import ViTConfig
from vitascope.models.vit import VisionTransformer
from vitascope_lessons.faults import Function
from vitascope_lessons.places import OPTIONS, place_functions

EPOCHS, BATCH, PEAK = 60, 32, 3e-3
SHAPE: dict[str, Any] = {"image_size": 8, "patch_size": 4, "in_channels": 1, "num_classes": 10}
SHAPE |= {"embed_dim": 64, "depth": 2, "num_heads": 4, "mlp_ratio": 2.0}


def practice(
    functions: Mapping[str, Function], log: Callable[[str], None], *, epochs: int = EPOCHS, seed: int = 0
) -> float:
    """Train a ViT of 0.07 M parameters on the digits, and return its accuracy on the 360 test images.

    Args:
        functions: by exercise; they take the places of ours.
        log: gets a line after every sixth of the epochs.
        epochs: passes over the training images.
        seed: of the weights and of the order.
    """
    splits = open_data("digits", seed=seed)
    assert splits.val is not None
    assert splits.test is not None
    images, labels = arrays(splits.train)
    torch.set_num_threads(1)  # tensors this small gain nothing from a second thread
    torch.manual_seed(seed)
    model = VisionTransformer(ViTConfig(**SHAPE, **OPTIONS, init="mimetic"))
    place_functions(model, functions)
    loss = functions.get("loss", F.cross_entropy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, weight_decay=0.05)
    steps = epochs * (len(images) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK, total_steps=steps)
    begin = time.monotonic()
    for epoch in range(1, epochs + 1):
        for batch in torch.randperm(len(images))[: steps // epochs * BATCH].split(BATCH):
            value = loss(model(shifted(images[batch])), labels[batch])
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            schedule.step()
        if epoch % max(1, epochs // 6) == 0:
            seconds, right = time.monotonic() - begin, accuracy(model, splits.val)
            log(
                say(
                    "epoch {epoch:>2}  loss {loss:.4f}  validation {right:.1%}  {seconds:.0f} s",
                    epoch=epoch,
                    loss=value.item(),
                    right=right,
                    seconds=seconds,
                )
            )
    return accuracy(model, splits.test)


def shifted(images: Tensor) -> Tensor:
    """Images (B, 1, 8, 8), moved by up to one pixel, all of them in the same direction."""
    padded = F.pad(images, (1, 1, 1, 1), value=-1.0)
    down, right = torch.randint(3, (2,)).tolist()
    return padded[:, :, down : down + 8, right : right + 8]


@torch.no_grad()
def accuracy(model: VisionTransformer, tests: ImageSet) -> float:
    """The share of images whose most probable class is right."""
    images, labels = arrays(tests)
    return float((model(images).argmax(dim=1) == labels).float().mean())


def arrays(images: ImageSet) -> tuple[Tensor, Tensor]:
    """Images from -1 to 1, (N, 1, 8, 8), and labels (N,)."""
    pixels = torch.from_numpy(np.stack([np.asarray(image) for image in images.sources])).float() / 127.5 - 1
    return pixels[:, None], torch.from_numpy(images.labels)
