"""Repeated augmentation against timm's copy of DeiT's RASampler, over 3 processes."""

import numpy as np
import pytest
import torch

from vitascope.data.loading import Loader
from vitascope.data.splits import ImageSet
from vitascope.models.preprocess import Preprocess

samplers = pytest.importorskip(
    "timm.data.distributed_sampler", reason="timm is not installed (vitascope[peers])"
)


class ByTimm(ImageSet):
    """Images in the order that timm draws."""

    def streams(self, seed: int, epoch: int, count: int) -> list[np.ndarray]:
        return [torch.randperm(len(self), generator=torch.Generator().manual_seed(epoch)).numpy()]


@pytest.mark.parametrize("epoch", [0, 3])
def test_each_process_gets_the_images_of_timm(epoch: int) -> None:
    N, batch_size = 72, 8  # batch size of each process
    images = ByTimm("train", list(np.zeros((N, 4, 4, 3), np.uint8)))
    for rank in range(3):
        loader = Loader(
            images,
            Preprocess(image_size=(4, 4)),
            3 * batch_size,
            seed=0,
            workers=0,
            part=(rank, 3),
            repeats=3,
        )
        ours = [index % N for batch in loader.epoch(epoch) for index in batch.indices]
        sampler = samplers.RepeatAugSampler(images, num_replicas=3, rank=rank, num_repeats=3)
        sampler.set_epoch(epoch)
        assert ours == list(sampler)
