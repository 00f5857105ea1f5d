"""The pictures that a page offers."""

import dataclasses
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import vitascope as vs
from tests.data import exif_of, noise, read_tree, write_picture, write_tree
from tests.models import small_model
from vitascope.cli import main
from vitascope.data.splits import ImageSet
from vitascope.deploy.page.samples import LONGEST, MOST, Samples, choose_samples
from vitascope.deploy.server.page_content import SamplePicture
from vitascope.errors import UserError
from vitascope.models.decoding import ImageSource
from vitascope.models.engines.engine import TorchEngine


def samples(
    given: list[ImageSource] | str | None = None,
    tests: ImageSet | None = None,
    names: tuple[str, ...] = ("a", "b"),
) -> Samples:
    model = small_model(class_names=names, num_classes=len(names))
    return choose_samples(given, TorchEngine(model, precision="fp32", device="cpu"), lambda: tests)


def image_of(sample: SamplePicture) -> Image.Image:
    return Image.open(io.BytesIO(sample.content))


def test_small_picture_is_kept_without_loss() -> None:
    picture = noise(20, 30)
    [sample] = samples([picture]).pictures
    assert (sample.title, sample.media_type) == ("picture 1", "image/png")
    np.testing.assert_array_equal(np.asarray(image_of(sample)), picture)
    [large] = samples([noise(20, LONGEST + 9)]).pictures
    assert max(image_of(large).size) == LONGEST


def test_metadata_stay_out(tmp_path: Path) -> None:
    exif = exif_of(6)
    exif[0x010E] = "at home"
    Image.fromarray(noise(8, 12)).save(tmp_path / "a.jpg", exif=exif)
    [sample] = samples([tmp_path / "a.jpg"]).pictures
    assert b"at home" in (tmp_path / "a.jpg").read_bytes()
    assert b"at home" not in sample.content
    assert image_of(sample).size == (8, 12)
    assert sample.title == "a.jpg"  # without the folder


def test_pictures_come_from_all_parts_and_have_names_of_their_own(tmp_path: Path) -> None:
    found = samples(list(read_tree(write_tree(tmp_path, {"a": 5, "b": 5, "c": 5})).sources))
    assert found.description == f"{MOST} of 15 given pictures"
    assert len({sample.name for sample in found.pictures}) == len(found.pictures) == MOST


def test_test_images_are_in_the_page_only_where_they_are_asked_for(tmp_path: Path) -> None:
    tests = dataclasses.replace(read_tree(write_tree(tmp_path, {"tulip": 1, "rose": 1})), name="test")
    assert not samples(tests=tests).pictures
    found = samples(tests=tests, names=("cat", "rose"))
    assert [sample.name for sample in found.pictures] == ["cat"]
    assert found.description.startswith("built-in pictures: cat; samples=test takes test images")
    assert samples(tests=tests, names=("cat", "dog")).description == "built-in pictures: cat, dog"
    found = samples("test", tests)
    assert [sample.title for sample in found.pictures] == ["rose (test image)", "tulip (test image)"]
    assert found.description == "2 test images of the run"
    many = dataclasses.replace(
        read_tree(write_tree(tmp_path / "many", {"a": 30, "b": 2, "c": 1})), name="test"
    )
    titles = [sample.title for sample in samples("test", many).pictures]
    assert [titles.count(f"{name} (test image)") for name in "abc"] == [5, 2, 1]
    with pytest.raises(UserError, match="no run with test images"):
        samples("test")


def test_command_offers_files_and_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vs.save_pretrained(small_model(), tmp_path / "small")
    picture = write_picture(tmp_path / "mine.png")
    write_tree(tmp_path / "more", {"a": 1})
    asked = ["page", str(tmp_path / "small"), "--unproved", "--data", str(picture)]
    page = tmp_path / "small.html"
    out = ["--out", str(page)]
    assert main([*asked, *out, "--samples", str(picture), str(tmp_path / "more")]) == 0
    assert "samples in it: 2 given pictures" in capsys.readouterr().out
    assert '"title": "mine.png"' in page.read_text()
    page.unlink()
    assert main([*asked, *out, "--samples", "none"]) == 0
    assert "samples in it: none" in capsys.readouterr().out
    page.unlink()
    (tmp_path / "empty").mkdir()
    for given, complaint in {
        "absent.png": "no such file",
        str(tmp_path / "empty"): "no images found",
    }.items():
        assert main([*asked, *out, "--samples", given]) == 2
        assert complaint in capsys.readouterr().err
    assert not page.exists()
