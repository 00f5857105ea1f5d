"""Checkpoint files of every kind: read exactly or rejected in one line, in bounded time and memory."""

import argparse
import contextlib
import io
import json
import os
import pickle
import struct
import subprocess
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from vitascope.models.weights.files import CheckpointError, read_json, read_weights

TENSORS = {
    "blocks.0.weight": torch.arange(6.0).reshape(2, 3) / 7,
    "half": torch.tensor([0.1, -2.0, 3e4]).half(),
    "brain": torch.tensor([0.1, -2.0, 3e30]).bfloat16(),
    "double": torch.tensor([[1e-300]], dtype=torch.float64),
    "index": torch.tensor([[-1, 2**40]]),
    "mask": torch.tensor([True, False]),
    "scalar": torch.tensor(3.5),
    "empty": torch.zeros(0, 4),
}


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    return read_weights(path).tensors


def save_legacy(state: object, path: Path) -> None:
    torch.save(state, path, _use_new_zipfile_serialization=False)


def to_numpy(tensor: Tensor) -> np.ndarray:
    """As JAX code saves it: bfloat16 becomes two untyped bytes."""
    bfloat16 = tensor.dtype == torch.bfloat16
    return tensor.view(torch.int16).numpy().view("V2") if bfloat16 else tensor.numpy()


def save_npz(state: dict[str, Tensor], path: Path) -> None:
    np.savez(path, **{name: to_numpy(tensor) for name, tensor in state.items()})


FORMATS: dict[str, Callable[[dict[str, Tensor], Path], None]] = {
    "model.safetensors": save_file,
    "model.pth": torch.save,
    "model.pt": save_legacy,
    "pytorch_model.bin": torch.save,
    "checkpoint.pth.tar": torch.save,  # of timm, MoCo: known by its content
    "really_safetensors.bin": save_file,
    "model.npz": save_npz,
}


def safetensors_bytes(header: object, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in found.items():
        assert type(tensor) is Tensor
        assert not tensor.requires_grad
        assert tensor.dtype == expected[name].dtype, name
        assert torch.equal(tensor, expected[name]), name


def rejection(path: Path) -> str:
    """The error message after the path, which is one printable line."""
    with pytest.raises(CheckpointError) as caught:
        read_tensors(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert message.isprintable()
    return message.removeprefix(f"{path}: ")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.filterwarnings("error")
def test_every_format_preserves_names_dtypes_and_values(tmp_path: Path, name: str) -> None:
    FORMATS[name](TENSORS, tmp_path / name)
    assert_same(read_tensors(tmp_path / name), TENSORS)


@pytest.mark.parametrize("save", [torch.save, save_legacy])
def test_shared_strided_and_trained_tensors_of_a_pickle_are_read(tmp_path: Path, save: Callable) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    state = {"a": base, "tied": base, "turned": base.T, "part": base[1:, ::2], "p": torch.nn.Parameter(base)}
    save(OrderedDict(state), tmp_path / "model.pth")
    assert_same(read_tensors(tmp_path / "model.pth"), {name: t.detach() for name, t in state.items()})


@pytest.mark.parametrize("save", [torch.save, save_legacy])
def test_tensors_that_share_memory_in_a_pickle_are_read_as_copies(tmp_path: Path, save: Callable) -> None:
    base = torch.ones(2, 3)
    save({"a": base, "tied": base, "part": base[1], "spread": torch.zeros(1).expand(4)}, tmp_path / "m.pth")
    found = read_tensors(tmp_path / "m.pth")
    for number, tensor in enumerate(found.values()):
        tensor += number + 1  # in place, as an optimizer does
    assert_same(
        found, {"a": base + 1, "tied": base + 2, "part": base[1] + 3, "spread": torch.full((4,), 4.0)}
    )


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_sharded_checkpoint_is_read_completely(tmp_path: Path, name: str) -> None:
    shards = {
        f"1-of-2.{name}": dict(list(TENSORS.items())[:3]),
        f"2-of-2.{name}": dict(list(TENSORS.items())[3:]),
    }
    for shard, state in shards.items():
        FORMATS[name](state, tmp_path / shard)
    index = tmp_path / f"{name}.index.json"
    index.write_text(json.dumps({"weight_map": {key: s for s, state in shards.items() for key in state}}))
    assert_same(read_tensors(index), TENSORS)


def test_prefixes_are_detected_over_all_shards(tmp_path: Path) -> None:
    torch.save({"module.a": torch.ones(1)}, tmp_path / "1.bin")
    torch.save({"b": torch.ones(2)}, tmp_path / "2.bin")
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"module.a": "1.bin", "b": "2.bin"}}))
    assert set(read_tensors(index)) == {"module.a", "b"}


ONE, TWO = {"w": torch.ones(1)}, {"w": torch.full((1,), 2.0)}


@pytest.mark.parametrize(
    "loaded",
    [
        ONE,
        {"model": ONE, "model_ema": TWO, "optimizer": {"state": {0: torch.ones(9)}}, "epoch": 300},
        {"args": argparse.Namespace(lr=0.1, layers={1, 2}, nested=argparse.Namespace()), "model": ONE},
        {"state_dict": ONE, "rng": torch.ones(5), "scheduler": {"model": 3}},
        {"model": {"state_dict": {"module.w": torch.ones(1), "step": 7}}},
        {"module": {"_orig_mod.module.w": torch.ones(1)}},
        {"model_ema": ONE, "model": None},
        {"state_dict": TWO, "state_dict_ema": ONE},
        {
            "model": {
                "student.backbone.w": TWO["w"],
                "teacher.backbone.w": ONE["w"],
                "teacher.head.w": TWO["w"],
            }
        },
        {"encoder": TWO, "target_encoder": ONE},
        {"student": TWO, "teacher": {"module.backbone.w": torch.ones(1), "module.head.w": torch.ones(2)}},
        {"teacher": {"backbone.w": torch.ones(1), "dino_head.w": torch.ones(2)}},
    ],
)
def test_the_state_is_found_in_checkpoints_of_training_scripts(tmp_path: Path, loaded: object) -> None:
    torch.save(loaded, tmp_path / "checkpoint.pth")
    assert_same(read_tensors(tmp_path / "checkpoint.pth"), ONE)


@pytest.mark.parametrize(
    ("read", "left"),
    [
        ("model", ["model_ema"]),
        ("state_dict_ema", ["state_dict"]),
        ("model", ["state_dict", "model_ema"]),
        ("teacher", ["student"]),
        ("state_dict", []),
    ],
)
def test_a_choice_among_several_states_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, read: str, left: list[str]
) -> None:
    torch.save({read: ONE, **dict.fromkeys(left, TWO), "epoch": 3}, tmp_path / "checkpoint.pth")
    assert_same(read_tensors(tmp_path / "checkpoint.pth"), ONE)
    assert [f"under {read!r}, not those under {' and '.join(map(repr, left))};" in caplog.text] == [
        bool(left)
    ]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("model.safetensors", b"", "an empty file"),
        (
            "model.safetensors",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
            "run git lfs pull",
        ),
        ("model.pth", b"\n<!DOCTYPE html><html>Not found</html>", "a web page"),
        ("vit.npz", b"<?xml version='1.0'?><Error>AccessDenied</Error>", "a web page"),
        ("model.safetensors", b"\1\2", "header too small"),
        ("model.safetensors", safetensors_bytes({}), "no tensors"),
        ("model.safetensors", safetensors_bytes([1, 2]), "broken, truncated or not a safetensors file"),
        ("model.pth", b"not a pickle", "broken, truncated or not a state dict of PyTorch"),
        ("model.pth", pickle.dumps({"w": 1}), "broken, truncated or not a state dict of PyTorch"),
        ("vit.npz", b"not a zip", "broken, truncated or not an .npz file"),
        ("model.h5", b"\x89HDF", "known are .safetensors"),
        ("model.safetensors.index.json", b"{}", "no weight_map"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "gone.safetensors"}}', "no such file"),
    ],
)
def test_a_file_that_is_no_checkpoint_is_named(
    tmp_path: Path, name: str, content: bytes, reason: str
) -> None:
    (tmp_path / name).write_bytes(content)
    if "gone" in str(content):
        with pytest.raises(CheckpointError, match=r"gone\.safetensors: no such file"):
            read_tensors(tmp_path / name)
    else:
        assert reason in rejection(tmp_path / name)


def test_folders_and_missing_files_are_named(tmp_path: Path) -> None:
    assert "a folder" in rejection(tmp_path)
    assert "no such file" in rejection(tmp_path / "model.safetensors")


@pytest.mark.skipif(sys.platform == "win32", reason="needs pipes in folders")
def test_a_pipe_is_rejected_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    assert rejection(tmp_path / "model.safetensors") == "a pipe or device, not a file"


def test_a_pickle_without_a_state_and_shards_outside_the_folder_are_rejected(tmp_path: Path) -> None:
    for loaded in ({"epoch": 3, "model": {"lr": 0.1}}, [torch.ones(1)], torch.ones(1)):
        torch.save(loaded, tmp_path / "model.pth")
        assert "no tensors" in rejection(tmp_path / "model.pth")
    torch.save(ONE, tmp_path / "1.bin")
    index = tmp_path / "x.index.json"
    for shard in ("../1.bin", "/etc/passwd", "a/1.bin", "..", "", "C:\\1.bin", 3):
        index.write_text(json.dumps({"weight_map": {"w": shard}}))
        assert f"shard {shard!r}" in rejection(index)


class Calls:
    """An object that is pickled as a call."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.call


@pytest.mark.parametrize("save", ["zip", "legacy", "protocol 4", "no torch file"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_pickle_that_would_run_code_is_rejected_and_runs_nothing(
    tmp_path: Path, save: str, wrapped: bool
) -> None:
    evil: object = Calls(open, str(tmp_path / "evil"), "w")
    evil = {"args": evil, "model": ONE} if wrapped else evil
    path = tmp_path / "model.pth"
    if save == "no torch file":
        path.write_bytes(pickle.dumps(evil))
    elif save == "legacy":
        save_legacy(evil, path)
    else:
        torch.save(evil, path, pickle_protocol=4 if save == "protocol 4" else 2)
    expected = "io.open" if save in ("zip", "legacy") else "Unsupported operand 149"  # of protocol 4
    assert expected in rejection(path)
    assert not (tmp_path / "evil").exists()
    if save != "no torch file":
        torch.load(path, weights_only=False)  # without the check, the file runs code
        assert (tmp_path / "evil").exists()


def npz_member(dtype: str, shape: str, data: bytes = b"", declared: int | None = None) -> bytes:
    """An .npz of one array, whose header and archive may claim more than they contain."""
    header = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}}}".encode().ljust(117) + b"\n"
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", b"\x93NUMPY\1\0" + struct.pack("<H", len(header)) + header + data)
    content = file.getvalue()
    if declared is not None:
        place = content.index(b"PK\1\2") + 24  # the uncompressed size in the archive's directory
        content = content[:place] + struct.pack("<I", declared) + content[place + 4 :]
    return content


def torch_bytes(state: object, zipped: bool = True) -> bytes:
    file = io.BytesIO()
    torch.save(state, file, _use_new_zipfile_serialization=zipped)
    return file.getvalue()


def deflated(archive: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return file.getvalue()


def entry(start: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def object_array() -> bytes:
    file = io.BytesIO()
    np.savez(file, a=np.array([{}], dtype=object))
    return file.getvalue()


def hostile_files() -> Iterator[tuple[str, bytes, str]]:
    """A file name, its content, and a part of the error message."""
    for length in (2**63 - 1, 2**64 - 1, 200 << 20):
        yield "model.safetensors", struct.pack("<Q", length) + b"{}", "header"
    deep = b"[" * (10 << 20)
    yield "model.safetensors", struct.pack("<Q", len(deep)) + deep, "broken, truncated or not"
    for broken in (
        {"a": entry(0, 8, [2]), "b": entry(4, 12, [2])},
        {"a": entry(8, 4, [2])},
        {"a": entry(-4, 4, [2])},
        {"a": entry(0, 8, [-2])},
        {"a": entry(0, 8, [2**62, 4])},
        {"a": entry(0, 8, [2], "F33")},
        {"a": entry(0, 8, [3])},
        {"a": {"shape": [2]}},
    ):
        yield "model.safetensors", safetensors_bytes(broken, b"\0" * 12), "broken, truncated or not"
    yield "model.safetensors", safetensors_bytes({"a": entry(0, 2**40, [2**38])}), "not fully covered"
    yield "vit.npz", object_array(), "Object arrays cannot be loaded"
    yield "vit.npz", npz_member("<f4", "(8,)", bytes(32), declared=2**32 - 2), "that unpack to 4294967294"
    yield "vit.npz", npz_member("<f4", f"({2**36},)"), "Unable to allocate"
    yield "vit.npz", npz_member("<U4", "(2,)", bytes(32)), "array 'a'"
    yield "vit.npz", npz_member("<f4", "(2,)", bytes(8))[:-30], "broken, truncated or not"
    state = {"w": torch.zeros(200_000)}
    yield "model.pth", torch_bytes(state)[:-100_000], "broken, truncated or not"
    yield "model.pth", torch_bytes(state, zipped=False)[:-100_000], "broken, truncated or not"
    yield "model.pth", deflated(torch_bytes(state)), "broken, truncated or not"
    for zipped in (True, False):
        yield (
            "model.pth",
            torch_bytes({"w": torch.zeros(1).expand(2**40)}, zipped),
            "bytes with 4398046511104",
        )


LIMITED = """
import resource, sys
from pathlib import Path
from vitascope.models.weights.files import CheckpointError, read_weights

in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (in_use + (640 << 20),) * 2)
resource.setrlimit(resource.RLIMIT_CPU, (40, 40))
for path in sys.argv[1:]:
    try:
        print(path, "was read:", len(read_weights(Path(path)).tensors))
    except CheckpointError as error:
        print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux to limit memory")
def test_hostile_files_are_rejected_within_limits_of_memory_and_time(tmp_path: Path) -> None:
    """One process reads all of them, within 640 MiB of address space and 40 s of computing."""
    reasons = {}
    for number, (name, content, reason) in enumerate(hostile_files()):
        path = tmp_path / f"{number}.{name}"
        path.write_bytes(content)
        reasons[path] = reason
    command = [sys.executable, "-c", LIMITED, *map(str, reasons)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for line, (path, reason) in zip(done.stdout.splitlines(), reasons.items(), strict=True):
        assert line.startswith(f"{path}: "), line
        assert reason in line.removeprefix(str(path)), line


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(list(FORMATS)), data=st.data())
def test_a_damaged_file_is_read_or_rejected(tmp_path: Path, name: str, data: st.DataObject) -> None:
    FORMATS[name](TENSORS, tmp_path / name)
    content = bytearray((tmp_path / name).read_bytes())
    for place in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=4)):
        content[place] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(content)) | st.just(len(content)))
    (tmp_path / name).write_bytes(content[:cut])
    with contextlib.suppress(CheckpointError):  # any other exception is a fault
        for tensor in read_tensors(tmp_path / name).values():
            tensor.clone()  # reads the mapped memory


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b"\xff\xfe", b"[" * 200_000])
def test_a_file_that_is_no_json_object_is_rejected(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_json(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert str(caught.value).isprintable()
