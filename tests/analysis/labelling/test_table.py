"""The table of labels: every decision is in the file, once, whatever happens to the file and its pictures."""

import csv
import errno
import os
from pathlib import Path

import pytest

from tests.data import write_picture
from vitascope.analysis.labelling.table import LabelTable, PictureLabel
from vitascope.data.all_images import all_images
from vitascope.data.targets import ClassIndices, ClassSets, Targets
from vitascope.errors import UserError

CAT, DOG = PictureLabel(("cat",), "looked"), PictureLabel(("dog",), "accepted")
NAMES = ("a.png", 'it\'s "b", c.png', "line\nbreak.png", "=1+1.png", "öl.png")


@pytest.fixture
def pictures(tmp_path: Path) -> list[str]:
    """Pictures whose names a table has to quote."""
    for number, name in enumerate(NAMES):
        write_picture(tmp_path / "photos" / name, seed=number)
    return [str(tmp_path / "photos" / name) for name in NAMES]


def rows_of(path: Path) -> list[dict[str, str]]:
    """As Python's own module reads the file."""
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, strict=True))


def test_each_label_is_in_the_file_when_record_returns(pictures: list[str], tmp_path: Path) -> None:
    path = tmp_path / "labels.csv"
    table = LabelTable(path)
    for number, picture in enumerate(pictures, 1):
        table.record({picture: CAT})
        assert [row["label"] for row in rows_of(path)] == ["cat"] * number
        assert LabelTable(path).labels == table.labels
    assert {row["source"] for row in rows_of(path)} == {"looked"}
    assert all(
        os.path.samefile(tmp_path / row["image"], p) for row, p in zip(rows_of(path), pictures, strict=True)
    )
    assert not any(row["image"].startswith("=") for row in rows_of(path))


def test_a_corrected_label_stands_once_and_a_removed_one_nowhere(pictures: list[str], tmp_path: Path) -> None:
    table = LabelTable(tmp_path / "labels.csv")
    table.record(dict.fromkeys(pictures, CAT))
    table.record({pictures[0]: DOG, pictures[1]: None})
    assert [row["label"] for row in rows_of(table.path)] == ["cat", "cat", "cat", "dog"]
    assert len(LabelTable(table.path).labels) == 4


def test_training_reads_the_labels_that_were_recorded(pictures: list[str], tmp_path: Path) -> None:
    table = LabelTable(tmp_path / "photos" / "labels.csv")
    table.record({picture: (CAT, DOG)[n % 2] for n, picture in enumerate(pictures)})
    images = all_images(str(table.path))
    assert images.labels is not None
    assert not images.several
    by_name = dict(zip(images.names, images.labels, strict=True))
    assert {os.path.realpath(name): label for name, label in by_name.items()} == {
        os.path.realpath(p): label.names[0] for p, label in table.labels.items()
    }


def test_several_classes_of_a_picture_and_none_are_read_back(pictures: list[str], tmp_path: Path) -> None:
    table = LabelTable(tmp_path / "labels.csv", kind=ClassSets)
    sets = [("red car", "a|b"), (), ("red car",), ("x, y",), ("a|b",)]
    table.record(
        {picture: PictureLabel(names, "looked") for picture, names in zip(pictures, sets, strict=True)}
    )
    again = LabelTable(table.path, kind=ClassSets)
    assert [again.labels[picture].names for picture in pictures] == sets
    images = all_images(str(table.path))
    assert images.several
    assert set(images.class_names) == {"red car", "x, y", "a|b"}


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.99])
def test_a_line_that_was_half_written_is_left_out(share: float, pictures: list[str], tmp_path: Path) -> None:
    table = LabelTable(tmp_path / "labels.csv")
    table.record({pictures[0]: CAT})
    before = table.path.stat().st_size
    table.record({pictures[2]: DOG})
    os.truncate(table.path, before + int(share * (table.path.stat().st_size - before)))
    again = LabelTable(table.path)
    assert again.labels[pictures[0]] == CAT
    again.record({pictures[1]: CAT})
    known = LabelTable(table.path).labels
    assert {pictures[0], pictures[1]} <= set(known) <= set(pictures[:3])
    assert len(rows_of(table.path)) == len(known)


def test_a_full_disk_loses_nothing_and_takes_nothing(
    pictures: list[str], tmp_path: Path, monkeypatch
) -> None:
    table = LabelTable(tmp_path / "labels.csv")
    table.record({pictures[0]: CAT})
    content = table.path.read_bytes()

    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for changes in ({pictures[1]: DOG}, {pictures[0]: DOG}, {pictures[0]: None}):
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", full)
            with pytest.raises(UserError, match=r"No space left.*label the picture again"):
                table.record(changes)
        assert table.path.read_bytes() == content
        assert table.labels == {pictures[0]: CAT}
    table.record({pictures[1]: DOG})
    assert list(LabelTable(table.path).labels) == pictures[:2]


def test_another_program_s_changes_are_kept(pictures: list[str], tmp_path: Path) -> None:
    table = LabelTable(tmp_path / "labels.csv")
    table.record({pictures[0]: CAT})
    table.path.write_text(table.path.read_text().replace("cat", "lynx") + "photos/öl.png,owl,,\n")
    table.record({pictures[1]: DOG})
    labels = {Path(p).name: label.names for p, label in LabelTable(table.path).labels.items()}
    assert labels == {"a.png": ("lynx",), "öl.png": ("owl",), NAMES[1]: ("dog",)}
    table.path.unlink()
    table.record({pictures[2]: CAT})
    assert len(LabelTable(table.path).labels) == 4
    table.path.write_text("nothing\n")
    with pytest.raises(UserError, match="image"):
        table.record({pictures[3]: CAT})
    assert table.path.read_text() == "nothing\n"


def test_a_table_of_others_keeps_its_columns(pictures: list[str], tmp_path: Path) -> None:
    path = tmp_path / "old.csv"
    path.write_text("patient,image,label\n7,photos/a.png,cat\n8,photos/öl.png,\n")
    table = LabelTable(path)
    assert table.labels == {pictures[0]: PictureLabel(("cat",), "given")}
    table.record({pictures[4]: DOG, pictures[1]: CAT})
    rows = {Path(row["image"]).name: (row["patient"], row["label"], row["source"]) for row in rows_of(path)}
    assert rows == {
        "a.png": ("7", "cat", ""),
        "öl.png": ("8", "dog", "accepted"),
        NAMES[1]: ("", "cat", "looked"),
    }


def test_labels_follow_a_folder_that_was_moved(pictures: list[str], tmp_path: Path) -> None:
    table = LabelTable(tmp_path / "labels.csv")
    table.record(dict.fromkeys(pictures, CAT))
    os.rename(tmp_path / "photos", tmp_path / "new")
    (tmp_path / "new" / "a.png").unlink()
    now = [p.replace("photos", "new") for p in pictures]
    again = LabelTable(table.path)
    assert again.moved(now[1:]) == 4
    again.record({now[1]: DOG})
    assert set(LabelTable(table.path).labels) == {pictures[0], *now[1:]}
    assert LabelTable(table.path).moved([]) == 0


@pytest.mark.parametrize("name", ["", " ", "a;b", "x|y", "1.5", "a\nb"])
def test_names_that_a_table_does_not_give_back_are_rejected(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="name"):
        LabelTable(tmp_path / "labels.csv").label([name], ["cat", "dog"], "looked")


@pytest.mark.parametrize("kind", [ClassIndices, ClassSets])
def test_the_longest_names_are_read_back(kind: type[Targets], pictures: list[str], tmp_path: Path) -> None:
    table = LabelTable(tmp_path / "labels.csv", kind)
    names = [f"{number:0200}x"[1:] for number in range(1 if kind is ClassIndices else 480)]
    table.record({pictures[0]: table.label(names, [], "looked")})
    assert LabelTable(table.path, kind).labels[pictures[0]].names == tuple(names)
    for longer in (["x" * 201], [f"{number:0199}x" for number in range(600)]):
        with pytest.raises(UserError):
            table.label(longer, [], "looked")


def test_two_unicode_forms_are_one_class(tmp_path: Path) -> None:
    table = LabelTable(tmp_path / "labels.csv")
    assert {table.label([n], ["cat"], "looked") for n in (" O\u0308l ", "\u00d6l")} == {
        PictureLabel(("\u00d6l",), "looked")
    }


def test_splits_of_the_data_are_a_column(pictures: list[str], tmp_path: Path) -> None:
    table = LabelTable(tmp_path / "labels.csv", splits={pictures[0]: "train", pictures[1]: "test"})
    table.record({pictures[0]: CAT, pictures[1]: DOG})
    table.record({pictures[1]: CAT})
    assert [row["split"] for row in rows_of(table.path)] == ["train", "test"]


def test_other_files_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"FILE\.csv"):
        LabelTable(tmp_path / "labels.txt")
