"""The ASGI applications, and the parts of the OpenAPI document that FastAPI does not generate."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema
from starlette.types import ASGIApp, Receive, Scope, Send

from adascale_api.auth.authorization import Authorizer
from adascale_api.bodies import BODIES
from adascale_api.data.database import Database
from adascale_api.errors import ErrorBody, NotFoundError, UnavailableError
from adascale_api.http.connection_limits import ConnectionLimits
from adascale_api.http.request_body import REFERENCE
from adascale_api.routes import gain, jobs, logs, page, probes, workers
from adascale_api.routes.common import SERVICE, add_error_handlers, error_response, response_to
from adascale_api.service.run_services import RunServices
from adascale_api.service.service import Service, Settings

_REDACTED = frozenset({"/jobs", "/jobs/{job}", "/jobs/{job}/allocation", "/changes"})
"""Reads whose answers have less without a token."""


class DescribedApp(FastAPI):
    """A FastAPI application that completes its OpenAPI document.

    It adds the schemas of the request bodies, and removes the security requirement of reads unless the
    service protects reads.
    """

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document, generated on the first call."""
        if self.openapi_schema is None:
            document = super().openapi()
            _add_bodies(document)
            if not self.state.service.settings.protect_reads:
                _remove_security_of_reads(document)
            self.openapi_schema = document
        return self.openapi_schema


def _add_bodies(document: dict[str, Any]) -> None:
    _, schemas = models_json_schema([(body, "validation") for body in BODIES], ref_template=REFERENCE)
    document["components"]["schemas"].update(schemas["$defs"])


def _remove_security_of_reads(document: dict[str, Any]) -> None:
    for path, operations in document["paths"].items():
        if "get" in operations:
            operation = operations["get"]
            operation["responses"].pop("403", None)
            if path in _REDACTED and "security" in operation:
                operation["security"].insert(0, {})  # a token is optional
            else:
                operation.pop("security", None)
                operation["responses"].pop("401", None)


_DESCRIPTION = """
Workers post gain reports and register here; the controller declares jobs and sets replica counts.

Writing needs a bearer token, `Authorization: Bearer TOKEN`: the token that the service was started with or,
in a cluster, the token of a service account, which is valid for one job or for the operator. Every error has
the form `ErrorBody`. A refused request stores nothing. Requests that are answered with 2xx survive a crash
of the service.
"""


def create_app(
    database: Database,
    authorizer: Authorizer | None,
    settings: Settings = Settings(),  # noqa: B008 (frozen)
    *,
    connections: ConnectionLimits | None = None,
    clock: Callable[[], float] = time.time,
) -> FastAPI:
    """Return the metrics service as an ASGI application."""
    service = Service(database, authorizer, settings, connections=connections, clock=clock)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        async with service.running():
            yield

    app = DescribedApp(
        title="AdaScale metrics service",
        version=version("adascale-operator"),
        description=_DESCRIPTION,
        lifespan=lifespan,
        redirect_slashes=False,
        # FastAPI's viewers load scripts from other hosts, into pages that may read the token of the page.
        docs_url=None,
        redoc_url=None,
    )
    app.state.service = service
    add_error_handlers(app)
    for routes in (workers, gain, jobs, logs, page, probes):
        app.include_router(routes.router)
    app.include_router(jobs.changes_router)
    return app


def create_runs_app(services: RunServices) -> ASGIApp:
    """Return the application that shows the runs of state folders, and changes nothing."""
    app = FastAPI(title="AdaScale runs", redirect_slashes=False, openapi_url=None, docs_url=None)
    app.state.service = services
    add_error_handlers(app)
    for routes in (page, gain, jobs, logs):
        app.include_router(routes.router)
    return RunPaths(app, services)


class RunPaths:
    """Sends a request for a run to the routes of a job, with the service that reads the run."""

    def __init__(self, app: ASGIApp, runs: RunServices) -> None:
        self._app = app
        self._runs = runs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        if scope["method"] not in ("GET", "HEAD"):
            body = ErrorBody(error=f"method {scope['method']} is not allowed: runs are only shown here")
            return await error_response(405, body, {"Allow": "GET"})(scope, receive, send)
        path: str = scope["path"]
        if path in ("/jobs", "/jobs/"):
            hint = "`adascale list` lists those on this machine, and /jobs/<run> shows one of them"
            body = ErrorBody(error=f"runs are not listed here: {hint}")
            return await error_response(404, body)(scope, receive, send)
        if path.startswith("/jobs/"):
            run, slash, rest = path.removeprefix("/jobs/").partition("/")
            async with AsyncExitStack() as opened:
                try:
                    job, service = await opened.enter_async_context(self._runs.open(run))
                except (NotFoundError, UnavailableError) as error:
                    return await response_to(error)(scope, receive, send)
                path = f"/jobs/{job}{slash}{rest}"
                state = {**scope.get("state", {}), SERVICE: service}
                scope = {**scope, "path": path, "raw_path": path.encode(), "state": state}
                return await self._app(scope, receive, send)
        return await self._app(scope, receive, send)
