"""The web application: the route table, the order of the checks before it, and how errors are answered."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Scope

from localfast.admin import Admin
from localfast.bodies import read_json
from localfast.classes import classify
from localfast.dialects import Call, openai, simple
from localfast.errors import InternalError, LocalfastError, MethodNotAllowed, RouteNotFound
from localfast.guard import LOCAL_ORIGINS, KeyCheck, OriginCheck
from localfast.metrics import Metrics
from localfast.models.manager import ModelManager
from localfast.pulls import Fetch, Pulls, fetcher
from localfast.settings import Settings
from localfast.streaming import Answer

log = logging.getLogger("localfast")

Parse = Callable[[Any], Call]


def create_app(settings: Settings, manager: ModelManager, fetch: Fetch | None = None) -> Starlette:
    """The server for one manager; closing the application stops its engines and downloads. `fetch` stands in for the hub."""
    metrics = Metrics(manager.stats)
    pulls = Pulls(fetch or fetcher(settings), settings.max_body_bytes)
    admin = Admin(manager, metrics, int(time.time()))

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await pulls.close()
        await manager.close(settings.drain_s)

    def generation(path: str, parse: Parse) -> Route:
        async def endpoint(request: Request) -> Response:
            observer = metrics.observe(path)
            try:
                call = parse(await read_json(request, settings.max_body_bytes))
                address = request.client.host if request.client else ""
                call = replace(call, request=classify(call.request, request.headers, address))  # type: ignore[type-var]
            except LocalfastError as error:
                observer.close(error.code)
                raise
            return Answer(call, manager.lease, observer, settings.heartbeat_s)

        return Route(path, endpoint, methods=["POST"])

    return Starlette(
        routes=[
            generation("/v1/chat/completions", openai.parse_chat),
            generation("/v1/completions", openai.parse_completion),
            generation("/generate", partial(simple.parse, stream=False)),
            generation("/generate_stream", partial(simple.parse, stream=True)),
            *_own_routes(admin, pulls),
        ],
        middleware=[
            Middleware(OriginCheck, settings=settings, error_response=answer_error),
            Middleware(
                CORSMiddleware,
                allow_origins=settings.allowed_origins,
                allow_origin_regex=LOCAL_ORIGINS,
                allow_methods=["GET", "POST", "DELETE", "HEAD", "OPTIONS"],
                allow_headers=["*"],
                expose_headers=["x-localfast-ignored"],
            ),
            Middleware(KeyCheck, settings=settings, error_response=answer_error),
        ],
        exception_handlers={LocalfastError: _on_error, HTTPException: _on_http_exception, Exception: _on_fault},
        lifespan=lifespan,
    )


def _own_routes(admin: Admin, pulls: Pulls) -> list[Route]:
    return [
        Route("/v1/models", admin.models),
        Route("/v1/models/{name:path}", admin.model),
        Route("/v1/localfast/models", admin.processes),
        Route("/v1/localfast/models/{name:path}/load", admin.load, methods=["POST"]),
        Route("/v1/localfast/models/{name:path}/unload", admin.unload, methods=["POST"]),
        Route("/v1/localfast/plan", admin.plan),
        Route("/v1/localfast/pull", pulls.list),
        Route("/v1/localfast/pull", pulls.start, methods=["POST"]),
        Route("/v1/localfast/pull", pulls.cancel, methods=["DELETE"]),
        Route("/v1/localfast/cache", admin.cache),
        Route("/health", admin.health),
        Route("/ready", admin.ready),
        Route("/metrics", admin.metrics),
    ]


def answer_error(scope: Scope, error: LocalfastError) -> Response:
    """An error in the shape of the dialect that the path belongs to."""
    headers = {"cache-control": "no-store"}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(openai.error(error), status_code=error.status, headers=headers)


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, LocalfastError)
    return answer_error(request.scope, error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    method, path = request.method, request.url.path[:200]
    kind = MethodNotAllowed if error.status_code == 405 else RouteNotFound
    response = answer_error(request.scope, kind(method=method, path=path))
    response.headers.update(error.headers or {})
    return response


async def _on_fault(request: Request, error: Exception) -> Response:
    return answer_error(request.scope, InternalError())
