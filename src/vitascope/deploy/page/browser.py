"""A headless Chromium, Chrome or Edge that evaluates JavaScript in a page, by Playwright."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vitascope.errors import UserError

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHANNELS = (None, "chrome", "msedge")
"""Where Playwright looks for a browser that is none of `NAMES`; None is its own Chromium."""
QUIET = ("file:", "blob:", "data:")
"""Addresses that need no network."""


class BrowserError(UserError):
    """The page failed in the browser, or the browser itself."""


class MissingBrowserError(UserError):
    """Playwright or a browser is not installed."""


@contextmanager
def launched(program: str | None = None) -> "Iterator[Browser]":
    """A headless browser, which ends afterwards. Until then, `asyncio.run` does not work in this thread.

    Args:
        program: its name or path; None is the first that is installed.

    Raises:
        MissingBrowserError: without Playwright or a browser.
        BrowserError: what Playwright raises in the meantime.
    """
    try:
        from playwright.sync_api import Error, sync_playwright
    except ImportError as error:
        raise MissingBrowserError("install Playwright: pip install 'vitascope[page]'") from error
    path = next(filter(None, map(shutil.which, NAMES)), None) if program is None else shutil.which(program)
    try:
        with sync_playwright() as playwright:
            if path or program:
                browser = playwright.chromium.launch(executable_path=path or program)
            else:
                browser = first_launched(playwright.chromium)
            with browser:
                yield browser
    except Error as error:
        raise BrowserError(f"the page failed in the browser: {error.message.splitlines()[0]}") from error


def first_launched(chromium: Any) -> "Browser":
    """The first browser of `CHANNELS` that Playwright can launch."""
    from playwright.sync_api import Error

    for channel in CHANNELS:
        try:
            return chromium.launch(channel=channel)
        except Error:  # it is not installed
            continue
    raise MissingBrowserError("install Chromium, Chrome or Edge, or run `playwright install chromium`")


class Tab:
    """A page that is open without a network.

    Args:
        page: of Playwright.
        name: the browser's name and version.
        patience: seconds after which an answer that is still awaited is a BrowserError.
    """

    def __init__(self, page: "Page", name: str, patience: float) -> None:
        self.page, self.name, self.patience = page, name, patience
        self.faults: list[str] = []
        """Errors in the console, uncaught ones, and requests over the network."""
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        page.on("console", lambda message: self._note(message.type == "error", message.text))
        page.on("request", lambda sent: self._note(not sent.url.startswith(QUIET), f"request of {sent.url}"))

    def _note(self, wrong: bool, text: str) -> None:
        if wrong:
            self.faults.append(text)

    def evaluate(self, function: str, argument: Any) -> Any:
        """The value of a function, or of its promise; a BrowserError has the text of what it throws."""
        late = f"no answer in {self.patience:,.0f} s"
        return self.page.evaluate(
            f"""(argument) => Promise.race([({function})(argument), new Promise(
            (_, reject) => setTimeout(() => reject(new Error("{late}")), {self.patience * 1000}))])""",
            argument,
        )


@contextmanager
def opened(program: str | None, address: str, patience: float) -> Iterator[Tab]:
    """Open a file's address in a browser of its own; arguments and errors as `launched`.

    Args:
        patience: seconds after which an answer that is still awaited is a BrowserError.
    """
    with launched(program) as browser:
        page = browser.new_context(offline=True).new_page()
        tab = Tab(page, f"{browser.browser_type.name} {browser.version}", patience)
        tab.page.goto(address, timeout=patience * 1000)
        yield tab
