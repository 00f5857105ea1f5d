"""The site of `make docs`: pages, anchors, the demo, the search, and nothing that comes from another host."""

import base64
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import vitascope
from tests.browser import needs_browser, visiting
from tests.deploy.page.test_document import Elements
from tests.test_cli import listed_options
from vitascope.cli import COMMANDS

ROOT = Path(__file__).parent.parent
[ADDRESS] = re.findall(r"^site_url: (https://\S+/)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)
FROM_ELSEWHERE = re.compile(
    r"""(?:<(?:script|img|iframe|source)[^>]*\ssrc|<link(?![^>]*"canonical")[^>]*\shref|url)[=(]["']?https?:"""
)
FIRST = {
    "--class-weights": "a[href*='commands/train.html?'][href$='#--class-weights']",
    "--samples": "a[href*='commands/page.html?'][href$='#--samples']",
    "--device": "a[href$='#--device']",
    "混淆矩阵": "a[href*='.zh.html?']",
}
"""What the search finds first."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site; its links and anchors are checked, and a broken one is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    paths = os.pathsep.join([str(ROOT / "src"), *sys.path])
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": paths}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_public_name_and_every_option_of_a_command_has_a_place(site: Path, capsys) -> None:
    for name in vitascope.__all__:
        text = (site / "reference" / f"{name}.html").read_text("utf-8")
        place = re.search(rf'id="vitascope[\w.]*\.{name}"', text)
        assert place, name
        (example,) = re.findall(r"<code>.*?</code>", text[: place.start()], re.DOTALL)
        assert re.search(rf"\bvs\.{name}\b", re.sub("<[^>]*>", "", example)), name
    for name in COMMANDS:
        text = (site / "commands" / f"{name}.html").read_text("utf-8")
        assert f"usage: vitascope {name}" in text
        options = listed_options([name, "--help-all"], capsys) - {"--help"}
        assert options <= set(re.findall('<h3 id="([^"]*)"', text)), name


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    pages = [*site.rglob("*.html"), *site.rglob("*.css")]
    assert len(pages) > 50
    for page in pages:
        found = FROM_ELSEWHERE.findall(page.read_text("utf-8"))
        assert not found, f"{page}: {found}"


def test_a_page_of_the_repository_links_to_pages_of_the_site(site: Path) -> None:
    start = (site / "index.html").read_text("utf-8")
    assert 'src="images/explorer.gif"' in start
    assert 'href="training.html"' in start
    assert not re.findall(rf'<a [^>]*href="{ADDRESS}', start)  # also those work from the disk
    assert "docs/" not in re.sub(r"<code.*?</code>", "", start, flags=re.DOTALL).replace("/docs/", "")


def test_demo_is_the_built_in_model_with_three_photographs_and_the_first_link(site: Path) -> None:
    text = (site / "demo" / "index.html").read_text("utf-8")
    page = Elements(text)
    data = json.loads("".join(page.scripts["model-data"]))
    assert [model["described"]["name"] for model in data["models"]] == ["cifar10"]
    assert [sample["title"].split()[0] for sample in data["samples"]] == ["horse", "cat", "dog"]
    assert len(base64.b64decode("".join(page.scripts["text/base64"]))) > 1e6
    assert "Drop a picture: nothing leaves this computer." in text
    assert "default-src 'none'" in text
    assert "<base" not in text
    links = {address for address in page.addresses if not address.startswith("data:")}
    assert "../cifar10.html" in links
    assert all((site / "demo" / link).is_file() for link in links)
    start = (site / "index.html").read_text("utf-8")
    assert re.findall(r'<a href="([^"]*)" class="md-tabs__link">', start)[0] == "demo/index.html"
    for name in ("README.md", "README.zh.md"):
        addresses = re.findall(
            r"https?://[^\s()<>\"']*/demo\b[^\s()<>\"']*", (ROOT / name).read_text("utf-8")
        )
        assert {*addresses} == {f"{ADDRESS}demo/index.html"}, name


def test_llms_txt_has_every_page(site: Path) -> None:
    text = (site / "llms.txt").read_text("utf-8")
    assert re.match(r"# vitascope\n\n> .+\n\n.*\n\n## Start\n\n- \[", text)
    pages = {page.relative_to(site).as_posix() for page in site.rglob("*.html")} - {"404.html"}
    assert set(re.findall(rf"^- \[.+\]\({ADDRESS}(\S+)\): .", text, re.MULTILINE)) == pages


def test_chinese_words_are_in_the_index_of_the_search(site: Path) -> None:
    index: dict[str, Any] = json.loads((site / "search" / "search_index.json").read_text("utf-8"))
    text = " ".join(entry["title"] + " " + entry["text"] for entry in index["docs"])
    words = set(re.split(index["config"]["separator"], text))
    assert words >= {"混淆", "矩阵", "类别", "权重", "训练", "导出"}


@needs_browser
def test_search_finds_options_and_chinese_words_from_the_disk(site: Path, browser: Any) -> None:
    with visiting(browser, (site / "index.html").as_uri(), offline=True) as visit:
        for question, link in FIRST.items():
            visit.page.fill(".md-search__input", question)
            visit.press("Shift")
            visit.page.locator(f".md-search-result__item:first-child {link}").first.wait_for(state="attached")
        assert visit.faults == []
