"""`vitascope label` as a whole: by keys alone from a folder without labels to a classifier of all of it."""

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.browser import PATIENCE, Visit, needs_browser, visiting
from tests.cli import colours
from vitascope.analysis.labelling.table import LabelTable
from vitascope.data.table_options import AS_RECOGNIZED
from vitascope.deploy.labelling.label import labelling, serve_session
from vitascope.models.engines.compute import Compute

pytestmark = [needs_browser, pytest.mark.usefixtures("own_cache")]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Pictures of three colours in one folder, with the colour in the name."""
    shades = {"red": (200, 40, 40), "blue": (40, 40, 200), "green": (40, 200, 40)}
    (tmp_path / "photos").mkdir()
    for place in colours(tmp_path / "sorted", shades, count=12).rglob("*.png"):
        place.rename(tmp_path / "photos" / f"{place.stem}_{place.parent.name}.png")
    return tmp_path / "photos"


def colour_of(name: str) -> str:
    return Path(name).stem.partition("_")[2]


def label_current(visit: Visit, named: list[str]) -> None:
    """Label the picture with the ring by its key, or by typing a new class; wait until it is saved."""
    # Not the last picture of a page, which has its label when the next page comes.
    current = visit.page.locator(
        ".card:has(.label[hidden]) .picture[aria-current=true] img[alt]:not([alt=''])"
    )
    current.wait_for(timeout=PATIENCE)
    colour, before = colour_of(current.get_attribute("alt")), visit.text("#count")
    if colour in named:
        visit.press(str(named.index(colour) + 1))
    else:
        if named:
            visit.press("n")
        visit.page.keyboard.type(colour)
        visit.press("Enter")
        named.append(colour)
    visit.page.locator("#count").filter(has_not_text=before).wait_for(timeout=PATIENCE)


def test_keys_lead_from_a_folder_without_labels_to_a_classifier(
    browser: Any, photos: Path, tmp_path: Path
) -> None:
    table = tmp_path / "labels.csv"
    compute = Compute(workers=0, device="cpu")
    with labelling(str(photos), table, several=False, port=0, table=AS_RECOGNIZED) as server:
        serving = threading.Thread(
            target=serve_session, args=(server, "cifar10", compute), kwargs={"in_browser": False}
        )
        serving.start()
        with visiting(browser, server.address) as visit:
            named: list[str] = []
            for _ in range(20):
                label_current(visit, named)
            visit.page.locator("#percent:visible").wait_for(timeout=PATIENCE)
            assert visit.text("#percent") == "100%"
            visit.press("u")
            visit.page.locator("#count").filter(has_text="19").wait_for(timeout=PATIENCE)
            assert visit.text("#command").endswith(f"--data {table}")
            assert visit.faults == []
        server.session.stop()
        serving.join()
        fit = server.session.fit
    labels = {Path(place).name: label.names[0] for place, label in LabelTable(table).labels.items()}
    assert len(labels) == 19
    assert all(colour_of(name) == label for name, label in labels.items())
    assert fit is not None
    assert fit.probabilities is not None
    answers = [server.session.class_names[k] for k in fit.probabilities.argmax(axis=1)]
    assert answers == list(map(colour_of, server.session.names))
