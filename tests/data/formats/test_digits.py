import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from vitascope.data.formats.digits import Digits, stratified_halves


def test_digits_are_scikit_learns_with_a_stratified_fifth_as_test_set() -> None:
    theirs = load_digits()
    train, test = Digits().read("digits").sets
    parts = train_test_split(np.arange(1797), test_size=0.2, stratify=theirs.target, random_state=0)
    for ours, rows in zip((train, test), parts, strict=True):
        assert ours.labels.tolist() == theirs.target[rows].tolist()
        shades = np.rint(theirs.images[rows] * (255 / 16))
        assert np.array_equal(np.stack(ours.sources), shades)


def test_halves_are_scikit_learns_for_any_labels() -> None:
    for seed in range(20):
        random = np.random.RandomState(seed)
        classes = random.randint(2, 6)
        labels = np.concatenate([np.repeat(np.arange(classes), 3), random.randint(0, classes, size=40)])
        share, rows = random.choice([0.2, 0.3, 0.5]), np.arange(len(labels))
        theirs = train_test_split(rows, test_size=share, stratify=labels, random_state=seed)
        ours = stratified_halves(labels, share, np.random.RandomState(seed))
        assert [part.tolist() for part in ours] == [part.tolist() for part in theirs]
