"""The endpoint that stores gain reports, as an ASGI application of its own.

Reports are most of the requests. FastAPI's routing, dependencies and middleware would take more time for
each than all the rest, so this answers them in front of it. FastAPI's route of the same path documents it,
and calls the same functions.
"""

import re
import time

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from adascale_api.authorization import Role
from adascale_api.body_limit import BodyBudget
from adascale_api.error_handlers import response_to
from adascale_api.request_body import ReportsBody, require_json
from adascale_api.routes.common import authorize, bearer_token
from adascale_api.routes.gain import store_reports
from adascale_api.service import Service
from adascale_core.errors import AdaScaleError
from adascale_core.job_id import parse_job_id

ROUTE = "/jobs/{job}/gain"
_PATH = re.compile(r"/jobs/([^/]+)/gain")
_HEADERS = (b"content-type", b"application/json")


class ReportEndpoint:
    """Answers `POST /jobs/{job}/gain`, and passes all other requests on.

    Args:
        app: the application for the other requests.
        service: the service.
        budget: the bytes of all bodies, shared with `app`.
    """

    def __init__(self, app: ASGIApp, service: Service, budget: BodyBudget) -> None:
        self._app = app
        self._service = service
        self._budget = budget
        self._body = ReportsBody()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] == "http" and scope["method"] == "POST":
            path = _PATH.fullmatch(scope["path"])
            if path is not None:
                await self._respond(path[1], scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _respond(self, job: str, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.perf_counter()
        status = 500
        try:
            with self._budget.request(scope) as body:
                try:
                    client = (scope.get("client") or ("",))[0]
                    answer = await self._store(job, dict(scope["headers"]), client, body.limited(receive))
                except (AdaScaleError, ClientDisconnect) as error:
                    response = response_to(error)
                    status = response.status_code
                    await response(scope, receive, send)
                    return
            status = 200
            headers = [_HEADERS, (b"content-length", b"%d" % len(answer))]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": answer})
        finally:
            self._service.metrics.observe("POST", ROUTE, status, time.perf_counter() - started)

    async def _store(self, job: str, headers: dict[bytes, bytes], client: str, receive: Receive) -> bytes:
        job_id = parse_job_id(job)
        token = bearer_token(headers.get(b"authorization", b"").decode("latin-1"))
        await authorize(self._service, Role.WORKER, token, job_id, client)
        require_json(headers.get(b"content-type", b"").decode("latin-1"))
        posted = await store_reports(self._service, job_id, self._body.parse(await _read(receive)))
        return b'{"stored":%d,"repeated":%d,"allocation":%b}' % (
            posted.stored,
            posted.repeated,
            posted.job.view_json,
        )


async def _read(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)
