"""The page of `vs.page`, opened from the disk in a browser without a network."""

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitascope as vs
from tests.browser import PATIENCE, Visit, needs_browser, visiting
from tests.data import noise, write_picture
from tests.models import small_model
from vitascope.deploy.page import page as page_module
from vitascope.deploy.page.document import START
from vitascope.deploy.page.packing import packed
from vitascope.deploy.page.page import PageResult
from vitascope.deploy.page.proof import compared_picture, model_outputs
from vitascope.errors import UserError
from vitascope.models.vit import VisionTransformer
from vitascope.models.weights.preprocess import preprocess_of

pytestmark = needs_browser

HOSTILE = ("</script><img src=x onerror=alert(1)>", "<!--", "a 'quoted' \"name\"", "名前")
NAMES = (*HOSTILE, "cat", "dog", *(f"class {number}" for number in range(994)))

ASK = """async (base64) => {
    const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
    const { tensors } = await vitascopeModules["server.js"].fetchAttention(new Blob([bytes]));
    return { outputs: Array.from(tensors.outputs.data), pixels: Array.from(tensors.pixels.data) };
}"""


def model() -> VisionTransformer:
    return small_model(class_names=NAMES, num_classes=len(NAMES))


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> PageResult:
    """A page that was proved in the browser."""
    path = tmp_path_factory.mktemp("page") / "model.html"
    return vs.page(model(), path, weights="fp32", images=[noise(40, 50), noise(90, 20)])


@pytest.fixture
def visit(browser: Any, done: PageResult) -> Iterator[Visit]:
    with visiting(browser, done.path.as_uri(), offline=True) as visit:
        yield visit
        assert visit.faults == []


def encoded(image: Image.Image, form: str, **options: Any) -> bytes:
    written = io.BytesIO()
    image.save(written, form, **options)
    return written.getvalue()


def photograph() -> Image.Image:
    """A smooth picture, which a JPEG changes little."""
    return Image.fromarray(noise(5, 7)).resize((90, 64), Image.Resampling.BICUBIC)


def turned() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(photograph(), "PNG", exif=exif)


def test_browser_proves_the_page(done: PageResult) -> None:
    assert done.proof is not None
    assert done.proof.computed.pixels == 0
    assert done.proof.agreement.same == 2
    assert done.proof.agreement.difference < 1e-4
    assert done.proof.probabilities < 1e-5
    assert done.rounding.difference == 0
    assert len(done.proof.computed.answers) == 2


def test_page_whose_weights_are_damaged_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(*given: Any) -> dict[str, torch.Tensor]:
        tensors = packed(*given)
        return {**tensors, "norm.bias": 3 + tensors["norm.bias"]}

    monkeypatch.setattr(page_module, "packed", damaged)
    with pytest.raises(UserError, match="is not kept, because its outputs differ"):
        vs.page(small_model(), tmp_path / "a.html", images=noise(40, 50))
    assert list(tmp_path.iterdir()) == []


def test_dropped_picture_shows_its_class_and_its_attention(visit: Visit, tmp_path: Path) -> None:
    requests: list[str] = []
    visit.page.on("request", lambda request: requests.append(request.url))
    picture = write_picture(tmp_path / "<img src=x onerror=alert(2)>.png", size=(50, 40))
    visit.page.set_input_files("input[type=file]", str(picture))
    visit.wait_for_answer(visit.page.locator(".panel").first)
    [expected] = vs.Predictor(model(), precision="fp32", device="cpu")([picture], top_k=1)
    assert visit.text(".predictions span") == expected[0].label
    assert visit.text(".predictions b").rstrip("%") == pytest.approx(
        f"{100 * expected[0].score:.2f}", abs=0.01
    )
    rest = visit.drawing()
    visit.hover(0.5, 0.4)
    assert visit.drawing() != rest
    assert (
        visit.page.locator("script[type='text/base64'], #arriving").count() == 0
    )  # the memory of the weights is free
    assert all(url.startswith(("data:", "blob:")) for url in requests)


def test_names_are_text(visit: Visit) -> None:
    visit.open_sample()
    visit.press("g")
    assert visit.page.input_value("#method") == "occlusion"
    for name in HOSTILE:
        visit.page.fill("#search", name)
        visit.page.keyboard.press("Enter")
        visit.settle()
        assert visit.text(".title").endswith(f"evidence for “{name}”")
    assert visit.page.locator(".predictions span *, .title *, .found *").count() == 0
    visit.page.locator(".high:text-is('most')").wait_for()  # the last map is computed


def test_what_is_no_picture_is_one_line_and_the_next_picture_is_answered(
    visit: Visit, tmp_path: Path
) -> None:
    (tmp_path / "text.png").write_text("no picture")
    visit.page.set_input_files("input[type=file]", str(tmp_path / "text.png"))
    fault = visit.page.locator(".fault")
    fault.wait_for()
    assert "text.png: not a picture that this browser can read" in str(fault.text_content())
    visit.open_sample()
    assert fault.is_hidden()


@pytest.mark.parametrize(
    ("picture", "most"),
    [
        (encoded(photograph(), "PNG"), 0),
        (encoded(photograph(), "JPEG", quality=90), 2),  # two decoders
        (turned(), 0),
        (encoded(photograph().convert("L"), "PNG"), 0),
        (encoded(photograph().quantize(16), "PNG"), 0),
        (encoded(Image.merge("RGBA", [*photograph().split(), photograph().convert("L")]), "PNG"), 2),
        (encoded(photograph(), "WEBP", lossless=True), 0),
    ],
    ids=["png", "jpeg", "turned", "grey", "palette", "transparent", "webp"],
)
def test_pictures_are_decoded_as_in_python(visit: Visit, picture: bytes, most: int) -> None:
    own = model()
    pixels = preprocess_of(own).pixels(picture)
    found = visit.page.evaluate(ASK, base64.b64encode(picture).decode())
    difference = np.abs(np.array(found["pixels"]) - pixels.flatten().astype(int))
    assert difference.max() <= most
    logits = own(preprocess_of(own).normalize(torch.from_numpy(pixels)[None]))[0]
    difference = (torch.tensor(found["outputs"]).softmax(0) - logits.softmax(0)).abs()
    assert difference.max() < 1e-3


@pytest.mark.parametrize("missing", ["Worker", "OffscreenCanvas"])
def test_browser_without_workers_that_read_pictures_computes_in_the_page_and_says_so(
    missing: str, browser: Any, done: PageResult, tmp_path: Path
) -> None:
    page = tmp_path / "old.html"
    page.write_text(done.path.read_text().replace(START, f"delete globalThis.{missing}; {START}"))
    with visiting(browser, page.as_uri(), offline=True) as visit:
        visit.open_sample()
        assert "in the page itself, because this browser gives it no worker" in visit.text("#engine")
        assert visit.faults == []


def test_browser_without_webassembly_computes_in_plain_arrays_and_says_so(
    browser: Any, done: PageResult
) -> None:
    with visiting(browser, "about:blank", offline=True) as visit:
        # The page's own thread, because a worker has a WebAssembly of its own.
        visit.page.add_init_script("delete window.Worker; delete window.WebAssembly")
        visit.page.goto(done.path.as_uri())
        found = visit.page.evaluate(ASK, base64.b64encode(encoded(photograph(), "PNG")).decode())
        own = model()
        [expected] = model_outputs(own, [compared_picture(own, photograph())])
        torch.testing.assert_close(torch.tensor(found["outputs"]), expected, atol=1e-4, rtol=1e-4)
        assert visit.page.evaluate("vitascopeModules['server.js'].computing()").startswith("plain arrays")
        assert visit.faults == []


def test_too_little_memory_is_told_with_the_way_out(browser: Any, done: PageResult) -> None:
    with visiting(browser, "about:blank", offline=True) as visit:
        grow = "WebAssembly.Memory.prototype.grow = () => { throw new RangeError('no room') }"
        visit.page.add_init_script(f"delete window.Worker; {grow}")
        visit.page.goto(done.path.as_uri())
        visit.page.locator(".fault").wait_for(timeout=PATIENCE)
        assert "this browser has too little memory for it (no room): close other pages" in visit.text(
            ".fault"
        )


def test_two_models_are_proved_and_compared_on_one_picture(browser: Any, tmp_path: Path) -> None:
    first = small_model(class_names=NAMES[4:9])  # 4 x 4 patches
    second = small_model(depth=2, patch_size=4, image_size=24, pool="mean", head="none")  # 6 x 6
    both = vs.page(first, tmp_path / "both.html", beside=second, weights="fp32", images=noise(40, 50))
    assert both.beside is not None
    for each in (both, both.beside):
        assert each.proof is not None
        assert each.proof.computed.pixels == 0
        assert each.proof.agreement.difference < 1e-4
        assert each.rounding.difference == 0
    with visiting(browser, both.path.as_uri(), offline=True) as visit:
        visit.open_sample()
        weights, models = visit.page.locator("script[type='text/base64']"), visit.page.locator(".which")
        assert weights.count() == 1  # the second model is not unpacked before it is asked
        models.first.select_option("beside/")
        models.first.select_option("")  # what the other model reports meanwhile is not of this panel
        weights.wait_for(state="detached", timeout=PATIENCE)
        visit.wait_for_answer(visit.page.locator(".panel").first)
        visit.page.click("#compare")
        visit.page.locator(".panel.full[aria-busy=false]").nth(1).wait_for(timeout=PATIENCE)
        assert visit.page.locator(".name").all_text_contents() == 2 * [visit.text(".name")]
        assert [models.nth(place).input_value() for place in range(2)] == ["", "beside/"]
        assert len({*models.locator("option").all_text_contents()}) == 2  # also of models without names
        visit.hover(0.9, 0.1)
        titles = visit.page.locator(".title").all_text_contents()
        assert "row 0, column 3" in titles[0]
        assert "row 0, column 5" in titles[1]
        assert visit.faults == []


def test_other_picture_ends_what_is_computed(visit: Visit) -> None:
    visit.open_sample()
    visit.page.locator(".predictions button").first.click()  # a map that takes one pass per patch
    visit.page.click("#compare")
    visit.open_sample(1)
    assert visit.page.locator(".panel .fault:visible").count() == 0
