import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

import vitascope as vs
from tests.training import assert_bitwise, undrawn
from vitascope.cli import main
from vitascope.training import loop
from vitascope.training.results import TrainResult
from vitascope.training.run.run import Run

pytestmark = pytest.mark.usefixtures("without_figures")

TINY: dict[str, Any] = {
    **{"image_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2, "steps": 2},
    **{"batch_size": 16, "device": "cpu", "recipe": "base"},
}


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """100 digits as `digits/<class>/<number>.png`, and as a table, in another order."""
    root = tmp_path_factory.mktemp("tables")
    pixels, labels = load_digits(return_X_y=True)
    rows = []
    for number, (image, label) in enumerate(zip(pixels[:100], labels[:100], strict=True)):
        path = root / "digits" / str(label) / f"{number:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((image.reshape(8, 8) * 15).astype(np.uint8)).save(path)
        rows.append({"image": path.relative_to(root).as_posix(), "label": int(label)})
    with open(root / "digits.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["image", "label"])
        writer.writeheader()
        writer.writerows(rows)
    return root


@pytest.fixture(scope="module")
def of_folder(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    with undrawn():
        return vs.train(data=digits / "digits", run=tmp_path_factory.mktemp("run") / "run", **TINY)


def frame_of(digits: Path) -> Any:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    frame = pandas.read_csv(digits / "digits.csv")
    frame["image"] = [str(digits / path) for path in frame["image"]]
    return frame


def assert_same_run(one: TrainResult, other: TrainResult) -> None:
    assert_bitwise(one.model.state_dict(), other.model.state_dict())
    assert one.evaluation.summary() == other.evaluation.summary()


def test_frame_is_kept_in_the_run_which_repeats_and_resumes(
    digits: Path, of_folder: TrainResult, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    frame = frame_of(digits)
    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "fit", lambda self: self.save())
        patch.setattr("vitascope.training.train.finish", lambda trainer, _: trainer)
        vs.train(data=frame, **TINY)
    run = Run("runs/data")
    assert run.config["data"] == str(run.path.absolute() / "data.jsonl")
    assert len((run.path / "data.jsonl").read_text().splitlines()) == 100
    assert run.plan["asked"]["options"]["data"] == "data.jsonl"
    assert f"data   {run.config['data']}: 80 train" in capsys.readouterr().out
    repeated = vs.train(vs.TrainConfig.from_yaml(run.config_file).replace(run="runs/again"))
    assert_same_run(repeated, of_folder)
    assert_same_run(vs.resume(run.path), of_folder)
    run.path.rename("moved")
    assert vs.evaluate("moved").summary() == of_folder.evaluation.summary()
    left = vs.evaluate("moved", frame)
    assert (left.trained_on, len(left.correct)) == (80, 20)


def test_frame_that_cannot_be_learned_leaves_nothing(digits, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    frame = frame_of(digits)
    with pytest.raises(vs.UserError, match=r"^the DataFrame: no column 'tags'"):
        vs.train(data=frame, columns={"label": "tags"}, **TINY)
    with pytest.raises(vs.UserError, match=r"^the DataFrame: the column label has .*no regression"):
        vs.train(data=frame.assign(label=frame["label"] + 0.5), **TINY)
    assert list(tmp_path.iterdir()) == []


def test_options_of_a_table_are_recorded_and_move_with_it(digits, of_folder, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("project/tables").mkdir(parents=True)
    (digits / "digits").rename("project/digits")
    try:
        text = (digits / "digits.csv").read_text().replace("digits/", "").replace("label", "class of it")
        Path("project/tables/a.csv").write_text(text)
        options = ["--columns", "label=class of it", "image=image", "--images", "project/digits"]
        arguments = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items()]
        train = ["train", "--data", "project/tables/a.csv", "--run", "project/run", *arguments, *options]
        assert main(train) == 0
        run = Run("project/run")
        assert run.config["columns"] == ["label=class of it", "image=image"]
        assert run.config["images"] == str(tmp_path / "project" / "digits")
        assert_bitwise(run.model().state_dict(), of_folder.model.state_dict())
        Path("project").rename("elsewhere")
        assert vs.evaluate("elsewhere/run").summary() == of_folder.evaluation.summary()
        measure = ["evaluate", "elsewhere/run", "--data", "elsewhere/tables/a.csv"]
        assert main([*measure, *options[:-1], "elsewhere/digits"]) == 0
        assert main(measure) == 2
    finally:
        next(tmp_path.glob("*/digits")).rename(digits / "digits")
