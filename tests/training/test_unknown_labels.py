"""Labels that are unknown: neither the loss nor a measure counts them."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, f1_score, log_loss

from tests.training import signalled, tiny_config, undrawn
from tests.training.test_several_labels import CLASSES, write_table
from vitascope.analysis.evaluate import evaluate
from vitascope.analysis.probing.probe import probe
from vitascope.cli import main
from vitascope.data.datasets import open_data
from vitascope.data.label_measures import best_thresholds, label_score
from vitascope.data.table_options import TableOptions
from vitascope.data.targets import ClassSets, targets_from_json
from vitascope.deploy.export.export import export
from vitascope.errors import Interrupted, UserError
from vitascope.models.engines.runtimes import open_engine
from vitascope.models.preprocess import Preprocess
from vitascope.runs import resume, train
from vitascope.training.evaluation.calibration import Temperature
from vitascope.training.run.run import Run
from vitascope.training.tasks.classify import Classify
from vitascope.training.tasks.losses import LOSSES, Criterion

RANDOM = np.random.default_rng(0)
LABELS, PROBABILITIES = RANDOM.random((60, 3)) < 0.4, RANDOM.random((60, 3))
UNKNOWN = (RANDOM.random((60, 3)) < 0.3) & ~LABELS
TARGETS = ClassSets(LABELS, CLASSES, UNKNOWN)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A column for each class; a fifth of the cells is unknown, and all of the first image's."""
    place = write_table(tmp_path_factory.mktemp("unknown"))
    lines = [f"image,{','.join(CLASSES)}"]
    for number, line in enumerate(place.read_text().splitlines()[1:]):
        image, tags = line.split(",")
        cells = ["1" if name in tags.split(";") else "0" for name in CLASSES]
        cells = ["-1" if number == 0 or (number + k) % 5 == 0 else cell for k, cell in enumerate(cells)]
        lines.append(",".join([image, *cells]))
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


def test_a_run_learns_measures_exports_and_is_resumed_bitwise(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with undrawn():
        whole = train(tiny_config(table, run=str(tmp_path / "run"), lr=3e-3))
        with pytest.raises(Interrupted), signalled(at=4):
            train(tiny_config(table, run=str(tmp_path / "again"), lr=3e-3))
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
    engine = open_engine(export(whole.run, tmp_path / "model.onnx").path)
    measured = evaluate(engine, table)
    assert measured.targets.partial


def test_bodies_are_not_compared_on_unknown_labels(table: Path) -> None:
    with pytest.raises(
        UserError, match=r"weights=auto compares bodies on complete labels.* name the weights"
    ):
        train(data=str(table), weights="auto", workers=0)


def test_blank_cells_are_unknown_if_that_is_asked_for(table: Path, tmp_path: Path) -> None:
    place = table.with_name("blank.csv")
    place.write_text(table.read_text().replace("-1", ""))
    options = TableOptions(columns=(f"label={','.join(CLASSES)}",), blank="unknown")
    asked, usual = open_data(str(place), table=options), open_data(str(table))
    assert asked.train.truth == usual.train.truth
    zero = open_data(str(place), table=TableOptions(columns=options.columns))
    assert not zero.train.truth.partial


def test_what_needs_complete_labels_says_so(table: Path) -> None:
    with pytest.raises(UserError, match=r"complete labels, and \d+ of these are unknown"):
        probe("cifar10", table)
    with pytest.raises(UserError, match="labels=one, but 24 of 60 rows have several classes"):
        open_data(str(table), table=TableOptions(labels="one"))
    table.with_name("no.csv").write_text(re.sub(r",0\b", ",-1", table.read_text()))
    with pytest.raises(UserError, match="the column left has no 0, only 1 and what is unknown"):
        open_data(str(table.with_name("no.csv")), table=TableOptions(columns=(f"label={','.join(CLASSES)}",)))
    table.with_name("text.csv").write_text(table.read_text().replace("-1", "maybe"))
    with pytest.raises(UserError, match=r"other cells: left has 'maybe' in \d+ rows.*-1 for what is unknown"):
        open_data(
            str(table.with_name("text.csv")), table=TableOptions(columns=(f"label={','.join(CLASSES)}",))
        )
