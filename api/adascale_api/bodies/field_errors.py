"""Field errors from the errors of pydantic."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from adascale_api.bodies.requests import MAX_REPORTS
from adascale_api.errors import FieldError

MAX_EXCERPT = 80
"""Characters of an invalid value in an answer."""


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
