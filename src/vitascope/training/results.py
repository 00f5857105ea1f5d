"""Results of runs, as `train`, `pretrain` and `resume` return them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitascope.model.classifier import Classifier
from vitascope.model.vit import VisionTransformer
from vitascope.run.run import Run
from vitascope.training.evaluate import Evaluation, data_frame, html_table

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class RunResult:
    """A finished run.

    Attributes:
        run: the run folder.
        model: the finished model, in evaluation mode, on the CPU.
        seconds: time in the training loop, with validation, over all processes that worked on the run.
        figures: paths of the figures, by name.
        report: path of the report.
    """

    run: Path
    model: Classifier
    seconds: float
    figures: dict[str, Path]
    report: Path

    def to_dataframe(self) -> DataFrame:
        """The metrics of the run, one row per epoch.

        Raises:
            UserError: pandas is not installed.
        """
        return data_frame(Run(self.run).records("epoch")).drop(columns="kind").set_index("epoch")

    def summary(self) -> dict[str, Any]:
        """The results on the test images."""
        raise NotImplementedError

    def _repr_html_(self) -> str:
        return html_table({"run": self.run, **self.summary(), "seconds": self.seconds})


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class TrainResult(RunResult):
    """A finished classifier.

    Attributes:
        evaluation: of the model on the test images, or on the validation images if there are no test images.
    """

    evaluation: Evaluation

    def summary(self) -> dict[str, Any]:
        """The results on the test images."""
        return self.evaluation.summary()

    def __repr__(self) -> str:
        return f"TrainResult({str(self.run)!r}, accuracy {self.evaluation.in_words()}, {self.seconds:.1f} s)"


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class PretrainResult(RunResult):
    """A finished pre-training; `train(weights=result.run)` fine-tunes its model, which has no head.

    Attributes:
        metrics: `loss`, and `accuracy` if patches are classified.
        split: name of the split of these metrics: "test", or "val" if there are no test images.
    """

    model: VisionTransformer
    metrics: dict[str, float]
    split: str

    def summary(self) -> dict[str, Any]:
        """The results on the test images."""
        return {"split": self.split, **self.metrics}

    def __repr__(self) -> str:
        metrics = ", ".join(f"{name} {value:.3f}" for name, value in self.metrics.items())
        return f"PretrainResult({str(self.run)!r}, {self.split} {metrics}, {self.seconds:.1f} s)"
