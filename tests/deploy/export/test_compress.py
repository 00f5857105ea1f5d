"""Compression as a library call: its files, comparison and errors."""

from pathlib import Path

import numpy as np
import pytest

import vitascope as vs
from tests.data import noise, write_tree
from tests.models import small_model
from vitascope.data.splits import ImageSet
from vitascope.data.targets import ClassSets
from vitascope.deploy.export import compress as module
from vitascope.errors import UserError


def test_model_is_compressed_saved_and_compared_without_data(tmp_path: Path) -> None:
    model = small_model()
    found = vs.compress(model, tmp_path / "merged", merge=2, batch_size=2, device="cpu")
    assert vs.from_pretrained(tmp_path / "merged").config.option("token_merging") == 2
    assert found.before.parameters == found.after.parameters == model.config.num_parameters
    assert found.after.flops < found.before.flops
    assert min(found.before.images_per_second, found.after.images_per_second) > 0
    assert (found.paired, found.measured_on, found.pruned) == (None, "", False)
    assert repr(found).startswith(f"CompressionResult({tmp_path / 'merged'}: ")
    assert len(repr(found)) < 300


def test_images_that_decide_what_is_pruned_are_not_measured(tmp_path: Path, monkeypatch) -> None:
    data = write_tree(tmp_path / "data", {"a": 10, "b": 10}, size=(32, 32))
    decided: list[ImageSet] = []
    examples = module._examples
    monkeypatch.setattr(
        module,
        "_examples",
        lambda model, train, count: decided.append(train) or examples(model, train, count),
    )
    measured: list[ImageSet] = []
    accuracy = module._compared
    monkeypatch.setattr(
        module, "_compared", lambda engines, images: measured.append(images) or accuracy(engines, images)
    )
    model = small_model(num_classes=2, class_names=("a", "b"))
    found = vs.compress(model, tmp_path / "out", heads=1, data=str(data), batch_size=2, device="cpu")
    (train,), (test,) = decided, measured
    assert (len(train), len(test), found.measured_on) == (16, 4, "test and val")
    assert not set(train.sources) & set(test.sources)
    assert found.paired.total == 4


def label_sets(name: str, count: int, first: int = 0) -> ImageSet:
    labels = np.array([[place % 2 == 0, place % 3 == 0] for place in range(count)])
    pictures = [noise(32, 32, seed=first + place) for place in range(count)]
    return ImageSet(name, pictures, ClassSets(labels, ("a", "b")))


def test_model_of_several_labels_is_pruned_by_its_own_loss_and_compared_by_its_precision(
    tmp_path: Path, monkeypatch
) -> None:
    splits = label_sets("train", 12), label_sets("test", 9, first=50)
    monkeypatch.setattr(module, "_examples_and_test", lambda *_: splits)
    model = small_model(num_classes=2, class_names=("a", "b"), outputs="independent", thresholds=(0.3, 0.4))
    found = vs.compress(
        model, tmp_path / "out", heads=1, mlp_ratio=1, data="sets", batch_size=2, device="cpu"
    )
    assert (found.paired.name, found.paired.total) == ("mAP", 9)
    assert ", mAP " in repr(found)
    written = vs.from_pretrained(tmp_path / "out").config
    assert (written.outputs, written.thresholds, written.num_heads) == ("independent", (0.3, 0.4), 1)
    with pytest.raises(
        UserError, match="the model predicts one class of an image, and the train images have"
    ):
        vs.compress(small_model(num_classes=2), tmp_path / "one", heads=1, data="sets", device="cpu")
    assert not (tmp_path / "one").exists()


def test_nothing_to_do_and_pruning_without_images_are_rejected(tmp_path: Path) -> None:
    for options, reason in (({}, "nothing to compress"), ({"heads": 1}, "pruning needs labelled images")):
        with pytest.raises(UserError, match=reason):
            vs.compress(small_model(), tmp_path / "out", **options)
    with pytest.raises(UserError, match="batch_size must be at least 1, not 0"):
        vs.compress(small_model(), tmp_path / "out", merge=2, batch_size=0)
    assert not list(tmp_path.iterdir())
