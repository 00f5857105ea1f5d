import numpy as np
import numpy.typing as npt
import pytest
from scipy.special import expit, softmax
from sklearn.linear_model import LogisticRegression as Reference
from sklearn.neighbors import KNeighborsClassifier, NearestCentroid
from sklearn.preprocessing import StandardScaler

from tests.analysis.probing.digits import DIGITS, PIXELS, PROPERTIES
from vitascope.data.targets import ClassIndices, ClassSets
from vitascope.training.linear import classifiers
from vitascope.training.linear.classifiers import (
    BIAS_FEATURE,
    Classifier,
    ClassMeans,
    LeastSquares,
    LinearFit,
    LogisticRegression,
    Neighbors,
)

TRAIN, TEST = np.arange(200), np.arange(200, 400)
LABELS = DIGITS.labels[TRAIN]
ALL = [Neighbors((1, 10)), LogisticRegression((0.01, 0.1)), LeastSquares((1.0, 100.0)), ClassMeans()]


def of(classifier: Classifier, targets: ClassIndices | ClassSets, features: npt.NDArray[np.floating]) -> list:
    fitted = classifier.fit(features[TRAIN], targets.take(TRAIN))
    return list(fitted.probabilities(features[TEST]))


@pytest.mark.parametrize("k", [1, 10, 20])
def test_neighbors_equal_scikit_learn(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classifiers, "BLOCK", 7 * len(TRAIN))  # blocks of 7 images
    reference = KNeighborsClassifier(
        k, metric="cosine", weights=lambda distance: np.exp((1 - distance) / 0.07), algorithm="brute"
    ).fit(PIXELS[TRAIN], LABELS)
    (found,) = of(Neighbors((k,)), DIGITS, PIXELS)
    assert np.abs(found - reference.predict_proba(PIXELS[TEST])).max() < 1e-8


def test_neighbors_of_several_classes_are_the_weighted_share_that_has_each() -> None:
    (found,) = of(Neighbors((10,)), PROPERTIES, PIXELS)
    (digits,) = of(Neighbors((10,)), DIGITS, PIXELS)
    even = digits[:, ::2].sum(axis=1)
    assert np.allclose(found[:, 0], even)


def test_all_images_vote_where_there_are_fewer_than_k() -> None:
    (found,) = (
        Neighbors((20,))
        .fit(np.eye(3), ClassIndices(np.array([0, 1, 1]), ("a", "b")))
        .probabilities(np.array([[1.0, 1.0, 1.0]]))
    )
    assert np.allclose(found, [[1 / 3, 2 / 3]])


@pytest.mark.parametrize(("several", "K"), [(False, 10), (False, 2), (True, 3)])
def test_logistic_regression_equals_scikit_learn(several: bool, K: int) -> None:
    strengths = (1e-4, 1e-2)
    targets = PROPERTIES if several else DIGITS
    if K == 2:
        targets = ClassIndices(np.where(DIGITS.labels < 5, 0, 1), ("small", "large"))
    scaler = StandardScaler().fit(PIXELS[TRAIN])
    train, test = scaler.transform(PIXELS[TRAIN]), scaler.transform(PIXELS[TEST])
    for C, found in zip(strengths, of(LogisticRegression(strengths), targets, PIXELS), strict=True):
        reference = Reference(C=C, tol=1e-8, max_iter=5000)
        if several:
            columns = [reference.fit(train, own).predict_proba(test)[:, 1] for own in targets.labels[TRAIN].T]
            expected = np.stack(columns, axis=1)
        else:
            expected = reference.fit(train, targets.labels[TRAIN]).predict_proba(test)
        assert np.abs(found - expected).max() < 1e-4


def test_a_rough_regression_is_near_the_exact_one() -> None:
    exact = LogisticRegression((1e-3, 1e-2, 0.1))
    rough = exact.for_selection()
    assert rough != exact
    for one, other in zip(of(exact, DIGITS, PIXELS), of(rough, DIGITS, PIXELS), strict=True):
        assert np.abs(one - other).max() < 0.04


@pytest.mark.parametrize("images", [200, 40])  # more and fewer images than features
@pytest.mark.parametrize("several", [False, True])
def test_least_squares_equal_a_direct_solution(images: int, several: bool) -> None:
    targets = (PROPERTIES if several else DIGITS).take(TRAIN[:images])
    features = PIXELS[:images].astype(np.float64)
    deviation = features.std(axis=0)
    standard = (features - features.mean(axis=0)) / np.where(deviation > 0, deviation, 1)
    X = np.column_stack([standard, np.full(images, BIAS_FEATURE)])
    Y = np.where(targets.labels if several else targets.labels[:, None] == np.arange(10), 1.0, -1.0)
    fitted = LeastSquares().fit(features, targets)
    for ridge, found in zip(LeastSquares().ridges, fitted.probabilities(features), strict=True):
        values = X @ np.linalg.solve(X.T @ X + ridge * np.eye(X.shape[1]), X.T @ Y)
        assert np.abs(found - (expit(values) if several else softmax(values, axis=1))).max() < 1e-7


def test_class_means_equal_scikit_learn() -> None:
    (found,) = of(ClassMeans(), DIGITS, PIXELS)
    reference = NearestCentroid(priors="uniform").fit(PIXELS[TRAIN], LABELS)
    scores = reference.decision_function(PIXELS[TEST])  # minus the squared distances, without the 1/2
    scores = scores - scores.max(axis=1, keepdims=True)
    assert np.abs(found - softmax(scores / 2, axis=1)).max() < 1e-8


def test_class_means_of_several_classes_compare_each_with_the_others() -> None:
    (found,) = of(ClassMeans(), PROPERTIES, PIXELS)
    for k, own in enumerate(PROPERTIES.labels.T):
        pair = ClassIndices(own.astype(np.int64), ("no", "yes"))
        assert np.allclose(found[:, k], of(ClassMeans(), pair, PIXELS)[0][:, 1], atol=1e-10)


@pytest.mark.parametrize("classifier", ALL, ids=lambda each: each.name)
@pytest.mark.parametrize("several", [False, True])
def test_a_class_without_images_has_probability_0(classifier: Classifier, several: bool) -> None:
    labels = (PROPERTIES if several else DIGITS).labels
    if several:
        whole = ClassSets(np.insert(labels, 1, False, axis=1), ("even", "absent", "large", "loop"))
        absent = 1
    else:
        whole, absent = ClassIndices(labels, (*DIGITS.class_names, "absent")), 10
    plain = of(classifier, PROPERTIES if several else DIGITS, PIXELS)
    for found, expected in zip(of(classifier, whole, PIXELS), plain, strict=True):
        assert (found[:, absent] == 0).all()
        assert np.allclose(np.delete(found, absent, axis=1), expected, atol=1e-8)


@pytest.mark.parametrize("classifier", ALL, ids=lambda each: each.name)
@pytest.mark.parametrize("several", [False, True])
def test_a_class_that_all_images_have_has_probability_1(classifier: Classifier, several: bool) -> None:
    """A small training set of a learning curve may have one class alone."""
    labels = np.array([[False, True]] * 5) if several else np.ones(5, dtype=np.int64)
    targets = (ClassSets if several else ClassIndices)(labels, ("a", "b"))
    for found in classifier.fit(PIXELS[:5], targets).probabilities(PIXELS[TEST]):
        assert np.allclose(found, [0.0, 1.0])


@pytest.mark.parametrize("classifier", ALL[1:], ids=lambda each: each.name)
def test_linear_maps_are_heads_on_raw_features(classifier: Classifier) -> None:
    fitted = classifier.fit(PIXELS[TRAIN], DIGITS.take(TRAIN))
    assert isinstance(fitted, LinearFit)
    for (weight, bias), found in zip(fitted.maps, of(classifier, DIGITS, PIXELS), strict=True):
        assert weight.shape == (10, 64)
        assert np.allclose(softmax(PIXELS[TEST] @ weight.T + bias, axis=1), found)


@pytest.mark.parametrize("classifier", ALL, ids=lambda each: each.name)
def test_one_setting_alone_gives_the_same(classifier: Classifier) -> None:
    together = of(classifier, DIGITS, PIXELS)
    for number, found in enumerate(together):
        (alone,) = of(classifier.only(number), DIGITS, PIXELS)
        assert len(classifier.only(number).settings) == 1
        assert np.abs(found - alone).max() < 1e-4


def test_constant_features_change_nothing() -> None:
    wider = np.insert(PIXELS, 5, 0.1, axis=1)  # 0.1 is not exact, so its mean has a rounding error
    for classifier in (LogisticRegression((0.1,)), LeastSquares((1.0,)), ClassMeans()):
        assert np.allclose(of(classifier, DIGITS, PIXELS)[0], of(classifier, DIGITS, wider)[0], atol=1e-5)
