"""The access log, and the request id that stands in it and in the response."""

from __future__ import annotations

import itertools
import logging
import re
import secrets

REQUEST_ID = re.compile(rb"[0-9A-Za-z._~:/+=@-]{1,128}")
"""The accepted form of X-Request-ID: nothing that could break a line of the log."""

log = logging.getLogger("vitascope.access")


class RequestIds:
    """Assigns X-Request-ID."""

    def __init__(self) -> None:
        self._prefix = secrets.token_hex(4).encode()
        self._numbers = itertools.count(1)

    def of(self, given: bytes | None) -> bytes:
        """The client's id if it has the accepted form, else a new one."""
        if given is not None and REQUEST_ID.fullmatch(given):
            return given
        return b"%s-%x" % (self._prefix, next(self._numbers))


def log_request(client: str, method: str, path: str, status: int, seconds: float, request_id: bytes) -> None:
    """Log a request in one line, without its query, which may be private."""
    log.info(
        "%s %s %s %d %.1f ms %s", client, method, path, status, 1000 * seconds, request_id.decode("ascii")
    )
