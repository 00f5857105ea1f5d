"""Hook of MkDocs: which pages the search prefers, its Chinese words, and corrections of its script."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import jieba
from mkdocs.exceptions import PluginError

jieba.setLogLevel(logging.WARNING)  # the search plugin uses it if it is installed
BOOSTS = {
    "questions": 2,
    **dict.fromkeys(("commands/", "architecture"), 0.5),
    **dict.fromkeys(("reference/", "contributing", "cifar10", "samples"), 0.1),
    **dict.fromkeys(("benchmarks/", "changelog"), 0.01),
}
"""How much a result of the search counts, by the start of the page's place; 1 for other guides."""
SEARCH = {
    # A pasted `--class-weights` excluded pages with these words. Its own section comes first.
    # Of the words that begin with a word of the question, the word itself counts most.
    r"(?<=search\(e\)\{if\(e=e)(?=\.replace\(new RegExp)": (
        r""".replace(/^.*/,q=>this.asked=q.trim()).replace(/(^|\s)-+/g,"$1")"""
        r""".replace(/^[^"+~^*:]+$/,q=>q.replace(/\w[\w-]+/g,"$&^4 $&"))"""
    ),
    r"(?<=score:a\*\(1\+K\(g,2\)\))(?=,terms)": (
        r"""*(/^--/.test(this.asked)&&c.location.includes("#"+this.asked)?1e3:1)"""
    ),
    # The last sign of Chinese words was not compared, and a last word of one sign was left out.
    r"(?<=for\(let o=s\+1;o)<(?=t\.length;o\+\+\)t\.slice\(s,o\))": "<=",
    r"(?<=n\[a\]&&a<t\.length)-1": "",
}
"""Corrections of the search's script (mkdocs-material 9.8): places, and what stands there instead."""


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> None:
    """Set how much the page counts."""
    boost = next((boost for start, boost in BOOSTS.items() if page.file.src_uri.startswith(start)), 1)
    page.meta.setdefault("search", {"boost": boost})
    page.meta.pop("tags", None)  # of a model's card: the search would prefer them to everything


def on_post_build(*, config: Any) -> None:
    """Correct the search's script."""
    (script,) = (Path(config.site_dir) / "assets" / "javascripts" / "workers").glob("search.*.min.js")
    text = script.read_text("utf-8")
    for pattern, replacement in SEARCH.items():
        text, count = re.subn(pattern, replacement.replace("\\", r"\\"), text)
        if count != 1:
            raise PluginError(
                f"the search's script has {pattern} {count} times: see whether it is still wrong"
            )
    script.write_text(text, "utf-8")
