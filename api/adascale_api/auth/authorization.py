"""Roles of clients, the interface that checks their bearer tokens, and tokens that many clients share."""

import hmac
from collections.abc import Mapping
from enum import Enum, auto
from functools import partial
from pathlib import Path
from typing import Protocol

from adascale_api.errors import UnauthorizedError
from adascale_api.renewed import Renewed
from adascale_core.errors import AdaScaleError


class InvalidTokenError(AdaScaleError):
    """The service can't be protected with this token."""

    exit_code = 2


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


class SharedToken:
    """Authorizes the bearers of a fixed token, or of the token in a file, with every role for every job."""

    def __init__(self, token: str | Renewed[str]) -> None:
        self._token = token

    async def authorize(
        self,
        token: str,
        role: Role,  # noqa: ARG002 (of the protocol)
        job_id: str | None,  # noqa: ARG002
        client: str = "",  # noqa: ARG002
    ) -> None:
        """Refuse another token."""
        expected = self._token if isinstance(self._token, str) else self._token.current
        # In constant time: the time of an answer must not show how much of a guess is correct.
        if not hmac.compare_digest(token.encode(), expected.encode()):
            raise UnauthorizedError("invalid token: send the token that the service was started with")

    async def close(self) -> None:
        """Do nothing: no connection is open."""


def shared_token(environment: Mapping[str, str], variable: str, file_variable: str) -> SharedToken | None:
    """Return what authorizes the bearers of the token in a file or a variable; None if neither is given."""
    if path := environment.get(file_variable):
        file = Path(path)
        return SharedToken(Renewed([file], partial(_read_token, file, f"{file_variable} {path}")))
    if token := environment.get(variable):
        return SharedToken(_validate(token, variable))
    return None


def _read_token(file: Path, source: str) -> str:
    try:
        return _validate(file.read_text().strip(), source)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidTokenError(f"{source} can't be read: {error}") from error


class ReadTokenAuthorizer:
    """Authorizes the bearers of a read token to read all jobs, and others by another authorizer."""

    def __init__(self, readers: Authorizer, others: Authorizer) -> None:
        self._readers = readers
        self._others = others

    async def authorize(self, token: str, role: Role, job_id: str | None, client: str = "") -> None:
        """Refuse a token that neither of the two accepts."""
        if role is Role.READER:
            try:
                await self._readers.authorize(token, role, job_id, client)
            except UnauthorizedError:
                pass  # another token
            else:
                return
        await self._others.authorize(token, role, job_id, client)

    async def close(self) -> None:
        """Close connections."""
        await self._readers.close()
        await self._others.close()


def _validate(token: str, source: str) -> str:
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        reason = "has characters other than visible ASCII" if token else "is empty"
        raise InvalidTokenError(f"the token in {source} {reason}: generate one with `openssl rand -hex 32`")
    return token
