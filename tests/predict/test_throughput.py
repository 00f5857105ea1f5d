"""Throughput: the timed steps, their order, and the computed rates."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.model import small_model
from vitascope.errors import UserError
from vitascope.model.sizes import named_config
from vitascope.predict import throughput
from vitascope.predict.engine import TorchEngine
from vitascope.predict.throughput import ROUNDS, Benchmark, Throughput, product, take_turns
from vitascope.weights.loading import save_pretrained
from vitascope.weights.preprocess import default_preprocess


def measured(**values: object) -> Throughput:
    given = {"batch_size": 4, "precision": "bf16", "is_auto": True, "seconds": (0.1, 0.2, 4.0)}
    return Throughput(**{**given, "flops": 3_000, "ceiling": 120_000.0, **values})


@pytest.fixture(autouse=True)
def small_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Full-size matrix products take long, and not every machine has bf16."""
    monkeypatch.setattr(throughput, "CPU_PRODUCT", 64)
    monkeypatch.setattr(throughput, "has_bf16", lambda device: True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pretrained(small_model(), tmp_path_factory.mktemp("model"))


def test_throughput_is_of_the_median_batch_with_its_share_of_the_ceiling() -> None:
    assert measured().images_per_second == pytest.approx(20)
    assert measured().share == pytest.approx(0.5)
    assert measured(flops=None).share is None
    assert measured(ceiling=None).share is None


class Clock:
    """A clock that advances only by the duration of steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(throughput.time, "perf_counter", lambda: self.now)

    def wait(self, seconds: float) -> None:
        self.now += seconds


def test_steps_alternate_after_an_untimed_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def step(name: str) -> Callable[[], None]:
        return lambda: (order.append(name), clock.wait(1))[0]

    clock = Clock(monkeypatch)
    for seconds in (2 * ROUNDS, None):
        times = take_turns([step("a"), step("b")], rounds=ROUNDS, seconds=seconds)
        assert order == ["a", "b"] + ROUNDS * ["a", "b"]
        assert times == 2 * [ROUNDS * [1.0]]
        order.clear()


def test_steps_longer_than_the_time_limit_are_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    steps = [lambda: clock.wait(50), lambda: clock.wait(0.25), lambda: clock.wait(9)]
    times = take_turns(steps, rounds=ROUNDS, seconds=1)
    assert times == [[50], [0.25], [9]]
    assert clock.now == 2 * 59.25  # with one untimed round


def test_every_batch_is_measured_in_every_precision_and_the_one_of_auto_is_marked(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = {1: torch.float32, 3: torch.bfloat16}
    monkeypatch.setattr(throughput, "resolve_precision", lambda *_, training: chosen[_[3]])
    answered = []
    answer = TorchEngine.probabilities

    def watched(engine: TorchEngine, pixels: torch.Tensor) -> torch.Tensor:
        answered.append((engine.precision, tuple(pixels.shape), pixels.dtype))
        return answer(engine, pixels)

    monkeypatch.setattr(TorchEngine, "probabilities", watched)
    rows = Benchmark.open(folder, precisions=["fp32", "bf16"], device="cpu").measure([1, 3], seconds=0)
    assert [(row.batch_size, row.precision, row.is_auto) for row in rows] == [
        (1, "fp32", True),
        (1, "bf16", False),
        (3, "fp32", False),
        (3, "bf16", True),
    ]
    expected = {(row.precision, (row.batch_size, 3, 32, 32), torch.uint8) for row in rows}
    assert set(answered) == expected
    flops = small_model().config.flops
    for row in rows:
        assert len(row.seconds) == 1
        assert row.flops == flops
        assert row.share == pytest.approx(row.images_per_second * flops / row.ceiling)
    ceilings = {row.precision: row.ceiling for row in rows}
    assert all(row.ceiling == ceilings[row.precision] > 0 for row in rows)


def test_named_size_has_random_weights_and_a_head() -> None:
    found = Benchmark.open("dinov3_s16", precisions=["fp32"], device="cpu")
    engine = found.engines["fp32"]
    assert isinstance(engine, TorchEngine)
    assert engine.config == named_config("dinov3_s16").replace(head="linear")
    assert found.description.endswith(", random weights, on cpu")


def test_exported_file_is_measured_unchanged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = folder.parent / "model.onnx"
    file.touch()
    opened = []
    monkeypatch.setattr(
        throughput,
        "open_engine",
        lambda ref, device: opened.append((ref, device)) or Exported(),
    )
    found = Benchmark.open(file, precisions=["fp32", "bf16"])
    (row,) = found.measure([2], seconds=0)
    assert opened == [(file, "auto")]
    assert (row.precision, row.batch_size, row.is_auto, row.share) == ("as exported", 2, True, None)
    assert found.description == "another runtime"


class Exported:
    """A fake engine of another runtime."""

    description = "another runtime"
    preprocess = default_preprocess(small_model().config)

    def outputs(self, pixels: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(pixels), 5)


def test_model_without_a_head_is_measured_on_its_features(tmp_path: Path) -> None:
    save_pretrained(small_model(depth=1, head="none"), tmp_path)
    (row,) = Benchmark.open(tmp_path, precisions=["fp32"], device="cpu").measure([1], seconds=0)
    assert row.seconds


def test_bf16_is_skipped_on_devices_that_emulate_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput, "has_bf16", lambda device: False)
    found = Benchmark.open(folder, precisions=["fp32", "bf16"], device="cpu")
    assert list(found.engines) == ["fp32"]
    (reason,) = found.left_out
    assert reason.startswith("bf16 is not measured: this cpu would emulate it")
    assert [row.is_auto for row in found.measure([1, 8], seconds=0)] == [True, True]
    with pytest.raises(UserError, match=r"bf16 is not measured: .*; measure fp32"):
        Benchmark.open(folder, precisions=["bf16"], device="cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_timed_matrix_product_has_its_operations_in_any_precision(dtype: torch.dtype) -> None:
    with FlopCounterMode(display=False) as counter:
        product(3, 8, 5, dtype, torch.device("cpu"))()
    assert counter.get_total_flops() == 2 * 3 * 8 * 5


def test_the_ceiling_is_the_fastest_product(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    monkeypatch.setattr(TorchEngine, "outputs", lambda *_: clock.wait(1))
    config = small_model().config
    D = config.embed_dim
    operations = {
        (64, 64, 64): 2 * 64**3,
        (3 * config.num_tokens, D, 4 * D): 2 * 3 * config.num_tokens * 4 * D * D,
    }
    for faster in operations:
        seconds = {sizes: (1 if sizes == faster else 1000) for sizes in operations}
        monkeypatch.setattr(throughput, "product", lambda *given, s=seconds: lambda: clock.wait(s[given[:3]]))
        (row,) = Benchmark.open(folder, precisions=["fp32"], device="cpu").measure([3], seconds=0.001)
        assert row.ceiling == operations[faster]
