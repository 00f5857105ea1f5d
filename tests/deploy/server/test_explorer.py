"""The explorer's routes, requested as its page requests them."""

import inspect
import json
import re
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from safetensors.torch import load

from tests.data import encoded, noise
from tests.deploy.server.served import PATIENT, refusal
from tests.models import small_model, small_resnet
from vitascope.analysis.explain.lens import lens
from vitascope.data.samples import CREDIT, PHOTOS
from vitascope.deploy.server import attention_pack
from vitascope.deploy.server.app import create_app
from vitascope.deploy.server.attention_pack import pack_attention, pack_heatmap, pack_picture, pack_without
from vitascope.deploy.server.page_content import MEDIA_TYPES, samples_for, web_files
from vitascope.deploy.server.settings import Settings
from vitascope.errors import UserError
from vitascope.models.engines.engine import TorchEngine
from vitascope.models.ensemble import Ensemble

NAMES = ("<img src=x onerror=alert(1)>", "Dogs", "sports car, sport car", "catalog", "e")


def engine_of(**options: Any) -> TorchEngine:
    model = small_model(**options)
    return TorchEngine(model, precision="fp32", device="cpu")


def client_of(
    engine: TorchEngine, token: str | None = None, beside: TorchEngine | None = None
) -> Iterator[TestClient]:
    app = create_app(engine, Settings(max_batch=1, **PATIENT), token, beside=beside)
    with TestClient(app, base_url="http://localhost") as client:
        while client.get("/readyz").status_code != 200:
            time.sleep(0.01)
        while beside and client.get("/beside/v1/model").status_code == 503:
            time.sleep(0.01)
        yield client


@pytest.fixture(scope="module")
def engine() -> TorchEngine:
    return engine_of(class_names=NAMES, image_size=(32, 48), num_registers=1)


@pytest.fixture(scope="module")
def client(engine: TorchEngine) -> Iterator[TestClient]:
    yield from client_of(engine)


PICTURE = encoded(noise(40, 60))


def post(client: TestClient, path: str, **query: Any) -> Any:
    return client.post(path, params=query, content=PICTURE, headers={"Content-Type": "image/png"})


# The page


def test_page_links_only_to_served_files_and_has_no_inline_scripts(client: TestClient) -> None:
    page = client.get("/")
    assert page.status_code == 200
    assert page.headers["Content-Type"].startswith("text/html")
    named = set(re.findall(r'(?:src|href)="([^"]+)"', page.text))
    assert {"web/style.css", "web/main.js"} <= named
    for address in named:
        assert client.get(f"/{address}").status_code == 200, address
    policy = page.headers["Content-Security-Policy"]
    assert "default-src 'self'" in policy
    assert "unsafe" not in policy
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=|javascript:", page.text)


def test_every_file_has_its_type_and_is_cached_until_it_changes(client: TestClient) -> None:
    for name in web_files():
        first = client.get(f"/web/{name}")
        assert first.headers["Content-Type"] == MEDIA_TYPES[name[name.rfind(".") :]]
        again = client.get(f"/web/{name}", headers={"If-None-Match": first.headers["ETag"]})
        assert (again.status_code, again.content) == (304, b"")
        other = client.get(f"/web/{name}", headers={"If-None-Match": '"an older one"'})
        assert other.status_code == 200
    for name in ("none.js", "..%2Fexplorer.py", "%2e%2e/engine.py", "__init__.py"):  # nothing else
        assert client.get(f"/web/{name}").status_code == 404


def test_scripts_import_only_existing_names_and_insert_no_html() -> None:
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|https?://"
    for name in web_files():
        text = web_files()[name][1].decode() if name.endswith(".js") else ""
        assert not re.search(forbidden, text)
        for imported in re.findall(r'from "\./([^"]+)"', text):
            exported = web_files()[imported][1].decode()
            line = re.search(rf'import \{{([^}}]*)\}} from "\./{re.escape(imported)}"', text)
            for symbol in filter(None, (part.strip() for part in line[1].split(","))):
                assert re.search(rf"export (?:async )?(?:const|function|class) {symbol}\b", exported), symbol
                assert len(re.findall(rf"\b{symbol}\b", text)) > 1, f"{symbol} is not used"


# The page in Chinese


class Texts(HTMLParser):
    """The words of the page that its readers see or hear; not keys, code and names."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.inside = tag
        spoken = ("aria-label", "aria-roledescription", "placeholder", "title")
        self.found |= {value for name, value in attrs if name in spoken and value}

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        words = " ".join(data.split())
        if self.inside != "kbd" and re.search("[a-z]{2}", words) and words != "vitascope":
            self.found.add(words)


def translations() -> set[str]:
    return {text for text in json.loads(web_files()["chinese.json"][1]) if not text.startswith("^")}


def test_every_text_of_the_page_has_a_translation_and_every_translation_a_use() -> None:
    texts = Texts(web_files()["index.html"][1].decode()).found
    assert len(texts) > 40
    assert sorted(texts - translations()) == []
    others = [name for name in web_files() if name.endswith(".js") and name != "chinese.js"]
    sources = "".join(web_files()[name][1].decode() for name in others) + inspect.getsource(attention_pack)
    unused = translations() - Texts(web_files()["index.html"][1].decode()).found
    assert sorted(text for text in unused if f'"{text}"' not in sources) == []


# The page's requests


def test_picture_returns_its_pack_a_layer_of_it_or_a_class_map(client: TestClient, engine) -> None:
    answer = post(client, "/v1/attention")
    assert answer.status_code == 200
    assert answer.headers["Cache-Control"] == "no-store"
    assert answer.content == pack_picture(engine, engine.pixels(PICTURE))
    length = int.from_bytes(answer.content[:8], "little")
    about = json.loads(json.loads(answer.content[8 : 8 + length])["__metadata__"]["explorer"])
    assert about["class_names"] == list(NAMES)  # with HTML, as data
    pixels = engine.pixels(PICTURE)
    assert post(client, "/v1/attention", layer=1).content == pack_attention(engine, pixels, 1)
    assert post(client, "/v1/attention", layer=2, head=1).content == pack_attention(engine, pixels, 2, 1)
    assert post(client, "/v1/attention", layer=0, head="mean").content == pack_attention(
        engine, pixels, 0, "mean"
    )
    content = post(client, "/v1/heatmap", method="layer-cam", target=2).content
    assert content == pack_heatmap(engine, pixels, "layer-cam", 2)
    by_default = load(post(client, "/v1/heatmap", target=2).content)["heatmaps"]
    assert tuple(by_default.shape) == (1, 4, 6)


def test_parts_are_off_in_one_request_only(client: TestClient, engine: TorchEngine) -> None:
    pixels, off = engine.pixels(PICTURE), "head1.0,attention0,mlp2,layer1,patch3"
    before = post(client, "/v1/attention").content
    found = load(post(client, "/v1/attention", off=off).content)
    model, images = engine.model, engine.preprocess.normalize(torch.from_numpy(pixels)[None])
    parts = {"heads": [(1, 0)], "attention": [0], "mlps": [2], "layers": [1], "patches": [3]}
    with torch.inference_mode(), model.intervene(**parts):
        torch.testing.assert_close(found["probabilities"], model(images)[0].softmax(0))
        expected = lens(model, images)
    assert post(client, "/v1/attention").content == before
    found = load(post(client, "/v1/heatmap", method="lens", target=2, off=off).content)
    torch.testing.assert_close(found["heatmaps"], expected.patches[:, 0].softmax(-1)[..., 2])
    torch.testing.assert_close(found["curve"], expected.logits[:, 0].softmax(-1)[:, 2])
    assert not any(part._forward_hooks for part in model.modules())


def test_parts_of_other_models_and_large_lenses_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    for model in (small_resnet(), Ensemble.of([small_model(), small_model(seed=1)])):
        model.preprocess = small_model().preprocess
        engine = TorchEngine(model, device="cpu")
        with pytest.raises(UserError, match="parts can be switched off in a Vision Transformer"):
            pack_without("mlp0", pack_picture, engine, engine.pixels(PICTURE))
    monkeypatch.setattr(attention_pack, "LARGEST_LENS", 4 * 4 * 16 * 5 - 1)
    engine = engine_of()
    with pytest.raises(UserError, match="the lens on 5 classes takes 1,280 bytes; the limit is 1,279"):
        pack_heatmap(engine, engine.pixels(PICTURE), "lens", 0)


def test_invalid_request_is_rejected_with_a_message(client: TestClient) -> None:
    for query, message in (
        ({"layer": 9}, "no layer 9"),
        ({"layer": 0, "head": 5}, "no head 5"),
        ({"head": 0}, "give layer="),
        ({"layer": "x"}, "layer"),
        ({"layers": 1}, "nearest: layer"),
        ({"off": "layer99"}, "no layer 99: the model has 3, 0 to 2"),
        ({"off": "head1.7"}, "no head 7: each layer has 2, 0 to 1"),
        ({"off": ",".join(f"patch{n}" for n in range(24))}, "all 24 patches are off"),
        ({"off": "mlp0,head1"}, "off: no part 'head1'; parts are head0.1"),
        ({"off": "mlp0.1"}, "off: no part 'mlp0.1'"),
        ({"off": "x" * 4001}, "at most 4000"),
    ):
        assert message in refusal(post(client, "/v1/attention", **query), 422)
    for query, message in (
        ({}, "target"),
        ({"target": 9}, "no class 9"),
        ({"target": 0, "method": "magic"}, "no class map 'magic'"),
        ({"target": 9, "method": "lens"}, "no class 9"),
        ({"target": 0, "off": "patch300"}, "no patch 300: the grid of 4x6 has 24, 0 to 23"),
    ):
        assert message in refusal(post(client, "/v1/heatmap", **query), 422)


# Samples


def test_samples_are_listed_and_can_be_sent_back(client: TestClient, engine: TorchEngine) -> None:
    listed = client.get("/v1/samples").json()
    assert [sample["name"] for sample in listed] == ["dog", "automobile"]
    assert all(sample["title"] == f"{sample['name']} ({CREDIT})" for sample in listed)
    picture = client.get("/v1/samples/dog")
    assert picture.headers["Content-Type"] == "image/jpeg"
    assert engine.pixels(picture.content).shape == (3, 32, 48)
    assert client.get("/v1/samples/none").status_code == 404


def test_samples_of_classes_that_the_model_does_not_know_are_not_offered(client: TestClient) -> None:
    assert client.get("/v1/samples/horse").status_code == 404
    assert samples_for(engine_of(class_names=("shirt", "shoe", "bag", "coat", "hat"))) == []
    assert [each.name for each in samples_for(engine_of())] == list(PHOTOS)  # its classes have no names


# With a token


def test_the_page_opens_without_the_token_and_pictures_need_it(engine: TorchEngine) -> None:
    for client in client_of(engine, token="secret"):
        assert client.get("/").status_code == 200
        assert client.get("/web/main.js").status_code == 200
        for path in ("/v1/attention", "/beside/v1/attention"):
            assert post(client, path).status_code == 401
        assert client.get("/v1/samples").status_code == client.get("/beside/v1/model").status_code == 401
        allowed = client.get("/v1/samples", headers={"Authorization": "Bearer secret"})
        assert allowed.status_code == 200


def test_model_beside_answers_the_explorer_alone(client: TestClient, engine: TorchEngine) -> None:
    assert not client.get("/v1/model").json()["beside"]
    assert client.get("/beside/v1/model").status_code == 404
    other = engine_of(depth=1, num_heads=1)
    for client in client_of(engine, beside=other):
        assert client.get("/v1/model").json()["beside"]
        assert client.get("/beside/v1/model").json()["digest"] == other.digest != engine.digest
        found = load(client.post("/beside/v1/attention", content=PICTURE).content)
        expected = load(pack_picture(other, other.pixels(PICTURE)))
        for name in expected:
            np.testing.assert_array_equal(found[name], expected[name])
        unknown = client.post("/beside/v1/attention?depth=1", content=PICTURE)
        assert (unknown.status_code, "unknown query parameter" in unknown.text) == (422, True)
        assert client.post("/beside/v1/predict", content=PICTURE).status_code == 404
