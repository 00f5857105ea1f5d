"""Every command and snippet of the README and the docs is run, in the order in which a reader meets them."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitascope.cli import main

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    return [text for kind, text in BLOCK.findall(page.read_text(encoding="utf-8")) if kind == language]


@pytest.fixture(scope="module")
def readers_folder(tmp_path_factory) -> Path:
    """Where a reader of the docs stands: a folder with photos of two classes."""
    folder = tmp_path_factory.mktemp("reader")
    noise = np.random.default_rng(0)
    for name, level in (("cat", 90), ("dog", 170)):
        (folder / "photos" / name).mkdir(parents=True)
        for number in range(1, 13):
            pixels = np.clip(noise.normal(level, 25, (24, 32, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / "photos" / name / f"{number:03}.jpg")
    return folder


def test_readme_runs_from_top_to_bottom(readers_folder, monkeypatch, capsys) -> None:
    monkeypatch.chdir(readers_folder)
    ran = []
    for kind, text in BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8")):
        if kind == "python":
            exec(compile(text, "README.md", "exec"), {})  # noqa: S102 - our own page
            ran.append("python")
        for line in text.splitlines() if kind == "sh" else []:
            program, *arguments = shlex.split(line, comments=True)
            if program == "make":
                continue
            assert program == "vitascope", f"no way to run {line!r}"
            if arguments[:2] == ["train", "--resume"]:  # a reader's run was stopped; this one has finished
                assert main(arguments) == 2
                assert "has finished" in capsys.readouterr().err
                continue
            assert main(arguments) == 0, line
            ran.append(arguments[0])
            if arguments == ["train"]:
                assert_the_digits_are_learned(capsys.readouterr().out)
    assert {"train", "evaluate", "predict", "explain", "convert", "models", "python"} <= set(ran)
    assert (readers_folder / "cat.png").is_file()
    assert (readers_folder / "001-attention.png").is_file()


def assert_the_digits_are_learned(out: str) -> None:
    ours, svc = (
        float(share) for share in re.findall(r"^(?:test)? +([\d.]+)% (?:right|scikit)", out, re.MULTILINE)
    )
    assert ours >= 98.5
    assert ours > svc
    paths = re.findall(r"^figure (.*)$", out, re.MULTILINE)
    assert paths
    assert all(Path(path).is_file() for path in paths)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_make_target_that_is_named_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = " ".join([*blocks(page, "sh"), *re.findall(r"`([^`\n]+)`", text)])
    assert set(re.findall(r"\bmake (\w+)", commands)) <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_is_linked_exists(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: page.name)
def test_no_other_page_has_commands_of_ours_that_nobody_runs(page: Path) -> None:
    assert not blocks(page, "python")
    assert not [line for text in blocks(page, "sh") for line in text.splitlines() if "vitascope " in line]
