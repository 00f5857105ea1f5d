"""The document: one file, whose texts end no element and whose modules are all in it."""

import base64
import json
import re
from html.parser import HTMLParser

from vitascope.deploy.page.document import EXPLORER, PIECE, as_function, below, document, imported

HOSTILE = "</script><img src=x onerror=alert(1)>"


class Elements(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.scripts: dict[str, list[str]] = {}
        self.inside: list[str] | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        given = dict(attributes)
        self.addresses += [given[name] or "" for name in ("src", "href") if name in given]
        if tag == "script":
            self.inside = self.scripts.setdefault(given.get("id") or given["type"] or "", [])

    def handle_endtag(self, tag: str) -> None:
        if tag == "script":
            self.inside = None

    def handle_data(self, data: str) -> None:
        if self.inside is not None:
            self.inside.append(data)


def test_texts_end_no_element() -> None:
    found = Elements("".join(document(HOSTILE, {"class_names": [HOSTILE]}, [b"1234"])))
    plain = Elements("".join(document("a", {"class_names": ["b"]}, [b"1234"])))
    assert found.tags == plain.tags
    assert json.loads("".join(found.scripts["model-data"])) == {"class_names": [HOSTILE]}


def test_weights_are_in_pieces_of_whole_bytes() -> None:
    weights = bytes(range(256)) * (PIECE // 256) + b"rest"
    pieces = Elements("".join(document("a", {}, [weights]))).scripts["text/base64"]
    assert len(pieces) == 2
    assert b"".join(map(base64.b64decode, pieces)) == weights
    text = "".join(document("a", {}, [b"first", b"second"]))
    for place, content in enumerate([b"first", b"second"]):
        piece = base64.b64encode(content).decode()
        assert text.count(f'<script type="text/base64" data-model="{place}">{piece}</script>') == 1


def test_modules_are_plain_scripts_in_order_and_the_worker_has_those_that_it_needs() -> None:
    sources = EXPLORER.modules()
    for place, (name, source) in enumerate(sources.items()):
        assert set(imported(source)) <= set(list(sources)[:place]), name
    assert not re.search(
        r"(?<!\.)\bfetch\(|XMLHttpRequest|WebSocket", "".join(sources.values()).replace("async fetch(", "")
    )
    for name, source in sources.items():
        found = as_function(name, source)
        assert len(imported(source)) == len(re.findall(r"^import\b", source, re.MULTILINE)), name
        assert found.count("vitascopeModules[") == 1 + len(imported(source))
    names = below("worker.js", sources)
    assert {"vit.js", "numbers.js", "simd.js", "pixels.js", "framing.js", "pack.js"} <= set(names)
    assert not {"main.js", "panel.js", "server.js"} & set(names)
    # The worker decodes no picture, because WebKit does not on a page from the disk.
    assert not [name for name in names if "createImageBitmap" in sources[name]]
    assert "createImageBitmap" in sources["server.js"]
