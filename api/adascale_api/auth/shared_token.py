"""Authorization by a single shared token, which has every role for every job."""

import hmac
import logging
from pathlib import Path

from adascale_api.auth.authorization import Role
from adascale_api.errors import UnauthorizedError
from adascale_core.errors import AdaScaleError
from adascale_core.names import ENV_TOKEN, ENV_TOKEN_FILE

logger = logging.getLogger(__name__)


class InvalidTokenError(AdaScaleError):
    """The service can't be protected with this token."""

    exit_code = 2


class SharedToken:
    """Authorizes the bearers of a fixed token."""

    def __init__(self, token: str, variable: str = ENV_TOKEN) -> None:
        self._token = _validate(token, variable)

    async def authorize(
        self,
        token: str,
        role: Role,  # noqa: ARG002 (of the protocol)
        job_id: str | None,  # noqa: ARG002
        client: str = "",  # noqa: ARG002
    ) -> None:
        """Return if `token` is the shared token."""
        _require_equal(token, self._token)

    async def close(self) -> None:
        """Do nothing: no connection is open."""


class SharedTokenFile:
    """Authorizes the bearers of the token in a file, which may be renewed while the service runs."""

    def __init__(self, path: Path, variable: str = ENV_TOKEN_FILE) -> None:
        self._path = path
        self._variable = variable
        self._version: tuple[int, int, int] | None = None
        try:
            self._version = self._file_version()
            self._token = self._read()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidTokenError(f"{variable} {path} can't be read: {error}") from error

    async def authorize(
        self,
        token: str,
        role: Role,  # noqa: ARG002 (of the protocol)
        job_id: str | None,  # noqa: ARG002
        client: str = "",  # noqa: ARG002
    ) -> None:
        """Return if `token` is the token in the file, or was when the file could last be read."""
        self._refresh()
        _require_equal(token, self._token)

    async def close(self) -> None:
        """Do nothing: no connection is open."""

    def _refresh(self) -> None:
        # `stat` on a local file does not block, so the event loop may call it.
        try:
            version = self._file_version()
            if version != self._version:
                self._token = self._read()
                self._version = version
        except (OSError, UnicodeDecodeError, InvalidTokenError) as error:
            logger.warning(
                "%s %s can't be read, the previous token stays valid: %s", self._variable, self._path, error
            )

    def _file_version(self) -> tuple[int, int, int]:
        status = self._path.stat()
        return status.st_mtime_ns, status.st_ino, status.st_size

    def _read(self) -> str:
        return _validate(self._path.read_text().strip(), f"{self._variable} {self._path}")


def _validate(token: str, source: str) -> str:
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        reason = "has characters other than visible ASCII" if token else "is empty"
        raise InvalidTokenError(f"the token in {source} {reason}: generate one with `openssl rand -hex 32`")
    return token


def _require_equal(sent: str, shared: str) -> None:
    # In constant time: the time of an answer must not show how much of a guess is correct.
    if not hmac.compare_digest(sent.encode(), shared.encode()):
        raise UnauthorizedError("invalid token: send the token that the service was started with")
