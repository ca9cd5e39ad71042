"""The metrics service of a cluster, through the API server's proxy for services.

The API server checks the user's right to `get` `services/proxy`, and removes the user's credentials from the
request. So the metrics service sees no token, and answers what everyone may read. There is no other header
for a token: the read token of a service that protects reads is sent to the service alone (`--url`).
"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import parse_qsl, quote

from adascale_client import ServiceRefusedError, ServiceUnreachableError
from adascale_controller.cluster.api import (
    CALL_TIMEOUT,
    ApiServerUnreachableError,
    ClusterAccessError,
    RejectedError,
)
from adascale_controller.cluster.kubernetes_api import KubernetesApi
from adascale_core import names

_GATEWAY_STATUSES = {500, 502, 503, 504}
"""With which the API server says that it could not reach the service."""
_PLAIN_ANSWER = "first record does not look like a TLS handshake"
"""What it says about a service without TLS. It does not verify certificates of services."""


class ProxyTransport:
    """Sends the reads of a `MetricsServiceClient` through the API server."""

    def __init__(self, api: KubernetesApi, namespace: str) -> None:
        self._api = api
        self._namespace = namespace
        self._path = f"/api/v1/namespaces/{quote(namespace, safe='')}/services"
        self._scheme = "https:"
        # where the service is, for messages
        self.url = f"service {names.API_SERVICE} in namespace {namespace}"

    def request(self, method: str, path: str, body: object = None, *, wait: float = 0.0) -> Any:
        """As `Transport.request`."""
        if method != "GET" or body is not None:
            raise ValueError(f"only reads go through the API server, not {method}")
        try:
            return self._read(path, wait, self._scheme)
        except ApiServerUnreachableError as error:
            raise ServiceUnreachableError(str(error)) from error
        except RejectedError as error:
            if self._scheme and _is_plain(error):
                self._scheme = ""
                return self.request(method, path, wait=wait)
            raise self._service_error(error) from error

    def _read(self, path: str, wait: float, scheme: str) -> Any:
        """Read a path through the API server, which speaks TLS with the service if `scheme` is `https:`."""
        target, _, query = path.partition("?")
        return self._api.get(
            f"{self._path}/{scheme}{names.API_SERVICE}:{names.DEFAULT_API_PORT}/proxy/{target}",
            parse_qsl(query, keep_blank_values=True),
            timeout=CALL_TIMEOUT + wait,
        )

    def close(self) -> None:
        """Do nothing: the connections are the API server's."""

    def _service_error(
        self, error: RejectedError
    ) -> ClusterAccessError | ServiceUnreachableError | ServiceRefusedError:
        reason = _reason(error.message)
        if reason is not None and error.status == 401:
            # The API server passes no token on.
            return ServiceRefusedError(
                f"{reason}. {self._forwarding}, and set {names.ENV_TOKEN}", error.status
            )
        if reason is not None:
            return ServiceRefusedError(reason, error.status)
        if error.status == 404:
            return ServiceUnreachableError(
                f"there is no {self.url}: name the namespace of the installation with --system-namespace"
            )
        if error.status in _GATEWAY_STATUSES:
            return ServiceUnreachableError(
                f"the API server cannot reach {self.url}: {error.message}. If a network policy prevents it: "
                f"{self._forwarding}"
            )
        return error

    @property
    def _forwarding(self) -> str:
        port = names.DEFAULT_API_PORT
        return (
            f"Forward its port (kubectl -n {self._namespace} port-forward svc/{names.API_SERVICE} {port}), "
            f"set {names.ENV_CA_FILE} to a file with the {names.AUTHORITY_FILE} of its ConfigMap "
            f"{names.AUTHORITY}, add --url https://127.0.0.1:{port}"
        )


def _is_plain(error: RejectedError) -> bool:
    """Whether the service answers the API server without TLS."""
    return error.status in _GATEWAY_STATUSES and _PLAIN_ANSWER in error.message


def _reason(message: str) -> str | None:
    """Return the reason in an error of the metrics service; None for an answer of the API server itself."""
    try:
        return str(json.loads(message)["error"])
    except (ValueError, KeyError, TypeError):
        return None
