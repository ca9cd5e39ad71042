"""The certificate of the server, and the refusal of requests without TLS.

A client that speaks TLS and one that does not are served at the same port, so that agents of jobs that were
started before TLS was turned on reach the service; see `connections`.
"""

import logging
import ssl
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from adascale_core.errors import AdaScaleError

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 12 * 1024
"""Connections with TLS, by default: as many as fit into 512 MiB."""


class CertificateFileError(AdaScaleError):
    """The certificate of the server or its key can't be used."""

    exit_code = 2


class ServerCertificate:
    """The certificate of the server in files, which may be renewed while it runs."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self._files = certificate, key
        self._refused: object = None
        """The version of the files that can't be used, which is logged once."""
        try:
            self._version = self._read_version()
            self._context = self._load()
        except OSError as error:
            raise CertificateFileError(
                f"the certificate {certificate} of --tls-cert with the key {key} of --tls-key can't be used: "
                f"{_reason(error)}"
            ) from error

    @property
    def context(self) -> ssl.SSLContext:
        """The context of the next handshake: of the files, or of the last that could be used."""
        # `stat` on a local file does not block, so the event loop may call it.
        version: object = "missing"
        try:
            version = self._read_version()
            if version == self._version:
                self._refused = None
            elif version != self._refused:
                self._context, self._version = self._load(), version
                logger.info("the certificate in %s is renewed", self._files[0])
        except OSError as error:
            if version != self._refused:
                logger.warning(
                    "the certificate in %s can't be read, the previous one is used: %s",
                    self._files[0],
                    _reason(error),
                )
            self._refused = version
        return self._context

    def _read_version(self) -> object:
        found = [file.stat() for file in self._files]
        return [(each.st_ino, each.st_mtime_ns, each.st_size) for each in found]

    def _load(self) -> ssl.SSLContext:
        # A context of its own: one that has loaded keys of two types offers both.
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*self._files)
        # The group that each client has to support. One of those in a large finite field, which clients may
        # choose otherwise, would take the event loop for a tenth of a second for each handshake.
        context.set_ecdh_curve("prime256v1")
        return context


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
