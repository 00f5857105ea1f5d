"""Count the operations of a training step that launch work on a device, by part of the step.

    .venv/bin/python benchmarks/launches.py --out

On a GPU each of them is at least one kernel launch, of a few microseconds, however small its tensors are.
They are counted on the CPU by PyTorch's dispatcher: views launch nothing and are left out, and so are random
numbers drawn by NumPy. Muon pads matrices as on a GPU, in the last row as on a CPU. The steps are those of
`vitascope train` in fp32, without compilation, on pictures of random pixels: the recipe `small-data` with a
strong augmentation, and two ViTs with AdamW. Batches have 128 small images, so that each operation of
RandAugment has one, as in most steps of a run, or 8 large ones. It takes a minute.

A second table has the conversions of tokens in a step of ViT-Ti/16 in bf16: with norms in float32, as in
CUDA's autocast, for which a wrapper stands here, and with ours. A third one has the distance of the gradient
from that in fp32, in units of its norm, with tokens in bf16 and in fp32.
"""

from __future__ import annotations

import copy
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import vitascope as vs
from conditions import Conditions
from reports import command_line, markdown_table, publish
from vitascope.data.datasets import open_data
from vitascope.model import norms
from vitascope.model.vit import VisionTransformer
from vitascope.options.recipes import BUILT_IN
from vitascope.run.run import Run
from vitascope.training import loop, optim
from vitascope.training.loop import Trainer
from vitascope.training.train import build_trainer, prepare

STRONG: dict[str, Any] = {
    "randaugment": 2,
    "operation_probability": 1.0,
    "crop_scale": 0.5,
    "erase": 0.25,
    "mixup": 0.8,
    "cutmix": 1.0,
    "precision": "fp32",
}
STEPS: dict[str, dict[str, Any]] = {
    "small-data": {"recipe": "small-data", "progressive": 0.0, "batch_size": 128, **STRONG},
    "small-data, small images": {"recipe": "small-data", "progressive": 0.5, "batch_size": 128, **STRONG},
    "ViT-Ti/4": {
        "recipe": "deit",
        "model": "vit_ti16",
        "patch_size": 4,
        "image_size": 32,
        "batch_size": 128,
        **STRONG,
    },
    "ViT-B/16": {"recipe": "deit", "model": "vit_b16", "image_size": 224, "batch_size": 8, **STRONG},
}
FREE = re.compile("empty|detach|_unsafe_view|record_function|ndtri")
"""Operations that launch nothing, beside views: the quantiles of drawn numbers are computed on the host."""
PARTS = ("augmentation", "forward", "backward", "optimizer", "average")


class Launches(TorchDispatchMode):
    """Counts operations that are no views, by the part of the step that runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.part = "other"
        self.counts: Counter[str] = Counter()
        self.names: dict[str, Counter[str]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if not (function.is_view or FREE.search(function.__name__)):
            self.counts[self.part] += 1
            self.names.setdefault(self.part, Counter())[function.__name__] += 1
        return result

    def within(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, whose operations are counted for a part."""

        def call(*args: Any, **kwargs: Any) -> Any:
            before, self.part = self.part, part
            try:
                return function(*args, **kwargs)
            finally:
                self.part = before

        return call


def random_folder(root: Path, side: int, count: int) -> Path:
    """A folder of two classes with square pictures of random pixels, for training and testing."""
    generator = np.random.default_rng(0)
    for split in ("train", "test"):
        for number in range(count):
            path = root / split / "ab"[number % 2] / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(generator.integers(0, 256, (side, side, 3), dtype=np.uint8)).save(path)
    return root


@contextmanager
def trainer_of(options: dict[str, Any]) -> Iterator[Trainer]:
    """The trainer of a run on random pictures."""
    options = dict(options)
    with tempfile.TemporaryDirectory() as folder:
        side, batch_size = options.get("image_size") or 32, options["batch_size"]
        data = random_folder(Path(folder) / "data", side, count=3 * batch_size)
        config = vs.TrainConfig.from_recipe(
            options.pop("recipe"),
            data=str(data),
            run=str(Path(folder) / "run"),
            epochs=2,
            **options,
        )
        opened = prepare(config, open_data(config.data))
        yield build_trainer(Run(Path(str(config.run))), opened, torch.device("cpu"))


def count(options: dict[str, Any], *, gpu: bool = True) -> Launches:
    """The operations of the second training step, on a GPU or a CPU."""
    with trainer_of(options) as trainer:
        launches = Launches()
        update_average = launches.within("average", optim.update_average)
        with (
            mock.patch.object(trainer, "_examples", launches.within("augmentation", trainer._examples)),
            mock.patch.object(
                type(trainer.task), "loss", launches.within("forward", type(trainer.task).loss)
            ),
            mock.patch.object(trainer, "_update", launches.within("optimizer", trainer._update)),
            mock.patch.object(trainer, "_backward", launches.within("backward", trainer._backward)),
            mock.patch.object(loop, "update_average", update_average),
        ):
            for number, batch in enumerate(trainer.train_loader.epoch(0)):
                if number == 0:
                    trainer._training_step(batch, 0)
                    continue
                with launches:
                    trainer._training_step(batch, 0)
                break
        return launches


class Conversions(TorchDispatchMode):
    """Counts the changes of the dtype of tokens, (B, T, D)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.__name__.startswith("_to_copy") and args[0].ndim == 3:
            self.count += args[0].dtype != result.dtype
        return result


class CudaNorms(TorchFunctionMode):
    """Computes norms in float32 under autocast, as CUDA's does."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_autocast_enabled("cpu") and getattr(function, "__name__", "") == "layer_norm":
            with torch.autocast("cpu", enabled=False):
                wide = [x.float() if isinstance(x, Tensor) else x for x in args]
                return function(*wide, **kwargs)
        return function(*args, **kwargs)


def conversions(*, plain: bool, **options: Any) -> int:
    """Those of a training step of ViT-Ti/16, with plain norms or ours."""
    model = vs.create_model("vit_ti16", num_classes=10, **options).train()
    autocast = torch.autocast  # of the CPU in the place of CUDA's

    def ours(tokens: Tensor) -> bool:
        return not plain and torch.is_autocast_enabled("cpu")

    with mock.patch.object(norms, "widened", ours), Conversions() as found:
        replaced = mock.patch.object(torch, "autocast", lambda _, **how: autocast("cpu", **how))
        with CudaNorms(), replaced, autocast("cpu", torch.bfloat16):
            total = model(torch.randn(8, 3, 224, 224)).float().sum()
        total.backward()
    return found.count


def distance(model: VisionTransformer, stream: torch.dtype) -> float:
    """The distance of the gradient under bf16 autocast from that in fp32, in units of its norm."""
    images, labels = torch.randn(32, 3, *model.config.image_hw), torch.arange(32) % 10
    found: list[Tensor] = []
    for dtype in (torch.float32, stream):
        trained = copy.deepcopy(model).train()
        trained.encoder.register_forward_pre_hook(
            lambda _, given, dtype=dtype: (given[0].to(dtype), *given[1:])
        )
        with torch.autocast("cpu", torch.bfloat16, enabled=len(found) == 1):
            logits = trained(images)
        F.cross_entropy(logits.float(), labels).backward()
        found.append(torch.cat([p.grad.flatten() for p in trained.parameters() if p.grad is not None]))
    exact, rounded = found
    return float((rounded - exact).norm() / exact.norm())


def tables_of_bf16() -> str:
    """The conversions, and the rounding of both streams."""
    counted = [
        (name, *(f"{conversions(plain=plain, **options)}" for plain in (True, False)))
        for name, options in {"ViT-Ti/16": {}, "ViT-Ti/16, LayerScale": {"layer_scale": 0.1}}.items()
    ]
    torch.manual_seed(0)
    small, trained = vs.create_model("vit_s16", num_classes=10, image_size=96), vs.from_pretrained(BUILT_IN)
    assert isinstance(small, VisionTransformer)
    assert isinstance(trained, VisionTransformer)
    nn.init.normal_(small.get_parameter("head.weight"), std=0.02)
    rows = [
        (name, *(f"{distance(model, stream):.1%}" for stream in (torch.bfloat16, torch.float32)))
        for name, model in {"ViT-S/16": small, BUILT_IN: trained}.items()
    ]
    return (
        markdown_table(("conversions of tokens", "norms in float32", "ours"), counted)
        + "\n\n"
        + markdown_table(("distance of the gradient", "bf16 stream", "fp32 stream"), rows)
    )


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--names", action="store_true", help="also print the operations of each part")
    arguments = parser.parse_args()
    rows, listed = [], []
    steps = [(name, options, True) for name, options in STEPS.items()]
    for name, options, gpu in [*steps, ("small-data, on a CPU", STEPS["small-data"], False)]:
        launches = count(options, gpu=gpu)
        rest = sum(launches.counts[part] for part in launches.counts if part not in ("forward", "backward"))
        rows.append((name, *(f"{launches.counts[part]:,}" for part in PARTS), f"{rest:,}"))
        listed += [f"{name}, {part}: {dict(found.most_common())}" for part, found in launches.names.items()]
    conditions = Conditions.now()
    table = markdown_table(("step", *PARTS, "all but forward and backward"), rows)
    heading = conditions.heading("Launches of a training step")
    publish("launches", f"{heading}\n\n{table}\n\n{tables_of_bf16()}", arguments)
    if arguments.names:
        print("\n".join(listed))


if __name__ == "__main__":
    main()
