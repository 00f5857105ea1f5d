"""Hook of MkDocs: a page for each command, with an anchor for each option and links to the guides."""

from __future__ import annotations

import inspect
import posixpath
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import tyro
from markdown.extensions.toc import unique
from mkdocs.structure.files import File, Files
from pymdownx.slugs import slugify

from vitascope.cli import COMMANDS
from vitascope.cli.parsing import _STYLE, dictionary, fields_of, flags, options_by_name, parse

DOCS = Path(__file__).parent
CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages."""
    for name in COMMANDS:
        files.append(File.generated(config, f"commands/{name}.md", content=help_of(name)))
    return files


class Section(NamedTuple):
    """A part of a guide, from its heading to the next one."""

    page: str
    """The place of the page in the repository."""
    page_title: str
    title: str
    anchor: str
    text: str

    def link(self, *, whole: bool = False) -> str:
        """A link to the section, or to the whole page, from a page of a command."""
        target = f"../{posixpath.relpath(self.page, 'docs')}"
        if whole or self.title == self.page_title:
            return f"[{self.page_title}]({target})"
        return f"[{self.page_title}: {self.title}]({target}#{self.anchor})"


@cache
def guides() -> list[Section]:
    """The sections of the English pages of docs/."""
    return [
        section
        for path in sorted(DOCS.glob("*.md"))
        if path.name not in ("README.md", "python.md") and not path.name.endswith(".zh.md")
        for section in sections_of(path)
    ]


def sections_of(path: Path) -> Iterator[Section]:
    """The sections of a page, with the anchors that the site gives them."""
    page, taken = f"docs/{path.name}", set[str]()
    lines = CODE.sub(lambda match: match[0].replace("\n#", "\n\0#"), path.read_text("utf-8"))
    _, *parts = re.split(r"^#+ (.*)$", lines.replace("\\\n", " "), flags=re.MULTILINE)
    titles = [re.sub(r"[`*]|\[(.*?)\]\(.*?\)", r"\1", title) for title in parts[::2]]
    for title, text in zip(titles, parts[1::2], strict=True):
        anchor = unique(slugify(case="lower")(title, "-"), taken)
        yield Section(page, titles[0], title, anchor, text)


def described(command: str, option: str) -> list[Section]:
    """The sections that describe an option of a command, the best ones first."""
    use = re.compile(rf"\bvitascope {command}\b")
    word = re.compile(rf"(?<![\w-]){re.escape(option)}(?![\w-])")
    title = re.compile(rf"\b{re.escape(option.strip('-').replace('-', ' '))}s?\b")
    points = {}
    for section in guides():
        uses = bool(use.search(section.text))
        if uses or "vitascope " not in section.text:  # else its commands are others
            together = sum(bool(use.search(line) and word.search(line)) for line in section.text.splitlines())
            named = bool(title.search(section.title.lower()))
            mentions = len(word.findall(section.text))
            points[section] = mentions and mentions + 2 * together + 2 * uses + 8 * named
    return sorted(filter(points.get, points), key=lambda section: -points[section])


def guides_to(command: str) -> list[Section]:
    """The three pages that show a command most often, by their first sections."""
    times = Counter[str]()
    for section in guides():
        times[section.page] += len(re.findall(rf"^vitascope {command}\b", section.text, re.MULTILINE))
    first = {section.page: section for section in reversed(guides())}
    return [first[page] for page, count in times.most_common(3) if count]


def parser_of(command: str) -> Any:
    """The parser whose help `--help-all` prints."""
    kind = COMMANDS[command]
    defaults = parse(kind, command, []).defaults() if hasattr(kind, "defaults") else None
    fields = fields_of(kind, defaults, with_text=True)
    words = dictionary(kind.__name__, fields)
    with warnings.catch_warnings(action="ignore"):  # tyro has nothing else that returns one
        return tyro.extras.get_parser(words, default=flags(fields), config=_STYLE)


def prose(text: str, options: frozenset[str]) -> str:
    """A text of the help as Markdown, in which the options of the command are links."""

    def marked(match: re.Match[str]) -> str:
        code, option, page, sign = match.groups()
        if code in options or option in options:
            return f"[`{code or option}`](#{code or option})"
        if page:
            titles = {section.page: section.page_title for section in guides()}
            return f"[{titles.get(page, page)}](../{page.removeprefix('docs/')})"
        return f"`{code or option}`" if code or option else f"\\{sign}"

    return re.sub(r"`([^`]+)`|(?<![\w-])(--[a-z][\w-]*)|(docs/\w+\.md)|([<>*_\[\]{}#|])", marked, text)


def help_of(command: str) -> str:
    """The page of a command: what `--help-all` prints, with a heading per option and links to the guides."""
    kind, parser = COMMANDS[command], parser_of(command)
    groups = [
        (group, [action for action in group._group_actions if action.dest != "help"])
        for group in parser._action_groups
    ]
    places = [action.metavar for _, actions in groups for action in actions if not action.option_strings]
    options = frozenset(word for _, actions in groups for action in actions for word in action.option_strings)
    usage = " ".join(["usage: vitascope", command, *(["[OPTIONS]"] if options else []), *places])
    description = prose(inspect.cleandoc(kind.__doc__), options)
    lines = [f"# vitascope {command}", description, f"`{usage}`"]
    if pages := guides_to(command):
        lines += [f"Guides: {', '.join(section.link(whole=True) for section in pages)}."]
    first = getattr(kind, "FIRST", ())
    names = {field.name: option for option, field in options_by_name(fields_of(kind)).items()}
    if first:
        links = ", ".join(f"[`{names[name]}`](#{names[name]})" for name in first if name in names)
        lines += [f"Most calls need only some of {links}."]
    for group, actions in groups:
        if actions:
            title = group.title.rpartition(".")[2].capitalize()
            lines += [f"## {title}", prose(group.description or "", options)]
        for action in actions:
            lines += lines_of(action, command, options)
    return "\n\n".join(lines) + "\n"


def lines_of(action: Any, command: str, options: frozenset[str]) -> Iterator[str]:
    """The heading of an option or argument, its value, its text, and the sections that describe it."""
    option = next((word for word in action.option_strings if word.startswith("--")), "")
    yield f"### {option or action.metavar.strip('[]')}"
    if option and action.metavar:
        yield f"`{option} {action.metavar}`"
    yield prose(action.help.replace("(required)", "\nRequired.").strip(), options).replace("\n", "  \n")
    if option and (sections := described(command, option)):
        yield f"More: {', '.join(section.link() for section in sections[:2])}."
