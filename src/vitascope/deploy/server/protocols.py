"""Protocols of other servers, each as routes beside `/v1`, through the same admission, queue and limits.

- `huggingface`: the hub's Inference API, as `huggingface_hub.InferenceClient(model=URL)` speaks it;
- `openai`: OpenAI's embeddings, with images as data URIs or as `{"image": ...}`;
- `oip`: the Open Inference Protocol v2 of KServe, Triton and OpenVINO Model Server, with binary tensors;
- `kserve`: KServe's first protocol, `:predict` and `:explain`.

No URL in a request is fetched.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import functools
import io
import itertools
import json
import math
import re
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Request, Response
from PIL import Image

from vitascope._version import __version__
from vitascope.deploy.server.rejections import Rejection
from vitascope.deploy.server.service import Service
from vitascope.deploy.server.uploads import Upload, read_body
from vitascope.serialization import parse_json

if TYPE_CHECKING:
    import torch

AROUND = ("image", "image_url", "image_bytes", "b64", "url")
"""Names of the fields that clients put a picture into."""
MOST_OUTPUTS = 4
"""Output tensors of a request."""
JSON_TYPES = ("", "application/json", "application/octet-stream", "application/x-www-form-urlencoded")
"""Content types of a body in JSON, perhaps with binary tensors after it; the last is curl's default."""
TOP = 5
"""Classes of an answer by default."""
LENGTH = "inference-header-content-length"
"""The header with the bytes of the JSON before binary tensors."""
SERVER = {"name": "vitascope", "version": __version__, "extensions": ["classification", "binary_tensor_data"]}


# Pictures and answers, as all protocols have them


async def body_of(request: Request, service: Service) -> bytes:
    """The bytes of a request's body, within the limits."""
    return await read_body(request, service.settings, service.arriving)


def type_of(request: Request) -> str:
    """The declared type of a request's body."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def json_body(request: Request, service: Service) -> bytes:
    """A body that holds JSON; 415 if it is declared as something else."""
    if (kind := type_of(request)) not in JSON_TYPES:
        raise Rejection(415, f"Content-Type {kind[:80]} is not JSON's: application/json")
    return await body_of(request, service)


async def object_of(text: bytes) -> dict[str, Any]:
    """The JSON object in a body; 422 for anything else."""
    try:
        value = await asyncio.to_thread(lambda: parse_json(text.decode("utf-8")))
    except ValueError as error:
        raise Rejection(422, f"the body is not JSON: {str(error)[:200]}") from error
    if not isinstance(value, dict):
        raise Rejection(422, f"the body is a JSON {type(value).__name__}, not an object")
    return value


def field(values: Any, name: str, *kinds: type) -> Any:
    """A field of a JSON object that has one of these types; 422 for others."""
    found = values.get(name) if isinstance(values, dict) else None
    if not isinstance(found, kinds) or (isinstance(found, bool) and bool not in kinds):
        wanted = " or ".join(
            {"str": "text", "dict": "an object", "list": "a list"}.get(k.__name__, k.__name__) for k in kinds
        )
        raise Rejection(422, f"{name} must be {wanted}")
    return found


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
    """What is in an object around a picture: `{"image": {"b64": ...}}`, `{"image_url": {"url": ...}}`."""
    for _ in range(3):
        if isinstance(value, dict):
            value = next((value[name] for name in AROUND if name in value), None)
    return value


def parameters_of(values: Any) -> dict[str, Any]:
    """The object `parameters` of another one; empty without any."""
    given = values.get("parameters") if isinstance(values, dict) else None
    found: dict[str, Any] = {} if given is None else field(values, "parameters", dict)
    return found


def check_count(service: Service, count: int) -> None:
    """Reject no pictures, and more than the limit."""
    if not 0 < count <= service.settings.max_files:
        raise Rejection(422, f"{count:,} pictures in a request; it has 1 to {service.settings.max_files}")


async def rows_of(
    service: Service, request: Request, pictures: Sequence[bytes], *, features: bool = False
) -> list[Any]:
    """The probabilities (K,), or features (D,), of pictures; a `Rejection` for one that cannot be read."""
    check_count(service, len(pictures))
    if features:
        service.check_features()
    else:
        service.check_classes()
    work = service.embeddings if features else service.predictions
    uploads = [
        Upload(f"picture {number}" if len(pictures) > 1 else "", each) for number, each in enumerate(pictures)
    ]
    outcomes = await service.outcomes(request, work, uploads)
    values = [one if isinstance(one, Rejection) else one.value for one in outcomes]
    return values if features else [one if isinstance(one, Rejection) else one[0] for one in values]


def all_or_none(rows: list[Any]) -> list[Any]:
    """The rows, where a protocol has no place for the error of one picture."""
    for row in rows:
        if isinstance(row, Rejection):
            raise row
    return rows


def top_of(service: Service, probabilities: torch.Tensor, count: int = TOP) -> list[dict[str, Any]]:
    """The most probable classes of a picture, (K,)."""
    scores, indices = probabilities.topk(min(count, len(probabilities)))
    return [
        {"label": service.engine.label(index), "score": score}
        for index, score in zip(indices.tolist(), scores.tolist(), strict=True)
    ]


def names_of(service: Service) -> tuple[str, ...]:
    """The names by which a client may call the served model."""
    name = service.engine.name or "model"
    return tuple(dict.fromkeys((name, name.rstrip("/").rpartition("/")[2], "vitascope")))


def check_name(service: Service, name: str) -> None:
    """Reject the name of another model (404)."""
    if name not in names_of(service):
        raise Rejection(404, f"no model {name[:80]!r} here; it is called {' or '.join(names_of(service))}")


def answer(content: Any) -> Response:
    """A response in JSON."""
    return Response(json.dumps(content, allow_nan=False), media_type="application/json")


# Hugging Face


def huggingface(service: Service) -> APIRouter:
    """`POST /` and `/models/NAME`: a picture's bytes, or `{"inputs": base64, "parameters": {...}}`."""
    routes = APIRouter(tags=["Hugging Face Inference"])

    @routes.post("/models/{name:path}")
    async def named(request: Request, name: str) -> Response:
        """The most probable classes of a picture; of a model without classes its features."""
        check_name(service, name)
        return await unnamed(request)

    @routes.post("/")
    async def unnamed(request: Request) -> Response:
        """The most probable classes of a picture; of a model without classes its features."""
        body, count = await body_of(request, service), TOP
        if type_of(request) == "application/json":
            values = await object_of(body)
            body = decoded_picture(values.get("inputs"))
            parameters = parameters_of(values)
            if unknown := sorted(parameters.keys() - {"top_k", "function_to_apply"}):
                raise Rejection(
                    422, f"unknown parameter {unknown[0][:80]!r}; known are top_k and function_to_apply"
                )
            if parameters.get("top_k") is not None:
                count = field(parameters, "top_k", int)
            if count < 1:
                raise Rejection(422, f"top_k must be at least 1, not {count}")
            usual = "sigmoid" if service.engine.several else "softmax"
            if parameters.get("function_to_apply") not in (None, usual):
                raise Rejection(422, f"this model's scores are those of function_to_apply={usual}")
        if service.engine.num_classes:
            (row,) = all_or_none(await rows_of(service, request, [body]))
            return answer(top_of(service, row, count))
        (row,) = all_or_none(await rows_of(service, request, [body], features=True))
        return answer([row.tolist()])

    return routes


# OpenAI


def openai(service: Service) -> APIRouter:
    """`GET /v1/models` and `POST /v1/embeddings`."""
    routes = APIRouter(tags=["OpenAI"])

    @routes.get("/v1/models")
    async def models() -> Response:
        """The served model."""
        named = {"id": names_of(service)[0], "object": "model", "created": 0, "owned_by": "vitascope"}
        return answer({"object": "list", "data": [named]})

    @routes.post("/v1/embeddings")
    async def embeddings(request: Request) -> Response:
        """The features of pictures, which are data URIs, base64 or `{"image": ...}`."""
        values = await object_of(await json_body(request, service))
        check_name(service, field(values, "model", str))
        given = values.get("input")
        inputs = given if isinstance(given, list) else [given]
        check_count(service, len(inputs))
        form = values.get("encoding_format") or "float"
        if form not in ("float", "base64"):
            raise Rejection(422, "encoding_format is float or base64")
        if values.get("dimensions") is not None:
            raise Rejection(422, "this model's embeddings have one length: leave dimensions out")
        pictures = [decoded_picture(unwrapped(one)) for one in inputs]
        rows = all_or_none(await rows_of(service, request, pictures, features=True))
        data = [
            {
                "object": "embedding",
                "index": index,
                "embedding": row.tolist()
                if form == "float"
                else base64.b64encode(row.numpy().tobytes()).decode(),
            }
            for index, row in enumerate(rows)
        ]
        usage = {"prompt_tokens": 0, "total_tokens": 0}
        return answer({"object": "list", "data": data, "model": values["model"], "usage": usage})

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

    async def instances(request: Request, name: str) -> list[bytes | Rejection]:
        check_name(service, name)
        values = field(await object_of(await json_body(request, service)), "instances", list)
        check_count(service, len(values))
        return list(map(instance, values))

    @routes.get("/v1/models/{name:path}")
    async def ready(name: str) -> Response:
        """Whether the model is loaded."""
        check_name(service, name)
        return answer({"name": name, "ready": not service.why_not_ready()})

    @routes.post("/v1/models/{name:path}:predict")
    async def predict(request: Request, name: str) -> Response:
        """The most probable classes of each picture, or the error of one that cannot be read."""
        given = await instances(request, name)
        pictures = [one for one in given if isinstance(one, bytes)]
        found = iter(await rows_of(service, request, pictures) if pictures else [])
        rows = [next(found) if isinstance(one, bytes) else one for one in given]
        if all(isinstance(row, Rejection) for row in rows):
            all_or_none(rows)
        answers = [
            {"error": str(row)} if isinstance(row, Rejection) else top_of(service, row) for row in rows
        ]
        return answer({"predictions": answers})

    @routes.post("/v1/models/{name:path}:explain")
    async def explain(request: Request, name: str) -> Response:
        """The heatmap of a picture by the default method."""
        from vitascope.deploy.server.attention_pack import batch_size
        from vitascope.explain.methods import DEFAULT_METHOD
        from vitascope.predict.explanation import explain_pixels

        compute = functools.partial(explain_pixels, batch_size=batch_size(service.torch_engine().device))
        pictures = await instances(request, name)
        if len(pictures) != 1:
            raise Rejection(422, f"explain takes one picture, not {len(pictures)}")
        (picture,) = all_or_none(list(pictures))
        uploads = [Upload("", picture)]
        found = await service.run(
            request, f"explain-{DEFAULT_METHOD}", compute, DEFAULT_METHOD, None, uploads=uploads
        )
        target = None if found.target is None else service.engine.label(found.target)
        return answer({"explanations": [{"label": target, "heatmap": found.heatmap.tolist()}]})

    return routes


# Open Inference Protocol v2


def oip(service: Service) -> APIRouter:
    """`/v2`: health, the model's description, inference."""
    routes = APIRouter(tags=["Open Inference Protocol"])

    @routes.get("/v2")
    async def server() -> Response:
        """The server."""
        return answer(SERVER)

    @routes.get("/v2/health/live")
    async def live() -> Response:
        """200 as long as the process answers."""
        return answer({"live": True})

    @routes.get("/v2/health/ready")
    async def ready() -> Response:
        """200 if requests should be sent here now."""
        if reason := service.why_not_ready():
            raise Rejection(503, reason)
        return answer({"ready": True})

    # A name may have slashes, so that several paths fit: the first one that is registered is taken.

    @routes.get("/v2/models/{name:path}/ready")
    @routes.get("/v2/models/{name:path}/versions/{version}/ready")
    async def model_ready(name: str, version: str = "1") -> Response:
        """200 if the model is loaded."""
        check(name, version)
        return await ready()

    @routes.get("/v2/models/{name:path}")
    @routes.get("/v2/models/{name:path}/versions/{version}")
    async def model(name: str, version: str = "1") -> Response:
        """The inputs and outputs of the model."""
        check(name, version)
        outputs = [{"name": "features", "datatype": "FP32", "shape": [-1, -1]}]
        if count := service.engine.num_classes:
            outputs = [
                {"name": "probabilities", "datatype": "FP32", "shape": [-1, count]},
                {"name": "labels", "datatype": "BYTES", "shape": [-1]},
            ]
        inputs = [{"name": "image", "datatype": "BYTES", "shape": [-1]}]
        about = {"name": name, "versions": ["1"], "platform": "vitascope"}
        return answer(about | {"inputs": inputs, "outputs": outputs})

    @routes.post("/v2/models/{name:path}/infer")
    @routes.post("/v2/models/{name:path}/versions/{version}/infer")
    async def infer(request: Request, name: str, version: str = "1") -> Response:
        """Probabilities and labels of pictures, encoded (BYTES) or as pixels (UINT8, N x H x W x 3)."""
        check(name, version)
        body = await json_body(request, service)
        head = _whole_number(request.headers.get(LENGTH), len(body))
        values, rest = await object_of(body[:head]), body[head:]
        inputs = field(values, "inputs", list)
        if len(inputs) != 1:
            raise Rejection(422, f"one input, the pictures, not {len(inputs)}")
        pictures = await asyncio.to_thread(_pictures, inputs[0], rest, service.settings.max_files)
        rows = all_or_none(await rows_of(service, request, pictures, features=not service.engine.num_classes))
        wanted = [{"name": output} for output in _outputs(service)]
        if values.get("outputs"):
            wanted = field(values, "outputs", list)
        if len(wanted) > MOST_OUTPUTS:
            raise Rejection(422, f"{len(wanted):,} outputs; a request has at most {MOST_OUTPUTS}")
        always = bool(parameters_of(values).get("binary_data_output"))
        return _response(name, values.get("id"), [_output(service, rows, one, always) for one in wanted])

    def check(name: str, version: str) -> None:
        check_name(service, name)
        if version != "1":
            raise Rejection(404, f"no version {version[:20]!r} of the model; it has 1")

    return routes


def _whole_number(text: str | None, most: int) -> int:
    """The length of the JSON in a body, by the header."""
    if text is None:
        return most
    if not text.isdecimal() or len(text) > 18 or int(text) > most:
        raise Rejection(422, f"{LENGTH} is {text[:20]!r}, and the body has {most:,} bytes")
    return int(text)


def _pictures(tensor: Any, rest: bytes, most: int) -> list[bytes]:
    """The encoded pictures of a tensor; of pixels as BMP, which costs a copy."""
    kind, shape = field(tensor, "datatype", str), field(tensor, "shape", list)
    if not all(type(side) is int and side >= 0 for side in shape) or not 1 <= len(shape) <= 4:
        raise Rejection(422, "shape is a list of one to four whole numbers")
    size = parameters_of(tensor).get("binary_data_size")
    if size is not None and (type(size) is not int or size != len(rest)):
        raise Rejection(422, f"binary_data_size is {size!r}, and {len(rest):,} bytes follow the JSON")
    if kind == "BYTES":
        parts = (
            _elements(rest, most)
            if size is not None
            else list(map(decoded_picture, field(tensor, "data", list)))
        )
        if math.prod(shape) != len(parts):
            raise Rejection(422, f"shape {shape} of {len(parts):,} elements")
        return parts
    if kind != "UINT8":
        raise Rejection(422, f"datatype {kind[:20]} of the pictures; known are BYTES and UINT8")
    if len(shape) != 4 or shape[3] not in (1, 3) or shape[0] > most:
        raise Rejection(422, f"UINT8 has the shape (N, H, W, 3), N at most {most}, not {shape}")
    pixels = np.frombuffer(rest, np.uint8) if size is not None else _numbers(field(tensor, "data", list))
    if pixels.size != math.prod(shape) or not pixels.size:
        raise Rejection(422, f"shape {shape} of {pixels.size:,} values")
    return list(map(_bmp, pixels.reshape(shape)))


def _elements(packed: bytes, most: int) -> list[bytes]:
    """The elements of a binary BYTES tensor: each after its length, 4 bytes."""
    parts: list[bytes] = []
    place = 0
    while place < len(packed):
        if len(parts) == most:
            raise Rejection(422, f"more than {most} pictures in a request")
        (length,) = struct.unpack_from("<I", packed.ljust(place + 4, b"\0"), place)
        place += 4 + length
        if place > len(packed):
            raise Rejection(
                422, f"an element of {length:,} bytes ends {place - len(packed):,} bytes after the body"
            )
        parts.append(packed[place - length : place])
    return parts


def _numbers(data: list[Any]) -> npt.NDArray[np.uint8]:
    """The values of a UINT8 tensor in JSON, flat or nested."""
    for _ in range(3):  # rows, columns and channels; NumPy would widen all elements to the longest text
        if data and all(isinstance(part, list) for part in data):
            data = list(itertools.chain.from_iterable(data))
    try:
        return np.frombuffer(bytes(data), np.uint8)
    except (TypeError, ValueError) as error:
        raise Rejection(422, "data of UINT8 are whole numbers from 0 to 255") from error


def _bmp(pixels: npt.NDArray[np.uint8]) -> bytes:
    """Pixels (H, W, 1 or 3) as an encoded picture."""
    buffer = io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels).save(buffer, "BMP")
    return buffer.getvalue()


def _outputs(service: Service) -> tuple[str, ...]:
    return ("probabilities", "labels") if service.engine.num_classes else ("features",)


def _output(
    service: Service, rows: list[torch.Tensor], asked: Any, always: bool
) -> tuple[dict[str, Any], bytes]:
    """An output tensor, and its bytes; empty if its values are in the JSON."""
    name, options = field(asked, "name", str), parameters_of(asked)
    if name not in _outputs(service):
        raise Rejection(422, f"no output {name[:80]!r}; the model has {' and '.join(_outputs(service))}")
    count, binary = options.get("classification"), bool(options.get("binary_data", always))
    values: list[Any]
    if count is not None:
        if name != "probabilities" or type(count) is not int or count < 1:
            raise Rejection(422, "classification is a number of classes, of the output probabilities")
        label = service.engine.label
        tops = [row.topk(min(count, len(row))) for row in rows]
        values = [
            [
                f"{score:.6f}:{index}:{label(index)}"
                for score, index in zip(top.values.tolist(), top.indices.tolist(), strict=True)
            ]
            for top in tops
        ]
        shape, kind = [len(rows), len(values[0])], "BYTES"
    elif name == "labels":
        values = [service.engine.label(int(row.argmax())) for row in rows]
        shape, kind = [len(rows)], "BYTES"
    else:
        values, kind = [row.tolist() for row in rows], "FP32"
        shape = [len(rows), len(rows[0])]
    about = {"name": name, "datatype": kind, "shape": shape}
    flat = [value for row in values for value in (row if isinstance(row, list) else [row])]
    if not binary:
        return about | {"data": flat}, b""
    if kind == "FP32":
        packed = np.array(flat, "<f4").tobytes()
    else:
        texts = [text.encode(errors="backslashreplace") for text in flat]
        packed = b"".join(struct.pack("<I", len(text)) + text for text in texts)
    return about | {"parameters": {"binary_data_size": len(packed)}}, packed


def _response(name: str, identifier: Any, outputs: list[tuple[dict[str, Any], bytes]]) -> Response:
    """The response of an inference, with its binary tensors after the JSON."""
    content: dict[str, Any] = {
        "model_name": name,
        "model_version": "1",
        "outputs": [about for about, _ in outputs],
    }
    if isinstance(identifier, str):
        content["id"] = identifier
    packed = b"".join(part for _, part in outputs)
    if not packed:
        return answer(content)
    head = json.dumps(content).encode()
    return Response(head + packed, media_type="application/octet-stream", headers={LENGTH: str(len(head))})


PROTOCOLS: dict[str, Callable[[Service], APIRouter]] = {
    "huggingface": huggingface,
    "openai": openai,
    "oip": oip,
    "kserve": kserve,
}
