"""The endpoints that workers call all the time, as an ASGI application of their own.

Reports, registrations and waits for changes are nearly all requests. FastAPI's routing, dependencies and
middleware would take more time for each than all the rest, and more memory while it waits, so this answers
them in front of it, by calling the same functions. FastAPI's routes document them.
"""

import re
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from adascale_api.auth.authorization import Role
from adascale_api.http.protocol import CLOSED
from adascale_api.http.request_body import limited_body, require_json
from adascale_api.routes import allocation, gain
from adascale_api.routes.common import authorize, bearer_token, may_read, response_to
from adascale_api.service.service import Service
from adascale_core.errors import AdaScaleError
from adascale_core.job_id import parse_job_id
from adascale_core.names import MAX_REPLICAS

_PATH = re.compile(r"/jobs/([^/]+)/(gain|replicas/([0-9]{1,4}))")
_CHANGE_PATH = re.compile(r"/jobs/([^/]+)/allocation")
_CHANGE_QUERY = re.compile(rb"version=([0-9]{1,15})&wait=([0-9]{1,2}(?:\.[0-9]{1,9})?)")
"""As agents write it; FastAPI's route answers all other queries."""
_JSON = (b"content-type", b"application/json")


class WorkerEndpoints:
    """Answers posted reports, registrations and waits for changes, and passes all other requests on."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        self._gain_route = _template(gain.router.routes, gain.post_gain)
        self._change_route = _template(allocation.router.routes, allocation.get_allocation)
        self._replica_route = _template(allocation.router.routes, allocation.put_replica)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] == "http" and scope["method"] == "GET":
            path = _CHANGE_PATH.fullmatch(scope["path"])
            query = _CHANGE_QUERY.fullmatch(scope["query_string"])
            if path is not None and query is not None and float(query[2]) <= allocation.MAX_WAIT:
                wait = partial(self._wait, path[1], int(query[1]), float(query[2]), scope)
                await self._respond(self._change_route, wait, scope, receive, send)
                return
        elif scope["type"] == "http" and scope["method"] in ("POST", "PUT"):
            path = _PATH.fullmatch(scope["path"])
            if path is not None:
                job, _, replica = path.groups()
                if replica is None and scope["method"] == "POST":
                    post = partial(self._store, job, None, scope)
                    await self._respond(self._gain_route, post, scope, receive, send)
                    return
                if replica is not None and scope["method"] == "PUT" and int(replica) < MAX_REPLICAS:
                    put = partial(self._store, job, int(replica), scope)
                    await self._respond(self._replica_route, put, scope, receive, send)
                    return
        await self._app(scope, receive, send)

    async def _respond(
        self,
        route: str,
        answer_to: Callable[[Receive], Awaitable[bytes]],
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        started = time.perf_counter()
        status = 500
        try:
            with limited_body(scope, receive, self._service.connections) as limited:
                try:
                    answer = await answer_to(limited)
                except (AdaScaleError, ClientDisconnect) as error:
                    response = response_to(error)
                    status = response.status_code
                    await response(scope, receive, send)
                    return
            status = 200
            headers = [_JSON, (b"content-length", b"%d" % len(answer))]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": answer})
        finally:
            self._service.metrics.observe(scope["method"], route, status, time.perf_counter() - started)

    async def _wait(self, job: str, version: int, seconds: float, scope: Scope, _receive: Receive) -> bytes:
        job_id = parse_job_id(job)
        token, client = _sender(scope)[1:]  # the headers are not kept while it waits
        shows_all = await may_read(self._service, token, job_id, client)
        closed = scope.get("state", {}).get(CLOSED)
        found = await self._service.wait_for_change(
            job_id, version, seconds, is_reader=shows_all, closed=closed
        )
        return allocation.allocation_json(found, shows_all=shows_all)

    async def _store(self, job: str, replica: int | None, scope: Scope, receive: Receive) -> bytes:
        job_id = parse_job_id(job)
        headers, token, client = _sender(scope)
        await authorize(self._service, Role.WORKER, token, job_id, client)
        require_json(headers.get(b"content-type", b"").decode("latin-1"))
        text = await _read(receive)
        if replica is None:
            return await gain.store_reports(self._service, job_id, gain.reports_body.parse(text))
        body = allocation.registration_body.parse(text)
        return await allocation.register(self._service, job_id, replica, body)


def _sender(scope: Scope) -> tuple[dict[bytes, bytes], str | None, str]:
    """Return the headers of a request, its token, and the address that sent it."""
    # The first of several headers counts, as in FastAPI's routes.
    headers = dict(reversed(scope["headers"]))
    token = bearer_token(headers.get(b"authorization", b"").decode("latin-1"))
    return headers, token, (scope.get("client") or ("",))[0]


def _template(routes: Any, endpoint: object) -> str:
    """Return the path of an endpoint's route, which labels its metrics."""
    (path,) = [route.path for route in routes if isinstance(route, APIRoute) and route.endpoint is endpoint]
    return str(path)


async def _read(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)
