"""The output of a replica, as the metrics service of one machine returns it."""

from __future__ import annotations

from dataclasses import dataclass

from adascale_core.messages.message import Message


@dataclass(frozen=True)
class LogView(Message):
    """A part of the output of a replica.

    Args:
        text: the part.
        next: where the next part begins, in bytes.
        continues: whether it follows the part that the client has; otherwise it replaces that.
        missing: why there is no output; empty if there is one.
    """

    text: str
    next: int
    continues: bool
    missing: str = ""
