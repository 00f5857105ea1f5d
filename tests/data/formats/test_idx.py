import gzip
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from tests.data import splits_of
from vitascope.data.datasets import open_data, open_for_evaluation
from vitascope.data.formats.idx import FASHION_NAMES, Idx, read_idx
from vitascope.errors import UserError


def idx_bytes(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def pixels(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 6, 5), dtype=np.uint8)


def write_set(root: Path, *, packed: bool = False, dots: bool = False, classes: int = 10) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", 6 * classes), ("t10k", classes)):
        labels = (np.arange(count) % classes).astype(np.uint8)
        for part, array in ((f"{split}-images", pixels(count, count)), (f"{split}-labels", labels)):
            name = f"{part}{'.' if dots else '-'}idx{array.ndim}-ubyte{'.gz' if packed else ''}"
            content = idx_bytes(array)
            (root / name).write_bytes(gzip.compress(content) if packed else content)
    return root


@pytest.mark.parametrize("folder", ["Fashion-MNIST", "FashionMNIST/raw"])
def test_fashion_mnist_is_recognized_by_its_folder(tmp_path: Path, folder: str) -> None:
    root = write_set(tmp_path / folder)
    assert splits_of(Idx(), str(root), seed=0).train.class_names == FASHION_NAMES
    images = open_for_evaluation(str(root), tuple(reversed(FASHION_NAMES)))
    assert images.labels.tolist() == list(range(9, -1, -1))


def test_number_of_classes_is_that_of_the_training_labels(tmp_path: Path) -> None:
    root = write_set(tmp_path / "d", classes=26)
    assert splits_of(Idx(), str(root), seed=0).train.class_names == tuple(str(n) for n in range(26))
    (root / "t10k-labels-idx1-ubyte").write_bytes(idx_bytes(np.full(26, 26, np.uint8)))
    with pytest.raises(UserError, match="a label of t10k is 26, but there are 26 classes"):
        splits_of(Idx(), str(root), seed=0)


def test_missing_file_and_missing_labels_are_named(tmp_path: Path) -> None:
    root = write_set(tmp_path / "d")
    (root / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(UserError, match=r"lacks t10k-labels-idx1-ubyte, plain or \.gz"):
        open_data(str(root))
    root = write_set(tmp_path / "d")
    (root / "train-labels-idx1-ubyte").write_bytes(idx_bytes(np.zeros(59, np.uint8)))
    with pytest.raises(UserError, match="train has 60 images and 59 labels"):
        splits_of(Idx(), str(root), seed=0)


GOOD = idx_bytes(pixels(3, 0))


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "begins with nothing"),
        (GOOD[:2], "begins with 00 00,"),
        (GOOD[:9], "cannot be read: unpack requires a buffer of 12 bytes"),
        (b"\x00\x00\x0d\x03" + GOOD[4:], "00 00 0d 03, not with 00 00 08 03"),
        (b"\x00\x00\x08\x01" + GOOD[4:], "00 00 08 01, not with"),
        (b"PNG" + GOOD, "not with 00 00 08 03"),
        (GOOD[:-1], "declares 90 bytes"),
        (GOOD + b"x", "declares 90 bytes .* and has 91 or more"),
        (GOOD[:4] + struct.pack(">3I", 60000, 2800, 2800), "declares 470,400,000,000 bytes"),
        (GOOD[:4] + b"\xff" * 12, r"declares 79,228,162,458,924,105,385,300,197,375 bytes"),
    ],
)
def test_wrong_headers_are_rejected(tmp_path: Path, content: bytes, fault: str) -> None:
    (tmp_path / "x-idx3-ubyte").write_bytes(content)
    (tmp_path / "x-idx3-ubyte.gz").write_bytes(gzip.compress(content))
    for path in sorted(tmp_path.iterdir()):
        with pytest.raises(UserError, match=fault):
            read_idx(path, 3)


def test_no_more_is_unpacked_than_the_header_declares(tmp_path: Path) -> None:
    path = tmp_path / "x-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(GOOD + bytes(50_000_000)))
    tracemalloc.start()
    with pytest.raises(UserError, match="and has 91 or more"):
        read_idx(path, 3)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
