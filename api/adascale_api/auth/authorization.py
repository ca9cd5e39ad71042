"""Roles of clients, the interface that checks their bearer tokens, and tokens that many clients share."""

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from pathlib import Path
from typing import Protocol

from adascale_api.errors import UnauthorizedError
from adascale_api.renewed import Renewed
from adascale_core.errors import UsageError


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
        """Raise a `RequestError` unless the token has the role for a job; None for all jobs.

        `client` is the address that sent it: its tokens that wait for a check are bounded.
        """
        ...

    async def close(self) -> None:
        """Close connections."""
        ...


@dataclass(frozen=True)
class SharedToken:
    """Authorizes the bearers of a fixed token, or of the token in a file, with every role for every job.

    With `others`, only to read, and these authorize the bearers of other tokens.
    """

    token: str | Renewed[str]
    others: Authorizer | None = None

    async def authorize(self, token: str, role: Role, job_id: str | None, client: str = "") -> None:
        """Refuse another token, or have it authorized."""
        expected = self.token if isinstance(self.token, str) else self.token.current
        # In constant time: the time of an answer must not show how much of a guess is correct.
        if hmac.compare_digest(token.encode(), expected.encode()) and (
            self.others is None or role is Role.READER
        ):
            return
        if self.others is None:
            raise UnauthorizedError("invalid token: send the token that the service was started with")
        await self.others.authorize(token, role, job_id, client)

    async def close(self) -> None:
        """Close connections."""
        if self.others is not None:
            await self.others.close()


def shared_token(
    environment: Mapping[str, str], variable: str, file_variable: str, others: Authorizer | None = None
) -> SharedToken | None:
    """Return what authorizes the bearers of the token in a file or a variable; None if neither is given."""
    if path := environment.get(file_variable):
        file = Path(path)
        return SharedToken(Renewed([file], partial(_read_token, file, f"{file_variable} {path}")), others)
    if token := environment.get(variable):
        return SharedToken(_validate(token, variable), others)
    return None


def _read_token(file: Path, source: str) -> str:
    try:
        return _validate(file.read_text().strip(), source)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{source} can't be read: {error}") from error


def _validate(token: str, source: str) -> str:
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        reason = "has characters other than visible ASCII" if token else "is empty"
        raise UsageError(f"the token in {source} {reason}: generate one with `openssl rand -hex 32`")
    return token
