"""Results of runs, as `train`, `pretrain` and `resume` return them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitascope.model.classifier import Classifier
from vitascope.model.vit import VisionTransformer
from vitascope.run.run import Run
from vitascope.training.evaluate import Evaluation, data_frame, html_table
from vitascope.training.tasks.task import PatchEvaluation

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class RunResult:
    """A finished run.

    Attributes:
        run: the run folder.
        model: the finished model, in evaluation mode, on the CPU.
        evaluation: of the model on the test images, or on the validation images if there are no test images.
        seconds: time in the training loop, with validation, over all processes that worked on the run.
        figures: paths of the figures, by name.
        report: path of the report.
    """

    run: Path
    model: Classifier
    evaluation: Any
    seconds: float
    figures: dict[str, Path]
    report: Path

    def to_dataframe(self) -> DataFrame:
        """The metrics of the run, one row per epoch.

        Raises:
            UserError: pandas is not installed.
        """
        return data_frame(Run(self.run).records("epoch")).drop(columns="kind").set_index("epoch")

    def __repr__(self) -> str:
        words = self.evaluation.in_words()
        return f"{type(self).__name__}({str(self.run)!r}, {words}, {self.seconds:.1f} s)"

    def _repr_html_(self) -> str:
        return html_table({"run": self.run, **self.evaluation.summary(), "seconds": self.seconds})


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class TrainResult(RunResult):
    """A finished classifier."""

    evaluation: Evaluation


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class PretrainResult(RunResult):
    """A finished pre-training; `train(weights=result.run)` fine-tunes its model, which has no head."""

    model: VisionTransformer
    evaluation: PatchEvaluation

    @property
    def metrics(self) -> dict[str, float]:
        """`loss`, and `accuracy` if patches are classified."""
        return self.evaluation.metrics
