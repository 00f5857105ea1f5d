import pytest
import torch

from tests.model import random_images, randomize, small_config
from vitascope.model.norms import norm_of


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_rms_norm_divides_by_the_root_of_the_mean_square(eps: float) -> None:
    norm, x = randomize(norm_of(small_config(norm_type="rms", norm_eps=eps), 12)), random_images(2, 5, 12)
    assert set(norm.state_dict()) == {"weight"}
    expected = x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), expected)


def test_layer_norm_subtracts_the_mean_too() -> None:
    norm, x = randomize(norm_of(small_config(), 12)), random_images(2, 5, 12)
    torch.testing.assert_close(norm(x + 3), norm(x), rtol=1e-4, atol=1e-4)
    rms = randomize(norm_of(small_config(norm_type="rms"), 12))
    assert not torch.allclose(rms(x + 3), rms(x), atol=0.1)
