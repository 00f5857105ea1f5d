"""The ASGI application: its routes, pictures in, JSON out. `http_server` runs it.

Routes return finished bytes: small models take a thousand pictures per second, and then the way between model
and socket takes as long as the model.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from vitascope.deploy.server import check_installed

try:
    from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response
    from fastapi.exceptions import RequestValidationError
    from fastapi.routing import APIRoute
    from fastapi.security import HTTPBearer
    from starlette.exceptions import HTTPException
except ModuleNotFoundError:
    check_installed()
    raise

from vitascope._version import __version__
from vitascope.deploy.server import explorer, openapi
from vitascope.deploy.server.admission import OPENAI, SECURITY, Rejection, response_to
from vitascope.deploy.server.batcher import Expired, Outcome, Work
from vitascope.deploy.server.middleware import RequestMiddleware
from vitascope.deploy.server.open_inference import oip
from vitascope.deploy.server.protocols import huggingface, kserve, openai
from vitascope.deploy.server.service import BESIDE, COMPUTED, NAMED, Service, answer
from vitascope.deploy.server.settings import Settings
from vitascope.deploy.server.uploads import read_uploads
from vitascope.errors import UserError, suggestion

if TYPE_CHECKING:
    import torch

    from vitascope.models.engines.engine import Engine

Opening: TypeAlias = "Engine | Callable[[], Engine]"
MAX_PARAMETERS = 100
PROTOCOLS: dict[str, Callable[[Service], APIRouter]] = {
    "huggingface": huggingface,
    "openai": openai,
    "oip": oip,
    "kserve": kserve,
}
"""The routes of other servers' protocols."""
TopK = Annotated[int, Query(ge=1, description="classes in `predictions`, most probable first")]
Rate = Annotated[
    float | None,
    Query(
        gt=0,
        lt=1,
        description="of a calibrated model, a share of pictures: `coverage`, of those whose set holds the "
        "right class (default 0.95); `familiar`, of those like the training images that pass (default 0.99)",
    ),
]
Threshold = Annotated[
    float | None,
    Query(
        ge=0,
        le=1,
        description="of a model of several classes per picture: the probability from which on a class is in "
        "`labels`; default: the model's own threshold of each class",
    ),
]


def create_app(
    models: Opening | Mapping[str, Opening],
    settings: Settings,
    token: str | None = None,
    *,
    beside: Opening | None = None,
    wait_for_model: bool = False,
) -> FastAPI:
    """The server as an ASGI application; its `state.service` is the `Service` of the first model.

    A function opens an engine in the background, so the server is alive meanwhile; with `wait_for_model`, it
    starts only when the models are loaded. Several models have names; paths of each begin with /models/NAME.
    `token` is the bearer token that clients must send, if any. The explorer compares the model with the one
    `beside` it.
    """
    by_name = models if isinstance(models, Mapping) else {"": models}
    places = {NAMED + name if name else "": engine for name, engine in by_name.items()}
    if beside is not None:
        places[BESIDE] = beside
    services: list[Service] = []
    for place, engine in places.items():
        services.append(Service(_opener(engine), settings, place, services[0] if services else None))
    service = services[0]

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start(wait_for_model=wait_for_model)
        yield
        await service.stop()

    app = FastAPI(
        title="vitascope",
        version=__version__,
        lifespan=lifespan,
        servers=[{"url": settings.root_path}] if settings.root_path else None,
        docs_url=None,  # FastAPI's page loads scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,  # a redirect would name the Host header, and leave out a proxy's prefix
    )
    app.state.service = service
    statuses = [*openapi.COMMON_ERRORS]
    health = public(app, service)
    app.include_router(health, responses=openapi.errors(*statuses))
    dependencies = [Depends(check_parameters)]
    if token is not None:  # the middleware checks it; this describes it
        dependencies.append(Depends(HTTPBearer(auto_error=False)))
        statuses.append(401)
    routers = [("", router) for router in (health, metrics(service))]
    for place, model in service.places.items():
        kinds = [description, *([] if place == BESIDE else [predictions]), explorer.router]
        routers += [(place, kind(model)) for kind in kinds]
    routers += [("", of_protocol(name, service, statuses)) for name in dict.fromkeys(settings.protocols)]
    for place, router in routers[1:]:
        shown, answers = place != BESIDE, openapi.errors(*statuses)
        app.include_router(
            router, prefix=place, dependencies=dependencies, responses=answers, include_in_schema=shown
        )
    paths = {place + getattr(route, "path", "") for place, router in routers for route in router.routes}
    service.metrics.name_routes({"/openapi.json", *paths})
    app.add_middleware(RequestMiddleware, service=service, token=token)
    _handle_errors(app, service)
    return app


def _opener(engine: Opening) -> Callable[[], Engine]:
    return engine if callable(engine) else lambda: engine


def of_protocol(name: str, service: Service, statuses: Collection[int]) -> APIRouter:
    """The routes of a protocol, with the form of their answers."""
    router = PROTOCOLS[name](service)
    for route in router.routes:
        assert isinstance(route, APIRoute)
        form = openapi.OpenAIProblem if OPENAI.fullmatch(route.path_format) else openapi.Problem
        errors = openapi.errors(*statuses, *openapi.MODEL_ERRORS, 404, form=form)
        route.responses = {200: openapi.SOME_JSON, **errors, **route.responses}
    return router


async def check_parameters(request: Request) -> None:
    """Reject query parameters that a route of the model does not know, or that are given twice (422)."""
    if COMPUTED not in request.scope["route"].path:
        return
    known = {field.alias for field in request.scope["route"].dependant.query_params}
    given = request.query_params.multi_items()
    if len(given) > MAX_PARAMETERS:
        raise Rejection(422, f"more than {MAX_PARAMETERS} query parameters")
    for name, _ in given:
        if name not in known:
            short, accepted = name[:80], ", ".join(sorted(known)) or "none"
            guess = suggestion(short, known)
            raise Rejection(422, f"unknown query parameter {short!r}{guess}; this path takes {accepted}")
        if (times := len(request.query_params.getlist(name))) > 1:
            raise Rejection(422, f"query parameter {name!r} is given {times} times; give it once")


def public(app: FastAPI, service: Service) -> APIRouter:
    """The routes of probes and of the API's page, which need no model."""
    routes = APIRouter(tags=["health"])

    @routes.get("/livez", responses={200: {"model": openapi.Health}})
    async def live() -> Response:
        """200 as long as the process answers, whatever the model does."""
        return answer({"status": "live"})

    @routes.get("/readyz", responses={200: {"model": openapi.Health}, **openapi.errors(503)})
    async def ready() -> Response:
        """200 if requests should be sent here now."""
        if reason := service.admission.why_not_ready():
            raise Rejection(503, reason)
        return answer({"status": "ready"})

    @routes.get("/docs", include_in_schema=False)
    async def page(request: Request) -> Response:
        host = request.headers.get("host", "localhost")
        address = f"{request.scope['scheme']}://{host}{service.settings.root_path}"
        return Response(openapi.api_page(app.openapi(), address), media_type="text/html")

    return routes


def description(service: Service) -> APIRouter:
    """The route of what is served."""
    routes = APIRouter(tags=["model"])

    @routes.get("/v1/model", responses={200: {"model": openapi.ModelDescription}, **openapi.errors(503)})
    async def model() -> Response:
        """The model: its classes, its preprocessing, its precision and device; and the server's limits."""
        engine = service.engine
        limits = {name: getattr(service.settings, name) for name in openapi.Limits.model_fields}
        return answer(
            {
                "name": engine.name,
                "architecture": engine.architecture,
                "digest": engine.digest,
                "engine": engine.description,
                "num_classes": engine.num_classes,
                "class_names": list(engine.class_names),
                "outputs": engine.meaning,
                "thresholds": list(engine.thresholds),
                "preprocess": engine.preprocess.to_dict(),
                "limits": limits,
                "beside": service is service.first and BESIDE in service.places,
                "version": __version__,
            }
        )

    return routes


def metrics(service: Service) -> APIRouter:
    """The route of Prometheus."""
    routes = APIRouter(tags=["model"])

    @routes.get("/metrics", response_class=Response, responses={200: {"content": openapi.PLAIN_TEXT}})
    async def text() -> Response:
        """Counts and times, in Prometheus' text format."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return routes


def predictions(service: Service) -> APIRouter:
    """The routes that need the model."""
    routes = APIRouter(tags=["model"])
    predicted = {"model": openapi.Predictions | openapi.Form[openapi.Predictions]}
    embedded = {"model": openapi.Embedding | openapi.Form[openapi.Embedding]}
    explained = {"model": openapi.Heatmap, "content": {"image/png": openapi.BINARY}}

    @routes.post("/v1/predict", **openapi.for_pictures(predicted))
    async def predict(
        request: Request,
        top_k: TopK = 5,
        threshold: Threshold = None,
        coverage: Rate = None,
        familiar: Rate = None,
    ) -> Response:
        """The most probable classes of a picture, or of each file of a form; of a model of several classes
        per picture also those that apply, in `labels`."""
        from vitascope.models.engines.selection import ClassSelection

        def named(classes: list[tuple[int, float]]) -> list[dict[str, Any]]:
            label = service.engine.label
            return [{"label": label(index), "index": index, "score": score} for index, score in classes]

        def summary(answer: tuple[torch.Tensor, ...]) -> dict[str, Any]:
            probabilities, *familiarity = answer
            scores, indices = probabilities.topk(min(top_k, len(probabilities)))
            found = {"predictions": named(list(zip(indices.tolist(), scores.tolist(), strict=True)))}
            if service.engine.thresholds:
                found["labels"] = named(selection.of(service.engine, probabilities[None])[0])
            if service.engine.sets is not None:
                known = familiarity[0][None] if familiarity else None
                (verdict,) = selection.judged(service.engine, probabilities[None], known)
                service.metrics.verdicts.labels(service.name, verdict.unknown or "known").inc()
                found |= vars(verdict)
            return found

        service.check_classes()
        selection = ClassSelection(threshold=threshold, coverage=coverage, familiar=familiar)
        selection.check(service.engine)
        return await _results(service, request, service.predictions, summary)

    @routes.post("/v1/embed", **openapi.for_pictures(embedded))
    async def embed(request: Request) -> Response:
        """The pooled representation of a picture, or of each file of a form."""
        service.check_features()
        return await _results(service, request, service.embeddings, lambda row: {"embedding": row.tolist()})

    @routes.post("/v1/explain", **openapi.for_pictures(explained))
    async def explain(
        request: Request,
        method: Annotated[str | None, Query(description=openapi.METHOD)] = None,
        target: Annotated[str | None, Query(description="a class; default: the predicted one")] = None,
        form: Annotated[Literal["json", "png"], Query(alias="format")] = "json",
    ) -> Response:
        """A heatmap of where the model looks, as numbers or as a picture."""
        explanation = await service.explain(request, method, target)
        if form == "png":
            return Response(await asyncio.to_thread(explanation.png), media_type="image/png")
        index, heatmap = explanation.target, explanation.heatmap.tolist()
        named = None if index is None else {"label": explanation.label, "index": index}
        return answer({"method": explanation.method, "target": named, "heatmap": heatmap})

    return routes


async def _results(
    service: Service, request: Request, work: Work, summary: Callable[[Any], dict[str, Any]]
) -> Response:
    """Read a request's pictures, do the work for each, and summarize the result, a row of numbers."""
    uploads = await read_uploads(request, service.admission)

    def result(outcome: Outcome | Rejection) -> dict[str, Any] | Rejection:
        if isinstance(outcome, Rejection):
            return outcome
        timing = {
            "queue_ms": round(1000 * outcome.queue_seconds, 3),
            "model_ms": round(1000 * outcome.model_seconds, 3),
            "batch_size": outcome.batch_size,
        }
        return {**summary(outcome.value), "timing": timing}

    results = list(map(result, await service.outcomes(request, work, uploads)))
    rejections = [one for one in results if isinstance(one, Rejection)]
    if len(rejections) == len(results):
        raise Rejection(rejections[0].status_code, "; ".join(map(str, rejections)))
    plain = [{"error": str(one)} if isinstance(one, Rejection) else one for one in results]
    if len(uploads) == 1 and not uploads[0].name:
        return answer(plain[0])
    named = [{"name": upload.name, **one} for upload, one in zip(uploads, plain, strict=True)]
    return answer({"results": named})


def _handle_errors(app: FastAPI, service: Service) -> None:
    """Every error has one form: `{"error": reason}`."""

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        return response_to(error, request.scope["path"])

    @app.exception_handler(Expired)
    async def expired(request: Request, error: Expired) -> Response:
        service.metrics.expired.labels(error.stage).inc()
        return response_to(Rejection(504, str(error)), request.scope["path"])

    @app.exception_handler(UserError)
    async def user_error(request: Request, error: UserError) -> Response:
        return response_to(Rejection(422, str(error)), request.scope["path"])

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        faults = (f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        return response_to(Rejection(422, "; ".join(faults)))

    @app.exception_handler(Exception)
    async def fault(request: Request, error: Exception) -> Response:
        # This runs outside the middleware, which adds these headers elsewhere.
        headers = {**SECURITY, "X-Request-ID": request.state.request_id}
        return response_to(HTTPException(500, "an error of the server; its log has the traceback", headers))
