"""`Evaluation`: the predictions of labelled images with their scores, also as a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from vitascope.errors import UserError
from vitascope.run.predictions import Predictions

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Evaluation(Predictions):
    """A classifier's predictions of labelled images, and their scores."""

    loss: float
    """Mean cross-entropy, nats; binary, and the mean over the classes, where any of them may apply."""
    trained_on: int = 0
    """Images that the model was trained on; they are left out, unless there were no others."""
    changes: dict[str, int] | None = None
    """Since a run's training, `missing`, `changed`, `renamed` and `new` images; None if unknown."""

    @property
    def accuracy(self) -> float:
        """Share of correct predictions."""
        return float(self.correct.mean())

    def summary(self) -> dict[str, Any]:
        """The scores as plain values, for `metrics.jsonl` and `--json`."""
        score = self.score
        low, high = score.interval
        return {
            "split": self.split,
            "images": score.total,
            "unreadable": len(self.unreadable),
            "correct": score.right,
            "accuracy": self.accuracy,
            "accuracy_low": low,
            "accuracy_high": high,
            **({} if score.top5 is None else {"top5_accuracy": score.top5}),
            "balanced_accuracy": score.balanced,
            "macro_f1": score.macro_f1,
            "majority": score.majority,
            "loss": self.loss,
        }

    def to_dataframe(self) -> DataFrame:
        """One row per image: `label`, `prediction`, `confidence`, `correct`; UserError without pandas."""
        names = np.array(self.class_names, dtype=object)
        columns = {
            "label": names[self.labels],
            "prediction": names[self.classes],
            "confidence": self.confidences,
            "correct": self.correct,
        }
        return data_frame(columns, index=self.indices)

    def in_words(self) -> str:
        """The accuracy with its interval, in a few words."""
        low, high = self.score.interval
        images = f"{self.score.total:,} {self.split} images"
        return f"accuracy {self.accuracy:.2%} of {images} ({low:.1%} to {high:.1%})"

    def __repr__(self) -> str:
        return f"Evaluation({self.in_words()}, loss {self.loss:.3f})"

    def _repr_html_(self) -> str:
        return html_table(self.summary())


def data_frame(columns: Mapping[str, Any] | Iterable[Mapping[str, Any]], **options: Any) -> DataFrame:
    """A pandas data frame."""
    try:
        import pandas
    except ImportError as error:
        raise UserError("to_dataframe needs pandas, which is not installed: pip install pandas") from error
    return pandas.DataFrame(columns, **options)


def html_table(values: Mapping[str, Any]) -> str:
    """Names and values as a table, for notebooks."""
    rows = (
        f"<tr><th>{escape(name)}</th><td>{escape(f'{value:.4g}' if isinstance(value, float) else str(value))}"
        for name, value in values.items()
    )
    return f"<table>{''.join(rows)}</table>"
