"""Measure `vitascope label`: seconds to the first pictures, and from a tenth label to the new accuracy.

    python benchmarks/label_server.py DATA --labels 500 --out

DATA is a folder of class folders. Their images are linked into one folder, in which their classes are not
seen. The script labels what is offered with the true class, as a page does. The features come from the cache
if a run before this one has computed them.
"""

from __future__ import annotations

import http.cookiejar
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

from conditions import Conditions
from reports import command_line, markdown_table, publish

SHOWN = 12
"""Pictures of a page."""


class Client:
    """The requests of a page."""

    def __init__(self, address: str) -> None:
        self._open = urllib.request.build_opener(
            urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar())
        ).open
        self._base = address.split("/?")[0]
        self._open(address).read()

    def ask(self, path: str, body: object = None) -> Any:
        """An answer in JSON, or the size of a picture."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, {"Content-Type": "application/json"})
        content = self._open(request).read()
        return json.loads(content) if path.startswith("/api/") else len(content)

    def state(self, version: int | None = None) -> dict[str, Any]:
        """The state, or the next one."""
        return self.ask("/api/state" if version is None else f"/api/state?after={version}")


def link_all(data: Path, folder: Path) -> dict[str, str]:
    """Link all images into a folder, and return their classes by the new names."""
    classes = {}
    for number, image in enumerate(sorted(data.rglob("*.*"))):
        name = f"{number:06}{image.suffix}"
        os.link(image, folder / name)
        classes[name] = image.parent.name
    return classes


def label_ten(client: Client, classes: dict[str, str]) -> float:
    """Label the next ten pictures; seconds from the last one to an accuracy that knows all of them."""
    pictures = client.ask("/api/pictures?view=next&count=10")["pictures"]
    for picture in pictures:
        began = time.monotonic()
        labels = [classes[Path(picture["name"]).name]]
        state = client.ask("/api/decide", {"decisions": [{"id": picture["id"], "labels": labels}]})
    while state["fit"] is None or state["fit"]["labels"] < state["labelled"]:
        state = client.state(state["version"])
    return time.monotonic() - began


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--labels", type=int, default=500)
    arguments = parser.parse_args()
    conditions, rows = Conditions.now(), []
    with tempfile.TemporaryDirectory(dir=arguments.data.absolute().parent) as place:
        folder = Path(place) / "pictures"
        folder.mkdir()
        classes = link_all(arguments.data, folder)
        command = [sys.executable, "-m", "vitascope", "label", str(folder), "--no-open"]
        began = time.monotonic()
        with subprocess.Popen(
            [*command, "--out", f"{place}/labels.csv"], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            client = Client(process.stdout.readline().split(" at ")[1].split()[0])
            for picture in client.ask(f"/api/pictures?view=next&count={SHOWN}")["pictures"]:
                client.ask(f"/picture/{picture['id']}?side=320")
            rows.append(["to the first 12 pictures, s", f"{time.monotonic() - began:.1f}"])
            state = client.state()
            while state["read"] + state["unreadable"] < state["pictures"] or state["fit"] is None:
                state = client.state(state["version"])
            rows.append(["to all features and the order, s", f"{time.monotonic() - began:.1f}"])
            seconds = [label_ten(client, classes) for _ in range(arguments.labels // 10)]
            median, most = np.median(seconds), max(seconds)
            rows.append(
                ["from a tenth label to the accuracy, median and most, s", f"{median:.2f}, {most:.2f}"]
            )
            status = Path(f"/proc/{process.pid}/status").read_text()
            peak = int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) / 1024
            rows.append(["memory, most, MB", f"{peak:,.0f}"])
            process.send_signal(signal.SIGINT)
    heading = conditions.heading(
        "vitascope label", images=f"{len(classes):,}", labels=f"{arguments.labels:,}"
    )
    publish("label-server", f"{heading}\n\n{markdown_table(['measure', 'value'], rows)}", arguments)


if __name__ == "__main__":
    main()
