"""The OpenAPI document: FastAPI's description of the routes, completed by what the middleware adds to all."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from vitascope.deploy.server.access_log import REQUEST_ID
from vitascope.deploy.server.middleware import PUBLIC_PATHS
from vitascope.deploy.server.schemas import Problem
from vitascope.deploy.server.settings import Settings

Responses = dict[int | str, dict[str, Any]]

TEXT = {"type": "string"}
SECONDS = {"type": "integer", "minimum": 1}
BINARY = {"schema": {"type": "string", "format": "binary"}}
FORM = {
    "schema": {
        "type": "object",
        "properties": {"image": {"type": "array", "items": BINARY["schema"], "minItems": 1}},
        "required": ["image"],
    }
}
PICTURES: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": "A picture's bytes, or files in a form.",
        "content": {"image/*": BINARY, "application/octet-stream": BINARY, "multipart/form-data": FORM},
    }
}
ERRORS = {
    400: "The request line or a header is broken.",
    401: "The bearer token is missing or wrong.",
    403: "Sent by a page of another site.",
    404: "No such sample.",
    408: "The request did not arrive in time.",
    413: "The body, or the picture's pixels, are over the limit.",
    415: "Not the media type of a picture; URLs are not fetched.",
    421: "The Host header does not name this server (`--allowed-hosts`).",
    422: "The picture cannot be read, or an option is not valid.",
    429: "No room, or not enough time before the deadline; retry after Retry-After seconds.",
    500: "An error of the server.",
    501: "The served model cannot do this: it has no head, or is an exported file.",
    503: "Not ready: loading, stopping or saturated.",
    504: "The deadline passed: the server's, or X-Deadline-Ms, in milliseconds.",
}
"""Every error status, for all routes."""
METHOD = "a method of `vitascope explain`, with the same default"
MODEL_ERRORS = (408, 413, 415, 422, 429, 501, 503, 504)
"""Statuses of routes that take pictures."""
ERROR_HEADERS: dict[str, dict[str, Any]] = {
    "401": {"WWW-Authenticate": {"description": "`Bearer`", "schema": TEXT}},
    "429": {"Retry-After": {"description": "Seconds after which there may be room.", "schema": SECONDS}},
    "503": {"Retry-After": {"description": "Seconds after which to retry.", "schema": SECONDS}},
}
REQUEST_ID_HEADER = {
    "description": "The request's id, its own or a new one; also in the access log.",
    "schema": {**TEXT, "pattern": f"^{REQUEST_ID.pattern.decode()}$"},
}


def responses(success: dict[str, Any], *errors: int) -> Responses:
    """A route's responses: one for status 200, and errors by status."""
    return {200: success, **{status: {"description": ERRORS[status]} for status in errors}}


def describe_api(app: FastAPI, settings: Settings, *, secured: bool) -> dict[str, Any]:
    """The OpenAPI document of an application; `secured` if clients must send a token."""
    document = FastAPI.openapi(app)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas["Problem"] = Problem.model_json_schema()
    if settings.root_path:
        document["servers"] = [{"url": settings.root_path}]
    if secured:
        document["components"]["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            needs_token = secured and path not in PUBLIC_PATHS
            if needs_token:
                operation["security"] = [{"bearer": []}]
            for status in (400, *[401] * needs_token, *[403] * (method == "post"), 421, 500):
                operation["responses"].setdefault(str(status), {"description": ERRORS[status]})
            for status, response in operation["responses"].items():
                if int(status) >= 400:
                    schema = {"$ref": "#/components/schemas/Problem"}
                    response["content"] = {"application/json": {"schema": schema}}
                response["headers"] = {"X-Request-ID": REQUEST_ID_HEADER, **ERROR_HEADERS.get(status, {})}
    return document
