"""The server's routes: pictures in, JSON out. `serving` runs them.

Handlers answer with finished bytes: of small pictures there are a thousand a second, and what is between the
model and the socket takes as long as the model.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from vitascope._version import __version__
from vitascope.deploy.server import explorer, schemas
from vitascope.deploy.server.api_page import STYLE, api_page
from vitascope.deploy.server.batcher import Outcome
from vitascope.deploy.server.middleware import REQUEST_ID_KEY, SECURITY, Gate, problem, refused
from vitascope.deploy.server.openapi import describe_api
from vitascope.deploy.server.service import Service
from vitascope.deploy.server.settings import Settings
from vitascope.deploy.server.uploads import LOOKING_INSIDE, NEEDS_HEAD, NOT_LOADED, PICTURES, Refusal, Upload
from vitascope.errors import UserError

if TYPE_CHECKING:
    from vitascope.deploy.predict.engine import Engine

PNG = {"image/png": {"schema": {"type": "string", "format": "binary"}}}
OF_A_FILE = (413, 422)
"""Refusals of one picture; of a form, the other files are answered all the same."""
TopK = Annotated[int, Query(ge=1, description="classes a picture, most probable first")]


def create_app(
    engine: Engine | Callable[[], Engine],
    settings: Settings,
    token: str | None = None,
    *,
    wait_for_model: bool = False,
) -> FastAPI:
    """The server as an ASGI application; its `state.service` is the `Service`.

    Args:
        engine: what answers, or what opens it, which is called in the background: the server lives meanwhile,
            and is ready when it has returned.
        settings: the limits.
        token: what clients have to send as a bearer token; None asks for none.
        wait_for_model: whether to start only when the model is there, as a further worker at one port does.
    """
    service = Service(engine if callable(engine) else lambda: engine, settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start()
        while wait_for_model and service.is_loading and not service.draining:
            await asyncio.sleep(0.05)
        yield
        await service.stop()

    app = FastAPI(
        title="vitascope",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,  # its page loads scripts from elsewhere
        openapi_url=None,  # `documentation` has it
        redoc_url=None,
        redirect_slashes=False,  # a redirect would name the Host header, and leave out a proxy's prefix
    )
    app.state.service = service
    paths: set[str] = set()
    parameters: dict[tuple[str, str], frozenset[str]] = {}
    pages = documentation(app, settings, secured=token is not None)
    for router in (health(service), models(service), explorer.router(service), pages):
        app.include_router(router)
        for route in router.routes:
            if isinstance(route, APIRoute):
                paths.add(route.path)
                if route.path.startswith("/v1/"):
                    names = frozenset(field.alias for field in route.dependant.query_params)
                    parameters |= {(method, route.path): names for method in route.methods or ()}
    app.add_middleware(Gate, service=service, token=token, routes=paths, parameters=parameters)
    _answer_errors(app)
    return app


def health(service: Service) -> APIRouter:
    """Whether the server lives, is ready, and how it does."""
    routes = APIRouter(tags=["health"])

    @routes.get("/livez", responses={200: {"model": schemas.Live}})
    async def live() -> Response:
        """200 as long as the process answers, whatever the model does."""
        return _json({"status": "live"})

    @routes.get("/readyz", responses={200: {"model": schemas.Ready}, 503: {"description": "Not ready."}})
    async def ready() -> Response:
        """200 if requests should be sent here now."""
        reason = service.why_not_ready()
        return problem(503, reason, {"Retry-After": "1"}) if reason else _json({"status": "ready"})

    @routes.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Counts and times, in Prometheus' text format."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return routes


def documentation(app: FastAPI, settings: Settings, *, secured: bool) -> APIRouter:
    """The API as an OpenAPI document and as a page; neither tells anything of the model that is served."""
    routes = APIRouter(include_in_schema=False)

    @functools.cache
    def document() -> dict[str, Any]:
        return describe_api(app, settings, secured=secured)

    @routes.get("/openapi.json")
    async def description() -> Response:
        return _json(document())

    @routes.get("/docs")
    async def page(request: Request) -> Response:
        host = request.headers.get("host", f"{settings.host}:{settings.port}")
        address = f"{request.scope['scheme']}://{host}{settings.root_path}"
        return Response(api_page(document(), address), media_type="text/html")

    @routes.get("/docs.css")
    async def style() -> Response:
        return Response(STYLE, media_type="text/css")

    return routes


def models(service: Service) -> APIRouter:
    """What the model says of pictures."""
    routes = APIRouter(tags=["model"])

    @routes.get("/v1/model", responses={200: {"model": schemas.ModelDescription}, **NOT_LOADED})
    async def model() -> Response:
        """The model: its classes, its preprocessing, what it computes with; and the server's limits."""
        return _json(described(service))

    @routes.post(
        "/v1/predict",
        openapi_extra=PICTURES,
        responses={200: {"model": schemas.Predictions | schemas.FormPredictions}, **NEEDS_HEAD},
    )
    async def predict(request: Request, top_k: TopK = 5) -> Response:
        """The most probable classes of a picture; of a form, those of each of its files."""

        def told(outcome: Outcome) -> dict[str, Any]:
            scores, indices = outcome.value.topk(min(top_k, len(outcome.value)))
            return {
                "predictions": [
                    {"label": service.engine.label(index), "index": index, "score": score}
                    for index, score in zip(indices.tolist(), scores.tolist(), strict=True)
                ]
            }

        service.check_classes()
        return await _computed(service, request, service.predict, told)

    @routes.post(
        "/v1/embed",
        openapi_extra=PICTURES,
        responses={200: {"model": schemas.Embedding | schemas.FormEmbeddings}, **LOOKING_INSIDE},
    )
    async def embed(request: Request) -> Response:
        """A picture's representation before the head; of a form, those of each of its files."""
        service.torch_engine()
        return await _computed(
            service, request, service.embed, lambda outcome: {"embedding": outcome.value.tolist()}
        )

    @routes.post(
        "/v1/explain",
        openapi_extra=PICTURES,
        responses={200: {"model": schemas.Heatmap, "content": PNG}, **LOOKING_INSIDE},
    )
    async def explain(
        request: Request,
        method: Annotated[str, Query(description="a method of `vitascope explain`")] = "grad-cam",
        target: Annotated[
            str | None, Query(description="a class by name or number; else the predicted")
        ] = None,
        form: Annotated[Literal["json", "png"], Query(alias="format")] = "json",
    ) -> Response:
        """Where the model looks in a picture: a heatmap's numbers, or the picture under it."""
        from vitascope.deploy.server import explanations

        engine = service.torch_engine()
        pixels = await service.read_picture(request)
        deadline = service.deadline(request, service.settings.explain_deadline_ms)
        explanation = await service.unless_gone(
            request,
            service.run(
                *(explanations.explain, engine, pixels, method, target),
                deadline=deadline,
                kind=f"explain-{method}",
            ),
        )
        if form == "png":
            return Response(await asyncio.to_thread(explanation.png), media_type="image/png")
        index = explanation.target
        named = None if index is None else {"label": engine.label(index), "index": index}
        return _json({"method": method, "target": named, "heatmap": explanation.heatmap.tolist()})

    return routes


async def _computed(
    service: Service,
    request: Request,
    compute: Callable[..., Awaitable[Outcome]],
    told: Callable[[Outcome], dict[str, Any]],
) -> Response:
    """Read a request's pictures, compute something of each, and say it."""
    uploads = await service.read_uploads(request)
    deadline = service.deadline(request)

    async def one(upload: Upload) -> Outcome | Refusal:
        try:
            pixels = await service.decode(upload, deadline=deadline)
        except Refusal as refusal:
            if refusal.status not in OF_A_FILE:
                raise
            return refusal
        return await compute(pixels, deadline=deadline)

    outcomes = await service.unless_gone(request, _each(one, uploads))
    refusals = [outcome for outcome in outcomes if isinstance(outcome, Refusal)]
    if len(refusals) == len(outcomes):
        raise Refusal(refusals[0].status, "; ".join(map(str, refusals)))
    results = [
        {"error": str(outcome)}
        if isinstance(outcome, Refusal)
        else {**told(outcome), "timing": _timing(outcome)}
        for outcome in outcomes
    ]
    if len(uploads) == 1 and not uploads[0].name:
        return _json(results[0])
    named = [{"name": upload.name, **result} for upload, result in zip(uploads, results, strict=True)]
    return _json({"results": named})


async def _each(
    one: Callable[[Upload], Awaitable[Outcome | Refusal]], uploads: Sequence[Upload]
) -> list[Outcome | Refusal]:
    """All outcomes; when one raises, or nobody waits any more, none of the others goes on."""
    tasks = [asyncio.ensure_future(one(upload)) for upload in uploads]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _timing(outcome: Outcome) -> dict[str, float]:
    return {
        "queue_ms": round(1000 * outcome.queue_seconds, 3),
        "model_ms": round(1000 * outcome.model_seconds, 3),
        "batch_size": outcome.batch_size,
    }


def described(service: Service) -> dict[str, Any]:
    """What `/v1/model` answers."""
    engine, settings = service.engine, service.settings
    return {
        "name": engine.name,
        "architecture": engine.architecture,
        "digest": engine.digest,
        "engine": engine.description,
        "num_classes": engine.num_classes,
        "class_names": list(engine.class_names),
        "preprocess": engine.preprocess.to_dict(),
        "limits": {
            "max_body_mb": settings.max_body_mb,
            "max_megapixels": settings.max_megapixels,
            "max_files": settings.max_files,
            "deadline_ms": settings.deadline_ms,
            "explain_deadline_ms": settings.explain_deadline_ms,
        },
        "version": __version__,
    }


def _answer_errors(app: FastAPI) -> None:
    """Every error has one form: `{"error": "why"}`."""

    @app.exception_handler(Refusal)
    async def refusal(_: Request, error: Refusal) -> Response:
        return refused(error)

    @app.exception_handler(UserError)
    async def user_error(_: Request, error: UserError) -> Response:
        return problem(422, str(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        said = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        return problem(422, said)

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> Response:
        return problem(error.status_code, str(error.detail), dict(error.headers or {}))

    @app.exception_handler(Exception)
    async def fault(request: Request, error: Exception) -> Response:
        named = {"X-Request-ID": request.scope[REQUEST_ID_KEY].decode("ascii")}  # the gate is inside of this
        return problem(500, "a fault of the server's; its log has the traceback", {**SECURITY, **named})


def _json(content: dict[str, Any]) -> Response:
    return Response(json.dumps(content, allow_nan=False), media_type="application/json")
