"""The messages between workers, api and controller, as frozen dataclasses.

Their fields have the names of the JSON members. The api validates the JSON (pydantic) before it builds a
message.
"""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any, Self


class Message:
    """A message that is sent as a JSON object."""

    def to_json(self) -> dict[str, Any]:
        """Return the members of the message's JSON object."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]

    @classmethod
    def from_json(cls, members: dict[str, Any]) -> Self:
        """Return the message of a JSON object's members. Unknown members are ignored."""
        own = {field.name for field in fields(cls)}  # type: ignore[arg-type]
        return cls(**{name: value for name, value in members.items() if name in own})
