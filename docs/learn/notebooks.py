"""Make the notebooks of the lessons from their pages, with their outputs: `python docs/learn/notebooks.py`.

A block of Python becomes a cell of code, everything between two blocks a cell of text. The cells are run,
which also writes the outputs and pictures of the pages again. Chinese pictures need the font Noto Sans CJK.
"""

import ast
import base64
import contextlib
import io
import json
import re
import shutil
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import font_manager
from PIL import Image

DOCS = Path(__file__).parent.parent
LESSONS = (DOCS / "learn" / "build", DOCS / "walkthrough", DOCS / "learn" / "next")
PAGES = tuple(lesson.with_suffix(suffix) for lesson in LESSONS for suffix in (".md", ".zh.md"))
REPOSITORY = tomllib.loads((DOCS.parent / "pyproject.toml").read_text("utf-8"))["project"]["urls"][
    "Repository"
]
INSTALL = "%pip install --quiet vitascope"
BADGE = "https://colab.research.google.com/assets/colab-badge.svg"
CHINESE_FONT = "Noto Sans CJK SC"
"""With the letter forms of mainland China; the other faces of the same file have those of Japan or Korea."""
OUTPUT = re.compile(r"^```text\n.*?^```", re.MULTILINE | re.DOTALL)


def pictures_of(page: Path) -> Path:
    """The folder of a page's pictures."""
    return DOCS / "images" / page.stem


def notebook(page: Path) -> dict[str, Any]:
    """The notebook of a page, without outputs. A link to one of the page's own pictures becomes a caption,
    because the cell above it shows the picture."""
    place = page.with_suffix(".ipynb").relative_to(DOCS.parent).as_posix()
    address = REPOSITORY.replace("https://github.com/", "https://colab.research.google.com/github/")
    cells = [
        {
            "cell_type": "markdown",
            "id": "badge",
            "source": f"[![Open in Colab]({BADGE})]({address}/blob/main/{place})",
        },
        {"cell_type": "code", "id": "install", "source": INSTALL},
    ]
    own = rf"^!\[(.*)\]\({re.escape(pictures_of(page).relative_to(DOCS).as_posix())}/.*\)$"
    text = re.sub(own, r"*\1*", page.read_text("utf-8"), flags=re.MULTILINE)
    for number, part in enumerate(re.split(r"^```python\n(.*?)^```\n", text, flags=re.MULTILINE | re.DOTALL)):
        if source := part.strip():
            kind = "code" if number % 2 else "markdown"
            cells.append({"cell_type": kind, "id": f"cell-{number}", "source": source})
    for cell in cells:
        code = {"execution_count": None, "outputs": []} if cell["cell_type"] == "code" else {}
        cell.update(metadata={}, source=cell["source"].splitlines(keepends=True), **code)
    python = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": python}, "nbformat": 4, "nbformat_minor": 5}


def execute(made: dict[str, Any]) -> None:
    """Run a notebook's code in the current folder, and keep what Jupyter would show below each cell."""
    names: dict[str, Any] = {}
    codes = [cell for cell in made["cells"] if cell["cell_type"] == "code" and cell["id"] != "install"]
    for number, cell in enumerate(codes, 1):
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(tree, cell["id"], "exec"), names)  # noqa: S102 - our own page
            value = eval(compile(ast.Expression(last.value), cell["id"], "eval"), names) if last else None  # noqa: S307
        if printed := out.getvalue():
            text = printed.splitlines(keepends=True)
            cell["outputs"].append({"name": "stdout", "output_type": "stream", "text": text})
        if value is not None:
            result = {"data": shown(value), "execution_count": number, "metadata": {}}
            cell["outputs"].append({"output_type": "execute_result", **result})
        cell["execution_count"] = number


def shown(value: object) -> dict[str, Any]:
    """A value by media type."""
    if not isinstance(value, Image.Image):
        return {"text/plain": repr(value).splitlines(keepends=True)}
    file = io.BytesIO()
    value.save(file, "PNG", optimize=True)
    text = f"<PIL.Image.Image image mode={value.mode} size={value.width}x{value.height}>"
    return {"image/png": base64.b64encode(file.getvalue()).decode(), "text/plain": [text]}


@contextlib.contextmanager
def chinese_font() -> Iterator[None]:
    """Draw texts with `CHINESE_FONT`."""
    for path in font_manager.findSystemFonts():  # matplotlib's own list may be older than the font
        if Path(path).name.startswith("NotoSansCJK"):
            font_manager.fontManager.addfont(path)
    if CHINESE_FONT not in font_manager.get_font_names():
        raise SystemExit(
            f"the font {CHINESE_FONT} is not installed; the pictures of the Chinese pages need it: "
            "apt-get install fonts-noto-cjk"
        )
    with matplotlib.rc_context({"font.family": CHINESE_FONT}):
        yield


def make(page: Path) -> None:
    """Run a page's code; write its notebook, and the outputs and pictures that the page shows."""
    font = chinese_font() if page.name.endswith(".zh.md") else contextlib.nullcontext()
    made = notebook(page)
    with font, tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        execute(made)
        if pictures_of(page).exists():
            shutil.rmtree(pictures_of(page))
            shutil.copytree(page.stem.partition(".")[0], pictures_of(page))
    text = page.read_text("utf-8")
    if OUTPUT.search(text):
        outputs = [output for cell in made["cells"] for output in cell.get("outputs", ())]
        printed = ["".join(output["text"]) for output in outputs if "text" in output]
        pieces = zip(OUTPUT.split(text), [*(f"```text\n{output}```" for output in printed), ""], strict=True)
        page.write_text("".join(piece for pair in pieces for piece in pair), "utf-8")
        for cell, new in zip(made["cells"], notebook(page)["cells"], strict=True):
            cell["source"] = new["source"]
    page.with_suffix(".ipynb").write_text(json.dumps(made, ensure_ascii=False, indent=1) + "\n", "utf-8")


def main() -> None:
    """Make every notebook."""
    for page in PAGES:
        make(page)


if __name__ == "__main__":
    main()
