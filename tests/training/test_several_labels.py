import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import average_precision_score, f1_score, log_loss

import vitascope as vs
from tests.models import small_model
from tests.training import interrupted, tiny_config, undrawn
from vitascope.analysis.evaluate import evaluate
from vitascope.analysis.probing.probe import probe
from vitascope.cli import main
from vitascope.data.datasets import open_data
from vitascope.data.label_measures import best_thresholds, label_score
from vitascope.data.table_options import TableOptions
from vitascope.data.targets import ClassSets, targets_from_json
from vitascope.errors import UserError
from vitascope.models.preprocess import Preprocess
from vitascope.models.weights.loading import save_pretrained
from vitascope.runs import resume, train
from vitascope.training.evaluation.calibration import Temperature
from vitascope.training.results import TrainResult
from vitascope.training.run.run import Run
from vitascope.training.tasks.classify import Classify
from vitascope.training.tasks.losses import LOSSES, Criterion

CLASSES = ("left", "right", "top")


def write_table(root: Path, count: int = 60) -> Path:
    """Pictures whose halves are light for the classes that they have; a tenth has none."""
    generator = np.random.default_rng(0)
    (root / "pictures").mkdir(parents=True)
    lines = ["image,tags"]
    for number in range(count):
        has = generator.random(3) < (0.0 if number % 10 == 0 else 0.5)
        pixels = generator.normal(60, 20, (16, 16))
        pixels[:, :8] += 80 * has[0]
        pixels[:, 8:] += 80 * has[1]
        pixels[:8] += 80 * has[2]
        name = f"pictures/{number:03}.png"
        Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(root / name)
        lines.append(f"{name},{';'.join(np.array(CLASSES)[has])}")
    (root / "labels.csv").write_text("\n".join(lines) + "\n")
    return root / "labels.csv"


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_table(tmp_path_factory.mktemp("several"))


def run(table: Path, folder: Path, **options: Any) -> TrainResult:
    with undrawn():
        return train(tiny_config(table, run=str(folder), **{"batch_size": 8} | options))


@pytest.fixture(scope="module")
def trained(table: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    return run(table, tmp_path_factory.mktemp("trained") / "run", epochs=6, lr=3e-3)


def test_a_run_ends_with_a_model_of_independent_classes_and_their_thresholds(trained: TrainResult) -> None:
    config = json.loads((trained.run / "model" / "config.json").read_text())
    assert (config["outputs"], config["class_names"]) == ("independent", list(CLASSES))
    assert len(config["thresholds"]) == 3
    found = Run(trained.run).predictions
    assert isinstance(found.targets, ClassSets)
    assert found.thresholds.tolist() == np.float32(config["thresholds"]).tolist()
    assert found.score.estimates["map"].value > found.score.estimates["map"].constant
    assert Run(trained.run).config["loss"] == "bce"


def test_evaluating_the_run_again_gives_its_result(trained: TrainResult) -> None:
    again = vs.evaluate(trained.run)
    np.testing.assert_allclose(again.probabilities, trained.evaluation.probabilities, atol=1e-6)
    assert again.summary()["map"] == pytest.approx(Run(trained.run).records("test")[0]["map"])
    assert {"map", "map_low", "map_high", "map_constant", "micro_f1", "exact"} <= again.summary().keys()
    assert "mAP" in repr(again)
    frame = again.to_dataframe()
    assert list(frame.columns) == ["labels", "predictions", "correct", *CLASSES]


def test_the_weights_of_the_highest_map_are_kept(trained: TrainResult) -> None:
    epochs = Run(trained.run).records("epoch")
    (kept,) = Run(trained.run).records("kept")
    assert kept["epoch"] == epochs[int(np.argmax([epoch["val_map"] for epoch in epochs]))]["epoch"]
    assert "the highest validation mAP" in kept["reason"]


@pytest.mark.parametrize(
    "options",
    [
        {"mixup": 0.2, "cutmix": 0.2, "label_smoothing": 0.2, "class_weights": "balanced", "keep": "auto"},
        {"sampling": "balanced", "keep": "last", "patience": 1, "model_options": {"head": "mlp"}},
    ],
)
def test_options_of_training_hold_for_several_classes(table, tmp_path, options: dict[str, Any]) -> None:
    assert np.isfinite(run(table, tmp_path / "run", epochs=1, **options).evaluation.loss)


def test_a_model_of_several_classes_teaches_another_and_the_output_says_how_many_an_image_has(
    table: Path, tmp_path: Path, trained: TrainResult, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"teacher": str(trained.run), "pool": "cls", "distill": "soft"}
    found = run(table, tmp_path / "run", epochs=1, **options)
    assert "train_agree" in Run(found.run).records("epoch")[0]
    out = capsys.readouterr().out
    for words in ("separated by ';'", "classes per image, from 0 to 3", "a constant answer"):
        assert words in out


def test_a_model_of_one_class_cannot_teach_several(table: Path, tmp_path: Path) -> None:
    teacher = save_pretrained(small_model(num_classes=3, class_names=CLASSES), tmp_path / "teacher")
    with pytest.raises(UserError, match="are exclusive, those of the student independent"):
        run(table, tmp_path / "run", epochs=1, teacher=str(teacher), pool="cls")


def test_cross_entropy_is_rejected_before_a_folder_is_made(table: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="loss=cross_entropy is not for images of several classes"):
        run(table, tmp_path / "run", loss="cross_entropy")
    assert not (tmp_path / "run").exists()


def test_validation_images_of_which_only_broken_ones_have_a_class_are_rejected(tmp_path: Path) -> None:
    write_table(tmp_path)
    of_val = [f"pictures/{number:03}.png,{int(number == 0)},0,val" for number in range(20)]
    of_train = [f"pictures/{number:03}.png,1,{number % 2},train" for number in range(20, 60)]
    (tmp_path / "labels.csv").write_text("\n".join(["image,left,right,split", *of_val, *of_train]) + "\n")
    (tmp_path / "pictures" / "000.png").write_bytes(b"broken")
    with pytest.raises(UserError, match="none of the 19 readable val images has a class"):
        run(tmp_path / "labels.csv", tmp_path / "run", epochs=1)


RANDOM = np.random.default_rng(0)
LABELS, PROBABILITIES = RANDOM.random((60, 3)) < 0.4, RANDOM.random((60, 3))
UNKNOWN = (RANDOM.random((60, 3)) < 0.3) & ~LABELS
TARGETS = ClassSets(LABELS, CLASSES, UNKNOWN)


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A column for each class; a fifth of the cells is unknown, and all of the first image's."""
    place = write_table(tmp_path_factory.mktemp("unknown"))
    lines = [f"image,{','.join(CLASSES)}"]
    for number, line in enumerate(place.read_text().splitlines()[1:]):
        image, tags = line.split(",")
        row = ["1" if name in tags.split(";") else "0" for name in CLASSES]
        row = ["-1" if number == 0 or (number + k) % 5 == 0 else cell for k, cell in enumerate(row)]
        lines.append(",".join([image, *row]))
    place.write_text("\n".join(lines) + "\n")
    return place


@pytest.mark.parametrize("criterion", ["bce", "focal", "asymmetric"])
@pytest.mark.parametrize("weights", [None, torch.tensor([1.0, 2.0, 0.5])])
def test_the_loss_of_an_image_is_that_of_its_known_classes(criterion: Any, weights: Any) -> None:
    preprocess = Preprocess(image_size=(8, 8), mean=(0.5,) * 3, std=(0.5,) * 3)
    logits, rows = torch.from_numpy(PROBABILITIES).logit().float(), torch.from_numpy(TARGETS.rows)
    task = Classify(preprocess, Criterion(criterion), weights, LOSSES[ClassSets], True)
    found = task.label_losses(logits, rows)
    for image in range(len(TARGETS)):
        known = torch.from_numpy(~UNKNOWN[image])
        if not known.any():
            assert found[image] == 0
            continue
        alone = Classify(
            preprocess, Criterion(criterion), None if weights is None else weights[known], LOSSES[ClassSets]
        )
        part = alone.label_losses(
            logits[image : image + 1, known], torch.from_numpy(LABELS[image])[None, known]
        )
        torch.testing.assert_close(found[image], part[0])


def test_a_mixture_is_unknown_where_one_of_its_images_is() -> None:
    shares = TARGETS.shares(torch.from_numpy(TARGETS.rows))
    mixed = (0.3 * shares[:-1] + 0.7 * shares[1:]).isnan()
    assert torch.equal(mixed, torch.from_numpy(UNKNOWN[:-1] | UNKNOWN[1:]))


def test_measures_are_those_of_the_known_cells() -> None:
    score = label_score(LABELS, TARGETS.scored(PROBABILITIES), intervals=False)
    for k in range(3):
        known = ~UNKNOWN[:, k]
        truth, values = LABELS[known, k], PROBABILITIES[known, k]
        assert score.ap[k] == pytest.approx(average_precision_score(truth, values))
        assert score.f1[k] == pytest.approx(f1_score(truth, values >= 0.5))
        alone = best_thresholds(truth[:, None], values[:, None])
        assert best_thresholds(LABELS, TARGETS.scored(PROBABILITIES))[k] == pytest.approx(alone[0])
        assert score.positives[k] / score.known[k] == pytest.approx(truth.mean())
    micro = average_precision_score(LABELS[~UNKNOWN], PROBABILITIES[~UNKNOWN])
    assert score.estimates["micro_map"].value == pytest.approx(micro)


def test_a_temperature_is_that_of_the_known_cells() -> None:
    logits = 3 * torch.from_numpy(PROBABILITIES).logit().numpy()
    changed = np.where(UNKNOWN, -logits, logits)
    one, other = (Temperature.of(TARGETS, values).values for values in (logits, changed))
    np.testing.assert_allclose(one, other)


def test_targets_keep_what_is_unknown() -> None:
    assert targets_from_json(TARGETS.to_json(), CLASSES) == TARGETS
    again = TARGETS.in_classes((*CLASSES, "more")).in_classes((*CLASSES, "more")).take(np.arange(60))
    np.testing.assert_array_equal(again.rows[:, :3], TARGETS.rows)
    assert TARGETS.take(np.arange(9)).joined(TARGETS.take(np.arange(9, 60))) == TARGETS
    assert ClassSets(LABELS, CLASSES) != TARGETS
    changed = [*TARGETS.names()[:-1], ("left",)]
    np.testing.assert_array_equal(TARGETS.relabelled(changed, CLASSES).rows[:-1], TARGETS.rows[:-1])
    assert TARGETS.relabelled(changed, CLASSES).rows[-1].tolist() == [1, 0, 0]
    assert TARGETS.take(np.flatnonzero(~UNKNOWN.any(axis=1))).unknown is None


def test_a_run_learns_measures_exports_and_is_resumed_bitwise(cells, tmp_path, capsys) -> None:
    config = tiny_config(cells, run=str(tmp_path / "run"), lr=3e-3, epochs=2, batch_size=8)
    with undrawn():
        whole = train(config)
        with interrupted(4):
            train(config.replace(run=str(tmp_path / "again")))
        again = resume(tmp_path / "again")
    out = capsys.readouterr().out
    assert "38 unknown cells" in out
    assert "1 image without a class" in out
    state = whole.model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in again.model.state_dict().items())
    stored = Run(whole.run).predictions
    assert stored is not None
    assert stored.targets == whole.evaluation.targets
    known = stored.targets.rows >= 0
    assert not known.all()
    wanted = log_loss(stored.labels[known].astype(int), stored.probabilities[known].astype(float))
    assert whole.evaluation.loss == pytest.approx(wanted, rel=1e-3)
    assert main(["evaluate", str(whole.run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["map"] == pytest.approx(
        whole.evaluation.score.estimates["map"].value
    )
    assert evaluate(whole.run, cells).targets.partial


def test_bodies_are_not_compared_on_unknown_labels(cells: Path) -> None:
    with pytest.raises(
        UserError, match=r"weights=auto compares bodies on complete labels.* name the weights"
    ):
        train(data=str(cells), weights="auto", workers=0)


def test_blank_cells_are_unknown_if_that_is_asked_for(cells: Path, tmp_path: Path) -> None:
    place = cells.with_name("blank.csv")
    place.write_text(cells.read_text().replace("-1", ""))
    options = TableOptions(columns=(f"label={','.join(CLASSES)}",), blank="unknown")
    asked, usual = open_data(str(place), table=options), open_data(str(cells))
    assert asked.train.truth == usual.train.truth
    zero = open_data(str(place), table=TableOptions(columns=options.columns))
    assert not zero.train.truth.partial


def test_what_needs_complete_labels_says_so(cells: Path) -> None:
    with pytest.raises(UserError, match=r"complete labels, and \d+ of these are unknown"):
        probe("cifar10", cells)
    with pytest.raises(UserError, match="labels=one, but 24 of 60 rows have several classes"):
        open_data(str(cells), table=TableOptions(labels="one"))
    other, columns = cells.with_name("other.csv"), TableOptions(columns=(f"label={','.join(CLASSES)}",))
    other.write_text(re.sub(r",0\b", ",-1", cells.read_text()))
    with pytest.raises(UserError, match="the column left has no 0, only 1 and what is unknown"):
        open_data(str(other), table=columns)
    other.write_text(cells.read_text().replace("-1", "maybe"))
    with pytest.raises(UserError, match=r"other cells: left has 'maybe' in \d+ rows.*-1 for what is unknown"):
        open_data(str(other), table=columns)
