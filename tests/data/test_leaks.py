from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from tests.analysis.auditing.test_audit import picture
from tests.cli import SHAPE, SHORT
from tests.training import undrawn
from vitascope.cli import main
from vitascope.data import leaks
from vitascope.data.datasets import open_data
from vitascope.data.leaks import leaked, seen_in_words


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two classes; a test image is the mirror image of a training image, another one its file."""
    random = np.random.default_rng(0)
    for part, count in (("train", 12), ("test", 4)):
        for name, colour in (("red", (230, 20, 20)), ("blue", (20, 20, 230))):
            folder = tmp_path / "photos" / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                picture(colour, random).save(folder / f"{number:02}.png")
    train, test = tmp_path / "photos" / "train" / "red", tmp_path / "photos" / "test" / "red"
    for number in range(10):  # one of them at least is not drawn for validation
        ImageOps.mirror(Image.open(train / f"{number:02}.png")).save(test / f"mirror{number}.png")
    return tmp_path / "photos"


def test_images_with_a_near_copy_in_training_are_known(photos: Path, monkeypatch) -> None:
    splits = open_data(str(photos))
    _, mask = leaked(splits.train, splits.val, splits.measured)
    names = np.array([Path(str(source)).name for source in splits.measured.sources])
    trained = {Path(str(source)).name for source in splits.train.sources if "red" in str(source)}
    assert set(names[mask]) == {
        f"mirror{number}.png" for number in range(10) if f"{number:02}.png" in trained
    }
    monkeypatch.setattr(leaks, "MOST", 10)
    assert leaked(splits.train, splits.measured) == []


@pytest.mark.parametrize("most", [leaks.MOST, 10])
def test_pictures_of_one_shade_and_of_several_pages_are_counted(photos: Path, monkeypatch, most: int) -> None:
    red = photos / "train" / "red"
    for number in range(6):
        Image.new("RGBA", (20, 20), (255, 255, 255, 9 * number)).save(red / f"{number:02}.png")
    pages = [Image.open(red / f"{number:02}.png").convert("RGB") for number in (7, 8)]
    pages[0].save(red / "07.tif", save_all=True, append_images=pages[1:])
    splits = open_data(str(photos))
    monkeypatch.setattr(leaks, "MOST", most)
    lines = seen_in_words(splits)
    parts = splits.parts.values() if most == leaks.MOST and most > 10 else [splits.train]
    names = [
        Path(str(source)).name for part in parts for source in part.sources if "train/red" in str(source)
    ]
    of = "43 images" if most > 10 else f"{len(splits.train)} training images that were looked at"
    plain = sum(name in {f"{number:02}.png" for number in range(6)} for name in names)
    assert f"{plain} of {of} are of one shade, as white on a transparent ground is" in lines
    if "07.tif" in names:
        assert f"1 of {of} have several pages or frames: the first counts" in lines


def test_training_and_evaluation_say_how_many_there_are(photos: Path, tmp_path: Path, capsys) -> None:
    run = str(tmp_path / "run")
    with undrawn():
        assert main(["train", "--data", str(photos), "--run", run, *SHAPE, *SHORT]) == 0
    printed = capsys.readouterr().out
    assert "of 18 test images have a near-copy in training" in printed
    assert main(["evaluate", run, "--device", "cpu"]) == 0
    assert "that have a near-copy in training: " in capsys.readouterr().out
