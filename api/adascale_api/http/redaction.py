"""Answers without the members that show where replicas are and what their programs print.

Who can reach the service may read gains and progress without a token. Logs, addresses and what else could
help an attacker need the token of the job, of the operator, or for reading.
"""

from typing import Any

HIDDEN = frozenset(
    {
        *("address", "port", "master_addr", "master_port", "used_port"),
        *("instance", "instances", "node", "log", "secret", "key"),
    }
)
"""The names of these members. Their values become empty."""
METRICS = "metrics"
"""The member of a report whose members have the names that the program has chosen, for numbers only."""


def redact(value: Any) -> Any:
    """Return a JSON value without the values of hidden members."""
    match value:
        case dict():
            return {
                name: _empty(member) if name in HIDDEN else member if name == METRICS else redact(member)
                for name, member in value.items()
            }
        case list():
            return [redact(member) for member in value]
        case _:
            return value


def _empty(value: Any) -> Any:
    return None if value is None else type(value)()
