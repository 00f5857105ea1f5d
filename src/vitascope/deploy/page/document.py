"""The text of a page: the explorer's files and the models', in one HTML document.

A module of JavaScript becomes a function that returns what the module exports, in an order in which every
module comes after those that it imports. So two plain scripts have them all: the model's, which the page also
starts as one worker per model (no browser starts a worker of modules for a page from the disk), and the
explorer's. A policy in the document allows no connections.
"""

import base64
import dataclasses
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
PICTURES = re.compile(r'<section id="\w+" aria-label="Pictures">')
ARRIVING = '<p id="arriving" class="quiet">The model is being loaded … 正在加载模型 …</p>'
"""Seen until all bytes are there, because a browser starts the scripts at the end; `local.js` removes it."""
START = "const vitascopeModules = {}; // what each module exports\n"
MODEL = ("vitascope.deploy.page", "web")
_IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./([\w.]+)";$', re.MULTILINE)
_ENTRY = re.compile(r' *<script type="module" src="web/([\w.]+)"></script>\n')
_EXPORT = re.compile(r"^export ((?:async )?(?:function|class|const) (\w+))", re.MULTILINE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Site:
    """The files of a page: those in `folders` of packages, of which a later one replaces one of its name.

    `MODEL` has `local.js`, which becomes `server.js`. `worker` is the module that a worker starts.
    """

    folders: Sequence[tuple[str, str]]
    worker: str

    def texts(self) -> dict[str, str]:
        """The files by name."""
        texts: dict[str, str] = {}
        for place in self.folders:
            texts |= {name: content.decode() for name, (_, content) in web_files(*place).items()}
            if "local.js" in texts:
                texts["server.js"] = texts.pop("local.js")
        return texts

    def modules(self) -> dict[str, str]:
        """The sources of the modules that the page and its worker need, each after those it imports."""
        texts = self.texts()
        sources = {name: text for name, text in texts.items() if name.endswith(".js")}
        order = TopologicalSorter({name: imported(source) for name, source in sources.items()}).static_order()
        sources = {name: sources[name] for name in order}
        names = {*below(_ENTRY.findall(texts["index.html"])[0], sources), *below(self.worker, sources)}
        return {name: source for name, source in sources.items() if name in names}

    def programs(self) -> tuple[str, str]:
        """The modules of the worker as a script, and the others as one that follows it."""
        sources = self.modules()
        model = below(self.worker, sources)
        programs = [model, [name for name in sources if name not in model]]
        first, second = ("".join(as_function(name, sources[name]) for name in names) for names in programs)
        return f'\n"use strict";\n{START}{first}', f'\n"use strict";\n{second}'

    def frame(self, title: str) -> list[str]:
        """The HTML before and after the scripts, which come at the end of the body."""
        texts = self.texts()
        page = _ENTRY.sub("", texts["index.html"])
        icon = f"data:image/svg+xml;base64,{base64.b64encode(texts['icon.svg'].encode()).decode()}"
        policy = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        replaced = {
            '<link rel="stylesheet" href="web/style.css">': f"<style>\n{texts['style.css']}</style>",
            PICTURES.findall(page)[0]: f"{PICTURES.findall(page)[0]}{ARRIVING}",
            "web/icon.svg": icon,
            re.findall("<title>.*</title>", page)[0]: f"{policy}\n  <title>{escape(title)}</title>",
        }
        for old, new in replaced.items():
            assert old in page, f"index.html without {old}"
            page = page.replace(old, new)
        begin, end = page.split("</body>")
        return [begin, f"</body>{end}"]


SERVER = ("vitascope.deploy.server", "web")
EXPLORER = Site(folders=(SERVER, MODEL), worker="worker.js")
LEARNING = Site(
    folders=(SERVER, ("vitascope.deploy.labelling", "web"), MODEL, (MODEL[0], "web/learn")),
    worker="learner.js",
)


def document(
    title: str, data: Mapping[str, Any], weights: Sequence[bytes], site: Site = EXPLORER
) -> Iterator[str]:
    """The parts of the document: `data` is what `web/local.js` reads, `weights` a safetensors file of each
    model."""
    begin, end = site.frame(title)
    yield begin
    yield f'<script type="application/json" id="model-data">{as_script(data)}</script>\n'
    for place, content in enumerate(weights):
        for start in range(0, len(content), PIECE):
            piece = base64.b64encode(content[start : start + PIECE]).decode()
            yield f'<script type="text/base64" data-model="{place}">{piece}</script>\n'
    for name, program in zip(("model", "explorer"), site.programs(), strict=True):
        yield f'<script id="{name}-program">{program}</script>\n'
    yield end


def as_script(data: Mapping[str, Any]) -> str:
    """JSON that ends no element of HTML, whatever its texts are."""
    return json.dumps(data).replace("<", "\\u003c")


def programs() -> list[str]:
    """The programs of `simd.js` as base64, the fastest first."""
    folder = files("vitascope.deploy.page").joinpath("web")
    names = ("multiply-fused.wasm", "multiply.wasm")
    return [base64.b64encode(folder.joinpath(name).read_bytes()).decode() for name in names]


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
