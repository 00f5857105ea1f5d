import csv
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.cli import SHAPE, SHORT
from tests.data import noise, write_picture, write_tree
from tests.training import undrawn
from vitascope.cli import main
from vitascope.data.contents import content_of, contents_of, image_name
from vitascope.data.datasets import class_counts, described, open_data, open_for_evaluation, read_data
from vitascope.data.decisions import COLUMNS, Decisions, decided_in, decided_names
from vitascope.data.pack import pack
from vitascope.data.splits import ImageSet, Inventory
from vitascope.data.table_options import TableOptions
from vitascope.data.targets import ClassIndices
from vitascope.deploy.predict.predictor import find_images
from vitascope.errors import UserError
from vitascope.training.run.run import Run

Row = tuple[str, str, str, str]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return write_tree(tmp_path / "photos", {"cat": 8, "dog": 8})


def row(root: Path, name: str, decision: str, label: str = "") -> Row:
    return name, content_of(root / name).decode(), decision, label


def write(root: Path, rows: Sequence[Row], **options: Any) -> str:
    path = root / "decisions.csv"
    with open(path, "w", newline="", encoding=options.pop("encoding", "utf-8")) as file:
        csv.writer(file, **options).writerows([COLUMNS, *rows])
    return str(path)


def counts(data: object, audit: str) -> dict[str, int]:
    return class_counts(read_data(str(data), TableOptions(audit=audit)).by_name["all"])


def test_dropped_images_are_left_out_and_others_relabelled(photos: Path) -> None:
    rows = [row(photos, f"cat/00{number}.png", "drop") for number in range(3)]
    rows += [row(photos, "dog/000.png", "keep"), row(photos, "dog/001.png", "relabel", "cat")]
    table = TableOptions(audit=write(photos.parent, rows))
    images = read_data(str(photos), table).by_name["all"]
    names = [image_name(source, photos) for source in images.sources]
    label = dict(zip(names, images.truth.names(), strict=True))
    assert label.keys() == {path.relative_to(photos).as_posix() for path in photos.rglob("*.png")} - {
        name for name, _, decision, _ in rows if decision == "drop"
    }
    assert [name for name, (found,) in label.items() if found != name[:3]] == ["dog/001.png"]
    splits = open_data(str(photos), table=table)
    assert sum(map(len, splits.parts.values())) == 13
    assert "audit: 3 images left out, 1 relabelled" in described(splits)


def test_decisions_come_before_the_split(photos: Path) -> None:
    rows = [row(photos, f"cat/00{number}.png", "drop") for number in range(5)]
    audit = write(photos.parent, rows)
    splits = open_data(str(photos), table=TableOptions(audit=audit))
    assert all(
        class_counts(part)["cat"] == 1 for part in splits.parts.values()
    )  # one in each, and 5 left out
    rows.append(row(photos, "cat/005.png", "drop"))
    with pytest.raises(UserError, match="class 'cat' has 2 images; train, val and test need one each"):
        open_data(str(photos), table=TableOptions(audit=write(photos.parent, rows)))


@pytest.mark.parametrize("options", [{"delimiter": ";"}, {"encoding": "utf-8-sig"}])
def test_file_may_have_been_saved_by_a_spreadsheet(photos: Path, options: dict[str, Any]) -> None:
    write_picture(photos / "cat" / 'é, "x".png', seed=99)
    audit = write(photos.parent, [row(photos, 'cat/é, "x".png', "DROP")], **options)
    assert counts(photos, audit) == {"cat": 8, "dog": 8}


def test_changed_and_missing_images_are_not_decided(photos: Path) -> None:
    rows = [row(photos, f"cat/00{number}.png", "drop") for number in range(3)]
    audit = write(photos.parent, rows)
    write_picture(photos / "cat" / "000.png", seed=1000)
    (photos / "cat" / "001.png").unlink()
    inventory = read_data(str(photos), TableOptions(audit=audit))
    assert class_counts(inventory.by_name["all"]) == {"cat": 6, "dog": 8}
    assert inventory.notes == (
        "audit: 1 image left out, 0 relabelled; 2 decisions on images that are missing or changed",
    )
    write_picture(photos / "cat" / "002.png", seed=1000)
    with pytest.raises(UserError, match=r"decisions for other data: of 3 images, none is there"):
        counts(photos, audit)


def test_classes_of_several_labels_are_separated(photos: Path) -> None:
    table = photos.parent / "tags.csv"
    paths = sorted(path.relative_to(photos.parent).as_posix() for path in photos.rglob("*.png"))
    table.write_text("image,tags\n" + "".join(f"{path},{path[7:10]};animal\n" for path in paths))
    contents = [content_of(photos.parent / path).decode() for path in paths]
    audit = write(photos.parent, [(paths[0], contents[0], "relabel", "dog; cat")])
    images = read_data(str(table), TableOptions(audit=audit)).by_name["all"]
    assert [set(names) for names in images.truth.names()[:2]] == [{"cat", "dog"}, {"animal", "cat"}]
    with pytest.raises(UserError, match=r"'dgo', an unknown class; nearest: dog"):
        counts(table, write(photos.parent, [(paths[0], contents[0], "relabel", "cat;dgo")]))


def test_class_that_lost_all_images_is_none_of_the_classes(photos: Path) -> None:
    write_tree(photos, {"dogs": 2})
    rows = [row(photos, f"dogs/00{number}.png", "relabel", "dog") for number in range(2)]
    inventory = read_data(str(photos), TableOptions(audit=write(photos.parent, rows)))
    assert class_counts(inventory.by_name["all"]) == {"cat": 8, "dog": 10}
    assert inventory.notes[-1].endswith("no image is left of dogs")


def test_new_label_may_be_a_class_of_another_split_and_no_split_may_lose_all_images(tmp_path: Path) -> None:
    data = tmp_path / "data"
    write_tree(data / "train", {"cat": 3, "dog": 3})
    write_tree(data / "test", {"cat": 3})
    names = [f"test/cat/00{number}.png" for number in range(3)]
    audit = write(tmp_path, [row(data, names[0], "relabel", "dog")])
    splits = open_data(str(data), table=TableOptions(audit=audit))
    assert class_counts(splits.measured) == {"cat": 2, "dog": 1}
    audit = write(tmp_path, [row(data, name, "drop") for name in names])
    with pytest.raises(UserError, match=r"decisions.csv: drops all images of test"):
        open_data(str(data), table=TableOptions(audit=audit))


def test_unlabelled_image_is_dropped_but_not_relabelled(tmp_path: Path) -> None:
    for seed in range(3):
        write_picture(tmp_path / "data" / f"{seed}.png", seed=seed)
    audit = write(tmp_path, [row(tmp_path / "data", "1.png", "drop")])
    assert len(open_data(str(tmp_path / "data"), labelled=False, table=TableOptions(audit=audit)).train) == 1
    audit = write(tmp_path, [row(tmp_path / "data", "1.png", "relabel", "cat")])
    with pytest.raises(UserError, match="relabels an image that has no label, as cat"):
        read_data(str(tmp_path / "data"), TableOptions(audit=audit))


def test_copies_of_pixels_without_a_name_are_told_apart(tmp_path: Path) -> None:
    pixels = [noise(4, 4, seed=seed) for seed in (0, 1, 1, 2, 1)]
    everything = ImageSet("train", pixels, ClassIndices(np.arange(5), tuple("abcde")))
    names = decided_names(pixels, None, contents_of(pixels))
    audit = write(tmp_path, [(names[2], content_of(pixels[2]).decode(), "drop", "")])
    parts = (everything.subset("train", np.arange(2)), everything.subset("test", np.arange(2, 5)))
    found = Decisions.read(audit).applied(Inventory(parts, 3, None))
    assert [row for part in found.sets for row in part.truth.names()] == [("a",), ("b",), ("d",), ("e",)]


def test_unreadable_images_are_dropped_and_pictures_saved_again_have_another_content(photos: Path) -> None:
    (photos / "cat" / "bad.png").write_bytes(b"")
    assert counts(photos, write(photos.parent, [row(photos, "cat/bad.png", "drop")]))["cat"] == 8
    rows = [row(photos, name, decision) for name, decision in (("cat/000.png", "drop"), ("cat/001.png", ""))]
    assert len(Decisions.read(write(photos.parent, rows)).by_image) == 1  # a row without one decides nothing
    rows.append(row(photos, "cat/bad.png", "drop"))
    Image.open(photos / "cat" / "000.png").resize((4, 4)).save(photos / "cat" / "000.png")
    assert counts(photos, write(photos.parent, rows)) == {"cat": 8, "dog": 8}


HEAD = "image,content,decision,label\na.png,1-a,"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "image,issue,score,detail,suggestion\na.png,dark,1,dark,drop\n",
            "findings, not decisions.*audit.html",
        ),
        ("image,decision,label\na.png,drop,\n", r"something else than decisions \(no column content\)"),
        (f"{HEAD}dorp,\n", "row 1, a.png: 'dorp'; nearest: drop"),
        (f"{HEAD}relabel, \n", "row 1, a.png: relabel without a label"),
        (f"{HEAD}keep,\na.png,1-a,relabel,cat\n", "row 2, a.png: two decisions .*, keep and relabel cat"),
        ("", "cannot be read as a table"),
    ],
)
def test_other_files_are_rejected(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "decisions.csv"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        Decisions.read(str(path))


def test_missing_files_other_kinds_and_decisions_of_predict_are_rejected(tmp_path: Path) -> None:
    write_picture(tmp_path / "photo.png")
    for name, message in (("gone.csv", "no such file"), ("photo.png", "not a file of")):
        with pytest.raises(UserError, match=f"{name}: {message}"):
            open_data("digits", table=TableOptions(audit=str(tmp_path / name)))
    with pytest.raises(UserError):
        find_images(["a.png"], TableOptions(audit="decisions.csv"))


def test_pack_and_evaluation_leave_dropped_images_out(photos: Path, caplog: pytest.LogCaptureFixture) -> None:
    table = TableOptions(audit=write(photos.parent, [row(photos, "cat/000.png", "drop")]))
    packed = pack(str(photos), photos.parent / "shards", table=table)
    assert sum(shard.count for shards in packed.index.splits.values() for shard in shards) == 15
    assert len(open_for_evaluation(str(photos), ("cat", "dog"), table=table)) == 15
    assert "audit: 1 image left out" in caplog.text


def test_run_keeps_its_decisions(photos: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(photos.parent)
    rows = [row(photos, "cat/000.png", "drop"), row(photos, "dog/001.png", "relabel", "cat")]
    write(photos.parent, rows)
    with undrawn():
        status = main(["train", "--data", "photos", "--audit", "decisions.csv", "--run", "r", *SHAPE, *SHORT])
    assert (status, "audit: 1 image left out, 1 relabelled" in capsys.readouterr().out) == (0, True)
    monkeypatch.chdir("/")
    opened = Run.open(photos.parent / "r").open_data(check=("train", "val", "test"))
    assert (opened.note, opened.restored.complete) == ("", True)
    parts = opened.splits.parts.values()
    assert sum((Counter(class_counts(part)) for part in parts), Counter()) == {"cat": 8, "dog": 7}
    assert main(["evaluate", str(photos.parent / "r"), "--audit", "x.csv", "--device", "cpu"]) == 2
    assert "audit is about other data: set data" in capsys.readouterr().err
    (photos.parent / "decisions.csv").unlink()
    assert main(["evaluate", str(photos.parent / "r"), "--device", "cpu"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert re.search(r"decisions.csv: no such file", line)


def test_data_of_a_run_that_have_moved_have_its_decisions(photos: Path) -> None:
    audit = write(photos.parent, [row(photos, "cat/000.png", "drop")])
    options = {"task": "classify", "seed": 0, "device": "cpu", "data": str(photos), "audit": audit}
    run = Run.create({**options, "run": str(photos.parent / "r")})
    run.record_split(open_data(str(photos), table=run.table))
    moved = photos.rename(photos.parent / "moved")
    assert run.open_data(str(moved)).note == ""
    project = photos.parent / "project"
    shutil.copytree(moved, project / "photos")
    Path(audit).rename(project / "decisions.csv")
    assert run.open_data(str(project / "photos")).note == ""
    with pytest.raises(UserError, match=r"decisions.csv: no such file"):
        run.open_data(str(moved))


def test_changes_are_counted_by_part_and_said_beside_the_result_of_the_part(tmp_path: Path, capsys) -> None:
    data = tmp_path / "photos"
    for part in ("train", "test"):
        write_tree(data / part, {"cat": 4, "dog": 4})
    decided = [row(data, f"train/cat/00{number}.png", "drop") for number in range(2)]
    decided += [row(data, "test/cat/000.png", "drop"), row(data, "test/dog/001.png", "relabel", "cat")]
    audit = write(tmp_path, decided)
    notes = read_data(str(data), TableOptions(audit=audit)).notes
    assert notes == (
        "audit, train: 2 images left out, 0 relabelled",
        "audit, test: 1 image left out, 1 relabelled",
        "audit: 3 images left out, 1 relabelled",
    )
    assert decided_in(notes, "test") == notes[1]
    assert decided_in(notes, "val") == decided_in([], "test") == ""
    with undrawn():
        run = str(tmp_path / "r")
        assert main(["train", "--data", str(data), "--audit", audit, "--run", run, *SHAPE, *SHORT]) == 0
    assert f"after decisions: {notes[1]}\n" in capsys.readouterr().out
