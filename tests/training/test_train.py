import math
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.svm import SVC
from torch import Tensor

import vitascope as vs
from tests.models import small_model
from tests.training import assert_bitwise, run_of, tiny_config, undrawn, write_folder
from vitascope import runs
from vitascope.data.datasets import read_data
from vitascope.errors import UserError
from vitascope.models.weights.loading import from_pretrained, save_pretrained
from vitascope.training.finishing import DIGITS_BASELINE
from vitascope.training.options.recipes import TrainConfig
from vitascope.training.plan import Request
from vitascope.training.results import PretrainResult, TrainResult
from vitascope.training.run.run import Run
from vitascope.training.tasks.classify import Classify
from vitascope.training.tasks.task import Examples, Sums

SMALL: dict[str, Any] = {"embed_dim": 16, "depth": 1, "num_heads": 2, "device": "cpu"}
FC1 = "encoder.blocks.0.mlp.fc1.weight"


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory) -> TrainResult:
    run = tmp_path_factory.mktemp("runs") / "finished"
    return runs.train(tiny_config(data, run=str(run), epochs=4, lr=3e-3))


@pytest.fixture(scope="module")
def pretrained(data, tmp_path_factory) -> PretrainResult:
    run = tmp_path_factory.mktemp("pretrained") / "run"
    with undrawn():
        return vs.pretrain(data=data, run=run, epochs=1, image_size=16, patch_size=8, **SMALL)


def test_run_folder_holds_all_documented_files(finished) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed (vitascope[tensorboard])")
    run = finished.run
    names = {path.name.split(".")[0] for path in run.iterdir() if not path.name.startswith(".")}
    documented = ("config", "plan", "environment", "split", "metrics", "events", "model", "predictions")
    assert names == {*documented, "figures", "report"}
    model = {"config.json", "model.safetensors", "preprocessor_config.json"}
    assert {path.name for path in (run / "model").iterdir()} == model
    figures = {"curves", "confusion", "predictions", "attention", "positions", "filters"}
    assert set(finished.figures) == figures
    for path in finished.figures.values():
        with Image.open(path) as image:
            assert min(image.size) > 100


def test_saved_model_is_the_tested_model_and_has_learned(finished) -> None:
    model, run = from_pretrained(finished.run), Run(finished.run)
    assert (model.config.class_names, model.preprocess.image_size) == (("dark", "light"), (16, 16))
    assert_bitwise(dict(finished.model.state_dict()), dict(model.state_dict()))
    last, kept = run.metrics[-1], run.predictions
    assert (last["kind"], last["split"], last["accuracy"]) == ("test", "test", 1.0)
    assert kept is not None
    np.testing.assert_array_equal(kept.probabilities, finished.evaluation.probabilities)


def test_the_written_configuration_reproduces_the_run_and_torchs_generator_is_unchanged(
    finished, tmp_path
) -> None:
    config = TrainConfig.from_yaml(finished.run / "config.yaml").replace(run=str(tmp_path / "again"))
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    with undrawn():
        again = runs.train(config)
    assert torch.equal(torch.rand(3), expected)
    assert_bitwise(dict(again.model.state_dict()), dict(finished.model.state_dict()))


def test_a_run_that_cannot_start_leaves_no_folder(data, tmp_path) -> None:
    run = tmp_path / "run"
    for options in ({"model": "vit_b61"}, {"image_size": 30}, {"num_heads": 3}, {"device": "nonsense"}):
        with pytest.raises(UserError):
            runs.train(tiny_config(data, run=str(run), **options))
        assert not run.exists()


def test_fine_tuning_starts_from_the_weights_with_a_new_head(finished, tmp_path, capsys) -> None:
    folder = write_folder(tmp_path / "three", classes=("a", "b", "c"))
    options = {"data": str(folder), "weights": str(finished.run), "image_size": 32, "lr": 1e-30}
    with undrawn():
        result = runs.train(recipe="base", run=str(tmp_path / "tuned"), epochs=1, **options)
    assert "positions interpolated from 2x2 to 4x4" in capsys.readouterr().out
    assert torch.equal(finished.model.state_dict()[FC1], result.model.state_dict()[FC1])
    assert result.model.head.weight.shape == (3, 16)


def test_broken_images_are_named_and_left_out(tmp_path, capsys) -> None:
    folder = write_folder(tmp_path / "data")
    broken = folder / "dark" / "broken.jpg"
    broken.write_bytes(b"\xff\xd8\xff\xe0 no picture")
    with undrawn():
        runs.train(tiny_config(folder, run=str(tmp_path / "run"), epochs=1))
    assert f"left out: {broken}" in capsys.readouterr().out


# Results


def test_result_prints_as_one_line_and_as_a_table(finished, pretrained) -> None:
    start = f"TrainResult({str(finished.run)!r}, accuracy 100.00% of 2 test images ("
    assert repr(finished).startswith(start)
    assert repr(finished.evaluation).startswith("Evaluation(accuracy 100.00% of 2 test images (")
    assert repr(pretrained).startswith(f"PretrainResult({str(pretrained.run)!r}, loss ")
    assert str(finished.run) in finished._repr_html_()
    for result in (finished, finished.evaluation, pretrained):
        assert len(repr(result)) < 300
        assert "\n" not in repr(result)


def test_tables_for_pandas_have_a_row_per_epoch_and_per_image(finished, pretrained) -> None:
    pytest.importorskip("pandas")
    epochs = finished.to_dataframe()
    assert list(epochs.index) == [1, 2, 3, 4]
    assert {"train_loss", "val_loss", "val_accuracy"} <= set(epochs.columns)
    assert list(pretrained.to_dataframe().index) == [1]
    images = finished.evaluation.to_dataframe()
    assert list(images.index) == list(finished.evaluation.indices)
    assert images["correct"].mean() == finished.evaluation.accuracy


def test_train_takes_options_as_keywords_and_derives_the_recipe(monkeypatch) -> None:
    configs: list[TrainConfig] = []

    def run_training(config: TrainConfig | None, recipe: str | None, options: Any, **_: Any) -> None:
        configs.append(Request.of(config, recipe, options).config)

    monkeypatch.setattr("vitascope.runs.run_training", run_training)
    vs.train(data="digits", epochs=1)
    vs.train(recipe="base", lr=1e-4)
    vs.train(TrainConfig(lr=0.01), epochs=7)
    vs.pretrain(epochs=3)
    assert configs == [
        TrainConfig.from_recipe("digits", epochs=1),
        TrainConfig(lr=1e-4),
        TrainConfig(lr=0.01, epochs=7),
        TrainConfig.from_recipe("masked", epochs=3),
    ]
    monkeypatch.undo()
    with pytest.raises(UserError, match="unknown training option 'epocs'; nearest: epochs"):
        vs.train(data="digits", epocs=1)
    with pytest.raises(UserError, match="leave out recipe"):
        vs.train(TrainConfig(), recipe="base")
    with pytest.raises(UserError, match="must be a TrainConfig, not a str"):
        vs.train("digits")  # type: ignore[arg-type]


def test_evaluate_takes_a_model_or_a_run(finished, data) -> None:
    of_run = vs.evaluate(finished.run, device="cpu")
    assert (of_run.accuracy, of_run.split) == (finished.evaluation.accuracy, "test")
    of_model = vs.evaluate(finished.model, data, device="cpu", precision="fp32")
    assert of_model.trained_on == 0  # a model does not know its images
    with pytest.raises(UserError, match="the model is not a run folder with test images"):
        vs.evaluate(finished.model)


def test_recorded_baseline_is_the_accuracy_of_svc_on_the_same_split() -> None:
    rest, test = read_data("digits").sets
    flat, unseen = (np.array(images.sources).reshape(-1, 64) for images in (rest, test))
    assert (SVC().fit(flat, rest.labels).predict(unseen) == test.labels).mean() == DIGITS_BASELINE


# LoRA, smaller images at first, images that are not square


def test_lora_goes_with_a_teacher_mixing_and_smaller_images(data, finished, tmp_path, capsys) -> None:
    student = save_pretrained(small_model(distillation_token=True), tmp_path / "student")
    with undrawn():
        result = runs.train(
            **{"data": str(data), "weights": str(student), "run": str(tmp_path / "run"), "lora": 2},
            **{"teacher": str(finished.run), "distill": "soft", "mixup": 0.8, "cutmix": 1.0},
            **{"drop_path": 0.2, "dropout": 0.1, "progressive": 0.5, "accumulate": 2, "patience": 9},
            **{"epochs": 2, "device": "cpu", "precision": "bf16"},
        )
    run = Run(result.run)
    assert (run.config["lr"], run.config["layer_decay"]) == (4e-3, 1.0)
    assert all(math.isfinite(record["val_loss"]) for record in run.records("epoch"))
    # Rank 2, the inputs and outputs of 4 layers in 3 blocks; two heads of 16 x 2 weights and 2 biases.
    count = 2 * 3 * (16 + 48 + 16 + 16 + 16 + 64 + 64 + 16) + 2 * (16 * 2 + 2)
    assert f"M parameters, {count:,} of them trained: " in capsys.readouterr().out


def test_the_first_share_of_the_steps_has_smaller_images_of_rising_size(data, tmp_path, monkeypatch) -> None:
    seen: list[tuple[int, ...]] = []
    loss = Classify.loss

    def watched(task: Classify, module: object, examples: Examples) -> tuple[Tensor, Sums]:
        seen.append(tuple(examples.images.shape[2:]))
        return loss(task, module, examples)

    monkeypatch.setattr(Classify, "loss", watched)
    config = tiny_config(data, run=str(tmp_path / "run"), epochs=2, progressive=0.6, patch_size=2)
    with undrawn():
        result = runs.train(config)
    assert seen == [(side, side) for side in (10, 10, 12, 12, 14, 14, 16, 16, 16, 16)]
    assert result.model.config.image_hw == (16, 16)


def test_smaller_images_that_do_not_fit_are_rejected(data, tmp_path) -> None:
    window = {"patch_size": 4, "model_options": {"attention": "window", "window": 2}}
    for options, reason in (
        (window, "begins with smaller images: a grid of 3x3 patches .* set progressive=0"),
        ({"task": "masked"}, "progressive changes the patches"),
    ):
        with pytest.raises(UserError, match=reason):
            run_of(tiny_config(data, run=str(tmp_path / "run"), progressive=0.5, **options))
        assert not (tmp_path / "run").exists()


def test_masked_pre_training_that_is_not_square_starts_a_classifier(data, tmp_path) -> None:
    shape = {"data": str(data), "image_size": (16, 32), "patch_size": (4, 8), "epochs": 1, "batch_size": 8}
    with undrawn():
        first = runs.pretrain(run=str(tmp_path / "masked"), target="mae", **shape, **SMALL)
        start = {"weights": str(first.run), "data": str(data), "epochs": 1, "device": "cpu"}
        tuned = runs.train(recipe="finetune", run=str(tmp_path / "tuned"), **start)
        start |= {"image_size": (16, 64), "randaugment": 2, "rotate": 20.0, "erase": 1.0, "cutmix": 0.5}
        wider = runs.train(recipe="finetune", run=str(tmp_path / "wider"), **start)
    assert (tuned.model.config.image_hw, tuned.model.config.grid) == ((16, 32), (4, 4))
    assert (wider.model.preprocess.image_size, wider.model.config.grid) == ((16, 64), (4, 8))
