"""Roles of clients, the interface that checks their bearer tokens, and tokens that many clients share."""

import hmac
import logging
from collections.abc import Mapping
from enum import Enum, auto
from pathlib import Path
from typing import Protocol

from adascale_api.errors import UnauthorizedError
from adascale_core.errors import AdaScaleError
from adascale_core.names import ENV_TOKEN, ENV_TOKEN_FILE

logger = logging.getLogger(__name__)


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
    """Authorizes the bearers of a fixed token, with every role for every job."""

    def __init__(self, token: str, variable: str = ENV_TOKEN) -> None:
        self._token = _validate(token, variable)

    async def authorize(
        self,
        token: str,
        role: Role,  # noqa: ARG002 (of the protocol)
        job_id: str | None,  # noqa: ARG002
        client: str = "",  # noqa: ARG002
    ) -> None:
        """Refuse another token."""
        # In constant time: the time of an answer must not show how much of a guess is correct.
        if not hmac.compare_digest(token.encode(), self._token.encode()):
            raise UnauthorizedError("invalid token: send the token that the service was started with")

    async def close(self) -> None:
        """Do nothing: no connection is open."""


class SharedTokenFile(SharedToken):
    """Authorizes the bearers of the token in a file, which may be renewed while the service runs."""

    def __init__(self, path: Path, variable: str = ENV_TOKEN_FILE) -> None:
        self._path = path
        self._variable = variable
        try:
            self._version = self._file_version()
            super().__init__(self._read(), f"{variable} {path}")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidTokenError(f"{variable} {path} can't be read: {error}") from error

    async def authorize(self, token: str, role: Role, job_id: str | None, client: str = "") -> None:
        """Refuse a token that is not in the file, and was not when the file could last be read."""
        self._refresh()
        await super().authorize(token, role, job_id, client)

    def _refresh(self) -> None:
        # `stat` on a local file does not block, so the event loop may call it.
        try:
            version = self._file_version()
            if version != self._version:
                self._token = _validate(self._read(), f"{self._variable} {self._path}")
                self._version = version
        except (OSError, UnicodeDecodeError, InvalidTokenError) as error:
            logger.warning(
                "%s %s can't be read, the previous token stays valid: %s", self._variable, self._path, error
            )

    def _file_version(self) -> tuple[int, int, int]:
        status = self._path.stat()
        return status.st_mtime_ns, status.st_ino, status.st_size

    def _read(self) -> str:
        return self._path.read_text().strip()


def shared_token(environment: Mapping[str, str], variable: str, file_variable: str) -> SharedToken | None:
    """Return what authorizes the bearers of the token in a file or a variable; None if neither is given."""
    if path := environment.get(file_variable):
        return SharedTokenFile(Path(path), file_variable)
    if token := environment.get(variable):
        return SharedToken(token, variable)
    return None


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
