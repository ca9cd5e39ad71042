"""Messages of the core that validate themselves, with the descriptions that their docstrings have."""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, field, fields
from typing import Annotated, Any, TypeVar, cast

import pydantic
from pydantic.dataclasses import dataclass

from adascale_core.messages.message import Message

M = TypeVar("M", bound=Message)
STRICT = pydantic.ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
"""Exactly the fields of a message, of exactly their types."""

_ARGUMENT = re.compile(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", re.MULTILINE)
"""In a docstring without the indentation of its class, which Python 3.13 removes."""


def described_fields(message: type[Message], types: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a message: their types with limits, and the descriptions of the docstring.

    Args:
        message: a dataclass whose docstring describes each field. With `python -OO` it has none.
        types: field -> its type with limits.
    """
    found = _ARGUMENT.findall(inspect.cleandoc(message.__doc__ or ""))
    texts = {name: re.sub(r"\s+", " ", text).replace("None", "null") for name, text in found}
    return {
        each.name: Annotated[types[each.name], pydantic.Field(description=_sentence(texts.get(each.name)))]
        for each in _fields(message)
    }


def validated(described: Mapping[str, Any], example: dict[str, Any]) -> Callable[[type[M]], type[M]]:
    """Return a decorator for a subclass of a message, which makes `TypeAdapter` validate its fields.

    Args:
        described: the fields, of `described_fields`.
        example: the JSON schema's additional members.
    """

    def decorate(body: type[M]) -> type[M]:
        body.__annotations__ = dict(described)
        for each in _fields(body):
            if each.default_factory is not MISSING:
                setattr(body, each.name, field(default_factory=each.default_factory))
        config = pydantic.ConfigDict(**STRICT, json_schema_extra=example)
        return cast("type[M]", dataclass(frozen=True, config=config)(body))

    return decorate


def _fields(message: type[Message]) -> tuple[Field[Any], ...]:
    return fields(message)  # type: ignore[arg-type]  # every message is a dataclass


def _sentence(text: str | None) -> str | None:
    return text and text[0].upper() + text[1:]
