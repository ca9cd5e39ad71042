"""FastAPI dependencies that parse request bodies as strict JSON.

FastAPI parses JSON before it validates types, so `NaN` would be a number and a list would be valid as a
tuple. Here pydantic parses the text itself. FastAPI then does not know the bodies, so they are added to the
OpenAPI document here and in `openapi`.
"""

from typing import Any, Generic, TypeVar

from fastapi import Request
from pydantic import BaseModel, TypeAdapter, ValidationError

from adascale_api.errors import FieldError, InvalidInputError, NotJsonError
from adascale_api.field_errors import field_errors
from adascale_api.request_models import MAX_REPORTS, GainReportBody

M = TypeVar("M", bound=BaseModel)

REFERENCE = "#/components/schemas/{model}"
"""The reference to the schema of a body in the OpenAPI document."""


class JsonBody(Generic[M]):
    """A FastAPI dependency that parses the body as a model."""

    def __init__(self, model: type[M]) -> None:
        self.model = model

    async def __call__(self, request: Request) -> M:
        """Return the body.

        Raises:
            NotJsonError, BodyTooLargeError, InvalidInputError: the body is not valid.
        """
        text = await _read(request)
        try:
            return self.model.model_validate_json(text)
        except ValidationError as error:
            raise InvalidInputError(field_errors(error.errors(include_url=False))) from error

    @property
    def openapi(self) -> dict[str, Any]:
        """The members of the operation in the OpenAPI document that describe the body."""
        return _request_body(_reference(self.model))


class ReportsBody:
    """A FastAPI dependency that parses the body as a report or a list of reports."""

    _reports = TypeAdapter(list[GainReportBody])

    async def __call__(self, request: Request) -> list[GainReportBody]:
        """Return the reports; errors as for `JsonBody`."""
        text = await _read(request)
        try:
            if not text.lstrip(b" \t\r\n").startswith(b"["):
                return [GainReportBody.model_validate_json(text)]
            reports = self._reports.validate_json(text)
        except ValidationError as error:
            raise InvalidInputError(field_errors(error.errors(include_url=False))) from error
        if not 1 <= len(reports) <= MAX_REPORTS:
            raise InvalidInputError(
                [
                    FieldError(
                        field="body",
                        got=f"a list of {len(reports)}",
                        expected=f"1 to {MAX_REPORTS} reports",
                    )
                ]
            )
        return reports

    @property
    def openapi(self) -> dict[str, Any]:
        """The members of the operation in the OpenAPI document that describe the body."""
        report = _reference(GainReportBody)
        return _request_body(
            {"anyOf": [report, {"type": "array", "items": report, "minItems": 1, "maxItems": MAX_REPORTS}]}
        )


async def _read(request: Request) -> bytes:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not (
        media_type.startswith("application/") and media_type.endswith("+json")
    ):
        # This also refuses the requests that a web page can send to another origin without a preflight.
        raise NotJsonError(
            f"content-type: got {media_type or 'nothing'}, expected application/json; nothing was stored"
        )
    return await request.body()


def _reference(model: type[BaseModel]) -> dict[str, Any]:
    return {"$ref": REFERENCE.format(model=model.__name__)}


def _request_body(schema: dict[str, Any]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
