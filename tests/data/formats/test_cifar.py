import os
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data import splits_of, write_tar
from vitascope.data.datasets import open_data
from vitascope.data.formats import cifar
from vitascope.data.formats.cifar import Cifar, read_pickle
from vitascope.errors import UserError

FOLDERS = {
    "10-python": "cifar-10-batches-py",
    "10-binary": "cifar-10-batches-bin",
    "100-python": "cifar-100-python",
    "100-binary": "cifar-100-binary",
}
NAMES = {10: [f"class {n}" for n in range(10)], 100: [f"fine {n}" for n in range(100)]}


def batch(classes: int, count: int, seed: int) -> tuple[np.ndarray, list[int]]:
    """Pixels (N, 3072) and labels, every class `count` times, in no order."""
    random = np.random.default_rng(seed)
    labels = random.permutation(np.repeat(np.arange(classes), count))
    return random.integers(0, 256, (len(labels), 3072), dtype=np.uint8), labels.tolist()


def cifar_files(form: str) -> dict[str, bytes]:
    """The files of a small CIFAR in one of the four forms, with the same pictures in pickles and records."""
    kind = form.split("-")[1]
    classes = int(form.split("-")[0])
    parts = [f"data_batch_{number}" for number in range(1, 6)] if classes == 10 else ["train"]
    parts += ["test_batch" if classes == 10 else "test"]
    files = {}
    for seed, part in enumerate(parts):
        pixels, labels = batch(classes, 1 if classes == 10 else 2, seed)
        coarse = [label // 5 for label in labels]
        if kind == "python":
            values = {"data": pixels, "filenames": [f"{n}.png" for n in labels], "batch_label": part}
            values |= (
                {"labels": labels} if classes == 10 else {"coarse_labels": coarse, "fine_labels": labels}
            )
            files[part] = pickle.dumps(values, protocol=2)
        else:
            columns = [labels] if classes == 10 else [coarse, labels]
            rows = np.concatenate([np.array(columns, np.uint8).T, pixels], axis=1)
            files[f"{part}.bin"] = rows.tobytes()
    meta = {"label_names": NAMES[10]} if classes == 10 else {"fine_label_names": NAMES[100]}
    if kind == "python":
        files["batches.meta" if classes == 10 else "meta"] = pickle.dumps(meta, protocol=2)
    else:
        name = "batches.meta.txt" if classes == 10 else "fine_label_names.txt"
        files[name] = "\n".join([*NAMES[classes], "", ""]).encode()
    return files


def write_folder(root: Path, files: dict[str, bytes]) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (root / name).write_bytes(content)
    return root


def packed_cifar(path: Path, files: dict[str, bytes], *, below: str = "cifar/", mode: str = "w:gz") -> Path:
    fastest = {"w:gz": {"compresslevel": 1}, "w:xz": {"preset": 0}}.get(mode, {})  # the pictures are noise
    return write_tar(path, {below + name: content for name, content in files.items()}, mode, **fastest)


def expected(classes: int, seeds: range) -> dict[bytes, str]:
    found = {}
    for seed in seeds:
        for pixels, label in zip(*batch(classes, 1 if classes == 10 else 2, seed), strict=True):
            found[pixels.reshape(3, 32, 32).transpose(1, 2, 0).tobytes()] = NAMES[classes][label]
    return found


def test_missing_file_is_named_and_a_link_is_not_followed(tmp_path: Path) -> None:
    for number, form in enumerate(FOLDERS):
        files = cifar_files(form)
        lost = list(files)[-2]  # the test set
        content = files.pop(lost)
        paths = [
            write_folder(tmp_path / form, files),
            packed_cifar(tmp_path / f"{form}.tar", files, mode="w"),
        ]
        (tmp_path / "secret").write_bytes(content)
        with tarfile.open(paths[1], "a") as tar:
            link = tarfile.TarInfo(f"cifar/{lost}")
            link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path / "secret")
            tar.addfile(link)
        with pytest.raises(UserError, match=f"lacks {lost}"):
            splits_of(Cifar(), str(paths[number % 2]), seed=0)


def damaged(name: str, form: str = "10-python", **values: object) -> dict[str, bytes]:
    files = cifar_files(form)
    return {**files, name: pickle.dumps({**pickle.loads(files[name]), **values})}  # noqa: S301 - our own


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"labels": [10] * 10}, "image 0 has the label 10, but there are 10 classes"),
        ({"labels": [0, -1] * 5}, "image 1 has the label -1"),
        ({"labels": [2**64] * 10}, "10 images need as many integers in 'labels'"),
        ({"labels": [0] * 9}, r"10 images need as many integers in 'labels', not int64 \(9,\)"),
        ({"labels": ["0"] * 10}, "10 images need"),
        ({"labels": [True] * 10}, "10 images need"),
        ({"labels": None}, "10 images need"),
        ({"data": np.zeros((10, 3071), np.uint8)}, r"must be uint8 \(N, 3072\), not uint8 \(10, 3071\)"),
        ({"data": np.zeros((10, 3072), np.int16)}, r"must be uint8 \(N, 3072\), not int16 \(10, 3072\)"),
        ({"data": np.zeros((0, 3072), np.uint8), "labels": []}, "0 images need"),
        ({"data": [1, 2]}, "not list"),
    ],
)
def test_batches_that_are_not_cifar_are_rejected(tmp_path: Path, values: dict, fault: str) -> None:
    folder = write_folder(tmp_path, damaged("data_batch_2", **values))
    with pytest.raises(UserError, match=f"data_batch_2: .*{fault}"):
        splits_of(Cifar(), str(folder), seed=0)


@pytest.mark.parametrize("names", [["a"] * 10, ["a", "b"], "names", None, [1] * 10, [*"abcdefghi", " "]])
def test_another_number_of_class_names_than_ten_is_rejected(tmp_path: Path, names: object) -> None:
    with pytest.raises(UserError, match=r"batches\.meta: .*class names"):
        splits_of(Cifar(), str(write_folder(tmp_path, damaged("batches.meta", label_names=names))), seed=0)


@pytest.mark.parametrize(
    ("name", "change", "fault"),
    [
        ("train.bin", lambda c: c[:-1], "not a multiple of 3,074"),
        ("train.bin", lambda c: c + b"x", "not a multiple of 3,074"),
        ("train.bin", lambda c: b"", "not a multiple of 3,074"),
        ("test_batch.bin", lambda c: b"\x0a" + c[1:], "image 0 has the label 10"),
    ],
)
def test_records_that_are_not_cifar_are_rejected(tmp_path: Path, name: str, change, fault: str) -> None:
    files = cifar_files("100-binary" if name == "train.bin" else "10-binary")
    files[name] = change(files[name])
    with pytest.raises(UserError, match=rf"{name}: .*{fault}"):
        splits_of(Cifar(), str(write_folder(tmp_path, files)), seed=0)


@pytest.mark.parametrize("packed", [False, True])
def test_harmful_pickles_and_files_larger_than_cifar_are_named(tmp_path, monkeypatch, packed: bool) -> None:
    def path_of(name: str, files: dict[str, bytes]) -> str:
        return str(
            packed_cifar(tmp_path / f"{name}.tgz", files) if packed else write_folder(tmp_path / name, files)
        )

    trace = tmp_path / "harmed"
    for name in ("data_batch_3", "test_batch", "batches.meta"):
        with pytest.raises(UserError, match=rf"{name}: rejected: .*posix\.mkdir"):
            open_data(path_of(name, damaged(name, extra=Harm(os.mkdir, str(trace)))))
    assert not trace.exists()
    monkeypatch.setattr(cifar, "MAX_FILE_BYTES", 100_000)
    large = path_of("large", {**cifar_files("10-python"), "data_batch_4": bytes(200_000)})
    with pytest.raises(UserError, match="data_batch_4: 200,000 bytes, more than the 100,000"):
        splits_of(Cifar(), large, seed=0)


PYTHON_2 = (  # written by cPickle of Python 2 and NumPy 1: {"data": array, "labels": [3, 0]}, protocol 2
    b"\x80\x02}q\x01(U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04"
    b"K\x00\x85U\x01b\x87Rq\x05(K\x01K\x02K\x03\x86cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87Rq\x07"
    b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89U\x06\x00\x7f\x80\xff\x01\x02tb"
    b"U\x06labelsq\x08]q\x09(K\x03K\x00eu."
)


@pytest.mark.parametrize("protocol", range(5))
def test_pickles_of_several_protocols_are_read(protocol: int) -> None:
    shared = ["a", "b"]
    data = np.arange(6, dtype=np.uint8).reshape(2, 3)
    values = {"data": data, b"labels": [0, 300, -1, 2**40]}
    values |= {"text": "ä", "bytes": b"\x00\xff", "none": None, "flags": [True, False], "deep": [[1], {}, ()]}
    values |= {"one": shared, "two": shared, "tuple": (1, 2, 3, 4), "float": 0.5}
    found = read_pickle(pickle.dumps(values, protocol=protocol), "batch")
    np.testing.assert_array_equal(found.pop("data"), values.pop("data"))
    assert found.pop("labels") == values.pop(b"labels")
    assert found == values


class Harm:
    """An object that would create a file when unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"cos\nsystem\n(S'true'\ntR.", "os.system"),
        (b"(S'true'\nios\nsystem\n.", "os.system"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.", "os.system"),
        (b"cnumpy\nload\n(S'x'\ntR.", "numpy.load"),
        (b"\x80\x04\x8c\x05numpy\x8c\x0cndarray.view\x93.", "numpy.ndarray.view"),
        (b"cbuiltins\ngetattr\n.", "builtins.getattr"),
    ],
)
def test_other_names_than_those_of_arrays_are_rejected(content: bytes, named: str) -> None:
    with pytest.raises(UserError, match=f"rejected: the pickle refers to '{named}'"):
        read_pickle(content, "batch")


def test_damaged_pickles_are_rejected_in_one_line() -> None:
    cut = pickle.dumps({"labels": [1, 2]})[:-3]
    odd = (b"\x80\x02\x82\x01.", b"Pcall\n.", b"}(]K\x01u.", b"K\x01.")
    for content in (b"", b"text", cut, PYTHON_2[:80], *odd):
        with pytest.raises(UserError, match="batch: rejected: ") as raised:
            read_pickle(content, "batch")
        assert "\n" not in str(raised.value)
