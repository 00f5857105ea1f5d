"""The results of `train`, `pretrain` and `evaluate`, and the baseline on the digits."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.svm import SVC

import vitascope as vs
from tests.training import tiny_config, undrawn
from vitascope.data.datasets import read_data
from vitascope.errors import UserError
from vitascope.options.recipes import configuration
from vitascope.training.train import DIGITS_BASELINE, PretrainResult, TrainResult


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory) -> TrainResult:
    with undrawn():
        config = tiny_config(data, run=str(tmp_path_factory.mktemp("trained") / "run"))
        return vs.train(config, epochs=2)


@pytest.fixture(scope="module")
def pretrained(data, tmp_path_factory) -> PretrainResult:
    with undrawn():
        small = {"image_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}
        run = tmp_path_factory.mktemp("pretrained") / "run"
        return vs.pretrain(data=str(data), run=str(run), epochs=1, device="cpu", **small)


def test_result_prints_as_one_line(trained, pretrained) -> None:
    accuracy, run = f"{trained.evaluation.accuracy:.2%}", str(trained.run)
    assert repr(trained).startswith(f"TrainResult({run!r}, accuracy {accuracy} of 2 test images (")
    assert repr(trained.evaluation).startswith(f"Evaluation(accuracy {accuracy} of 2 test images (")
    assert repr(pretrained).startswith(f"PretrainResult({str(pretrained.run)!r}, loss ")
    for result in (trained, trained.evaluation, pretrained):
        assert len(repr(result)) < 300
        assert "\n" not in repr(result)


def test_tables_for_pandas_have_a_row_per_epoch_and_per_image(trained, pretrained) -> None:
    pytest.importorskip("pandas")
    epochs = trained.to_dataframe()
    assert list(epochs.index) == [1, 2]
    assert {"train_loss", "val_loss", "val_accuracy"} <= set(epochs.columns)
    assert list(pretrained.to_dataframe().index) == [1]
    images = trained.evaluation.to_dataframe()
    assert list(images.index) == list(trained.evaluation.indices)
    assert set(images["label"]) <= {"dark", "light"}
    assert images["correct"].mean() == trained.evaluation.accuracy


def test_train_takes_options_as_keywords_and_derives_the_recipe(monkeypatch) -> None:
    from vitascope.training import train

    configs: list[vs.TrainConfig] = []
    monkeypatch.setattr(train, "_run", lambda asked, task: configs.append(configuration(asked, 5000, 3)))
    vs.train(data="digits", epochs=1)
    vs.train(recipe="base", lr=1e-4)
    vs.train(vs.TrainConfig(lr=0.01), epochs=7)
    vs.pretrain(epochs=3)
    monkeypatch.undo()
    digits, base, changed, masked = configs
    assert digits == vs.TrainConfig.from_recipe("digits", epochs=1)
    assert base == vs.TrainConfig(lr=1e-4)
    assert changed == vs.TrainConfig(lr=0.01, epochs=7)
    assert masked == vs.TrainConfig.from_recipe("masked", epochs=3)
    with pytest.raises(UserError, match="unknown training option 'epocs'; nearest: epochs"):
        vs.train(data="digits", epocs=1)
    with pytest.raises(UserError, match="unknown training option 'learning_rate'; nearest: lr"):
        vs.train(data="digits", learning_rate=0.1)
    with pytest.raises(UserError, match="leave out recipe"):
        vs.train(vs.TrainConfig(), recipe="base")
    with pytest.raises(UserError, match="must be a TrainConfig, not a str"):
        vs.train("digits")  # type: ignore[arg-type]


def test_evaluate_takes_a_model_or_a_run(trained, data) -> None:
    of_run = vs.evaluate(trained.run, device="cpu")
    assert (of_run.accuracy, of_run.split) == (trained.evaluation.accuracy, "test")
    of_model = vs.evaluate(trained.model, data, device="cpu", precision="fp32")
    assert len(of_model.labels) > len(of_run.labels)
    assert of_model.trained_on == 0  # a model does not know its images
    with pytest.raises(UserError, match="the model is not a run folder with test images"):
        vs.evaluate(trained.model)


def test_recorded_baseline_is_the_accuracy_of_svc_on_the_same_split() -> None:
    rest, test = read_data("digits").sets
    flat, unseen = (np.array(images.sources).reshape(-1, 64) for images in (rest, test))
    assert (SVC().fit(flat, rest.labels).predict(unseen) == test.labels).mean() == DIGITS_BASELINE
