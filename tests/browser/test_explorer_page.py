"""The explorer's page, used by pointer, keyboard and touch."""

import base64
import io
import itertools
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
import torch
import uvicorn
from PIL import Image

from tests.analysis.explain import MODELS
from tests.browser import PHONE, Visit, needs_browser, visiting
from tests.data import noise, write_picture
from tests.deploy.server.served import PATIENT
from tests.models import labelling_model, small_model, small_resnet
from vitascope.analysis.explain.attention import layer_attention
from vitascope.deploy.server.app import create_app
from vitascope.deploy.server.page_content import samples_for
from vitascope.deploy.server.settings import Settings
from vitascope.models.engines.engine import Engine, TorchEngine
from vitascope.models.preprocess import Framed, Preprocess
from vitascope.models.vision_model import VisionModel

pytestmark = needs_browser

NAMES = ("<img src=x onerror=alert(1)>", "</script><b>bold</b>", "cat", "'dog'", "名前")
KINDS: dict[str, dict[str, Any]] = {
    "non-square with registers": {"image_size": (32, 48), "num_registers": 2},
    "mean": {"pool": "mean"},
    "distilled": MODELS["distilled_registers"],
    "axial": MODELS["axial"],
    "window": MODELS["window"],
    "class token and mean": {"pool": "cls_mean"},
    "one layer": {"depth": 1},
}


def engine_of(model: VisionModel) -> TorchEngine:
    return TorchEngine(model, precision="fp32", device="cpu")


def alike(one: str, other: str, most: int = 2) -> bool:
    """Whether two drawings agree roughly; a browser's rounding may change over time."""

    def small(uri: str) -> np.ndarray:
        with Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))) as drawn:
            return np.asarray(drawn.convert("RGB").resize((8, 8), Image.Resampling.BOX), dtype=int)

    return bool(np.abs(small(one) - small(other)).max() <= most)


def weight_in_first_sample(layer: int, query: int, key: int) -> float:
    """The mean attention of the heads from one patch of the first sample to another, from the model."""
    engine = engine_of(small_model())
    pixels = engine.pixels(samples_for(engine_of(small_model(class_names=NAMES)))[0].content)
    images = engine.preprocess.normalize(torch.from_numpy(pixels)[None])
    weights = layer_attention(engine.model, images, layer)  # (1, heads, T, T)
    return float(weights[0, :, 1 + query, 1 + key].mean())


@contextmanager
def serving(engine: Engine, token: str | None = None, beside: Engine | None = None) -> Iterator[str]:
    """Serve an engine in a thread, and wait until it is ready; return the address."""
    app = create_app(engine, Settings(max_batch=1, access_log=False, **PATIENT), token, beside=beside)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
        while not server.started or app.state.service.admission.why_not_ready():
            time.sleep(0.02)
        yield f"http://127.0.0.1:{port}/"
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving(engine_of(small_model(class_names=NAMES))) as address:
        yield address


@pytest.fixture
def visit(browser: Any, address: str) -> Iterator[Visit]:
    with visiting(browser, address) as visit:
        yield visit
        assert visit.faults == []


def test_opened_picture_shows_its_prediction(visit: Visit, tmp_path: Path) -> None:
    hostile = write_picture(tmp_path / "<img src=x onerror=alert(2)>.png", size=(50, 40))
    visit.page.set_input_files("input[type=file]", str(hostile))
    visit.wait_for_answer(visit.page.locator(".panel").first)
    assert visit.text(".name") == hostile.name
    labels = visit.page.locator(".predictions span").all_text_contents()
    assert sorted(labels) == sorted(NAMES)
    assert visit.page.locator(".name *, .predictions span *, .title *").count() == 0


def test_moving_the_pointer_changes_the_map_and_leaving_returns_to_the_class_token(visit: Visit) -> None:
    visit.open_sample()
    rest = visit.drawing()
    assert "class token looks" in visit.text(".title")
    seen = {rest}
    for place in (0.1, 0.4, 0.9):
        visit.hover(place, 1 - place)
        seen.add(visit.drawing())
    assert len(seen) == 4
    assert "patch in row 0, column 3" in visit.text(".title")
    visit.page.mouse.move(5, 5)
    visit.settle()
    assert alike(visit.drawing(), rest)


def test_click_selects_a_patch_and_moving_then_shows_its_weights(visit: Visit) -> None:
    visit.open_sample()
    visit.hover(0.4, 0.4)
    visit.page.mouse.down()
    visit.page.mouse.up()
    visit.hover(0.9, 0.9)
    assert "patch in row 1, column 1" in visit.text(".title")
    place, _, share = visit.text(".here").partition(": ")
    assert place == "row 3, column 3"
    assert float(share.rstrip("%")) / 100 == pytest.approx(
        weight_in_first_sample(layer=1, query=5, key=15), abs=2e-3
    )
    visit.press("Escape")
    assert "patch in row 3, column 3" in visit.text(".title")


def test_the_wall_shows_every_head_and_a_click_chooses_one(visit: Visit) -> None:
    visit.open_sample()
    wall = visit.page.locator("#wall")
    before = visit.drawing("#wall")
    visit.hover(0.1, 0.1)
    assert visit.drawing("#wall") != before
    # 3 layers of 2 heads lie in three columns
    wall.hover(position={"x": 40, "y": 40})
    assert wall.get_attribute("title") == "layer 0, head 0"
    wall.click(position={"x": 140, "y": 140})
    visit.settle()
    assert visit.text(".title").startswith("Layer 1, head 1: ")
    visit.page.check("#wall-one")
    visit.settle()
    assert visit.text("#wall-note") == "layer 1"


def test_a_class_is_chosen_by_its_bar_and_by_search(visit: Visit) -> None:
    visit.open_sample()
    bars = visit.page.locator(".predictions button")
    drawn = set()
    for number in range(4):  # the first is in the first response, the others are requested
        bars.nth(number).click()
        visit.page.locator(".high:text-is('most')").wait_for()  # three dots are shown while it loads
        visit.settle()
        assert bars.nth(number).get_attribute("aria-pressed") == "true"
        about = f"evidence for “{bars.nth(number).locator('span').text_content()}”"
        assert visit.text(".title") in (
            f"Libra input x gradient: {about}",
            f"Libra input x gradient: no {about}",
        )
        drawn.add(visit.drawing())
    assert len(drawn) >= 2  # small random models find nothing for some classes
    visit.page.fill("#search", "CAT")
    visit.page.keyboard.press("Enter")
    visit.settle()
    assert visit.text(".title").endswith("evidence for “cat”")
    with visit.page.expect_response("**/v1/heatmap?**"):
        visit.page.select_option("#method", "layer-cam")
    assert visit.text(".title").startswith("Layer-CAM: ")
    assert visit.text(".title").endswith("evidence for “cat”")


def test_labels_are_marked_and_a_class_that_applies_is_shown_however_improbable(
    browser: Any, tmp_path: Path
) -> None:
    probabilities = (0.9, 0.8, 0.7, 0.6, 0.5, 0.2, 0.1)
    thresholds = (0.5, 0.85, 0.5, 0.7, 0.7, 0.15, 0.3)
    for own, shown, none in (
        (thresholds, ["✓ a", "b", "✓ c", "d", "e", "✓ f"], False),
        ((0.95,) * 7, ["a", "b", "c", "d", "e"], True),
    ):
        model = labelling_model(*probabilities, thresholds=own, class_names=tuple("abcdefg"))
        with serving(engine_of(model)) as address, visiting(browser, address) as visit:
            visit.page.set_input_files("input[type=file]", str(write_picture(tmp_path / "a.png")))
            visit.wait_for_answer(visit.page.locator(".panel").first)
            assert visit.page.locator(".predictions span").all_text_contents() == shown
            assert visit.page.locator(".none").is_visible() == none
            title = visit.page.locator(".predictions button").nth(1).get_attribute("title")
            assert title == f"b, applies from {100 * own[1]:.1f}%"
            assert visit.faults == []


def test_everything_is_reachable_by_keyboard(visit: Visit) -> None:
    visit.open_sample()
    visit.press("ArrowRight")
    assert "patch in row 1, column 1" in visit.text(".title")
    visit.press("ArrowRight", "ArrowDown", "ArrowDown", "ArrowDown", "ArrowDown")
    assert "patch in row 3, column 2" in visit.text(".title")
    visit.press("[", "[", ".", ".")
    assert visit.text(".title").startswith("Layer 0, head 1: ")
    visit.press("]", ",")
    assert visit.text(".title").startswith("Layer 1, head 0: ")
    visit.press("m")
    assert visit.text(".title").startswith("Layer 1, mean of the heads: ")
    visit.press("r")
    assert visit.text(".title") == "Rollout: flow into the patch in row 3, column 2, over all layers"
    visit.press("c", "a")
    assert visit.text(".title") == "Layer 1, mean of the heads: where the class token looks"
    visit.press("g")
    assert visit.text(".title").startswith("Libra input x gradient: ")
    visit.press("?")
    assert visit.page.locator("#help-dialog").is_visible()
    visit.press("Escape")
    assert not visit.page.locator("#help-dialog").is_visible()
    visit.page.locator("#spoken", has_text="Libra input x gradient: ").wait_for(state="attached")


def test_page_opens_with_a_sample_and_tells_screen_readers_its_prediction(visit: Visit) -> None:
    visit.wait_for_answer(visit.page.locator(".panel").first)
    assert visit.page.locator(".samples [aria-pressed=true]").get_attribute("data-sample") == "cat"
    visit.page.locator("#spoken", has_text="Prediction: ").wait_for(state="attached")
    titles = [each.get_attribute("title") for each in visit.page.locator(".samples button").all()]
    assert [title.split()[0] for title in titles] == ["cat", "dog"]  # the known classes


def test_address_names_the_view_and_opens_it_again(browser: Any, visit: Visit) -> None:
    visit.open_sample(1)
    visit.press("[", "[", ".", ".", "ArrowRight", "r")
    visit.page.wait_for_url("**#sample=dog&mode=rollout&layer=0&head=1&patch=1%2C1")
    with visiting(browser, visit.page.url) as other:
        other.wait_for_answer(other.page.locator(".panel").first)
        assert other.text(".name") == visit.text(".name")
        assert other.text(".title") == visit.text(".title")
        other.press("a")
        assert other.text(".title") == "Layer 0, head 1: where the patch in row 1, column 1 looks"
        assert other.faults == []


@pytest.mark.parametrize(
    ("link", "fault"),
    [
        ("layer=9", "layer 9, which this model does not have: they are 0 to 2"),
        ("patch=2,x", "column x, which this model does not have: they are 0 to 3"),
        ("query=register+7", "“register 7”, which this model does not have; it has class token"),
        ("mode=class&method=magic", "“magic”, which this model does not have; it has gradient-rollout"),
        ("sample=<b>cow", "the sample “<b>cow”, which this model does not have"),
    ],
)
def test_link_to_what_the_model_does_not_have_says_so(
    browser: Any, address: str, link: str, fault: str
) -> None:
    with visiting(browser, f"{address}#{link}") as visit:
        visit.page.locator(".fault:not([hidden])").wait_for()
        assert fault in visit.text(".fault span")
        assert visit.faults == []


@pytest.mark.parametrize("link", [{"patch": "0,0"}, {"query": "class token"}, {"layer": "0"}, {"class": "0"}])
def test_link_to_the_inside_of_an_exported_file_says_that_it_has_none(
    visit: Visit, link: dict[str, str]
) -> None:
    fault = visit.page.evaluate(
        """async link => {
            const { viewOf } = await import('/web/link.js');
            const exported = { inside: null, about: {}, grid: null, prefix: 0, probabilities: [] };
            try { viewOf(link, exported); } catch (error) { return error.message; }
        }""",
        link,
    )
    assert fault.startswith("The link names")
    assert fault.endswith("it has none.")


def test_copied_link_is_the_address_of_the_view(browser: Any, address: str) -> None:
    with visiting(browser, address, permissions=["clipboard-read", "clipboard-write"]) as visit:
        visit.open_sample(1)
        visit.press("[")
        visit.page.click("#link")
        visit.page.locator("#link", has_text="Copied").wait_for()
        assert visit.page.evaluate("navigator.clipboard.readText()") == f"{address}#sample=dog&layer=0"
        visit.page.click("#copy")
        visit.page.locator("#copy", has_text="Copied").wait_for()
        kinds = "navigator.clipboard.read().then(items => items.flatMap(item => item.types))"
        assert visit.page.evaluate(kinds) == ["image/png"]


def test_lens_shows_the_class_by_layer(visit: Visit) -> None:
    visit.open_sample()
    visit.press("l")
    bars = visit.page.locator("#curve button")
    bars.nth(3).wait_for()
    assert bars.nth(3).get_attribute("title") == f"after layer 2: {visit.text('.predictions b')}"
    bars.nth(1).click()
    visit.page.locator(".title:has-text('After layer 0')").wait_for()
    assert bars.nth(1).get_attribute("aria-pressed") == "true"


def test_parts_are_switched_off_and_on_by_pointer_and_keys(visit: Visit) -> None:
    visit.open_sample()
    whole = visit.text(".predictions")
    visit.page.click("#switches button:has-text('MLP of layer')")
    visit.page.locator(".predictions b:has-text('→')").first.wait_for()
    visit.page.locator(".picture").click(modifiers=["Shift"], position={"x": 5, "y": 5})
    visit.page.locator(".picture").click(modifiers=["Shift"], position={"x": 150, "y": 5})
    visit.page.locator("#switches button:has-text('2 patches')").wait_for()
    visit.page.wait_for_url("**off=mlp1%2Cpatch0%2Cpatch*")
    visit.press("x")  # the patch under the pointer
    visit.page.click("#switches button:has-text('patch in row 0, column 0')")
    visit.page.click("#switches button:has-text('MLP of layer')")
    visit.page.locator(".predictions b:has-text('→')").first.wait_for(state="detached")
    assert visit.text(".predictions") == whole


def test_layers_are_played_until_another_view_is_chosen(visit: Visit) -> None:
    visit.open_sample()
    visit.page.click("#play")
    for layer in (0, 1, 2, 0):
        visit.page.locator(f".title:has-text('Layer {layer}')").wait_for()
    visit.press("r")
    visit.page.locator("#play[aria-pressed=false]").wait_for(state="attached")
    assert visit.text(".title").startswith("Rollout")


def features_of_samples(count: int) -> list[np.ndarray]:
    """The features (N, D) of the first samples' patches, from the model."""
    engine = engine_of(small_model())
    found = []
    for sample in samples_for(engine_of(small_model(class_names=NAMES)))[:count]:
        images = engine.preprocess.normalize(torch.from_numpy(engine.pixels(sample.content))[None])
        with torch.no_grad():
            found.append(engine.model.forward_features(images)[0, 1:].numpy())
    return found


def test_similarity_is_the_cosine_of_the_patches_features(visit: Visit) -> None:
    visit.open_sample()
    visit.press("i", "ArrowRight")  # holds row 1, column 1
    visit.hover(0.9, 0.9)
    place, _, cosine = visit.text(".here").partition(": ")
    assert place == "row 3, column 3"
    (features,) = features_of_samples(1)
    one, other = features[5], features[15]
    expected = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
    assert float(cosine) == pytest.approx(expected, abs=0.02)
    least = (features @ one / np.linalg.norm(features, axis=1) / np.linalg.norm(one)).min()
    assert float(visit.text(".low")) == pytest.approx(least, abs=0.02)


def test_colours_are_principal_components_of_all_shown_pictures(visit: Visit) -> None:
    visit.open_sample(0)
    visit.page.click("#compare")
    visit.open_sample(1)
    visit.press("p")
    assert visit.text(".title").startswith("Principal components")
    visit.page.locator("#strength").fill("1")
    visit.settle()
    features = features_of_samples(2)
    rows = np.concatenate(features)
    centred = rows - rows.mean(axis=0)
    axes = np.linalg.svd(centred, full_matrices=False)[2][:3]
    scores = centred @ axes.T  # (2N, 3)
    scores *= np.where(-scores.min(axis=0) > scores.max(axis=0), -1, 1)
    colours = 255 * (scores - scores.min(axis=0)) / np.ptp(scores, axis=0)
    for number, expected in enumerate(np.split(colours, 2)):
        uri = visit.drawing(number=number)
        with Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))) as canvas:
            seen = np.asarray(canvas.convert("RGB"), dtype=float)
        height, width = seen.shape[:2]
        left = (width - height) / 2 if width > height else 0  # the model's square
        top = (height - width) / 2 if height > width else 0
        side = min(height, width) / 4
        centres = [
            seen[int(top + (row + 0.5) * side), int(left + (column + 0.5) * side)]
            for row in range(4)
            for column in range(4)
        ]
        np.testing.assert_allclose(np.array(centres), expected, atol=6, err_msg=f"picture {number}")


def test_uniform_row_is_a_quarter_up_the_scale_and_a_class_without_evidence_is_named(browser: Any) -> None:
    model = small_model()
    with torch.no_grad():
        for block in model.encoder.blocks:  # equal scores: every row is uniform
            block.attention.qkv.weight.zero_()
            block.attention.qkv.bias.zero_()
        model.head.weight.zero_()
    with serving(engine_of(model)) as address, visiting(browser, address) as visit:
        visit.open_sample()
        assert visit.text(".high") == f"{100 * 4 / 17:.1f}%, 4.0 × uniform"
        visit.press("g")
        assert visit.text(".title").startswith("Libra input x gradient: no evidence for ")


def test_two_models_show_the_same_place_layer_and_class_of_one_picture(browser: Any) -> None:
    one = engine_of(small_model(class_names=NAMES))  # 3 layers, 4 x 4 patches
    two = engine_of(small_model(depth=2, patch_size=4, pool="mean", class_names=tuple(reversed(NAMES))))
    one.name, two.name = "one", "two"
    with serving(one, beside=two) as address, visiting(browser, address) as visit:
        visit.open_sample(1)
        visit.page.click("#compare")
        visit.wait_for_answer(visit.page.locator(".panel").last)
        assert visit.page.locator(".name").all_text_contents() == 2 * [visit.text(".name")]
        panels = [visit.page.locator(".panel").nth(number) for number in range(2)]
        assert [panel.locator(".which").input_value() for panel in panels] == ["", "beside/"]

        def titles() -> list[str]:
            return visit.page.locator(".title").all_text_contents()

        visit.hover(0.9, 0.1, number=0)
        assert "row 0, column 3" in titles()[0]
        assert "row 1, column 7" in titles()[1]
        visit.page.mouse.move(5, 5)
        visit.press("]", "c")
        assert titles() == [
            "Layer 2, mean of the heads: where the class token looks",
            "Layer 1, mean of the heads: where all patches look",
        ]
        uniform = [text.split(", ")[1] for text in visit.page.locator(".high").all_text_contents()]
        assert uniform[0] == uniform[1]
        panels[0].locator(".predictions button", has_text="cat").click()
        visit.settle()
        assert all("“cat”" in title for title in titles())
        visit.hover(0.5, 0.5, number=1)  # the controls become those of the other model
        visit.press("a")
        assert visit.page.locator("#layer").get_attribute("max") == "1"
        assert visit.text("#model").startswith("two · 2 layers")
        panels[1].locator(".which").select_option("")
        visit.wait_for_answer(panels[1])
        assert visit.text("#model").startswith("one · 3 layers")
        assert visit.faults == []


def test_pending_class_map_is_cancelled_by_a_button_and_by_another_method(visit: Visit) -> None:
    visit.open_sample()
    visit.page.route("**/v1/heatmap?method=occlusion**", lambda route: None)  # never answered
    visit.press("g")
    visit.page.select_option("#method", "occlusion")
    visit.page.locator(".wait .seconds", has_text="1 s").wait_for()
    assert visit.text(".wait .what") == "Computing occlusion …"
    visit.page.click(".wait .cancel")
    visit.page.locator(".fault:not([hidden])").wait_for()
    assert visit.text(".fault span") == "Cancelled: Computing occlusion."
    assert not visit.page.locator(".wait").is_visible()
    visit.page.unroute("**/v1/heatmap?method=occlusion**")
    visit.page.click(".fault button")
    visit.page.locator(".high:text-is('most')").wait_for()
    visit.page.route("**/v1/heatmap?method=patching**", lambda route: None)
    with visit.page.expect_request("**/v1/heatmap?method=patching**"):
        visit.page.select_option("#method", "patching")
    with visit.page.expect_event("requestfailed") as ended:
        visit.page.select_option("#method", "layer-cam")
    assert "method=patching" in ended.value.url
    visit.page.locator(".high:text-is('most')").wait_for()
    assert visit.page.locator(".wait:visible, .fault:visible").count() == 0


def test_controls_that_do_not_apply_are_hidden(visit: Visit) -> None:
    visit.open_sample()
    parts = ["#queries", "#layer-row", "#head-row", "#wall", "#class-row"]
    for key, shown in (("a", "11110"), ("r", "10010"), ("i", "10010"), ("p", "00000"), ("g", "00001")):
        visit.press(key)
        assert "".join(str(int(visit.page.locator(part).is_visible())) for part in parts) == shown
        assert visit.page.locator("#hints p:visible").count() == 1


def test_two_pictures_share_one_scale_and_follow_the_same_pointer(visit: Visit) -> None:
    visit.open_sample(0)
    assert "uniform" in visit.text(".high")
    visit.page.click("#compare")
    visit.open_sample(1)
    before = [visit.drawing(number=number) for number in range(2)]
    assert before[0] != before[1]
    visit.hover(0.1, 0.9, number=1)
    titles = visit.page.locator(".title").all_text_contents()
    assert titles[0] == titles[1]
    assert "row 3, column 0" in titles[0]
    assert all(visit.drawing(number=number) != before[number] for number in range(2))
    scales = visit.page.locator(".high").all_text_contents()
    assert scales[0] == scales[1]
    visit.page.locator(".close").last.click()
    assert visit.page.locator(".panel").count() == 1


def test_a_png_is_saved(visit: Visit, tmp_path: Path) -> None:
    visit.open_sample()
    with visit.page.expect_download() as download:
        visit.press("s")
    assert download.value.suggested_filename.endswith("-attention.png")
    download.value.save_as(tmp_path / "saved.png")
    with Image.open(tmp_path / "saved.png") as saved:
        assert saved.width > 800
        assert len(saved.convert("RGB").getcolors(1 << 24)) > 1000


def test_model_of_the_mean_has_titles_in_the_plural_and_frames_only_a_held_patch(
    browser: Any, tmp_path: Path
) -> None:
    def white(visit: Visit) -> int:
        with visit.page.expect_download() as download:
            visit.press("s")
        download.value.save_as(tmp_path / "saved.png")
        with Image.open(tmp_path / "saved.png") as saved:
            return int((np.asarray(saved.convert("RGB")) == 255).all(axis=-1).sum())

    with serving(engine_of(small_model(pool="mean"))) as address, visiting(browser, address) as visit:
        visit.open_sample()
        assert white(visit) == 0
        assert visit.text(".title").endswith(": where all patches look")
        visit.press("r")
        assert visit.text(".title") == "Rollout: flow into all patches, over all layers"
        visit.press("a")
        visit.press("ArrowRight")
        assert white(visit) > 0


def test_sharp_picture_is_aligned_with_the_models_pixels(visit: Visit) -> None:
    visit.open_sample()
    visit.page.locator("#strength").fill("0")
    visit.settle()
    sharp = visit.drawing()
    visit.page.check("#raw")
    visit.settle()
    raw = visit.drawing()
    assert sharp != raw
    assert alike(sharp, raw, most=16)


@pytest.mark.parametrize("rule", [{}, {"resize": "squash"}, {"resize_to": (44, 50)}])
def test_sharp_picture_leaves_out_what_the_model_cuts(visit: Visit, rule: dict[str, Any]) -> None:
    fit = Preprocess(image_size=(38, 45), **rule)
    blank = np.zeros((3, 38, 45), dtype=np.uint8)
    found = visit.page.evaluate(
        "async (given) => (await import('/web/framing.js')).tiledBox(...given)",
        [500, 333, 35, 40, fit.to_dict()],
    )
    left, top, right, bottom = Framed(blank, blank, fit.box(500, 333)).top_left(35, 40).box
    expected = {"left": left, "top": top, "width": right - left, "height": bottom - top}
    assert found == pytest.approx(expected)


def test_sharp_picture_follows_the_preprocessing(visit: Visit) -> None:
    rules: list[dict[str, Any]] = [
        {},
        {"crop_pct": 0.8},
        {"resize": "squash", "crop_pct": 0.9},
        {"resize_to": (37, 37), "crop_rounding": "down"},
        {"resize_to": (36, 36)},
        {"resize_to": (36, 40), "side_rounding": "nearest"},
        {"resize": "squash", "resize_to": (37, 35)},
        {"resize": "border", "resize_to": (32, 32), "side_rounding": "nearest"},
    ]
    sizes = [(333, 500), (500, 333), (37, 41), (32, 32), (90, 31)]
    for rule, (height, width) in itertools.product(rules, sizes):
        fit = Preprocess(image_size=(32, 32), **rule)
        found = visit.page.evaluate(
            "async (given) => (await import('/web/framing.js')).seenBox(...given)",
            [width, height, 32, 32, fit.to_dict()],
        )
        left, top, right, bottom = fit.box(width, height)
        wanted = {"left": left, "top": top, "width": right - left, "height": bottom - top}
        assert found == pytest.approx(wanted)


def test_dark_and_light_can_be_changed(visit: Visit) -> None:
    def paper() -> str:
        return str(visit.page.evaluate("getComputedStyle(document.documentElement).backgroundColor"))

    first = paper()
    visit.page.click("#theme")
    second = paper()
    visit.page.reload()
    assert paper() == second  # the browser keeps the choice
    visit.page.click("#theme")
    assert paper() == first != second


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_every_kind_of_model_can_be_explored(browser: Any, options: dict[str, Any]) -> None:
    model = small_model(**options)
    with serving(engine_of(model)) as address, visiting(browser, address) as visit:
        visit.open_sample()
        rest = visit.drawing()
        visit.hover(0.9, 0.2)  # the wide model's crop begins at a sixth
        last = model.config.grid[1] - 1
        assert f"row 0, column {last}" in visit.text(".title")
        assert visit.drawing() != rest
        tokens = visit.page.locator(".tokens li").count()
        assert tokens == 1 + model.config.num_prefix_tokens
        visit.press("c")
        assert visit.text("#queries [aria-pressed=true]") in ("class token", "all patches")
        visit.press("r", "g")
        assert visit.faults == []


def test_resnet_has_class_maps_and_the_reason_for_no_attention(browser: Any) -> None:
    with serving(engine_of(small_resnet())) as address, visiting(browser, address) as visit:
        visit.open_sample()
        assert "no attention" in visit.text("#missing")
        assert visit.text(".title").startswith("Libra input x gradient: ")
        assert not visit.page.locator("#wall").is_visible()
        visit.page.locator(".predictions button").nth(1).click()
        visit.hover(0.5, 0.5)
        assert visit.faults == []


def test_page_fits_a_phone_and_touch_moves_the_patch(browser: Any, address: str) -> None:
    with visiting(browser, address, **PHONE) as visit:
        visit.open_sample()
        box = visit.page.locator("canvas.picture").bounding_box()
        visit.page.touchscreen.tap(box["x"] + 0.9 * box["width"], box["y"] + 0.1 * box["height"])
        visit.settle()
        assert "patch in row 0, column 3" in visit.text(".title")
        chips = visit.page.locator("#queries button:not(.hint):visible").all_text_contents()
        assert chips == ["class token", "patch in row 0, column 3 ×"]  # no pointer to follow
        visit.page.locator("#queries button:not(.hint)").last.click()
        visit.settle()
        assert visit.text("#queries [aria-pressed=true]") == "class token"
        assert visit.page.evaluate("document.documentElement.scrollWidth") <= 390
        assert visit.faults == []


@pytest.mark.parametrize("width", [1280, 390])
def test_long_class_names_stay_in_their_column(browser: Any, width: int) -> None:
    names = (
        "African hunting dog, hyena dog, Cape hunting dog, Lycaon pictus",
        "hippopotomonstrosesquippedaliophobia_without_a_place_where_a_line_could_break",
        *NAMES[2:],
    )
    size = {"viewport": {"width": width, "height": 844}}
    with (
        serving(engine_of(small_model(class_names=names))) as address,
        visiting(browser, address, **size) as visit,
    ):
        visit.open_sample(0)
        visit.page.click("#compare")
        visit.open_sample(1)
        visit.press("g")
        visit.page.fill("#search", "hunting")
        visit.press("Enter")
        visit.page.fill("#search", "o")
        assert visit.page.evaluate("document.documentElement.scrollWidth") == width
        outside = visit.page.evaluate(
            """() => [...document.querySelectorAll(".predictions button, .title, #found")].filter(one => {
                const [box, within] = [one, one.closest(".panel, main")].map(e => e.getBoundingClientRect());
                return box.left < within.left - 1 || box.right > within.right + 1 || box.width < 140;
            }).length"""
        )
        assert outside == 0
        visit.page.locator(".predictions button").first.click()  # not covered by another panel


def test_failed_class_map_is_requested_again_only_on_retry(browser: Any, address: str) -> None:
    asked: list[str] = []
    with visiting(browser, address) as visit:
        visit.open_sample()
        visit.page.route(
            "**/v1/heatmap?method=occlusion**",
            lambda route: (asked.append(route.request.url), route.abort("connectionrefused"))[0],
        )
        visit.press("g")
        visit.page.select_option("#method", "occlusion")
        visit.page.wait_for_selector(".fault:not([hidden])")
        assert "Is it still running?" in visit.text(".fault span")
        visit.hover(0.2, 0.2)
        visit.hover(0.8, 0.8)
        assert len(asked) == 1
        visit.page.unroute("**/v1/heatmap?method=occlusion**")
        visit.page.click(".fault button")
        visit.page.locator(".wait").wait_for(state="hidden")
        assert not visit.page.locator(".fault").is_visible()


def test_retry_sends_the_picture_even_if_its_file_is_gone(browser: Any, address: str, tmp_path: Path) -> None:
    path = write_picture(tmp_path / "mine.png", size=(50, 40))
    with visiting(browser, address) as visit:
        visit.page.route("**/v1/attention", lambda route: route.abort("connectionrefused"))
        visit.page.set_input_files("input[type=file]", str(path))
        visit.page.wait_for_selector(".fault:not([hidden])")
        assert visit.text(".fault span").startswith("mine.png: The server does not answer")
        path.unlink()
        visit.page.unroute("**/v1/attention")
        visit.page.click(".fault button")
        visit.wait_for_answer(visit.page.locator(".panel").first)
        assert visit.text(".name") == "mine.png"
        assert not visit.page.locator(".fault").is_visible()


def test_page_opened_while_the_model_loads_waits_and_continues_by_itself(
    browser: Any, address: str, tmp_path: Path
) -> None:
    loading = {"status": 503, "json": {"error": "the model is still loading"}}
    with visiting(browser, address) as visit:
        visit.page.route("**/v1/**", lambda route: route.fulfill(**loading))
        visit.page.reload()
        visit.page.locator(".coming", has_text="The model is still loading …").wait_for()
        assert not visit.page.locator(".or-try").is_visible()
        assert not visit.page.locator(".fault").is_visible()
        visit.page.set_input_files("input[type=file]", str(write_picture(tmp_path / "early.png")))
        visit.page.locator(".busy", has_text="The model is still loading …").wait_for()
        assert not visit.page.locator(".fault").is_visible()
        visit.page.unroute("**/v1/**")
        visit.wait_for_answer(visit.page.locator(".panel").first)
        assert visit.text(".name") == "early.png"
        visit.page.click("#compare")
        visit.page.locator(".panel").last.locator(".samples button").first.wait_for()


def test_photograph_is_shown_with_what_the_crop_leaves_out(visit: Visit, tmp_path: Path) -> None:
    pixels = np.zeros((200, 300, 3), dtype=np.uint8)
    pixels[..., 0] = 200
    Image.fromarray(pixels).save(tmp_path / "wide.png")
    visit.page.set_input_files("input[type=file]", str(tmp_path / "wide.png"))
    visit.wait_for_answer(visit.page.locator(".panel").first)
    visit.page.locator("#strength").fill("0")
    visit.settle()
    with Image.open(io.BytesIO(base64.b64decode(visit.drawing().partition(",")[2]))) as drawn:
        assert drawn.width / drawn.height == pytest.approx(1.5, abs=0.01)
        seen = np.asarray(drawn.convert("RGB"), dtype=int)
    edge, middle = seen[len(seen) // 2, 10], seen[len(seen) // 2, seen.shape[1] // 2]
    np.testing.assert_allclose(middle, (200, 0, 0), atol=3)
    assert np.ptp(edge) <= 3
    assert edge.max() < 60
    visit.hover(0.1, 0.5)  # beside the model's square, which begins at a sixth
    assert "class token looks" in visit.text(".title")
    visit.hover(1 / 6 + 0.9 * 2 / 3, 0.1)
    assert "patch in row 0, column 3" in visit.text(".title")


def test_link_contains_the_token_and_the_tab_keeps_it(browser: Any) -> None:
    token = "a+b/c d&e"
    with (
        serving(engine_of(small_model()), token) as address,
        visiting(browser, f"{address}#token={quote(token, safe='')}") as visit,
    ):
        visit.open_sample()
        assert "token" not in visit.page.url
        visit.page.reload()
        visit.open_sample()
        assert not visit.page.locator("#token-dialog").is_visible()
        assert visit.faults == []


def test_the_title_names_the_model(browser: Any) -> None:
    engine = engine_of(small_model())
    engine.name = "<b>photos</b>"
    with serving(engine) as address, visiting(browser, address) as visit:
        visit.open_sample()
        title = f"<b>photos</b> · {engine.architecture} · {engine.digest[:8]} – vitascope"
        assert visit.page.title() == title
        assert visit.text("#model").startswith("<b>photos</b> · 3 layers × 2 heads · ")
        assert visit.text("#weights").endswith(engine.digest)


def test_model_without_a_head_shows_attention_only(browser: Any) -> None:
    with serving(engine_of(small_model(head="none"))) as address, visiting(browser, address) as visit:
        visit.page.locator(".samples button").first.click()
        visit.page.locator(".panel.full").wait_for()
        visit.settle()
        rest = visit.drawing()
        visit.hover(0.9, 0.1)
        assert "patch in row 0, column 3" in visit.text(".title")
        assert visit.drawing() != rest
        assert "no head" in visit.text("#missing")
        assert not visit.page.locator("#modes [data-mode=class]").is_visible()
        assert not visit.page.locator(".predictions").is_visible()
        visit.press("g", "r")
        assert visit.text(".title").startswith("Rollout: ")
        with visit.page.expect_download():
            visit.press("s")
        assert visit.faults == []


def test_broken_picture_is_reported_and_the_next_one_works(
    browser: Any, address: str, tmp_path: Path
) -> None:
    with visiting(browser, address) as visit:
        broken = tmp_path / "broken.png"
        broken.write_bytes(b"no picture at all")
        visit.page.set_input_files("input[type=file]", str(broken))
        visit.page.wait_for_selector(".fault:not([hidden])")
        assert "not a picture" in visit.text(".fault span")
        assert visit.faults[0].startswith("422")
        visit.open_sample()
        assert not visit.page.locator(".fault").is_visible()


def test_file_dropped_anywhere_is_opened(visit: Visit) -> None:
    written = io.BytesIO()
    Image.fromarray(noise(20, 20)).save(written, "PNG")
    visit.page.evaluate(
        """bytes => {
            const transfer = new DataTransfer();
            transfer.items.add(new File([new Uint8Array(bytes)], "dropped.png", { type: "image/png" }));
            document.querySelector("main").dispatchEvent(
                new DragEvent("drop", { dataTransfer: transfer, bubbles: true, cancelable: true }));
        }""",
        list(written.getvalue()),
    )
    visit.wait_for_answer(visit.page.locator(".panel").first)
    assert visit.text(".name") == "dropped.png"


def test_page_is_chinese_in_a_chinese_browser(browser: Any, address: str) -> None:
    with visiting(browser, address, locale="zh-CN") as visit:
        visit.open_sample()
        visit.hover(0.1, 0.1)
        assert visit.page.locator("html").get_attribute("lang") == "zh-CN"
        assert visit.text(".title").startswith("第 ")
        assert visit.text(".title").endswith("第 0 行、第 0 列的图像块关注哪里")
        assert visit.text(".here").startswith("第 0 行、第 0 列：")
        assert visit.text("#help-title") == "使用方法"
        label = visit.page.locator("canvas.picture").get_attribute("aria-label")
        assert "关注哪里" in label
        assert set(visit.page.locator(".predictions span").all_inner_texts()) <= set(NAMES)
        visit.page.locator("#modes [data-mode=class]").click()
        visit.settle()
        assert "支持“" in visit.text(".title")
        assert visit.faults == []
