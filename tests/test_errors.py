"""Error messages: one printable line, whatever they quote."""

from pathlib import Path

import pytest

from vitascope import errors
from vitascope.errors import UserError, check_choice, nearest_path, printable, suggestion
from vitascope.models.config import OPTIONS
from vitascope.training.options.recipes import GROUP_OF


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


@pytest.mark.parametrize(
    ("name", "known", "found"),
    [
        ("--learning-rate", ["--layer-decay", "--lr"], "--lr"),
        ("--learning_rate", ["--layer-decay", "--lr"], "--lr"),
        ("learning_rate", ["layer_decay", "lr"], "lr"),
        ("--batch", ["--patch-size", "--batch-size"], "--batch-size"),
        ("bs", GROUP_OF, "batch_size"),
        ("wd", GROUP_OF, "weight_decay"),
        ("n_epochs", GROUP_OF, "epochs"),
        ("num_epochs", ["warmup_epochs", "epochs"], "epochs"),
        ("arch", GROUP_OF, "model"),
        ("img_size", GROUP_OF, "image_size"),
        ("dataset", GROUP_OF, "data"),
        ("output", ["out", "seed"], "out"),
        ("output", ["run", "seed"], "run"),
        ("hidden_size", OPTIONS, "embed_dim"),
        ("epoch", GROUP_OF, "epochs"),
    ],
)
def test_usual_names_of_the_field_lead_to_ours(name: str, known: list[str], found: str) -> None:
    assert suggestion(name, known) == f"; nearest: {found}"


def test_name_that_means_nothing_known_has_no_nearest() -> None:
    assert suggestion("learning_rate", ["depth", "top_k"]) == ""
    assert suggestion("qqq", GROUP_OF) == ""


def test_synonyms_are_of_options_that_exist_and_no_options_themselves() -> None:
    ours = {*GROUP_OF, *OPTIONS, "out", "top_k"}  # the last two: of other commands than train
    assert errors._SYNONYMS.keys() <= ours
    assert not {name for theirs in errors._SYNONYMS.values() for name in theirs.split()} & set(GROUP_OF)


def test_a_number_resembles_no_other_and_a_path_may_differ_in_the_unicode_form(tmp_path: Path) -> None:
    assert suggestion("360", ["0", "30", "36"]) == ""
    (tmp_path / "e\u0301").mkdir()
    (tmp_path / "e\u0301" / "photos.csv").touch()
    assert nearest_path(f"{tmp_path}/\u00e9/photos.csv").endswith("photos.csv, in another Unicode form")
    assert nearest_path(f"{tmp_path}/\u00e9/photo.csv").endswith("e\u0301/photos.csv")
