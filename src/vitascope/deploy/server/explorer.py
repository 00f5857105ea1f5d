"""The attention explorer: its page at `/`, and the routes that the page uses.

The page consists of plain files in `web/`, served from memory. It gets a picture's prediction and attention
as one `attention_pack` and computes everything that it draws from that. Routes import torch only when
they are used, because the server answers before torch is imported.
"""

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, HTTPException, Query, Request, Response

from vitascope.deploy.server import openapi
from vitascope.deploy.server.page_content import samples_for, web_files
from vitascope.deploy.server.service import Service
from vitascope.errors import UserError

Off = Annotated[
    str, Query(max_length=4000, description="parts to switch off: `head0.1,attention0,mlp0,layer0,patch0`")
]
PACK = "application/octet-stream"
PACKED = openapi.for_pictures({"description": "A safetensors file.", "content": {PACK: openapi.BINARY}})
PICTURE = {
    "description": "The picture.",
    "content": dict.fromkeys(("image/jpeg", "image/png"), openapi.BINARY),
}


def router(service: Service) -> APIRouter:
    """The routes `/`, `/web/*`, `/v1/attention`, `/v1/heatmap` and `/v1/samples`."""
    routes = APIRouter(tags=["explorer"])
    pages = web_files()

    async def packed(
        request: Request, kind: str, off: str, pack: Callable[..., bytes], *args: Any
    ) -> Response:
        """The result of a function of `attention_pack` for the engine and the request's picture."""
        from vitascope.deploy.server.attention_pack import pack_without

        content = await service.run(request, kind, partial(pack_without, off, pack), *args)
        return Response(content, media_type=PACK, headers={"Cache-Control": "no-store"})

    @routes.get("/", include_in_schema=False)
    async def page(request: Request) -> Response:
        return _response(*pages["index.html"], request)

    @routes.get("/web/{name}", include_in_schema=False)
    async def web_file(name: str, request: Request) -> Response:
        return _response(*pages[name], request) if name in pages else Response(status_code=404)

    @routes.post("/v1/attention", response_class=Response, **PACKED)
    async def attention(
        request: Request,
        layer: int | None = Query(None, description="only this layer, from 0"),
        head: int | Literal["mean"] | None = Query(None, description="its head, from 0, or `mean`"),
        off: Off = "",
    ) -> Response:
        """A picture's prediction and attention as a safetensors file; of large models, layer by layer."""
        from vitascope.deploy.server.attention_pack import pack_attention, pack_picture

        if layer is None:
            if head is not None:
                raise UserError("a head needs its layer: give layer= too")
            return await packed(request, "explore", off, pack_picture)
        return await packed(request, "attention", off, pack_attention, layer, head)

    @routes.post("/v1/heatmap", response_class=Response, **PACKED)
    async def heatmap(
        request: Request,
        target: int = Query(description="the class, from 0"),
        method: str | None = Query(None, description=f"{openapi.METHOD}; or `lens`, by layer"),
        off: Off = "",
    ) -> Response:
        """The heatmap of a class, as a safetensors file."""
        from vitascope.analysis.explain.methods import DEFAULT_METHOD
        from vitascope.deploy.server.attention_pack import pack_heatmap

        method = method or DEFAULT_METHOD
        return await packed(request, f"heatmap-{method}", off, pack_heatmap, method, target)

    @routes.get("/v1/samples", responses={200: {"model": list[openapi.Sample]}, **openapi.errors(503)})
    def samples() -> list[dict[str, str]]:
        """The names and titles of pictures to try, of classes that the model knows."""
        return [{"name": one.name, "title": one.title} for one in samples_for(service.engine)]

    @routes.get(
        "/v1/samples/{name}", response_class=Response, responses={200: PICTURE, **openapi.errors(404, 503)}
    )
    def sample(name: str) -> Response:
        """A picture to try."""
        for one in samples_for(service.engine):
            if one.name == name:
                return Response(one.content, media_type=one.media_type)
        raise HTTPException(404, "no such sample; /v1/samples lists them")

    return routes


def _response(media_type: str, content: bytes, request: Request) -> Response:
    """A file, or 304 if the browser has it."""
    etag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    headers = {"ETag": etag, "Cache-Control": "no-cache"}  # which means: ask again each time
    if request.headers.get("If-None-Match") == etag:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=media_type, headers=headers)
