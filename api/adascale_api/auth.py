"""Who may do what: bearer tokens.

An `Authenticator` says whether a token is good for a call. One machine has a single shared token; in a
cluster, `token_review` asks Kubernetes whose token it is.
"""

import hmac
import logging
from enum import Enum, auto
from pathlib import Path
from typing import Protocol

from adascale_api.errors import UnauthorizedError
from adascale_core.errors import AdaScaleError
from adascale_core.names import ENV_TOKEN, ENV_TOKEN_FILE

logger = logging.getLogger(__name__)


class UnusableTokenError(AdaScaleError):
    """A token that the service can't be protected with."""

    exit_code = 2


class Right(Enum):
    """What one may want to do with a job."""

    READ = auto()
    """Read what is known of it."""
    WORK = auto()
    """Tell what its workers do: reports and replicas."""
    CONTROL = auto()
    """Decide on it: declare it, remove it, give it replicas."""


class Authenticator(Protocol):
    """Tells whether a token is good."""

    async def require(self, token: str, right: Right, job_id: str | None) -> None:
        """Return if the bearer of `token` has `right` on the job `job_id`, or on all jobs where it is none.

        Raises:
            RequestError: the answer where it is not so: 401, 403 or 503.
        """
        ...

    async def close(self) -> None:
        """Give back what it holds, at the end."""
        ...


class SharedToken:
    """One token, good for all jobs."""

    def __init__(self, token: str) -> None:
        self._token = _checked(token, ENV_TOKEN)

    async def require(self, token: str, right: Right, job_id: str | None) -> None:  # noqa: ARG002 (of the protocol)
        """Return if `token` is the shared one."""
        _require_equal(token, self._token)

    async def close(self) -> None:
        """Nothing is held."""


class SharedTokenFile:
    """One token, good for all jobs, in a file that may be renewed while the service runs."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int, int] | None = None
        try:
            self._stamp = self._stamp_now()
            self._token = self._read()
        except (OSError, UnicodeDecodeError) as error:
            raise UnusableTokenError(f"{ENV_TOKEN_FILE} {path} can't be read: {error}") from error

    async def require(self, token: str, right: Right, job_id: str | None) -> None:  # noqa: ARG002 (of the protocol)
        """Return if `token` is what the file has now, or had before it became unreadable."""
        self._refresh()
        _require_equal(token, self._token)

    async def close(self) -> None:
        """Nothing is held."""

    def _refresh(self) -> None:
        # A `stat` of a local file does not wait, so it may be done on the event loop.
        try:
            stamp = self._stamp_now()
            if stamp != self._stamp:
                self._token = self._read()
                self._stamp = stamp
        except (OSError, UnicodeDecodeError, UnusableTokenError) as error:
            logger.warning(
                "%s %s can't be read, the token from before stays: %s", ENV_TOKEN_FILE, self._path, error
            )

    def _stamp_now(self) -> tuple[int, int, int]:
        status = self._path.stat()
        return status.st_mtime_ns, status.st_ino, status.st_size

    def _read(self) -> str:
        return _checked(self._path.read_text().strip(), f"{ENV_TOKEN_FILE} {self._path}")


def _checked(token: str, source: str) -> str:
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        held = "a token with other than visible ASCII characters" if token else "nothing"
        raise UnusableTokenError(f"{source} holds {held}: make one with `openssl rand -hex 32`")
    return token


def _require_equal(sent: str, shared: str) -> None:
    # In constant time, so that answers don't tell how much of a guess was right.
    if not hmac.compare_digest(sent.encode(), shared.encode()):
        raise UnauthorizedError("the token is not accepted: send the one that the service was started with")
