"""The modules of a page that learns, in node, beside the Python that they repeat."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from scipy.special import betaincinv
from sklearn.linear_model import LogisticRegression as Reference
from sklearn.preprocessing import StandardScaler

import vitascope as vs
from tests.models import VARIANTS, small_model
from vitascope.analysis.probing.label_errors import suspects
from vitascope.data.measures import wilson_interval
from vitascope.data.targets import ClassIndices
from vitascope.deploy.page.document import LEARNING
from vitascope.errors import UserError
from vitascope.models.weights.files import CheckpointError
from vitascope.training.linear.classifiers import LogisticRegression

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="the page's program needs node here")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("program")
    (folder / "package.json").write_text('{"type": "module"}')
    for name, source in LEARNING.modules().items():
        (folder / name).write_text(source)
    return folder


def computed(program: Path, module: str, expression: str, given: Any) -> Any:
    """The value of an expression of the module `m` and the data `given`."""
    script = (
        f'import * as m from "./{module}"; import {{ readFileSync }} from "node:fs";'
        'import { plain } from "./numbers.js";'
        "const given = JSON.parse(readFileSync(0));"
        f"console.log(JSON.stringify({expression}));"
    )
    command = ["node", "--input-type=module", "-e", script]
    ran = subprocess.run(
        command, cwd=program, input=json.dumps(given), capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def examples(N: int, D: int, K: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Features (N, D) that overlap between classes, with uneven scales, and labels (N,)."""
    generator = np.random.default_rng(seed)
    labels = np.arange(N) % K
    centres = generator.normal(size=(K, D))
    features = (centres[labels] + 2 * generator.normal(size=(N, D))) * np.geomspace(0.1, 30, D) + 5
    return features.astype(np.float32), labels


X = "Float32Array.from(given.features)"


def fitted(program: Path, features: np.ndarray, labels: np.ndarray, K: int) -> np.ndarray:
    given = {"features": features.ravel().tolist(), "labels": labels.tolist(), "K": K}
    expression = f"Array.from(m.probabilitiesOf({X}, m.fitted({X}, given.labels, given.K)))"
    return np.array(computed(program, "regression.js", expression, given), float).reshape(-1, K)


@pytest.mark.parametrize(
    ("N", "D", "K"), [(2, 3, 2), (3, 40, 3), (16, 1, 2), (60, 20, 2), (50, 64, 5), (300, 24, 7)]
)
def test_regression_is_that_of_probing(program: Path, N: int, D: int, K: int) -> None:
    features, labels = examples(N, D, K)
    names = tuple(map(str, range(K)))
    (expected,) = (
        LogisticRegression((0.1,)).fit(features, ClassIndices(labels, names)).probabilities(features)
    )
    np.testing.assert_allclose(fitted(program, features, labels, K), expected, atol=1e-5)


def test_regression_is_that_of_scikit_learn(program: Path) -> None:
    features, labels = examples(200, 30, 4)
    X = StandardScaler().fit_transform(features.astype(float))
    expected = Reference(C=0.1, tol=1e-10, max_iter=5000).fit(X, labels).predict_proba(X)
    np.testing.assert_allclose(fitted(program, features, labels, 4), expected, atol=1e-5)


def test_awkward_pictures(program: Path) -> None:
    features, labels = examples(12, 5, 2)
    same = np.repeat(features[:1], 12, axis=0)
    np.testing.assert_allclose(fitted(program, same, labels, 2), 0.5, atol=1e-6)  # all alike
    constant = features.copy()
    constant[:, 2] = 7.1
    dropped = np.delete(constant, 2, axis=1)
    np.testing.assert_allclose(
        fitted(program, constant, labels, 2), fitted(program, dropped, labels, 2), atol=1e-6
    )
    np.testing.assert_array_equal(fitted(program, features, np.ones(12, int), 3), [[0, 1, 0]] * 12)
    np.testing.assert_array_equal(
        fitted(program, features, 2 * labels, 3)[:, 1], 0
    )  # a class without pictures
    np.testing.assert_array_equal(fitted(program, features[:1], np.array([0]), 1), [[1]])


def held_out(program: Path, features: np.ndarray, labels: list[int], K: int) -> np.ndarray:
    given = {"features": features.ravel().tolist(), "labels": labels, "K": K}
    expression = f"Array.from(m.heldOut({X}, given.labels, given.K))"
    return np.array(computed(program, "regression.js", expression, given)).reshape(-1, K)


def test_held_out_pictures_are_answered_by_the_other_folds(program: Path) -> None:
    features, labels = examples(47, 8, 3)
    labels[-1] = 3  # a class of one picture, which no other fold knows
    folds = np.array(computed(program, "regression.js", "m.foldsOf(given, 4)", labels.tolist()))
    p = held_out(program, features, labels.tolist(), 4)
    for fold in range(10):
        for label in range(3):  # as many of each class in every fold, but for one
            assert abs((folds == fold)[labels == label].sum() - (labels == label).sum() / 10) < 1
        others = ClassIndices(labels[folds != fold], ("a", "b", "c", "d"))
        fit = LogisticRegression((0.1,)).fit(features[folds != fold], others)
        np.testing.assert_allclose(
            p[folds == fold], next(fit.probabilities(features[folds == fold])), atol=5e-3
        )
    assert p[-1, 3] == 0
    np.testing.assert_array_equal(held_out(program, features[:2], [0, 1], 2), [[0, 1], [1, 0]])
    np.testing.assert_array_equal(held_out(program, features[:2], [0, 0], 2), [[1, 0], [1, 0]])


def evidence(program: Path, p: np.ndarray, labels: np.ndarray, judges: np.ndarray) -> dict[str, Any]:
    given = {"p": p.ravel().tolist(), "labels": labels.tolist(), "judges": judges.tolist(), "K": p.shape[1]}
    expression = "m.evidenceOf(Float64Array.from(given.p), given.labels, given.K, given.judges)"
    found = computed(program, "evidence.js", expression, given)
    assert isinstance(found, dict)
    return found


def test_only_judges_tell_the_accuracy(program: Path) -> None:
    generator = np.random.default_rng(1)
    labels = np.append(generator.integers(0, 3, 80), 3)  # no second picture has the last class
    p = generator.dirichlet(np.ones(4), 81) + 0.5 * np.eye(4)[labels] * (np.arange(81) % 4 > 0)[:, None]
    p /= p.sum(axis=1, keepdims=True)
    judges = np.append(generator.random(80) < 0.5, True)
    found, said = evidence(program, p, labels, judges), p.argmax(axis=1)
    right, total = int((said == labels)[:80][judges[:80]].sum()), int(judges[:80].sum())
    low, high = wilson_interval(right, total)
    assert found["score"] == pytest.approx(
        {"value": right / total, "low": low, "high": high, "labels": total}
    )
    pairs = {(a, b): int(((labels == a) & (said == b)).sum()) for a in range(3) for b in range(4) if a != b}
    confused = found["confused"]
    assert confused["count"] == pairs[confused["label"], confused["said"]] == max(pairs.values())
    names = ("a", "b", "c", "d")
    wanted = [suspect.image for suspect in suspects(ClassIndices(labels[:80], names), p[:80])]
    assert wanted
    assert found["suspects"] == wanted
    none = evidence(program, p, labels, np.zeros(81, bool))
    assert none["score"] is None
    assert "random" in none["reason"]
    assert evidence(program, p[:3], np.array([0, 1, 2]), np.ones(3, bool))["reason"].startswith("too few")


@pytest.mark.parametrize("wrong", [[], [60], [20, 61, 62, 63, 64, 65], [2], list(range(0, 100, 3))])
def test_sure_answers_are_tested_from_the_surest_on(program: Path, wrong: list[int]) -> None:
    right = ~np.isin(np.arange(100), wrong)
    confidences = np.linspace(1, 0.5, 100).round(2)  # pairs of them are equal
    sizes = [n for n in range(1, 101) if n == 100 or confidences[n] < confidences[n - 1]]
    passed = []
    for n in sizes:
        r = int(right[:n].sum())
        if betaincinv(n, 1, 0.025) < 0.9:
            continue
        if (low := betaincinv(r, n - r + 1, 0.025)) < 0.9:
            break
        high = 1.0 if r == n else betaincinv(r + 1, n - r, 0.975)
        passed.append({"least": confidences[n - 1], "value": (r + 1) / (n + 2), "low": low, "high": high})
    answers = [{"confidence": c, "right": bool(r)} for c, r in zip(confidences, right, strict=True)]
    found = computed(program, "evidence.js", "m.surest(given)", answers)
    best = max(passed, key=lambda one: (one["low"], -one["least"]), default=None)
    assert found == (best and pytest.approx(best))


def order(
    program: Path, features: np.ndarray, labelled: list[int], count: int, *, margins: bool, waiting: Any = ()
) -> list[Any]:
    N, D = features.shape
    opened = [n for n in range(N) if n not in (*labelled, *waiting)]
    given = {"features": features.ravel().tolist(), "D": D}
    given["asked"] = {"open": opened, "waiting": list(waiting), "labelled": labelled, "count": count}
    given["asked"]["margins"] = np.linspace(1, 0, len(opened)).tolist() if margins else None
    expression = f"m.next(m.directions({X}, given.D), given.D, plain, given.asked)"
    found = computed(program, "order.js", expression, given)
    assert isinstance(found, list)
    return found


def test_first_pictures_are_typical_and_different(program: Path) -> None:
    generator = np.random.default_rng(0)
    clusters = np.repeat(np.arange(4), [40, 30, 20, 10])
    features = 9 * np.eye(4, 6)[clusters] + generator.normal(size=(100, 6)) / 5
    shuffled = generator.permutation(100)
    chosen = order(program, features[shuffled], [], 4, margins=False)
    found = [clusters[shuffled[one["id"]]] for one in chosen]
    assert len(set(found)) >= 3
    sizes = [int(one["reason"].split()[2]) for one in chosen]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(sizes) == 100
    known = [int(np.flatnonzero(clusters[shuffled] == k)[0]) for k in (0, 1, 2)]
    later = order(program, features[shuffled], known, 12, margins=False)
    assert 3 in [clusters[shuffled[one["id"]]] for one in later]


def test_later_pictures_are_unsure_and_every_third_judges(program: Path) -> None:
    features = np.random.default_rng(0).normal(size=(100, 6))
    found = order(program, features, list(range(50)), 9, margins=True, waiting=[70, 60, 90, 80])
    assert [one["id"] for one in found] == [99, 98, 70, 97, 96, 60, 95, 94, 90]
    assert {one["reason"] for one in found if one["id"] > 90} == {"unsure"}
    found = order(program, features, list(range(98)), 9, margins=True, waiting=[99])
    assert [one["id"] for one in found] == [98, 99]


def test_copies_are_offered_once_and_not_with_a_labelled_one(program: Path) -> None:
    features = np.random.default_rng(0).normal(size=(10, 5))
    features[4], features[7] = features[2], features[0]
    found = order(program, features, [0], 10, margins=False)
    assert sorted(one["id"] for one in found if one["id"] not in (2, 4)) == [1, 3, 5, 6, 8, 9]
    [one] = [one for one in found if one["id"] in (2, 4)]
    assert one["copies"] == [6 - one["id"]]


@pytest.mark.parametrize("N", [1, 2, 16])
def test_few_or_equal_pictures_have_an_order(program: Path, N: int) -> None:
    features = np.random.default_rng(0).normal(size=(N, 5))
    assert len(order(program, features, [], 50, margins=False)) == N
    assert 1 <= len(order(program, np.ones((N, 5)), [], 50, margins=False)) <= N
    assert order(program, features, list(range(N)), 5, margins=True) == []


def test_what_no_page_can_hold_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="one model: omit beside"):
        vs.page(small_model(), tmp_path / "a.html", beside=small_model(), learn=True)
    with pytest.raises(UserError, match="not of attention 'window'"):
        vs.page(small_model(**VARIANTS["window"]), tmp_path / "a.html", learn=True)
    assert list(tmp_path.iterdir()) == []


def test_settings_inside_a_file_are_checked(tmp_path: Path) -> None:
    vs.save_pretrained(small_model(), tmp_path)
    settings = {
        "config": json.loads((tmp_path / "config.json").read_text()),
        "preprocessor": json.loads((tmp_path / "preprocessor_config.json").read_text()),
    }
    file = tmp_path / "elsewhere" / "a.safetensors"
    file.parent.mkdir()
    state = small_model().state_dict()
    save_file(state, file, {"vitascope": json.dumps(settings)})
    model = vs.from_pretrained(file)
    assert model.config == small_model().config
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    for inside in ("{", "[]", '{"config": 1}'):
        save_file(state, file, {"vitascope": inside})
        with pytest.raises(CheckpointError):
            vs.from_pretrained(file)
