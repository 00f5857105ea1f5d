"""The page of `vs.page(learn=True)`, opened from the disk in a browser without a network."""

import base64
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitascope as vs
from tests.browser import PATIENCE, Visit, needs_browser, visiting
from tests.data import noise
from tests.models import VARIANTS, small_model
from vitascope.data.targets import ClassIndices
from vitascope.deploy.page.proof import compared_picture, computed_in_browser, model_outputs
from vitascope.models.vision_model import VisionModel
from vitascope.models.vit import VisionTransformer
from vitascope.models.weights.preprocess import preprocess_of
from vitascope.training.linear.classifiers import LogisticRegression

pytestmark = needs_browser

ENGINE = 'vitascopeModules["engine.js"]'
COLOURS = {"red": (200, 60, 50), "green": (60, 190, 70), "blue": (50, 70, 210)}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "learn.html"
    done = vs.page(small_model(), path, weights="fp32", images=[noise(40, 50)], learn=True)
    assert done.proof is not None
    assert done.proof.agreement.difference < 1e-4
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 noisy pictures in three colours, which their names begin with."""
    folder = tmp_path_factory.mktemp("pictures")
    for number in range(30):
        name = list(COLOURS)[number % 3]
        pixels = noise(40, 30 + number, seed=number).astype(float) / 4 + np.array(COLOURS[name]) * 0.75
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{name} {number}.png")
    return folder


@pytest.fixture
def visit(browser: Any, path: Path) -> Iterator[Visit]:
    with visiting(browser, path.as_uri(), offline=True) as visit:
        requests: list[str] = []
        visit.page.on("request", lambda request: requests.append(request.url))
        yield visit
        assert visit.faults == []
        assert all(url.startswith(("data:", "blob:", "file:")) for url in requests)


def ask(visit: Visit, request: str, *given: Any) -> Any:
    return visit.page.evaluate(f"(given) => {ENGINE}.{request}(...given)", list(given))


def wait(visit: Visit, ready: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """The first state that is ready."""
    for _ in range(PATIENCE // 100):
        state = ask(visit, "state")
        assert isinstance(state, dict)
        if ready(state):
            return state
        visit.page.wait_for_timeout(100)
    raise AssertionError(state)


def add(visit: Visit, *files: Path) -> dict[str, Any]:
    before = ask(visit, "state")["version"]
    visit.page.set_input_files("#tools input >> nth=0", [str(file) for file in files])
    wait(visit, lambda state: state["version"] > before)
    return wait(visit, lambda state: state["read"] + state["unreadable"] == state["pictures"])


def label_all(visit: Visit, count: int) -> dict[str, Any]:
    """Label pictures by the colours in their names, as they are offered; the state once they are fitted."""
    for _ in range(count):
        [picture] = ask(visit, "pictures", "next", 1)["pictures"]
        ask(visit, "decide", [{"id": picture["id"], "labels": [picture["name"].split()[0]]}])
    return wait(visit, lambda state: state["fit"] and not state["fitting"])


def again(visit: Visit) -> None:
    visit.page.reload()
    visit.page.locator("#arriving").wait_for(state="detached")


def test_labels_become_a_classifier_and_survive_a_closed_tab(visit: Visit, folder: Path) -> None:
    state = add(visit, *folder.iterdir())
    assert state["read"] == 30
    assert add(visit, folder / "red 0.png", folder / "blue 2.png")["pictures"] == 30  # they are there
    state = label_all(visit, 18)
    assert {one["name"]: one["count"] for one in state["classes"]}.keys() == COLOURS.keys()
    fit = state["fit"]
    assert fit["labels"] == 6  # every third, which was offered at random
    assert not visit.page.locator("#command").is_visible()  # there is no table
    assert 0 <= fit["low"] <= fit["value"] <= fit["high"] <= 1
    rest = ask(visit, "pictures", "next", 12)["pictures"]
    right = [one["suggestion"]["label"] == one["name"].split()[0] for one in rest]
    assert sum(right) > 10
    ask(visit, "skip", [rest[0]["id"]])
    ask(visit, "decide", [{"id": rest[1]["id"], "labels": ["  cafe\u0301 "]}])
    fit = wait(visit, lambda state: state["fit"]["number"] > fit["number"] and not state["fitting"])["fit"]
    before = ask(visit, "pictures", "labelled", 30)
    again(visit)
    after = wait(visit, lambda state: state["fit"] and not state["fitting"])
    assert after["classes"] == [*state["classes"], {"name": "caf\u00e9", "count": 1}]
    assert after["fit"] == {**fit, "number": 1}
    found = ask(visit, "pictures", "labelled", 30)
    assert found == before
    assert ask(visit, "pictures", "next", 12)["pictures"][-1]["id"] == rest[0]["id"]  # skipped ones come last


def test_all_pictures_judge_once_all_have_been_looked_at(visit: Visit, folder: Path) -> None:
    add(visit, *(file for file in folder.iterdir() if int(file.stem.split()[1]) < 12))
    fit = label_all(visit, 11)["fit"]
    assert fit["value"] is None or fit["labels"] < 11
    assert label_all(visit, 1)["fit"]["labels"] == 12


def test_dropped_pictures_are_labelled_by_keys_and_saved(visit: Visit, folder: Path, tmp_path: Path) -> None:
    contents = [base64.b64encode(file.read_bytes()).decode() for file in sorted(folder.iterdir())[:15]]
    visit.page.evaluate(
        """(contents) => {
        const dataTransfer = new DataTransfer();
        for (const [number, content] of contents.entries()) {
            const bytes = Uint8Array.from(atob(content), (letter) => letter.charCodeAt(0));
            dataTransfer.items.add(new File([bytes], `${number}.png`));
        }
        document.body.dispatchEvent(new DragEvent("drop", { dataTransfer, bubbles: true, cancelable: true }));
        }""",
        contents,
    )
    visit.page.locator("#grid img").nth(11).wait_for()
    wait(visit, lambda state: state["read"] == 15)
    for name in ("one", "two"):
        visit.page.fill("#name", name)
        visit.page.keyboard.press("Enter")
    visit.page.locator("#classes button >> nth=1").wait_for()
    visit.press(*"121212")
    assert wait(visit, lambda state: state["labelled"] == 8)["looked"] == 8
    wait(visit, lambda state: state["fit"] and not state["fitting"])
    with visit.page.expect_download() as download:
        visit.page.click("text=Save the model")
    download.value.save_as(tmp_path / "a.safetensors")
    assert vs.from_pretrained(tmp_path / "a.safetensors").config.class_names == ("one", "two")


def test_label_that_is_given_twice_is_no_suspect(visit: Visit, folder: Path) -> None:
    add(visit, *folder.iterdir())
    state = label_all(visit, 24)
    [picture] = ask(visit, "pictures", "labelled", 1)["pictures"]
    wrong = next(name for name in COLOURS if name != picture["labels"][0])
    ask(visit, "decide", [{"id": picture["id"], "labels": [wrong]}])
    number = state["fit"]["number"]
    state = wait(visit, lambda state: state["fit"]["number"] > number and not state["fitting"])
    assert picture["id"] in [one["id"] for one in ask(visit, "pictures", "suspects", 9)["pictures"]]
    after = ask(visit, "decide", [{"id": picture["id"], "labels": [wrong]}])
    assert after["suspects"] == state["suspects"] - 1


def test_undo_takes_back_what_was_saved_last(visit: Visit, folder: Path) -> None:
    add(visit, *sorted(folder.iterdir())[:4])
    ask(visit, "decide", [{"id": 0, "labels": ["a"]}, {"id": 1, "labels": ["a"]}])
    ask(visit, "decide", [{"id": 1, "labels": None}])
    ask(visit, "skip", [2])
    again(visit)
    assert ask(visit, "state")["undo"] == "skipped (1 picture)"
    assert ask(visit, "undo")["ids"] == [2]
    assert ask(visit, "undo")["ids"] == [1]
    assert ask(visit, "state")["classes"] == [{"name": "a", "count": 2}]
    again(visit)
    assert ask(visit, "undo")["ids"] == [0, 1]
    again(visit)
    state = ask(visit, "state")
    assert (state["labelled"], state["classes"], state["undo"]) == (0, [], None)


def test_what_is_no_picture_is_named(visit: Visit, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "IMG_1.HEIC").write_bytes(b"\0\0\0\x18ftypheic" + bytes(100))
    (tmp_path / "<b>broken.png").write_bytes((folder / "red 0.png").read_bytes()[:200])
    state = add(visit, *sorted(tmp_path.iterdir()), folder / "red 0.png")
    assert (state["pictures"], state["read"], state["unreadable"]) == (3, 1, 2)
    broken, heic = sorted(state["notes"])
    assert broken.startswith("<b>broken.png: not a picture that this browser can read")
    assert heic.startswith("IMG_1.HEIC: HEIC, which this browser cannot read")
    assert visit.page.locator("#notes b").count() == 0


def test_second_tab_is_told_so(visit: Visit, folder: Path) -> None:
    add(visit, folder / "red 0.png")
    second = visit.page.context.new_page()
    second.goto(visit.page.url)
    second.locator("#fault").wait_for()
    assert "open in another tab" in str(second.text_content("#fault"))
    second.close()
    ask(visit, "decide", [{"id": 0, "labels": ["a"]}])


def test_pictures_of_other_days_are_judged_by_classifiers_without_them(visit: Visit, folder: Path) -> None:
    for number, file in enumerate(sorted(folder.iterdir())):
        day = 1.7e9 + 86_400 * (number % 3)
        os.utime(file, (day, day))
    add(visit, *folder.iterdir())
    [note] = label_all(visit, 15)["notes"]
    assert re.fullmatch(r"Of pictures taken at other times, \d+% \(\d+% to \d+%\) are answered right.", note)


def test_page_is_chinese_in_a_chinese_browser(browser: Any, path: Path, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.heic").write_bytes(b"ftypheic")
    with visiting(browser, path.as_uri(), offline=True, locale="zh-CN") as visit:
        visit.page.locator("#undo:has-text('撤销')").wait_for(timeout=PATIENCE)  # translated
        texts = visit.page.locator("body").inner_text().split()
        assert {text for text in texts if text.isascii()} <= {"vitascope", "0", "/", "?", "s"}
        add(visit, folder / "red 0.png", tmp_path / "a.heic")
        ask(visit, "skip", [0])
        visit.page.locator("#undo[title='已跳过（1 张图片）']").wait_for()
        assert visit.text("#notes p >> nth=1").startswith("a.heic：此浏览器")
        assert visit.faults == []


def test_full_storage_is_an_error_and_what_failed_can_be_repeated(visit: Visit, folder: Path) -> None:
    full = visit.page.context.new_cdp_session(visit.page)
    full.send("Storage.overrideQuotaForOrigin", {"origin": "file://", "quotaSize": 1})
    with pytest.raises(Exception, match="storage is full"):
        ask(visit, "skip", [])
    visit.page.set_input_files("#tools input >> nth=0", [str(folder / "red 0.png")])
    fault = visit.page.locator("#fault:has-text('storage is full')")
    fault.wait_for()
    state = ask(visit, "state")
    assert (state["pictures"], state["classes"], state["undo"]) == (0, [], None)
    full.send("Storage.overrideQuotaForOrigin", {"origin": "file://"})
    visit.page.click("#again")
    wait(visit, lambda state: state["read"] == 1)
    assert ask(visit, "decide", [{"id": 0, "labels": ["a"]}])["classes"] == [{"name": "a", "count": 1}]
    again(visit)
    assert ask(visit, "state")["labelled"] == 1


def saved(visit: Visit, kind: str, file: Path, *given: Any) -> Path:
    """A file that the page exports, of its own classifier or of a given one."""
    made = (
        f"await vitascopeModules['export.js'].{kind}(...given)"
        if given
        else f"await {ENGINE}.exported('{kind}')"
    )
    read = """(blob) => new Promise((done) => {
        const reader = new FileReader();
        reader.onload = () => done(reader.result.split(",")[1]);
        reader.readAsDataURL(blob);
    })"""
    text = visit.page.evaluate(f"async (given) => ({read})({made})", list(given))
    file.write_bytes(base64.b64decode(text))
    return file


def features_of(model: VisionModel, pixels: torch.Tensor) -> np.ndarray:
    with torch.inference_mode():
        return model.embed(preprocess_of(model).normalize(pixels)).numpy()


def check_equal(page: Path, run: Path) -> VisionTransformer:
    """The exported page computes what the exported model computes, and knows its classes."""
    model = vs.from_pretrained(run)
    assert isinstance(model, VisionTransformer)
    pictures = [compared_picture(model, noise(40, 30 + seed, seed=seed)) for seed in range(4)]
    [computed] = computed_in_browser(None, page, [(model, pictures)])
    torch.testing.assert_close(computed.outputs, model_outputs(model, pictures), atol=1e-5, rtol=1e-5)
    return model


def test_exported_files_are_the_classifier(visit: Visit, folder: Path, tmp_path: Path) -> None:
    add(visit, *folder.iterdir())
    label_all(visit, 15)
    page, run = saved(visit, "page", tmp_path / "a.html"), saved(visit, "run", tmp_path / "a.safetensors")
    model = check_equal(page, run)
    labelled = ask(visit, "pictures", "labelled", 30)["pictures"]
    names = tuple(one["name"] for one in ask(visit, "state")["classes"])
    assert model.config.class_names == names
    files = [folder / one["name"] for one in labelled]
    seen = [compared_picture(small_model(), file).pixels for file in files]
    features = features_of(small_model(), torch.cat(seen))
    targets = ClassIndices(np.array([names.index(one["labels"][0]) for one in labelled]), names)
    (expected,) = LogisticRegression((0.1,)).fit(features, targets).probabilities(features)
    answers = vs.Predictor(run, precision="fp32", device="cpu")(files, top_k=3)
    for answer, row in zip(answers, expected, strict=True):
        shares = {one.label: one.score for one in answer}
        assert [shares[name] for name in names] == pytest.approx(row.tolist(), abs=1e-4)


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("distillation", "fp32"),
        ("fewer heads, map, no key bias", "int8"),
        ("rotary with learned frequencies", "fp16"),
    ],
)
def test_every_body_is_exported(browser: Any, name: str, weights: Any, tmp_path: Path) -> None:
    path = tmp_path / "learn.html"
    vs.page(
        small_model(**VARIANTS[name]),
        path,
        weights=weights,
        images=[noise(40, 50)],
        learn=True,
        unproved=True,
    )
    generator = np.random.default_rng(0)
    with visiting(browser, path.as_uri(), offline=True) as visit:
        D = json.loads(str(visit.page.text_content("#model-data")))["models"][0]["options"]["embed_dim"]
        D *= 2 if name == "distillation" else 1
        head = {
            "names": ["</script>", "<!--", "c"],
            "weight": generator.normal(size=3 * D).tolist(),
            "bias": [0, 1, -2],
        }
        made = [
            saved(visit, kind, tmp_path / file, head)
            for kind, file in (("pageFile", "a.html"), ("modelFile", "a.safetensors"))
        ]
    check_equal(*made)
