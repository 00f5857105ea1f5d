"""`python -m vitascope.cli.sort`: images with labels in their names to class folders."""

from pathlib import Path

import pytest

from tests.data import read_tree, write_picture
from vitascope.cli.sort import main
from vitascope.data.datasets import class_counts


def test_images_are_moved_to_the_folders_of_their_labels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, name in enumerate(("cat.1.jpg", "cat.2.jpg", "dog.1.jpg")):
        write_picture(tmp_path / name, seed=number)
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == "cat: 2, dog: 1\n"
    assert class_counts(read_tree(tmp_path)) == {"cat": 2, "dog": 1}


@pytest.mark.parametrize("folders", [[], ["a", "b"], ["missing"]])
def test_anything_but_a_folder_is_rejected(
    folders: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(folders) == 2
    assert capsys.readouterr().err.startswith("vitascope: error: give one folder of images, not ")


def test_names_without_labels_are_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_picture(tmp_path / "1.jpg")
    assert main([str(tmp_path)]) == 2
    assert "are not like dog.1.jpg" in capsys.readouterr().err
    assert path.exists()


@pytest.mark.parametrize("taken", ["dog/dog.1.jpg", "dog"])
def test_nothing_is_moved_where_a_file_would_be_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], taken: str
) -> None:
    for number, name in enumerate(("cat.1.jpg", "dog.1.jpg")):
        write_picture(tmp_path / name, seed=number)
    (tmp_path / taken).parent.mkdir(exist_ok=True)
    (tmp_path / taken).write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    assert main([str(tmp_path)]) == 2
    assert "nothing was moved" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / taken).read_text() == "mine"
