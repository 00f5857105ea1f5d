"""The page of `vitascope label` in a browser, beside a server in memory of the same contract."""

import io
import json
import threading
from collections.abc import Iterator
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

CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'"
)
SHARED = ("chinese.js", "icon.svg")
"""Files of the explorer."""
FIT: dict[str, Any] = (
    json.loads("""{"number": 1, "labels": 10, "measure": "accuracy", "value": 0.91, "low": 0.78,
    "high": 0.97, "reason": "",
    "confused": {"label": "cat", "said": "dog", "count": 5},
    "acceptances": [{"label": "cat", "count": 3, "value": 0.97, "low": 0.95, "high": 0.99}]}""")
)
STATE: dict[str, Any] = (
    json.loads("""{"out": "my labels.csv", "several": false, "unreadable": 0, "remaining_s": null,
    "given": 0, "suspects": 0, "notes": [], "fitting": false}""")
)
SOON = 20_000
FULL = (507, "No space left on the disk. Free some, and try again.")
GONE = (0, "The server has ended. Run the command again: it goes on where it was.")
Labels = dict[int, list[str] | None]


class LabelServer(ThreadingHTTPServer):
    """Pictures of one colour; the first has two copies. `fit` is there from ten labels on."""

    daemon_threads = True

    def __init__(self, count: int, *classes: str, fit: dict[str, Any] | None = None, **state: Any) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.names, self.classes = [f"<b>{place}.jpg" for place in range(count)], list(classes)
        self.labels: dict[int, list[str]] = {}
        self.skipped: set[int] = set()
        self.past: list[tuple[str, Labels]] = []
        self.fit, self.more, self.version, self.accepted = fit, state, 1, 0
        self.changed = threading.Condition()
        self.fault: tuple[int, str] | None = None
        """The answer to each change."""

    def state(self) -> dict[str, Any]:
        count, labelled = len(self.names), list(self.labels.values())
        state = {
            **STATE,
            "version": self.version,
            "pictures": count,
            "read": count,
            "labelled": len(labelled),
        }
        state |= {"accepted": self.accepted, "looked": len(labelled) - self.accepted}
        state["classes"] = [
            {"name": one, "count": sum(one in each for each in labelled)} for one in self.classes
        ]
        state["undo"] = self.past[-1][0] if self.past else None
        return {**state, "fit": self.fit if state["looked"] >= 10 else None, **self.more}

    def picture(self, place: int) -> dict[str, Any]:
        suggestion = {"label": "cat", "probability": 0.93} if "cat" in self.classes else None
        picture = {"id": place, "name": self.names[place], "reason": "typical of 210 pictures", "source": ""}
        picture |= {"copies": [1, 2] if place == 0 else [], "labels": self.labels.get(place)}
        return {**picture, "suggestion": suggestion}

    def pictures(self, view: str, count: str, label: str | None = None) -> dict[str, Any]:
        found = sorted(set(range(len(self.names))) - self.skipped - set(self.labels))
        if view == "labelled":
            found = [place for place in reversed(self.labels) if label in (None, *self.labels[place])]
        found = {"doubtful": found[:3], "suspects": []}.get(view, found)
        return {"pictures": [self.picture(place) for place in found[: int(count)]], "total": len(found)}

    def thumbnail(self, place: int) -> bytes:
        written = io.BytesIO()
        Image.new("RGB", (40, 30), (7 * place % 256, 90, 160)).save(written, "JPEG")
        return written.getvalue()

    def change(self, labels: Labels) -> None:
        for place, new in labels.items():
            self.labels.pop(place, None)
            if new is not None:
                self.labels[place] = new
                self.classes += [one for one in new if one not in self.classes]

    def post(self, kind: str, content: dict[str, Any]) -> dict[str, Any]:
        labels: Labels = {one["id"]: one["labels"] for one in content.get("decisions", [])}
        if kind == "undo":
            _, labels = self.past.pop()
            self.skipped -= set(labels)
        elif kind == "skip":
            self.skipped |= set(content["ids"])
            labels = {place: self.labels.get(place) for place in content["ids"]}
        elif kind == "accept":
            labels = {one["id"]: [content["label"]] for one in self.pictures("doubtful", "3")["pictures"]}
            self.accepted += len(labels)
        if kind != "undo":
            self.past.append((kind, {place: self.labels.get(place) for place in labels}))
        self.change(labels)
        self.version += 1
        return {**self.state(), "ids": list(labels)}


class Handler(BaseHTTPRequestHandler):
    server: LabelServer

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def answer(self, content: bytes, kind: str = "application/json", status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Security-Policy", CSP)
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        address, server = urlsplit(self.path), self.server
        query, name = dict(parse_qsl(address.query)), address.path.rpartition("/")[2] or "index.html"
        if address.path == "/api/state":
            with server.changed:
                server.changed.wait_for(lambda: query.get("after") != str(server.version), timeout=20)
                self.answer(json.dumps(server.state()).encode())
        elif address.path == "/api/pictures":
            self.answer(json.dumps(server.pictures(**query)).encode())
        elif address.path.startswith("/picture/"):
            self.answer(server.thumbnail(int(name)), "image/jpeg")
        else:
            page = files("vitascope.deploy").joinpath(
                "server" if name in SHARED else "labelling", "web", name
            )
            self.answer(page.read_bytes(), MEDIA_TYPES[name[name.rfind(".") :]])

    def do_POST(self) -> None:
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.changed:
            if self.server.fault is None:
                kind = self.path.rpartition("/")[2]
                self.answer(json.dumps(self.server.post(kind, content)).encode())
                self.server.changed.notify_all()
            elif self.server.fault != GONE:  # which closes the connection
                status, reason = self.server.fault
                self.answer(json.dumps({"error": reason}).encode(), status=status)


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
    shown.nth(count).wait_for(state="hidden", timeout=SOON)
    return list(shown.all_inner_texts())


def press(visit: Visit, *keys: str) -> None:
    for key in keys:
        visit.page.keyboard.press(key)


def typed(visit: Visit, name: str, key: str = "Enter") -> None:
    visit.page.keyboard.type(name)
    press(visit, key)


def test_keys_alone_lead_from_no_class_to_a_command_that_trains(browser: Any) -> None:
    server = LabelServer(24, fit=FIT)
    with labelling(browser, server) as visit:
        visit.page.locator("#name:focus").wait_for()  # as long as there is no class
        typed(visit, "cat")
        press(visit, "n")
        typed(visit, "dog")
        wait_for(visit, "#classes button:nth-child(2)", "dog")  # its key is known now
        press(visit, "ArrowLeft", "ArrowRight", "1", "2", "s")
        assert saved(visit, 5) == ["cat", "dog", "cat", "dog", "skipped"]
        press(visit, "ArrowLeft", "ArrowLeft", "Backspace")
        assert saved(visit, 4) == ["cat", "dog", "cat", "skipped"]
        press(visit, "1")
        assert saved(visit, 5) == ["cat", "dog", "cat", "cat", "skipped"]
        press(visit, "u")
        assert saved(visit, 4) == ["cat", "dog", "cat", "skipped"]
        press(visit, *"12121212")
        visit.page.locator(".suggestion:visible").first.wait_for(timeout=SOON)  # of the next pictures
        press(visit, "Space", "Enter")
        assert saved(visit, 2) == ["cat", "cat"]
        assert visit.text("#interval") == "78 to 97%"
        assert len(server.labels) == 13
        visit.page.locator("#accepted button").last.focus()
        press(visit, "Enter")
        wait_for(visit, "#count", "16")
        assert visit.text("#command") == "vitascope train --data 'my labels.csv'"
        assert visit.faults == []


def test_copies_are_labelled_by_one_key_and_undone_together(browser: Any) -> None:
    server = LabelServer(13, "cat", "dog")
    with labelling(browser, server) as visit:
        press(visit, "2")
        wait_for(visit, "#copies", "2 alike: label all as “dog”")
        press(visit, "a")
        assert saved(visit, 3) == ["dog"] * 3
        assert server.labels == {0: ["dog"], 1: ["dog"], 2: ["dog"]}
        wait_for(visit, "#spoken", "2 pictures: dog")
        press(visit, "u")
        assert saved(visit, 1) == ["dog"]


@pytest.mark.parametrize("fault", [FULL, GONE], ids=["a full disk", "a server that has ended"])
def test_what_is_not_saved_is_not_shown_as_saved_and_sent_again(browser: Any, fault: tuple[int, str]) -> None:
    server = LabelServer(13, "cat", "dog")
    with labelling(browser, server) as visit:
        server.fault = fault
        press(visit, "1", "2", "1", "v", "v", "v")
        wait_for(visit, "#fault", fault[1])
        visit.page.locator("[data-view=next][aria-pressed=true]").wait_for(timeout=SOON)
        shown = visit.page.locator(".card:not(.saved) .label:visible")
        shown.nth(2).wait_for(timeout=SOON)
        assert shown.all_inner_texts() == ["cat", "dog", "cat"]
        assert visit.page.locator(".card.saved .label:visible").count() == 0
        server.fault = None
        press(visit, "u")  # gives up the last one
        visit.page.locator("#again").click()
        assert saved(visit, 2) == ["cat", "dog"]
        assert server.labels == {0: ["cat"], 1: ["dog"]}
        assert not visit.page.locator("#fault").is_visible()


def test_a_refused_answer_can_be_given_up(browser: Any) -> None:
    server = LabelServer(2, "cat")
    server.fault = (409, "The table was changed by another program.")
    with labelling(browser, server) as visit:
        press(visit, "1", "1")
        wait_for(visit, "#drop", "Give up 2 answers")
        visit.page.locator("#drop").click()
        assert not visit.page.locator("#fault").is_visible()
        assert visit.page.locator(".label:visible").count() == 0


def test_keys_do_not_act_in_the_field_and_a_beginning_finds_a_class_without_a_key(browser: Any) -> None:
    server = LabelServer(6, *"abcdefghi", "zebra", "zoo")
    with labelling(browser, server) as visit:
        press(visit, "n")
        typed(visit, "ze")
        assert saved(visit, 1) == ["zebra"]
        press(visit, "n")
        visit.page.keyboard.type("1 su")  # each of which is a key elsewhere
        assert visit.page.locator("#enter").inner_text() == "Enter: new class 1 su"
        press(visit, "Enter", "n")
        typed(visit, "zo", "Shift+Enter")
        assert saved(visit, 3) == ["zebra", "1 su", "zo"]
        press(visit, "n")
        typed(visit, "1", "Escape")
        press(visit, "9")
        assert saved(visit, 4)[3] == "i"


def test_several_labels_are_switched_and_saved_together(browser: Any) -> None:
    server = LabelServer(6, "cat", "dog", several=True)
    with labelling(browser, server) as visit:
        press(visit, "1", "2", "Enter", "2", "ArrowRight", "0", "1", "1")
        assert saved(visit, 3) == ["cat, dog", "dog", "none of these"]
        assert server.labels == {0: ["cat", "dog"], 1: ["dog"], 2: []}


def test_one_hand_on_a_phone_labels_by_touch(browser: Any) -> None:
    server = LabelServer(13, "cat", "dog")
    with labelling(browser, server, **PHONE) as visit:
        assert visit.page.locator(".card").count() == 6
        visit.page.locator("#classes button").nth(1).tap()
        visit.page.locator(".suggestion:visible").first.tap()
        assert saved(visit, 2) == ["dog", "cat"]
        visit.page.locator("[data-view=labelled]").tap()
        visit.page.locator("#only").select_option("dog")
        assert saved(visit, 1) == ["dog"]
        visit.page.locator(".label").tap()
        wait_for(visit, "#spoken", "no label")
        assert server.labels == {1: ["cat"]}
        assert visit.page.evaluate("document.documentElement.scrollWidth") == 390
        assert visit.faults == []


@pytest.mark.parametrize(
    ("count", "text"), [(0, "There are no pictures yet."), (1, "Every picture is labelled")]
)
def test_an_end_is_said(browser: Any, count: int, text: str) -> None:
    with labelling(browser, LabelServer(count, "cat")) as visit:
        press(visit, "1")
        wait_for(visit, "#empty p:visible", text)
        assert visit.faults == []


def test_page_is_chinese_in_a_chinese_browser(browser: Any) -> None:
    server = LabelServer(3, "Next", read=1, remaining_s=100)
    with labelling(browser, server, locale="zh-CN") as visit:
        press(visit, "s")
        assert saved(visit, 1) == ["已跳过"]
        assert visit.text("#read") == "模型已读取 1 / 3 张，还需 2 分钟"
        assert (visit.text("#classes .name"), visit.text(".reason")) == ("Next", "210 张图片的代表")
        texts = visit.page.locator("body").inner_text().split("\n")
        assert {text for text in texts if text and text.isascii()} <= {
            "1",
            "s",
            "?",
            "0",
            "vitascope",
            "Next",
        }
