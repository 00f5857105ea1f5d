"""The rows of a result file: JSON lines, CSV and Parquet.

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

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from vitascope.data.rows.cells import column_names, csv_line, escaped, write_parquet
from vitascope.deploy.predict.predictor import ImageResult
from vitascope.formatting import SEPARATOR
from vitascope.models.engines.engine import Engine

FORMATS: tuple[str, ...] = (".jsonl", ".parquet", ".csv")
VERDICT = ("unknown", "set", "familiarity")
COLUMNS = ("image", "label", "score", "labels", "predictions", "error", *VERDICT)
"""The columns that are no class's, in any format."""
PARQUET_ROWS = 10_000
"""Rows per row group."""


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
    ) -> Self:
        """The rows of an engine's predictions. Those of several classes per image have probabilities."""
        several = bool(engine.thresholds)
        wanted = probabilities or several
        names = [engine.label(index) for index in range(engine.num_classes)] if wanted else ()
        return cls(several, engine.sets is not None, column_names(names, COLUMNS), kept or {})

    def encoded(self, results: Sequence[ImageResult], format: str) -> bytes:
        """The rows of a part of a file of one of `FORMATS`: lines, or a table for Parquet."""
        if format == ".parquet":
            return self._table(results)
        return "".join(map(self.csv_line if format == ".csv" else self.line, results)).encode()

    def write(self, parts: Iterable[bytes], path: Path) -> None:
        """Join the rows of parts, as `encoded` returns them, to a file of one of `FORMATS`."""
        if path.suffix == ".parquet":
            import pyarrow as pa

            tables = (pa.ipc.open_stream(part).read_all() for part in parts)
            write_parquet(path, tables, lambda schema: PARQUET_ROWS)
            return
        with open(path, "wb") as file:
            if path.suffix == ".csv":
                names = ("image", "label", "score", *VERDICT * self.judged, *self.columns)
                file.write(csv_line([*names, *self._kept_names()]).encode())
            file.writelines(parts)

    def line(self, result: ImageResult) -> str:
        """One line of JSON."""
        row = self._values(result)
        if self.columns and result.probabilities is not None:
            row["probabilities"] = dict(zip(self.columns, result.probabilities.tolist(), strict=True))
        if self.kept:
            row["table"] = dict(zip(self.kept, result.cells, strict=True))
        return escaped(json.dumps(row, ensure_ascii=False)) + "\n"

    def csv_line(self, result: ImageResult) -> str:
        """One line of CSV."""
        if result.best is None:
            empty = [""] * (2 + len(VERDICT) * self.judged + len(self.columns))
            return csv_line([result.image, *empty, *result.cells])
        labels = [prediction.label for prediction in result.predictions]
        label = SEPARATOR.join(labels) if self.by_threshold else labels[0]
        judged: Sequence[object] = ()
        if self.judged and (verdict := result.verdict) is not None:
            familiarity = "" if verdict.familiarity is None else np.float32(verdict.familiarity)
            judged = verdict.unknown or "", SEPARATOR.join(verdict.set or ()), familiarity
        probabilities = result.probabilities if self.columns and result.probabilities is not None else ()
        score = np.float32(result.best.score)
        return csv_line([result.image, label, score, *judged, *probabilities, *result.cells])

    def _values(self, result: ImageResult, text: Callable[[str], str] = str) -> dict[str, Any]:
        """The values that lines of JSON and Parquet have alike; `text` converts names."""
        row: dict[str, Any] = {"image": text(result.image)}
        if result.error is not None:
            return row | {"error": text(result.error)}
        predictions = [vars(prediction) for prediction in result.predictions]
        if text is not str:
            predictions = [values | {"label": text(values["label"])} for values in predictions]
        if self.by_threshold:
            row["labels"] = [values["label"] for values in predictions]
        row["predictions"] = predictions
        if self.judged and (verdict := result.verdict) is not None:
            row |= vars(verdict) | {"set": None if verdict.set is None else [*map(text, verdict.set)]}
        return row

    def _table(self, results: Sequence[ImageResult]) -> bytes:
        """Rows of Parquet as a stream of pyarrow."""
        import pyarrow as pa

        text, number = pa.string(), pa.float32()
        prediction = pa.struct([("label", text), ("index", pa.int32()), ("score", number)])
        kinds = [
            ("image", text),
            *[("labels", pa.list_(text))] * self.by_threshold,
            *[("predictions", pa.list_(prediction)), ("error", text)],
            *[("unknown", text), ("set", pa.list_(text)), ("familiarity", number)][: 3 * self.judged],
        ]
        values = [self._values(result, escaped) for result in results]
        table = pa.Table.from_pylist(values, schema=pa.schema(kinds))
        columns = table.columns
        if self.columns:
            unreadable = np.array([result.probabilities is None for result in results])
            none = np.zeros(len(self.columns), np.float32)
            rows = [none if result.probabilities is None else result.probabilities for result in results]
            columns += [pa.array(column, number, mask=unreadable) for column in np.stack(rows).T]
        if self.kept:
            cells = zip(*(map(escaped, result.cells) for result in results), strict=True)
            columns += [pa.array(column, text) for column in cells]
        names = [*table.column_names, *map(escaped, (*self.columns, *self._kept_names()))]
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, (table := pa.Table.from_arrays(columns, names)).schema) as stream:
            stream.write_table(table)
        return bytes(sink.getvalue())

    def _kept_names(self) -> Iterator[str]:
        """The names of the table's columns beside the others: one that is taken gets a suffix."""
        taken = {*COLUMNS, *self.columns, *self.kept}
        for name in self.kept:
            while name in {*COLUMNS, *self.columns} or (name not in self.kept and name in taken):
                name += " (table)"
            taken.add(name)
            yield name
