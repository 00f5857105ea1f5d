"""The JSON schemas of requests and responses, for FastAPI's OpenAPI document; and the page at `/docs`.

Routes write JSON themselves, which is faster; tests validate their responses by the schemas.
"""

from __future__ import annotations

import functools
import shlex
from collections.abc import Mapping
from importlib.resources import files
from typing import Any, Generic, Literal, TypeVar

from jinja2 import Environment, Template
from pydantic import BaseModel, ConfigDict, Field

from vitascope.deploy.server.settings import TOKEN
from vitascope.model.options import Outputs

R = TypeVar("R")
Responses = dict[int | str, dict[str, Any]]

PLAIN_TEXT = {"text/plain": {"schema": {"type": "string"}}}
BINARY = {"schema": {"type": "string", "format": "binary"}}
SOME_JSON = {"content": {"application/json": {"schema": {"type": ["object", "array"]}}}}
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
    404: "No such sample or model.",
    408: "The request did not arrive in time.",
    413: "The body, the values of its JSON, or the picture's pixels are over the limit.",
    415: "Not the media type of a picture, or an unknown Content-Encoding; URLs are not fetched.",
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
MODEL_ERRORS = (403, 408, 413, 415, 429, 501, 503, 504)  # statuses of routes that take pictures
COMMON_ERRORS = (400, 421, 422, 500)  # statuses of every route


class Schema(BaseModel):
    """A JSON object without further fields."""

    model_config = ConfigDict(extra="forbid")


class OfFile(Schema):
    """What belongs to a body or to a file of a form."""

    name: str = Field(default="", description="of the file; absent for a body without a form")


class Problem(OfFile):
    """An error."""

    error: str = Field(description="what is wrong, and what to do")


class OpenAIError(Schema):
    """The content of an error in OpenAI's form."""

    message: str = Field(description="what is wrong, and what to do")
    type: Literal["invalid_request_error", "server_error"]
    param: None
    code: None


class OpenAIProblem(Schema):
    """An error in OpenAI's form."""

    error: OpenAIError


class Health(Schema):
    """The server's state."""

    status: Literal["live", "ready"]


class Timing(Schema):
    """The time that a result took."""

    queue_ms: float = Field(ge=0, description="milliseconds in the queue")
    model_ms: float = Field(ge=0, description="milliseconds of its batch in the model")
    batch_size: int = Field(ge=1, description="pictures in its batch")


class ClassName(Schema):
    """A class."""

    label: str
    index: int = Field(ge=0)


class Prediction(ClassName):
    """A class and its probability."""

    score: float = Field(ge=0)


class Predictions(OfFile):
    """The most probable classes of a picture, most probable first."""

    predictions: list[Prediction]
    labels: list[Prediction] | None = Field(
        default=None,
        description="the classes whose probability is at least their threshold, most probable first; absent "
        "if the model predicts one class per picture",
    )
    unknown: Literal["ambiguous", "unfamiliar", "unchecked"] | None = Field(
        default=None,
        description="why the model does not know the class; null if it does; unchecked if its validation "
        "images were too few to tell which pictures are unfamiliar. This and the next two fields are absent "
        "if the model was not calibrated",
    )
    set: list[str] | None = Field(
        default=None, description="the classes that hold the right one at the asked rate, most probable first"
    )
    familiarity: float | None = Field(
        default=None, description="the share of validation images that are less like the training images"
    )
    timing: Timing


class Embedding(OfFile):
    """The pooled representation of a picture."""

    embedding: list[float]
    timing: Timing


class Form(Schema, Generic[R]):
    """A result or error per file, in the order of the form; status 200 if at least one has a result."""

    results: list[R | Problem]


class Heatmap(Schema):
    """An explanation of a picture."""

    method: str
    target: ClassName | None = Field(description="the explained class; null if the method has none")
    heatmap: list[list[float]] = Field(description="rows of the patch grid; the largest value is 1")


class Sample(Schema):
    """A picture to try."""

    name: str
    title: str


class Limits(Schema):
    """The limits of a request."""

    max_body_mb: float
    max_megapixels: float
    max_files: int
    deadline_ms: float
    explain_deadline_ms: float


class ModelDescription(Schema):
    """The served model."""

    name: str
    architecture: str
    digest: str
    engine: str
    num_classes: int
    class_names: list[str]
    outputs: Outputs = Field(
        description="`exclusive`: one class per picture; `independent`: any number of classes"
    )
    thresholds: list[float] = Field(description="of each class, if any number may apply; else empty")
    preprocess: dict[str, Any]
    limits: Limits
    beside: bool = Field(description="whether the explorer has another model to compare with")
    version: str


def errors(*statuses: int, form: type[Schema] = Problem) -> Responses:
    """The responses of error statuses."""
    return {status: {"model": form, "description": ERRORS[status]} for status in statuses}


def for_json(*fields: str, others: tuple[str, ...] = ()) -> dict[str, Any]:
    """The keywords of a route that takes JSON with some fields, or bytes of other media types."""
    schema = {"type": "object", "required": list(fields)}
    content = {"application/json": {"schema": schema}, **dict.fromkeys(others, BINARY)}
    return {"openapi_extra": {"requestBody": {"required": True, "content": content}}}


def for_pictures(success: dict[str, Any]) -> dict[str, Any]:
    """The keywords of a route that takes pictures, with its response for status 200."""
    return {"openapi_extra": PICTURES, "responses": {200: success, **errors(*MODEL_ERRORS)}}


def api_page(description: Mapping[str, Any], address: str) -> str:
    """The page at `/docs`, without scripts and other sites; `address` is the server's, for the examples."""
    return _template().render(description, address=address, token=TOKEN)


@functools.cache
def _template() -> Template:
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["quoted"] = shlex.quote
    return environment.from_string(files(__package__).joinpath("api.html").read_text("utf-8"))
