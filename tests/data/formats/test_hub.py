import sys
from pathlib import Path
from typing import Any

import pytest

from tests.data import encoded, noise, sets_of, splits_of, write_picture
from vitascope.data.datasets import open_data
from vitascope.data.formats.hub import HubDataset, looks_like_hub_id
from vitascope.errors import UserError
from vitascope.models.decoding import ImageError, read_image


def test_hub_ids_are_distinguished_from_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for data in ("uoft-cs/cifar10", "owner/name.x@v1.0", "owner/name@refs/convert/parquet"):
        assert looks_like_hub_id(data)
    relative = ("./pets", "../pets", "~/pets", "/data/pets")
    for data in (*relative, "digits", "a/b/c", "owner/", "owner/name@", "a/b--c"):
        assert not looks_like_hub_id(data)
    (tmp_path / "data" / "pets").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert not looks_like_hub_id("data/pets")


def test_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r'pip install "vitascope\[datasets\]"'):
        splits_of(HubDataset(), "owner/name", seed=0)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The `datasets` library, with its cache in the test's folder."""
    datasets = pytest.importorskip("datasets", reason="datasets is not installed (vitascope[datasets])")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    return datasets


def png(number: int) -> bytes:
    return encoded(noise(4, 6, seed=number))


def table(
    library: Any,
    labels: list[Any],
    label: str = "label",
    *,
    first: int = 0,
    types: dict[str, Any] | None = None,
) -> Any:
    """Pictures and labels, as `Image` and `ClassLabel` of cat and dog unless `types` names others."""
    features = {"image": library.Image(), label: library.ClassLabel(names=["cat", "dog"])} | (types or {})
    rows = {"image": [{"bytes": png(first + n), "path": None} for n in range(len(labels))], label: labels}
    for name in features.keys() - rows:
        rows[name] = rows["image"] if isinstance(features[name], library.Image) else labels
    return library.Dataset.from_dict(rows, features=library.Features(features))


def saved(tmp_path: Path, data: Any) -> str:
    data.save_to_disk(str(tmp_path / "saved"))
    return str(tmp_path / "saved")


def test_pictures_in_separate_files_are_read(tmp_path: Path, library: Any) -> None:
    path = write_picture(tmp_path / "a.png")
    types = library.Features({"image": library.Image(), "label": library.ClassLabel(names=["cat", "dog"])})
    rows = {"image": [str(path), None], "label": [0, 1]}
    images = sets_of(HubDataset(), saved(tmp_path, library.Dataset.from_dict(rows, features=types)))["all"]
    assert images.sources[0].read_bytes() == path.read_bytes()
    with pytest.raises(ImageError, match="saved:all:1: cannot be read: the row has no picture"):
        read_image(images.sources[1])


def test_picture_columns_without_a_type_are_found(tmp_path: Path, library: Any) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    (tmp_path / "set").mkdir()
    rows = [{"picture": {"bytes": png(number), "path": "x.png"}, "label": number % 2} for number in range(8)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "set" / "any.parquet")
    images = sets_of(HubDataset(), str(tmp_path / "set"))["all"]
    assert [source.read_bytes() for source in images.sources] == [png(number) for number in range(8)]
    assert images.class_names == ("0", "1")


@pytest.mark.parametrize("column", ["label", "labels", "fine_label", "class"])
def test_words_and_numbers_in_a_column_of_a_usual_name_are_classes(tmp_path, library, column: str) -> None:
    for kind, values, names in (
        ("string", ["dog", "ant", "dog"], ("ant", "dog")),
        ("uint8", [2, 0, 2], ("0", "2")),
    ):
        data = saved(tmp_path / kind, table(library, values, column, types={column: library.Value(kind)}))
        images = sets_of(HubDataset(), data)["all"]
        assert (images.class_names, images.labels.tolist()) == (names, [1, 0, 1])


def test_several_and_missing_columns_are_named(tmp_path: Path, library: Any) -> None:
    data = saved(tmp_path, table(library, [0, 1], types={"mask": library.Image()}))
    with pytest.raises(UserError, match="2 columns of pictures: image, mask"):
        splits_of(HubDataset(), data, seed=0)
    rows = table(library, [0, 1])
    with pytest.raises(UserError, match="0 columns of pictures, but label"):
        splits_of(HubDataset(), saved(tmp_path / "a", rows.remove_columns("image")), seed=0)
    with pytest.raises(UserError, match=r"0 columns of classes .*, but image"):
        splits_of(HubDataset(), saved(tmp_path / "b", rows.remove_columns("label")), seed=0)


@pytest.mark.parametrize("kind", ["ClassLabel", "int64"])
def test_rows_without_a_class_are_images_without_a_label(tmp_path: Path, library: Any, kind: str) -> None:
    types = {} if kind == "ClassLabel" else {"label": library.Value(kind)}
    data = saved(tmp_path, table(library, [0, None, -1, 1] * 3, types=types))
    labelled, others = HubDataset().read(data).sets
    assert (labelled.labels.tolist(), labelled.sources.indices.tolist()) == ([0, 1] * 3, [0, 3, 4, 7, 8, 11])
    assert (others.targets, others.sources.indices.tolist()) == (None, [1, 2, 5, 6, 9, 10])
    assert open_data(data).unused == ("6 images without a class",)


def test_a_list_of_classes_per_image_is_named_with_the_way_out(tmp_path: Path, library: Any) -> None:
    lists = table(library, [[0], [0, 1]], types={"label": library.Sequence(library.Value("int64"))})
    with pytest.raises(
        UserError, match=r"the column label has a list of classes per image.*\.jsonl"
    ) as raised:
        HubDataset().read(saved(tmp_path, lists))
    assert "0 columns" not in str(raised.value)


def test_class_missing_in_train_and_other_columns_are_rejected(tmp_path: Path, library: Any) -> None:
    words = {"label": library.Value("string")}
    parts = {
        "train": table(library, ["cat", "dog"], types=words),
        "test": table(library, ["cow"], types=words),
    }
    with pytest.raises(UserError, match="test: label 'cow' is none of the 2 classes"):
        sets_of(HubDataset(), saved(tmp_path, library.DatasetDict(parts)))
    parts = {"train": table(library, [0, 1]), "test": table(library, [0, 1]).remove_columns("label")}
    with pytest.raises(UserError, match="test has other columns than train"):
        splits_of(HubDataset(), saved(tmp_path / "b", library.DatasetDict(parts)), seed=0)


def test_damaged_tables_are_one_line(tmp_path: Path, library: Any) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(UserError, match=r"set: cannot be opened: [^\n]+$"):
        splits_of(HubDataset(), str(tmp_path / "set"), seed=0)
    for name in ("train.parquet", "test.arrow"):
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(UserError, match="parquet and arrow files beside each other"):
        splits_of(HubDataset(), str(tmp_path), seed=0)


@pytest.mark.parametrize(("data", "revision"), [("owner/name", None), ("owner/name@v1.0", "v1.0")])
def test_the_given_revision_is_requested_from_the_hub(monkeypatch, library, data, revision) -> None:
    asked = []

    def load(name: str, *, revision: str | None) -> Any:
        asked.append((name, revision))
        return library.DatasetDict({"train": table(library, [0, 1] * 10), "test": table(library, [0, 1])})

    monkeypatch.setattr(library, "load_dataset", load)
    splits = splits_of(HubDataset(), data, seed=0)
    assert asked == [("owner/name", revision)]
    assert [len(splits.train), len(splits.val), len(splits.measured)] == [18, 2, 2]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("DatasetNotFoundError", "owner/name: no such folder, nor a data set on the hub"),
        (ConnectionError("Couldn't reach"), "owner/name: cannot be opened: Couldn't reach"),
        (KeyError("id"), r"owner/name: .* does not answer as a hub does \(KeyError: 'id'"),
        (TypeError("a list"), r"owner/name: .* does not answer as a hub does \(TypeError: a list"),
        (ValueError("Config name is missing.\nPick one"), r"owner/name: cannot be opened: .* missing\. Pick"),
        (OSError("No space left"), "owner/name: cannot be opened: No space left"),
    ],
)
def test_failures_of_the_hub_are_one_line(monkeypatch, library, error, message) -> None:
    def fail(*args: object, **options: object) -> None:
        raise getattr(library.exceptions, error)("x") if isinstance(error, str) else error

    monkeypatch.setattr(library, "load_dataset", fail)
    with pytest.raises(UserError, match=message):
        splits_of(HubDataset(), "owner/name", seed=0)
