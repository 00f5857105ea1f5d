"""The results of finished runs."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitascope.models.vision_model import VisionModel
from vitascope.models.vit import VisionTransformer
from vitascope.training.evaluation.measure import Evaluation, data_frame, html_table
from vitascope.training.run.run import Run
from vitascope.training.tasks.task import PatchEvaluation

if TYPE_CHECKING:
    import pandas


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class RunResult:
    """A finished run."""

    run: Path
    """The run folder; of a run in a store its local copy, which lasts as long as this result."""
    model: VisionModel
    """The finished model, in evaluation mode, on the CPU."""
    evaluation: Any
    """Of the model on the test images, or on the validation images if there are no test images."""
    seconds: float
    """Time in the training loop, with validation, over all processes that worked on the run."""
    figures: dict[str, Path]
    """Paths of the figures, by name."""
    report: Path
    url: str | None = None
    """Of a run in a store, where it is there."""

    def to_dataframe(self) -> "pandas.DataFrame":
        """The metrics of the run, one row per epoch; UserError without pandas."""
        return data_frame(Run(self.run).records("epoch")).drop(columns="kind").set_index("epoch")

    def __repr__(self) -> str:
        words = self.evaluation.in_words()
        return f"{type(self).__name__}({self.url or str(self.run)!r}, {words}, {self.seconds:.1f} s)"

    def _repr_html_(self) -> str:
        return html_table({"run": self.url or self.run, **self.evaluation.summary(), "seconds": self.seconds})


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class TrainResult(RunResult):
    """A finished classifier."""

    evaluation: Evaluation


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class PretrainResult(RunResult):
    """A finished pre-training; `train(weights=result.run)` fine-tunes its model, which has no head."""

    model: VisionTransformer
    evaluation: PatchEvaluation
