"""FastAPI dependencies that parse request bodies as strict JSON.

FastAPI parses JSON before it validates types, so `NaN` would be a number and a list would be valid as a
tuple. Here pydantic parses the text itself. FastAPI then does not know the bodies, so they are added to the
OpenAPI document here and in `openapi`.
"""

from typing import Annotated, Any, Generic, NoReturn, TypeVar

from fastapi import Request
from pydantic import BaseModel, Field, TypeAdapter, ValidationError
from pydantic_core import from_json

from adascale_api.bodies.field_errors import field_errors
from adascale_api.bodies.requests import MAX_REPORTS, GainReportBody
from adascale_api.errors import FieldError, InvalidInputError, NotJsonError
from adascale_core.messages.reports import GainReport

M = TypeVar("M", bound=BaseModel)

MAX_ERRORS = 100
"""Invalid fields of which each is examined."""
MAX_FIELDS = 100
"""Fields of an object in a large body, before pydantic makes an error of each that is unknown."""
LARGE_BODY = 64 * 1024
"""Bytes of a body whose fields are counted first."""
REFERENCE = "#/components/schemas/{model}"
"""The reference to the schema of a body in the OpenAPI document."""


class JsonBody(Generic[M]):
    """A FastAPI dependency that parses the body as a model."""

    def __init__(self, model: type[M]) -> None:
        self.model = model

    async def __call__(self, request: Request) -> M:
        """Return the body."""
        return self.parse(await _read(request))

    def parse(self, text: bytes) -> M:
        """Return the body in a text; errors as for a call."""
        _check_size(text, "an object")
        try:
            return self.model.model_validate_json(text)
        except ValidationError as error:
            raise _invalid(error) from error

    @property
    def openapi(self) -> dict[str, Any]:
        """The members of the operation in the OpenAPI document that describe the body."""
        return _request_body(_reference(self.model))


class ReportsBody:
    """A FastAPI dependency that parses the body as a report or a list of reports."""

    _report = TypeAdapter(GainReportBody)
    # The length is checked while the list is read, and reading ends at the first invalid report.
    _reports = TypeAdapter(
        Annotated[list[GainReportBody], Field(min_length=1, max_length=MAX_REPORTS, fail_fast=True)]
    )

    async def __call__(self, request: Request) -> list[GainReport]:
        """Return the reports; errors as for `JsonBody`."""
        return self.parse(await _read(request))

    def parse(self, text: bytes) -> list[GainReport]:
        """Return the reports in a text; errors as for `JsonBody`."""
        _check_size(text, f"1 to {MAX_REPORTS} reports")
        try:
            if not text.lstrip(b" \t\r\n").startswith(b"["):
                return [self._report.validate_json(text)]
            return list(self._reports.validate_json(text))
        except ValidationError as error:
            raise _invalid(error) from error

    @property
    def openapi(self) -> dict[str, Any]:
        """The members of the operation in the OpenAPI document that describe the body."""
        report = _reference(GainReportBody)
        return _request_body(
            {"anyOf": [report, {"type": "array", "items": report, "minItems": 1, "maxItems": MAX_REPORTS}]}
        )


async def _read(request: Request) -> bytes:
    require_json(request.headers.get("content-type", ""))
    return await request.body()


def require_json(content_type: str) -> None:
    """Refuse another content type."""
    if content_type == "application/json":
        return
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type != "application/json" and not (
        media_type.startswith("application/") and media_type.endswith("+json")
    ):
        # This also refuses the requests that a web page can send to another origin without a preflight.
        raise NotJsonError(
            f"content-type: got {media_type or 'nothing'}, expected application/json; nothing was stored"
        )


def _check_size(text: bytes, expected: str) -> None:
    """Refuse a list of too many elements, and objects of too many fields.

    An error of pydantic takes more than a kilobyte, and a body may have a field per seven bytes.
    """
    if len(text) <= LARGE_BODY:
        return
    try:
        value = from_json(text)
    except ValueError:
        return  # reported with its position when the body is validated
    if isinstance(value, list) and len(value) > MAX_REPORTS:
        _refuse(f"a list of {len(value)}", expected)
    objects = [
        member for member in (value if isinstance(value, list) else [value]) if isinstance(member, dict)
    ]
    metrics = [nested for member in objects for nested in member.values() if isinstance(nested, dict)]
    for each in (*objects, *metrics):
        if len(each) > MAX_FIELDS:
            _refuse(f"an object of {len(each)} fields", "the fields that /openapi.json lists")


def _refuse(got: str, expected: str) -> NoReturn:
    raise InvalidInputError([FieldError(field="body", got=got, expected=expected)])


def _invalid(error: ValidationError) -> InvalidInputError:
    # Each error is an object with a copy of its input, so an object of very many fields must not make them.
    if error.error_count() > MAX_ERRORS:
        got = f"{error.error_count()} invalid fields"
        return InvalidInputError(
            [FieldError(field="body", got=got, expected="the fields that /openapi.json lists")]
        )
    return InvalidInputError(field_errors(error.errors(include_url=False)))


def _reference(model: type[object]) -> dict[str, Any]:
    return {"$ref": REFERENCE.format(model=model.__name__)}


def _request_body(schema: dict[str, Any]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
