"""What the service answers when it can't do as asked, in one form: `ErrorBody`."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from adascale_api.store import UnknownJobError
from adascale_core.errors import AdaScaleError, InvalidJobError
from adascale_core.job_id import InvalidJobIdError
from adascale_core.messages import AllocationView

MAX_EXCERPT = 80
"""Characters of a refused value that are told back."""
MAX_PROBLEMS = 20
"""Refused fields that are told at once."""


class Problem(BaseModel):
    """One field that was refused."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"field": "gain", "got": "NaN", "allowed": "a finite number"}]}
    )

    field: str = Field(description="Where: the field's name, after its position in a list.")
    got: str = Field(description="What was sent there.")
    allowed: str = Field(description="What may be sent there.")

    def __str__(self) -> str:
        return f"{self.field}: got {self.got}, allowed is {self.allowed}"


class ErrorBody(BaseModel):
    """Why a request was refused. Nothing of a refused request is stored."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "error": "gain: got NaN, allowed is a finite number; nothing was stored",
                    "detail": [{"field": "gain", "got": "NaN", "allowed": "a finite number"}],
                }
            ]
        }
    )

    error: str = Field(description="The reason in words.")
    detail: list[Problem] = Field(default=[], description="The fields that were refused, if it was them.")


class ConflictBody(ErrorBody):
    """Why an allocation was refused, and what is desired instead."""

    allocation: AllocationView


class RequestError(AdaScaleError):
    """A request that can't be answered as asked."""

    status: ClassVar[int] = 400
    headers: ClassVar[Mapping[str, str]] = {}


class InvalidInputError(RequestError):
    """Fields that are not what they must be."""

    status = 422

    def __init__(self, problems: Sequence[Problem]) -> None:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        super().__init__(f"{problems[0]}{more}; nothing was stored")
        self.problems = list(problems[:MAX_PROBLEMS])

    @classmethod
    def from_pydantic(cls, found: Sequence[Mapping[str, Any]], *, prefix: int = 0) -> "InvalidInputError":
        """The error for what pydantic found; `prefix` leading parts of each place are left out."""
        return cls([_problem(one, prefix) for one in found])


class NotJsonError(RequestError):
    """A body of another content type than JSON."""

    status = 415


class BodyTooLargeError(RequestError):
    """A body beyond the limit."""

    status = 413


class UnauthorizedError(RequestError):
    """No token, or one that is not accepted."""

    status = 401
    headers: ClassVar[Mapping[str, str]] = {"WWW-Authenticate": "Bearer"}


class ForbiddenError(RequestError):
    """A token that is good, and not for this."""

    status = 403


class UnavailableError(RequestError):
    """Something that the answer needs is away for now."""

    status = 503
    RETRY_AFTER: ClassVar[int] = 5
    """Seconds after which to try again."""
    headers: ClassVar[Mapping[str, str]] = {"Retry-After": str(RETRY_AFTER)}


def add_error_handlers(app: FastAPI) -> None:
    """Make `app` answer every error as an `ErrorBody`."""
    app.add_exception_handler(AdaScaleError, _answer_refusal)
    app.add_exception_handler(RequestValidationError, _answer_invalid_parameter)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(SQLAlchemyError, _answer_database_error)
    app.add_exception_handler(ClientDisconnect, _answer_nobody)


def error_response(status: int, body: ErrorBody, headers: Mapping[str, str] | None = None) -> Response:
    """`body` as a response."""
    return Response(body.model_dump_json(), status, headers, media_type="application/json")


def _answer_refusal(_request: Request, error: Exception) -> Response:
    match error:
        case InvalidInputError():
            return error_response(error.status, ErrorBody(error=str(error), detail=error.problems))
        case RequestError():
            return error_response(error.status, ErrorBody(error=str(error)), error.headers)
        case UnknownJobError():
            return error_response(404, ErrorBody(error=str(error)))
        case InvalidJobError() | InvalidJobIdError():
            return error_response(422, ErrorBody(error=str(error)))
    raise error


def _answer_invalid_parameter(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    refused = InvalidInputError.from_pydantic(error.errors(), prefix=1)
    return _answer_refusal(_request, refused)


def _answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message, headers = error.detail, error.headers
    if error.status_code == 404:
        message = f"there is nothing at {request.url.path[:200]}: /docs tells what there is"
    elif error.status_code == 405:
        # A route knows its own method only; a path may have several routes.
        path = getattr(request.scope.get("route"), "path", "")
        methods = request.app.openapi()["paths"].get(path, {})
        allowed = ", ".join(sorted(method.upper() for method in methods)) or (headers or {}).get("Allow", "")
        message, headers = f"{request.method} is not possible here: {allowed} is", {"Allow": allowed}
    return error_response(error.status_code, ErrorBody(error=message), headers)


def _answer_database_error(_request: Request, error: Exception) -> Response:
    reason = getattr(error, "orig", None) or error
    return error_response(503, ErrorBody(error=f"the database can't do it now: {reason}; try again"))


def _answer_nobody(_request: Request, _error: Exception) -> Response:
    return error_response(400, ErrorBody(error="the connection ended before the body; nothing was stored"))


def _problem(found: Mapping[str, Any], prefix: int) -> Problem:
    kind, message = found["type"], found["msg"]
    field = ".".join(str(part) for part in found["loc"][prefix:]) or "body"
    match kind:
        case "json_invalid":
            return Problem(
                field=field, got=_excerpt(found["input"]), allowed=f"JSON ({found['ctx']['error']})"
            )
        case "missing":
            return Problem(field=field, got="nothing", allowed="a value: it is required")
        case "extra_forbidden":
            return Problem(field=field, got=_excerpt(found["input"]), allowed="no field of this name")
    return Problem(
        field=field, got=_excerpt(found["input"]), allowed=message.removeprefix("Input should be ")
    )


def _excerpt(value: object) -> str:
    match value:
        case bytes():
            text = value[: MAX_EXCERPT * 4].decode(errors="replace")
        case dict():
            return "an object"
        case list() if len(value) > 3:
            return f"a list of {len(value)}"
        case _:
            text = json.dumps(value, default=repr)
    if len(text) > MAX_EXCERPT:
        text = f"{text[:MAX_EXCERPT]}..."
    return text or "nothing"
