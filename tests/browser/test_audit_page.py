"""The page of an audit in a browser: decisions by keys and by mouse, and the file that it downloads."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.browser import Visit, needs_browser, visiting
from tests.data import write_tree
from vitascope.analysis.auditing.page import write_audit_page
from vitascope.data.contents import content_of
from vitascope.data.datasets import read_data
from vitascope.data.decisions import Decisions
from vitascope.data.finding import Finding
from vitascope.data.targets import ClassSets

pytestmark = needs_browser

CAT, DOG = "cat", '<b>"dog", é;'
FINDINGS = [
    Finding("near-duplicate", 0.9, "equal", 0, 4, drop=True),
    Finding("label", 0.9, "a dog", 1, label=DOG),
    *(Finding("dark", 1 - n / 10, "dark", n) for n in range(4)),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`0 cat/000.png` to `0 cat/003.png` are the images 0 to 3, those of the dogs 4 to 7."""
    return write_tree(tmp_path_factory.mktemp("audit") / "data", {CAT: 4, DOG: 4})


@pytest.fixture
def visit(root: Path, browser: Any, request: pytest.FixtureRequest) -> Iterator[Visit]:
    images = read_data(str(root)).by_name["all"]
    assert images.class_names == (DOG, CAT)  # so that the dogs come first
    images = images.subset("all", np.array([4, 5, 6, 7, 0, 1, 2, 3]))
    if getattr(request, "param", "") == "several":
        members = images.truth.members
        images = type(images)("all", images.sources, ClassSets(members, images.class_names))
    path, parts, images = root.parent / "audit.html", ["train"] * 6 + ["val"] * 2, images.identified()
    write_audit_page(path, "Audit", FINDINGS, [], images=images, parts=parts, root=root)
    with visiting(browser, path.as_uri(), offline=True) as visit:
        yield visit
        assert visit.faults == []


@pytest.fixture
def download(visit: Visit, root: Path) -> Callable[[], dict[str, tuple[str, str]]]:
    """Download the decisions, and read them, by the names of images whose content is right."""

    def downloaded() -> dict[str, tuple[str, str]]:
        with visit.page.expect_download() as download:
            visit.page.locator("#download").click()
        assert download.value.suggested_filename == "decisions.csv"
        path = root.parent / "decisions.csv"
        download.value.save_as(path)
        decisions = Decisions.read(str(path)).by_image
        assert all(content == content_of(root / name).decode() for name, content in decisions)
        return {name: decision for (name, _), decision in decisions.items()}

    return downloaded


def focused(visit: Visit) -> str:
    return str(visit.page.evaluate("document.activeElement.dataset.image ?? document.activeElement.tagName"))


def test_keys_alone_decide_on_everything(visit: Visit, download: Callable[[], Any]) -> None:
    visit.press("ArrowRight")
    assert focused(visit) == "0"  # the first key only shows where one is
    visit.press("ArrowRight")
    assert focused(visit) == "4"
    visit.press("k", "p", "p", "d", "n")  # image 4, then 0
    assert focused(visit) == "1"
    visit.press("r", "Enter", "ArrowRight", "k", "D", "k")  # 1 by its suggestion; 1, 2 and 3 in the dark
    assert visit.text("#decided") == "5 decided: keep 3, drop 2, relabel 0"
    visit.press("u", "u", "u")
    assert focused(visit) == "1"
    assert visit.text("#decided") == "3 decided: keep 1, drop 1, relabel 1"
    expected = {"cat/000.png": ("drop", ""), f"{DOG}/000.png": ("keep", ""), "cat/001.png": ("relabel", DOG)}
    assert download() == expected


def test_mouse_decides_and_takes_back(visit: Visit, download: Callable[[], Any]) -> None:
    pictures = visit.page.locator("[data-image]")
    pictures.nth(0).get_by_role("button", name="Drop").click()
    pictures.nth(1).get_by_role("button", name="Keep").click()
    pictures.nth(1).get_by_role("button", name="Keep").click()
    pictures.nth(5).get_by_role("button", name="Relabel").click()
    pictures.nth(5).get_by_label("new label").select_option(DOG)
    assert download() == {"cat/000.png": ("drop", ""), "cat/002.png": ("relabel", DOG)}
    visit.page.locator("#undo").click()
    assert download() == {"cat/000.png": ("drop", "")}


def test_image_has_its_decision_wherever_it_is_shown(visit: Visit) -> None:
    visit.page.locator("#dark [data-image='1']").get_by_role("button", name="Drop").click()
    assert visit.page.locator("[data-image='1'] .state").all_text_contents() == ["drop", "drop"]
    assert visit.page.locator("#label [aria-pressed=true]").all_text_contents() == ["Drop"]


def test_suggestions_are_accepted_from_a_score_and_taken_back_at_once(
    visit: Visit, download: Callable[[], Any]
) -> None:
    for section in ("near-duplicate", "label"):
        visit.page.locator(f"#{section} .accept button").click()
    assert visit.text("#decided") == "2 decided: keep 0, drop 1, relabel 1"
    visit.press("u")
    assert download() == {"cat/000.png": ("drop", "")}
    visit.page.locator("#undo").click()
    visit.page.locator("#label .accept input").fill("0.95")
    visit.page.locator("#label .accept button").click()
    assert visit.text("#decided").startswith("0 decided")


def test_browser_that_stores_nothing_is_mentioned(visit: Visit, download: Callable[[], Any]) -> None:
    visit.page.evaluate("() => { Storage.prototype.setItem = () => { throw new Error('full') } }")
    visit.press("n", "k")
    assert "This browser does not store the decisions" in visit.text("#decided")
    assert download() == {"cat/000.png": ("keep", "")}


def test_decisions_survive_a_reload(visit: Visit, download: Callable[[], Any]) -> None:
    one_dropped = "1 decided: keep 0, drop 1, relabel 0"
    visit.press("n", "d")
    assert visit.text("#decided") == one_dropped
    for _ in range(20):  # a busy browser stores later; a reload stores nothing
        visit.page.reload()
        if visit.text("#decided") == one_dropped:
            break
        visit.page.wait_for_timeout(500)
    assert visit.text("#decided") == one_dropped
    assert download() == {"cat/000.png": ("drop", "")}


@pytest.mark.parametrize("visit", ["several"], indirect=True)
def test_image_of_several_labels_gets_several(visit: Visit, download: Callable[[], Any]) -> None:
    picture = visit.page.locator("#dark [data-image='2']")
    picture.get_by_role("button", name="Relabel").click()
    picture.get_by_label("new label").select_option([CAT, DOG])
    assert download() == {"cat/002.png": ("relabel", f"{DOG};{CAT}")}


def test_page_fits_a_phone(visit: Visit) -> None:
    visit.page.set_viewport_size({"width": 390, "height": 800})
    assert visit.page.evaluate("document.documentElement.scrollWidth") == 390
    boxes = [button.bounding_box() for button in visit.page.locator(".choices button").all()]
    assert min(min(box["width"], box["height"]) for box in boxes) >= 24  # WCAG 2.2, 2.5.8
