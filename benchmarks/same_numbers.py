"""Compare the results of two checkouts, bitwise: training, evaluation, prediction, explanation, files.

    python benchmarks/same_numbers.py OLD NEW

OLD and NEW are folders with a checkout of this repository. Each runs in a process of its own, on one thread,
with its own `src/`, and reports a SHA-256 for every result. The script prints a table and exits with status 1
if a result differs that `CHANGES` does not list. It uses only the names of `vitascope` and the command line,
so it runs on old and new checkouts alike.

It trains short runs on the digits: four recipes, a ResNet, augmentation, masked patch prediction, a masked
autoencoder, distillation, fine-tuning, a frozen body. It evaluates, exports and quantizes one of them. Each
interrupts a run and resumes it. OLD writes models of three families, a hybrid and others with random
weights; both load them, compute logits, traces, gradients, predictions and every explanation method, and
convert them to every format.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
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
TINY = ["--image-size", "8", "--patch-size", "4", "--embed-dim", "16", "--depth", "2", "--num-heads", "2"]
FORMATS = ("vitascope", "timm", "huggingface", "torchvision", "jax", "deit", "dinov2", "dinov3")
PICTURES = 200
"""Digits that exported files predict."""
RUNS: dict[str, dict[str, Any]] = {
    "digits": {"recipe": "digits", "epochs": 2},
    "small data": {"recipe": "small-data", "epochs": 1, **SHAPE},
    "augmented": {"recipe": "base", "epochs": 1, **SHAPE, "mixup": 0.2, "randaugment": 2, "ema": 0.9},
    "masked": {
        "recipe": "base",
        "epochs": 1,
        **SHAPE,
        "task": "masked",
        "label_smoothing": 0.0,
        "keep": "last",
    },
    "mae": {"recipe": "mae", "steps": 8, **SHAPE, "decoder_dim": 32},
    "distilled": {"recipe": "digits", "epochs": 1, "teacher": "digits"},
    "head": {"recipe": "digits", "epochs": 1, "weights": "digits", "freeze": True},
    "finetuned": {"recipe": "finetune", "epochs": 1, "weights": "mae"},
    "resnet": {"recipe": "cnn", "steps": 8, "model": "resnet29_w32_cifar", "image_size": 16},
}
"""Recipe and options of training on the digits by name; `teacher` and `weights` name an earlier run."""
CHANGES: dict[str, str] = {
    f"{name}: integrated-gradients": "our own sum in place of captum's, 3.6e-7 apart" for name in MODELS
}
"""The results that NEW is meant to change, by name, with the reason. Empty this after a release."""


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
    """Write every model of `MODELS` with random weights; both checkouts read them."""
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


def results_of_conversion(path: Path, scratch: Path) -> Iterator[tuple[str, Any]]:
    """The tensors of a model in every format, or the name of the error."""
    import numpy as np
    import safetensors.torch
    import torch

    import vitascope as vs

    for name in FORMATS:
        try:
            files = vs.convert(path, scratch / name, format=name).files
        except vs.UserError as error:
            yield name, type(error).__name__
            continue
        for file in files:
            if file.suffix == ".safetensors":
                yield name, safetensors.torch.load_file(file)
            elif file.suffix == ".npz":
                yield name, dict(np.load(file))
            elif file.suffix == ".pth":
                yield name, torch.load(file, weights_only=True)


def results_of_training(folder: Path, **options: Any) -> Iterator[tuple[str, Any]]:
    """The results of a short run on the digits."""
    import vitascope as vs

    for earlier in ("weights", "teacher"):
        if earlier in options:
            options[earlier] = str(folder.parent / options[earlier])
    config = vs.TrainConfig.from_recipe(run=str(folder), **options)
    pretrains = options["recipe"] == "mae" or options.get("task") == "masked"
    with contextlib.redirect_stdout(sys.stderr):
        (vs.pretrain if pretrains else vs.train)(config)
    yield from results_of_run(folder)


def results_of_resuming(run: Path) -> Iterator[tuple[str, Any]]:
    """The results of a run that is interrupted and resumed to its end."""
    import vitascope as vs

    command = [sys.executable, "-m", "vitascope.cli", "train", "--recipe", "digits", *TINY, "--epochs", "4"]
    command += ["--checkpoint-seconds", "0", "--run", str(run)]
    training = subprocess.Popen(command, stdout=sys.stderr)
    while len(list(run.glob("checkpoints/step-*"))) < 2:
        if training.poll() is not None:
            raise RuntimeError("the run ended before it was interrupted")
        time.sleep(0.01)
    training.send_signal(signal.SIGINT)
    if training.wait() != 128 + signal.SIGINT:
        raise RuntimeError(f"the interrupted run ended with status {training.returncode}")
    with contextlib.redirect_stdout(sys.stderr):
        vs.resume(run)
    yield from results_of_run(run)


def results_of_run(folder: Path) -> Iterator[tuple[str, Any]]:
    """The weights, metrics and predictions of a finished run."""
    import numpy as np
    import safetensors.torch

    yield "weights", safetensors.torch.load_file(folder / "model" / "model.safetensors")
    clock = ("seconds", "images_per_second")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    yield "metrics", [{key: line[key] for key in line if key not in clock} for line in lines]
    if (folder / "predictions.npz").exists():
        with np.load(folder / "predictions.npz") as arrays:
            yield "recorded answers", {key: arrays[key] for key in arrays}


def results_of_use(folder: Path) -> Iterator[tuple[str, Any]]:
    """The evaluation of a finished run, and the predictions of its exported files."""
    import numpy as np
    from sklearn.datasets import load_digits

    import vitascope as vs

    yield "evaluation", vs.evaluate(folder).summary()
    yield "evaluation on data", vs.evaluate(folder / "model", data="digits").summary()
    pictures = list(np.rint(load_digits().images[:PICTURES] * (255 / 16)).astype("uint8"))
    files = {
        "model": folder / "model",
        "onnx": vs.export(folder, folder / "plain.onnx").path,
        "onnx int8": vs.quantize(folder, folder / "int8.onnx", max_drop=1.0).files[0],
    }
    for name, file in files.items():
        found = vs.Predictor.from_pretrained(file)(pictures)
        yield f"predictions of {name}", [[(one.index, one.score) for one in picture] for picture in found]


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
        jobs[f"convert {name}"] = partial(results_of_conversion, models / name, scratch / f"converted {name}")
    for name, options in RUNS.items():
        jobs[f"train {name}"] = partial(results_of_training, scratch / name, **options)
    jobs["resume"] = partial(results_of_resuming, scratch / "interrupted")
    jobs["use"] = partial(results_of_use, scratch / "digits")
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
    differing = {name for name in old | new if old.get(name) != new.get(name)}
    for name in sorted(old | new):
        if name in differing:
            print(f"{'changed' if name in CHANGES else 'DIFFERS'}  {name}  {CHANGES.get(name, '')}".rstrip())
        else:
            print(f"same     {name}")
    print(f"{len(old | new) - len(differing)} of {len(old | new)} results are bitwise identical")
    return 1 if differing - CHANGES.keys() else 0


if __name__ == "__main__":
    sys.exit(main())
