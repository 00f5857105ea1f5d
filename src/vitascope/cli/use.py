"""`vitascope evaluate`: a trained model and labelled pictures."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Literal

import tyro

from vitascope.report.wording import counted
from vitascope.training.options import MaybeText

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
            f"{counted(summary['images'], 'image')}; loss {evaluation.loss:.3f}"
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
