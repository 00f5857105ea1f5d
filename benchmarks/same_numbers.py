"""Compare the numbers of two checkouts, bitwise: training, prediction and explanation.

    python benchmarks/same_numbers.py OLD NEW

OLD and NEW are folders with a checkout of this repository. Each runs in a process of its own, on one thread,
with its own `src/`, and reports a SHA-256 for every result. The script prints a table and exits with status 1
if any result differs. It uses only public names, so it runs on old and new checkouts alike.

It trains short runs on the digits: two recipes, augmentation, masked patch prediction, distillation, a frozen
body. OLD writes models of three families, a hybrid and others with random weights; both load them and compute
logits, traces, gradients, predictions and every explanation method.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

SMALL = {"image_size": 48, "patch_size": 16, "embed_dim": 48, "depth": 3, "num_heads": 3, "num_classes": 5}
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "timm": ("vit_ti16", SMALL | {"num_registers": 2}, "timm"),
    "huggingface": ("vit_b16", SMALL, "huggingface"),
    "dinov3": ("dinov3_s16", {"depth": 2, "embed_dim": 48, "num_heads": 3, "image_size": 48}, "dinov3"),
    "hybrid": ("vit_r26_s32", {"image_size": 64, "depth": 2, "num_classes": 5}, "vitascope"),
    "windows": ("vit_ti16", SMALL | {"image_size": 64, "attention": "axial"}, "vitascope"),
    "merging": ("vit_ti16", SMALL | {"image_size": 96, "token_merging": 4, "pool": "mean"}, "vitascope"),
    "post-norm": (
        "vit_ti16",
        SMALL | {"norm": "post", "mlp": "swiglu", "positions": "relative"},
        "vitascope",
    ),
    "distilled": ("deit_ti16_distilled", {"image_size": 48, "depth": 2, "num_classes": 5}, "vitascope"),
    "resnet": ("resnet29_w32_cifar", {"num_classes": 5}, "vitascope"),
}
"""By name: the named size, its options, and the format in which OLD writes it."""
SHAPE = {"image_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3}
RUNS: dict[str, dict[str, Any]] = {
    "digits": {"recipe": "digits", "epochs": 2},
    "small data": {"recipe": "small-data", "epochs": 1, **SHAPE},
    "augmented": {"recipe": "base", "epochs": 1, **SHAPE, "mixup": 0.2, "randaugment": 2, "ema": 0.9},
    "masked": {"recipe": "base", "epochs": 1, **SHAPE, "task": "masked", "label_smoothing": 0.0},
    "distilled": {"recipe": "digits", "epochs": 1, "teacher": "digits"},
    "head": {"recipe": "digits", "epochs": 1, "weights": "digits", "freeze": True},
}
"""Recipe and options of training on the digits by name; `teacher` and `weights` name an earlier run."""


def digest(value: Any) -> str:
    """SHA-256 of arrays, tensors, and containers of them."""
    import numpy as np
    import torch

    found = hashlib.sha256()
    if isinstance(value, Mapping):
        for name in sorted(value):
            found.update(f"{name} {digest(value[name])}\n".encode())
    elif isinstance(value, list | tuple):
        for part in value:
            found.update(digest(part).encode())
    elif isinstance(value, torch.Tensor | np.ndarray):
        array = value.detach().cpu().contiguous().numpy() if isinstance(value, torch.Tensor) else value
        found.update(f"{array.dtype} {array.shape}\n".encode())
        found.update(np.ascontiguousarray(array).tobytes())
    else:
        found.update(repr(value).encode())
    return found.hexdigest()


def write_models(folder: Path) -> None:
    """Write every model of `MODELS` with random weights; both checkouts read these files."""
    import torch

    import vitascope as vs

    for number, (name, (size, options, family)) in enumerate(MODELS.items()):
        torch.manual_seed(number)
        model = vs.create_model(size, **options)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn(parameter.shape))
        vs.save_pretrained(model.eval(), folder / name, format=family)


def results_of_model(name: str, path: Path) -> Iterator[tuple[str, Any]]:
    """The outputs of a model on images of noise, and all its heatmaps."""
    import numpy as np
    import torch

    import vitascope as vs

    model = vs.from_pretrained(path)
    height, width = model.config.image_hw
    images = torch.from_numpy(np.random.default_rng(0).normal(size=(3, 3, height, width)).astype("float32"))
    with torch.no_grad():
        yield "logits", model(images)
        yield "embedding", model.embed(images)
        if isinstance(model, vs.VisionTransformer):
            trace = model.trace(images, attention=True)
            yield "trace", [trace["features"], trace["logits"], trace.attention]
    for method, explain in vs.explain.METHODS.items():
        try:
            yield method, explain(model, images)
        except vs.UserError as error:
            yield method, type(error).__name__
    model.train()
    torch.manual_seed(0)
    model(images).square().mean().backward()
    yield "gradients", {key: part.grad for key, part in model.named_parameters() if part.grad is not None}
    if model.config.num_classes == 5:
        pictures = [np.random.default_rng(n).integers(0, 256, (60 + n, 80, 3), "uint8") for n in range(3)]
        found = vs.Predictor.from_pretrained(path)(pictures)
        yield "predictions", [[(one.index, one.score) for one in picture] for picture in found]


def results_of_run(folder: Path, **options: Any) -> Iterator[tuple[str, Any]]:
    """The weights, metrics and predictions of a short run on the digits."""
    import numpy as np
    import safetensors.torch

    import vitascope as vs

    for earlier in ("weights", "teacher"):
        if earlier in options:
            options[earlier] = str(folder.parent / options[earlier])
    config = vs.TrainConfig.from_recipe(run=str(folder), **options)
    with contextlib.redirect_stdout(sys.stderr):
        (vs.pretrain if options.get("task") == "masked" else vs.train)(config)
    yield "weights", safetensors.torch.load_file(folder / "model" / "model.safetensors")
    clock = ("seconds", "images_per_second")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    yield "metrics", [{key: line[key] for key in line if key not in clock} for line in lines]
    if (folder / "predictions.npz").exists():
        with np.load(folder / "predictions.npz") as arrays:
            yield "recorded answers", {key: arrays[key] for key in arrays}


def emit(models: Path, scratch: Path) -> dict[str, str]:
    """All results of the imported checkout, as name and SHA-256."""
    import torch

    import vitascope as vs

    torch.set_num_threads(1)
    if not models.exists():
        write_models(models)
    jobs: dict[str, Callable[[], Iterator[tuple[str, Any]]]] = {}
    for name in MODELS:
        jobs[name] = partial(results_of_model, name, models / name)
    for name, options in RUNS.items():
        jobs[f"train {name}"] = partial(results_of_run, scratch / name, **options)
    found = {}
    for job, results in jobs.items():
        print(f"{vs.__file__}: {job}", file=sys.stderr)
        for result, value in results():
            found[f"{job}: {result}"] = digest(value)
    return found


def run_checkout(checkout: Path, models: Path, scratch: Path) -> dict[str, str]:
    """The results of a checkout, computed in a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--emit", str(models), str(scratch)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, cwd=checkout)
    return json.loads(done.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare the numbers of two checkouts, bitwise.")
    parser.add_argument("checkouts", nargs=2, type=Path, metavar="CHECKOUT")
    parser.add_argument("--emit", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.emit:
        json.dump(emit(*given.checkouts), sys.stdout)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder) / "models"
        old, new = (
            run_checkout(checkout.absolute(), models, Path(folder) / f"{place}")
            for place, checkout in zip(("old", "new"), given.checkouts, strict=True)
        )
    differing = [name for name in sorted(old | new) if old.get(name) != new.get(name)]
    for name in sorted(old | new):
        print(f"{'differs' if name in differing else 'same   '}  {name}")
    print(f"{len(old | new) - len(differing)} of {len(old | new)} results are bitwise identical")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
