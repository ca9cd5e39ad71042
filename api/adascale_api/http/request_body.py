"""The bodies of requests: the limit of their size, and parsing as strict JSON.

FastAPI parses JSON before it validates types, so `NaN` would be a number and a list would be valid as a
tuple. Here pydantic parses the text itself. FastAPI then does not know the bodies, so they are added to the
OpenAPI document here and in `app`.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from fastapi import Request
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import from_json
from starlette.types import Message, Receive, Scope

from adascale_api.bodies import MAX_REPORTS, GainReportBody, GainReports
from adascale_api.errors import BodyTooLargeError, FieldError, InvalidInputError, NotJsonError
from adascale_core.messages.reports import GainReport

MAX_BODY = 1024 * 1024
"""Bytes of a request body."""
MAX_ERRORS = 100
"""Invalid fields of which each is examined."""
MAX_FIELDS = 100
"""Fields of an object in a large body, counted before pydantic makes an error of each unknown one."""
LARGE_BODY = 64 * 1024
"""Bytes of a body from which `MAX_FIELDS` holds."""
REFERENCE = "#/components/schemas/{model}"
"""The reference to the schema of a body in the OpenAPI document."""
MAX_EXCERPT = 80
"""Characters of an invalid value in an answer."""

M = TypeVar("M")


def limited_body(scope: Scope, receive: Receive) -> Receive:
    """Return a `receive` that raises `BodyTooLargeError` for more than `MAX_BODY` bytes, announced or not."""
    size = 0

    async def receive_within_limit() -> Message:
        nonlocal size
        if size == 0:
            # The server has checked that it is a number, of which Python converts 4300 digits at most.
            announced = dict(scope["headers"]).get(b"content-length", b"").lstrip(b"0") or b"0"
            if int(announced) > MAX_BODY:
                _refuse_size(f"{int(announced)} bytes")
        message = await receive()
        size += len(message.get("body", b""))
        if size > MAX_BODY:
            _refuse_size(f"more than {MAX_BODY} bytes")
        return message

    return receive_within_limit


def _refuse_size(got: str) -> None:
    raise BodyTooLargeError(
        f"body: got {got}, expected at most {MAX_BODY}; nothing was stored: send fewer reports at a time"
    )


class JsonBody(Generic[M]):
    """A FastAPI dependency that parses the body.

    `parse` makes the message from the text, and `schema` describes it in the OpenAPI document.
    """

    def __init__(self, schema: Mapping[str, Any], parse: Callable[[bytes], M]) -> None:
        self.openapi = {
            "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}
        }
        """The members of the operation in the OpenAPI document that describe the body."""
        self._parse = parse

    async def __call__(self, request: Request) -> M:
        """Return the body."""
        return self.parse(await _read(request))

    def parse(self, text: bytes) -> M:
        """Return the message in a text."""
        _check_fields(text)
        try:
            return self._parse(text)
        except ValidationError as error:
            raise _invalid(error) from error


def object_body(model: type[BaseModel], make: Callable[[Any], M]) -> JsonBody[M]:
    """Return the body of a model, from which `make` makes a message."""
    reference = REFERENCE.format(model=model.__name__)
    return JsonBody({"$ref": reference}, lambda text: make(model.model_validate_json(text)))


_reports: TypeAdapter[Any] = TypeAdapter(GainReports)


def _parse_reports(text: bytes) -> list[GainReport]:
    is_list = text.lstrip(b" \t\r\n").startswith(b"[")
    found = _reports.validate_json(text) if is_list else [GainReportBody.model_validate_json(text)]
    # The constructor of a frozen dataclass would take as long as the validation.
    reports = [object.__new__(GainReport) for _ in found]
    for report, each in zip(reports, found, strict=True):
        vars(report).update(vars(each))
    return reports


async def _read(request: Request) -> bytes:
    """Return the body, unless its content type is another one than JSON."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if re.fullmatch(r"application/(.*\+)?json", media_type) is None:
        # This also refuses the requests that a web page can send to another origin without a preflight.
        raise NotJsonError(
            f"content-type: got {media_type or 'nothing'}, expected application/json; nothing was stored"
        )
    return await request.body()


def _check_fields(text: bytes) -> None:
    """Refuse objects of too many fields: an error of pydantic for each would take more than a kilobyte."""
    if len(text) <= LARGE_BODY:
        return
    try:
        value = from_json(text)
    except ValueError:
        return  # reported with its position when the body is validated
    members = value if isinstance(value, list) else [value]
    objects = [member for member in members if isinstance(member, dict)]
    metrics = [nested for member in objects for nested in member.values() if isinstance(nested, dict)]
    for each in (*objects, *metrics):
        if len(each) > MAX_FIELDS:
            raise _too_many(f"an object of {len(each)} fields")


def _too_many(got: str) -> InvalidInputError:
    expected = "the fields that /openapi.json lists"
    return InvalidInputError([FieldError(field="body", got=got, expected=expected)])


def _invalid(error: ValidationError) -> InvalidInputError:
    # Each error is an object with a copy of its input, so an object of very many fields must not make them.
    if error.error_count() > MAX_ERRORS:
        return _too_many(f"{error.error_count()} invalid fields")
    return InvalidInputError(field_errors(error.errors(include_url=False)))


_either: TypeAdapter[Any] = TypeAdapter(GainReportBody | GainReports)
reports_body = JsonBody({"anyOf": _either.json_schema(ref_template=REFERENCE)["anyOf"]}, _parse_reports)
"""A report, or a list of reports."""


def field_errors(errors: Sequence[Mapping[str, Any]], *, skip: int = 0) -> list[FieldError]:
    """Return the field errors for pydantic's errors, leaving out the first `skip` parts of each location."""
    return [_field_error(error, skip) for error in errors]


def _field_error(error: Mapping[str, Any], skip: int) -> FieldError:
    field = ".".join(str(part) for part in error["loc"][skip:]) or "body"
    match error["type"]:
        case "json_invalid":
            got, expected = _excerpt(error["input"]), f"JSON ({error['ctx']['error']})"
        case "missing":
            got, expected = "nothing", "a value: the field is required"
        case "extra_forbidden" | "unexpected_keyword_argument":  # of a model, of a dataclass
            got, expected = _excerpt(error["input"]), "no field of this name"
        case "too_long" | "too_short" if isinstance(error["input"], list):
            got, expected = f"a list of {len(error['input'])}", _lengths(error)
        case _:
            got, expected = _excerpt(error["input"]), error["msg"].removeprefix("Input should be ")
    return FieldError(field=field, got=got, expected=expected)


def _lengths(error: Mapping[str, Any]) -> str:
    if not error["loc"]:  # the body itself
        return f"1 to {MAX_REPORTS} reports"
    limits = error["ctx"]
    return f"at most {limits['max_length']}" if "max_length" in limits else f"at least {limits['min_length']}"


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
