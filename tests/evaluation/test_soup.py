from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.special import softmax

from tests.training import undrawn, write_folder
from vitascope.cli import main
from vitascope.data.targets import ClassIndices
from vitascope.errors import UserError
from vitascope.evaluation import soup as module
from vitascope.evaluation.measure import Evaluation
from vitascope.evaluation.soup import average, soup
from vitascope.predict.predictor import Predictor
from vitascope.run.run import Run
from vitascope.training.train import train
from vitascope.weights.loading import from_pretrained

SMALL = {"recipe": "base", "device": "cpu", "batch_size": 8, "steps": 3}
SHAPE = {"embed_dim": 16, "depth": 1, "num_heads": 2, "image_size": 16}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("data") / "photos", per_class=30)


@pytest.fixture(scope="module")
def runs(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A start, and three runs from it with other rates."""
    folder = tmp_path_factory.mktemp("runs")
    with undrawn():
        start = train(data=photos, run=folder / "start", **SHAPE, **SMALL).run
        found = [
            train(data=photos, run=folder / f"run{n}", weights=str(start), lr=lr, **SMALL).run
            for n, lr in enumerate((1e-3, 3e-3, 1e-2))
        ]
    return [start, *found]


def test_the_average_has_the_mean_of_the_weights(runs: list[Path]) -> None:
    models = [from_pretrained(run) for run in runs[1:]]
    states, mean = [model.state_dict() for model in models], average(models).state_dict()
    for name, value in mean.items():
        torch.testing.assert_close(value, sum(state[name] for state in states) / 3)
    assert all(torch.equal(states[0][name], value) for name, value in models[0].state_dict().items())


def losses(monkeypatch: pytest.MonkeyPatch, values: list[float]) -> None:
    """Let measurements on the validation images have these losses, in turn."""
    left = iter(values)
    monkeypatch.setattr(module, "loss_of", lambda _: next(left))


@pytest.mark.parametrize(
    ("values", "members"),
    [
        ([0.5, 0.3, 0.4, 0.2, 0.3], [1, 2]),  # run 2 helps, run 0 then harms
        ([0.5, 0.3, 0.4, 0.4, 0.2], [1, 0]),
        ([0.5, 0.3, 0.4, 0.3, 0.3], [1]),  # no better one
    ],
)
def test_runs_are_added_from_the_best_on_while_the_average_is_better(
    runs: list[Path], values: list[float], members: list[int], tmp_path: Path, monkeypatch
) -> None:
    losses(monkeypatch, values)
    found = soup(runs[1:], tmp_path / "soup")
    assert list(found.members) == [runs[1 + n] for n in members]
    assert found.value == values[3 if members == [1, 2] else 4 if len(members) > 1 else 1]
    alone = len(members) == 1
    assert any("no average is better" in line for line in found.lines()) == alone
    assert from_pretrained(tmp_path / "soup").config.class_names == ("dark", "light")


def test_the_loss_does_not_depend_on_the_temperature() -> None:
    labels = np.arange(60) % 3
    logits = np.random.default_rng(0).normal(size=(60, 3)) + 2 * np.eye(3)[labels]
    found = [
        module.loss_of(
            Evaluation(
                split="val",
                indices=np.arange(60),
                targets=ClassIndices(labels, ("a", "b", "c")),
                probabilities=softmax(factor * logits, axis=1),
                loss=0.0,
            )
        )
        for factor in (0.3, 1.0, 3.0)
    ]
    assert found == pytest.approx([found[0]] * 3, rel=1e-4)
    assert found[0] < np.log(3)


def test_the_command_writes_a_calibrated_model_that_predicts(
    runs: list[Path], photos: Path, tmp_path: Path, capsys
) -> None:
    out = tmp_path / "soup"
    assert main(["soup", *map(str, runs[1:]), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == f"model  {out}"
    assert printed.count(str(runs[1].parent)) >= 3
    answer = Predictor(out)(next(photos.rglob("*.png")))
    assert answer.verdict.familiarity is not None


def test_what_has_no_common_start_is_named(runs: list[Path], photos: Path, tmp_path: Path) -> None:
    def other(name: str, **options: object) -> Path:
        with undrawn():
            return train(data=photos, run=tmp_path / name, **{**SHAPE, **SMALL, **options}).run

    out = tmp_path / "out"
    for few in (runs[1:2], [runs[1], runs[1]], str(runs[1])):
        with pytest.raises(UserError, match="two or more different runs"):
            soup(few, out)
    with pytest.raises(UserError, match=r"starts from random weights of its seed and .*needs one start"):
        soup([runs[1], runs[0]], out)
    with pytest.raises(UserError, match="needs one start"):
        soup([runs[0], other("seed", seed=1)], out)
    with pytest.raises(UserError, match="has another size"):
        soup([runs[0], other("wide", embed_dim=32)], out)
    with pytest.raises(UserError, match="not a run folder"):
        soup([runs[0], tmp_path], out)
    assert not out.exists()


def test_images_that_another_run_was_trained_on_do_not_decide(
    photos: Path, runs: list[Path], tmp_path: Path
) -> None:
    with undrawn():
        seeded = train(data=photos, run=tmp_path / "seeded", weights=str(runs[0]), seed=5, **SMALL).run
    first, other = Run.open(runs[1]).split_record(), Run.open(seeded).split_record()
    shared = set(first.parts["val"].names) - set(other.parts["train"].names)
    if not shared:
        with pytest.raises(UserError, match="trained on by another run"):
            soup([runs[1], seeded], tmp_path / "out")
        return
    found = soup([runs[1], seeded], tmp_path / "out")
    assert len(found.tested[0].labels) <= len(first.parts["test"].names)
