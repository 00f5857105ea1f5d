import numpy as np
from sklearn.svm import SVC

from vitascope.data.datasets import read_data
from vitascope.training.baseline import DIGITS_BASELINE


def test_recorded_baseline_is_the_accuracy_of_svc_on_the_same_split() -> None:
    rest, test = read_data("digits").sets
    flat, unseen = (np.array(images.sources).reshape(-1, 64) for images in (rest, test))
    assert (SVC().fit(flat, rest.labels).predict(unseen) == test.labels).mean() == DIGITS_BASELINE
