"""Roles of clients, and the interface that checks their bearer tokens."""

from enum import Enum, auto
from typing import Protocol


class Role(Enum):
    """What a client may do with a job."""

    READER = auto()
    """Read the job."""
    WORKER = auto()
    """Post reports and register replicas."""
    CONTROLLER = auto()
    """Declare and delete the job, and set its allocation."""


class Authorizer(Protocol):
    """Checks the bearer tokens of requests."""

    async def authorize(self, token: str, role: Role, job_id: str | None, client: str = "") -> None:
        """Return if the token has the role for a job."""
        ...

    async def close(self) -> None:
        """Close connections."""
        ...
