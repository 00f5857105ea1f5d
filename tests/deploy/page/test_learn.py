"""The modules of a page that learns, in node, beside the Python that they repeat."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression as Reference
from sklearn.preprocessing import StandardScaler

from vitascope.data.measures import wilson_interval
from vitascope.data.targets import ClassIndices
from vitascope.deploy.page.document import LEARNING
from vitascope.training.linear.classifiers import LogisticRegression

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="the page's program needs node here")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("program")
    (folder / "package.json").write_text('{"type": "module"}')
    for name, source in LEARNING.modules().items():
        (folder / name).write_text(source)
    return folder


def computed(program: Path, module: str, expression: str, given: dict[str, Any]) -> Any:
    """The value of an expression of the module `m` and the data `given`."""
    script = (
        f'import * as m from "./{module}"; import {{ readFileSync }} from "node:fs";'
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


def fitted(program: Path, features: np.ndarray, labels: np.ndarray, K: int, C: float = 0.1) -> np.ndarray:
    given = {"features": features.ravel().tolist(), "labels": labels.tolist(), "K": K, "C": C}
    expression = f"Array.from(m.probabilitiesOf({X}, m.fitted({X}, given.labels, given.K, given.C)))"
    return np.array(computed(program, "regression.js", expression, given), float).reshape(-1, K)


@pytest.mark.parametrize("C", [1e-3, 0.1, 10])
@pytest.mark.parametrize(
    ("N", "D", "K"), [(2, 3, 2), (3, 40, 3), (16, 1, 2), (60, 20, 2), (50, 64, 5), (300, 24, 7)]
)
def test_regression_is_that_of_probing(program: Path, N: int, D: int, K: int, C: float) -> None:
    features, labels = examples(N, D, K)
    names = tuple(map(str, range(K)))
    (expected,) = LogisticRegression((C,)).fit(features, ClassIndices(labels, names)).probabilities(features)
    np.testing.assert_allclose(fitted(program, features, labels, K, C), expected, atol=1e-5)


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


def test_held_out_pictures_are_judged_by_the_other_folds(program: Path) -> None:
    features, labels = examples(47, 8, 3)
    labels[-1] = 3  # a class of one picture, which no other fold knows
    given = {"features": features.ravel().tolist(), "labels": labels.tolist()}
    found = computed(
        program,
        "regression.js",
        "((p) => ({ p: Array.from(p), folds: m.foldsOf(given.labels, 4), ...m.judged(p, given.labels, 4) }))"
        f"(m.heldOut({X}, given.labels, 4))",
        given,
    )
    p, folds = np.array(found["p"]).reshape(-1, 4), np.array(found["folds"])
    for fold in range(5):
        for label in range(3):  # as many of each class in every fold, but for one
            assert abs((folds == fold)[labels == label].sum() - (labels == label).sum() / 5) < 1
        others = ClassIndices(labels[folds != fold], ("a", "b", "c", "d"))
        (expected,) = (
            LogisticRegression((0.1,))
            .fit(features[folds != fold], others)
            .probabilities(features[folds == fold])
        )
        np.testing.assert_allclose(p[folds == fold], expected, atol=5e-3)
    said = p.argmax(axis=1)
    assert p[-1, 3] == 0
    right = int((said == labels).sum())
    assert found["value"] == right / 47
    np.testing.assert_allclose((found["low"], found["high"]), wilson_interval(right, 47), atol=1e-12)
    pairs = {(a, b): int(((labels == a) & (said == b)).sum()) for a in range(4) for b in range(4) if a != b}
    confused = found["confused"]
    assert confused["count"] == pairs[confused["label"], confused["said"]] == max(pairs.values())


def test_few_labels_are_held_out_too(program: Path) -> None:
    for labels in ([0, 1], [0, 0]):
        given = {"features": list(range(2 * len(labels))), "labels": labels}
        found = computed(
            program,
            "regression.js",
            f"m.judged(m.heldOut({X}, given.labels, 2), given.labels, 2)",
            given,
        )
        assert found["value"] == (labels == [0, 0])
