"""What the routes share: the service, the job in the path, the required role, redaction, and errors.

Who can reach the service may read gains and progress without a token. Logs, addresses and what else could
help an attacker need the token of the job, of the operator, or for reading. Every error is an `ErrorBody`.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from functools import cache
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import TypeAdapter
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from adascale_api.auth.authorization import Role
from adascale_api.bodies import NO_NUL
from adascale_api.errors import ErrorBody, ForbiddenError, InvalidInputError, RequestError, UnauthorizedError
from adascale_api.http.connections import CLOSED
from adascale_api.http.request_body import field_errors
from adascale_api.service.changes import Closed
from adascale_api.service.run_services import RunServices
from adascale_api.service.service import Service
from adascale_core.errors import AdaScaleError, InvalidJobError
from adascale_core.job_id import InvalidJobIdError, parse_job_id

_LABEL = "[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
JOB_ID_PATTERN = rf"^({_LABEL}\.)?{_LABEL}$"
"""The job ids that `parse_job_id` accepts, for the OpenAPI document."""

HIDDEN = frozenset(
    {
        *("address", "port", "master_addr", "master_port", "used_port"),
        *("instance", "instances", "node", "log", "secret", "key"),
    }
)
"""The members that show where replicas are and what their programs print. Their values become empty."""
METRICS = "metrics"
"""The member of a report with the program's own numbers, whose names are not hidden."""


async def _target(request: Request) -> AsyncIterator[tuple[Service, str | None]]:
    """The service that a request is for, and the job in its path; None if it is for all jobs."""
    shown, name = request.app.state.service, request.path_params.get("job")
    if isinstance(shown, RunServices) and name is not None:
        # Of a run, which has a database of its own.
        async with shown.open(name) as (job, service):
            yield service, job
    else:
        yield shown, None if name is None else parse_job_id(name)


Target = Annotated[tuple[Service, str | None], Depends(_target)]


async def _service(target: Target) -> Service:
    return target[0]


ServiceOf = Annotated[Service, Depends(_service)]


async def _closed(request: Request) -> Closed:
    closed: Closed = getattr(request.state, CLOSED, None)
    return closed


MAX_WAIT = 60.0
"""Seconds that a request may wait for a change."""
Wait = Annotated[
    float, Query(ge=0, le=MAX_WAIT, allow_inf_nan=False, description="Seconds to wait for a change.")
]
Limit = Annotated[int, Query(ge=1, le=1000, description="The maximum number of jobs.")]
After = Annotated[str, Query(max_length=127, pattern=NO_NUL, description="The `next` of the previous page.")]
ClosedOf = Annotated[Closed, Depends(_closed)]
"""Is done once the client of the request has left."""


async def _job_id(
    target: Target,
    job: Annotated[
        str,
        Path(
            description="`<namespace>.<name>`, or a name in the namespace `default`.",
            examples=["default.digits", "digits"],
            json_schema_extra={"pattern": JOB_ID_PATTERN, "maxLength": 127},
        ),
    ],
) -> str:
    return target[1] or job


JobId = Annotated[str, Depends(_job_id)]

_bearer = HTTPBearer(auto_error=False, description="The shared token, or the token of a service account.")


Documented = Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
"""Names the token in the OpenAPI document."""


async def _job_or_none(target: Target) -> str | None:
    return target[1]


JobOrNone = Annotated[str | None, Depends(_job_or_none)]


def _requires(role: Role, *, always: bool = True) -> list[Any]:
    """Return the dependency that refuses a request without a role for the job in the path, or for all jobs.

    Unless `always`, only if the service protects reads.
    """

    async def require(request: Request, target: Target, _documented: Documented) -> None:
        if always or target[0].settings.protect_reads:
            await authorize(request, target[0], role, target[1])

    return [Depends(require)]


READER = _requires(Role.READER, always=False)
LOG_READER = _requires(Role.READER)
WORKER = _requires(Role.WORKER)
CONTROLLER = _requires(Role.CONTROLLER)


async def may_read(
    request: Request, service: ServiceOf, job: JobOrNone, _documented: Documented = None
) -> bool:
    """Whether the answer may have logs and addresses: the request has the role reader for what it reads.

    Raises:
        RequestError: the token is not valid or can't be checked now; or the service protects reads, and the
            token is missing or for another job.
    """
    if service.authorizer is None:
        return True
    protects = service.settings.protect_reads
    if bearer_token(request) is None and not protects:
        return False
    try:
        await authorize(request, service, Role.READER, job)
    except ForbiddenError:
        if protects:
            raise
        return False
    return True


MayReadAll = Annotated[bool, Depends(may_read)]


async def may_know_jobs(request: Request, service: ServiceOf, _documented: Documented) -> bool:
    """Whether the answer may name other jobs: reads are open, or the token is for all jobs.

    Raises:
        RequestError: the service protects reads, and the token is missing or not valid.
    """
    with suppress(ForbiddenError):
        return not service.settings.protect_reads or await may_read(request, service, None)
    return False


MayKnowJobs = Annotated[bool, Depends(may_know_jobs)]


@cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def answer(view: Any, *, shows_all: bool) -> Response:
    """Return a view as the answer, without logs and addresses unless `shows_all`."""
    model = _adapter(type(view))  # type: ignore[arg-type]  # classes are hashable
    if shows_all:
        return Response(model.dump_json(view), media_type="application/json")
    return JSONResponse(redact(model.dump_python(view, mode="json")))


def bearer_token(request: Request) -> str | None:
    """Return the bearer token of a request; None if it has none."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token else None


async def authorize(request: Request, service: Service, role: Role, job_id: str | None) -> None:
    """Refuse a request whose token does not have the role for a job, or for all jobs.

    Raises:
        RequestError: the token is missing, or does not have the role, or can't be checked now.
    """
    if service.authorizer is None:
        return
    token = bearer_token(request)
    if token is None:
        raise UnauthorizedError("missing token: send the header `Authorization: Bearer TOKEN`")
    client = request.client.host if request.client is not None else ""
    await service.authorizer.authorize(token, role, job_id, client)


_DESCRIPTIONS = {
    401: "The token is missing or not valid.",
    403: "The token is valid, but not for this job or operation.",
    404: "The job does not exist, or has no report yet.",
    410: "The cursor has expired: read all jobs again.",
    413: "The body is too large.",
    415: "The content type of the body is not JSON.",
    422: "A parameter or a field of the body is not valid. Nothing was stored.",
    500: "The stored state of the job is damaged.",
    503: "The database is unavailable, or the token can't be checked now. Nothing was stored; try again.",
}
DELETED: dict[int | str, dict[str, Any]] = {
    404: {"model": ErrorBody, "description": "The job was deleted at the same time."}
}
"""The additional response of calls that read the job after their write."""


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the descriptions of error responses, for a route's `responses`."""
    return {status: {"model": ErrorBody, "description": _DESCRIPTIONS[status]} for status in statuses}


OF_A_JOB = errors(401, 403, 422, 500, 503)
"""The error responses of every route of a job."""


def redact(value: Any) -> Any:
    """Return a JSON value without the values of hidden members."""
    match value:
        case dict():
            return {
                name: _empty(member) if name in HIDDEN else member if name == METRICS else redact(member)
                for name, member in value.items()
            }
        case list():
            return [redact(member) for member in value]
        case _:
            return value


def _empty(value: Any) -> Any:
    return None if value is None else type(value)()


def add_error_handlers(app: FastAPI) -> None:
    """Make `app` answer every error as an `ErrorBody`."""
    app.add_exception_handler(AdaScaleError, _handle_refusal)
    app.add_exception_handler(RequestValidationError, _handle_invalid_parameter)
    app.add_exception_handler(HTTPException, _handle_http_error)
    app.add_exception_handler(ClientDisconnect, _handle_refusal)
    app.add_exception_handler(Exception, failure_response)


def error_response(status: int, body: ErrorBody, headers: Mapping[str, str] | None = None) -> Response:
    """Return `body` as a response."""
    return Response(body.model_dump_json(), status, headers, media_type="application/json")


def response_to(error: Exception) -> Response:
    """Return the response to an error that is expected; raise it if it is not."""
    match error:
        case ClientDisconnect():
            return error_response(
                400,
                ErrorBody(error="the connection was closed before the end of the body; nothing was stored"),
            )
        case RequestError():
            body = ErrorBody(error=str(error), detail=list(error.field_errors))
            return error_response(error.status, body, error.headers)
        case InvalidJobError() | InvalidJobIdError():
            return error_response(422, ErrorBody(error=str(error)))
    raise error


def _handle_refusal(_request: Request, error: Exception) -> Response:
    return response_to(error)


def failure_response(*_of: object) -> Response:
    """Return the response to an error that is not expected, which is raised again after it."""
    return error_response(500, ErrorBody(error="the service failed at this request: its log says why"))


def _handle_invalid_parameter(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    # The first part of each location is the kind of the parameter: path or query.
    return _handle_refusal(request, InvalidInputError(field_errors(error.errors(), skip=1)))


def _handle_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message, headers = error.detail, error.headers
    if error.status_code == 404:
        hint = "see /openapi.json" if request.app.openapi_url else "`adascale list` lists the runs"
        message = f"no resource at {request.url.path[:200]}: {hint}"
    elif error.status_code == 405:
        # Starlette names the methods of one route only, but a path may have several routes.
        path = getattr(request.scope.get("route"), "path", "")
        methods = request.app.openapi()["paths"].get(path, {})
        allowed = ", ".join(sorted(method.upper() for method in methods)) or (headers or {}).get("Allow", "")
        message, headers = f"method {request.method} is not allowed here: use {allowed}", {"Allow": allowed}
    return error_response(error.status_code, ErrorBody(error=message), headers)
