"""Clients of other servers work unchanged, and get the answers of `/v1`."""

import asyncio
import base64
import json
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import openai
import pytest
import tritonclient.http as triton
from huggingface_hub import InferenceClient
from PIL import Image

from tests.deploy.server.served import ALL, NAMES, ROUTES, HeldEngine, listening, picture, serving
from tests.models import small_model
from vitascope.analysis.explain.methods import DEFAULT_METHOD
from vitascope.deploy.predict.explanation import explain_pixels
from vitascope.deploy.predict.predictor import Predictor
from vitascope.deploy.server import protocols
from vitascope.deploy.server.open_inference import MOST_VALUES
from vitascope.deploy.server.protocols import PICTURE_VALUES
from vitascope.models.engines.engine import TorchEngine

FILES = [picture(seed) for seed in range(3)]
ENCODED = [base64.b64encode(file).decode() for file in FILES]
URI = f"data:image/png;base64,{ENCODED[0]}"
URL = "http://shop.example/cat.jpg"


async def asked(engine: TorchEngine, use: Callable[[str], Any]) -> Any:
    async with listening(engine, **ALL) as (_, (host, port)):
        return await asyncio.to_thread(use, f"http://{host}:{port}")


async def test_the_client_of_the_hub_gets_the_classes(engine: TorchEngine) -> None:
    def use(url: str) -> Any:
        client = InferenceClient(model=url)
        return client.image_classification(FILES[0]), client.image_classification(FILES[1], top_k=2)

    usual, two = await asked(engine, use)
    for found, wanted in zip((usual, two), Predictor(engine)(FILES[:2], top_k=5), strict=True):
        for guess, want in zip(found, wanted, strict=False):
            assert guess.label == want.label
            assert guess.score == pytest.approx(want.score, abs=1e-6)
    assert (len(usual), len(two)) == (5, 2)


@pytest.mark.parametrize("form", ["float", "base64"])
async def test_the_client_of_openai_gets_embeddings(engine: TorchEngine, form: Any) -> None:
    def use(url: str) -> Any:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="any")
        (model,) = client.models.list().data
        assert client.models.retrieve(model.id) == model
        with pytest.raises(openai.NotFoundError, match="no model 'gpt' here"):
            client.models.retrieve("gpt")
        return client.embeddings.create(
            model=model.id, input=[URI, *ENCODED[1:]], encoding_format=form, user="me"
        )

    found = await asked(engine, use)
    for index, (one, file) in enumerate(zip(found.data, FILES, strict=True)):
        values = one.embedding
        if form == "base64" and isinstance(values, str):
            values = np.frombuffer(base64.b64decode(values), np.float32)
        (wanted,) = engine.features_of_pictures([engine.pixels(file)])
        assert one.index == index
        np.testing.assert_allclose(values, wanted[0], atol=1e-5)


@pytest.mark.parametrize(("binary", "coding"), [(True, None), (False, "gzip"), (True, "deflate")])
async def test_the_client_of_triton_gets_probabilities_and_labels(engine, binary, coding) -> None:
    def use(url: str) -> Any:
        client = triton.InferenceServerClient(url.removeprefix("http://"))
        assert client.is_server_live()
        assert client.is_model_ready("vitascope", "1")
        assert client.get_model_metadata("vitascope")["outputs"][0]["shape"] == [-1, len(NAMES)]
        tensor = triton.InferInput("image", [3], "BYTES")
        texts = FILES if binary else [text.encode() for text in ENCODED]
        tensor.set_data_from_numpy(np.array(texts, dtype=object), binary_data=binary)
        names = ("probabilities", "labels")
        wanted = [triton.InferRequestedOutput(name, binary_data=binary) for name in names]
        wanted.append(triton.InferRequestedOutput("probabilities", binary_data=binary, class_count=2))
        packed = {"request_compression_algorithm": coding, "response_compression_algorithm": coding}
        first = client.infer("vitascope", [tensor], outputs=wanted[:2], **packed)
        second = client.infer("vitascope", [tensor], outputs=wanted[2:], **packed)
        return *map(first.as_numpy, names), second.as_numpy(names[0])

    probabilities, labels, tops = await asked(engine, use)
    for row, label, top, wanted in zip(
        probabilities, labels, tops, Predictor(engine)(FILES, top_k=5), strict=True
    ):
        assert (label.decode() if isinstance(label, bytes) else label) == wanted[0].label
        np.testing.assert_allclose(np.sort(row)[::-1], [one.score for one in wanted], atol=1e-6)
        first = top[0].decode() if isinstance(top[0], bytes) else top[0]
        assert first.endswith(f":{wanted[0].index}:{wanted[0].label}")


async def test_bytes_are_flat_or_in_the_shape_of_their_tensor(engine: TorchEngine) -> None:
    async with serving(engine, **ALL) as client:

        async def probabilities(shape: list[int], data: Any) -> Any:
            answer = await client.post("/v2/models/vitascope/infer", json=tensor(shape=shape, data=data))
            return answer.json()["outputs"][0]["data"] if answer.status_code == 200 else answer.status_code

        flat = await probabilities([3], ENCODED)
        for shape, data in (([3, 1], [[text] for text in ENCODED]), ([1, 1, 3], [[ENCODED]])):
            np.testing.assert_allclose(await probabilities(shape, data), flat, atol=1e-6)
        assert await probabilities([3], [ENCODED, ENCODED]) == 422
        assert await probabilities([3], [ENCODED[0], ENCODED[1:]]) == 422


@pytest.mark.parametrize("path", ROUTES)
async def test_json_of_too_many_values_is_rejected_before_it_is_parsed(path: str, monkeypatch) -> None:
    most = MOST_VALUES if path.endswith("infer") else 32 * PICTURE_VALUES
    parsed: list[str] = []
    monkeypatch.setattr(protocols, "parse_json", lambda text: parsed.append(text) or [])
    async with serving(HeldEngine(), **ALL) as client:
        for value in (b"[]", b"{}", b"1", b'{"a":1}', b"[[1,2],3]"):
            for share, status in ((0.15, 422), (1.01, 413)):
                body = b'{"inputs":[' + b",".join([value] * int(share * most)) + b"]}"
                answer = await client.post(path, content=body, headers={"content-type": "application/json"})
                assert answer.status_code == status
            assert f"over the limit of {most:,}" in answer.text
    assert len(parsed) == 5


async def test_pixels_are_pictures_too(engine: TorchEngine) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (2, 20, 30, 3), dtype=np.uint8)
    tensor = {"name": "image", "datatype": "UINT8", "shape": list(pixels.shape), "data": pixels.tolist()}
    body = {"model_name": "vitascope", "id": "7", "inputs": [tensor]}  # as KServe's client writes
    async with serving(engine, **ALL) as client:
        found = (await client.post("/v2/models/vitascope/infer", json=body)).json()
    output = {one["name"]: one for one in found["outputs"]}
    wanted = Predictor(engine)([Image.fromarray(one) for one in pixels], top_k=1)
    assert output["labels"]["data"] == [answers[0].label for answers in wanted]


async def test_kserve_s_first_protocol_predicts_and_explains(engine: TorchEngine) -> None:
    async with serving(engine, **ALL) as client:
        given = {"instances": [{"image": {"b64": ENCODED[0]}}, ENCODED[1], {"b64": "AAAA"}, URL, "%"]}
        found = (await client.post("/v1/models/vitascope:predict", json=given)).json()["predictions"]
        given = {"instances": [{"b64": ENCODED[0]}]}
        (explained,) = (await client.post("/v1/models/vitascope:explain", json=given)).json()["explanations"]
        assert (await client.get("/v1/models/vitascope")).json()["ready"]
    for guesses, wanted in zip(found, Predictor(engine)(FILES[:2], top_k=5), strict=False):
        assert [guess["label"] for guess in guesses] == [want.label for want in wanted]
    for one, reason in zip(found[2:], ("not a picture", "URLs are not fetched", "base64"), strict=True):
        assert reason in one["error"]
    pixels = engine.pixels(FILES[0])
    heat = explain_pixels(engine, pixels, DEFAULT_METHOD, None, batch_size=8).heatmap
    np.testing.assert_allclose(explained["heatmap"], heat, atol=1e-5)


async def test_a_model_without_classes_gives_its_features() -> None:
    engine = TorchEngine(small_model(head="none"), precision="fp32", device="cpu")
    async with serving(engine, **ALL) as client:
        (row,) = (await client.post("/", content=FILES[0])).json()
        tensor = {"name": "image", "datatype": "BYTES", "shape": [1], "data": ENCODED[:1]}
        found = (await client.post("/v2/models/vitascope/infer", json={"inputs": [tensor]})).json()
        assert (
            await client.post("/v1/models/vitascope:predict", json={"instances": ENCODED})
        ).status_code == 501
    (wanted,) = engine.features_of_pictures([engine.pixels(FILES[0])])
    np.testing.assert_allclose(row, wanted[0], atol=1e-5)
    np.testing.assert_allclose(found["outputs"][0]["data"], wanted[0], atol=1e-5)


INFER, KSERVE = "/v2/models/vitascope/infer", "/v1/models/vitascope:predict"
EMBED = {"model": "vitascope", "input": URI}
LABELS: dict[str, Any] = {"name": "labels"}


def tensor(**changes: Any) -> dict[str, Any]:
    usual = {"name": "image", "datatype": "BYTES", "shape": [1], "data": ENCODED[:1]}
    return {"inputs": [usual | changes]}


def pixels(shape: list[int], data: list[Any]) -> dict[str, Any]:
    return tensor(datatype="UINT8", shape=shape, data=data)


REJECTED: list[tuple[str, Any, str]] = [
    ("/", {"inputs": URL}, "URLs are not fetched"),
    ("/", {"inputs": "%%%"}, "not valid base64"),
    ("/", {"inputs": 7}, "inputs: Input should be a valid string"),
    ("/", {"inputs": "AAAA"}, "not a picture"),
    ("/", {"inputs": URI, "parameters": {"topk": 1}}, "parameters.topk: Extra inputs are not permitted"),
    ("/", {"inputs": URI, "parameters": {"top_k": 0}}, "parameters.top_k: Input should be greater than"),
    ("/", {"inputs": URI, "parameters": {"function_to_apply": "none"}}, "function_to_apply=softmax"),
    ("/", {"inputs": URI, "top_k": 1}, "top_k: Extra inputs"),
    ("/", [], "the body: Input should be a valid dictionary"),
    ("/models/other", {"inputs": URI}, "no model 'other' here"),
    ("/v1/models/other:predict", {"instances": [URI]}, "no model 'other' here"),
    (KSERVE, {"instances": [URI], "top_k": 1}, "top_k: Extra inputs"),
    (KSERVE, {"instances": []}, "0 pictures"),
    (KSERVE, {"instances": [""] * 1000}, "1,000 pictures in a request"),
    ("/v1/models/vitascope:explain", {"instances": [URI, URI]}, "one picture, not 2"),
    ("/v2/models/other/infer", tensor(), "no model 'other'"),
    ("/v2/models/vitascope/versions/2/infer", tensor(), "no version '2'"),
    *[
        (INFER, body, message)
        for body, message in (
            ({"inputs": []}, "inputs: List should have at least 1 item"),
            ({"inputs": tensor()["inputs"] * 2}, "inputs: List should have at most 1 item"),
            (tensor(shape=[2]), "of 1 elements"),
            (tensor(shape=[-1]), "inputs.0.shape.0: Input should be greater"),
            (pixels([1, 2, 2, 3], [1]), "of 1 values"),
            (pixels([1, 1, 1, 1], [256]), "0 to 255"),
            (pixels([1, 1, 1, 1], ["a"]), "0 to 255"),
            (pixels([1, 1, 1, 3], ["A" * 10**6, *[""] * 10**5]), "whole numbers"),
            (tensor(name="mask"), "inputs.0.name: Input should be 'image'"),
            (tensor(contents=[]), "inputs.0.contents: Extra inputs"),
            (tensor(parameters={"content_type": "np"}), "parameters.content_type: Extra inputs"),
            (tensor(parameters={"binary_data_size": 9}), "0 bytes follow"),
            (tensor(parameters={"binary_data_size": 0}), "not both"),
            (tensor() | {"parameters": {"sequence_id": 1}}, "parameters.sequence_id: Extra inputs"),
            (tensor() | {"parameters": {"binary_data_output": "no"}}, "should be a valid boolean"),
            (tensor() | {"raw_input_contents": []}, "raw_input_contents: Extra inputs"),
            (tensor() | {"model_name": "b"}, "model_name is not vitascope"),
            (tensor() | {"outputs": [LABELS] * 9}, "outputs: List should have at most 4 items"),
            (tensor() | {"outputs": [{"name": "boxes"}]}, "no output 'boxes'"),
            (tensor() | {"outputs": [LABELS | {"shape": [1]}]}, "outputs.0.shape: Extra inputs"),
            (
                tensor() | {"outputs": [LABELS | {"parameters": {"classification": 1}}]},
                "of the output probabilities",
            ),
        )
    ],
    *[
        ("/v1/embeddings", body, message)
        for body, message in (
            (EMBED | {"input": [URL]}, "URLs are not fetched"),
            (EMBED | {"dimensions": 5}, "dimensions are 16: this model"),
            (EMBED | {"modality": "audio"}, "modality: Input should be 'image'"),
            (EMBED | {"input": {"image": URI, "text": "a cat"}}, "has one of image, image_url"),
            (EMBED | {"input": {"image": URI, "url": URL}}, "b64, url, not image, url"),
            (EMBED | {"encoding_format": "int8"}, "encoding_format: Input should be 'float' or"),
            (EMBED | {"model": "gpt"}, "no model 'gpt' here"),
            ({"input": URI}, "model: Field required"),
        )
    ],
]


async def test_what_cannot_be_answered_is_one_line_in_the_protocol_s_form(engine: TorchEngine) -> None:
    async with serving(engine, **ALL) as client:
        for path, body, message in REJECTED:
            response = await client.post(path, json=body)
            assert response.status_code == (404 if message.startswith(("no model", "no version")) else 422)
            error = response.json()["error"]
            if path == "/v1/embeddings":  # OpenAI's errors are objects
                assert error["type"] == "invalid_request_error"
                error = error["message"]
            assert message in error
        assert (await client.predict(FILES[0])).status_code == 200  # other clients are unharmed


async def test_lengths_of_binary_tensors_that_lie_are_rejected(engine: TorchEngine) -> None:
    async with serving(engine, **ALL) as client:
        for head, rest, declared, message in (
            ("999999", b"", True, "and the body has"),
            ("-1", b"", True, "and the body has"),
            (None, struct.pack("<I", 2**31) + b"abc", True, "ends"),
            (None, b"abc", False, "binary_data_size is None, and 3 bytes follow"),
        ):
            size = {"binary_data_size": len(rest)} if declared else {}
            about = json.dumps(tensor(data=None, parameters=size)).encode()
            headers = {"Inference-Header-Content-Length": head or str(len(about))}
            response = await client.post(INFER, content=about + rest, headers=headers)
            assert (response.status_code, message in response.json()["error"]) == (422, True)


async def test_protocols_are_off_unless_they_are_asked_for(engine: TorchEngine) -> None:
    async with serving(engine) as client:
        for path in ROUTES:
            assert (await client.post(path, json={})).status_code in (404, 405)


async def test_pages_of_allowed_sites_may_send_requests(engine: TorchEngine) -> None:
    async with serving(engine, allow_origin=("https://shop.example",)) as client:
        for site, status in (("https://shop.example", 200), ("https://other.example", 403)):
            headers = {"Origin": site, "Sec-Fetch-Site": "cross-site", "Content-Type": "image/png"}
            response = await client.post("/v1/predict", content=FILES[0], headers=headers)
            assert response.status_code == status
            assert (response.headers.get("access-control-allow-origin") == site) == (status == 200)
        asking = {"Origin": "https://shop.example", "Access-Control-Request-Method": "POST"}
        assert (await client.options("/v1/predict", headers=asking)).status_code == 204
        assert (
            await client.options("/v1/predict", headers={**asking, "Origin": "https://x"})
        ).status_code == 403


async def test_a_name_with_slashes_is_a_name_too() -> None:
    engine = TorchEngine(small_model(class_names=NAMES), precision="fp32", device="cpu")
    engine.name = "runs/small"
    async with serving(engine, **ALL) as client:
        for name in ("runs/small", "small"):
            assert (await client.get(f"/v2/models/{name}")).json()["name"] == name
            assert (await client.get(f"/v2/models/{name}/versions/1/ready")).status_code == 200
            assert (await client.get(f"/v2/models/{name}/versions/7")).status_code == 404
            assert (
                await client.post(f"/v2/models/{name}/versions/1/infer", json=tensor())
            ).status_code == 200
            body = {"instances": ENCODED[:1]}
            assert (await client.post(f"/v1/models/{name}:predict", json=body)).status_code == 200


async def test_requests_are_counted_by_the_routes_of_their_protocol(engine: TorchEngine) -> None:
    async with serving(engine, **ALL) as client:
        for path in (
            *ROUTES,
            "/v2/models/a/versions/1/infer",
            "/v1/models/vitascope:explain",
            "/v1/models/x",
        ):
            await client.post(path, json={})
        text = (await client.get("/metrics")).text
    for route, status in {
        "/": 422,
        "/v1/embeddings": 422,
        "/v1/models/{name:path}:predict": 422,
        "/v1/models/{name:path}:explain": 422,
        "/v1/models/{name:path}": 405,
        "/v2/models/{name:path}/infer": 422,
    }.items():
        assert f'vitascope_requests_total{{route="{route}",status="{status}"}} 1.0' in text


async def test_json_is_declared_as_such_and_not_deep(engine: TorchEngine) -> None:
    async with serving(engine, **ALL) as client:
        for path in ("/v1/embeddings", KSERVE, INFER):
            response = await client.post(path, content=b"{}", headers={"Content-Type": "text/html"})
            assert response.status_code == 415
        for path in ROUTES:
            deep = {"content": "[" * 2000, "headers": {"content-type": "application/json"}}
            assert (await client.post(path, **deep)).status_code == 422
