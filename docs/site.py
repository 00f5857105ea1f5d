"""Hooks of MkDocs: the reference of Python, the demo, and links between pages of the repository.

A page of the site keeps its text; links to files that are no pages lose their target.
"""

from __future__ import annotations

import hashlib
import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

import vitascope
from vitascope.cli import COMMANDS
from vitascope.data.samples import CREDIT, PHOTOS

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)((?:#[^)\s]*)?)\)")
CODE = re.compile(r"(^```.*?^```|(?<!\[)`[^`\n]+`)", re.MULTILINE | re.DOTALL)
EXAMPLE = re.compile(r"^```python$.*?^```$", re.MULTILINE | re.DOTALL)
SHIM = "https://unpkg.com/iframe-worker/shim"
DEMO = "demo/index.html"
SHOWN = ("horse", "cat", "dog")
"""The photographs of the demo."""
INTRODUCTION = '<p id="intro">'
NOTE = """<style>
    #demo { grid-column: 1 / -1; font-size: 1.05rem; }
    @media (max-width: 40rem) { /* the answer is on the first screen */
      #demo + #intro { display: none; }
      #panels[data-count="1"] .full .picture { width: min(100%, calc(36vh * var(--ratio))); }
    }
    #demo a { color: var(--accent); }
    #demo [lang="zh-CN"], :root[lang|="zh"] #demo [lang="en"] { display: none; }
    :root[lang|="zh"] #demo [lang="zh-CN"] { display: inline; }
    </style>
    <p id="demo">
      <span lang="en"><strong>Drop a picture: nothing leaves this computer.</strong>
        The model is in this page and computes in the browser:
        <a href="../cifar10.html">its card</a>, <a href="../index.html">what vitascope is</a>.</span>
      <span lang="zh-CN"><strong>拖入一张图片：任何数据都不会离开这台电脑。</strong>模型就在本页面中：<a
        href="../cifar10.html">模型卡片</a>，<a href="../index.zh.html">vitascope 简介</a>。</span>
    </p>
    """
"""What the demo says above the explorer's own introduction, in the language that the explorer chooses."""
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


def reference_of(name: str) -> str:
    """The page of a public name, with its example of docs/python.md."""
    home = vitascope._HOMES.get(name)
    path = f"vitascope.{name}" if home is None else f"vitascope.{home}.{name}"
    examples = EXAMPLE.findall((ROOT / "docs" / "python.md").read_text("utf-8"))
    example = next(text for text in examples if re.search(rf"\bvs\.{name}\b", text))
    more = "The example is a part of [a page that runs from top to bottom](../python.md)."
    return f"# vs.{name}\n\n{example}\n\n{more}\n\n::: {path}\n    options:\n      heading_level: 2\n"


def on_config(config: Any) -> Any:
    """Add the pages of the reference to the navigation, and the sentence of the package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    config.site_description = project["description"]
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
    pages |= {place: (ROOT / path).read_text("utf-8") for path, place in COPIED.items()}
    for place, text in pages.items():
        files.append(File.generated(config, place, content=text))
    for picture in sorted((ROOT / "benchmarks" / "results").glob("*.png")):
        files.append(File.generated(config, f"benchmarks/{picture.name}", abs_src_path=str(picture)))
    files.append(File.generated(config, DEMO, content=demo()))
    return files


def demo() -> str:
    """The page of the built-in model, with what is to do, and links to its card and to the start of the site.

    It is written once for each state of the source, which takes 10 s, and not tried in a browser.
    """
    state = hashlib.sha256()
    sources = (path for path in (ROOT / "src").rglob("*") if path.is_file() and path.suffix != ".pyc")
    for path in sorted(sources):
        state.update(f"{path.relative_to(ROOT).as_posix()}\0".encode() + path.read_bytes())
    cached = ROOT / "build" / f"demo-{state.hexdigest()[:16]}.html"
    if not cached.exists():
        for old in cached.parent.glob("demo-*.html"):
            old.unlink()
        vitascope.page("cifar10", cached, samples=[PHOTOS[name] for name in SHOWN], unproved=True)
    page = cached.read_text("utf-8")
    if page.count(INTRODUCTION) != 1:
        raise PluginError(f"the explorer's page has no {INTRODUCTION}")
    for name in SHOWN:
        page = page.replace(f'"title": "{name}.jpg"', f'"title": "{name} ({CREDIT})"')
    return page.replace(INTRODUCTION, f"{NOTE}{INTRODUCTION}")


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

    markdown = markdown.replace('<img src="docs/', '<img src="')
    parts = CODE.split(markdown)
    return "".join(part if part.startswith("`") else LINK.sub(linked, part) for part in parts)


def on_page_content(output: str, *, page: Any, config: Any, files: Files) -> str:
    """Make links to the published site relative, so that they also work from the disk."""

    def relative(match: re.Match[str]) -> str:
        target = match[1] + ("index.html" if match[1] in ("", "demo/") else "")
        return f'href="{posixpath.relpath(target, posixpath.dirname(page.url) or ".")}"'

    return re.sub(rf'href="{re.escape(config.site_url)}([^"]*)"', relative, output)


def on_post_page(output: str, *, page: Any, config: Any) -> str:
    """Put our own script for the search of a site on the disk in place of one from another host."""
    return output.replace(SHIM, posixpath.relpath("worker.js", posixpath.dirname(page.url) or "."))


def on_post_template(output_content: str, *, template_name: str, config: Any) -> str:
    """The same for the page of addresses that do not exist."""
    return output_content.replace(SHIM, f"{urlsplit(config.site_url).path}worker.js")
