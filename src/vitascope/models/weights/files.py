"""Tensors and settings from checkpoint files of unknown origin.

Nothing in a file is executed: the readers are those of safetensors, `torch.load(weights_only=True)` and NumPy
without pickles, whose errors become one line.
"""

import argparse
import dataclasses
import logging
import pickle
import re
import warnings
import zipfile
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vitascope.errors import UserError, printable
from vitascope.serialization import check_record, parse_json
from vitascope.storage import WriteError, replacing

log = logging.getLogger(__name__)

MAX_UNPACKED_BYTES = 1 << 30  # a zip archive may always unpack to this much,
MAX_UNPACKED_RATIO = 20  # and beyond it to so many times its size: trained weights hardly compress
MAX_SHARED_RATIO = 4  # a pickle's tensors may share storage; together they take at most so much of the file

# Where training scripts put the state, as their libraries read it: timm's `load_checkpoint` prefers the
# running average to "state_dict"; DeiT evaluates "model", with "model_ema" beside it; DINO has it in
# "teacher", MSN and I-JEPA in "target_encoder".
WRAPPERS = (
    *("state_dict_ema", "model", "state_dict", "model_state_dict", "module"),
    *("teacher", "target_encoder", "model_ema"),
)
_OTHER_STATES = ("student", "encoder")
"""Of a pre-training, beside "teacher" and "target_encoder"; no library evaluates these."""
# Of DataParallel, torch.compile, DINO; Lightning's is the attribute that holds the model, of any name.
MAX_PREFIXES = 4  # `model.module._orig_mod.backbone.`

# Weights that are not read, and how their library writes some that are. The names are those of transformers
# (`utils/__init__.py`, `trainer.py`) and peft (`utils/constants.py`).
_MERGE = (
    "a LoRA adapter of PEFT, not a complete model; merge it into its base model: "
    "peft.PeftModel.from_pretrained(BASE, ADAPTER).merge_and_unload().save_pretrained(FOLDER)"
)
_CONVERT = (
    "weights of {library} alone; with transformers 4, write PyTorch's: "
    "AutoModelForImageClassification.from_pretrained(MODEL, {option}=True).save_pretrained(FOLDER)"
)
_FILES = {
    r"adapter_(config\.json|model\.(safetensors|bin))": _MERGE,
    r"tf_model\.h5": _CONVERT.format(library="TensorFlow", option="from_tf"),
    r"flax_model\.msgpack": _CONVERT.format(library="Flax", option="from_flax"),
    r".*\.onnx": "an ONNX graph, not a checkpoint; the model that it was exported from is needed",
    r"(training_args\.bin|(optimizer|scheduler|scaler)\.(pt|bin)|rng_state\w*\.pth)": (
        "a state of transformers' Trainer, not the model; the folder has model.safetensors beside it"
    ),
}
ZIP_MAGIC = b"PK\x03\x04"
INSIDE = {"config": dict, "preprocessor": dict}
"""What the JSON text `vitascope` in the metadata of a safetensors file has: our own settings files."""


class CheckpointError(UserError):
    """A checkpoint is missing or broken, or does not fit."""


@contextmanager
def explaining_settings(name: str) -> Iterator[None]:
    """Turn whatever settings of an unexpected type or size lead to into one line about the checkpoint."""
    try:
        yield
    except UserError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        reason = printable(f"{type(error).__name__}: {error}", 200)
        raise CheckpointError(f"{name}: its settings do not describe a model ({reason})") from error


def rejection(place: object, reason: object) -> CheckpointError:
    """An error of place and reason, cut if a hostile file makes the reason long."""
    line = " ".join(str(reason).split())
    return CheckpointError(f"{place}: {line[:400]}")


@dataclasses.dataclass(frozen=True)
class Weights:
    """The content of a weights file: tensors on the CPU, each in its own dtype."""

    tensors: dict[str, Tensor]
    training: dict[str, Any]  # of the script that wrote it: timm's `arch`, the `args` of its command line
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)  # as in `INSIDE`


def read_weights(path: Path) -> Weights:
    """Read every tensor of a file: safetensors, PyTorch's pickle, `.npz` or the index of shards, by its
    content where that is clear. Wrappers (`WRAPPERS`) and prefixes that all names share are removed."""
    found = _read_shards(path) if path.name.endswith(".index.json") else _read_file(path)
    if not found.tensors:
        raise rejection(path, other_form([path.name]) or "no tensors in it")
    if any(re.search(r"\blora_[AB]\b", name) for name in found.tensors):
        raise rejection(path, _MERGE)
    return dataclasses.replace(found, tensors=_strip_prefixes(found.tensors))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, with or without a byte order mark."""
    _first_bytes(path)
    with _rejecting(path, "not readable as JSON"):
        return check_record(parse_json(path.read_text(encoding="utf-8-sig")), {})


def shard_files(index: Path) -> dict[str, str]:
    """The `weight_map` of a sharded checkpoint: tensor name to the name of the file beside the index."""
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise rejection(index, "no weight_map in it; not the index of a sharded checkpoint")
    for shard in shards.values():
        if not isinstance(shard, str) or not re.fullmatch(r"\w[\w.-]*", shard):
            raise rejection(index, f"shard {shard!r} is not the name of a file beside the index")
    return shards


def _read_shards(index: Path) -> Weights:
    where = shard_files(index)
    shards = {shard: _read_file(index.parent / shard).tensors for shard in sorted(set(where.values()))}
    missing = [name for name, shard in where.items() if name not in shards[shard]]
    if missing:
        raise rejection(index, f"{len(missing)} tensors are missing in its shards, such as {missing[0]!r}")
    # Tensors that the index does not name too: a model without a place for them rejects them.
    every = {name: tensor for shard in shards.values() for name, tensor in shard.items()}
    return Weights(every | {name: shards[shard][name] for name, shard in where.items()}, {})


def _read_file(path: Path) -> Weights:
    head = _first_bytes(path)
    if path.suffix == ".safetensors" or head[8:9] == b"{":
        what = "broken, truncated or not a safetensors file"
        with _rejecting(path, what), safe_open(path, framework="pt") as file:
            inside = check_record(parse_json((file.metadata() or {}).get("vitascope", "{}")), INSIDE)
            settings = {name: inside[name] for name in INSIDE if name in inside}
            return Weights({name: file.get_tensor(name) for name in file.keys()}, {}, settings)  # noqa: SIM118
    if path.suffix == ".npz":
        return Weights(_read_npz(path), {})
    if path.suffix in (".pth", ".pt", ".bin") or head.startswith((ZIP_MAGIC, b"\x80")):
        return _read_pickle(path, zipped=head.startswith(ZIP_MAGIC))
    known = "known are .safetensors, .pth, .pt, .bin, .ckpt, .npz and .index.json"
    raise rejection(path, other_form([path.name]) or f"not a checkpoint; {known}")


def _first_bytes(path: Path) -> bytes:
    """The start of a file; rejects what is plainly no checkpoint."""
    try:
        if path.exists() and not path.is_file():  # opening a pipe would wait for ever
            raise rejection(path, f"a {'folder' if path.is_dir() else 'pipe or device'}, not a file")
        with open(path, "rb") as file:
            head = file.read(64)
    except FileNotFoundError as error:
        raise rejection(path, "no such file") from error
    except OSError as error:
        raise rejection(path, f"cannot be read: {error.strerror}") from error
    if not head:
        raise rejection(path, "an empty file; fetch it again")
    if head.startswith(b"version https://git-lfs"):
        raise rejection(path, "a git-LFS pointer, not the weights: run git lfs pull")
    if head.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        raise rejection(path, "a web page, not the weights: download the file itself")
    return head


@contextmanager
def _rejecting(path: Path, what: str) -> Iterator[None]:
    """Turn any exception of a reader, for a broken or hostile file, into one line."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise rejection(path, f"{what}: {reason_of(error)}") from error


def reason_of(error: BaseException) -> str:
    """The reason of a library's error in one line, without torch's advice to load the file unsafely."""
    if isinstance(error, pickle.UnpicklingError) and error.__context__ is not None:
        error = error.__context__
    text = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
    return text.splitlines()[0].partition(" In PyTorch")[0][:300]


def _check_unpacked(path: Path) -> None:
    """Reject a zip archive that unpacks to far more than its size, which its readers allocate."""
    with zipfile.ZipFile(path) as archive:
        unpacked = sum(member.file_size for member in archive.infolist())
    size = path.stat().st_size
    if unpacked > max(MAX_UNPACKED_BYTES, MAX_UNPACKED_RATIO * size):
        raise rejection(path, f"{size} bytes that unpack to {unpacked}; no weights compress so well")


def _read_npz(path: Path) -> dict[str, Tensor]:
    tensors = {}
    for name, array in read_npz(path).items():
        with _rejecting(path, f"array {name!r}"):
            is_bfloat16 = array.dtype == np.dtype("V2")  # how NumPy, which does not know it, writes it
            native = np.int16 if is_bfloat16 else array.dtype.newbyteorder("=")  # torch takes no other
            array = array.view(native) if is_bfloat16 else np.asarray(array, dtype=native)
            tensor = torch.from_numpy(array)
            tensors[name] = tensor.view(torch.bfloat16) if is_bfloat16 else tensor
    return tensors


def read_npz(path: Path, names: Container[str] | None = None) -> dict[str, npt.NDArray[Any]]:
    """The arrays of an `.npz` by name, all or only these, without pickles."""
    with _rejecting(path, "broken, truncated or not an .npz file"):
        _check_unpacked(path)
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files if names is None or name in names}


def _read_pickle(path: Path, zipped: bool) -> Weights:
    with _rejecting(path, "broken, truncated or not a state dict of PyTorch"):
        if zipped:
            _check_unpacked(path)
        # DeiT has `args`, a Namespace, beside its `model`. What torch warns of stands in its error.
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    state = _unwrap(path, loaded)
    size, total = path.stat().st_size, sum(tensor.nbytes for tensor in state.values())
    if total > MAX_SHARED_RATIO * size:  # such as one number, expanded to a terabyte
        raise rejection(path, f"{size} bytes with {total} of tensors; the limit is {MAX_SHARED_RATIO} times")
    taken: set[int] = set()
    for name, tensor in state.items():
        storage = tensor.untyped_storage()
        if storage.data_ptr() in taken or storage.nbytes() != tensor.nbytes:
            state[name] = tensor.clone()  # training one of two that share memory would change both
        taken.add(storage.data_ptr())
    return Weights(state, _training(loaded))


def _unwrap(path: Path, loaded: object, depth: int = 2) -> dict[str, Tensor]:
    """The state dict in a loaded file: its tensors, or those under the first wrapper that has any. A warning
    names others."""
    if not isinstance(loaded, dict):
        return {}
    for wrapper in WRAPPERS if depth else ():
        if state := _unwrap(path, loaded.get(wrapper), depth - 1):
            others = [
                name for name in (*WRAPPERS, *_OTHER_STATES) if name != wrapper and _state(loaded.get(name))
            ]
            if others:
                log.warning(
                    "%s: reads the weights under %r, not those under %s; to load these, save them alone",
                    path, wrapper, " and ".join(map(repr, others)),
                )  # fmt: skip
            return _body(_strip_prefixes(state)) if wrapper == "teacher" else state
    state = _state(loaded)
    if {"student", "teacher"} <= {name.partition(".")[0] for name in state}:  # of DINOv2's training
        return _body({name[8:]: tensor for name, tensor in state.items() if name.startswith("teacher.")})
    return state


def _state(loaded: object) -> dict[str, Tensor]:
    """The tensors by name in a mapping."""
    named = loaded.items() if isinstance(loaded, dict) else ()
    return {name: v.detach() for name, v in named if isinstance(name, str) and isinstance(v, Tensor)}


def _body(teacher: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a teacher without those of its heads for the loss of pre-training."""
    return {name: v for name, v in teacher.items() if name.startswith("backbone.")} or teacher


def _training(loaded: object) -> dict[str, Any]:
    """`args`, a namespace or a mapping, and timm's `arch`, the name of the model."""
    if not isinstance(loaded, dict):
        return {}
    args = loaded.get("args")
    args = vars(args) if isinstance(args, argparse.Namespace) else args
    found = dict(args) if isinstance(args, dict) else {}
    arch = loaded.get("arch") or found.get("model")
    return {**found, "arch": arch} if isinstance(arch, str) else found


def _strip_prefixes(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Remove the prefixes that all names share: no family has one, so they are a wrapper's."""
    for _ in range(MAX_PREFIXES):
        first, dot, _ = next(iter(state)).partition(".")
        if not dot or not all(name.startswith(f"{first}.") for name in state):
            break
        state = {name.removeprefix(f"{first}."): tensor for name, tensor in state.items()}
    return state


def other_form(names: Iterable[str]) -> str | None:
    """The description of the first file in a form that is not read, with the way out."""
    names = sorted(names)
    for pattern, reason in _FILES.items():
        for name in names:
            if re.fullmatch(pattern, name):
                return f"{name} is {reason}"
    if folders := [name for name in names if re.fullmatch(r"checkpoint-\d+", name)]:
        newest = max(folders, key=lambda name: int(name.partition("-")[2]))
        return (
            f"not a model, but transformers' Trainer left {len(folders)} in it; add the name of one: {newest}"
        )
    return None


def write_safetensors(path: Path, state: Mapping[str, Tensor]) -> Path:
    """Write tensors, which must be contiguous and on the CPU; what two names share is written for each."""
    taken: dict[int, str] = {}
    apart = {  # the library rejects shared memory
        name: tensor.clone() if taken.setdefault(tensor.data_ptr(), name) != name else tensor
        for name, tensor in state.items()
    }
    with replacing(path) as aside:
        try:
            save_file(apart, aside, metadata={"format": "pt"})
        except SafetensorError as error:  # how safetensors reports a full disk
            reason = re.sub(r"^.*: (.+) \(os error \d+\)$", r"\1", str(error))
            raise WriteError(f"{path}: cannot be written: {reason}") from error
    return path
