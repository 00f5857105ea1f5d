"""Several models in one server: each under its name, with one queue, one limit and one set of metrics."""

import base64
from collections.abc import Callable
from typing import Any

import pytest

from tests.deploy.server.served import (
    ALL,
    PATIENT,
    Client,
    HeldEngine,
    grey,
    picture,
    refusal,
    serving,
    torch_engine,
    until,
)
from vitascope.deploy.server.admission import Room
from vitascope.deploy.server.app import create_app
from vitascope.deploy.server.settings import Settings
from vitascope.errors import UserError
from vitascope.models.engines.engine import TorchEngine

OTHERS = ("elm", "fir", "oak", "yew", "ash")
TEXT = base64.b64encode(picture()).decode()
TENSOR = {"name": "image", "datatype": "BYTES", "shape": [1], "data": [TEXT]}


@pytest.fixture(scope="module")
def models(engine: TorchEngine) -> dict[str, Any]:
    return {"insects": engine, "trees": torch_engine(class_names=OTHERS, seed=1)}


BY_NAME: dict[str, tuple[str, Any, Callable[[Any], str]]] = {
    "own": ("/models/trees/v1/predict", None, lambda found: found["predictions"][0]["label"]),
    "huggingface": ("/models/trees", {"inputs": TEXT}, lambda found: found[0]["label"]),
    "kserve": (
        "/v1/models/trees:predict",
        {"instances": [TEXT]},
        lambda found: found["predictions"][0][0]["label"],
    ),
    "explain": (
        "/v1/models/trees:explain",
        {"instances": [TEXT]},
        lambda found: found["explanations"][0]["label"],
    ),
    "oip": (
        "/v2/models/trees/versions/1/infer",
        {"inputs": [TENSOR]},
        lambda found: found["outputs"][1]["data"][0],
    ),
}


async def test_each_model_answers_under_its_name_in_every_protocol(models: dict[str, Any]) -> None:
    async with serving(models, **ALL) as client:
        for path, body, label in BY_NAME.values():
            content: dict[str, Any] = {"content": picture()} if body is None else {"json": body}
            for name, classes in (("trees", OTHERS), ("insects", models["insects"].class_names)):
                answer = await client.post(path.replace("trees", name), **content)
                assert label(answer.json()) in classes
            assert (await client.post(path.replace("trees", "moss"), **content)).status_code == 404
        first = (await client.post("/v1/predict", content=picture())).json()
        assert first["predictions"][0]["label"] in models["insects"].class_names


async def test_models_are_listed_described_and_documented(models: dict[str, Any]) -> None:
    async with serving(models, "s3cret", **ALL) as client:
        client.headers["Authorization"] = "Bearer s3cret"
        listed = [one["id"] for one in (await client.get("/v1/models")).json()["data"]]
        assert listed == list(models)
        body = {"model": "moss", "input": TEXT}
        missing = (await client.post("/v1/embeddings", json=body)).json()["error"]["message"]
        assert missing == "no model 'moss' here; known are insects, vitascope, trees"
        assert (await client.get("/models/trees/v1/model")).json()["class_names"] == list(OTHERS)
        assert "/models/trees/v1/predict" in (await client.get("/openapi.json")).json()["paths"]
        question = await client.post("/models/trees/v1/predict?topk=1", content=picture())
        assert "nearest: top_k" in refusal(question, 422)
        await client.post("/models/trees/v1/predict", content=picture())
        text = (await client.get("/metrics")).text
        del client.headers["Authorization"]
        assert (await client.get("/models/trees/")).status_code == 200  # the explorer's page
        assert (await client.post("/models/trees/v1/predict", content=picture())).status_code == 401
    assert 'vitascope_requests_total{route="/models/trees/v1/predict",status="200"} 1.0' in text
    assert 'vitascope_computed_total{work="trees/predict"} 1.0' in text


async def test_queue_and_bodies_are_bounded_together(engine: TorchEngine) -> None:
    held = HeldEngine()
    async with serving({"held": held, "other": engine}, queue=1) as client:
        service = client.app.state.service
        accepted = await client.holding(held)
        for path in ("/models/other/v1/predict", "/models/other/v1/embed", "/models/held/v1/predict"):
            answer = await client.post(path, content=grey(2))
            assert "1 requests are in progress" in refusal(answer, 429)
        held.go.set()
        assert (await accepted).status_code == 200
        await until(lambda: service.admission.taken.requests == 0)
        assert (await client.post("/models/other/v1/predict", content=picture())).status_code == 200
        assert service.admission.taken == Room()  # of all models


async def test_server_is_ready_when_all_models_are_and_ends_if_one_cannot_be_loaded(engine) -> None:
    def missing() -> Any:
        raise UserError("no such model")

    app = create_app({"a": engine, "b": missing}, Settings(access_log=False, **PATIENT))
    async with app.router.lifespan_context(app), Client(app) as client:
        await until(lambda: app.state.service.fault is not None)
        assert "no such model" in refusal(await client.get("/readyz"), 503)
        assert refusal(await client.predict(picture()), 503)
