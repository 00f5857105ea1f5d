"""The command line of a command, which is a dataclass: tyro reads its fields, and the options of its groups.

They are a type of dictionary for tyro, from which options that are not named are absent; the dataclass has
their defaults. Of a `Configuration` the named options are enough: the library chooses the others.
"""

import ast
import contextlib
import dataclasses
import inspect
import io
import itertools
import os
import re
import textwrap
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn, Required, TypedDict, TypeVar, cast

import tyro

from vitascope.arguments import field_annotations
from vitascope.errors import UserError, suggestion
from vitascope.layout import is_run
from vitascope.models.configuration import Configuration
from vitascope.models.engines.compute import Device as Device
from vitascope.models.engines.compute import Precision as Precision
from vitascope.models.engines.compute import Views as Views
from vitascope.storage import check_local
from vitascope.training.options.groups import Flag as Flag

T = TypeVar("T")

HELP = ("-h", "--help", "--help-all")

Model = tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="MODEL")]]
MaybeModel = tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="[MODEL]")]]
Folder = tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="FOLDER")]]
Json = Annotated[Flag, tyro.conf.arg(help="Print JSON.")]

_STYLE = (tyro.conf.OmitArgPrefixes, tyro.conf.DisallowNone)
"""Groups are titles in the help only, and None cannot be typed."""


@dataclasses.dataclass(frozen=True)
class Without:
    """A trait of a group in a command: options of the group that the command does not have."""

    names: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Field:
    """An option, a positional argument or a group of a command."""

    name: str
    type: Any
    traits: tuple[Any, ...]
    """What `Annotated` adds to the type."""
    default: Any
    text: str | None
    """The documentation below it in the source; None where its type has one, empty without help."""

    @property
    def is_group(self) -> bool:
        """Whether it is a dataclass of options, whose names have no prefix."""
        return dataclasses.is_dataclass(self.type)

    @property
    def is_flag(self) -> bool:
        """Whether it is an option without a value."""
        return tyro.conf.FlagCreatePairsOff in self.traits

    @property
    def option(self) -> str:
        """The name on the command line; empty for a positional argument and a group."""
        if self.is_group or tyro.conf.Positional in self.traits:
            return ""
        return f"--{'no-' if self.default is True and self.is_flag else ''}{self.name.replace('_', '-')}"

    @property
    def fields(self) -> "list[Field]":
        """Those of a group."""
        without = {name for trait in self.traits if isinstance(trait, Without) for name in trait.names}
        fields = fields_of(self.type, self.default, with_text=self.text != "")
        return [field for field in fields if field.name not in without]

    def entry(self) -> Any:
        """The type for tyro, with the help and the default, unless the help describes that."""
        if self.is_group:
            kind: Any = dictionary(self.type.__name__, self.fields)
            return Annotated[(kind, *self.traits, tyro.conf.arg(help=self.text))]
        if self.default is dataclasses.MISSING:
            return Required[Annotated[(self.type, *self.traits, tyro.conf.arg(help=self.text))]]
        label = " ".join(map(str, self.default)) if isinstance(self.default, tuple) else str(self.default)
        hint = "" if self.default in (None, (), {}) or self.is_flag else f"(default: {label})"
        hint = next(filter(None, (getattr(trait, "help_behavior_hint", "") for trait in self.traits)), hint)
        return Annotated[(self.type, *self.traits, tyro.conf.arg(help=self.text, help_behavior_hint=hint))]


def fields_of(kind: Any, defaults: Any = None, *, with_text: bool = False) -> list[Field]:
    """The fields of a dataclass, with the defaults of an instance if one is given; the help has texts too."""
    parents = reversed(kind.__mro__) if with_text else ()
    texts = {name: text for parent in parents for name, text in documentation(parent)}
    fields = []
    for field in dataclasses.fields(kind):
        annotation = field_annotations(kind)[field.name]
        traits = getattr(annotation, "__metadata__", ())
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if defaults is not None:
            default = getattr(defaults, field.name)
        if tyro.conf.Suppress not in traits:
            type = annotation.__origin__ if traits else annotation
            fields.append(
                Field(field.name, type, traits, default, texts.get(field.name, None if with_text else ""))
            )
    return fields


def documentation(kind: type) -> Iterator[tuple[str, str]]:
    """The name of each field that a dataclass defines, and the text below it in the source."""
    if not dataclasses.is_dataclass(kind):
        return
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    for field, text in itertools.pairwise(definition.body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            yield ast.unparse(field.target), inspect.cleandoc(ast.literal_eval(text.value))


def options_by_name(fields: Iterable[Field]) -> dict[str, Field]:
    """The options by their names on the command line, such as `--batch-size`; those of groups too."""
    options: dict[str, Field] = {}
    for field in fields:
        options |= options_by_name(field.fields) if field.is_group else {field.option: field}
    return {option: field for option, field in options.items() if option}


def dictionary(name: str, fields: Iterable[Field]) -> Any:
    """A type for tyro: a dictionary with the fields that the command line names."""
    return TypedDict(name, {field.name: field.entry() for field in fields}, total=False)  # type: ignore[operator]


def flags(fields: Iterable[Field]) -> dict[str, Any]:
    """The defaults of the flags among fields, in dictionaries like theirs: tyro needs them for the names."""
    grouped = {field.name: flags(field.fields) for field in fields if field.is_group}
    return grouped | {field.name: field.default for field in fields if field.is_flag}


def built(kind: Any, fields: Iterable[Field], values: Mapping[str, Any]) -> Any:
    """A dataclass with the values of the command line; of a `Configuration` the named options by name."""
    kind = dict if issubclass(kind, Configuration) else kind
    named: dict[str, Any] = {}
    for field in fields:
        value = values.get(field.name, {} if field.is_group else field.default)
        if field.is_group and kind is dict:
            named |= built(dict, field.fields, value)
        elif field.is_group:
            named[field.name] = built(field.type, field.fields, value)
        elif field.name in values and not (field.is_flag and value == field.default):
            named[field.name] = value
    return kind(**named)


def parse(command: type[T], name: str, args: Sequence[str]) -> T:
    """Parse arguments into a command, or print its help; UserError names the nearest of an unknown option."""
    words = [word for word in args if word not in HELP]
    if len(words) < len(args):
        print_help(command, name, words, whole="--help-all" in args)
    fields = fields_of(command)
    options = options_by_name(fields)
    times = Counter(word.split("=")[0].replace("_", "-") for word in args)
    for option, field in options.items():
        if times[option] > 1 and isinstance(field.default, tuple | dict):  # tyro keeps only the last
            raise UserError(f"{option} is given more than once; give it once, with all its values")
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            values, unknown = read_by_tyro(command, name, fields, args, return_unknown_args=True)
    except SystemExit:
        raise UserError(f"{unboxed(complaint.getvalue())}; see `vitascope {name} --help`") from None
    if unknown:
        word = next((word for word in unknown if word.startswith("-")), None)
        if word is None:
            raise UserError(f"{unexpected(unknown[0], options)} See `vitascope {name} --help`")
        nearest = suggestion(word.split("=")[0], options)
        raise UserError(f"unknown option {word!r}{nearest}; see `vitascope {name} --help`")
    for value in values.values():
        if isinstance(value, Path):
            check_local(value)
    return cast("T", built(command, fields, values))


def read_by_tyro(
    command: Any, name: str, fields: Iterable[Field], args: Sequence[str], **options: Any
) -> Any:
    """What tyro reads for these fields of a command; SystemExit after a help or an error."""
    kind, program = dictionary(command.__name__, fields), f"vitascope {name}"
    return tyro.cli(kind, prog=program, args=list(args), default=flags(fields), config=_STYLE, **options)


def print_help(command: Any, name: str, words: Sequence[str], *, whole: bool) -> NoReturn:
    """Print the options that most calls need, each with the first sentence of its text, or the whole help."""
    defaults = parse(command, name, words).defaults() if hasattr(command, "defaults") else None
    fields = fields_of(command, defaults, with_text=True)
    description = inspect.cleandoc(command.__doc__)
    if not whole and any(field.is_group for field in fields):
        options = options_by_name(fields)
        described = {field.name: field for field in (*options.values(), *fields) if not field.is_group}
        names = getattr(command, "FIRST", [field.name for field in fields if field.name in described])
        fields = [
            dataclasses.replace(described[name], text=first_sentence(described[name].text)) for name in names
        ]
        description += f"\n\nAll {len(options)} options: `vitascope {name} --help-all`."
    read_by_tyro(command, name, fields, ["--help"], description=description)
    raise SystemExit(0)


def check_picture(out: Path, noun: str, sources: Iterable[str], source: str) -> None:
    """Reject a file to draw `noun` into that is no PNG, or is one of the sources, a `source` in words."""
    if out.suffix.lower() != ".png":
        raise UserError(f"--out {out}: {noun}, so the name has to end in .png")
    if any(out.exists() and os.path.exists(name) and out.samefile(name) for name in sources):
        raise UserError(f"--out {out} is {source}, which would be lost; give another name")


def first_sentence(text: str | None) -> str | None:
    """The first sentence of a text."""
    return text and re.split(r"(?<=\.)\s", text, maxsplit=1)[0]


def arguments_of(command: object, *others: str) -> dict[str, Any]:
    """The options of a command as arguments of the function that it calls, which lacks `others`."""
    return {name: value for name, value in vars(command).items() if name not in others}


def unexpected(word: str, options: Collection[str]) -> str:
    """The error for an argument that no option takes, with the option that was probably meant."""
    complaint = f"unexpected argument {word!r}"
    if "--resume" in options and is_run(Path(word)):
        return f"{complaint}; did you mean --resume {word}?"
    if "--data" in options:
        return f"{complaint}; did you mean --data {word}?"
    return f"{complaint}."


def unboxed(complaint: str) -> str:
    """The first paragraph of tyro's error on one line, without the box, which is of dashes in ASCII."""
    lines = [line.strip("│╭╮╰╯─ ") for line in complaint.splitlines()[1:]]
    paragraph = itertools.takewhile(
        lambda line: line.strip("-"), itertools.dropwhile(lambda line: not line.strip("-"), lines)
    )
    return " ".join(paragraph).rstrip(" .")
