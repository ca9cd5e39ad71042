"""The ASGI application."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI
from starlette.types import ASGIApp

from adascale_api.auth.authorization import Authorizer
from adascale_api.data.database import Database
from adascale_api.http.body_limit import BodyLimit
from adascale_api.http.connection_limits import ConnectionLimits
from adascale_api.http.openapi import DescribedApp
from adascale_api.routes import allocation, changes, decision, gain, jobs, logs, page, probes, runs
from adascale_api.routes.error_handlers import add_error_handlers
from adascale_api.routes.runs import RunPaths
from adascale_api.service.prometheus import RequestMetrics
from adascale_api.service.run_services import RunServices
from adascale_api.service.service import Service, Settings

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
    app.add_middleware(BodyLimit, connections=service.connections)
    app.add_middleware(RequestMetrics, metrics=service.metrics)
    add_error_handlers(app)
    for routes in (gain, allocation, decision, jobs, logs, changes, page, probes):
        app.include_router(routes.router)
    app.include_router(page.files_router)
    return app


def create_runs_app(services: RunServices) -> ASGIApp:
    """Return the application that shows the runs of state folders, and changes nothing."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        async with services.running():
            yield

    app = FastAPI(
        title="AdaScale runs", lifespan=lifespan, redirect_slashes=False, openapi_url=None, docs_url=None
    )
    app.state.runs = services
    add_error_handlers(app)
    for router in (runs.router, page.files_router, gain.router, decision.router, jobs.router, logs.router):
        app.include_router(router)
    return RunPaths(app, services)
