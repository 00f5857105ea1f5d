"""The walkthrough in both languages: its code runs, its shapes are right, and the languages agree.

This makes its pictures and outputs again:

    python -m tests.test_walkthrough
"""

import ast
import contextlib
import io
import itertools
import re
import shutil
import tempfile
import tokenize
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.explain.figures import coarse
from vitascope.data.decoding import read_image

DOCS = Path(__file__).parent.parent / "docs"
ENGLISH, CHINESE = DOCS / "walkthrough.md", DOCS / "walkthrough.zh.md"
PAGES = (ENGLISH, CHINESE)
PICTURES = DOCS / "images" / "walkthrough"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHAPE = re.compile(r"# (?:each )?(\((?:\d+|K)(?:, (?:\d+|K))*,?\))")
OUTPUT = re.compile(r"^```text\n.*?^```", re.MULTILINE | re.DOTALL)
MAX_BYTES = 80_000


def blocks(page: Path, *kinds: str) -> list[str]:
    return [text for kind, text in BLOCK.findall(page.read_text(encoding="utf-8")) if kind in kinds]


def stated_shapes(code: str) -> dict[int, str]:
    """The shapes that comments state, by line."""
    tokens = tokenize.generate_tokens(io.StringIO(code).readline)
    found = ((token.start[0], SHAPE.match(token.string)) for token in tokens)
    return {line: match[1] for line, match in found if match}


def run_page(page: Path) -> list[str]:
    """Run a page's Python in the current folder, and check every stated shape.

    Returns:
        The output of each block that prints.
    """
    names: dict[str, Any] = {}
    printed = []
    for code in blocks(page, "python"):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            run_block(code, page.name, names)
        if out.getvalue():
            printed.append(out.getvalue())
    return printed


def run_block(code: str, name: str, names: dict[str, Any]) -> None:
    """Run a block in a namespace, and check the tensors and lists of tensors that it assigns."""
    stated = stated_shapes(code)
    for statement in ast.parse(code).body:
        exec(compile(ast.Module([statement], []), name, "exec"), names)  # noqa: S102 - our own page
        shape = stated.pop(statement.end_lineno or 0, None)
        if shape is not None:
            assert isinstance(statement, ast.Assign), f"{ast.unparse(statement)} has no shape to state"
            wanted = shape.replace("K", str(names["model"].config.num_classes)) if "K" in shape else shape
            assigned = ast.walk(statement.targets[0])
            for variable in (node.id for node in assigned if isinstance(node, ast.Name)):
                made = names[variable] if isinstance(names[variable], list) else [names[variable]]
                actual = [str(tuple(tensor.shape)) for tensor in made]
                assert set(actual) == {wanted}, f"{name}: {variable} is {', '.join(actual)}, not {shape}"
    assert not stated, f"{name}: shapes that no top-level statement makes: {stated}"


def take_photos(folder: Path) -> None:
    """Twelve noise pictures of each of two classes of different brightness: `folder/cat/001.jpg` and on."""
    noise = np.random.default_rng(0)
    for name, level in (("cat", 90), ("dog", 170)):
        (folder / name).mkdir(parents=True)
        for number in range(1, 13):
            pixels = np.clip(noise.normal(level, 25, (24, 32, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number:03}.jpg")


def without_numbers(text: str) -> str:
    return re.sub(r"\d+(\.\d+)?", "#", text)


def test_code_runs_prints_what_the_page_shows_and_every_shape_is_the_stated_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The English page; tests below compare the Chinese one's code, shapes and pictures with it."""
    monkeypatch.chdir(tmp_path)
    with coarse():
        printed = run_page(ENGLISH)
    assert list(map(without_numbers, printed)) == list(map(without_numbers, blocks(ENGLISH, "text")))
    drawn = {path.name for path in Path("walkthrough").iterdir()}
    assert drawn == {path.name for path in PICTURES.iterdir()} == set(pictures(ENGLISH))


def test_a_wrong_shape_is_found() -> None:
    with pytest.raises(AssertionError, match=r"rows is \(3, 2\), not \(2, 3\)"):
        run_block("import torch\nrows = torch.zeros(3, 2)  # (2, 3)\n", "page", {})
    with pytest.raises(AssertionError, match="no top-level statement"):
        run_block("for _ in range(2):\n    rows = 3  # (2, 3)\n    rows = 4\n", "page", {})


def pictures(page: Path) -> list[str]:
    return re.findall(r"\]\(images/walkthrough/([^)]+)\)", page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("picture", sorted(PICTURES.glob("*.png")), ids=lambda path: path.name)
def test_pictures_are_small(picture: Path) -> None:
    assert picture.stat().st_size <= MAX_BYTES
    assert 600 <= read_image(picture).width <= 1100


def without_docstrings(code: str) -> str:
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            del node.body[0]
    return ast.unparse(tree)


def test_both_languages_have_the_same_code() -> None:
    english, chinese = (blocks(page, "python") for page in PAGES)
    assert list(map(without_docstrings, chinese)) == list(map(without_docstrings, english))
    assert list(map(stated_shapes, chinese)) == list(map(stated_shapes, english))


@pytest.mark.parametrize("kind", ["math", "text"])
def test_both_languages_have_the_same_equations_and_outputs(kind: str) -> None:
    assert blocks(CHINESE, kind) == blocks(ENGLISH, kind)


def test_both_languages_have_the_same_parts() -> None:
    english, chinese = (page.read_text(encoding="utf-8") for page in PAGES)
    for part in (r"^#+ (?:\d\.)?", r"^```\w*$", r"^!\[", r"^\|.*\|$"):
        count = [len(re.findall(part, text, re.MULTILINE)) for text in (english, chinese)]
        assert count[0] == count[1] > 0, part
    assert pictures(CHINESE) == pictures(ENGLISH)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_within_a_page_lead_to_its_headings(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    links = set(re.findall(r"\]\(#([^)]+)\)", text))
    assert links
    assert links <= anchors


def redraw() -> None:
    """Make the pictures and outputs of both pages."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        printed = run_page(ENGLISH)
        shutil.rmtree(PICTURES, ignore_errors=True)
        shutil.copytree("walkthrough", PICTURES)
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        pieces = zip(OUTPUT.split(text), [*(f"```text\n{output}```" for output in printed), ""], strict=True)
        text = "".join(itertools.chain.from_iterable(pieces))
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    redraw()
