"""Error messages: one printable line, whatever they quote."""

import pytest

from vitascope.errors import UserError, check_choice, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2Jfine", r"\x1b[2Jfine"),
        ("a\nb\tc\u2028d", "a b c d"),
        ("photo\u202egpj.exe", r"photo\u202egpj.exe"),
        ("caf\udce9", r"caf\udce9"),
        ("\x9b31mred\x7f", r"\x9b31mred\x7f"),
        ("Ähre 麦穗\u3000سنبله می\u200cرود", "Ähre 麦穗\u3000سنبله می\u200cرود"),
    ],
)
def test_control_characters_are_escaped_and_other_scripts_are_kept(text: str, shown: str) -> None:
    assert printable(text) == shown


@pytest.mark.parametrize("character", ["a", "\x1b", "\u202e", "\n"])
def test_long_text_keeps_its_ends(character: str) -> None:
    text = printable("weights.pth: " + character * 2_000_000 + "; give another", limit=300)
    assert text.startswith("weights.pth: ")
    assert text.endswith("; give another")
    assert len(text) <= 300


def test_messages_of_errors_are_printable() -> None:
    with pytest.raises(UserError) as caught:
        check_choice("format", "\x1b\u202e" * 1_000_000, ["timm", "jax"])
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) <= 1500
    assert message.endswith("it is one of timm, jax")
