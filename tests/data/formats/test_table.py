import csv
import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.data import write_picture, write_tree
from vitascope.data.datasets import class_counts, described, open_data, open_pictures, read_data
from vitascope.data.split_record import record_of, restore
from vitascope.data.splits import ImageSet, Splits
from vitascope.data.table_options import TableOptions
from vitascope.data.targets import ClassIndices, ClassSets
from vitascope.errors import UserError

Row = Mapping[str, Any]


def write_csv(path: Path, rows: Sequence[Row], delimiter: str = ",", encoding: str = "utf-8") -> Path:
    with open(path, "w", encoding=encoding, newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_jsonl(path: Path, rows: Sequence[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_parquet(path: Path, rows: Sequence[Row]) -> Path:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed (vitascope[parquet])")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist([dict(row) for row in rows]), path)
    return path


FORMS: dict[str, Callable[[Path, Sequence[Row]], Path]] = {
    "csv": write_csv,
    "tsv": lambda path, rows: write_csv(path, rows, "\t"),
    "jsonl": write_jsonl,
    "parquet": write_parquet,
}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `photos/<class>/<number>.png`, 10 cats and 12 dogs, which tests only read."""
    root = tmp_path_factory.mktemp("tables")
    write_tree(root / "photos", {"dog": 12, "cat": 10})
    return root


def rows_of(root: Path) -> list[dict[str, Any]]:
    """A row for each picture, in no particular order."""
    found = sorted((root / "photos").rglob("*.png"), key=lambda path: (path.name, path.parent.name))
    return [{"path": path.relative_to(root).as_posix(), "label": path.parent.name} for path in found]


def labelled(root: Path, label: Callable[[int, str], Any], **others: Any) -> list[dict[str, Any]]:
    """The rows with other labels, by number and class, and with more columns."""
    return [
        row | {"label": label(number, row["label"])} | {name: f(number) for name, f in others.items()}
        for number, row in enumerate(rows_of(root))
    ]


def opened(root: Path, rows: Sequence[Row], name: str = "labels.csv", **options: Any) -> Splits:
    """The splits of a table in the folder of the photos."""
    path = FORMS[name.rpartition(".")[2]](root / name, rows)
    return open_data(str(path), table=TableOptions(**options))


def assert_refused(root: Path, rows: Sequence[Row], line: str, **options: Any) -> None:
    with pytest.raises(UserError, match=line) as raised:
        opened(root, rows, **options)
    assert "\n" not in str(raised.value)


def assert_like_the_folder(splits: Splits, root: Path) -> None:
    folder = open_data(str(root / "photos"))
    for name, images in splits.parts.items():
        assert list(images.sources) == list(folder.parts[name].sources)
        assert images.targets == folder.parts[name].targets


@pytest.mark.parametrize(
    ("encoding", "suffix", "delimiter"),
    [("utf-8", "csv", ","), ("utf-8-sig", "csv", ";"), ("utf-8", "csv", "\t"), ("utf-8-sig", "tsv", "\t")],
)
def test_utf_8_and_the_delimiters_of_spreadsheets_are_read(photos, encoding, suffix, delimiter) -> None:
    rows = labelled(photos, lambda number, name: {"cat": "Katze, Kater", "dog": "Hündin; jung"}[name])
    path = write_csv(photos / f"excel.{suffix}", rows, delimiter, encoding)
    splits = open_data(str(path), table=TableOptions(labels="one"))
    assert splits.train.class_names == ("Hündin; jung", "Katze, Kater")


def test_bytes_that_are_not_utf_8_are_named_with_the_way_out(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    for encoding, line in (
        ("latin-1", "line 3 has the bytes fc 6e 64 69 at position 30"),
        ("utf-16", "line 1 has the bytes ff fe .* at position 0"),
    ):
        path.write_bytes("path,label\n1.png,Katze\n2.png,Hündin\n".encode(encoding))
        with pytest.raises(UserError, match=f"not UTF-8: {line}; save it as UTF-8, or .*iconv -f "):
            open_data(str(path))


def test_blank_lines_and_the_index_of_pandas_are_skipped(photos: Path) -> None:
    lines = [f"{number};{row['path']};{row['label']}\n\n;;\n" for number, row in enumerate(rows_of(photos))]
    (photos / "index.csv").write_text(";path;label\n" + "".join(lines))
    assert_like_the_folder(open_data(str(photos / "index.csv")), photos)


def test_missing_values_of_json_and_parquet_are_empty_cells(photos: Path) -> None:
    rows = labelled(photos, lambda number, name: None if number < 2 else float(name == "dog"))
    for form in ("jsonl", "parquet"):
        splits = opened(photos, rows, f"missing.{form}")
        assert splits.train.class_names == ("0", "1")
        assert splits.unused == ("2 images without a class",)


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("a.csv", b"", "it has no names of columns"),
        ("a.csv", b"path,label\n", "the table has no rows"),
        ("a.csv", b"path,label\n1.png,cat,x\n", "line 2 has 3 cells, the first row 2"),
        ("a.csv", b"path,label,path\n1.png,cat,x\n", "the column 'path' 2 times"),
        ("a.csv", b'path,label\n1.png,"cat\n', "line 2: unexpected end of data"),
        ("a.jsonl", b'{"path": "1.png"\n', "line 1: "),
        ("a.jsonl", b"[1, 2]\n", "line 1: not an object, such as"),
        ("a.jsonl", b"\n", "it has no names of columns"),
        ("a.jsonl", b'{"path": "a", "label": "\\ud800"}\n', "line 1: .*surrogates not allowed"),
        ("a.csv", b"path," + b"x" * 200_000 + b"\n", "field larger than field limit"),
        ("a.parquet", b"nothing", "cannot be read as a table"),
        ("a.json", b'{"images": [], "annotations": []}', r"not a folder, .*a table \(\.csv, \.tsv, \.jsonl"),
    ],
)
def test_file_that_is_no_table_is_one_line(tmp_path: Path, name: str, content: bytes, line: str) -> None:
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow", reason="pyarrow is not installed (vitascope[parquet])")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=line) as raised:
        open_data(str(tmp_path / name))
    assert str(tmp_path / name) in str(raised.value)


def test_keys_of_some_rows_are_columns_with_empty_cells(photos: Path) -> None:
    rows = [row | {f"k{number}": 1} for number, row in enumerate(rows_of(photos))]
    del rows[0]["label"], rows[-1]["label"]
    splits = opened(photos, rows, "keys.jsonl")
    assert splits.unused == ("2 images without a class",)
    assert described(splits)[-2].endswith("unused: k0, k1, k2, k3, k4, k5, k6, k7 and 14 others")


def test_parquet_with_pictures_names_the_folder_that_is_read(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", [{"image": {"bytes": b"x", "path": None}, "label": 1}])
    with pytest.raises(UserError, match=r"'image' has pictures.*folder.*Hugging Face"):
        open_data(str(tmp_path / "a.parquet"))


@pytest.mark.parametrize(
    ("image", "label"),
    [("Image", "class"), ("FILE", "Category"), ("filename", "target"), ("image_path", "LABELS")],
)
def test_columns_are_recognized_by_their_usual_names(photos: Path, image: str, label: str) -> None:
    splits = opened(
        photos, [{image: row["path"], "width": 8, label: row["label"]} for row in rows_of(photos)]
    )
    assert_like_the_folder(splits, photos)
    line = f"columns: image {image}, label {label} (one class per image); unused: width"
    assert described(splits)[-1] == line


def test_a_column_can_be_left_out(photos: Path) -> None:
    rows = labelled(photos, lambda number, name: name, set=lambda number: "blue")
    assert_refused(photos, rows, "the column set has blue; a split is train, .*columns split=$")
    assert_like_the_folder(opened(photos, rows, columns=("split=",)), photos)


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        (("label=tag",), "no column 'tag'; nearest: tags; it has path, label, tags"),
        (("tags",), "expected ROLE=COLUMN"),
        (("lable=tags",), "unknown role of a column 'lable'; nearest: label"),
        (("label=tags", "label=label"), "a role is given twice"),
        ((), "the columns label, tags may each be that of the label.*columns label=label"),
    ],
)
def test_wrong_columns_are_refused(photos: Path, columns: tuple[str, ...], line: str) -> None:
    rows = labelled(photos, lambda number, name: name, tags=lambda number: "x")
    assert_refused(photos, rows, line, columns=columns)


def test_tables_without_images_or_labels_and_options_of_tables_for_other_data_are_refused(photos) -> None:
    assert_refused(photos, [{"a": 1, "label": "cat"}], "image paths among a, label; name it: columns im")
    rows = [{"path": row["path"], "b": "x"} for row in rows_of(photos)]
    assert_refused(photos, rows, "no labelled images.*unused: b; name")
    with pytest.raises(UserError, match=r"labels is about a table, and .*photos is none"):
        open_data(str(photos / "photos"), table=TableOptions(labels="one"))


def test_paths_are_relative_to_another_folder(photos: Path, tmp_path: Path) -> None:
    rows = [row | {"path": row["path"].removeprefix("photos/")} for row in rows_of(photos)]
    path = write_csv(tmp_path / "labels.csv", rows)
    found = read_data(str(path), TableOptions(images=str(photos / "photos")))
    assert found.root == (photos / "photos").as_posix()
    assert_like_the_folder(open_data(str(path), table=TableOptions(images=str(photos / "photos"))), photos)
    with pytest.raises(
        UserError, match=f"22 of 22 images do not exist: .* and 19 others.*; searched in {tmp_path};"
    ):
        open_data(str(path))
    with pytest.raises(UserError, match="images nowhere: no such folder"):
        open_data(str(path), table=TableOptions(images="nowhere"))


@pytest.mark.parametrize("form", ["absolute", "backslashes", "no suffix", "up and down"])
def test_other_ways_to_write_paths_are_read(photos: Path, form: str) -> None:
    change: dict[str, Callable[[str], str]] = {
        "absolute": lambda path: str(photos / path),
        "backslashes": lambda path: path.replace("/", "\\"),
        "no suffix": lambda path: path.removesuffix(".png"),
        "up and down": lambda path: f"photos/../{path} ",
    }
    rows = [{"image_id": change[form](row["path"]), "label": row["label"]} for row in rows_of(photos)]
    assert_like_the_folder(opened(photos, rows), photos)


def test_paths_out_of_the_folder_of_the_table_are_recorded_below_their_own(photos: Path) -> None:
    (photos / "tables").mkdir()
    rows = [row | {"path": f"../{row['path']}"} for row in rows_of(photos)]
    splits = open_data(str(write_csv(photos / "tables" / "labels.csv", rows)))
    assert splits.root == (photos / "photos").as_posix()
    assert {name[:4] for name in record_of(splits).parts["train"].names} == {"cat/", "dog/"}


def test_paths_out_of_the_named_folder_are_refused(photos: Path) -> None:
    images = str(photos / "photos" / "cat")
    rows = [{"path": f"../dog/{number:03}.png", "label": "dog"} for number in range(2)]
    rows += [{"path": f"{number:03}.png", "label": "cat"} for number in range(2)]
    assert_refused(photos, rows, r"2 of 4 images lead out of .*cat: \.\./dog/000\.png, ", images=images)
    rows[0]["path"] = "/etc/passwd"
    assert_refused(photos, rows, r"2 of 4 images lead out of .*cat: /etc/passwd, ", images=images)


def test_missing_files_are_counted_and_the_first_are_named(photos: Path) -> None:
    rows = rows_of(photos)
    for number in (1, 3, 5, 7):
        rows[number]["path"] = f"gone/{number}.png"
    line = r"4 of 22 images do not exist: gone/1\.png, gone/3\.png, gone/5\.png and 1 other; searched in "
    assert_refused(photos, rows, line + str(photos))
    os.mkfifo(photos / "pipe.png")
    (photos / "broken.png").symlink_to("nowhere.png")
    rows = [{"path": name, "label": "cat"} for name in ("pipe.png", "broken.png", "photos")]
    line = r"3 of 25 images do not exist: pipe\.png, broken\.png, photos; searched in "
    assert_refused(photos, [*rows_of(photos), *rows], line)


def test_name_without_suffix_of_several_files_is_refused(tmp_path: Path) -> None:
    for name in ("a.png", "a.bmp", "b.png"):
        write_picture(tmp_path / name)
    rows = [{"image_id": "a", "label": "x"}, {"image_id": "b", "label": "y"}]
    assert_refused(
        tmp_path, rows, r"1 of 2 images have several files: a may be a\.bmp or a\.png; write the suffixes"
    )


def test_repeated_images_count_once_unless_they_differ(photos: Path) -> None:
    rows = rows_of(photos)
    assert opened(photos, [*rows, rows[3], rows[5]]).unused == ("2 rows that repeat an image",)
    other = rows[3] | {"label": "fox", "path": "photos/./" + rows[3]["path"].removeprefix("photos/")}
    assert_refused(
        photos, [*rows, other], "is in several rows, with different classes: '.*' and 'fox' in rows 4 and 23"
    )


def several(splits: Splits) -> dict[str, int]:
    assert isinstance(splits.train.targets, ClassSets)
    found: dict[str, int] = dict.fromkeys(splits.train.class_names, 0)
    for images in splits.parts.values():
        for name, count in class_counts(images).items():
            found[name] += count
    return found


@pytest.mark.parametrize("separator", [";", "|", ",", " ", "; ", ", "])
def test_several_labels_in_a_cell_are_recognized(photos: Path, separator: str) -> None:
    rows = labelled(photos, lambda n, name: separator.join([name, "small"]) if n % 2 else name)
    rows[0]["label"], rows[1]["label"] = "", "small"
    splits = opened(photos, rows)
    assert several(splits) == {"cat": 9, "dog": 11, "small": 11}
    assert f"(several classes per image, separated by {separator.strip() or ' '!r})" in described(splits)[-1]
    assert splits.unused == ()  # an image of an empty cell has none of the classes


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_lists_are_recognized(photos: Path, form: str) -> None:
    rows = labelled(photos, lambda n, name: [name, "small"] if n % 2 else [name] if n else [])
    if form == "csv":
        rows = [row | {"label": json.dumps(row["label"])} for row in rows]
    assert several(opened(photos, rows, f"lists.{form}")) == {"cat": 9, "dog": 12, "small": 11}


def test_columns_of_0_and_1_are_labels(photos: Path) -> None:
    rows = [
        {"path": row["path"], "size": n, "dog": int(row["label"] == "dog"), "cat": int(row["label"] == "cat")}
        | {"small": n % 2}
        for n, row in enumerate(rows_of(photos))
    ]
    splits = opened(photos, rows)
    assert several(splits) == {"cat": 10, "dog": 12, "small": 11}
    line = "columns: image path, label dog, cat, small (3 columns of 0 and 1, several classes per image)"
    assert described(splits)[-1] == f"{line}; unused: size"
    named = opened(photos, rows, columns=("label=dog,cat",))
    assert_like_the_folder(named, photos)  # each image has one of these
    assert several(opened(photos, rows, columns=("label=dog,cat",), labels="several")) == {
        "cat": 10,
        "dog": 12,
    }
    assert_refused(photos, rows, "labels=one, but 11 of 22 rows have several classes", labels="one")
    assert_refused(
        photos,
        rows,
        r"a column of 0 and 1 with other cells: size has '\d' in 1 row",
        columns=("label=dog,size",),
    )


@pytest.mark.parametrize(
    "names",
    [("golden retriever", "flat-coated retriever"), ("tench, Tinca tinca", "goldfish, Carassius auratus")],
)
def test_names_with_spaces_and_commas_are_one_class(photos: Path, names: tuple[str, str]) -> None:
    rows = labelled(photos, lambda n, name: names[name == "dog"])
    assert opened(photos, rows).train.class_names == tuple(sorted(names))


def test_recognition_of_labels_is_overruled(photos: Path) -> None:
    rows = labelled(photos, lambda n, name: f"{name};small" if n // 2 % 2 else f"{name};large")
    assert len(opened(photos, rows, labels="one").train.class_names) == 4
    rows = labelled(photos, lambda n, name: f"{name}+small" if n // 2 % 2 else name)
    assert len(opened(photos, rows).train.class_names) == 4
    assert several(opened(photos, rows, label_separator="+")) == {"cat": 10, "dog": 12, "small": 10}
    assert several(opened(photos, rows_of(photos), labels="several")) == {"cat": 10, "dog": 12}


def test_options_without_a_meaning_are_refused() -> None:
    for options in ({"label_separator": ""}, {"labels": "two"}, {"columns": "label"}):
        with pytest.raises(UserError):
            TableOptions(**options)


def test_unlabelled_images_are_counted_and_pretrained_on(photos: Path) -> None:
    rows = labelled(photos, lambda n, name: "" if n < 4 else name)
    path = str(write_csv(photos / "partly.csv", rows))
    splits, all_of_them = open_data(path), open_data(path, labelled=False)
    assert splits.unused == ("4 images without a class",)
    assert sum(map(len, splits.parts.values())) == 18
    assert len(all_of_them.train) == len(splits.train) + 4
    assert all_of_them.unused == ()
    assert all(images.targets is None for images in all_of_them.parts.values())
    assert all_of_them.measured.sources == splits.measured.sources
    found = restore(record_of(all_of_them), read_data(path), ("train", "val", "test"))
    assert found.complete
    assert found.new == 0
    path = str(write_csv(photos / "none.csv", [{"image": row["path"]} for row in rows_of(photos)]))
    splits = open_data(path, labelled=False)
    assert (len(splits.train), len(splits.val), splits.test) == (20, 2, None)
    assert len(open_pictures(path)) == 22


def test_groups_of_val_and_test_are_not_pretrained_on(photos: Path) -> None:
    rows = labelled(photos, lambda n, name: "" if n % 4 == 0 else name, patient=lambda n: f"p{n // 4}")
    path, table = str(write_csv(photos / "groups.csv", rows)), TableOptions(columns=("group=patient",))
    splits = open_data(path, labelled=False, table=table)
    held = [str(source) for name in ("val", "test") for source in splits.parts[name].sources]
    patient = {str(photos / row["path"]): row["patient"] for row in rows}
    assert not {patient[name] for name in held} & {patient[str(source)] for source in splits.train.sources}
    assert splits.unused == ("2 images without a class, of groups in val or test",)
    assert sum(map(len, splits.parts.values())) == 20
    alone = [{"path": row["path"], "patient": row["patient"]} for row in rows]
    splits = open_data(str(write_csv(photos / "groups.csv", alone)), labelled=False, table=table)
    assert not set(splits.train.groups) & set(splits.val.groups)
    assert len(splits.val.groups)


@pytest.mark.parametrize(
    ("label", "line"),
    [
        (
            lambda n, name: n / 7,
            "22 different numbers from 0 to 3, and vitascope learns classes, not numbers",
        ),
        (lambda n, name: n * n, "22 different numbers from 0 to 441, .*no regression"),
        (lambda n, name: "dog ", "only one class, 'dog'"),
        (lambda n, name: "Cat" if n == 2 else name, r"2 spellings, 'cat' \(9\), 'Cat' \(1\); .*write 'cat'"),
        (lambda n, name: "Cat;a" if n == 2 else f"{name};b", r"in 2 spellings, 'cat' \(9\), 'Cat' \(1\)"),
    ],
)
def test_labels_that_cannot_be_learned_are_refused(photos: Path, label, line: str) -> None:
    assert_refused(photos, labelled(photos, label), line)


def test_given_splits_are_kept_but_for_test_images_with_secret_labels(photos: Path) -> None:
    names = ["Train", "training_set", "TRAIN", "valid", "test", ""]
    rows = labelled(photos, lambda n, name: name, split=lambda n: names[n // 2 % 6])
    splits = opened(photos, rows)
    assert {name: len(images) for name, images in splits.parts.items()} == {"train": 12, "val": 4, "test": 4}
    assert splits.drawn == ()
    assert splits.unused == ("2 images without a split",)
    assert restore(record_of(splits), read_data(str(photos / "labels.csv")), ("train",)).complete
    rows = labelled(photos, lambda n, name: "" if n < 4 else name)
    rows = [row | {"split": "test" if n < 4 else "train"} for n, row in enumerate(rows)]
    splits = opened(photos, rows)
    assert (len(splits.train), len(splits.val), splits.test) == (16, 2, None)
    assert splits.unused == ("4 images without a class",)


def test_class_that_train_lacks_is_refused(photos: Path) -> None:
    for label in (lambda n, name: name, lambda n, name: f"{name};small"):
        rows = labelled(photos, label, split=lambda n: "val" if n < 4 else "train")
        rows[0]["label"] = rows[0]["label"].replace("cat", "fox")
        assert_refused(photos, rows, r"the val images of .*classes are not among .*: fox")


def test_groups_are_in_one_part(photos: Path) -> None:
    rows = labelled(photos, lambda n, name: name, patient=lambda n: f"p{n // 4}" if n < 20 else "")
    for columns in (("group=patient",), ("group=patient", "split=")):
        splits = opened(photos, rows, columns=columns)
        parts = [set(images.groups.tolist()) for images in splits.parts.values()]
        assert not parts[0] & parts[1] | parts[0] & parts[2] | parts[1] & parts[2]
        assert sum(map(len, parts)) == 7  # an image without a group is one
    rows = [row | {"split": ("train", "val")[n % 8 == 0]} for n, row in enumerate(rows)]
    line = r"patient: 3 of 5 groups are in several splits: p0 \(1 val, 3 train\), p2 \(.*columns split=$"
    assert_refused(photos, rows, line, columns=("group=patient",))


def test_a_path_in_another_unicode_form_names_the_file(tmp_path: Path) -> None:
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    write_tree(tmp_path, {decomposed: 3, "b": 3})
    rows = [{"path": f"{composed}/{number:03}.png", "label": "a"} for number in range(3)]
    line = rf"3 of 3 images do not exist: .*; nearest: .*{decomposed}/000\.png, in another Unicode form"
    assert_refused(tmp_path, rows, line)


def test_minus_one_is_no_label_but_beside_one_alone(photos: Path) -> None:
    for others, classes in (((0, 1, 2), {"0", "1", "2"}), ((1,), {"-1", "1"}), ((1, 2), {"1", "2"})):
        numbers = itertools.cycle((-1, *others))
        splits = opened(photos, labelled(photos, lambda *_, numbers=numbers: next(numbers)))
        assert set(splits.train.class_names) == classes


@pytest.mark.parametrize("missing", ["nan", "NaN", "n/a", "null", "None", "?"])
def test_what_is_no_number_among_numbers_is_no_label(photos: Path, missing: str) -> None:
    def labelled_by(*cells: str) -> list[dict[str, Any]]:
        repeated = itertools.cycle((missing, *cells))
        return labelled(photos, lambda *_: next(repeated))

    for one in ("1", "1.0"):
        splits = opened(photos, labelled_by(one, "0"))
        assert splits.train.class_names == ("0", "1")
        assert any(f"{missing} in" in note and "is no label" in note for note in splits.notes)
    assert_refused(photos, labelled_by("0.5", "0.25"), "2 different numbers .* regression")
    assert missing in opened(photos, labelled_by("cat", "dog")).train.class_names


def test_numbers_of_groups_and_folds_have_one_form_and_nan_is_none(photos: Path) -> None:
    texts, numbers = ("1.0", "2", "nan", ""), itertools.count()
    rows = [row | {"site": texts[next(numbers) % 4]} for row in labelled(photos, lambda *_: "x")]

    def read(rows: Sequence[Row], *columns: str) -> ImageSet:
        path = write_csv(photos / "sites.csv", rows)
        (images,) = read_data(str(path), TableOptions(columns=columns)).sets
        return images

    images = read(rows, "group=site", "fold=site")
    assert set(images.folds.tolist()) == {"1", "2", ""}
    alone = sum(row["site"] in ("nan", "") for row in rows)
    assert len(set(images.groups.tolist())) == 2 + alone  # each without a group is a group of its own
    names = [row | {"site": name} for row, name in zip(rows, itertools.cycle(("NA", "DE")), strict=False)]
    assert set(read(names, "group=site").groups.tolist()) == {"NA", "DE"}


def test_unknown_cells_in_columns_of_0_and_1_are_counted(photos: Path) -> None:
    cells = {"cat": lambda number: (0, 1, -1)[number % 3], "dog": lambda number: (1, 0)[number % 2]}
    rows = [
        {k: v for k, v in row.items() if k != "label"} for row in labelled(photos, lambda *_: "", **cells)
    ]
    assert any("7 unknown cells, several classes" in note for note in opened(photos, rows).notes)
    other = [row | {"cat": "perhaps" if row["cat"] == -1 else row["cat"]} for row in rows]
    columns = ("label=cat,dog",)
    assert_refused(
        photos, other, r"a column .* cat has 'perhaps' in 7 rows; write 0, 1, or -1", columns=columns
    )
    blanks = [row | {"cat": "" if row["cat"] == -1 else row["cat"]} for row in rows]
    assert any("7 blank cells as 0" in note for note in opened(photos, blanks).notes)


@pytest.mark.parametrize("stray", [",", ", ", ";", "|"])
def test_separators_at_the_ends_of_cells_divide_nothing(photos: Path, stray: str) -> None:
    for names in (("cat", "dog"), ("goldfish, Carassius auratus", "tench, Tinca tinca")):
        for every in (1, 5):
            rows = labelled(
                photos, lambda n, name, k=names, e=every: k[name == "dog"] + (stray if n % e == 0 else "")
            )
            targets = opened(photos, rows).train.targets
            assert isinstance(targets, ClassIndices)
            assert targets.class_names == names


def test_a_name_that_stands_twice_in_a_line_of_json_is_rejected(photos: Path) -> None:
    path = photos / "twice.jsonl"
    path.write_text('{"path": "photos/cat/0.png", "label": "cat", "label": "dog"}\n')
    with pytest.raises(UserError, match="line 1: the name 'label' stands twice"):
        open_data(str(path))
    same = [
        f'{{"path": "photos/{name}/000.png", "label": "{name}", "label": "{name}"}}'
        for name in ("cat", "dog")
    ]
    path.write_text("\n".join(same))
    assert read_data(str(path)).sets[0].class_names == ("cat", "dog")
