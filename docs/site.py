"""Hooks of MkDocs: the pages that are made of the source, and links between pages of the repository.

A page of the site keeps its text; links to files that are no pages lose their target.
"""

from __future__ import annotations

import os
import posixpath
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

import vitascope
from vitascope.cli import COMMANDS

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)((?:#[^)\s]*)?)\)")
CODE = re.compile(r"(^```.*?^```|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
EXAMPLE = re.compile(r"^```python$.*?^```$", re.MULTILINE | re.DOTALL)
SHIM = "https://unpkg.com/iframe-worker/shim"
COPIED = {
    "README.md": "index.md",
    "README.zh.md": "index.zh.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "src/vitascope/models/weights/builtin/cifar10/README.md": "cifar10.md",
    "src/vitascope/data/samples/README.md": "samples.md",
} | {
    path.relative_to(ROOT).as_posix(): f"benchmarks/{path.name}"
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.md"))
}
"""Pages outside of docs/, by their place in the repository, and where they stand in the site."""


def help_of(command: str) -> str:
    """The page of a command: what `--help-all` prints."""
    words = [sys.executable, "-m", "vitascope", command, "--help-all"]
    env = {**os.environ, "COLUMNS": "80", "PYTHONPATH": str(ROOT / "src")}
    text = subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout
    return f"# vitascope {command}\n\n```text\n{text.rstrip()}\n```\n"


def reference_of(name: str) -> str:
    """The page of a public name, with its example of docs/python.md."""
    home = vitascope._HOMES.get(name)
    path = f"vitascope.{name}" if home is None else f"vitascope.{home}.{name}"
    examples = EXAMPLE.findall((ROOT / "docs" / "python.md").read_text("utf-8"))
    example = next(text for text in examples if re.search(rf"\bvs\.{name}\b", text))
    more = "The example is a part of [a page that runs from top to bottom](../python.md)."
    return f"# vs.{name}\n\n{example}\n\n{more}\n\n::: {path}\n    options:\n      heading_level: 2\n"


def on_config(config: Any) -> Any:
    """Add the pages of the reference to the navigation."""
    api = [{f"vs.{name}": f"reference/{name}.md"} for name in vitascope.__all__]
    commands = [{name: f"commands/{name}.md"} for name in COMMANDS]
    tables = [place for place in COPIED.values() if place.startswith("benchmarks/")]
    sections = {"Python": api, "Commands": commands, "Benchmarks": tables[::-1]}
    more = ["changelog.md", "contributing.md", "cifar10.md", "samples.md"]
    for section in config.nav:
        if "Reference" in section:
            section["Reference"] = [*({name: pages} for name, pages in sections.items()), *more]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not in docs/, and the pictures that they show."""
    pages = {f"reference/{name}.md": reference_of(name) for name in vitascope.__all__}
    pages |= {f"commands/{name}.md": help_of(name) for name in COMMANDS}
    pages |= {place: (ROOT / path).read_text("utf-8") for path, place in COPIED.items()}
    for place, text in pages.items():
        files.append(File.generated(config, place, content=text))
    for picture in sorted((ROOT / "benchmarks" / "results").glob("*.png")):
        files.append(File.generated(config, f"benchmarks/{picture.name}", abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Point links at pages of the site, by where the page and its target are in the repository."""
    place = page.file.src_uri
    origin = {site: path for path, site in COPIED.items()}.get(place, f"docs/{place}")

    def linked(match: re.Match[str]) -> str:
        picture, text, target, anchor = match.groups()
        if ":" in target:
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
        site = COPIED.get(path) or path.removeprefix("docs/").replace("benchmarks/results/", "benchmarks/")
        if files.get_file_from_path(site) is None:
            return match[0] if picture else text
        return f"{picture}[{text}]({posixpath.relpath(site, posixpath.dirname(place) or '.')}{anchor})"

    parts = CODE.split(markdown)
    return "".join(part if part.startswith("`") else LINK.sub(linked, part) for part in parts)


def on_post_page(output: str, *, page: Any, config: Any) -> str:
    """Put our own script for the search of a site on the disk in place of one from another host."""
    return output.replace(SHIM, posixpath.relpath("worker.js", posixpath.dirname(page.url) or "."))


def on_post_template(output_content: str, *, template_name: str, config: Any) -> str:
    """The same for the page of addresses that do not exist."""
    return output_content.replace(SHIM, "worker.js")
