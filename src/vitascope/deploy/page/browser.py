"""A headless Chromium, Chrome or Edge that evaluates JavaScript in a page.

It is controlled over the pipe of its DevTools protocol: messages of JSON, each ended by a zero byte.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from vitascope.errors import UserError
from vitascope.storage import WINDOWS

NAMES = (
    *("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge"),
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
    "/Applications/Microsoft Edge.app/Contents/MacOS/Microsoft Edge",
)
FLAGS = (
    *("--headless=new", "--remote-debugging-pipe", "--no-first-run", "--no-default-browser-check"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-quic"),
    *("--disable-extensions", "--disable-gpu", "--mute-audio", "--disable-dev-shm-usage"),
)
QUIET = ("file:", "blob:", "data:")
"""Addresses that need no network."""
ENDED = "the browser ended before it answered"
_TAKES, _GIVES = 3, 4  # the descriptors that the browser reads and writes
_START = f"import os, sys; r, w, *c = sys.argv[1:]; os.dup2(int(r), {_TAKES}); os.dup2(int(w), {_GIVES})"
_START += f"; os.set_inheritable({_TAKES}, True); os.set_inheritable({_GIVES}, True); os.execv(c[0], c)"


class BrowserError(UserError):
    """The browser did not do what it was asked for."""


def find_browser(path: str | os.PathLike[str] | None = None) -> str:
    """The path of the given browser, or of the first of `NAMES`; `UserError` if none is installed. A text is
    looked for as a shell does it: without a slash, it is a program's name."""
    if WINDOWS:  # whose processes inherit no numbered pipes
        raise UserError("a page is proved on Linux and macOS only: keep it unproved with --unproved")
    if isinstance(path, os.PathLike):
        path = os.path.abspath(path)  # not a name, also without a slash
    found = [shutil.which(name) for name in (NAMES if path is None else [path])]
    if any(found):
        return next(filter(None, found))
    if path is not None:
        raise UserError(f"{path}: no program that can be started; name a Chromium, Chrome or Edge")
    raise UserError(
        "no browser to prove the page in: install Chromium, Chrome or Edge, name one with --browser PATH, or "
        "keep the page unproved with --unproved"
    )


class Tab:
    """A page in a browser, with what went wrong in it."""

    def __init__(self, takes: int, gives: int, patience: float) -> None:
        self.takes, self.gives = takes, gives
        self.deadline = time.monotonic() + patience
        self.received = b""
        self.number = 0
        self.session: str | None = None
        self.faults: list[str] = []
        """Errors in the console, uncaught ones, and requests over the network."""

    def open(self, address: str) -> None:
        """Open a file's address without a network, and wait until it is loaded."""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")
        nothing = {"latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
        self.ask("Network.emulateNetworkConditions", offline=True, **nothing)
        self.ask("Page.navigate", url=address)
        while self.receive().get("method") != "Page.loadEventFired":
            pass

    def evaluate(self, expression: str) -> Any:
        """The value of an expression, or of its promise; a BrowserError has the text of what it throws."""
        held = f"globalThis.awaited = {expression}"  # a promise without a reference may be collected
        answer = self.ask("Runtime.evaluate", expression=held, awaitPromise=True, returnByValue=True)
        if thrown := answer.get("exceptionDetails"):
            text = thrown.get("exception", {}).get("description", thrown.get("text", ""))
            raise BrowserError(f"the page failed in the browser: {text.splitlines()[0]}")
        return answer["result"].get("value")

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a method of the protocol."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session is not None:
            message["sessionId"] = self.session
        content = json.dumps(message).encode() + b"\0"
        try:
            while content:
                self._await(writable=[self.takes])
                content = content[os.write(self.takes, content[: select.PIPE_BUF]) :]
        except BrokenPipeError:
            raise BrowserError(ENDED) from None
        while True:
            answer = self.receive()
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise BrowserError(f"the browser refused {method}: {answer['error'].get('message')}")
                return dict(answer["result"])

    def receive(self) -> dict[str, Any]:
        """The next message; faults are noted."""
        while b"\0" not in self.received:
            self._await(readable=[self.gives])
            part = os.read(self.gives, 1 << 20)
            if not part:
                raise BrowserError(ENDED)
            self.received += part
        content, _, self.received = self.received.partition(b"\0")
        message: dict[str, Any] = json.loads(content)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _await(self, readable: Sequence[int] = (), writable: Sequence[int] = ()) -> None:
        """Wait until a descriptor can be read, or takes PIPE_BUF bytes, until the deadline."""
        left = self.deadline - time.monotonic()
        if left <= 0 or not any(select.select(readable, writable, (), left)):
            raise BrowserError("the page did not answer in time in the browser")

    def _note(self, method: str, found: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = found["exceptionDetails"]
            text = details.get("exception", {}).get("description", details["text"])
            self.faults.append(text.split("\n")[0])
        if method == "Log.entryAdded" and found["entry"]["level"] == "error":
            self.faults.append(found["entry"]["text"])
        if method == "Runtime.consoleAPICalled" and found["type"] == "error":
            self.faults.append(" ".join(str(one.get("value", "")) for one in found["args"]))
        if method == "Network.requestWillBeSent" and not found["request"]["url"].startswith(QUIET):
            self.faults.append(f"a request of {found['request']['url']}")


@contextmanager
def opened(browser: str, address: str, patience: float) -> Iterator[Tab]:
    """Open an address in a browser of its own, which ends afterwards.

    Args:
        browser: the path of its program.
        patience: seconds after which anything that is still awaited is a BrowserError.
    """
    with tempfile.TemporaryDirectory(prefix="vitascope-browser-", ignore_cleanup_errors=True) as profile:
        (reads, takes), (gives, writes) = os.pipe(), os.pipe()
        flags = [*FLAGS, f"--user-data-dir={profile}"]
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            flags.append("--no-sandbox")  # Chromium has none for root
        # Python in between: `subprocess` gives no descriptors a number, and code after a fork is not safe.
        command = [sys.executable, "-c", _START, str(reads), str(writes), browser, *flags]
        process = subprocess.Popen(
            command, pass_fds=(reads, writes), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        os.close(reads)
        os.close(writes)
        try:
            tab = Tab(takes, gives, patience)
            tab.open(address)
            yield tab
        finally:
            os.close(takes)  # which ends it
            os.close(gives)
            try:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=5)
            finally:  # also at a second Ctrl-C
                with suppress(ProcessLookupError, PermissionError):  # the whole session has ended
                    os.killpg(process.pid, signal.SIGKILL)  # with what it started
                process.wait()
