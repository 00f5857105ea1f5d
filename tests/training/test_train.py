from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.training import tiny_config, undrawn, write_folder
from vitascope.errors import UserError
from vitascope.options.recipes import TrainConfig
from vitascope.run.run import Run
from vitascope.training import train
from vitascope.weights.loading import from_pretrained


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory) -> train.TrainResult:
    run = tmp_path_factory.mktemp("runs") / "finished"
    return train.train(tiny_config(data, run=str(run), epochs=4, lr=3e-3))


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    return from_pretrained(run).state_dict()


def assert_same_weights(one: Path, other: Path) -> None:
    first, second = weights_of(one), weights_of(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_run_folder_holds_all_documented_files(finished) -> None:
    run = finished.run
    names = {path.name.split(".")[0] for path in run.iterdir() if not path.name.startswith(".")}
    assert names == {
        *("config", "plan", "environment", "split", "metrics", "events"),
        *("model", "predictions", "figures", "report"),
    }
    assert {path.name for path in (run / "model").iterdir()} == {
        "config.json",
        "model.safetensors",
        "preprocessor_config.json",
    }
    figures = {"curves", "confusion", "predictions", "attention", "positions", "filters"}
    assert set(finished.figures) == figures
    for path in finished.figures.values():
        with Image.open(path) as image:
            assert min(image.size) > 100


def test_saved_model_is_the_tested_model(finished) -> None:
    model = from_pretrained(finished.run)
    assert model.config.class_names == ("dark", "light")
    for name, tensor in finished.model.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)
    assert from_pretrained(finished.run).preprocess.image_size == (16, 16)
    last = Run(finished.run).metrics[-1]
    assert (last["kind"], last["split"], last["accuracy"]) == ("test", "test", finished.evaluation.accuracy)


def test_the_written_configuration_reproduces_the_run(finished, tmp_path) -> None:
    config = TrainConfig.from_yaml(finished.run / "config.yaml")
    with undrawn():
        again = train.train(config.replace(run=str(tmp_path / "again")))
    assert_same_weights(finished.run, again.run)


def test_a_run_that_cannot_start_leaves_no_folder(data, tmp_path) -> None:
    run = tmp_path / "run"
    for options in ({"model": "vit_b61"}, {"image_size": 30}, {"num_heads": 3}, {"device": "nonsense"}):
        with pytest.raises(UserError):
            train.train(tiny_config(data, run=str(run), **options))
        assert not run.exists()


def test_fine_tuning_starts_from_the_weights_with_a_new_head(finished, tmp_path, capsys) -> None:
    folder = write_folder(tmp_path / "three", classes=("a", "b", "c"))
    config = TrainConfig().replace(
        data=str(folder),
        weights=str(finished.run),
        image_size=32,
        epochs=1,
        lr=1e-30,
        run=str(tmp_path / "tuned"),
    )
    with undrawn():
        result = train.train(config)
    message = capsys.readouterr().out
    assert "positions interpolated from 2x2 to 4x4" in message
    assert "left out the head for 2 classes; initialized one for 3" in message
    old, new = weights_of(finished.run), weights_of(result.run)
    assert torch.equal(old["encoder.blocks.0.mlp.fc1.weight"], new["encoder.blocks.0.mlp.fc1.weight"])
    assert new["head.weight"].shape == (3, 16)


def test_training_does_not_change_torchs_generator(data, tmp_path) -> None:
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    with undrawn():
        train.train(tiny_config(data, run=str(tmp_path / "run"), epochs=1))
    assert torch.equal(torch.rand(3), expected)


def test_broken_images_are_named_and_left_out(tmp_path, capsys) -> None:
    folder = write_folder(tmp_path / "data")
    broken = folder / "dark" / "broken.jpg"
    broken.write_bytes(b"\xff\xd8\xff\xe0 no picture")
    with undrawn():
        train.train(tiny_config(folder, run=str(tmp_path / "run"), epochs=1))
    assert f"left out: {broken}" in capsys.readouterr().out
