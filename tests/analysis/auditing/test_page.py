"""The page of an audit: its sections, cards and pictures."""

import base64
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data import noise, write_picture, write_tree
from vitascope.analysis.auditing import page as module
from vitascope.analysis.auditing.page import write_audit_page
from vitascope.analysis.auditing.planted import Planted
from vitascope.data.contents import content_of
from vitascope.data.datasets import read_data
from vitascope.data.finding import Finding
from vitascope.data.splits import ImageSet
from vitascope.data.targets import ClassSets


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_tree(tmp_path / "data", {"cat": 3, "dog": 3})


def written(
    root: Path,
    findings: Sequence[Finding],
    images: ImageSet | None = None,
    planted: Sequence[Planted] = (),
    title: str = "Audit",
) -> str:
    images = (read_data(str(root)).by_name["all"] if images is None else images).identified()
    path, parts = root.parent / "audit.html", ["train"] * len(images)
    write_audit_page(path, title, findings, planted, images=images, parts=parts, root=root)
    return path.read_text(encoding="utf-8")


def dark(*scores: float) -> list[Finding]:
    return [Finding("dark", score, f"no {number}", number) for number, score in enumerate(scores)]


def attributes(text: str, name: str) -> list[str]:
    return re.findall(rf' data-{name}="([^"]*)"', text)


def thumbnails(text: str) -> list[Image.Image]:
    contents = re.findall(r'<img src="data:image/\w+;base64,([^"]+)"', text)
    return [Image.open(io.BytesIO(base64.b64decode(content))) for content in contents]


def test_page_has_a_section_of_each_issue_that_was_found_or_planted(root: Path) -> None:
    planted = [Planted("dark", 10, 9, 12), Planted("grey", 10, 8, 8)]
    text = written(root, [*dark(0.5, 0.4), Finding("copy", 0.9, "", 2, 0)], planted=planted)
    anchors = re.findall(r'<section id="([\w-]+)"', text)
    assert anchors == ["copy", "dark", "grey"]
    assert anchors == re.findall(r'<a href="#([\w-]+)">', text)
    assert all(f"<p>{each}</p>" in text for each in planted)
    assert text.count("Nothing found.") == 1
    assert attributes(text, "image") == ["2", "0", "0", "1"]
    assert attributes(text, "name")[0] == "cat/002.png"
    assert attributes(text, "content")[0] == content_of(root / "cat/002.png").decode()
    assert re.findall(r"<b>(\d)</b><span>images?", text) == ["6", "3"]


def test_check_that_notices_little_has_no_list(root: Path) -> None:
    text = written(root, dark(0.9), planted=[Planted("dark", 10, 1, 2)])
    assert (
        "its findings are in audit.csv alone. In a copy with planted faults, this check lists 1 of 10" in text
    )
    assert attributes(text, "image") == []


def test_page_asks_no_other_host(root: Path) -> None:
    text = written(root, dark(0.5))
    assert "://" not in text
    assert {reference[:11] for reference in re.findall(r'(?:src|href)="([^"]+)"', text)} == {
        "data:image/",
        "#dark",
    }


def test_many_findings_are_counted(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CARDS", 2)
    groups = [Finding("group", 0.4 - 0.1 * n, f"group {n}") for n in range(5)]
    text = written(root, [*dark(0.9, 0.5, 0.1), *groups])
    assert attributes(text, "image") == ["0", "1"]
    assert "The worst 2 of 3; the others are in audit.csv." in text
    assert re.findall(r"<li>(group \d) .*?score (.*?)\)", text) == [("group 0", "0.40"), ("group 1", "0.30")]


def test_pair_is_one_card_of_two_numbered_pictures(root: Path) -> None:
    text = written(root, [Finding("copy", 1.0, "equal", 4, 0, drop=True)])
    assert attributes(text, "image") == ["4", "0"]
    assert re.findall(r"<b>(\d: \w+)</b>", text) == ["1: dog", "2: cat"]
    assert ("Suggestion: drop 1" in text, text.count('class="card two"')) == (True, 1)


def test_suggested_label_is_of_the_first_picture_alone(root: Path) -> None:
    text = written(root, [Finding("near-duplicate", 0.8, "two labels", 4, 0, label="cat")])
    assert attributes(text, "suggested") == ["cat", ""]
    assert "Suggestion: cat" in text


def test_suggestions_are_accepted_together_from_a_score_on(root: Path) -> None:
    text = written(root, [*dark(0.9), Finding("copy", 0.7, "equal", 4, 0, drop=True)])
    assert attributes(text, "score") == ["0.7"]  # what has no suggestion is not accepted
    assert text.count('type="number"') == text.count(" data-accept>") == 1


def test_unreadable_image_has_a_placeholder(root: Path) -> None:
    (root / "cat" / "000.png").write_bytes(b"none")
    text = written(root, dark(0.9, 0.8))
    assert (text.count("cannot be read"), len(thumbnails(text))) == (1, 1)


def test_names_cannot_break_the_page(tmp_path: Path) -> None:
    name = '</script><img src=x onerror="alert(1)">'
    place = tmp_path / "data" / name.replace("/", "⁄") / "\udcff&.png"
    write_picture(place)
    images = ImageSet("all", [place, noise(4, 4)], ClassSets(np.eye(2, dtype=np.bool_), (name, "{count}")))
    text = written(tmp_path / "data", [Finding("label", 1.0, name, 0, label=name)], images, title=name)
    assert (text.count("<script"), text.count("</script"), len(re.findall("<img", text))) == (2, 2, 1)
    assert "\\udcff&amp;.png" in text
    words = re.search(r'<script type="application/json" id="words">(.*?)</script>', text)
    assert json.loads(words[1])["classes"] == [name, "{count}"]


def test_images_without_labels_are_not_relabelled(root: Path) -> None:
    images = read_data(str(root)).by_name["all"]
    text = written(root, dark(0.5), ImageSet("all", images.sources))
    assert attributes(text, "choice") == ["keep", "drop"]
    assert "<b>train</b>" in text


def test_pixels_without_a_file_are_named_by_their_copies(root: Path) -> None:
    images = ImageSet("all", [noise(4, 4), noise(5, 5), noise(4, 4)])
    assert attributes(written(root, dark(0.9, 0.8, 0.7), images), "name") == ["1", "1", "2"]


@pytest.mark.parametrize(("megabytes", "longest"), [(12, 192), (0.02, 100)])
def test_many_pictures_are_smaller(root: Path, monkeypatch, megabytes: float, longest: int) -> None:
    for number in range(3):
        Image.linear_gradient("L").resize((400, 300)).save(root / "cat" / f"00{number}.png")
    monkeypatch.setattr(module, "MEGABYTES", megabytes)
    small = thumbnails(written(root, dark(0.9, 0.8, 0.7) * 2))
    assert [picture.format for picture in small] == ["JPEG"] * 6
    assert longest // 2 < max(small[0].size) <= longest


def test_tiny_pictures_keep_their_pixels(root: Path) -> None:
    [thumbnail] = thumbnails(written(root, dark(0.5)))
    assert np.array_equal(np.asarray(thumbnail), np.asarray(Image.open(root / "cat" / "000.png")))


def test_page_is_in_the_readers_language(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    text = written(root, dark(0.5))
    assert ('lang="zh-CN"' in text, "下载 decisions.csv" in text, "Keep" in text) == (True, True, False)
