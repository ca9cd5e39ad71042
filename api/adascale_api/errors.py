"""The errors of requests, and of options.

RequestError
├── InvalidInputError     422, with the fields that are invalid
├── NotJsonError          415
├── BodyTooLargeError     413
├── CursorExpiredError    410, in service.changes
├── UnreadableJobError    500, in data.job
├── RefusedReplicaError   409
├── NotFoundError         404
├── UnauthorizedError     401
├── ForbiddenError        403
├── TlsRequiredError      426
└── UnavailableError      503
"""

from collections.abc import Mapping, Sequence
from math import ceil
from typing import ClassVar

from pydantic import BaseModel, Field

from adascale_core.errors import AdaScaleError
from adascale_core.messages.allocation import AllocationView

MAX_FIELD_ERRORS = 20
"""Invalid fields in one answer."""


class FieldError(BaseModel):
    """A field or parameter that is invalid."""

    field: str = Field(description="The name of the field, after its index in a list.", examples=["gain"])
    got: str = Field(description="The value that was sent.", examples=["NaN"])
    expected: str = Field(description="The values that are valid.", examples=["a finite number"])

    def __str__(self) -> str:
        return f"{self.field}: got {self.got}, expected {self.expected}"


class ErrorBody(BaseModel):
    """The reason why a request was refused. Nothing of a refused request is stored."""

    error: str = Field(description="The reason.")
    detail: list[FieldError] = Field(default=[], description="The fields that are invalid.")


class ConflictBody(ErrorBody):
    """The reason why an allocation was refused, and the job's generations."""

    allocation: AllocationView


class RequestError(AdaScaleError):
    """A request that is refused."""

    status: ClassVar[int] = 400
    headers: Mapping[str, str] = {}
    field_errors: Sequence[FieldError] = ()


class InvalidInputError(RequestError):
    """Fields or parameters are invalid."""

    status = 422

    def __init__(self, field_errors: Sequence[FieldError]) -> None:
        more = f" (and {len(field_errors) - 1} more)" if len(field_errors) > 1 else ""
        super().__init__(f"{field_errors[0]}{more}; nothing was stored")
        self.field_errors = list(field_errors[:MAX_FIELD_ERRORS])


class NotFoundError(RequestError):
    """There is no such job, or no report or decision about it."""

    status = 404


class NotJsonError(RequestError):
    """The content type of the body is not JSON."""

    status = 415


class BodyTooLargeError(RequestError):
    """The body is larger than the limit."""

    status = 413


class RefusedReplicaError(RequestError):
    """A replica may not join the members of its job now.

    Args:
        reason: the reason.
        seconds: after which those members whose agents are gone have been removed.
    """

    status = 409

    def __init__(self, reason: str, seconds: float) -> None:
        super().__init__(reason)
        self.headers = {"Retry-After": str(ceil(seconds))}


class UnauthorizedError(RequestError):
    """The token is missing or not valid."""

    status = 401
    headers: Mapping[str, str] = {"WWW-Authenticate": "Bearer"}


class ForbiddenError(RequestError):
    """The token is valid, but does not have the role that the request needs."""

    status = 403


class TlsRequiredError(RequestError):
    """The request came without TLS, which the service requires."""

    status = 426
    headers: Mapping[str, str] = {"Upgrade": "TLS/1.2", "Connection": "Upgrade, close"}

    def __init__(self) -> None:
        super().__init__("this service requires TLS: use https:// in its address; nothing was stored")


class UnavailableError(RequestError):
    """Something that the answer depends on is unavailable."""

    status = 503
    RETRY_AFTER: ClassVar[int] = 5
    """Seconds after which the client may try again."""
    headers: Mapping[str, str] = {"Retry-After": str(RETRY_AFTER)}
