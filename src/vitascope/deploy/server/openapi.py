"""The OpenAPI description of the server: what FastAPI knows of the routes, and what the gate adds to all."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from vitascope.deploy.server.middleware import ALWAYS_OPEN
from vitascope.deploy.server.schemas import Problem
from vitascope.deploy.server.settings import Settings
from vitascope.deploy.server.uploads import REQUEST_ID

TEXT = {"type": "string"}
SECONDS = {"type": "integer", "minimum": 1}
REQUEST_ID_HEADER = {
    "description": "The request's name: the one that it brought, or a new one; also in the access log.",
    "schema": {**TEXT, "pattern": f"^{REQUEST_ID.pattern.decode()}$"},
}
HEADERS_OF_STATUS: dict[str, dict[str, Any]] = {
    "401": {"WWW-Authenticate": {"description": "`Bearer`", "schema": TEXT}},
    "429": {"Retry-After": {"description": "Seconds after which there may be room.", "schema": SECONDS}},
    "503": {"Retry-After": {"description": "Seconds after which to try again.", "schema": SECONDS}},
}
OF_THE_GATE = {
    "400": "The request line or a header is broken.",
    "421": "The Host header does not name this server (`--allowed-hosts`).",
    "500": "A fault of the server's.",
}
OF_POSTS = {"403": "Sent by a page of another site."}
BEARER = "bearer"


def describe_api(app: FastAPI, settings: Settings, *, secured: bool) -> dict[str, Any]:
    """The OpenAPI document.

    Args:
        app: has the routes.
        settings: `root_path` is where a proxy serves the application.
        secured: whether clients have to send a token; where they need none, no security is described.
    """
    document = FastAPI.openapi(app)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas["Problem"] = Problem.model_json_schema()
    if settings.root_path:
        document["servers"] = [{"url": settings.root_path}]
    if secured:
        document["components"]["securitySchemes"] = {BEARER: {"type": "http", "scheme": "bearer"}}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            needs_token = secured and path not in ALWAYS_OPEN
            if needs_token:
                operation["security"] = [{BEARER: []}]
            _complete(operation["responses"], is_post=method == "post", needs_token=needs_token)
    return document


def _complete(responses: dict[str, Any], *, is_post: bool, needs_token: bool) -> None:
    """Add the gate's answers, the form of errors and the headers to the responses of an operation."""
    for status, why in {**OF_THE_GATE, **(OF_POSTS if is_post else {})}.items():
        responses.setdefault(status, {"description": why})
    if needs_token:
        responses.setdefault("401", {"description": "No bearer token, or not the right one."})
    else:
        responses.pop("401", None)
    problem = {"application/json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
    for status, response in responses.items():
        if int(status) >= 400:
            response["content"] = problem
        response["headers"] = {"X-Request-ID": REQUEST_ID_HEADER, **HEADERS_OF_STATUS.get(status, {})}
