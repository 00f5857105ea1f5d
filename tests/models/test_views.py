import numpy as np
import pytest
import torch

from vitascope.models.heads import scores
from vitascope.models.options import Outputs
from vitascope.models.views import mean_of_views, views_of


def test_views_are_the_images_their_shifts_by_a_32nd_and_the_mirror_images_of_these() -> None:
    images = torch.rand(2, 3, 33, 64)
    padded = np.pad(images.numpy(), ((0, 0), (0, 0), (2, 2), (2, 2)), mode="reflect")
    shifted = [torch.from_numpy(padded[..., :33, :64]), torch.from_numpy(padded[..., 4:, 4:])]
    plain = torch.cat([images, *shifted])
    assert torch.equal(views_of(images, 1), images)
    assert torch.equal(views_of(images, 2), torch.cat([images, images.flip(-1)]))
    assert torch.equal(views_of(images, 6), torch.cat([plain, plain.flip(-1)]))
    assert views_of(torch.ones(1, 3, 1, 1), 6).shape == (6, 3, 1, 1)


@pytest.mark.parametrize("outputs", ["exclusive", "independent"])
def test_probabilities_of_the_mean_are_the_mean_of_the_probabilities(outputs: Outputs) -> None:
    logits = 8 * torch.randn(3 * 5, 4, dtype=torch.float64)
    expected = torch.stack([scores(part, outputs) for part in logits.split(5)]).mean(dim=0)
    mean = mean_of_views(logits, 3, outputs)
    torch.testing.assert_close(scores(mean, outputs), expected)
    assert mean_of_views(logits, 1, outputs) is logits
    sure = torch.tensor([[1e4, 0.0]]).expand(2, -1)
    assert mean_of_views(sure, 2, outputs).isfinite().all()
