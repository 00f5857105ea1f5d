"""Protocols of other servers, each as routes beside `/v1`, through the same admission, queue and limits.

- `huggingface`: the hub's Inference API, as `huggingface_hub.InferenceClient(model=URL)` speaks it;
- `openai`: OpenAI's embeddings, with images as data URIs or as `{"image": ...}`;
- `oip`: the Open Inference Protocol v2, in `open_inference`;
- `kserve`: KServe's first protocol, `:predict` and `:explain`.

No URL in a request is fetched.
"""

import asyncio
import base64
import binascii
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from fastapi import APIRouter, Request, Response
from pydantic import ValidationError

from vitascope.deploy.server import openapi
from vitascope.deploy.server.admission import Rejection
from vitascope.deploy.server.batcher import Outcome
from vitascope.deploy.server.decoder_process import Content
from vitascope.deploy.server.service import BESIDE, Service, answer
from vitascope.deploy.server.uploads import Upload, read_body, type_of
from vitascope.serialization import parse_json

if TYPE_CHECKING:
    import torch

R = TypeVar("R")
S = TypeVar("S", bound=openapi.Schema)
AROUND = ("image", "image_url", "image_bytes", "b64", "url")
"""Names of the fields that clients put a picture into."""
JSON_TYPES = ("", "application/json", "application/octet-stream", "application/x-www-form-urlencoded")
"""Content types of a body in JSON, perhaps with binary tensors after it; the last is curl's default."""
INLINE = 2**16
"""Bytes that are read in the event loop."""
PICTURE_VALUES = 64
"""Values of JSON for each picture that a request may have, with what is around it."""
TOP = 5
"""Classes of an answer by default."""


# Pictures and answers, as all protocols have them


async def json_body(request: Request, service: Service) -> bytes:
    """A body that holds JSON; 415 if it is declared as something else."""
    if (kind := type_of(request)) not in JSON_TYPES:
        raise Rejection(415, f"Content-Type {kind[:80]} is not JSON's: application/json")
    return await read_body(request, service.admission)


async def computed(service: Service, size: int, function: Callable[[], R]) -> R:
    """The result of a function that reads so many bytes, in a thread if others would wait for it.

    A thread takes 0.2 ms until its result is here, and a tenth of a megabyte of JSON up to 6 ms. Python runs
    one at a time, so several together would be no faster, and take their memory together.
    """
    if size <= INLINE:
        return function()
    async with service.first.reading:
        return await asyncio.to_thread(function)


async def object_of(form: type[S], service: Service, text: bytes, most: int = 0) -> S:
    """The JSON object in a body; 413 if it has too many values, by default more than pictures need; 422 for
    anything else, and for fields that nothing reads: whoever sends one expects another result."""
    most = most or PICTURE_VALUES * service.settings.max_files

    def parsed() -> S:
        if (count := most_values(text)) > most:
            raise Rejection(413, f"the JSON has up to {count:,} values, over the limit of {most:,}")
        return form.model_validate(parse_json(text.decode("utf-8")), strict=True)

    try:
        return await computed(service, len(text), parsed)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        place = ".".join(str(part)[:80] for part in first["loc"]) or "the body"
        raise Rejection(422, f"{place}: {first['msg']}") from error
    except ValueError as error:
        raise Rejection(422, f"the body is not JSON: {str(error)[:200]}") from error


def most_values(text: bytes) -> int:
    """A bound on the number of values in a JSON text, in a hundredth of the time in which it is parsed.

    A list in Python takes 30 times the bytes of its text.
    """
    characters = np.frombuffer(text, np.uint8)
    begins = (characters == ord(",")) | (characters == ord("[")) | (characters == ord("{"))
    return 1 + int(np.count_nonzero(begins))


def decoded_picture(text: object) -> bytes:
    """The bytes of a picture in base64, or in a data URI."""
    if not isinstance(text, str):
        raise Rejection(422, f"a picture is text in base64 or a data URI, not a {type(text).__name__}")
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]{0,20}://", text):
        raise Rejection(422, "URLs are not fetched: send the picture in base64 or as a data URI")
    if text.startswith("data:"):
        kind, comma, text = text.partition(",")
        if not comma or not kind.endswith(";base64"):
            raise Rejection(422, "a data URI needs base64: data:image/jpeg;base64,...")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Rejection(422, f"a picture is not valid base64: {error}") from error


def unwrapped(value: Any) -> Any:
    """The content of an object around a picture: `{"image": {"b64": ...}}`, `{"image_url": {"url": ...}}`."""
    for _ in range(3):
        if isinstance(value, dict):
            contents = [name for name, content in value.items() if name != "type" and content is not None]
            if len(contents) != 1 or contents[0] not in AROUND:
                names = ", ".join(contents)[:80]
                raise Rejection(
                    422, f"an object around a picture has one of {', '.join(AROUND)}, not {names}"
                )
            value = value[contents[0]]
    return value


def check_count(service: Service, count: int) -> None:
    """Reject no pictures, and more than the limit."""
    if not 0 < count <= service.settings.max_files:
        raise Rejection(422, f"{count:,} pictures in a request; it has 1 to {service.settings.max_files}")


async def rows_of(
    service: Service, request: Request, pictures: Sequence[Content], *, features: bool = False
) -> list[Any]:
    """The probabilities (K,), or features (D,), of pictures; a `Rejection` for one that cannot be read."""
    check_count(service, len(pictures))
    if features:
        service.check_features()
    else:
        service.check_classes()
    work = service.embeddings if features else service.predictions
    uploads = [
        Upload(f"picture {number}" if len(pictures) > 1 else "", picture)
        for number, picture in enumerate(pictures)
    ]

    def row(outcome: Outcome | Rejection) -> Any:
        if isinstance(outcome, Rejection):
            return outcome
        return outcome.value if features else outcome.value[0]

    return list(map(row, await service.outcomes(request, work, uploads)))


def all_or_none(rows: list[Any]) -> list[Any]:
    """The rows, where a protocol has no place for the error of one picture."""
    for row in rows:
        if isinstance(row, Rejection):
            raise row
    return rows


def top_of(service: Service, probabilities: "torch.Tensor", count: int = TOP) -> list[dict[str, Any]]:
    """The most probable classes of a picture, (K,)."""
    scores, indices = probabilities.topk(min(count, len(probabilities)))
    return [
        {"label": service.engine.label(index), "score": score}
        for index, score in zip(indices.tolist(), scores.tolist(), strict=True)
    ]


def card_of(service: Service, name: str) -> dict[str, Any]:
    """A model as OpenAI and KServe describe it, whose paths for that are the same."""
    ready = not service.named(name).admission.why_not_ready()
    about = {"id": name, "object": "model", "created": 0, "owned_by": "vitascope"}
    return about | {"name": name, "ready": ready}


# Hugging Face


def huggingface(service: Service) -> APIRouter:
    """`POST /` and `/models/NAME`: a picture's bytes, or `{"inputs": base64, "parameters": {...}}`."""
    routes = APIRouter(tags=["Hugging Face Inference"])
    picture = openapi.for_json(openapi.HubRequest, "image/*", "application/octet-stream")

    @routes.post("/models/{name:path}", **picture)
    async def named(request: Request, name: str) -> Response:
        """The most probable classes of a picture; of a model without classes its features."""
        return await classes(request, service.named(name))

    @routes.post("/", **picture)
    async def unnamed(request: Request) -> Response:
        """The most probable classes of a picture; of a model without classes its features."""
        return await classes(request, service)

    async def classes(request: Request, model: Service) -> Response:
        body, count = await read_body(request, service.admission), TOP
        if type_of(request) == "application/json":
            wanted = await object_of(openapi.HubRequest, model, body)
            body = decoded_picture(wanted.inputs)
            count = wanted.parameters.top_k
            usual = "sigmoid" if model.engine.thresholds else "softmax"
            if wanted.parameters.function_to_apply not in ("", usual):
                raise Rejection(422, f"this model's scores are those of function_to_apply={usual}")
        if model.engine.num_classes:
            (row,) = all_or_none(await rows_of(model, request, [body]))
            return answer(top_of(model, row, count))
        (row,) = all_or_none(await rows_of(model, request, [body], features=True))
        return answer([row.tolist()])

    return routes


# OpenAI


def openai(service: Service) -> APIRouter:
    """`GET /v1/models`, `/v1/models/NAME` and `POST /v1/embeddings`."""
    routes = APIRouter(tags=["OpenAI"])

    @routes.get("/v1/models")
    async def models() -> Response:
        """The served models."""
        names = [model.names[0] for model in service.models if model.place != BESIDE]
        return answer({"object": "list", "data": [card_of(service, name) for name in names]})

    @routes.get("/v1/models/{name:path}")
    async def card(name: str) -> Response:
        """A served model, and whether it is loaded."""
        return answer(card_of(service, name))

    @routes.post("/v1/embeddings", **openapi.for_json(openapi.EmbeddingsRequest))
    async def embeddings(request: Request) -> Response:
        """The features of pictures, which are data URIs, base64 or `{"image": ...}`."""
        body = await json_body(request, service)
        wanted = await object_of(openapi.EmbeddingsRequest, service, body)
        model = service.named(wanted.model)
        inputs = wanted.input if isinstance(wanted.input, list) else [wanted.input]
        check_count(service, len(inputs))
        pictures = [decoded_picture(unwrapped(value)) for value in inputs]
        rows = all_or_none(await rows_of(model, request, pictures, features=True))
        if wanted.dimensions not in (0, len(rows[0])):
            raise Rejection(422, f"dimensions are {len(rows[0])}: this model's embeddings have one length")
        data = [
            {
                "object": "embedding",
                "index": index,
                "embedding": base64.b64encode(row.numpy().tobytes()).decode()
                if wanted.encoding_format == "base64"
                else row.tolist(),
            }
            for index, row in enumerate(rows)
        ]
        usage = {"prompt_tokens": 0, "total_tokens": 0}
        return answer({"object": "list", "data": data, "model": wanted.model, "usage": usage})

    return routes


# KServe V1


def kserve(service: Service) -> APIRouter:
    """`/v1/models/NAME`, `:predict` and `:explain`."""
    routes = APIRouter(tags=["KServe"])

    def instance(value: Any) -> bytes | Rejection:
        try:
            return decoded_picture(unwrapped(value))
        except Rejection as rejection:
            return rejection

    async def instances(request: Request) -> list[bytes | Rejection]:
        wanted = await object_of(openapi.InstancesRequest, service, await json_body(request, service))
        check_count(service, len(wanted.instances))
        return list(map(instance, wanted.instances))

    @routes.get("/v1/models/{name:path}")
    async def ready(name: str) -> Response:
        """The served model, and whether it is loaded."""
        return answer(card_of(service, name))

    @routes.post("/v1/models/{name:path}:predict", **openapi.for_json(openapi.InstancesRequest))
    async def predict(request: Request, name: str) -> Response:
        """The most probable classes of each picture, or the error of one that cannot be read."""
        model = service.named(name)
        contents = await instances(request)
        pictures = [content for content in contents if isinstance(content, bytes)]
        answered = iter(await rows_of(model, request, pictures) if pictures else [])
        rows = [next(answered) if isinstance(content, bytes) else content for content in contents]
        if all(isinstance(row, Rejection) for row in rows):
            all_or_none(rows)
        answers = [{"error": str(row)} if isinstance(row, Rejection) else top_of(model, row) for row in rows]
        return answer({"predictions": answers})

    @routes.post("/v1/models/{name:path}:explain", **openapi.for_json(openapi.InstancesRequest))
    async def explain(request: Request, name: str) -> Response:
        """The heatmap of a picture by the default method."""
        model = service.named(name)
        model.torch_engine()
        pictures = await instances(request)
        if len(pictures) != 1:
            raise Rejection(422, f"explain takes one picture, not {len(pictures)}")
        (picture,) = all_or_none(list(pictures))
        explanation = await model.explain(request, uploads=[Upload("", picture)])
        return answer(
            {"explanations": [{"label": explanation.label, "heatmap": explanation.heatmap.tolist()}]}
        )

    return routes
