"""The Chinese pages say what the English ones do: headings, tables, numbers, commands, code, links, pictures.

A page and its translation are compared section by section, so that a failure names the heading.
"""

import ast
import functools
import io
import re
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from benchmarks.chinese import in_chinese

from tests.test_walkthrough import HAN, stated_shapes

ROOT = Path(__file__).parent.parent
CHINESE_PAGES = [ROOT / "README.zh.md", *sorted((ROOT / "docs").rglob("*.zh.md"))]
WITH_CHINESE_PICTURES = [ROOT / "README.zh.md", ROOT / "docs" / "walkthrough.zh.md"]
"""Pages whose pictures, or the reader's, have Chinese letters."""
FENCED = re.compile(r"^```(\w*)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?<=\n\n)(?: {4}.*\n)+")
"""Code without a fence."""
NUMBER = re.compile(r"[-+−±]?\d+(?:[.,]\d+)*%?")
LINK = re.compile(r"\]\(([^)]+)\)")
MARKED = re.compile(r"<!-- (\w+) -->\n(.*?)<!-- /\1 -->", re.DOTALL)

each_page = pytest.mark.parametrize(
    "page", CHINESE_PAGES, ids=lambda page: str(page.relative_to(ROOT)).removesuffix(".zh.md")
)


def original(page: Path) -> Path:
    """The English page of a Chinese one."""
    return page.with_name(page.name.replace(".zh.md", ".md"))


def translation(page: Path) -> Path:
    """The Chinese page, or notebook, of an English one."""
    return page.with_suffix(f".zh{page.suffix}")


@functools.cache
def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return INDENTED.sub("", FENCED.sub("", text_of(page)))


def numbers_in(text: str) -> list[str]:
    """The numbers of a text, alike in both languages: 1.00 M and 1.3 million are 100 万 and 130 万, 14 to 300
    million are 1,400 万到 3 亿, 2 points are 2 个百分点 or 2%."""
    text = re.sub(r"([\d.]+) to (?=[\d.]+ million)", r"\1 million to ", text)
    for pattern, size in ((r" (?:M\b|million)", 1e6), (r" 万", 1e4), (r" 亿", 1e8)):
        text = re.sub(
            rf"([\d.,]+){pattern}",
            lambda found, size=size: f"{float(found[1].replace(',', '')) * size:.12g}",
            text,
        )
    return NUMBER.findall(re.sub(r"(\d)\s(?:points?\b|个百分点)", r"\1%", text))


def sections(page: Path) -> list[str]:
    """The sections of a page, each up to the next heading."""
    text = prose(page)
    starts = [heading.start() for heading in re.finditer(r"^#+ ", text, re.MULTILINE)]
    return [text[start:end] for start, end in pairwise([*starts, len(text)])]


def levels(page: Path) -> list[tuple[str, str]]:
    """The level of each heading, and its line."""
    return [(section.split(maxsplit=1)[0], section.splitlines()[0]) for section in sections(page)]


@each_page
def test_sections_have_the_headings_the_numbers_and_the_names_in_code_of_the_english_page(page: Path) -> None:
    """A sentence that was left out leaves out its numbers, or its options, files and functions."""
    english, chinese = levels(original(page)), levels(page)
    assert [level for level, _ in chinese] == [level for level, _ in english], (english, chinese)
    wrong = []
    for ours, theirs in zip(sections(original(page)), sections(page), strict=True):
        line = ours.splitlines()[0]
        numbers, translated = Counter(numbers_in(ours)), Counter(numbers_in(theirs))
        if numbers != translated:
            wrong.append(
                f"{line}: numbers {numbers - translated} are missing, {translated - numbers} are new"
            )
        names, more = (
            {" ".join(text.split()) for text in re.findall(r"`([^`]+)`", part)} for part in (ours, theirs)
        )
        if missing := names - more:
            wrong.append(f"{line}: missing {sorted(missing)}")
    assert not wrong, "\n".join(wrong)


def cells(page: Path) -> list[list[list[str]]]:
    """The numbers in each cell of each row of a page's tables."""
    rows = re.findall(r"^\|.*\|$", prose(page), re.MULTILINE)
    return [[sorted(numbers_in(cell)) for cell in row.replace("\\|", "").split("|")] for row in rows]


@each_page
def test_tables_have_the_rows_and_the_numbers_of_the_english_page(page: Path) -> None:
    assert cells(page) == cells(original(page))


def commands(page: Path) -> list[str]:
    """The lines of its shell blocks and of its indented code, without comments."""
    shell = "".join(text for kind, text in FENCED.findall(text_of(page)) if kind == "sh")
    lines = [*shell.replace("\\\n", " ").splitlines(), *"".join(INDENTED.findall(text_of(page))).splitlines()]
    return [" ".join(line.split(" #")[0].split()) for line in lines]


@each_page
def test_commands_are_those_of_the_english_page(page: Path) -> None:
    assert commands(page) == commands(original(page))


def block(page: Path, kind: str) -> list[str]:
    return [text for found, text in FENCED.findall(text_of(page)) if found == kind]


def without_docstrings(code: str) -> str:
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            del node.body[0]
    return ast.unparse(tree)


class Strings(ast.NodeTransformer):
    """Empties the strings of some code, and keeps them in `found`; values in f-strings stay in the code."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        if not isinstance(node.value, str):
            return node
        self.found.append(node.value)
        return ast.Constant("")

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.JoinedStr:
        parts = [part.value for part in node.values if isinstance(part, ast.Constant)]
        self.found.append("".join(map(str, parts)))
        return ast.JoinedStr(
            [self.visit(part) for part in node.values if isinstance(part, ast.FormattedValue)]
        )


def code_and_strings(code: str) -> tuple[str, list[str]]:
    """Some code with empty strings and without docstrings, and its strings."""
    strings = Strings()
    tree = strings.visit(ast.parse(without_docstrings(code)))
    return ast.unparse(tree), strings.found


@each_page
def test_code_is_that_of_the_english_page_apart_from_comments_and_words(page: Path) -> None:
    english, chinese = block(original(page), "python"), block(page, "python")
    translated = [code_and_strings(code) for code in chinese]
    for code in english:
        assert code_and_strings(code)[0] in [same for same, _ in translated], f"missing in Chinese:\n{code}"
    assert len(chinese) == len(english)
    for code, other in zip(english, chinese, strict=True):
        assert stated_shapes(other) == stated_shapes(code)
        words, others = (code_and_strings(text)[1] for text in (code, other))
        assert [
            word for word, same in zip(others, words, strict=True) if word != same and not HAN.search(word)
        ] == []


@each_page
def test_comments_in_code_are_chinese(page: Path) -> None:
    english = {comment for code in block(original(page), "python") for comment in comments(code)}
    of_words = [c for code in block(page, "python") for c in comments(code) if re.search(r"[a-z]{4}", c)]
    kept = [
        comment
        for comment in of_words
        if not HAN.search(comment) and not comment.startswith(("# [", "# fmt:"))
    ]
    assert [comment for comment in kept if comment in english] == []


def comments(code: str) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


@each_page
def test_output_trees_and_equations_are_those_of_the_english_page(page: Path) -> None:
    same: dict[str, Callable[[str], object]] = {
        "math": str,
        "text": numbers_in,
        "": lambda text: [line.split()[:1] for line in text.splitlines()],
    }
    for kind, key in same.items():
        assert list(map(key, block(page, kind))) == list(map(key, block(original(page), kind)))


@each_page
def test_generated_sections_are_the_translations_of_the_english_ones(page: Path) -> None:
    english, chinese = (dict(MARKED.findall(text_of(each))) for each in (original(page), page))
    assert chinese == {marker: in_chinese(section) for marker, section in english.items()}


def anchors(page: Path) -> list[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def in_translation(page: Path, target: str) -> str:
    """Where a Chinese page leads to when the English `page` leads to `target`."""
    path, _, anchor = target.partition("#")
    linked = page.parent / path if path else page
    if linked == translation(page):
        return page.name
    chinese = translation(linked)
    if not chinese.is_file():
        return target if not path.startswith("images/walkthrough/") else target.replace("h/", "h.zh/", 1)
    ours, theirs = anchors(linked), anchors(chinese)
    assert len(ours) == len(theirs), f"{chinese.name} has other headings than {linked.name}"
    found = theirs[ours.index(anchor)] if anchor else ""
    return f"{translation(Path(path)) if path else ''}{found and '#'}{found}"


@each_page
def test_links_and_pictures_are_those_of_the_english_page(page: Path) -> None:
    english = [in_translation(original(page), target) for target in LINK.findall(prose(original(page)))]
    missing, more = (Counter(english), Counter(LINK.findall(prose(page))))
    assert sorted((missing - more).elements()) == [], "missing in the Chinese page"
    assert sorted((more - missing).elements()) == [], "only in the Chinese page"


@each_page
def test_each_language_leads_to_the_other_at_the_top(page: Path) -> None:
    ours, theirs = original(page), page
    assert text_of(ours).splitlines()[2] == f"[中文]({theirs.name})"
    assert text_of(theirs).splitlines()[2].startswith(f"[English]({ours.name})")


UNIDIOMATIC = (
    r"在笔记本中",  # a notebook of paper, or a laptop
    r"类别(?:令牌|标记)|寄存器令牌|标记序列",  # class token, register token and token stay English
    r"\d M\b(?! parameters)",  # 100 万
    r"可以是一次运行|一次运行的",  # of a run folder
    r"长度由.{0,4}机器|最多增加 1%",
    r"期限和限额|混淆情况|看清内部|无状态的顺序|最有把握的错误|没有谁再读|得到回报",
    r"编码器块|token 的长度|预测头",  # 层, 模长, 分类头
    r"并排拼|注意力的“?表|份额|没有梯度可学|无声的错误|一个数也不变|亲手|快到",
    r"的全部内容，一共|都是同一个样子|哪个被认成|不下降$",
)
"""Word-by-word translations that Chinese engineers do not use."""


@each_page
def test_there_are_no_word_by_word_translations(page: Path) -> None:
    assert re.findall("|".join(UNIDIOMATIC), text_of(page), re.MULTILINE) == []


@each_page
def test_alternative_texts_of_pictures_are_chinese(page: Path) -> None:
    texts = re.findall(r"!\[([^\]]*)\]", text_of(page))
    assert [text for text in texts if not HAN.search(text)] == []


@pytest.mark.parametrize("page", WITH_CHINESE_PICTURES, ids=lambda page: page.name)
def test_fonts_of_chinese_pictures_are_named(page: Path) -> None:
    assert "fonts-noto-cjk" in text_of(page)


def test_numbers_are_alike_in_both_languages() -> None:
    for english, chinese in (
        ("1.00 M parameters, 14 to 300 million images", "100 万参数，1,400 万到 3 亿张图像"),
        ("at most 1%, 2.5 points", "不超过 1 个百分点，2.5 个百分点"),
    ):
        assert numbers_in(english) == numbers_in(chinese)
