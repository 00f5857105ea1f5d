"""The attention explorer in a real browser: needs Playwright and a Chromium, and is skipped without them.

pip install 'vitascope[page]'
pytest tests/browser
python -m tests.browser.tour http://127.0.0.1:8000 pictures/
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest

from vitascope.deploy.page.browser import NAMES, launched

HAS_BROWSER = find_spec("playwright") is not None and any(map(shutil.which, NAMES))
NO_BROWSER = "Playwright or a Chromium is not installed"
needs_browser = pytest.mark.skipif(not HAS_BROWSER, reason=NO_BROWSER)
PHONE: dict[str, Any] = {
    "viewport": {"width": 390, "height": 844},
    "has_touch": True,
    "is_mobile": True,
    "device_scale_factor": 2,
}
PATIENCE = 120_000
"""Milliseconds for a model to answer, on a machine that is busy."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as browser:
        yield browser


class Visit:
    """A page, with its errors."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.faults: list[str] = []
        page.on("console", self._heard)
        page.on("pageerror", lambda error: self.faults.append(f"uncaught: {error}"))
        page.on("requestfailed", self._failed)
        page.on("response", self._answered)
        page.on("dialog", self._asked)

    def _asked(self, dialog: Any) -> None:
        self.faults.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _heard(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.faults.append(f"{message.type}: {message.text}")

    def _failed(self, request: Any) -> None:
        if request.failure != "net::ERR_ABORTED":  # the page aborts requests that it no longer needs
            self.faults.append(f"failed: {request.url}")

    def _answered(self, response: Any) -> None:
        if response.status >= 400:
            self.faults.append(f"{response.status}: {response.url}")

    def open_sample(self, number: int = 0) -> None:
        """Choose a sample for the last picture, and wait for its prediction."""
        panel = self.page.locator(".panel").last
        panel.locator(".samples button").nth(number).click(timeout=PATIENCE)
        self.wait_for_answer(panel)

    def wait_for_answer(self, panel: Any) -> None:
        """Wait until a picture's prediction is shown."""
        panel.and_(self.page.locator("[aria-busy=false]")).wait_for(timeout=PATIENCE)
        panel.locator(".predictions button").first.wait_for(timeout=PATIENCE)
        self.settle()

    def settle(self) -> None:
        """Wait until two frames have been drawn."""
        self.page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def hover(self, across: float, down: float, number: int = 0) -> None:
        """Move the pointer to a place in a picture, in fractions of its sides."""
        box = self.page.locator("canvas.picture").nth(number).bounding_box()
        self.page.mouse.move(box["x"] + across * box["width"], box["y"] + down * box["height"])
        self.settle()

    def press(self, *keys: str) -> None:
        """Type keys."""
        for key in keys:
            self.page.keyboard.press(key)
        self.settle()

    def drawing(self, selector: str = "canvas.picture", number: int = 0) -> str:
        """The content of a canvas as a data URI."""
        return str(self.page.locator(selector).nth(number).evaluate("canvas => canvas.toDataURL()"))

    def text(self, selector: str) -> str:
        """The text of the first matching element."""
        return str(self.page.locator(selector).first.text_content()).strip()


@contextmanager
def visiting(browser: Any, address: str, **context: Any) -> Iterator[Visit]:
    """Open a page as a new user of a browser: nothing is shared with other visits."""
    user = browser.new_context(**{"viewport": {"width": 1440, "height": 900}, **context})
    visit = Visit(user.new_page())
    visit.page.goto(address)
    yield visit
    user.close()
