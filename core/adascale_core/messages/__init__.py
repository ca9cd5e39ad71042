"""The messages between workers, api and controller, as frozen dataclasses.

Their fields have the names of the JSON members. The api validates the JSON (pydantic) before it builds a
message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from enum import Enum
from functools import cache
from types import NoneType
from typing import Any, Self, get_args, get_origin, get_type_hints


class Message:
    """A message that is sent as a JSON object."""

    def to_json(self) -> dict[str, Any]:
        """Return the members of the message's JSON object."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]

    @classmethod
    def from_json(cls, members: dict[str, Any]) -> Self:
        """Return the message of a JSON object's members. Unknown members are ignored.

        Raises:
            ValueError: an enumeration has no such value.
        """
        readers = _readers(cls)  # type: ignore[arg-type]  # classes are hashable
        return cls(**{name: readers[name](value) for name, value in members.items() if name in readers})


@cache
def _readers(message: type) -> Mapping[str, Callable[[Any], Any]]:
    """Return how the JSON value of each field is read, by the types of the fields."""
    hints = get_type_hints(message)
    return {field.name: _reader(hints[field.name]) for field in fields(message)}


def _reader(hint: Any) -> Callable[[Any], Any]:
    """Return what makes a value of a type from its JSON value."""
    kinds = get_args(hint)
    if NoneType in kinds:
        some = _reader(kinds[0])
        return lambda value: None if value is None else some(value)
    if get_origin(hint) in (tuple, Sequence):
        each = _reader(kinds[0])
        return lambda values: tuple(map(each, values))
    if isinstance(hint, type) and issubclass(hint, Message):
        return hint.from_json
    return hint if isinstance(hint, type) and issubclass(hint, Enum) else _unchanged


def _unchanged(value: Any) -> Any:
    return value
