"""Count what opening shards in a store with an empty cache fetches, with and without `samples.npz`.

A web server in this process serves the shards, so that each request is seen.

    python benchmarks/remote_opening.py SHARDS --out       # SHARDS of `vitascope pack`; a file in results/
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.stores import files_of, serving

import reports
from conditions import Conditions
from vitascope.data.datasets import read_data
from vitascope.remote.stores import RemoteObject, read_range


def opened(url: str, requests: list[str]) -> list[str]:
    """Requests, megabytes and seconds of an opening."""
    fetched, before, began = Counter[str](), len(requests), time.perf_counter()

    def counting(object: RemoteObject, start: int, stop: int) -> bytes:
        fetched["bytes"] += stop - start
        return read_range(object, start, stop)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vitascope.remote.cache.read_range", counting)
        read_data(url)
    seconds = time.perf_counter() - began
    return [f"{len(requests) - before:,}", f"{fetched['bytes'] / 1e6:,.2f}", f"{seconds:.1f}"]


def forget_places(folder: Path) -> None:
    """Make the shards those of a version that wrote no places."""
    index = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps({name: index[name] for name in index if name != "samples"}))


def main() -> None:
    parser = reports.command_line(__doc__)
    parser.add_argument("shards", type=Path)
    options = parser.parse_args()
    conditions, rows = Conditions.now(), []
    cases: dict[str, Callable[[Path], None]] = {
        "with samples.npz": lambda _: None,
        "without, header by header": forget_places,
    }
    for name, change in cases.items():
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / "shards"
            shutil.copytree(options.shards, folder)
            change(folder)
            os.environ["VITASCOPE_CACHE"] = f"{place}/cache"
            with serving(files_of(folder)) as server:
                rows += [
                    [name, *opened(server.url, server.requests)],
                    [f"{name}, again", *opened(server.url, server.requests)],
                ]
    tars = [path.stat().st_size for path in options.shards.rglob("*.tar")]
    heading = conditions.heading(
        "Opening shards over HTTP", shards=f"{len(tars)} of {sum(tars) / 1e6:,.0f} MB, an empty cache"
    )
    table = reports.markdown_table(["shards", "requests", "fetched, MB", "s"], rows)
    reports.publish("remote_opening", f"{heading}\n\n{table}", options)


if __name__ == "__main__":
    main()
