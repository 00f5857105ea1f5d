"""Hook of MkDocs: llms.txt (llmstxt.org), a list of all pages, and llms-full.txt, the text of the guides."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from typing import Any

from mkdocs.structure.files import File, Files

DEMO_LINE = "The built-in model in the browser: drop a picture, see its class and where the model looks."
LANGUAGES = ("中文",)
"""Sections of the navigation whose parts stay together in llms.txt."""


def on_env(env: Any, *, config: Any, files: Files) -> Any:
    """Give each page its first sentence as its description, and write llms.txt and llms-full.txt of them."""
    lines = [
        "# vitascope",
        f"> {config.site_description}",
        f"[All guides in one file]({config.site_url}llms-full.txt)",
    ]
    texts = []
    for title, items in chapters(config.nav):
        lines.append(f"## {title}\n")
        for name, place in items:
            page = files.get_file_from_path(place).page
            if page is None or page.content is None:
                lines[-1] += f"\n- [{name}]({config.site_url}{place}): {DEMO_LINE}"
                continue
            summary = first_line(page.content) or f"{page.title}."
            page.meta.setdefault("description", summary)
            lines[-1] += f"\n- [{name or page.title}]({config.site_url}{page.url}): {summary}"
            if title in ("Tasks", "Concepts"):
                texts.append(f"<!-- {config.site_url}{page.url} -->\n\n{page.markdown}")
    files.append(File.generated(config, "llms.txt", content="\n\n".join(lines) + "\n"))
    files.append(File.generated(config, "llms-full.txt", content="\n\n".join(texts)))
    return env


def chapters(nav: list[Any]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """The sections of llms.txt, with the title (or nothing) and the place of each page."""
    found: dict[str, list[tuple[str, str]]] = {}

    def walk(items: list[Any], chapter: str) -> None:
        for item in items:
            ((name, value),) = item.items() if isinstance(item, dict) else [("", item)]
            if isinstance(value, list):
                walk(value, chapter if chapter in LANGUAGES or name == "Learn" else name)
            else:
                found.setdefault(
                    "Optional" if chapter in ("Benchmarks", "Reference") else chapter, []
                ).append((name, value))

    walk(nav, "Start")
    optional = found.pop("Optional", [])
    yield from found.items()
    yield "Optional", optional


def first_line(content: str) -> str:
    """The first sentence of a page that is more than a link or a picture."""
    for paragraph in re.findall(r"<p>(?!<a |<img )(.*?)</p>", content, re.DOTALL):
        text = " ".join(html.unescape(re.sub(r"<[^>]*>", "", paragraph)).split())
        if len(text) > 15 and not text.startswith(("usage: ", "The example is a part")):
            return re.split(r"(?<=[.!?])\s|(?<=。)", text, maxsplit=1)[0].rstrip(":：")
    return ""
