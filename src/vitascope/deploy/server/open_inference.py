"""The Open Inference Protocol v2 of KServe, Triton and OpenVINO Model Server, also with binary tensors.

The extensions for classification and for binary tensors are those of Triton's documents "Classification
Extension" and "Binary Tensor Data Extension". A field that nothing here reads is rejected.
"""

import itertools
import json
import math
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Request, Response

from vitascope._version import __version__
from vitascope.deploy.server import openapi, protocols
from vitascope.deploy.server.admission import Rejection
from vitascope.deploy.server.decoder_process import Content
from vitascope.deploy.server.service import Service, answer
from vitascope.deploy.server.uploads import whole_number

if TYPE_CHECKING:
    import torch

INPUT = "image"
"""The name of the input tensor."""
MOST_VALUES = 2**20
"""Values in the JSON of a request, such as a megabyte of pixels; binary tensors have no such limit."""
LENGTH = "inference-header-content-length"
"""The header with the bytes of the JSON before binary tensors."""
SERVER = {"name": "vitascope", "version": __version__, "extensions": ["classification", "binary_tensor_data"]}


def oip(first: Service) -> APIRouter:
    """`/v2`: health, the model's description, inference."""
    routes = APIRouter(tags=["Open Inference Protocol"])
    infer_body = openapi.for_json(openapi.InferenceRequest, "application/octet-stream")
    content = openapi.SOME_JSON["content"] | {"application/octet-stream": openapi.BINARY}
    infer_body["responses"] = {200: {"content": content}}

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
        if reason := first.admission.why_not_ready():
            raise Rejection(503, reason)
        return answer({"ready": True})

    # A name may have slashes, and /versions/1 after it.

    @routes.get("/v2/models/{name:path}/ready")
    async def model_ready(name: str) -> Response:
        """200 if the model is loaded."""
        checked(name)
        return await ready()  # all models are loaded together

    @routes.get("/v2/models/{name:path}")
    async def model(name: str) -> Response:
        """The inputs and outputs of the model."""
        service, name = checked(name)
        outputs = [{"name": "features", "datatype": "FP32", "shape": [-1, -1]}]
        if count := service.engine.num_classes:
            outputs = [
                {"name": "probabilities", "datatype": "FP32", "shape": [-1, count]},
                {"name": "labels", "datatype": "BYTES", "shape": [-1]},
            ]
        inputs = [{"name": INPUT, "datatype": "BYTES", "shape": [-1]}]
        about = {"name": name, "versions": ["1"], "platform": "vitascope"}
        return answer(about | {"inputs": inputs, "outputs": outputs})

    @routes.post("/v2/models/{name:path}/infer", **infer_body)
    async def infer(request: Request, name: str) -> Response:
        """Probabilities and labels of pictures, encoded (BYTES) or as pixels (UINT8, N x H x W x 3)."""
        service, name = checked(name)
        body = await protocols.json_body(request, service)
        head = whole_number(request.headers.get(LENGTH, str(len(body))))
        if head is None or head > len(body):
            raise Rejection(
                422, f"{LENGTH} is {request.headers[LENGTH][:20]!r}, and the body has {len(body):,} bytes"
            )
        rest = body[head:]
        wanted = await protocols.object_of(openapi.InferenceRequest, service, body[:head], MOST_VALUES)
        if wanted.model_name not in (None, name):  # KServe's client repeats that of the path
            raise Rejection(422, f"model_name is not {name}, the name in the path")
        outputs = _outputs(service, wanted)
        most = service.settings.max_files
        pictures = await protocols.computed(service, head, lambda: _pictures(wanted.inputs[0], rest, most))
        rows = protocols.all_or_none(
            await protocols.rows_of(service, request, pictures, features=not service.engine.num_classes)
        )
        binary = wanted.parameters.binary_data_output
        return _response(name, wanted.id, [_tensor(service, rows, output, binary) for output in outputs])

    def checked(path: str) -> tuple[Service, str]:
        """The model of a path that may have a version, and the name in it."""
        name, _, version = path.rpartition("/versions/") if "/versions/" in path else (path, "", "1")
        model = first.named(name)
        if version != "1":
            raise Rejection(404, f"no version {version[:20]!r} of the model; it has 1")
        return model, name

    return routes


def _pictures(tensor: openapi.InputTensor, rest: bytes, most: int) -> Sequence[Content]:
    """The encoded pictures of a tensor, or the pixels of each, (H, W, 1 or 3)."""
    shape, size, data = tensor.shape, tensor.parameters.binary_data_size, tensor.data or []
    if (size or 0) != len(rest):
        raise Rejection(422, f"binary_data_size is {size}, and {len(rest):,} bytes follow the JSON")
    if (size is None) == (tensor.data is None):
        raise Rejection(422, "an input has data or binary_data_size, not both")
    if tensor.datatype == "BYTES":
        parts = list(map(protocols.decoded_picture, _flat(data))) if size is None else _elements(rest, most)
        if math.prod(shape) != len(parts):
            raise Rejection(422, f"shape {shape} of {len(parts):,} elements")
        return parts
    if len(shape) != 4 or shape[3] not in (1, 3) or shape[0] > most:
        raise Rejection(422, f"UINT8 has the shape (N, H, W, 3), N at most {most}, not {shape}")
    pixels = _numbers(data) if size is None else np.frombuffer(rest, np.uint8)
    if pixels.size != math.prod(shape) or not pixels.size:
        raise Rejection(422, f"shape {shape} of {pixels.size:,} values")
    return list(pixels.reshape(shape))


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


def _flat(data: list[Any]) -> list[Any]:
    """The values of a tensor in JSON, which may be nested: NumPy would widen all to the longest text."""
    for _ in range(3):
        if data and all(isinstance(part, list) for part in data):
            data = list(itertools.chain.from_iterable(data))
    return data


def _numbers(data: list[Any]) -> npt.NDArray[np.uint8]:
    """The values of a UINT8 tensor in JSON."""
    try:
        return np.frombuffer(bytes(_flat(data)), np.uint8)
    except (TypeError, ValueError) as error:
        raise Rejection(422, "data of UINT8 are whole numbers from 0 to 255") from error


def _outputs(service: Service, wanted: openapi.InferenceRequest) -> list[openapi.OutputTensor]:
    """The outputs of a request; all of the model if it names none."""
    names = ("probabilities", "labels") if service.engine.num_classes else ("features",)
    for output in wanted.outputs:
        if output.name not in names:
            raise Rejection(422, f"no output {output.name[:80]!r}; the model has {' and '.join(names)}")
        if output.parameters.classification is not None and output.name != "probabilities":
            raise Rejection(422, "classification is a number of classes, of the output probabilities")
    return wanted.outputs or [openapi.OutputTensor(name=name) for name in names]


def _tensor(
    service: Service, rows: "list[torch.Tensor]", output: openapi.OutputTensor, binary: bool
) -> tuple[dict[str, Any], bytes]:
    """An output tensor, and its bytes; empty if its values are in the JSON, by default unless `binary`."""
    label = service.engine.label
    values: list[Any]
    if (classes := output.parameters.classification) is not None:
        tops = [row.topk(min(classes, len(row))) for row in rows]
        scores = [zip(top.values.tolist(), top.indices.tolist(), strict=True) for top in tops]
        values = [f"{score:.6f}:{index}:{label(index)}" for top in scores for score, index in top]
        kind, shape = "BYTES", [len(rows), len(values) // len(rows)]
    elif output.name == "labels":
        values, kind, shape = [label(int(row.argmax())) for row in rows], "BYTES", [len(rows)]
    else:
        values = [number for row in rows for number in row.tolist()]
        kind, shape = "FP32", [len(rows), len(rows[0])]
    about = {"name": output.name, "datatype": kind, "shape": shape}
    if not (binary if output.parameters.binary_data is None else output.parameters.binary_data):
        return about | {"data": values}, b""
    if kind == "FP32":
        packed = np.array(values, "<f4").tobytes()
    else:
        texts = [text.encode(errors="backslashreplace") for text in values]
        packed = b"".join(struct.pack("<I", len(text)) + text for text in texts)
    return about | {"parameters": {"binary_data_size": len(packed)}}, packed


def _response(name: str, identifier: str | None, tensors: list[tuple[dict[str, Any], bytes]]) -> Response:
    """The response of an inference, with its binary tensors after the JSON."""
    content: dict[str, Any] = {"model_name": name, "model_version": "1"}
    content["outputs"] = [about for about, _ in tensors]
    if identifier is not None:
        content["id"] = identifier
    packed = b"".join(part for _, part in tensors)
    if not packed:
        return answer(content)
    head = json.dumps(content).encode()
    return Response(head + packed, media_type="application/octet-stream", headers={LENGTH: str(len(head))})
