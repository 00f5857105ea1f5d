from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.contracts.format import Example, check_format
from tests.data import encoded, noise, write_tar
from tests.data.formats import test_archive, test_cifar, test_idx, test_table

COUNTS = {"train": {"cat": 10, "dog": 9}, "test": {"cat": 1, "dog": 2}}
SHARED = {
    split: [
        (name, number, noise(4, 6, seed=100 * (split == "test") + 20 * (name == "dog") + number))
        for name, count in classes.items()
        for number in range(count)
    ]
    for split, classes in COUNTS.items()
}
"""The class, the number and the pixels of the pictures of most examples."""


def folder(root: Path, below: str = "") -> Path:
    for split, pictures in SHARED.items():
        for name, number, pixels in pictures:
            path = root / below / split / name / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path)
    return root


def archive(suffix: str, below: str) -> Any:
    def write(root: Path) -> Path:
        return test_archive.pack(root / f"pets{suffix}", folder(root / "pets"), below)

    return write


def table(form: str) -> Any:
    def write(root: Path) -> Path:
        rows = [
            {"path": f"{split}/{name}/{number}.png", "label": name, "split": split}
            for split, pictures in SHARED.items()
            for name, number, _ in pictures
        ]
        return test_table.FORMS[form](folder(root) / f"labels.{form}", rows)

    return write


def shards(root: Path) -> Path:
    for split, pictures in SHARED.items():
        members = {}
        for place, (name, _, pixels) in enumerate(pictures):
            members |= {f"{place:03}.png": encoded(pixels), f"{place:03}.cls": b"%d" % (name == "dog")}
        write_tar(root / f"{split}-0.tar", members)
    (root / "classes.txt").write_text("cat\ndog\n")
    return root


def hub(where: str) -> Any:
    def write(root: Path) -> Path:
        datasets = pytest.importorskip("datasets", reason="datasets is not installed (vitascope[datasets])")
        datasets.disable_progress_bars()
        features = datasets.Features(
            {"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])}
        )
        parts = {}
        for split, pictures in SHARED.items():
            images = [{"bytes": encoded(pixels), "path": None} for *_, pixels in pictures]
            labels = [int(name == "dog") for name, *_ in pictures]
            parts[split] = datasets.Dataset.from_dict({"image": images, "label": labels}, features=features)
        if where == "saved":
            datasets.DatasetDict(parts).save_to_disk(str(root / "set"))
        for split, part in parts.items() if where != "saved" else ():
            (root / "set" / where).mkdir(parents=True, exist_ok=True)
            for half in range(2):
                rows = range(half * len(part) // 2, (half + 1) * len(part) // 2)
                part.select(rows).to_parquet(root / "set" / where / f"{split}-0000{half}-of-00002.parquet")
        return root / "set"

    return write


def example(write: Any) -> Example:
    train, test = ({pixels.tobytes(): name for name, _, pixels in SHARED[split]} for split in SHARED)
    return Example(write=write, train=train, test=test, class_names=("cat", "dog"))


def idx(packed: bool, dots: bool) -> Example:
    train, test = (
        {pixels.tobytes(): str(place % 10) for place, pixels in enumerate(test_idx.pixels(count, count))}
        for count in (60, 10)
    )
    return Example(
        write=lambda root: test_idx.write_set(root / "digits of mine", packed=packed, dots=dots),
        train=train,
        test=test,
        class_names=tuple("0123456789"),
        channels=1,
    )


def cifar(form: str, kind: str) -> Example:
    classes, name = int(form.split("-")[0]), test_cifar.FOLDERS[form]
    seeds = range(5) if classes == 10 else range(1)

    def write(root: Path) -> Path:
        files = test_cifar.cifar_files(form)
        if kind == "folder":
            return test_cifar.write_folder(root / name, files)
        return test_cifar.packed_cifar(root / "set.tar", files, below=f"{name}/", mode=kind)

    return Example(
        write=write,
        train=test_cifar.expected(classes, seeds),
        test=test_cifar.expected(classes, range(seeds.stop, seeds.stop + 1)),
        class_names=tuple(test_cifar.NAMES[classes]),
    )


EXAMPLES = {
    "folder": example(folder),
    **{
        f"archive {suffix} below {below!r}": example(archive(suffix, below))
        for suffix, below in (
            *((".zip", ""), (".zip", "pets/"), (".tar", "./"), (".tar.gz", "a/b/")),
            *((".tgz", "pets/"), (".tar.bz2", ""), (".tar.xz", "")),
        )
    },
    **{f"table {form}": example(table(form)) for form in test_table.FORMS},
    "shards": example(shards),
    **{f"hub {where}": example(hub(where)) for where in ("saved", "", "data")},
    **{f"idx {packed} {dots}": idx(packed, dots) for packed in (False, True) for dots in (False, True)},
    **{f"cifar {form} folder": cifar(form, "folder") for form in test_cifar.FOLDERS},
    **{
        f"cifar {form} {mode}": cifar(form, mode)
        for form, mode in (("10-python", "w:gz"), ("10-binary", "w:xz"), ("100-python", "w"))
    },
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_format(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITASCOPE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    check_format(EXAMPLES[name], tmp_path / "data")
