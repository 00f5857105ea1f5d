"""LoRA with the other options of training; test_resume, test_distributed and test_optim cover its state."""

import math
from pathlib import Path

import pytest

from tests.model import small_model
from tests.training import undrawn
from vitascope.run.run import Run
from vitascope.training import train
from vitascope.weights.loading import save_pretrained


@pytest.fixture(scope="module")
def teacher(data, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("teacher") / "run"
    small = {"image_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}
    with undrawn():
        return train.train(recipe="base", data=str(data), run=str(run), epochs=1, device="cpu", **small).run


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_lora_goes_with_a_teacher_mixing_and_smaller_images(
    data, teacher, tmp_path, capsys, precision: str
) -> None:
    student = save_pretrained(small_model(distillation_token=True), tmp_path / "student")
    with undrawn():
        result = train.train(
            **{"data": str(data), "weights": str(student), "run": str(tmp_path / "run"), "lora": 2},
            **{"teacher": str(teacher), "distill": "soft", "mixup": 0.8, "cutmix": 1.0},
            **{"drop_path": 0.2, "dropout": 0.1, "progressive": 0.5, "accumulate": 2, "patience": 9},
            **{"epochs": 2, "device": "cpu", "precision": precision},
        )
    run = Run(result.run)
    assert (run.config["lr"], run.config["layer_decay"]) == (4e-3, 1.0)
    assert all(math.isfinite(record["val_loss"]) for record in run.records("epoch"))
    # Rank 2, the inputs and outputs of 4 layers in 3 blocks; two heads of 16 x 2 weights and 2 biases.
    count = 2 * 3 * (16 + 48 + 16 + 16 + 16 + 64 + 64 + 16) + 2 * (16 * 2 + 2)
    assert f"M parameters, {count:,} of them trained: " in capsys.readouterr().out
