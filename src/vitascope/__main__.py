"""`vitascope` and `python -m vitascope`: the command line, whose import Ctrl-C ends in one line."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line and return its exit status."""
    try:
        from vitascope.cli import main as run
    except KeyboardInterrupt:
        print("vitascope: interrupted", file=sys.stderr)
        return 130
    return run()


if __name__ == "__main__":
    sys.exit(main())
