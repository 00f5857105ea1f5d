"""Compare what a model learns about its answers with other libraries, on the same simulated numbers.

pip install netcal mapie && pip install --no-deps pytorch-ood torchvision
python benchmarks/trust_peers.py --out
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from scipy.special import softmax
from sklearn.calibration import CalibratedClassifierCV
from sklearn.covariance import LedoitWolf
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import precision_recall_curve, roc_auc_score

from conditions import Conditions
from reports import command_line, markdown_table, publish
from vitascope.data.measures import RiskCoverage, calibration
from vitascope.data.targets import ClassIndices
from vitascope.models.trust import PredictionSets, nearest_class
from vitascope.training.evaluation.calibration import Temperature, class_gaussians

N, K, D, DRAWS = 500, 10, 64, 500
random = np.random.default_rng(0)
as_is = LogisticRegression()
as_is.coef_, as_is.intercept_, as_is.classes_ = np.eye(K), np.zeros(K), np.arange(K)  # takes logits
Row = tuple[str, str, float, float]
"""A quantity, another library, our value and its value."""


class Ones(np.random.RandomState):
    """Draws U = 1 for MAPIE, whose score of a class is the mass before it and 1 - U of its own."""

    def uniform(self, *_: Any, **named: Any) -> Any:
        """As many ones."""
        return np.ones(named["size"])


def answers() -> tuple[np.ndarray, np.ndarray]:
    """True logits (N, K) and classes (N,)."""
    logits = 2 * random.standard_normal((N, K))
    return logits, (softmax(logits, axis=1).cumsum(axis=1) < random.random((N, 1))).sum(axis=1)


def probabilities() -> list[Row]:
    """Of logits that are 2.5 times too large."""
    logits, labels = answers()
    logits *= 2.5
    given, targets = softmax(logits, axis=1), ClassIndices(labels, tuple(map(str, range(K))))
    ours = float(Temperature.of(targets, logits).values[0])
    fitted = CalibratedClassifierCV(FrozenEstimator(as_is), method="temperature").fit(logits, labels)
    beta = fitted.calibrated_classifiers_[0].calibrators[0].beta_
    weight = import_module("netcal.scaling").TemperatureScaling().fit(given, labels).weights[0]
    sure, right = given.max(axis=1), given.argmax(axis=1) == labels
    error = import_module("netcal.metrics").ECE(15).measure(given, labels)
    risks = 1 - precision_recall_curve(right, sure)[0][:-1]
    return [
        ("temperature", "scikit-learn", ours, 1 / beta),
        ("temperature", "netcal", ours, 1 / weight),
        ("calibration error, 15 bins", "netcal", calibration(sure, right).error, error),
        ("risk-coverage area", "scikit-learn", RiskCoverage.of(sure, right).area, risks.mean()),
    ]


def sets(coverage: float, library: str, state: np.random.RandomState) -> list[Row]:
    """The means of draws of N validation images and N others."""
    classifier, measured = import_module("mapie.classification").SplitConformalClassifier, []
    for _ in range(DRAWS):
        (logits, labels), (others, truth) = answers(), answers()
        peer = classifier(as_is, confidence_level=coverage, conformity_score="aps", random_state=state)
        theirs = peer.conformalize(logits, labels).predict_set(others)[1][:, :, 0]
        given, new = (torch.from_numpy(softmax(some, axis=1)) for some in (logits, others))
        ours = PredictionSets.fitted(given, torch.from_numpy(labels)).contain(new, coverage)
        both = np.stack([np.asarray(ours), theirs])  # (2, N, K)
        equal = (both == both[0]).all(axis=2).mean(axis=1)
        measured.append([both[:, np.arange(N), truth].mean(axis=1), both.sum(axis=2).mean(axis=1), equal])
    names = [f"sets of {coverage:.0%}: {name}" for name in ("with the right class", "mean size", "as ours")]
    return [(name, library, *values) for name, values in zip(names, np.mean(measured, axis=0), strict=True)]


def distances(images: int) -> list[Row]:
    """Of N pictures such as the training images and N with more noise."""
    centers, scales, places = random.standard_normal((K, D)), np.geomspace(0.5, 2, D), np.arange(N) % K
    labels, noise = np.arange(images) % K, random.standard_normal((images + 2 * N, D))
    known = centers[labels] + scales * noise[:images]
    new = np.tile(centers[places], (2, 1)) + (scales * noise[images:]) * np.repeat([1, 1.1], N)[:, None]
    means = np.stack([known[labels == k].mean(axis=0) for k in range(K)])
    fitted = LedoitWolf(assume_centered=True).fit(known - means[labels])
    shrunk = np.min([fitted.mahalanobis(new - mean) for mean in means], axis=0)
    features, pictures = torch.from_numpy(known).float(), torch.from_numpy(new).float()
    detector = import_module("pytorch_ood.detector").Mahalanobis(None)
    half = detector.fit_features(features, torch.from_numpy(labels)).predict_features(pictures).numpy()
    ours, rows = nearest_class(pictures, **class_gaussians(features, labels)).numpy(), []
    for library, theirs in (("scikit-learn: LedoitWolf", shrunk), ("pytorch-ood", 2 * images * half)):
        rows.append((f"squared distance, {images:,} images", library, ours.mean(), theirs.mean()))
        areas = [roc_auc_score(np.repeat([0, 1], N), values) for values in (ours, theirs)]
        rows.append((f"AUROC, {images:,} images", library, *areas))
    return rows


def main() -> None:
    arguments, conditions = command_line(__doc__).parse_args(), Conditions.now()
    import_module("peers")  # torchvision, which pytorch-ood imports
    rows = probabilities()
    for coverage in (0.9, 0.95):
        rows += sets(coverage, "MAPIE, U = 1", Ones()) + sets(coverage, "MAPIE", np.random.RandomState(0))
    rows += distances(200) + distances(20_000)
    cells = [(quantity, library, f"{ours:.5f}", f"{theirs:.5f}") for quantity, library, ours, theirs in rows]
    names = ("scikit-learn", "netcal", "mapie", "pytorch-ood")
    libraries = ", ".join(f"{name} {version(name)}" for name in names)
    heading = conditions.heading("Trust, beside other libraries", libraries=libraries)
    table = markdown_table(("quantity", "library", "ours", "theirs"), cells)
    publish("trust_peers", f"{heading}\n\n{table}", arguments)


if __name__ == "__main__":
    main()
