"""Parse a command's options, and the options that several commands share."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import tyro

from vitascope.errors import UserError, suggestion
from vitascope.options.groups import Flag as Flag
from vitascope.options.groups import MaybeFloat as MaybeFloat
from vitascope.options.groups import MaybeInt as MaybeInt
from vitascope.options.groups import MaybeSize as MaybeSize
from vitascope.options.groups import MaybeText as MaybeText
from vitascope.predict.compute import Device as Device
from vitascope.predict.compute import Precision as Precision
from vitascope.predict.compute import Views as Views
from vitascope.run.layout import is_run
from vitascope.storage import check_local

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

_MISFIT = re.compile(r"Error parsing (--[\w-]+): no type matching (.+) could be instantiated from \[(.*)\]")
_NO_NUMBER = re.compile(
    r"Error parsing (--[\w-]+): (?:invalid literal for|could not convert string to) (.*): ('.*')"
)
_NO_CHOICE = re.compile(r"invalid choice (.*) for argument '(--[\w-]+).*'\. Expected one of (\(.*\))")
_NO_VALUE = re.compile(r"Missing value for argument '(--[\w-]+)")
_NO_OPTION = re.compile(r"(Positional|Suppress|Model|Folder)\b")
"""The types of positional arguments and of fields that the help does not have."""
_MISSING = re.compile(r"(?:^Missing from [^:]*:|\(required\)) (--[\w-]+|[A-Z]+)")

MaybePath = Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="")]
MaybeFile = Annotated[str | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")]
Model = tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="MODEL")]]
MaybeModel = tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="[MODEL]", help_behavior_hint="")]]
Folder = tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="FOLDER")]]
Json = Annotated[Flag, tyro.conf.arg(help="Print JSON.", help_behavior_hint="")]


def parse(command: type[T], name: str, args: Sequence[str], default: Any = None) -> T:
    """Parse arguments into a command's dataclass; UserError names the nearest of an unknown option."""
    given = [word.split("=")[0].replace("_", "-") for word in args]
    fields = flags_of(command)
    for option, field in fields.items():
        several = isinstance(field.default, tuple) or field.default_factory is dict
        if several and given.count(option) > 1:  # tyro keeps only the last
            raise UserError(f"{option} is given more than once; give it once, with all its values")
    options: dict[str, Any] = {} if default is None else {"default": default}
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            parsed, unknown = tyro.cli(
                command,
                prog=f"vitascope {name}",
                args=list(args),
                return_unknown_args=True,
                config=(tyro.conf.OmitArgPrefixes,),  # option groups are only titles in the help
                **options,
            )
    except SystemExit as stop:
        if not stop.code:
            raise  # --help, already printed
        raise UserError(f"{unboxed(complaint.getvalue())}; see `vitascope {name} --help`") from None
    if unknown:
        word = next((word for word in unknown if word.startswith("-")), None)
        if word is None:
            raise UserError(f"{unexpected(unknown[0], fields)} See `vitascope {name} --help`")
        instead = suggestion(word.split("=")[0], fields)
        raise UserError(f"unknown option {word!r}{instead}; see `vitascope {name} --help`")
    for field in dataclasses.fields(parsed):
        if isinstance(value := getattr(parsed, field.name), Path):
            check_local(value)
    return parsed


def arguments_of(command: object, *others: str) -> dict[str, Any]:
    """The options of a command as arguments of the function that it calls, which lacks `others`."""
    return {name: value for name, value in vars(command).items() if name not in others}


def unexpected(word: str, options: Mapping[str, dataclasses.Field[Any]]) -> str:
    """The error for an argument that no option takes, with the option that was probably meant."""
    complaint = f"unexpected argument {word!r}"
    if "--resume" in options and is_run(Path(word)):
        return f"{complaint}; did you mean --resume {word}?"
    if "--data" in options:
        return f"{complaint}; did you mean --data {word}?"
    return f"{complaint}."


def flags_of(command: type[DataclassInstance]) -> dict[str, dataclasses.Field[Any]]:
    """A command's options, such as `--batch-size`, with their fields; also those of its option groups."""
    found = {}
    for field in dataclasses.fields(command):
        group = field.default_factory
        if _NO_OPTION.search(str(field.type)):
            continue
        if isinstance(group, type) and dataclasses.is_dataclass(group):
            found.update(flags_of(group))
        else:
            negated = field.default is True and "FlagCreatePairsOff" in str(field.type)
            name = f"no_{field.name}" if negated else field.name
            found[f"--{name.replace('_', '-')}"] = field
    return found


def unboxed(complaint: str) -> str:
    """tyro's error on one line, without the box, the title and the name of the option group."""
    plain = re.sub(r"\x1b\[[\d;]*m", "", complaint)
    lines = [line.strip("│╭╮╰╯─ ") for line in plain.splitlines()[1:]]
    lines = ["" if set(line) == {"-"} else line for line in lines]  # the box of a terminal without UTF-8
    text = itertools.takewhile(bool, itertools.dropwhile(lambda line: not line, lines))
    return plainly(" ".join(" ".join(text).split()).rstrip(" ."))


def plainly(complaint: str) -> str:
    """tyro's error in the words of the other errors, without Python's types and exceptions."""
    if found := _MISFIT.match(complaint):
        option, kinds, values = found.groups()
        accepted = " or ".join(kind.strip("{}") for kind in kinds.split("|") if kind != "{None}")
        return f"{option} takes {accepted}, not {values or 'nothing'}"
    if found := _NO_NUMBER.match(complaint):
        option, kind, value = found.groups()
        return f"{option} takes {'INT' if kind.startswith('int') else 'FLOAT'}, not {value}"
    if found := _NO_CHOICE.match(complaint):
        value, option, listed = found.groups()
        choices = sorted(set(re.findall(r"'([^']*)'", listed)) - {"None"})  # tyro has them in no order
        return f"{option} takes {', '.join(choices)}, not {value}{suggestion(value.strip(chr(39)), choices)}"
    if found := _NO_VALUE.match(complaint):
        return f"{found[1]} needs a value"
    if names := _MISSING.findall(complaint):
        return f"missing: {', '.join(names)}"
    return re.sub(r"^Error parsing \w+: ", "", complaint)
