"""The certificate of the server, and the refusal of requests without TLS.

A client that speaks TLS and one that does not are served at the same port, so that agents of jobs that were
started before TLS was turned on reach the service; see `connections`.
"""

import ssl
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from adascale_api.renewed import Renewed
from adascale_core.errors import UsageError

MAX_CONNECTIONS = 12 * 1024
"""Connections with TLS, by default: as many as fit into 512 MiB."""


def server_certificate(certificate: Path, key: Path) -> Renewed[ssl.SSLContext]:
    """Return the context of the next handshake, of a certificate in files that may be renewed."""

    def load() -> ssl.SSLContext:
        # A context of its own: one that has loaded keys of two types offers both.
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(certificate, key)
        except OSError as error:
            raise UsageError(
                f"the certificate {certificate} of --tls-cert with the key {key} of --tls-key can't be used: "
                f"{_reason(error)}"
            ) from error
        # The group that each client has to support. One of those in a large finite field, which clients may
        # choose otherwise, would take the event loop for a tenth of a second for each handshake.
        context.set_ecdh_curve("prime256v1")
        return context

    return Renewed([certificate, key], load)


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        mismatch = error.reason == "KEY_VALUES_MISMATCH"
        return "the key is of another certificate" if mismatch else "it has no certificate or key in PEM"
    return error.strerror or str(error)


class RequireTls:
    """Answers requests without TLS with an error, and passes all others on."""

    def __init__(self, app: ASGIApp, refusal: ASGIApp) -> None:
        self._app = app
        self._refusal = refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        is_plain = scope["type"] == "http" and scope["scheme"] == "http"
        await (self._refusal if is_plain else self._app)(scope, receive, send)
