"""Device, precision and threads: the rules, on whatever machine runs the tests."""

from pathlib import Path

import pytest
import torch

from tests.models import small_config
from vitascope.errors import UserError
from vitascope.models import hardware
from vitascope.models.config import ViTConfig
from vitascope.models.hardware import (
    images_per_batch,
    resolve_device,
    resolve_precision,
    reuse_freed_memory,
    room_for_images,
    suitable_threads,
    without_tf32,
)

CPU = torch.device("cpu")
LARGE = small_config(embed_dim=128)  # 17 tokens


def resolved(config: ViTConfig, batch_size: int, device: str = "cpu", precision: str = "auto") -> torch.dtype:
    return resolve_precision(precision, config, torch.device(device), batch_size, training=False)


@pytest.fixture
def units(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str | None:
    present = getattr(request, "param", "AMX")
    monkeypatch.setattr(hardware, "bf16_units", lambda: present)
    return present


@pytest.mark.parametrize("units", ["AMX", "AVX-512 BF16", None], indirect=True)
def test_a_named_precision_is_used_and_auto_without_units_for_bf16_is_fp32(units: str | None) -> None:
    for device in ("cpu", "cuda", "mps"):
        for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
            assert resolved(LARGE, 64, device, precision) == dtype
    if units is None:
        assert resolved(LARGE, 1024) == torch.float32


INFERENCE = [  # 16 tokens per image
    (128, 8, False, torch.bfloat16),  # 2^21 multiply-adds in a square layer
    (128, 7, False, torch.float32),
    (64, 32, False, torch.bfloat16),
    (64, 31, False, torch.float32),
]
TRAINING = [
    (128, 32, True, torch.bfloat16),  # 2^23
    (128, 31, True, torch.float32),
    (256, 16, True, torch.bfloat16),  # 256 tokens
    (256, 15, True, torch.float32),
]
AS_INFERENCE = [(embed_dim, batch_size, True, dtype) for embed_dim, batch_size, _, dtype in INFERENCE]


@pytest.mark.parametrize(
    ("units", "embed_dim", "batch_size", "training", "dtype"),
    [
        *(("AMX", *case) for case in INFERENCE + TRAINING),
        *(("AVX-512 BF16", *case) for case in INFERENCE + AS_INFERENCE),
    ],
    indirect=["units"],
)
def test_auto_on_a_cpu_is_bf16_where_the_matrices_are_large(
    units: str, embed_dim: int, batch_size: int, training: bool, dtype: torch.dtype
) -> None:
    config = small_config(embed_dim=embed_dim, pool="mean")
    assert resolve_precision("auto", config, CPU, batch_size, training=training) == dtype


@pytest.mark.parametrize(("has_bf16", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_on_a_gpu_is_bf16_where_supported(
    monkeypatch: pytest.MonkeyPatch, has_bf16: bool, dtype: torch.dtype
) -> None:
    emulated = {True: True, False: has_bf16}  # every GPU has it where emulation counts
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: emulated[including_emulation]
    )
    assert resolved(small_config(), 1, "cuda") == dtype


def test_a_cpu_has_bf16_if_it_has_bf16_units(monkeypatch: pytest.MonkeyPatch) -> None:
    for units, expected in ((None, False), ("AMX", True), ("AVX-512 BF16", True)):
        monkeypatch.setattr(hardware, "bf16_units", lambda units=units: units)
        assert hardware.has_bf16(torch.device("cpu")) is expected


def test_fp16_is_for_training_only() -> None:
    arguments = ("fp16", small_config(), torch.device("cuda"), 8)
    assert resolve_precision(*arguments, training=True) == torch.float16
    with pytest.raises(UserError, match="fp16"):
        resolve_precision(*arguments, training=False)


def test_auto_device_is_the_fastest_available(monkeypatch: pytest.MonkeyPatch) -> None:
    for cuda, mps, expected in ((1, 1, "cuda"), (1, 0, "cuda"), (0, 1, "mps"), (0, 0, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda cuda=cuda: bool(cuda))
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda mps=mps: bool(mps))
        assert resolve_device("auto") == torch.device(expected)


def test_an_unavailable_device_is_rejected_in_one_line() -> None:
    absent = ["nonsense", "", "cuda:99"]
    if not torch.cuda.is_available():
        absent.append("cuda")
    for device in absent:
        with pytest.raises(UserError, match="try the device 'auto'") as caught:
            resolve_device(device)
        assert repr(device) in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.fixture
def two_threads() -> object:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("two_threads")
def test_small_work_uses_one_thread_and_restores_the_number() -> None:
    with suitable_threads(small_config(), CPU, 1):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    with pytest.raises(ZeroDivisionError), suitable_threads(small_config(), CPU, 1):
        raise ZeroDivisionError
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("device", "batch_size"), [("cpu", 10_000), ("cuda", 1)])
def test_large_work_and_other_devices_keep_their_threads(device: str, batch_size: int) -> None:
    with suitable_threads(small_config(), torch.device(device), batch_size):
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == 2


def test_reuse_of_memory_can_be_requested_twice() -> None:
    reuse_freed_memory()
    reuse_freed_memory()
    assert torch.ones(2**22).sum() == 2**22


def test_memory_settings_are_untouched_on_other_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    def unexpected(*_: object) -> None:
        raise AssertionError("the C library must not be loaded here")

    monkeypatch.setattr(hardware.sys, "platform", "darwin")
    monkeypatch.setattr(hardware.ctypes, "CDLL", unexpected)
    reuse_freed_memory()


@pytest.mark.parametrize(
    ("tiles", "vectors", "units"), [(True, True, "AMX"), (False, True, "AVX-512 BF16"), (False, False, None)]
)
def test_best_units_of_a_cpu_are_named(
    monkeypatch: pytest.MonkeyPatch, tiles: bool, vectors: bool, units: str | None
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: tiles)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: vectors)
    assert hardware.bf16_units() == units


@pytest.mark.parametrize(("limit", "counts"), [("max", False), ("1048576", True), ("9" * 18, False)])
def test_memory_of_a_cpu_is_at_most_the_limit_of_its_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, counts: bool
) -> None:
    monkeypatch.setattr(hardware, "CONTAINER_LIMIT", tmp_path / "memory.max")
    machine = hardware.memory_of(CPU)  # without a container
    assert machine is not None
    hardware.CONTAINER_LIMIT.write_text(f"{limit}\n")
    assert hardware.memory_of(CPU) == (2**20 if counts else machine)


def test_fp32_on_a_gpu_is_without_tf32_in_products_and_convolutions() -> None:
    convolutions = torch.backends.cudnn.allow_tf32
    try:
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
        without_tf32(CPU)
        assert torch.backends.cudnn.allow_tf32
        without_tf32(torch.device("cuda"))
        assert torch.get_float32_matmul_precision() == "highest"
        assert not torch.backends.cuda.matmul.allow_tf32
        assert not torch.backends.cudnn.allow_tf32
        # PyTorch's other interface agrees, so that both can be read.
        assert "tf32" not in (
            torch.backends.cuda.matmul.fp32_precision,
            torch.backends.cudnn.conv.fp32_precision,  # type: ignore[attr-defined]
        )
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = convolutions


@pytest.mark.parametrize(
    ("shape", "images"),
    [
        ({"image_size": 224, "patch_size": 16}, 256),  # of 197 tokens each
        ({"image_size": 32, "patch_size": 8}, 1024),
        ({"image_size": 4096, "patch_size": 8}, 1),
    ],
)
def test_default_batches_suit_a_gpu_and_stay_as_they_are_on_a_cpu(shape: dict[str, int], images: int) -> None:
    config = ViTConfig(embed_dim=12, num_heads=1, depth=1, **shape)
    assert images_per_batch(config, torch.device("cuda"), 64) == images
    assert images_per_batch(config, torch.device("cpu"), 64) == 64


def test_images_take_a_share_of_the_memory_of_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * 2**30, 80 * 2**30))
    assert room_for_images(torch.device("cuda")) == 15 * 2**30
    monkeypatch.setattr(hardware, "memory_of", lambda device: 16 * 2**30)
    assert room_for_images(CPU) == 2 * 2**30
    assert room_for_images(CPU, processes=4) == 2**29
    monkeypatch.setattr(hardware, "memory_of", lambda device: None)
    assert room_for_images(CPU) == 0
