"""The server: a model behind HTTP, with the attention explorer. Needs the extra `server`."""

from importlib.util import find_spec

from vitascope.errors import UserError
from vitascope.storage import WINDOWS

REQUIRED = ("fastapi", "uvicorn", "httptools", "python_multipart", "prometheus_client")


def check_installed() -> None:
    """Check that the libraries of the extra `server` are installed, and work on this system (`UserError`)."""
    if WINDOWS:  # decoder processes are limited and ended by signals that it lacks
        raise UserError("the server needs Linux or macOS; on Windows, run it in WSL or in a container")
    if missing := [name for name in REQUIRED if find_spec(name) is None]:
        raise UserError(f"the server needs {', '.join(missing)}: pip install 'vitascope[server]'")
