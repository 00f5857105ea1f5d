"""The attention explorer: its page at `/`, and what the page asks for.

The page is plain files in `web/`, read once and served from memory. It gets a picture's answer and attention
as one `attention_pack`, and computes everything that it draws from that. Handlers import what needs torch
when they are asked: the server answers before torch is there.
"""

from __future__ import annotations

import dataclasses
import hashlib
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal

from fastapi import APIRouter, HTTPException, Query, Request, Response

from vitascope.deploy.server.schemas import Sample
from vitascope.deploy.server.uploads import BINARY, LOOKING_INSIDE, NOT_LOADED, PICTURES
from vitascope.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable

    from vitascope.deploy.server.service import Service

KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""The files that `web/` may have."""
PACK = "application/octet-stream"
PACKED: dict[int | str, dict[str, Any]] = {
    200: {"description": "A safetensors file.", "content": {PACK: BINARY}},
    **LOOKING_INSIDE,
}
SAMPLE: dict[int | str, dict[str, Any]] = {
    200: {"description": "The picture.", "content": {"image/jpeg": BINARY, "image/png": BINARY}},
    404: {"description": "No such sample."},
    **NOT_LOADED,
}


@dataclasses.dataclass(frozen=True)
class WebFile:
    """A file of the page."""

    content: bytes
    kind: str
    etag: str


def router(service: Service) -> APIRouter:
    """The routes of the page: `/`, `/web/*`, `/v1/attention`, `/v1/heatmap` and `/v1/samples`.

    Args:
        service: reads pictures, and computes in the model's thread.
    """
    routes = APIRouter(tags=["explorer"])
    pages = web_files()

    async def packed(request: Request, kind: str, pack: Callable[..., bytes], *args: Any) -> Response:
        """What a function of `attention_pack` makes of the engine and the request's picture."""
        pixels = await service.read_picture(request)
        deadline = service.deadline(request, service.settings.explain_deadline_ms)
        work = service.run(pack, service.engine, pixels, *args, deadline=deadline, kind=kind)
        content = await service.unless_gone(request, work)
        return Response(content, media_type=PACK, headers={"Cache-Control": "no-store"})

    @routes.get("/", include_in_schema=False)
    async def page(request: Request) -> Response:
        return _answer(pages["index.html"], request)

    @routes.get("/web/{name}", include_in_schema=False)
    async def web_file(name: str, request: Request) -> Response:
        return _answer(pages[name], request) if name in pages else Response(status_code=404)

    @routes.post("/v1/attention", response_class=Response, openapi_extra=PICTURES, responses=PACKED)
    async def attention(
        request: Request,
        layer: int | None = Query(None, description="one layer alone, from 0"),
        head: int | Literal["mean"] | None = Query(None, description="one head of it, from 0, or `mean`"),
    ) -> Response:
        """A picture's answer and attention as a safetensors file; of a large model, one layer at a time."""
        from vitascope.deploy.server.attention_pack import pack_attention, pack_picture

        if layer is None:
            if head is not None:
                raise UserError("a head needs its layer: give layer= too")
            return await packed(request, "explore", pack_picture)
        return await packed(request, "attention", pack_attention, layer, head)

    @routes.post("/v1/heatmap", response_class=Response, openapi_extra=PICTURES, responses=PACKED)
    async def heatmap(
        request: Request,
        target: int = Query(description="the class, from 0"),
        method: str = Query("grad-cam", description="one that explains a class"),
    ) -> Response:
        """Where a picture speaks for a class, as a safetensors file."""
        from vitascope.deploy.server.attention_pack import pack_heatmap

        return await packed(request, f"heatmap-{method}", pack_heatmap, method, target)

    @routes.get("/v1/samples", responses={200: {"model": list[Sample]}, **NOT_LOADED})
    def samples() -> list[dict[str, str]]:
        """Pictures to try the model on: their names and titles."""
        from vitascope.deploy.server.samples import samples_for

        return [
            {"name": sample.name, "title": sample.title} for sample in samples_for(service.engine.preprocess)
        ]

    @routes.get("/v1/samples/{name}", response_class=Response, responses=SAMPLE)
    def sample(name: str) -> Response:
        """One of the samples."""
        from vitascope.deploy.server.samples import samples_for

        for one in samples_for(service.engine.preprocess):
            if one.name == name:
                return Response(one.content, media_type=one.kind)
        raise HTTPException(404, "no such sample; /v1/samples lists them")

    return routes


def web_files() -> dict[str, WebFile]:
    """The page's files by name."""
    found = {}
    for path in files("vitascope.deploy.server").joinpath("web").iterdir():
        kind = KINDS.get(path.name[path.name.rfind(".") :])
        if kind is not None:
            content = path.read_bytes()
            found[path.name] = WebFile(content, kind, f'"{hashlib.sha256(content).hexdigest()[:16]}"')
    return found


def _answer(file: WebFile, request: Request) -> Response:
    """A file, or 304 to a browser that has it."""
    headers = {"ETag": file.etag, "Cache-Control": "no-cache"}  # asked for again each time
    if request.headers.get("If-None-Match") == file.etag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.kind, headers=headers)
