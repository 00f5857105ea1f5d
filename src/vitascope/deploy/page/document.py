"""The text of a page: the explorer's files and the models', in one HTML document.

A module of JavaScript becomes a function that returns what the module exports, in an order in which every
module comes after those that it imports. So two plain scripts have them all: the model's, which the page also
starts as one worker per model (no browser starts a worker of modules for a page from the disk), and the
explorer's. A policy in the document allows no connections.
"""

import base64
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from graphlib import TopologicalSorter
from html import escape
from importlib.resources import files
from typing import Any

from vitascope.deploy.server.page_content import web_files

PIECE = 3 << 20
"""Bytes of weights in one element of the document, so that the browser needs no text of them all."""
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'wasm-unsafe-eval'; worker-src blob:; "
    "style-src 'unsafe-inline'; img-src data: blob:"
)
PICTURES = '<section id="panels" aria-label="Pictures">'
ARRIVING = '<p id="arriving" class="quiet">The model is being loaded … 正在加载模型 …</p>'
"""Seen until all bytes are there, because a browser starts the scripts at the end; `local.js` removes it."""
WORKER = "worker.js"
START = "const vitascopeModules = {}; // what each module exports\n"
LEARNING = (("vitascope.deploy.page", "web/learn"),)
"""The folders of the modules of a page that learns, beside the explorer's."""
_IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./([\w.]+)";$', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?(?:function|class|const) (\w+))", re.MULTILINE)


def document(title: str, data: Mapping[str, Any], weights: Sequence[bytes]) -> Iterator[str]:
    """The parts of the document: `data` is what `web/local.js` reads, `weights` a safetensors file of each
    model."""
    explorer = {name: content.decode() for name, (_, content) in web_files().items()}
    page = explorer["index.html"]
    icon = f"data:image/svg+xml;base64,{base64.b64encode(explorer['icon.svg'].encode()).decode()}"
    replaced = {
        '<link rel="stylesheet" href="web/style.css">': f"<style>\n{explorer['style.css']}</style>",
        '  <script type="module" src="web/main.js"></script>\n': "",
        PICTURES: f"{PICTURES}{ARRIVING}",
        "web/icon.svg": icon,
        "<title>vitascope: attention explorer</title>": (
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
            f"  <title>{escape(title)}</title>"
        ),
    }
    for old, new in replaced.items():
        assert old in page, f"index.html without {old}"
        page = page.replace(old, new)
    body, end = page.split("</body>")
    yield body
    yield f'<script type="application/json" id="model-data">{as_script(data)}</script>\n'
    for place, content in enumerate(weights):
        for start in range(0, len(content), PIECE):
            piece = base64.b64encode(content[start : start + PIECE]).decode()
            yield f'<script type="text/base64" data-model="{place}">{piece}</script>\n'
    sources = modules()
    model = below(WORKER, sources)
    for script, names in {
        "model": model,
        "explorer": [name for name in sources if name not in model],
    }.items():
        yield f'<script id="{script}-program">\n"use strict";\n{START if script == "model" else ""}'
        yield from (as_function(name, sources[name]) for name in names)
        yield "</script>\n"
    yield f"</body>{end}"


def as_script(data: Mapping[str, Any]) -> str:
    """JSON that ends no element of HTML, whatever its texts are."""
    return json.dumps(data).replace("<", "\\u003c")


def programs() -> list[str]:
    """The programs of `simd.js` as base64, the fastest first."""
    folder = files("vitascope.deploy.page").joinpath("web")
    names = ("multiply-fused.wasm", "multiply.wasm")
    return [base64.b64encode(folder.joinpath(name).read_bytes()).decode() for name in names]


def modules(*others: tuple[str, str]) -> dict[str, str]:
    """The sources of the modules by name, each after those it imports. `local.js` replaces `server.js`, and a
    module of `others`, folders in packages, what has its name."""
    sources = {name: content.decode() for name, (_, content) in web_files().items() if name.endswith(".js")}
    for package, folder in (("vitascope.deploy.page", "web"), *others):
        for path in files(package).joinpath(folder).iterdir():
            if path.name.endswith(".js"):
                sources[path.name] = path.read_text(encoding="utf-8")
        if "local.js" in sources:
            sources["server.js"] = sources.pop("local.js")
    order = TopologicalSorter({name: imported(source) for name, source in sources.items()}).static_order()
    return {name: sources[name] for name in order}


def imported(source: str) -> list[str]:
    """The names of the modules that a module imports."""
    return [name for _, name in _IMPORT.findall(source)]


def below(name: str, sources: dict[str, str]) -> list[str]:
    """A module and all that it needs, in the order of `sources`."""
    needed = {name}
    for module in reversed(sources):
        if module in needed:
            needed |= set(imported(sources[module]))
    return [module for module in sources if module in needed]


def as_function(name: str, source: str) -> str:
    """A module as a plain script: its exports become an entry of `vitascopeModules`."""
    exported = [word for _, word in _EXPORT.findall(source)]
    source = _IMPORT.sub(r'const \1 = vitascopeModules["\2"];', source)
    source = _EXPORT.sub(r"\1", source)
    assert not re.search(r"^(?:import|export)\b|</script|<!--", source, re.MULTILINE), name
    return f'\nvitascopeModules["{name}"] = (() => {{\n{source}return {{ {", ".join(exported)} }};\n}})();\n'
