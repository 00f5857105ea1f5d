"""Progressive resizing: a run that begins with smaller images."""

import pytest
from torch import Tensor

from tests.training import tiny_config, undrawn
from vitascope.errors import UserError
from vitascope.training import train
from vitascope.training.tasks.classify import Classify
from vitascope.training.tasks.task import Examples, Sums


@pytest.mark.parametrize(
    ("options", "small"),
    [
        ({"patch_size": 4}, 12),
        (
            {"patch_size": 4, "model_options": {"stem": "tokenizer", "positions": "rotary"}, "num_heads": 1},
            12,
        ),
        ({"patch_size": 8}, 16),  # two patches: three quarters are two
    ],
)
def test_the_first_share_of_the_steps_has_smaller_images(
    data, tmp_path, monkeypatch, options: dict[str, object], small: int
) -> None:
    seen: list[tuple[int, ...]] = []
    loss = Classify.loss

    def watched(task: Classify, module: object, examples: Examples) -> tuple[Tensor, Sums]:
        seen.append(tuple(examples.images.shape[2:]))
        return loss(task, module, examples)

    monkeypatch.setattr(Classify, "loss", watched)
    config = tiny_config(data, run=str(tmp_path / "run"), epochs=2, progressive=0.6, **options)
    with undrawn():
        result = train.train(config)
    assert seen == 6 * [(small, small)] + 4 * [(16, 16)]
    assert result.model.config.image_hw == (16, 16)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"patch_size": 4, "model_options": {"attention": "window", "window": 2}},
            "begins with smaller images: a grid of 3x3 patches .* set progressive=0",
        ),
        ({"task": "masked"}, "progressive changes the patches"),
    ],
)
def test_smaller_images_that_do_not_fit_are_rejected(
    data, tmp_path, options: dict[str, object], reason: str
) -> None:
    config = tiny_config(data, run=str(tmp_path / "run"), progressive=0.5, **options)
    with pytest.raises(UserError, match=reason):
        (train.pretrain if config.task == "masked" else train.train)(config)
    assert not (tmp_path / "run").exists()
