"""Request bodies, read as JSON in the strict sense.

FastAPI would read the JSON first and check types after: by then `NaN` has become a number and a list a
tuple. pydantic reads the text itself and knows them apart; in exchange, the OpenAPI text has to be told
about the bodies, here and in `openapi`.
"""

from typing import Any, Generic, TypeVar

from fastapi import Request
from pydantic import BaseModel, TypeAdapter, ValidationError

from adascale_api.errors import InvalidInputError, NotJsonError, Problem
from adascale_api.schemas import MAX_REPORTS, GainReportBody

M = TypeVar("M", bound=BaseModel)

REFERENCE = "#/components/schemas/{model}"
"""Where the OpenAPI text has the schema of a body."""


class Body(Generic[M]):
    """A FastAPI dependency: the request's body as a model."""

    def __init__(self, model: type[M]) -> None:
        self.model = model

    async def __call__(self, request: Request) -> M:
        """The body.

        Raises:
            NotJsonError, BodyTooLargeError, InvalidInputError: it is not what it must be.
        """
        text = await _read(request)
        try:
            return self.model.model_validate_json(text)
        except ValidationError as error:
            raise InvalidInputError.from_pydantic(error.errors(include_url=False)) from error

    @property
    def openapi(self) -> dict[str, Any]:
        """What the OpenAPI text of an operation says of this body."""
        return _request_body(_reference(self.model))


class ReportsBody:
    """A FastAPI dependency: the request's body as reports, of which it holds one or a list."""

    _reports = TypeAdapter(list[GainReportBody])

    async def __call__(self, request: Request) -> list[GainReportBody]:
        """The reports; errors as for `Body`."""
        text = await _read(request)
        try:
            if not text.lstrip(b" \t\r\n").startswith(b"["):
                return [GainReportBody.model_validate_json(text)]
            reports = self._reports.validate_json(text)
        except ValidationError as error:
            raise InvalidInputError.from_pydantic(error.errors(include_url=False)) from error
        if not 1 <= len(reports) <= MAX_REPORTS:
            raise InvalidInputError(
                [
                    Problem(
                        field="body",
                        got=f"a list of {len(reports)}",
                        allowed=f"1 to {MAX_REPORTS} reports",
                    )
                ]
            )
        return reports

    @property
    def openapi(self) -> dict[str, Any]:
        """What the OpenAPI text of an operation says of this body."""
        one = _reference(GainReportBody)
        return _request_body(
            {"anyOf": [one, {"type": "array", "items": one, "minItems": 1, "maxItems": MAX_REPORTS}]}
        )


async def _read(request: Request) -> bytes:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        # Also keeps out the requests that a web page can make a browser send without asking.
        raise NotJsonError(
            f"content-type: got {kind or 'none'}, allowed is application/json; nothing was stored"
        )
    return await request.body()


def _reference(model: type[BaseModel]) -> dict[str, Any]:
    return {"$ref": REFERENCE.format(model=model.__name__)}


def _request_body(schema: dict[str, Any]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
