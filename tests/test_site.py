"""The site of `make docs`: every name and command has its page, and nothing comes from another host."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import vitascope
from vitascope.cli import COMMANDS

ROOT = Path(__file__).parent.parent
FROM_ELSEWHERE = re.compile(
    r"""(?:<(?:script|img|iframe|source)[^>]*\ssrc|<link[^>]*\shref|url)[=(]["']?https?:"""
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site; its links and anchors are checked, and a broken one is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_public_name_and_every_command_has_a_page(site: Path) -> None:
    for name in vitascope.__all__:
        text = (site / "reference" / f"{name}.html").read_text("utf-8")
        place = re.search(rf'id="vitascope[\w.]*\.{name}"', text)
        assert place, name
        (example,) = re.findall(r"<code>.*?</code>", text[: place.start()], re.DOTALL)
        assert re.search(rf"\bvs\.{name}\b", re.sub("<[^>]*>", "", example)), name
    for name in COMMANDS:
        assert f"usage: vitascope {name}" in (site / "commands" / f"{name}.html").read_text("utf-8")


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    pages = [*site.rglob("*.html"), *site.rglob("*.css")]
    assert len(pages) > 50
    for page in pages:
        found = FROM_ELSEWHERE.findall(page.read_text("utf-8"))
        assert not found, f"{page}: {found}"


def test_a_page_of_the_repository_links_to_pages_of_the_site(site: Path) -> None:
    start = (site / "index.html").read_text("utf-8")
    assert 'href="training.html"' in start
    assert 'src="images/explorer.gif"' in start
    assert "docs/" not in re.sub(r"<code.*?</code>", "", start, flags=re.DOTALL).replace("/docs/", "")
