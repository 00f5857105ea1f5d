"""The attention explorer: its page at `/`, and the routes that the page uses.

The page consists of plain files in `web/`, served from memory. It gets a picture's prediction and attention
as one `attention_pack` and computes everything that it draws from that. Routes import torch only when
they are used, because the server answers before torch is imported.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from importlib.resources import files
from typing import Any, Literal, NamedTuple

from fastapi import APIRouter, HTTPException, Query, Request, Response

from vitascope.deploy.server import schemas
from vitascope.deploy.server.openapi import BINARY, METHOD, MODEL_ERRORS, PICTURES, responses
from vitascope.deploy.server.service import Service
from vitascope.errors import UserError

MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""The files that `web/` may have."""
PACK = "application/octet-stream"
PACKED = responses({"description": "A safetensors file.", "content": {PACK: BINARY}}, *MODEL_ERRORS)
PICTURE = {"description": "The picture.", "content": {"image/jpeg": BINARY, "image/png": BINARY}}


class WebFile(NamedTuple):
    """A file of the page."""

    content: bytes
    media_type: str
    etag: str


def router(service: Service) -> APIRouter:
    """The routes `/`, `/web/*`, `/v1/attention`, `/v1/heatmap` and `/v1/samples`."""
    routes = APIRouter(tags=["explorer"])
    pages = web_files()

    async def packed(request: Request, kind: str, pack: Callable[..., bytes], *args: Any) -> Response:
        """The result of a function of `attention_pack` for the engine and the request's picture."""
        pixels = await service.read_picture(request)
        deadline = service.deadline(request, service.settings.explain_deadline_ms)
        work = service.run(pack, service.engine, pixels, *args, deadline=deadline, kind=kind)
        content = await service.unless_gone(request, work)
        return Response(content, media_type=PACK, headers={"Cache-Control": "no-store"})

    @routes.get("/", include_in_schema=False)
    async def page(request: Request) -> Response:
        return _response(pages["index.html"], request)

    @routes.get("/web/{name}", include_in_schema=False)
    async def web_file(name: str, request: Request) -> Response:
        return _response(pages[name], request) if name in pages else Response(status_code=404)

    @routes.post("/v1/attention", response_class=Response, openapi_extra=PICTURES, responses=PACKED)
    async def attention(
        request: Request,
        layer: int | None = Query(None, description="only this layer, from 0"),
        head: int | Literal["mean"] | None = Query(None, description="its head, from 0, or `mean`"),
    ) -> Response:
        """A picture's prediction and attention as a safetensors file; of large models, layer by layer."""
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
        method: str | None = Query(None, description=METHOD),
    ) -> Response:
        """The heatmap of a class, as a safetensors file."""
        from vitascope.deploy.server.attention_pack import pack_heatmap
        from vitascope.explain.methods import DEFAULT_METHOD

        method = method or DEFAULT_METHOD
        return await packed(request, f"heatmap-{method}", pack_heatmap, method, target)

    @routes.get("/v1/samples", responses=responses({"model": list[schemas.Sample]}, 503))
    def samples() -> list[dict[str, str]]:
        """The names and titles of pictures to try."""
        from vitascope.deploy.server.samples import samples_for

        return [{"name": one.name, "title": one.title} for one in samples_for(service.engine.preprocess)]

    @routes.get("/v1/samples/{name}", response_class=Response, responses=responses(PICTURE, 404, 503))
    def sample(name: str) -> Response:
        """A picture to try."""
        from vitascope.deploy.server.samples import samples_for

        for one in samples_for(service.engine.preprocess):
            if one.name == name:
                return Response(one.content, media_type=one.media_type)
        raise HTTPException(404, "no such sample; /v1/samples lists them")

    return routes


def web_files() -> dict[str, WebFile]:
    """The page's files by name."""
    found = {}
    for path in files("vitascope.deploy.server").joinpath("web").iterdir():
        media_type = MEDIA_TYPES.get(path.name[path.name.rfind(".") :])
        if media_type is not None:
            content = path.read_bytes()
            found[path.name] = WebFile(content, media_type, f'"{hashlib.sha256(content).hexdigest()[:16]}"')
    return found


def _response(file: WebFile, request: Request) -> Response:
    """A file, or 304 if the browser has it."""
    headers = {"ETag": file.etag, "Cache-Control": "no-cache"}  # which means: ask again each time
    if request.headers.get("If-None-Match") == file.etag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)
