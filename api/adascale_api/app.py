"""The application, wired."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI

from adascale_api.auth import Authenticator
from adascale_api.database import Database
from adascale_api.errors import add_error_handlers
from adascale_api.limits import BodyLimit
from adascale_api.openapi import DescribedApp
from adascale_api.prometheus import RequestMetrics
from adascale_api.routes import allocation, gain, jobs, probes
from adascale_api.service import Service

_DESCRIPTION = """
Where workers post the gain of their batch size, and meet the controller.

Writing needs a token, `Authorization: Bearer TOKEN`: the one that the service was started with or, in a
cluster, that of a service account, good for one job or for the operator. Errors all have one form,
`ErrorBody`; nothing of a request that is refused is stored. What was answered with 2xx survives a crash of
the service.
"""


def create_app(
    database: Database,
    authenticator: Authenticator | None,
    *,
    protect_reads: bool = False,
    clock: Callable[[], float] = time.time,
) -> FastAPI:
    """The metrics service as an ASGI application.

    Args:
        database: where everything is kept; closed when the application shuts down.
        authenticator: says which tokens are good; none: everyone may do everything.
        protect_reads: whether reading needs a token too.
        clock: the time, in seconds since 1970.
    """
    service = Service(database, authenticator, protect_reads=protect_reads, clock=clock)

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
    )
    app.protect_reads = protect_reads
    app.state.service = service
    app.add_middleware(BodyLimit)
    app.add_middleware(RequestMetrics, metrics=service.metrics)
    add_error_handlers(app)
    for routes in (gain, allocation, jobs, probes):
        app.include_router(routes.router)
    return app
