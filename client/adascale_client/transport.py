"""Requests and answers in JSON over pooled connections, their errors, and the waits before a repetition.

ServiceError
├── ServiceUnreachableError    no answer, or an answer that is not the metrics service's
└── ServiceRefusedError        an answer with an error status
"""

from __future__ import annotations

import http.client
import json
import random
import ssl
import threading
from pathlib import Path
from typing import Any, Protocol

import urllib3

from adascale_core.errors import AdaScaleError
from adascale_core.failures import EXIT_SERVICE_UNAVAILABLE
from adascale_core.names import ENV_CA_FILE


class ServiceError(AdaScaleError):
    """A call of the metrics service failed."""


class ServiceUnreachableError(ServiceError):
    """The metrics service does not answer, or another program answers at its address."""

    exit_code = EXIT_SERVICE_UNAVAILABLE


class ServiceRefusedError(ServiceError):
    """The metrics service answers with an error status.

    Args:
        message: the reason that the service gives.
        status: the HTTP status.
        retry_after: seconds after which the answer may differ; None if the service does not say.
    """

    def __init__(self, message: str, status: int, retry_after: float | None = None) -> None:
        super().__init__(f"the metrics service answers {status}: {message}")
        self.status = status
        self.retry_after = retry_after


TIMEOUT = 5.0
"""Seconds to wait for a connection, and for each part of an answer."""
MAX_IDLE_CONNECTIONS = 8
"""Connections that stay open for the next request. More requests at the same time open more."""
MAX_EXCERPT = 200
"""Bytes of an answer without a reason that an error message quotes."""
MAX_ANSWER = 2**28
"""Bytes of an answer that are read. The largest answers are pages of the list of jobs."""
_PLAIN_ANSWERS = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE"})
"""What OpenSSL says, by its version, if the answer to its first message is one of HTTP."""


class ServiceTransport(Protocol):
    """Sends requests to a metrics service and parses the answers."""

    @property
    def url(self) -> str:
        """Where the service is, for messages."""

    def request(self, method: str, path: str, body: object = None, *, wait: float = 0.0) -> Any:
        """Send a request, as `Transport.request`."""

    def close(self) -> None:
        """Close the idle connections."""


class Transport:
    """Sends requests to the metrics service. Threads may share it.

    A token file takes precedence over a token. It and the file of the authorities may be renewed.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        token_file: Path | None = None,
        ca_file: Path | None = None,
    ) -> None:
        self.url = (url if "://" in url else f"http://{url}").rstrip("/")
        self._token = token
        self._token_file = token_file
        self._ca_file = ca_file if self.url.startswith("https://") else None
        # inode and time of change of the file that the pool was made with
        self._ca_version: tuple[int, int] | None = None
        self._pool = urllib3.PoolManager(maxsize=MAX_IDLE_CONNECTIONS, retries=False)
        self._lock = threading.Lock()

    def request(self, method: str, path: str, body: object = None, *, wait: float = 0.0) -> Any:
        """Send a request, and return the answer's JSON value; None if it has no body.

        `wait` is for how many seconds the service may hold back the answer, beyond the timeout.
        """
        headers = {"accept": "application/json"}
        token = self._read_token()
        if token:
            headers["authorization"] = f"Bearer {token}"
        content = None
        if body is not None:
            headers["content-type"] = "application/json"
            content = json.dumps(body).encode()
        pool = self._current_pool()
        try:
            answer = pool.request(
                method,
                f"{self.url}/{path}",
                body=content,
                headers=headers,
                timeout=TIMEOUT + wait,
                redirect=False,
                preload_content=False,
            )
            data = answer.read(MAX_ANSWER + 1)
        except urllib3.exceptions.LocationValueError as error:
            raise ServiceUnreachableError(
                "the address of the metrics service must be http://HOST:PORT or https://HOST:PORT, got "
                f"{self.url!r}: {error}"
            ) from error
        except (urllib3.exceptions.HTTPError, ValueError) as error:
            raise ServiceUnreachableError(
                f"the metrics service at {self.url} does not answer: {_root_cause(error)}"
            ) from error
        if len(data) > MAX_ANSWER:
            answer.close()
            raise ServiceUnreachableError(
                f"{self.url} is not the address of a metrics service: its answer has more than {MAX_ANSWER} "
                "bytes"
            )
        if answer.status >= 300:
            seconds = answer.headers.get("Retry-After", "")
            retry_after = float(seconds) if seconds.isdecimal() else None
            raise ServiceRefusedError(_reason(data), answer.status, retry_after)
        if not data:
            return None
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ServiceUnreachableError(
                f"{self.url} is not the address of a metrics service: its answer is not JSON"
            ) from error

    def close(self) -> None:
        """Close the idle connections."""
        self._pool.clear()

    def _current_pool(self) -> urllib3.PoolManager:
        """Return the pool that trusts the present authorities. Open connections outlive a renewal."""
        if self._ca_file is None:
            return self._pool
        try:
            # The kubelet replaces a file by a new one.
            found = self._ca_file.stat()
            version = found.st_ino, found.st_mtime_ns
            with self._lock:
                if version != self._ca_version:
                    context = ssl.create_default_context(cafile=str(self._ca_file))
                    self._pool = urllib3.PoolManager(
                        maxsize=MAX_IDLE_CONNECTIONS, retries=False, ssl_context=context
                    )
                    self._ca_version = version
                return self._pool
        except OSError as error:  # also of `ssl`
            reason = "it has no certificate in PEM" if isinstance(error, ssl.SSLError) else error.strerror
            raise ServiceUnreachableError(
                f"the file {self._ca_file} with the authority of the metrics service can't be read: {reason}"
            ) from error

    def _read_token(self) -> str | None:
        # Read for each request: the file is small, and the kubelet replaces it before the token expires.
        if self._token_file is None:
            return self._token
        try:
            return self._token_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ServiceUnreachableError(
                f"the token file {self._token_file} for the metrics service can't be read: {reason}"
            ) from error


def _root_cause(error: Exception) -> str:
    """The text of the innermost cause; the layers of urllib3 around it do not help a user."""
    cause: BaseException = error
    while (inner := cause.__cause__ or cause.__context__) is not None:
        cause = inner
    if isinstance(cause, ssl.SSLCertVerificationError):
        return (
            f"its certificate is not trusted ({cause.verify_message}). Set {ENV_CA_FILE} to a file with the "
            "certificate of its authority, and use a host name that is in the certificate"
        )
    if isinstance(cause, ssl.SSLError) and cause.reason in _PLAIN_ANSWERS:
        return "it answers without TLS: use http:// in its address"
    if isinstance(cause, ssl.SSLError):
        return f"TLS fails ({cause.reason or cause})"
    if isinstance(cause, http.client.IncompleteRead):
        return "the connection was closed before the answer was complete"
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror.lower()
    return str(cause)


def _reason(data: bytes) -> str:
    """The reason in the body of an error answer; of a body in another form, its beginning."""
    try:
        return str(json.loads(data)["error"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return data[:MAX_EXCERPT].decode(errors="replace") or "no reason is given"


MIN_BACKOFF = 0.1
"""Seconds after the first failed request until the next attempt."""
MAX_BACKOFF = 5.0
"""Seconds between two attempts while the service does not answer, at most."""


class Backoff:
    """Waiting times that double with each failure.

    Each is shortened by up to half at random, so that the clients of a service that restarts do not all send
    their requests at once.
    """

    def __init__(self) -> None:
        self._next = MIN_BACKOFF
        # A program that trains may rely on the numbers of the common generator.
        self._random = random.Random()

    def next(self) -> float:
        """Return the seconds to wait after one more failure."""
        seconds = self._next
        self._next = min(2 * seconds, MAX_BACKOFF)
        return seconds * self._random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Begin with the shortest time again, after a success."""
        self._next = MIN_BACKOFF
