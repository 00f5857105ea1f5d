import numpy as np
import pytest
import torch

from tests.model import small_model
from tests.training import write_folder
from vitascope.data.datasets import read_tree
from vitascope.data.loading import Loader
from vitascope.errors import UserError
from vitascope.training.evaluate import evaluate, evaluate_pretrained
from vitascope.weights.store import default_preprocess, save_pretrained


@pytest.fixture
def loader(tmp_path):
    images = read_tree(write_folder(tmp_path / "data", per_class=5, side=32))
    config = small_model(num_classes=2).config
    return Loader(images, default_preprocess(config), batch_size=3)


def test_every_image_is_judged_once_in_the_order_of_the_split(loader) -> None:
    model = small_model(num_classes=2)
    found = evaluate(model, loader)
    pixels = np.stack([loader.preprocess.pixels(source) for source in loader.images.sources])
    logits = model(loader.preprocess.normalize(torch.from_numpy(pixels))).detach()
    np.testing.assert_allclose(found.probabilities, logits.softmax(dim=1), atol=1e-6)
    np.testing.assert_array_equal(found.labels, loader.images.labels)
    labels = torch.from_numpy(found.labels)
    assert found.loss == pytest.approx(float(torch.nn.functional.cross_entropy(logits, labels)), rel=1e-5)
    assert found.accuracy == int((logits.argmax(dim=1) == labels).sum()) / len(labels)


def test_the_confusion_matrix_has_the_truth_down_and_the_guess_across(loader) -> None:
    found = evaluate(small_model(num_classes=2), loader)
    for truth in range(2):
        for guess in range(2):
            pairs = (found.labels == truth) & (found.predictions == guess)
            assert found.confusion[truth, guess] == pairs.sum()


def test_training_mode_is_given_back(loader) -> None:
    model = small_model(num_classes=2).train()
    evaluate(model, loader)
    assert model.training


def test_unreadable_images_are_named_and_not_counted(tmp_path) -> None:
    root = write_folder(tmp_path / "data", per_class=12, side=32)
    (root / "dark" / "broken.png").write_text("no picture")
    loader = Loader(read_tree(root), default_preprocess(small_model().config), batch_size=8)
    found = evaluate(small_model(num_classes=2), loader)
    assert found.summary()["images"] == 24
    assert found.summary()["unreadable"] == 1
    assert [path.endswith("broken.png") for path in found.unreadable] == [True]


def test_a_model_folder_needs_to_be_told_the_data(tmp_path) -> None:
    save_pretrained(small_model(num_classes=2), tmp_path / "m")
    with pytest.raises(UserError, match="--data"):
        evaluate_pretrained(tmp_path / "m")


@pytest.mark.parametrize("size", [0, -1])
def test_a_batch_of_nothing_is_refused(tmp_path, size: int) -> None:
    with pytest.raises(UserError, match=f"batch_size must be at least 1, not {size}"):
        evaluate_pretrained(tmp_path / "m", "digits", batch_size=size)


def test_classes_are_matched_by_name_not_by_order(tmp_path) -> None:
    root = write_folder(tmp_path / "data", per_class=3, side=32, classes=("a", "b", "c"))
    swapped = small_model(num_classes=3, class_names=("c", "a", "b"))
    save_pretrained(swapped, tmp_path / "m")
    found = evaluate_pretrained(tmp_path / "m", str(root), device="cpu")
    assert found.labels.tolist() == [1, 1, 1, 2, 2, 2, 0, 0, 0]


def test_a_class_that_the_model_does_not_know_is_refused(tmp_path) -> None:
    root = write_folder(tmp_path / "data", per_class=3, side=32, classes=("cat", "dgo"))
    save_pretrained(small_model(num_classes=2, class_names=("cat", "dog")), tmp_path / "m")
    with pytest.raises(UserError, match="dgo; nearest: dog"):
        evaluate_pretrained(tmp_path / "m", str(root), device="cpu")
