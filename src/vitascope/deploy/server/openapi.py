"""The JSON schemas of requests and responses, for FastAPI's OpenAPI document; and the page at `/docs`.

Routes write JSON themselves, which is faster; tests validate their responses by the schemas.
"""

import functools
import shlex
from collections.abc import Mapping
from importlib.resources import files
from typing import Annotated, Any, Generic, Literal, TypeVar

from jinja2 import Environment, Template
from pydantic import BaseModel, ConfigDict, Field, model_validator

from vitascope.deploy.server.settings import TOKEN
from vitascope.models.options import Outputs

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

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


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


class Asked(Schema):
    """A part of a request; a field of null is absent."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if value is not None}


class HubParameters(Asked):
    """The parameters of the hub's image classification."""

    top_k: int = Field(default=5, ge=1)
    function_to_apply: str = Field(default="", description="softmax; sigmoid of several classes")


class HubRequest(Asked):
    """A picture for the hub's Inference API; `options` are of the hub's machines."""

    inputs: str = Field(description="a picture in base64, or a data URI")
    parameters: HubParameters = HubParameters()
    options: Any = None


class EmbeddingsRequest(Asked):
    """Pictures for OpenAI's embeddings; `dimensions` of 0 and `modality` are of infinity's clients."""

    model: str
    input: Any = Field(description='data URIs, base64 or {"image": ...}, alone or as a list')
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int = 0
    user: Any = None
    modality: Literal["image"] = "image"


class InstancesRequest(Asked):
    """Pictures for KServe's first protocol."""

    instances: list[Any] = Field(description='base64, data URIs, {"b64": ...} or {"image": ...}')


class TensorParameters(Asked):
    """The bytes of a tensor that follow the JSON."""

    binary_data_size: int | None = Field(default=None, ge=0)


class InputTensor(Asked):
    """Pictures: encoded (BYTES), or pixels (UINT8, N x H x W x 3)."""

    name: Literal["image"]
    datatype: Literal["BYTES", "UINT8"]
    shape: list[Annotated[int, Field(ge=0)]] = Field(min_length=1, max_length=4)
    parameters: TensorParameters = TensorParameters()
    data: list[Any] | None = None


class OutputParameters(Asked):
    """The form of an output: whether it follows the JSON; texts `score:index:label` of so many classes."""

    binary_data: bool | None = None
    classification: int | None = Field(default=None, ge=1)


class OutputTensor(Asked):
    """An output tensor that a client asks for."""

    name: str
    parameters: OutputParameters = OutputParameters()


class InferenceParameters(Asked):
    """Whether outputs follow the JSON by default."""

    binary_data_output: bool = False


class InferenceRequest(Asked):
    """A request of the Open Inference Protocol."""

    model_name: str | None = None
    id: str | None = None
    parameters: InferenceParameters = InferenceParameters()
    inputs: list[InputTensor] = Field(min_length=1, max_length=1)
    outputs: list[OutputTensor] = Field(default=[], max_length=4)


def for_json(body: type[Schema], *others: str) -> dict[str, Any]:
    """The keywords of a route that takes JSON, or bytes of other media types."""
    schema = body.model_json_schema()
    parts = schema.pop("$defs", {})

    def inlined(value: Any) -> Any:
        if isinstance(value, list):
            return [inlined(part) for part in value]
        if not isinstance(value, dict):
            return value
        if "$ref" in value:
            value = parts[value["$ref"].rpartition("/")[2]]
        return {name: inlined(part) for name, part in value.items()}

    content = {"application/json": {"schema": inlined(schema)}, **dict.fromkeys(others, BINARY)}
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
