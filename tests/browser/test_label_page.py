"""The page of `vitascope label` in a browser, beside a server in memory that keeps the contract of the real one."""

import io
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
from PIL import Image

from tests.browser import PHONE, Visit, needs_browser, visiting
from vitascope.deploy.server.page_content import MEDIA_TYPES

pytestmark = needs_browser

CSP = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'"
FIT = {"number": 1, "labels": 10, "measure": "accuracy", "value": 0.91, "low": 0.78, "high": 0.97, "reason": ""}
FIT["forecast"] = {"labels": 20, "value": 0.93, "low": 0.88, "high": 0.96}
FIT["confused"] = {"label": "cat", "said": "dog", "count": 5}
FIT["acceptances"] = [{"label": "cat", "count": 3, "value": 0.97, "low": 0.95, "high": 0.99}]
SOON = 20_000
FULL = "No space left on the disk. Free some, and try again."


class LabelServer(ThreadingHTTPServer):
    """Pictures of one colour; the first has two copies. `fit` is the classifier's from ten labels on."""

    daemon_threads = True

    def __init__(self, count: int, fit: dict[str, Any] | None = None, **state: Any) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.names = [f"<b>{place}.jpg" for place in range(count)]
        self.classes: list[str] = []
        self.labels: dict[int, list[str]] = {}
        self.skipped: set[int] = set()
        self.accepted = 0
        self.past: list[tuple[str, dict[int, list[str] | None]]] = []
        self.fit, self.more, self.version = fit, state, 1
        self.changed = threading.Condition()
        self.fault: tuple[int, str] | None = None
        """The answer to what would change something."""
        self.posts: list[tuple[str, dict[str, Any]]] = []

    def state(self) -> dict[str, Any]:
        looked, count = len(self.labels) - self.accepted, len(self.names)
        counts = [sum(name in labels for labels in self.labels.values()) for name in self.classes]
        state = {"version": self.version, "out": "my labels.csv", "several": False, "pictures": count}
        state |= {"unreadable": 0, "read": count, "remaining_s": None, "labelled": len(self.labels)}
        state |= {"looked": looked, "accepted": self.accepted, "given": 0, "suspects": 0, "notes": []}
        state["classes"] = [{"name": name, "count": n} for name, n in zip(self.classes, counts, strict=True)]
        state |= {"undo": self.past[-1][0] if self.past else None, "fitting": False}
        return {**state, "fit": self.fit if looked >= 10 else None, **self.more}

    def picture(self, place: int) -> dict[str, Any]:
        suggestion = {"label": "cat", "probability": 0.93} if "cat" in self.classes else None
        picture = {"id": place, "name": self.names[place], "reason": "typical of 210 pictures"}
        copies = [1, 2] if place == 0 else []
        return {**picture, "copies": copies, "labels": self.labels.get(place), "source": "", "suggestion": suggestion}

    def pictures(self, view: str, count: str, label: str | None = None) -> dict[str, Any]:
        left = [place for place in range(len(self.names)) if place not in self.labels and place not in self.skipped]
        if view == "labelled":
            left = [place for place in reversed(self.labels) if label in (None, *self.labels[place])]
        found = {"doubtful": left[:3], "suspects": []}.get(view, left)
        return {"pictures": [self.picture(place) for place in found[: int(count)]], "total": len(found)}

    def thumbnail(self, place: int) -> bytes:
        written = io.BytesIO()
        Image.new("RGB", (40, 30), (7 * place % 256, 90, 160)).save(written, "JPEG")
        return written.getvalue()

    def change(self, labels: dict[int, list[str] | None], name: str) -> None:
        self.past.append((name, {place: self.labels.get(place) for place in labels}))
        for place, new in labels.items():
            self.labels.pop(place, None)
            if new is not None:
                self.labels[place] = new
                self.classes += [one for one in new if one not in self.classes]

    def post(self, kind: str, content: dict[str, Any]) -> dict[str, Any]:
        extra = {}
        if kind == "decide":
            labels = {one["id"]: one["labels"] for one in content["decisions"]}
            self.change(labels, ", ".join(next(iter(labels.values())) or []))
        elif kind == "skip":
            self.skipped |= set(content["ids"])
        elif kind == "classes":
            self.classes.append(content["name"])
        elif kind == "accept":
            found = self.pictures("doubtful", "3")["pictures"]
            self.change({one["id"]: [content["label"]] for one in found}, content["label"])
            self.accepted += len(found)
        else:
            past = self.past.pop()[1]
            self.labels = {place: old for place, old in self.labels.items() if place not in past}
            self.labels |= {place: old for place, old in past.items() if old is not None}
            extra = {"ids": list(past)}
        self.version += 1
        return {**self.state(), **extra}


class Handler(BaseHTTPRequestHandler):
    server: LabelServer

    def finish(self) -> None:
        try:
            super().finish()
        except OSError:
            pass

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def answer(self, content: bytes | dict[str, Any], kind: str = "application/json", status: int = 200) -> None:
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": len(content), "Content-Security-Policy": CSP}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        query, name = dict(parse_qsl(address.query)), address.path.rpartition("/")[2]
        if address.path == "/api/state":
            with self.server.changed:
                self.server.changed.wait_for(lambda: query.get("after") != str(self.server.version), timeout=20)
                self.answer(self.server.state())
        elif address.path == "/api/pictures":
            self.answer(self.server.pictures(**query))
        elif address.path.startswith("/picture/"):
            self.answer(self.server.thumbnail(int(name)), "image/jpeg")
        else:
            name = name or "index.html"
            of_explorer = "server" if name in ("chinese.js", "icon.svg") else "labelling"
            path = files(f"vitascope.deploy.{of_explorer}").joinpath("web", name)
            self.answer(path.read_bytes(), MEDIA_TYPES[name[name.rfind(".") :]])

    def do_POST(self) -> None:
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        kind = self.path.rpartition("/")[2]
        with self.server.changed:
            if self.server.fault:
                self.answer({"error": self.server.fault[1]}, status=self.server.fault[0])
                return
            self.server.posts.append((kind, content))
            self.answer(self.server.post(kind, content))
            self.server.changed.notify_all()


@contextmanager
def labelling(browser: Any, server: LabelServer, **context: Any) -> Iterator[Visit]:
    """The page of a server, with pictures or the reason why there are none."""
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}).start()
    try:
        with visiting(browser, f"http://127.0.0.1:{server.server_port}/", **context) as visit:
            visit.page.locator(".card:visible, #empty p:visible").first.wait_for()
            yield visit
    finally:
        server.shutdown()
        server.server_close()


def wait_for(visit: Visit, selector: str, text: str) -> None:
    """Wait until the first such element has a text."""
    visit.page.locator(selector).first.filter(has_text=text).wait_for(timeout=SOON)


def saved(visit: Visit, count: int) -> list[str]:
    """The labels that are shown as saved, when there are so many."""
    shown = visit.page.locator(".card.saved .label:visible")
    shown.nth(count - 1).wait_for(timeout=SOON)
    return list(shown.all_inner_texts())


def typed(visit: Visit, name: str) -> None:
    visit.page.keyboard.type(name)
    visit.press("Enter")


def test_keys_alone_lead_from_no_class_to_a_command_that_trains(browser: Any) -> None:
    server = LabelServer(24, FIT)
    with labelling(browser, server) as visit:
        visit.page.locator("#name:focus").wait_for()  # as long as there is no class
        typed(visit, "cat")
        visit.press("n")
        typed(visit, "dog")
        visit.press("ArrowLeft", "ArrowRight", "1", "2", "s")
        assert saved(visit, 5) == ["cat", "dog", "cat", "dog", "skipped"]
        visit.press("ArrowLeft", "ArrowLeft", "Backspace", "1", "u")
        assert saved(visit, 4) == ["cat", "dog", "cat", "skipped"]
        visit.press(*"12121212")
        visit.page.locator(".suggestion:visible").first.wait_for(timeout=SOON)  # of the next pictures
        visit.press("Space", "Enter")
        assert saved(visit, 2) == ["cat", "cat"]
        assert visit.text("#interval") == "78 to 97%"
        assert visit.text("#later") == "10 more labels: about 93% (88 to 96)"
        assert len(server.labels) == 13
        visit.page.locator("#accepted button").last.focus()
        visit.press("Enter")
        wait_for(visit, "#count", "16")
        assert visit.text("#command") == "vitascope train 'my labels.csv'"
        assert visit.faults == []
