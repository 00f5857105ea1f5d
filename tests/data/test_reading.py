import dataclasses
import io
import multiprocessing.util
import os
import signal
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.data import encoded, exif_of, noise, read_tree, write_tree
from tests.forked import ending, fork
from vitascope.data.randomness import crop_draws
from vitascope.data.reading import NAMED, Faults, ImageReader, ReadingPool, random_crop, readable
from vitascope.errors import UserError
from vitascope.models.decoding import ImageError
from vitascope.models.preprocess import Preprocess

FIT = Preprocess(image_size=(4, 6))
BATCHES = np.split(np.arange(8), [3, 6])


def smooth(height: int, width: int) -> np.ndarray:
    """uint8 (H, W, 3) without sharp edges."""
    return np.asarray(Image.fromarray(noise(6, 8)).resize((width, height), Image.Resampling.BICUBIC))


unit = st.floats(0, 1, exclude_max=True)


@given(
    width=st.integers(1, 5000),
    height=st.integers(1, 5000),
    draws=st.tuples(unit, unit, unit, unit),
    smallest=st.floats(0.01, 1),
)
def test_crop_lies_in_the_picture_and_has_the_drawn_area_and_proportions(
    width: int, height: int, draws: tuple[float, ...], smallest: float
) -> None:
    left, top, right, bottom = random_crop(width, height, np.array(draws), smallest)
    assert 0 <= left < right <= width * (1 + 1e-12)
    assert 0 <= top < bottom <= height * (1 + 1e-12)
    assert 3 / 4 - 1e-6 <= (right - left) / (bottom - top) <= 4 / 3 + 1e-6
    share = (right - left) * (bottom - top) / (width * height)
    fits = 1 - draws[0] * (1 - smallest)
    assert share <= fits + 1e-6
    longest = max(width / height, height / width)
    if fits * longest <= 4 / 3:
        assert share == pytest.approx(fits)
    else:  # as long as the picture is narrow
        assert min((right - left) / width, (bottom - top) / height) < 1
        assert max((right - left) / width, (bottom - top) / height) == pytest.approx(1)


def test_streamed_images_are_cropped_in_the_proportions_of_the_model() -> None:
    rows = np.repeat(np.arange(200, dtype=np.uint8)[:, None], 200, axis=1)  # of a square picture
    images = [Image.fromarray(rows), Image.fromarray(rows.T)]
    fit = Preprocess(image_size=(40, 80), channels=1, mean=(0.5,), std=(0.5,))
    read = ImageReader(images, fit, seed=0, crop_scale=0.2)
    for epoch in range(20):
        down, across = (read(index, epoch)[0].astype(float) for index in (0, 1))
        height, width = np.ptp(down[:, 40]), np.ptp(across[20])
        assert height <= 100 / 0.75 + 3  # at most as high as the widest crop allows
        assert width > 0
    heights = [np.ptp(read(0, epoch)[0][:, 40].astype(float)) for epoch in range(60)]
    widths = [np.ptp(read(1, epoch)[0][20].astype(float)) for epoch in range(60)]
    assert 1.6 < np.mean(widths) / np.mean(heights) < 2.4


def test_crops_are_spread_over_area_proportions_and_places() -> None:
    draws = crop_draws(0, 0, np.arange(4000))
    boxes = np.array([random_crop(400, 400, row, 0.08) for row in draws])
    left, top, right, bottom = boxes.T
    area = (right - left) * (bottom - top) / 400**2
    assert np.quantile(area, [0.0, 0.5, 1.0]) == pytest.approx([0.08, 0.54, 1.0], abs=0.02)
    small = area < 0.5
    proportions = np.log((right - left) / (bottom - top))[small] / np.log(4 / 3)
    assert np.quantile(proportions, [0, 0.25, 0.5, 0.75, 1]) == pytest.approx([-1, -0.5, 0, 0.5, 1], abs=0.06)
    place = (left / (400 - (right - left)))[small]
    assert np.quantile(place, [0, 0.25, 0.5, 0.75, 1]) == pytest.approx([0, 0.25, 0.5, 0.75, 1], abs=0.04)


@pytest.mark.parametrize("name", ["nearest", "bilinear", "bicubic", "lanczos"])
def test_cropped_pixels_equal_those_of_pillow(tmp_path: Path, name: str) -> None:
    box, whole_pixels = (3.5, 2.0, 33.25, 27.0), (4, 2, 33, 27)
    fit = dataclasses.replace(FIT, interpolation=name)
    for pixels in (noise(30, 40), noise(30, 40, 1)):
        path = tmp_path / "picture.png"
        Image.fromarray(pixels).save(path)
        found = fit.cropped(path, lambda width, height: box if (width, height) == (40, 30) else (0, 0, 1, 1))
        part = Image.fromarray(pixels).convert("RGB").crop(whole_pixels)
        expected = np.asarray(part.resize((6, 4), Image.Resampling[name.upper()])).transpose(2, 0, 1)
        np.testing.assert_allclose(found.astype(int), expected, atol=1)
        assert found.flags.c_contiguous


def test_crops_are_taken_from_the_upright_picture() -> None:
    content = encoded(smooth(60, 80), "JPEG", quality=95, exif=exif_of(6))
    lying = np.asarray(Image.open(io.BytesIO(content)))
    fit = Preprocess(image_size=(16, 24))
    box = (10.0, 5.0, 50.0, 75.0)
    found = fit.cropped(content, lambda width, height: box if (width, height) == (60, 80) else (0, 0, 1, 1))
    np.testing.assert_array_equal(found, fit.cropped(np.rot90(lying, -1).copy(), lambda *size: box))
    as_stored = dataclasses.replace(fit, exif_orientation=False)
    found = as_stored.cropped(content, lambda width, height: (0, 0, width, height))
    np.testing.assert_array_equal(found, fit.cropped(lying, lambda *size: (0, 0, 80, 60)))


def test_large_jpegs_are_decoded_smaller_where_enough_pixels_remain(monkeypatch: pytest.MonkeyPatch) -> None:
    content, square = encoded(smooth(1200, 1600), "JPEG", quality=95), Preprocess(image_size=(16, 16))
    opened = Image.open(io.BytesIO(content))
    widths: list[int] = []
    for name in ("crop", "resize"):  # in training, in evaluation
        step = getattr(Image.Image, name)
        monkeypatch.setattr(
            Image.Image,
            name,
            lambda self, *a, step=step, **k: widths.append(self.width) or step(self, *a, **k),
        )
    for side, decoded in ((60, 1600), (68, 800), (132, 400), (400, 200)):
        widths.clear()
        box = (160.0, 120.0, 160.0 + side, 120.0 + side)
        found = square.cropped(content, lambda *size, box=box: box)
        whole = square.cropped(opened, lambda *size, box=box: box)  # an open image is decoded in full
        assert widths == [decoded, 1600]
        assert np.abs(found.astype(int) - whole).mean() < 2
    np.testing.assert_array_equal(square.pixels(content), square.pixels(opened))
    assert widths[2:] == [1600, 1600]


def test_broken_picture_is_named_when_it_is_cropped(tmp_path: Path) -> None:
    path = tmp_path / "gone.jpg"
    with pytest.raises(ImageError, match=r"gone\.jpg: no such file"):
        FIT.cropped(path, lambda *size: (0, 0, 1, 1))
    many = dataclasses.replace(FIT, channels=4, mean=(0.5,) * 4, std=(0.5,) * 4)
    with pytest.raises(UserError, match="1 or 3 channels, the model has 4") as raised:
        many.cropped(noise(8, 8), lambda *size: (0, 0, 8, 8))
    assert not isinstance(raised.value, ImageError)


@dataclasses.dataclass(frozen=True)
class Fatal(ImageReader):
    """A reader that ends its process at a certain image."""

    signum: int = 0

    def __call__(self, index: int, epoch: int) -> np.ndarray:
        if index == 5:
            if not self.signum:
                raise UserError("no picture is of this kind")
            os.kill(os.getpid(), self.signum)
        return super().__call__(index, epoch)


def test_a_killed_process_and_a_user_s_error_are_one_clear_error_of_the_pool() -> None:
    killed = r"killed by SIGKILL.*memory.*workers \(now 2\).*batch size"
    for signum, message in ((signal.SIGKILL, killed), (0, "no picture is of this kind")):
        pool = ReadingPool(Fatal([noise(8, 8)] * 8, FIT, signum=signum).fill, FIT, 3, workers=2)
        with pytest.raises(UserError, match=message):
            list(pool.read(BATCHES))
        pool.close()


def test_processes_ignore_stop_signals_to_their_group() -> None:
    for signum in (signal.SIGINT, signal.SIGTERM):
        pool = ReadingPool(Fatal([noise(8, 8)] * 8, FIT, signum=signum).fill, FIT, 3, workers=2)
        assert [len(pixels) for _, pixels, _ in pool.read(BATCHES)] == [3, 3, 2]
        pool.close()


def test_a_process_that_is_starting_ignores_stop_signals_too() -> None:
    begin = BaseProcess._bootstrap

    def signalled(self: BaseProcess, *arguments: object, **options: object) -> int:
        os.kill(os.getpid(), signal.SIGINT)
        return begin(self, *arguments, **options)

    def read() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        BaseProcess._bootstrap = signalled
        pool = ReadingPool(ImageReader([noise(8, 8)] * 8, FIT).fill, FIT, 3, workers=2)
        assert [len(pixels) for _, pixels, _ in pool.read(BATCHES)] == [3, 3, 2]
        pool.close()

    assert ending(fork(read)) == 0


def end_during_an_epoch(end: str, folder: Path) -> None:
    """With an open pool, in a session of its own, as a program ends."""
    signal.alarm(120)
    os.setsid()
    sys.stderr = open(folder / f"{end}.err", "w", buffering=1)  # noqa: SIM115
    os.dup2(sys.stderr.fileno(), 2)
    pool = ReadingPool(ImageReader([noise(8, 8)] * 8, FIT).fill, FIT, 3, workers=2)
    next(pool.read(BATCHES))
    (folder / f"{end}.pids").write_text(" ".join(str(process.pid) for process in pool._processes))
    try:
        if end == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if end == "stopped":
            signal.signal(signal.SIGINT, signal.default_int_handler)  # SIGINT may be ignored by default
            os.killpg(0, signal.SIGINT)
    finally:
        multiprocessing.util._exit_function()


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="no process groups")
@pytest.mark.parametrize(("end", "status"), [("done", 0), ("stopped", 1), ("killed", -signal.SIGKILL)])
def test_no_worker_outlives_its_parent(tmp_path: Path, end: str, status: int) -> None:
    assert ending(fork(lambda: end_during_an_epoch(end, tmp_path))) == status
    errors = (tmp_path / f"{end}.err").read_text()
    assert errors.count("Traceback") == (end == "stopped"), errors  # the parent's
    pids = list(map(int, (tmp_path / f"{end}.pids").read_text().split()))
    assert len(pids) == 2
    deadline = time.monotonic() + 120
    while any(map(alive, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")  # on Linux, a zombie has ended too
    return not (status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z")


def test_each_pass_over_a_pool_reads_each_image_once(tmp_path: Path) -> None:
    images = read_tree(write_tree(tmp_path, {"a": 5, "b": 3}))
    reader = ImageReader(images.sources, FIT, seed=1, crop_scale=0.2)
    pool = ReadingPool(reader.fill, FIT, 3, workers=3)
    for epoch in (0, 1):
        order = np.random.default_rng(epoch).permutation(8)
        batches = pool.read(np.split(order, [3, 6]), epoch)
        read = [pixels.copy() for _, pixels, faults in batches if not faults]
        expected = [reader(int(index), epoch) for index in order]
        np.testing.assert_array_equal(np.concatenate(read), np.stack(expected))
    pool.close()


def test_reasons_are_kept_for_a_few_and_counted_for_all() -> None:
    faults = Faults()
    for number in range(100):
        faults.tally(f"{number}.png: broken")
    assert (faults.images, faults.count, len(faults.reasons)) == (100, 100, NAMED)
    assert [faults.lines()[place] for place in (0, 1, -1)] == [
        "100 of 100 images could not be read:",
        "  0.png: broken",
        "  and 90 more",
    ]


def test_threads_return_what_is_readable_in_order_and_record_the_others() -> None:
    faults, sources = Faults(50), [number % 7 and noise(8, 8, seed=number) for number in range(50)]
    read = list(readable(FIT.pixels, sources, faults, together=3))  # a number is no picture
    assert [number for number, _ in read] == [number for number in range(50) if number % 7]
    assert all(np.array_equal(pixels, FIT.pixels(sources[number])) for number, pixels in read)
    assert list(faults.reasons) == list(range(0, 50, 7))
    of_two = dataclasses.replace(FIT, channels=2, mean=(0, 0), std=(1, 1))
    with pytest.raises(UserError, match="the model has 2"):  # a fault of no picture
        list(readable(of_two.pixels, sources[1:], faults))
