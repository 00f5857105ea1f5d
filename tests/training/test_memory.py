"""A batch is computed in as many parts as half of the memory needs."""

import math
from pathlib import Path

import pytest
import torch

from tests.model import small_model
from tests.training import planned, tiny_config, undrawn
from vitascope.data.datasets import open_data
from vitascope.model.lora import add_adapters
from vitascope.model.resnet import ResNet
from vitascope.model.resnet_config import ResNetConfig
from vitascope.options.recipes import TrainConfig
from vitascope.run.run import Run
from vitascope.training import memory, train
from vitascope.training.memory import bytes_per_image, parts_of_batch
from vitascope.training.optim import freeze_body

CPU = torch.device("cpu")


def decided(data: Path, **options: object) -> TrainConfig:
    return planned(tiny_config(data, **options), open_data(str(data)))[0]


def test_activations_grow_with_the_depth_and_shrink_with_checkpointing() -> None:
    one, two = (bytes_per_image(small_model(depth=depth)) for depth in (2, 4))
    three = bytes_per_image(small_model(depth=6))
    assert three - two == two - one > 0
    recomputed = small_model(depth=6)
    recomputed.encoder.checkpointing = True
    assert bytes_per_image(recomputed) < three / 2


def test_adapters_of_a_frozen_model_keep_fewer_activations_than_its_weights() -> None:
    model = small_model()
    whole = bytes_per_image(model)
    freeze_body(model)
    add_adapters(model.encoder, 2)
    assert 0 < bytes_per_image(model) < whole


def test_the_measurement_counts_each_tensor_once() -> None:
    """A linear layer keeps its input; the second one of the same input keeps nothing more."""

    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = small_model().config
            self.one, self.two = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            pixels = images.flatten(1)[:, :4].clone()
            return self.one(pixels) + self.two(pixels)

    assert bytes_per_image(Twice()) == 4 * 4  # type: ignore[arg-type]


def test_measuring_changes_neither_the_model_nor_the_random_numbers() -> None:
    model = ResNet(ResNetConfig(image_size=32, layers=(1, 1, 1), width=8, num_classes=3)).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    assert bytes_per_image(model) > 0
    assert torch.equal(torch.rand(2), expected)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("share", [0.9, 0.3, 0.01])
def test_parts_fit_into_half_of_the_memory(data, monkeypatch, share: float) -> None:
    """`share` is that of the memory which the whole batch would need."""
    model, config = small_model(), decided(data, batch_size=16, precision="fp32")
    each = bytes_per_image(model)
    monkeypatch.setattr(memory, "memory_of", lambda device: share * 16 * each / memory.SHARE)
    parts = parts_of_batch(config, model, CPU)
    assert parts == min(16, math.ceil(1 / share))


def test_named_parts_a_frozen_body_and_unknown_memory_are_not_measured(data, monkeypatch) -> None:
    monkeypatch.setattr(memory, "bytes_per_image", lambda *_: pytest.fail("measured"))
    config = decided(data, batch_size=16)
    assert parts_of_batch(config.replace(accumulate=3), small_model(), CPU) == 3
    assert parts_of_batch(config.replace(freeze=True, weights="x"), small_model(), CPU) == 1
    monkeypatch.setattr(memory, "memory_of", lambda device: None)
    assert parts_of_batch(config, small_model(), CPU) == 1


def test_a_run_in_parts_says_so_and_records_them(data, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(memory, "memory_of", lambda device: 20_000)
    with undrawn():
        run = Run(train.train(tiny_config(data, run=str(tmp_path / "run"), epochs=1, precision="fp32")).run)
    parts = run.config["accumulate"]
    assert parts > 1
    assert f"each batch of 4 images in {parts} parts" in capsys.readouterr().out
