"""The ASGI applications, and the parts of the OpenAPI document that FastAPI does not generate."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from pydantic.json_schema import models_json_schema

from adascale_api.auth.authorization import Authorizer
from adascale_api.bodies import BODIES
from adascale_api.data.database import Database
from adascale_api.http.connection_limits import ConnectionLimits
from adascale_api.http.request_body import REFERENCE
from adascale_api.routes import gain, goodput, jobs, logs, page, probes, workers
from adascale_api.routes.common import add_error_handlers
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
    for routes in (page, workers, gain, goodput, jobs, logs, probes):
        app.include_router(routes.router)
    app.include_router(jobs.changes_router)
    app.include_router(goodput.list_router)
    return app


def create_runs_app(services: RunServices) -> FastAPI:
    """Return the application that shows the runs of state folders, and changes nothing."""
    app = FastAPI(title="AdaScale runs", redirect_slashes=False, openapi_url=None, docs_url=None)
    app.state.service = services
    add_error_handlers(app)
    reads = APIRouter()
    for routes in (page, gain, goodput, jobs, logs):
        for route in routes.router.routes:
            # Runs have no pages: `/summaries` has all.
            if isinstance(route, APIRoute) and route.methods == {"GET"} and route.path != "/jobs":
                reads.routes.append(route)
    app.include_router(reads)
    return app
