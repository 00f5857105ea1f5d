"""The rows of a result file: JSON lines, and the Parquet and CSV files that are made from them.

| format | row of an image |
|---|---|
| JSON lines | `image`; `predictions`, or `error` if it could not be read |
| Parquet | the same as columns |
| CSV | `image`, `label` (the most probable class) and its `score`; both empty if it could not be read |

A calibrated model adds `unknown` (null, `ambiguous`, `unfamiliar` or `unchecked`), `set` and `familiarity`.

With several classes per image, JSON lines and Parquet have `labels`, the names of the predicted classes, and
the label of a CSV file is these names, joined by ";". The score is still that of the most probable class.
Probabilities of all classes are an object in JSON lines, and otherwise a column per class. So are the cells
of a table that are kept, in JSON under `table`.
"""

from __future__ import annotations

import csv
import dataclasses
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vitascope.data.rows.cells import column_names, csv_text, escaped
from vitascope.deploy.predict.predictor import ImageResult
from vitascope.formatting import SEPARATOR
from vitascope.models.engines.engine import Engine

FORMATS: tuple[str, ...] = (".jsonl", ".parquet", ".csv")
VERDICT = ("unknown", "set", "familiarity")
COLUMNS = ("image", "label", "score", "labels", "predictions", "error", *VERDICT)
"""The columns that are no class's, in any format."""
PARQUET_ROWS = 10_000
"""Rows per row group, which bounds the memory."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """The form of the rows."""

    by_threshold: bool = False
    """Whether an image may have several classes."""
    judged: bool = False
    """Whether it is known what the model knows: `unknown`, `set` and `familiarity`."""
    columns: tuple[str, ...] = ()
    """The name of each class's probability, (K,); empty without probabilities."""
    kept: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The columns of a table, whose cells are those of `ImageResult.cells`, as `column_digests` has them."""

    @classmethod
    def of(
        cls, engine: Engine, *, probabilities: bool = False, kept: Mapping[str, str] | None = None
    ) -> Rows:
        """The rows of an engine's predictions. Those of several classes per image have probabilities."""
        several = bool(engine.thresholds)
        wanted = probabilities or several
        names = [engine.label(index) for index in range(engine.num_classes)] if wanted else ()
        return cls(several, engine.sets is not None, column_names(names, COLUMNS), kept or {})

    def line(self, result: ImageResult) -> str:
        """One line of JSON."""
        row: dict[str, Any] = {"image": result.image}
        if result.error is not None:
            row["error"] = result.error
        else:
            if self.by_threshold:
                row["labels"] = [prediction.label for prediction in result.predictions]
            row["predictions"] = [vars(prediction) for prediction in result.predictions]
            if self.judged:
                assert result.verdict is not None
                row |= vars(result.verdict)
            if self.columns:
                assert result.probabilities is not None
                row["probabilities"] = dict(zip(self.columns, result.probabilities.tolist(), strict=True))
        if self.kept:
            row["table"] = dict(zip(self.kept, result.cells, strict=True))
        return escaped(json.dumps(row, ensure_ascii=False)) + "\n"

    def write(self, lines: Iterable[bytes], path: Path) -> None:
        """Write lines of JSON to a file of one of `FORMATS`."""
        if path.suffix == ".jsonl":
            with open(path, "wb") as to:
                to.writelines(lines)
        else:
            write = self._write_csv if path.suffix == ".csv" else self._write_parquet
            write((_without_surrogates(json.loads(line)) for line in lines), path)

    def _write_csv(self, rows: Iterable[dict[str, Any]], path: Path) -> None:
        with open(path, "w", encoding="utf-8", newline="") as to:
            names = (*self.columns, *self._kept_names())
            writer = csv.writer(to, lineterminator="\n")
            judged = VERDICT * self.judged
            writer.writerow(
                ["image", "label", "score", *judged, *(csv_text(escaped(name)) for name in names)]
            )
            writer.writerows(map(self._cells, rows))

    def _cells(self, row: dict[str, Any]) -> list[str]:
        kept = map(csv_text, row.get("table", {}).values())
        if "error" in row:
            empty = len(self.columns) + len(VERDICT) * self.judged
            return [csv_text(row["image"]), "", "", *[""] * empty, *kept]
        labels, scores = ([each[name] for each in row["predictions"]] for name in ("label", "score"))
        probabilities = list(row.get("probabilities", {}).values())
        label = SEPARATOR.join(labels) if self.by_threshold else labels[0]
        numbers = [max(probabilities) if self.by_threshold else scores[0], *probabilities]
        # The shortest text that is the same number in float32, which the model computed.
        scores = [str(np.float32(number)) for number in numbers]
        return [csv_text(row["image"]), csv_text(label), scores[0], *self._verdict(row), *scores[1:], *kept]

    def _verdict(self, row: dict[str, Any]) -> list[str]:
        """The cells of `VERDICT`, empty for what is not known; none of a model that was not calibrated."""
        if not self.judged:
            return []
        familiarity = "" if row["familiarity"] is None else str(np.float32(row["familiarity"]))
        return [row["unknown"] or "", csv_text(SEPARATOR.join(row["set"] or ())), familiarity]

    def _kept_names(self) -> Iterator[str]:
        """The names of the table's columns beside the others: one that is taken gets a suffix."""
        taken = {*COLUMNS, *self.columns, *self.kept}
        for name in self.kept:
            while name in {*COLUMNS, *self.columns} or (name not in self.kept and name in taken):
                name += " (table)"
            taken.add(name)
            yield name

    def _write_parquet(self, rows: Iterator[dict[str, Any]], path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        prediction = pa.struct([("label", pa.string()), ("index", pa.int32()), ("score", pa.float32())])
        verdict = [
            ("unknown", pa.string()), ("set", pa.list_(pa.string())), ("familiarity", pa.float32())
        ]  # fmt: skip
        names = tuple(map(escaped, self._kept_names()))
        schema = pa.schema(
            [
                ("image", pa.string()),
                *[("labels", pa.list_(pa.string()))] * self.by_threshold,
                ("predictions", pa.list_(prediction)),
                ("error", pa.string()),
                *verdict[: len(verdict) * self.judged],
                *((escaped(name), pa.float32()) for name in self.columns),
                *((name, pa.string()) for name in names),
            ]
        )
        with pq.ParquetWriter(path, schema) as to:
            while group := list(itertools.islice(rows, PARQUET_ROWS)):
                for row in group:
                    row |= row.pop("probabilities", {})
                    row |= dict(zip(names, row.pop("table", {}).values(), strict=True))
                to.write_table(pa.Table.from_pylist(group, schema=schema))


def _without_surrogates(value: Any) -> Any:
    """A value without the surrogates that JSON can hold, and the other formats cannot."""
    if isinstance(value, dict):
        return {escaped(name): _without_surrogates(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_without_surrogates(each) for each in value]
    return escaped(value) if isinstance(value, str) else value
