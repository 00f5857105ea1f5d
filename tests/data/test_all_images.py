from pathlib import Path

import numpy as np
import pytest

from tests.data import noise, write_picture, write_tree
from vitascope.data.all_images import AllImages, all_images
from vitascope.data.splits import ImageSet
from vitascope.data.targets import ClassIndices, ClassSets
from vitascope.errors import UserError


def test_images_of_every_split_come_with_their_labels(tmp_path: Path) -> None:
    write_tree(tmp_path / "train", {"cat": 2, "dog": 1})
    write_tree(tmp_path / "test", {"dog": 1})
    found = all_images(str(tmp_path))
    assert found.splits == ["train"] * 3 + ["test"]
    assert found.labels == ["cat", "cat", "dog", "dog"]
    assert found.class_names == ("cat", "dog")
    assert [Path(name).relative_to(tmp_path).parts[0] for name in found.names] == found.splits
    assert [str(source) for source in found] == found.names
    assert not found.several


def test_images_without_labels_have_none(tmp_path: Path) -> None:
    path = write_picture(tmp_path / "a.png")
    write_picture(tmp_path / "b.png")
    for data in (str(tmp_path), str(path), [path]):
        found = all_images(data)
        assert found.labels is None
        assert found.splits == ["all"] * len(found)
        assert found.names[0] == str(path)
    assert len(all_images(str(tmp_path))) == 2


def test_pixels_are_named_by_split_and_number() -> None:
    found = all_images("digits")
    assert len(found) == len(found.names) == 1797
    assert {name.partition("/")[0] for name in found.names} == {"train", "test"}
    assert found.names[-1] == f"test/{found.splits.count('test') - 1}"
    assert found.labels is not None
    assert len(found.labels) == 1797


def test_an_index_leads_into_the_right_set() -> None:
    sets = [
        ImageSet("train", [noise(2, 2, seed=number) for number in range(3)]),
        ImageSet("val", []),
        ImageSet("test", [noise(2, 2, seed=number) for number in range(3, 5)]),
    ]
    found = AllImages(sets)
    for number, source in enumerate(found):
        assert np.array_equal(source, noise(2, 2, seed=number))
    for number, source in enumerate(found[1:4], 1):
        assert np.array_equal(source, noise(2, 2, seed=number))
    with pytest.raises(IndexError):
        found[5]


def test_several_classes_are_joined_and_unlabelled_images_are_empty() -> None:
    pictures = [noise(2, 2, seed=number) for number in range(4)]
    several = ClassSets(np.array([[True, True], [False, False]]), ("a", "b"))
    found = AllImages([ImageSet("train", pictures[:2], several), ImageSet("train", pictures[2:])])
    assert found.labels == ["a;b", "", "", ""]
    assert found.several
    with pytest.raises(UserError, match="class name 'a;b' contains ';'"):
        AllImages([ImageSet("all", pictures[:1], ClassSets(np.array([[True]]), ("a;b",)))])
    one = AllImages([ImageSet("all", pictures[:1], ClassIndices(np.array([0]), ("a;b",)))])
    assert one.labels == ["a;b"]


def test_data_without_images_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no images"):
        all_images([])
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(UserError, match="no images"):
        all_images(str(tmp_path))
