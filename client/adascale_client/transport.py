"""Requests and answers in JSON, over pooled connections."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Any

import urllib3

from adascale_client.errors import ServiceRefusedError, ServiceUnreachableError

TIMEOUT = 5.0
"""Seconds to wait for a connection, and for each part of an answer."""
MAX_IDLE_CONNECTIONS = 8
"""Connections that stay open for the next request. More requests at the same time open more."""
MAX_EXCERPT = 200
"""Bytes of an answer without a reason that an error message quotes."""
MAX_ANSWER = 2**28
"""Bytes of an answer that are read. The largest answers are pages of the list of jobs."""


class Transport:
    """Sends requests to the metrics service. Threads may share it.

    Args:
        url: the base URL of the service, as in `http://127.0.0.1:8265`; `http://` may be left out.
        token: the bearer token; None for no token.
        token_file: a file with the bearer token, which may be renewed; it takes precedence over `token`.
    """

    def __init__(self, url: str, token: str | None = None, token_file: Path | None = None) -> None:
        self.url = (url if "://" in url else f"http://{url}").rstrip("/")
        self._token = token
        self._token_file = token_file
        self._pool = urllib3.PoolManager(maxsize=MAX_IDLE_CONNECTIONS, retries=False)

    def request(self, method: str, path: str, body: object = None, *, wait: float = 0.0) -> Any:
        """Send a request and parse the answer.

        Args:
            method: the HTTP method.
            path: the path below the base URL, with the query.
            body: sent as JSON unless it is None.
            wait: seconds for which the service may hold back the answer, added to the timeout.

        Returns:
            The answer's JSON value, or None if the answer has no body.

        Raises:
            ServiceUnreachableError: the address is invalid, the service does not answer, the answer is not
                JSON or too large, or the token file can't be read.
            ServiceRefusedError: the service answers with an error status.
        """
        headers = {"accept": "application/json"}
        token = self._read_token()
        if token:
            headers["authorization"] = f"Bearer {token}"
        content = None
        if body is not None:
            headers["content-type"] = "application/json"
            content = json.dumps(body).encode()
        try:
            answer = self._pool.request(
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
                f"the address of the metrics service must be http://HOST:PORT, got {self.url!r}: {error}"
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
