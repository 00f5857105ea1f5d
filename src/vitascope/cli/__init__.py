"""The command line: parse, call the library, print. Heavy modules are imported only when needed."""

import atexit
import codecs
import gc
import io
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar, cast

from vitascope._version import __version__
from vitascope.cli.next_command import next_command, way_out
from vitascope.cli.parsing import parse
from vitascope.errors import Interrupted, UserError, printable, suggestion

GROUPS: dict[str, dict[str, str]] = {
    "Train:": {
        "train": "train.Train",
        "pretrain": "train.Pretrain",
        "probe": "features.Probe",
        "zero-shot": "predict.ZeroShot",
    },
    "Understand:": {
        "evaluate": "evaluate.Evaluate",
        "calibrate": "evaluate.Calibrate",
        "explain": "explain.Explain",
        "report": "runs.Report",
        "compare": "runs.Compare",
        "similar": "features.Similar",
    },
    "Ship:": {
        "predict": "predict.Predict",
        "embed": "features.Embed",
        "export": "ship.Export",
        "page": "ship.Page",
        "serve": "ship.Serve",
        "mcp": "mcp.Mcp",
        "convert": "models.Convert",
        "compress": "models.Compress",
    },
    "Data and models:": {
        "label": "label.Label",
        "next": "features.Next",
        "audit": "features.Audit",
        "pack": "models.Pack",
        "models": "models.Models",
    },
    "Learn:": {"learn": "learn.Learn"},
}
"""The commands by name: module and class."""


class _Commands(Mapping[str, type[Any]]):
    """The classes of the commands by name, each imported when it is asked for."""

    places: ClassVar = {name: place for group in GROUPS.values() for name, place in group.items()}

    def __getitem__(self, name: str) -> type[Any]:
        module, _, kind = self.places[name].partition(".")
        return cast("type[Any]", getattr(import_module(f"{__name__}.{module}"), kind))

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


COMMANDS = _Commands()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `vitascope` program and return its exit status.

    0: success. 1: some pictures could not be read, the others were predicted. 2: invalid request, with one
        line on standard error. 130 and 143: stopped by Ctrl-C or SIGTERM, with everything saved.
    """
    _print_any_path()
    _collect_rarely()
    try:
        command = _answer(list(sys.argv[1:] if argv is None else argv))
        print(end="", flush=True)  # a full disk or a closed pipe is an error of the command
        _name(command)
        return 0
    except BrokenPipeError:  # the reader of our output, such as `head`, has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except UserError as error:
        status, text = 2, "" if error.printed_elsewhere else f"error: {error}"
    except KeyboardInterrupt:
        status, text = 130, "interrupted"
    except MemoryError:
        status, text = 2, "error: out of memory; close other programs, or raise the limit"
    except OSError as error:  # such as a full disk or a missing permission
        reason = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
        status, text = 2, f"error: {printable(reason)}"
    except Interrupted as stop:  # under torchrun the first process prints it
        first = not int(os.environ.get("RANK", "0"))
        status, text = 128 + stop.signum, f"{stop}; continue with `{stop.command}`" if first else ""
    if text:
        print(f"vitascope: {text}", file=sys.stderr)
        _name(way_out(text))
    return status


def _name(command: str) -> None:
    """Print the next command on standard error, as standard output has results only."""
    if command and sys.stderr:  # None where it is closed, and then `print` would take standard output
        print(f"next   {command}", file=sys.stderr)


def _collect_rarely() -> None:
    """Search for unreachable objects as rarely as fits half a million that are imported and live to the end:
    after 100,000 new ones instead of 700, and not at the exit, where the system frees them anyway."""
    gc.set_threshold(100_000)
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)


def _print_any_path() -> None:
    """Let standard output print any path and text instead of ending the program: names that are not UTF-8 as
    they are, and others in ASCII where its encoding, such as that of a file on Windows, lacks them."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        is_utf8 = codecs.lookup(sys.stdout.encoding).name == "utf-8"
        sys.stdout.reconfigure(errors="surrogateescape" if is_utf8 else "backslashreplace")


def _answer(args: list[str]) -> str:
    """Print what the arguments ask for, or call a command and return the one that comes next."""
    if args[:1] == ["help"]:
        args = [*args[1:2], "--help"]
    if not args or args[0] in ("-h", "--help"):
        print(overview())
        return ""
    if args[0] == "--version" and set(args[1:]) <= {"--verbose"}:
        print(f"vitascope {__version__}")
        if "--verbose" in args:
            from vitascope.training.run.environment import describe_installation

            print(describe_installation())
        return ""
    if args[0] not in COMMANDS:
        word = next((word for word in args if word != "--version"), "")
        raise UserError(f"unknown command {word!r}{suggestion(word, COMMANDS)}; see `vitascope --help`")
    command = parse(COMMANDS[args[0]], args[0], args[1:])
    fields = vars(command) | (command.call() or {})
    return "" if fields.get("json") else next_command(args[0], fields)  # JSON is for programs


def overview() -> str:
    """The text of `vitascope --help`."""
    lines = ["usage: vitascope COMMAND ...\n\nTrain, look inside and ship Vision Transformers."]
    for group, commands in GROUPS.items():
        lines.append(f"\n{group}")
        for name in commands:
            summary = (COMMANDS[name].__doc__ or "").splitlines()[0]
            lines.append(f"  {name:<9} {summary}")
    lines.append(
        "\nMODEL is a run folder, a model folder or file of any library, a hub id\n"
        "(owner/name), a name such as torchvision/vit_b_16, or `cifar10`, a small\n"
        "model that comes with vitascope. DATA is a folder of images, `digits`,\n"
        "`cifar10` or another known name, an archive, shards, or a hub id. Both may be\n"
        "URLs of a store, such as s3://bucket/photos (docs/scale.md).\n"
        "`vitascope COMMAND --help` lists the main options of a command, and\n`--help-all` all of them. "
        "`vitascope --version` prints the version, and\nwith `--verbose` the libraries and the machine."
    )
    return "\n".join(lines)
