"""Calls of the Kubernetes API with paths and JSON, through methods that the Python client does not document.

The client's documented methods return typed objects, which drop unknown fields, cost much time to build, and
don't support all content types. `ApiClient.param_serialize` and `ApiClient.call_api`, the generated methods'
own base, take and return bytes. All use of undocumented parts of the client is in this module.

Tried with kubernetes 37.0.2 (`kubernetes.aio`), the version in `requirements.lock`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from kubernetes.aio.client import ApiClient
from kubernetes.aio.client.exceptions import ApiException


class NoAnswerError(Exception):
    """The API server did not answer in time, or could not be reached."""


@dataclass(frozen=True)
class Response:
    """An answer of the API server."""

    status: int
    content: bytes
    # seconds after which the API server accepts the call, by its header; None without one
    retry_after: float | None = None


async def call(
    api: ApiClient,
    method: str,
    path: str,
    *,
    timeout: float,
    query: Sequence[tuple[str, str]] = (),
    body: Mapping[str, Any] | None = None,
    content_type: str = "application/json",
) -> Response:
    """Make a call with the client's authentication."""
    try:
        request = await api.param_serialize(
            method,
            path,
            query_params=list(query),
            header_params={"Accept": "application/json", "Content-Type": content_type},
            body=body,
            auth_settings=["BearerToken"],
        )
        answer = await api.call_api(*request, _request_timeout=timeout)
        retry_after = answer.headers.get("Retry-After", "")
        seconds = float(retry_after) if retry_after.isdecimal() else None
        return Response(answer.status, await answer.read(), seconds)
    except (TimeoutError, aiohttp.ClientError, OSError, ApiException) as error:
        # The message of a TimeoutError is empty.
        raise NoAnswerError(str(error) or f"no answer within {timeout:.0f} s") from error
