from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.cli import SHAPE, SHORT
from tests.training import undrawn
from vitascope.cli import main
from vitascope.data.datasets import class_counts, open_data
from vitascope.data.table_options import TableOptions
from vitascope.errors import UserError

COUNTS = {"ant": 20, "bee": 20, "cow": 2, "dog": 1}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes that can be divided, and two that cannot."""
    root, random = tmp_path_factory.mktemp("data") / "photos", np.random.default_rng(0)
    for level, (name, count) in enumerate(COUNTS.items()):
        (root / name).mkdir(parents=True)
        for number in range(count):
            pixels = random.integers(60 * level, 60 * level + 60, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{number:02}.png")
    return root


def test_classes_of_too_few_images_are_named_at_once_with_the_ways_out(photos: Path) -> None:
    with pytest.raises(UserError) as error:
        open_data(str(photos))
    assert "class 'cow' has 2 images; class 'dog' has 1 image" in str(error.value)
    assert "min_images=3 leaves them out, rare=train keeps them in training alone" in str(error.value)


def test_classes_with_fewer_images_are_left_out_and_named(photos: Path) -> None:
    splits = open_data(str(photos), table=TableOptions(min_images=3))
    assert splits.train.class_names == ("ant", "bee")
    total = Counter[str]()
    for images in splits.parts.values():
        total.update(class_counts(images))
    assert total == {"ant": 20, "bee": 20}
    assert "left out: 2 of 4 classes with fewer than 3 images: cow (2), dog (1)" in splits.notes


def test_rare_classes_stay_in_training_and_are_not_measured(photos: Path) -> None:
    splits = open_data(str(photos), table=TableOptions(rare="train"))
    assert splits.train.class_names == ("ant", "bee", "cow", "dog")
    assert class_counts(splits.train) | {"ant": 0, "bee": 0} == {"ant": 0, "bee": 0, "cow": 2, "dog": 1}
    for images in (splits.val, splits.measured):
        assert class_counts(images)["cow"] == class_counts(images)["dog"] == 0
        assert class_counts(images)["ant"] >= 1


def test_rare_classes_of_groups_stay_in_training(photos: Path, tmp_path: Path) -> None:
    rows = ["image,label,patient"]
    for name, count in COUNTS.items():
        rows += [
            f"{photos / name / f'{n:02}.png'},{name},{name if count < 3 else f'{name}{n // 2}'}"
            for n in range(count)
        ]
    table = tmp_path / "table.csv"
    table.write_text("\n".join(rows))
    options = TableOptions(rare="train", columns=("group=patient",))
    splits = open_data(str(table), table=options)
    assert class_counts(splits.train)["cow"] == 2
    assert not set(splits.train.groups) & set(splits.val.groups)


def test_impossible_limits_are_named(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the largest has 20 images"):
        open_data(str(photos), table=TableOptions(min_images=50))
    for value in (0, -1):
        with pytest.raises(UserError):
            TableOptions(min_images=value)
    table = tmp_path / "several.csv"
    table.write_text("image,label\n" + "\n".join(f"{photos}/ant/{n:02}.png,a;b" for n in range(9)))
    with pytest.raises(UserError, match="for images of one class"):
        open_data(str(table), table=TableOptions(min_images=2, labels="several"))


@pytest.mark.parametrize("option", [["--min-images", "3"], ["--rare", "train"]])
def test_a_run_keeps_the_rule_of_its_classes(option: list[str], photos: Path, tmp_path: Path, capsys) -> None:
    run, few = str(tmp_path / "run"), option[0] == "--min-images"
    with undrawn():
        assert main(["train", "--data", str(photos), "--run", run, *SHAPE, *SHORT, *option]) == 0
    assert ("left out: 2 of 4 classes" in capsys.readouterr().out) == few
    assert main(["evaluate", run, "--device", "cpu"]) == 0
    assert ("without an image in test, so not measured" in capsys.readouterr().out) != few
    assert main(["predict", "cifar10", str(photos), *option]) == 2
    assert "does not apply to predict" in capsys.readouterr().err
