import pytest
import torch

from tests.models import random_images, randomize, small_config, small_model
from vitascope.models import norms
from vitascope.models.encoder import Block
from vitascope.models.norms import norm_of

AUTOCAST = torch.autocast


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_rms_norm_divides_by_the_root_of_the_mean_square(eps: float) -> None:
    norm, x = randomize(norm_of(small_config(norm_type="rms", norm_eps=eps), 12)), random_images(2, 5, 12)
    assert set(norm.state_dict()) == {"weight"}
    expected = x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), expected)


@pytest.mark.parametrize("norm_type", ["layer", "rms"])
def test_norms_keep_bf16_where_autocast_would_widen_them(monkeypatch, norm_type: str) -> None:
    """As on a GPU, whose autocast computes norms in float32; here the CPU's stands for it."""
    monkeypatch.setattr(norms, "widened", lambda tokens: True)
    monkeypatch.setattr(torch, "autocast", lambda _, **options: AUTOCAST("cpu", **options))
    norm = randomize(norm_of(small_config(norm_type=norm_type), 12))
    x = random_images(2, 5, 12).bfloat16()
    seen = []
    for name in ("layer_norm", "rms_norm"):
        kernel = getattr(norms.F, name)

        def watched(tokens, shape, weight, *rest, kernel=kernel):
            seen.append((tokens.dtype, weight.dtype, torch.is_autocast_enabled("cpu")))
            return kernel(tokens, shape, weight, *rest)

        monkeypatch.setattr(norms.F, name, watched)
    with AUTOCAST("cpu", dtype=torch.bfloat16):
        found = norm(x)
    assert seen == [(torch.bfloat16, torch.bfloat16, False)]
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), norm(x.float()), rtol=0.02, atol=0.02)
    found.sum().backward()
    assert {parameter.grad.dtype for parameter in norm.parameters() if parameter.grad is not None} == {
        torch.float32
    }
    assert norm(x.float()).dtype == torch.float32


def test_rms_norm_gets_its_weight_in_bf16_on_a_cpu_too(monkeypatch) -> None:
    """With another dtype torch warns, and takes a slower path."""
    norm, seen, kernel = norm_of(small_config(norm_type="rms"), 12), [], norms.F.rms_norm

    def watched(tokens, shape, weight, eps):
        seen.append((tokens.dtype, weight.dtype))
        return kernel(tokens, shape, weight, eps)

    monkeypatch.setattr(norms.F, "rms_norm", watched)
    with torch.autocast("cpu", torch.bfloat16):
        found = norm(random_images(2, 5, 12).bfloat16())
    assert seen == [(torch.bfloat16, torch.bfloat16)]
    assert found.dtype == torch.bfloat16


@pytest.mark.parametrize("options", [{}, {"layer_scale": 0.1}, {"norm_type": "rms"}, {"qk_norm": True}])
def test_the_residual_stream_is_bf16_under_autocast(options) -> None:
    model, seen = small_model(**options).train(), []
    for block in model.modules():
        if isinstance(block, Block):
            block.register_forward_hook(lambda _, given, result: seen.append((given[0].dtype, result.dtype)))
    with torch.autocast("cpu", torch.bfloat16):
        model(random_images(2, 3, *model.config.image_hw))
    assert set(seen) == {(torch.bfloat16, torch.bfloat16)}
