"""The metrics service as an ASGI application: it measures each request, limits its body, and finds its route.

Reports, registrations and waits for changes are nearly all requests. FastAPI's routing and dependencies would
take more time for each than all the rest, and more memory while it waits, so these call the functions of
their routes directly. FastAPI answers all others, and documents these too.
"""

import re
import time
from collections.abc import Awaitable, Callable
from functools import partial

from fastapi import FastAPI
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from adascale_api.auth.authorization import Role
from adascale_api.http.connections import CLOSED
from adascale_api.http.request_body import limited_body, reports_body
from adascale_api.routes import allocation, gain
from adascale_api.routes.common import authorize, failure_response, may_read, response_to
from adascale_api.service.service import Service
from adascale_core.errors import AdaScaleError
from adascale_core.job_id import parse_job_id
from adascale_core.names import MAX_REPLICAS

_PATH = re.compile(r"/jobs/([^/]+)/(gain|allocation|replicas/([0-9]{1,4}))")
_QUERY = re.compile(rb"version=([0-9]{1,15})&wait=([0-9]{1,2}(?:\.[0-9]{1,9})?)")
"""As agents write it; FastAPI's route answers all other queries."""

Endpoint = Callable[[Request], Awaitable[Response]]


class MetricsService:
    """The application that serves a metrics service."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        self._service: Service = app.state.service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 500

        async def send_and_note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        started = time.perf_counter()
        route, endpoint = self._find(scope)
        try:
            if endpoint is None:
                await self._app(scope, limited_body(scope, receive), send_and_note_status)
                # Labelled with the route's template: labels with full paths would be a series for each.
                route = getattr(scope.get("route"), "path", "none")
            else:
                await _answer(endpoint, Request(scope, limited_body(scope, receive)), send_and_note_status)
        finally:
            self._service.metrics.observe(scope["method"], route, status, time.perf_counter() - started)

    def _find(self, scope: Scope) -> tuple[str, Endpoint | None]:
        """Return the path of the route that a request has, and the endpoint of one that workers call."""
        path = _PATH.fullmatch(scope["path"])
        if path is not None:
            job, name, replica = path.groups()
            if scope["method"] == "POST" and name == "gain":
                return "/jobs/{job}/gain", partial(self._post_gain, job)
            if scope["method"] == "PUT" and replica is not None and int(replica) < MAX_REPLICAS:
                return "/jobs/{job}/replicas/{replica}", partial(self._put_replica, job, int(replica))
            query = _QUERY.fullmatch(scope["query_string"])
            if scope["method"] == "GET" and name == "allocation" and query is not None:
                version, seconds = int(query[1]), float(query[2])
                if seconds <= allocation.MAX_WAIT:
                    return "/jobs/{job}/allocation", partial(self._wait_for_change, job, version, seconds)
        return "none", None

    async def _post_gain(self, job: str, request: Request) -> Response:
        job_id = await self._authorize_worker(job, request)
        return await gain.post_gain(self._service, job_id, await reports_body(request))

    async def _put_replica(self, job: str, replica: int, request: Request) -> Response:
        job_id = await self._authorize_worker(job, request)
        body = await allocation.registration_body(request)
        return await allocation.put_replica(self._service, job_id, replica, body)

    async def _authorize_worker(self, job: str, request: Request) -> str:
        job_id = parse_job_id(job)
        await authorize(request, self._service, Role.WORKER, job_id)
        return job_id

    async def _wait_for_change(self, job: str, version: int, seconds: float, request: Request) -> Response:
        job_id = parse_job_id(job)
        shows_all = await may_read(request, self._service, job_id)
        closed = request.scope.get("state", {}).get(CLOSED)
        return await allocation.get_allocation(self._service, job_id, closed, shows_all, version, seconds)


async def _answer(endpoint: Endpoint, request: Request, send: Send) -> None:
    try:
        response = await endpoint(request)
    except (AdaScaleError, ClientDisconnect) as error:
        response = response_to(error)
    except Exception:
        await failure_response()(request.scope, request.receive, send)
        raise  # the server logs it
    await response(request.scope, request.receive, send)
