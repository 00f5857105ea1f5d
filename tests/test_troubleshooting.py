"""The headings of docs/troubleshooting.md are messages of the source, with capitals for what varies."""

import ast
import re

from tests.test_architecture import FILES, ROOT, nodes_of

PAGE = ROOT.parent.parent / "docs" / "troubleshooting.md"
VALUE = "\0"


def in_words(node: ast.AST) -> str:
    """A text of the source with a `VALUE` for each value; `counted(n, "image")` is VALUE images."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(map(in_words, parts))
        case ast.FormattedValue(value=ast.Call(func=ast.Name("counted"), args=[_, ast.Constant(str(noun))])):
            return f"{VALUE} {noun}s"
    return VALUE


def is_message(heading: str, messages: list[str]) -> bool:
    """Whether one message begins with a heading, also after `PLACE: `; of `A ... B`, whether two begin so."""
    parts = [
        rf"'?(?:{re.escape(part)}|{VALUE}+)'?"
        if number % 2
        else re.sub("([;:,])", rf"{VALUE}*\1", re.escape(part))
        for number, part in enumerate(re.split(r"'?([A-Z]{2,}|\bN\b)'?", heading))
    ]
    begins = re.compile(f"(?:{''.join(parts)})(?!\\w)")
    return any(map(begins.match, messages))


def test_headings_are_messages_of_the_source() -> None:
    texts = {in_words(node) for path in FILES for node in nodes_of(path)}
    messages = sorted(text for text in texts if text.strip(VALUE))
    headings = re.findall(r"^### `(.*)`$", PAGE.read_text("utf-8"), re.MULTILINE)
    assert len(headings) == len(set(headings)) >= 40
    for heading in headings:
        said = re.sub(r"^[A-Z]+: ", "", heading)
        for part in said.split(" ... "):
            assert is_message(part, messages) or is_message(heading, messages), heading
            word = max(re.findall("[a-z]+", part), key=len)
            assert not is_message(part.replace(word, word[::-1]), messages), f"{heading}: any words match"
