"""Answers every error in the form of `ErrorBody`."""

from collections.abc import Mapping

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from adascale_api.bodies.field_errors import field_errors
from adascale_api.data.job import UnreadableJobError
from adascale_api.data.store.jobs import JobNotFoundError
from adascale_api.errors import ErrorBody, InvalidInputError, RequestError
from adascale_core.errors import AdaScaleError, InvalidJobError
from adascale_core.job_id import InvalidJobIdError


def add_error_handlers(app: FastAPI) -> None:
    """Make `app` answer every error as an `ErrorBody`."""
    app.add_exception_handler(AdaScaleError, _handle_refusal)
    app.add_exception_handler(RequestValidationError, _handle_invalid_parameter)
    app.add_exception_handler(HTTPException, _handle_http_error)
    app.add_exception_handler(ClientDisconnect, _handle_refusal)


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
        case InvalidInputError():
            return error_response(error.status, ErrorBody(error=str(error), detail=error.field_errors))
        case RequestError():
            return error_response(error.status, ErrorBody(error=str(error)), error.headers)
        case JobNotFoundError():
            return error_response(404, ErrorBody(error=str(error)))
        case UnreadableJobError():
            return error_response(500, ErrorBody(error=str(error)))
        case InvalidJobError() | InvalidJobIdError():
            return error_response(422, ErrorBody(error=str(error)))
    raise error


def _handle_refusal(_request: Request, error: Exception) -> Response:
    return response_to(error)


def _handle_invalid_parameter(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    # The first part of each location is the kind of the parameter: path or query.
    return _handle_refusal(request, InvalidInputError(field_errors(error.errors(), skip=1)))


def _handle_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message, headers = error.detail, error.headers
    if error.status_code == 404:
        message = f"no resource at {request.url.path[:200]}: see /openapi.json"
    elif error.status_code == 405:
        # Starlette names the methods of one route only, but a path may have several routes.
        path = getattr(request.scope.get("route"), "path", "")
        methods = request.app.openapi()["paths"].get(path, {})
        allowed = ", ".join(sorted(method.upper() for method in methods)) or (headers or {}).get("Allow", "")
        message, headers = f"method {request.method} is not allowed here: use {allowed}", {"Allow": allowed}
    return error_response(error.status_code, ErrorBody(error=message), headers)
