"""The OpenAPI document is valid, complete, and matches the server's responses."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.openapi.models import OpenAPI
from pydantic import TypeAdapter

from tests.deploy.server.served import ALL, HeldEngine, grey, picture, play, refusal, serving
from vitascope.deploy.server import openapi
from vitascope.models.engines.engine import TorchEngine


@pytest.fixture(scope="module", params=[{}, ALL], ids=["alone", "with protocols"])
def document(engine: TorchEngine, request: pytest.FixtureRequest) -> dict[str, Any]:
    return documented(engine, **request.param)


def documented(engine: Any, **options: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}

    async def story() -> None:
        async with serving(engine, **options) as client:
            right = {"Authorization": f"Bearer {options.get('token')}"}
            found.update((await client.get("/openapi.json", headers=right)).json())

    play(story())
    return found


def responses(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            for status, response in operation["responses"].items():
                yield f"{method} {path}", status, response


def test_document_is_valid_and_every_reference_resolves(document: dict[str, Any]) -> None:
    OpenAPI.model_validate(document)
    for name in re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document)):
        assert name in document["components"]["schemas"]
    assert document["openapi"].startswith("3.1")


def test_every_response_has_a_schema_and_a_description(document: dict[str, Any]) -> None:
    for place, status, response in responses(document):
        assert response["description"], (place, status)
        assert response["content"], (place, status)
        for content in response["content"].values():
            assert content["schema"], (place, status)
        if int(status) >= 400:
            form = (
                "OpenAIProblem" if re.search("/v1/(models$|models/{name}$|embeddings)", place) else "Problem"
            )
            schema = response["content"]["application/json"]["schema"]
            assert schema == {"$ref": f"#/components/schemas/{form}"}
    for path, operations in document["paths"].items():
        assert ("requestBody" in operations.get("post", {})) == ("post" in operations)
        parameters = [one["name"] for value in operations.values() for one in value.get("parameters", [])]
        assert set(re.findall("{(.*?)}", path)) <= set(parameters)
    explained = document["paths"]["/v1/explain"]["post"]["responses"]["200"]["content"]
    assert set(explained) == {"application/json", "image/png"}
    predicted = document["paths"]["/v1/predict"]["post"]["responses"]
    assert set(predicted) >= {"200", "403", "408", "413", "415", "421", "422", "429", "500", "503", "504"}


def test_security_is_described_if_a_token_is_required(document: dict[str, Any]) -> None:
    assert "securitySchemes" not in document["components"]
    assert not any(status == "401" for _, status, _ in responses(document))
    secured = documented(HeldEngine(), token="s3cret")
    assert secured["components"]["securitySchemes"] == {"HTTPBearer": {"type": "http", "scheme": "bearer"}}
    for path, operations in secured["paths"].items():
        for operation in operations.values():
            is_open = path in ("/livez", "/readyz")
            assert operation.get("security") == (None if is_open else [{"HTTPBearer": []}])
            assert ("401" in operation["responses"]) == (not is_open)


async def test_real_responses_match_the_document(engine: TorchEngine) -> None:
    files = [("image", ("a.png", picture())), ("image", ("b.png", b"x"))]
    async with serving(engine, **ALL) as client:
        for shape, method, path, options in (
            (openapi.OpenAIProblem, "POST", "/v1/embeddings", {"json": {"model": "other"}}),
            (openapi.OpenAIProblem, "GET", "/v1/models/other", {}),
            (openapi.Problem, "POST", "/v2/models/other/infer", {"json": {}}),
            (openapi.Health, "GET", "/livez", {}),
            (openapi.Health, "GET", "/readyz", {}),
            (openapi.ModelDescription, "GET", "/v1/model", {}),
            (list[openapi.Sample], "GET", "/v1/samples", {}),
            (openapi.Predictions, "POST", "/v1/predict", {"content": picture()}),
            (openapi.Form[openapi.Predictions], "POST", "/v1/predict", {"files": files}),
            (openapi.Embedding, "POST", "/v1/embed", {"content": picture()}),
            (openapi.Form[openapi.Embedding], "POST", "/v1/embed", {"files": files}),
            (openapi.Heatmap, "POST", "/v1/explain", {"content": picture()}),
            (openapi.Heatmap, "POST", "/v1/explain?method=rollout", {"content": picture()}),
            (openapi.Problem, "POST", "/v1/predict", {"content": b"x"}),
            (openapi.Problem, "GET", "/v1/samples/none", {}),
        ):
            answer = await client.request(method, path, **options)
            assert (answer.status_code >= 400) == (shape in (openapi.Problem, openapi.OpenAIProblem))
            TypeAdapter(shape).validate_json(answer.content, strict=True)  # raises where they differ


async def test_document_and_page_name_the_prefix_of_a_proxy() -> None:
    async with serving(HeldEngine(), root_path="/apps/vit", token="s3cret") as client:
        client.headers["Authorization"] = "Bearer s3cret"
        assert (await client.get("/openapi.json")).json()["servers"] == [{"url": "/apps/vit"}]
        page = (await client.get("/docs")).text
        assert "http://127.0.0.1/apps/vit/v1/predict" in page
        assert "Authorization: Bearer $VITASCOPE_TOKEN" in page
        links = re.findall(r'href="([^"]+)"', page)
        assert links
        for link in links:
            assert not link.startswith("/")  # relative links work under any prefix
            assert (await client.get(f"/{link}")).status_code == 200


async def test_malformed_host_header_causes_no_redirect_or_internal_error() -> None:
    async with serving(HeldEngine(), host="0.0.0.0") as client:
        for host in ("[", "a:b:c", "é".encode("latin-1")):
            assert (await client.get("/docs", headers={b"Host": host})).status_code == 200
            assert refusal(await client.get("/livez/", headers={b"Host": host}), 404)
        assert (await client.predict(grey(1))).status_code == 200
