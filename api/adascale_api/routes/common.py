"""What the calls share: the service, the job in the path, who may call, and the errors they may answer."""

from typing import Annotated, Any

from fastapi import Depends, Path, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from adascale_api.auth import Right
from adascale_api.errors import ErrorBody, UnauthorizedError
from adascale_api.service import Service
from adascale_core.job_id import parse_job_id

_LABEL = "[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
JOB_ID_PATTERN = rf"^({_LABEL}\.)?{_LABEL}$"
"""Tells in the OpenAPI text what `parse_job_id` accepts."""


async def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


ServiceOf = Annotated[Service, Depends(_service)]


async def _job_id(
    job: Annotated[
        str,
        Path(
            description="`<namespace>.<name>`, or a bare name in the namespace `default`.",
            examples=["default.digits", "digits"],
            json_schema_extra={"pattern": JOB_ID_PATTERN, "maxLength": 127},
        ),
    ],
) -> str:
    return parse_job_id(job)


JobId = Annotated[str, Depends(_job_id)]

_bearer = HTTPBearer(auto_error=False, description="The token of the run, or of the service account.")
Credentials = Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]


async def may_work(request: Request, service: ServiceOf, credentials: Credentials) -> None:
    """Let only those on who may tell what workers of the job in the path do."""
    await _require(Right.WORK, request, service, credentials)


async def may_control(request: Request, service: ServiceOf, credentials: Credentials) -> None:
    """Let only those on who may decide on the job in the path."""
    await _require(Right.CONTROL, request, service, credentials)


async def may_read(request: Request, service: ServiceOf, credentials: Credentials) -> None:
    """Let only those on who may read; that is everyone, unless the service was told otherwise."""
    if service.protect_reads:
        await _require(Right.READ, request, service, credentials)


async def _require(
    right: Right, request: Request, service: Service, credentials: HTTPAuthorizationCredentials | None
) -> None:
    if service.authenticator is None:
        return
    if credentials is None:
        raise UnauthorizedError("a token is needed: send the header `Authorization: Bearer TOKEN`")
    job = request.path_params.get("job")
    await service.authenticator.require(credentials.credentials, right, parse_job_id(job) if job else None)


READ = [Depends(may_read)]
WORK = [Depends(may_work)]
CONTROL = [Depends(may_control)]

_MEANING = {
    401: "No token, or one that is not accepted.",
    403: "A token that is good, but not for this.",
    404: "The job is unknown, or has no report yet.",
    413: "The body is too large.",
    415: "The body is not JSON by its content type.",
    422: "A parameter or a field of the body is not what it must be. Nothing was stored.",
    503: "The database can't do it now, or nobody can say whether the token is good. Nothing was stored; "
    "try again.",
}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The descriptions of error answers, for a route's `responses`."""
    return {status: {"model": ErrorBody, "description": _MEANING[status]} for status in statuses}
