"""`vitascope evaluate`, `predict` and `explain`: a trained model and pictures."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Literal

import tyro

from vitascope.cli.parsing import MaybePath
from vitascope.errors import UserError
from vitascope.training.options import MaybeInt, MaybeText

Model = tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="MODEL")]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Measure a model: on its run's own test images, or on others."""

    model: Model
    """A run folder, a model folder or file, or a hub id."""
    data: MaybeText = None
    """`digits`, or a folder with test/<class>/, val/<class>/ or <class>/.
    Default: the test part of what the run was trained on."""
    batch_size: int = 128
    """Images at a time."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """`auto` takes bf16 where this machine is faster with it."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, `mps`."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print JSON."""

    def call(self) -> None:
        """Measure and print."""
        from vitascope.model.hardware import reuse_freed_memory
        from vitascope.training.evaluate import evaluate_pretrained

        reuse_freed_memory()
        evaluation = evaluate_pretrained(
            self.model,
            self.data,
            batch_size=self.batch_size,
            precision=self.precision,
            device=self.device,
        )
        summary = evaluation.summary()
        confusion, names = evaluation.confusion, evaluation.class_names
        if self.json:
            summary["classes"] = list(names)
            summary["confusion"] = confusion.tolist()
            print(json.dumps(summary))
            return
        for reason in evaluation.unreadable.values():
            print(f"left out: {reason}")
        print(
            f"{evaluation.split}: {evaluation.accuracy:.2%} right, {summary['correct']} of "
            f"{summary['images']} images; loss {evaluation.loss:.3f}"
        )
        width = max(map(len, names))
        for row, name in enumerate(names):
            total = int(confusion[row].sum())
            if not total:
                continue
            others = confusion[row].copy()
            others[row] = 0
            worst = int(others.argmax())
            text = f"  {name:<{width}}  {confusion[row, row] / total:>7.2%} of {total}"
            print(
                text + (f", most often taken for {names[worst]} ({others[worst]})" if others[worst] else "")
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Predict:
    """Say what is in pictures."""

    model: Model
    """A run folder, a model folder or file, or a hub id."""
    images: tyro.conf.Positional[
        Annotated[tuple[str, ...], tyro.conf.arg(metavar="PICTURE ...", help_behavior_hint="(required)")]
    ]
    """Picture files, of any kind and size."""
    top_k: int = 5
    """Classes a picture."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """`auto` takes bf16 where this machine is faster with it."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, `mps`."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print JSON."""

    def call(self) -> None:
        """Predict and print."""
        if not self.images:
            raise UserError("no pictures given: vitascope predict MODEL PICTURE [PICTURE ...]")
        from vitascope.deploy.predictor import Predictor
        from vitascope.model.hardware import reuse_freed_memory

        reuse_freed_memory()
        predictor = Predictor.from_pretrained(self.model, precision=self.precision, device=self.device)
        answers = predictor(self.images, top_k=self.top_k)
        if self.json:
            rows = [
                {"image": image, "predictions": [dataclasses.asdict(guess) for guess in answer]}
                for image, answer in zip(self.images, answers, strict=True)
            ]
            print(json.dumps(rows, ensure_ascii=False))
            return
        width = max(len(guess.label) for answer in answers for guess in answer)
        for image, answer in zip(self.images, answers, strict=True):
            print(image)
            for guess in answer:
                print(
                    f"  {guess.label:<{width}} {guess.score:>7.2%}  {'█' * round(24 * guess.score)}".rstrip()
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explain:
    """Show where a model looks: the picture beside itself under a heatmap."""

    model: Model
    """A run folder, a model folder or file, or a hub id."""
    image: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="PICTURE")]]
    """A picture file."""
    method: Literal["rollout", "attention"] = "rollout"
    """Attention through all layers, or that of one layer."""
    layer: int = -1
    """With `attention`: the layer, from 0; -1 is the last."""
    head: MaybeInt = None
    """With `attention`: the head, from 0. Default: the mean of all heads."""
    out: MaybePath = None
    """The PNG to write. Default: <picture>-<method>.png in this folder."""

    def call(self) -> None:
        """Explain, write the picture, say what was predicted."""
        if self.method == "rollout" and (self.layer != -1 or self.head is not None):
            raise UserError("--layer and --head choose one attention map: add --method attention")
        out = self.out or Path(f"{Path(self.image).stem}-{self.method}.png")
        if out.suffix.lower() != ".png":
            raise UserError(f"--out {out}: the picture is a PNG, so give a name that ends in .png")
        if out.exists() and Path(self.image).exists() and out.samefile(self.image):
            raise UserError(f"--out {out} is the picture itself, which would be lost; give another name")
        import torch

        from vitascope import explain
        from vitascope.explain import plots
        from vitascope.explain.attention import attending
        from vitascope.report.figures import to_picture
        from vitascope.weights.store import load_pretrained

        loaded = load_pretrained(self.model)
        model, preprocess = attending(loaded.model), loaded.preprocess
        pixels = preprocess.pixels(self.image)  # (C, H, W)
        images = preprocess.normalize(torch.from_numpy(pixels)[None])  # (1, C, H, W)
        if self.method == "rollout":
            heat, what = explain.rollout(model, images), "attention rollout"
        else:
            heat = explain.attention(model, images, self.layer, self.head)
            heads = "mean of all heads" if self.head is None else f"head {self.head}"
            what = f"attention of layer {self.layer % model.config.depth}, {heads}"
        title = f"{what} over {Path(self.image).name}"
        if model.config.gives_classes:
            with torch.inference_mode():
                score, index = model(images)[0].softmax(dim=0).max(dim=0)
            names = model.config.class_names or [str(number) for number in range(model.config.num_classes)]
            title = f"{names[int(index)]} ({score:.0%}): {what}"
        plots.save_figure(plots.draw_explanation(to_picture(pixels), heat[0].numpy(), title), out)
        print(f"{title}\n{out}")
