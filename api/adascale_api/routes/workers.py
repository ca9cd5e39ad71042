"""What workers call: gain reports, registrations, and waits for changes. These are nearly all requests.

FastAPI's routing and dependencies would take more time for each than all the rest, and more memory while it
waits. So the application, which measures each request and limits its body, calls the functions of these
routes directly, and that of what each open page reads again and again. FastAPI answers all others, and
documents these too.
"""

import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends, FastAPI, Path, Query, Response
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive, Scope, Send

from adascale_api.auth.authorization import Role
from adascale_api.bodies import RegistrationBody
from adascale_api.data.store import reports
from adascale_api.errors import ErrorBody, FieldError, InvalidInputError
from adascale_api.http.connections import CLOSED
from adascale_api.http.request_body import limited_body, object_body, reports_body
from adascale_api.routes.common import (
    MAX_WAIT,
    OF_A_JOB,
    WORKER,
    ClosedOf,
    JobId,
    MayReadAll,
    ServiceOf,
    Wait,
    answer,
    authorize,
    errors,
    failure_response,
    may_read,
    response_to,
)
from adascale_api.routes.page import get_summaries
from adascale_api.service.service import Service
from adascale_core.errors import AdaScaleError
from adascale_core.job_id import parse_job_id
from adascale_core.messages.allocation import AllocationView, MemberView
from adascale_core.messages.registration import Heartbeat
from adascale_core.messages.reports import GainReport
from adascale_core.names import MAX_REPLICAS, MAX_STEPS
from adascale_core.views.gain import StoredReports

router = APIRouter(prefix="/jobs/{job}", tags=["workers"], responses=OF_A_JOB)
registration_body = object_body(RegistrationBody, lambda body: Heartbeat(**vars(body)))


@router.post(
    "/gain",
    summary="Post a report or a list of reports",
    dependencies=WORKER,
    response_model=StoredReports,
    responses=errors(413, 415),
    openapi_extra=reports_body.openapi,
)
async def post_gain(
    service: ServiceOf, job: JobId, body: Annotated[list[GainReport], Depends(reports_body)]
) -> Response:
    """Stores each report once per generation and step, so repeating a request has no effect. Stores all
    reports of a request, or none. Answers with the job's generations, and with the seconds until the next
    reports shall be posted, which grow with the number of jobs."""
    stored, repeated, stored_job = await service.database.write(
        reports.post, job_id=job, new=body, now=service.clock(), retention=service.settings.reports
    )
    service.metrics.count_reports(stored, repeated)
    # The text of the generations is kept, since all requests of a job have the same.
    text = b'{"stored":%d,"repeated":%d,"allocation":%b,"post_interval":%a}' % (
        stored,
        repeated,
        stored_job.view_json,
        service.heartbeats.post_interval,
    )
    return Response(text, media_type="application/json")


@router.get(
    "/allocation",
    summary="Read the job's generations, and optionally wait for a change",
    response_model=AllocationView,
    responses=errors(404),
)
async def get_allocation(
    service: ServiceOf,
    job: JobId,
    closed: ClosedOf,
    shows_all: MayReadAll,
    version: Annotated[
        int | None, Query(ge=0, le=MAX_STEPS, description="The last version that the caller has read.")
    ] = None,
    wait: Wait = 0.0,
) -> Response:
    """Answers at once if the job's version is not `version`; otherwise when it changes, or after `wait`
    seconds. Addresses are empty without a token that may read the job."""
    if version is None:
        found = await service.find_job(job)
    else:
        found = await service.wait_for_change(job, version, wait, is_reader=shows_all, closed=closed)
    if shows_all:
        return Response(found.view_json, media_type="application/json")
    return answer(found.view, shows_all=False)


@router.put(
    "/replicas/{replica}",
    summary="Register the state of a replica",
    dependencies=WORKER,
    response_model=MemberView,
    responses={
        **errors(413, 415),
        409: {
            "model": ErrorBody,
            "description": "Members with state have another version of the package. Those that are gone are "
            "removed within the seconds of `Retry-After`.",
        },
    },
    openapi_extra=registration_body.openapi,
)
async def put_replica(
    service: ServiceOf,
    job: JobId,
    replica: Annotated[int, Path(ge=0, lt=MAX_REPLICAS, description="Index of the replica, from 0.")],
    heartbeat: Annotated[Heartbeat, Depends(registration_body)],
) -> Response:
    """Agents repeat it as a heartbeat, at the interval in the answer, which grows with the number of
    replicas. A replica whose heartbeat has expired is absent. Answers with the job's generations, and with
    the secret of its members."""
    if heartbeat.replica != replica:
        got, expected = str(heartbeat.replica), f"{replica}, the index in the path"
        raise InvalidInputError([FieldError(field="replica", got=got, expected=expected)])
    stored = await service.register(job, heartbeat)
    view = stored.rendezvous.member_view(stored.version, heartbeat.instance)
    return answer(replace(view, heartbeat_interval=service.heartbeats.interval), shows_all=True)


# -- without FastAPI's routing -----------------------------------------------------------------------------

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
        """Return the path of the route that a request has, and the endpoint of one that is called often."""
        if scope["method"] == "GET" and scope["path"] == "/summaries":
            return "/summaries", self._get_summaries
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
                if seconds <= MAX_WAIT:
                    return "/jobs/{job}/allocation", partial(self._wait_for_change, job, version, seconds)
        return "none", None

    async def _get_summaries(self, request: Request) -> Response:
        if self._service.settings.protect_reads:
            await authorize(request, self._service, Role.READER, None)
        return await get_summaries(self._service, request)

    async def _post_gain(self, job: str, request: Request) -> Response:
        job_id = await self._authorize_worker(job, request)
        return await post_gain(self._service, job_id, await reports_body(request))

    async def _put_replica(self, job: str, replica: int, request: Request) -> Response:
        job_id = await self._authorize_worker(job, request)
        body = await registration_body(request)
        return await put_replica(self._service, job_id, replica, body)

    async def _authorize_worker(self, job: str, request: Request) -> str:
        job_id = parse_job_id(job)
        await authorize(request, self._service, Role.WORKER, job_id)
        return job_id

    async def _wait_for_change(self, job: str, version: int, seconds: float, request: Request) -> Response:
        job_id = parse_job_id(job)
        shows_all = await may_read(request, self._service, job_id)
        closed = request.scope.get("state", {}).get(CLOSED)
        return await get_allocation(self._service, job_id, closed, shows_all, version, seconds)


async def _answer(endpoint: Endpoint, request: Request, send: Send) -> None:
    try:
        response = await endpoint(request)
    except (AdaScaleError, ClientDisconnect) as error:
        response = response_to(error)
    except Exception:
        await failure_response()(request.scope, request.receive, send)
        raise  # the server logs it
    await response(request.scope, request.receive, send)
