"""`vitascope compress`: a smaller or shorter model, and what that costs and brings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from vitascope.cli.parsing import Model
from vitascope.errors import UserError
from vitascope.report.wording import counted
from vitascope.training.options import MaybeFloat, MaybeInt, MaybeText

if TYPE_CHECKING:
    from torch import Tensor

    from vitascope.data.splits import ImageSet
    from vitascope.deploy.predict.engine import TorchEngine
    from vitascope.model.classifier import Classifier

EXAMPLES_AT_ONCE = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compress:
    """Make a model faster: merge tokens, prune heads and MLPs.

    What is written is an ordinary model folder.

    Merging needs no training. After pruning: `vitascope train --weights FOLDER`.
    """

    model: Model
    """A run folder, a model folder or file, or a hub id."""
    out: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="FOLDER")]]
    """The new folder."""
    merge: MaybeInt = None
    """Patches that every block merges with those most like them: 8 to 16 of 196; 0 takes merging out."""
    heads: MaybeInt = None
    """Attention heads to keep in every block."""
    mlp_ratio: MaybeFloat = None
    """Width of the MLPs' hidden layers to keep, over `embed_dim`: 4 in most models."""
    data: MaybeText = None
    """DATA with the model's classes: training images say what to prune, test images what it costs.
    Default: what the run was trained on."""
    images: int = 512
    """Training images that pruning looks at."""
    batch_size: int = 8
    """Images at a time where speed is measured."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """`auto` takes bf16 where this machine is faster with it."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, `mps`."""

    def call(self) -> None:
        """Compress, save, load what was saved, compare, print."""
        asked = (self.merge, self.heads, self.mlp_ratio)
        if all(value is None for value in asked):
            raise UserError("nothing to do: say --merge, --heads or --mlp-ratio")
        if self.images < 1:
            raise UserError(f"images must be at least 1, not {self.images}")
        from vitascope.model.hardware import reuse_freed_memory
        from vitascope.weights.loading import from_pretrained
        from vitascope.weights.saving import save_pretrained

        reuse_freed_memory()
        if self.out.exists() and (not self.out.is_dir() or any(self.out.iterdir())):
            raise UserError(
                f"{self.out}: is not an empty folder; nothing in it is overwritten, so name a new one"
            )
        model = from_pretrained(self.model)
        # Before anything is written: what is not there leaves no folder behind.
        images = self._test_images(model.config.class_names)
        smaller = self._compressed(model)
        save_pretrained(smaller, self.out)
        self._compare({"before": model, "after": from_pretrained(self.out)}, images)
        print(f"written to {self.out}")
        if self.heads is not None or self.mlp_ratio is not None:
            print(f"train on: vitascope train --data {self._data() or 'DATA'} --weights {self.out}")

    def _compressed(self, model: Classifier) -> Classifier:
        from vitascope.deploy.export.compress import merge_tokens, prune
        from vitascope.model.hardware import resolve_device

        if self.heads is not None or self.mlp_ratio is not None:
            model = model.to(resolve_device(self.device))
            examples = self._examples(model)
            model = prune(model, examples, num_heads=self.heads, mlp_ratio=self.mlp_ratio)
        return model if self.merge is None else merge_tokens(model, self.merge)

    def _data(self) -> str | None:
        """The DATA argument: as given, or what the run was trained on; None where neither is known."""
        from vitascope.run.run import Run

        run = Run(Path(self.model))
        return str(run.config["data"]) if self.data is None and run.exists else self.data

    def _seed(self) -> int:
        """That of the run's split, so that no image is judged by that the run did not train on."""
        from vitascope.run.run import Run

        run = Run(Path(self.model))
        return int(run.config["seed"]) if run.exists else 0

    def _examples(self, model: Classifier) -> Iterator[tuple[Tensor, Tensor]]:
        """Normalized training images and their classes, on the model's device."""
        from vitascope.data.datasets import open_data
        from vitascope.data.loading import Loader
        from vitascope.training.evaluate import data_of_run
        from vitascope.weights.preprocess import preprocess_of

        data = self._data()
        if data is None:
            raise UserError(
                f"pruning judges by labelled images, and {self.model} is no run folder: say --data DATA"
            )
        own = self.data is None
        splits = data_of_run(Path(self.model)).splits if own else open_data(data, seed=self._seed())
        train = splits.train.in_classes(model.config.class_names, data)
        some = train.subset("train", train.order(0, 0)[: self.images])
        device, preprocess = next(model.parameters()).device, preprocess_of(model)
        for batch in Loader(some, preprocess, EXAMPLES_AT_ONCE, device=device).epoch():
            yield preprocess.normalize(batch.pixels), batch.labels

    def _test_images(self, class_names: tuple[str, ...]) -> ImageSet | None:
        """What accuracy is measured on; None where nothing says on what."""
        from vitascope.data.datasets import open_for_evaluation
        from vitascope.run.run import Run

        data = self._data()
        if data is None:
            return None
        if self.data is not None:
            return open_for_evaluation(data, class_names)
        return Run.open(self.model).test_images()

    def _compare(self, models: dict[str, Classifier], images: ImageSet | None) -> None:
        """Print parameters, operations, speed and accuracy side by side."""
        from vitascope.deploy.export.compress import measure_speed
        from vitascope.deploy.predict.engine import TorchEngine

        engines = {
            name: TorchEngine(each, precision=self.precision, device=self.device)
            for name, each in models.items()
        }
        speeds = measure_speed(engines, batch_size=self.batch_size)
        configs = [each.config for each in models.values()]
        rows = [
            ("", *models),
            ("parameters", *(f"{config.num_parameters:,}" for config in configs)),
            ("GFLOPs an image", *(f"{config.flops / 1e9:,.3g}" for config in configs)),
            (f"images/s, batch {self.batch_size}", *(f"{speed.median:,.1f}" for speed in speeds.values())),
        ]
        if images is not None:
            right = [self._accuracy(engine, images) for engine in engines.values()]
            rows.append((f"right, {counted(len(images), 'image')}", *(f"{share:.2%}" for share in right)))
        width = max(len(row[0]) for row in rows)
        for title, *values in rows:
            print(f"{title:<{width}}" + "".join(f"{value:>14}" for value in values))

    def _accuracy(self, engine: TorchEngine, images: ImageSet) -> float:
        from vitascope.data.loading import Loader
        from vitascope.model.hardware import resolve_precision
        from vitascope.training.evaluate import evaluate

        loader = Loader(images, engine.preprocess, 128, device=engine.device)
        dtype = resolve_precision(self.precision, engine.config, engine.device, 128, training=False)
        return evaluate(engine.model, loader, precision=dtype).accuracy
