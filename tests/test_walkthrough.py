"""The walkthrough in both languages: its code runs, its shapes are right, and the languages agree.

`python docs/learn/notebooks.py` makes its pictures, outputs and notebooks again.
"""

import ast
import contextlib
import dataclasses
import functools
import io
import re
import tempfile
import tokenize
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import vitascope as vs
from tests.analysis.explain.figures import coarse, texts
from vitascope.analysis.explain import plots
from vitascope.models.decoding import read_image

DOCS = Path(__file__).parent.parent / "docs"
ENGLISH, CHINESE = DOCS / "walkthrough.md", DOCS / "walkthrough.zh.md"
PAGES = (ENGLISH, CHINESE)
PICTURES = {page: DOCS / "images" / page.stem for page in PAGES}
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHAPE = re.compile(r"# (?:each |各为 )?(\((?:\d+|K)(?:, (?:\d+|K))*,?\))")
MAX_BYTES = 80_000
HAN = re.compile(r"[\u4e00-\u9fff]")
"""A Chinese character."""
KEPT_IN_ENGLISH = {"token", "rollout", "MLP", "z0"}
"""Terms that have no usual translation, and names in the code."""


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


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a page's code has made."""

    printed: list[str]
    drawn: set[str]
    """Names of files."""
    shown: list[str]
    """The words in each picture."""


@functools.cache
def outcome(page: Path) -> Outcome:
    """Run a page's code, once for all tests."""
    shown: list[str] = []

    def save_figure(figure: Any, path: Path) -> Path:
        shown.append(texts(figure))
        return original(figure, path)

    original = plots.save_figure
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), coarse():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plots, "save_figure", save_figure)
            printed = run_page(page)
        return Outcome(printed, {path.name for path in Path("walkthrough").iterdir()}, shown)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_runs_prints_what_the_page_shows_and_every_shape_is_the_stated_one(page: Path) -> None:
    made = outcome(page)
    assert list(map(without_numbers, made.printed)) == list(map(without_numbers, blocks(page, "text")))
    assert made.drawn == {path.name for path in PICTURES[page].iterdir()} == set(pictures(page))


def test_words_in_the_chinese_pictures_are_chinese() -> None:
    shown = outcome(CHINESE).shown
    assert len(shown) == len(pictures(CHINESE))
    assert all(map(HAN.search, shown))
    assert set(re.findall(r"[A-Za-z]\w+", "\n".join(shown))) <= KEPT_IN_ENGLISH


def test_classes_in_the_pictures_have_their_chinese_names_on_the_page() -> None:
    (sentence,) = re.findall(r"英文标签：(.*?)。", CHINESE.read_text(encoding="utf-8"), re.DOTALL)
    names = dict(name.split() for name in sentence.split("、"))
    assert tuple(names) == vs.from_pretrained("cifar10").config.class_names
    assert all(map(HAN.match, names.values()))


def test_a_wrong_shape_is_found() -> None:
    with pytest.raises(AssertionError, match=r"rows is \(3, 2\), not \(2, 3\)"):
        run_block("import torch\nrows = torch.zeros(3, 2)  # (2, 3)\n", "page", {})
    with pytest.raises(AssertionError, match="no top-level statement"):
        run_block("for _ in range(2):\n    rows = 3  # (2, 3)\n    rows = 4\n", "page", {})


def pictures(page: Path) -> list[str]:
    return re.findall(rf"\]\(images/{page.stem}/([^)]+)\)", page.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "picture",
    [picture for folder in PICTURES.values() for picture in sorted(folder.glob("*.png"))],
    ids=lambda path: f"{path.parent.name}/{path.name}",
)
def test_pictures_are_small(picture: Path) -> None:
    assert picture.stat().st_size <= MAX_BYTES
    assert 600 <= read_image(picture).width <= 1100


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_within_a_page_lead_to_its_headings(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    links = set(re.findall(r"\]\(#([^)]+)\)", text))
    assert links
    assert links <= anchors
