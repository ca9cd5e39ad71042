"""TLS: the certificate of the server, and the listener that decides by the first byte of a connection.

A client that speaks TLS and one that does not are served at the same port, so that agents of jobs that were
started before TLS was turned on reach the service. A connection is counted before its handshake, and has the
time of a request for it: asyncio's own server counts nothing before, so that one client could open as many
connections as it likes.

This module alone uses a private part of uvloop, `SSLProtocol`. `pyproject.toml` has an upper bound for uvloop
because of it.
"""

import asyncio
import ctypes
import errno
import logging
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send
from uvloop.loop import SSLProtocol  # type: ignore[attr-defined]  # its stubs leave it out

from adascale_api.http.connection_limits import ConnectionLimits
from adascale_api.http.protocol import LimitedProtocol
from adascale_core.errors import AdaScaleError

logger = logging.getLogger(__name__)

HANDSHAKE = b"\x16"
"""The first byte of a TLS connection: the type of a record with a message of the handshake."""
MAX_CONNECTIONS = 12 * 1024
"""Connections with TLS, by default: as many as fit into 512 MiB."""
_M_MMAP_THRESHOLD = -3
_MMAP_THRESHOLD = 128 * 1024
"""Bytes: the initial value of glibc, which raises it as soon as a larger block is freed."""
MAX_ACCEPTED = 64
"""Connections that are accepted before the event loop does other work."""
ACCEPT_PAUSE = 1.0
"""Seconds until connections are accepted again after there was no room for one."""
_NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


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


def keep_buffers_sparse() -> None:
    """Let each large block of memory have pages of its own, as far as it is used.

    uvloop allocates 256 KiB for each connection with TLS, and reads small requests into them. From the heap,
    such blocks have pages that others have used before: a connection takes 50 KiB then, and 30 KiB otherwise.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD)


class _Handshake:
    """A connection that has sent nothing, or whose handshake is incomplete; a `Connection` of the limits."""

    unread_size = 0

    def __init__(self, connection: socket.socket, address: str) -> None:
        self.connection = connection
        self.address = address

    def abort(self) -> None:
        """End the connection; what waits for the client then closes it."""
        try:
            self.connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # The client has closed it.


class _Tls(SSLProtocol):  # type: ignore[misc]  # of a type that the stubs leave out
    """The TLS of a connection, which lets the protocol of the connection know what the client does not read.

    The base class encrypts an answer at once, and hands all of it to the transport of the socket. It knows
    how much waits there, and tells the protocol above it nothing.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Begin the handshake."""
        self._app.encrypted = transport
        super().connection_made(transport)

    def pause_writing(self) -> None:
        """Stop the answers."""
        self._is_paused = True
        super().pause_writing()
        self._app.pause_writing()

    def resume_writing(self) -> None:
        """Continue the answers, unless the transport is full again by what has waited here."""
        self._is_paused = False
        super().resume_writing()
        if not self._is_paused:
            self._app.resume_writing()

    @property
    def _app(self) -> LimitedProtocol:
        """The protocol of the connection, until it is closed."""
        app: LimitedProtocol = self._get_app_transport().get_protocol()
        return app


class TlsListener:
    """Accepts connections with and without TLS, with the methods of `asyncio.Server` that uvicorn calls."""

    def __init__(
        self,
        certificate: ServerCertificate,
        limits: ConnectionLimits,
        create_protocol: Callable[[], LimitedProtocol],
        listener: socket.socket,
    ) -> None:
        self._listener = listener
        self._certificate = certificate
        self._limits = limits
        self._create_protocol = create_protocol
        self._loop = asyncio.get_running_loop()
        self._silent: set[_Handshake] = set()
        """The connections that have sent nothing."""
        self._tasks: dict[asyncio.Task[None], _Handshake] = {}
        """The connections that have sent something and are not open yet."""
        self._closed = False
        listener.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Accept no more connections, and end those that have made no request."""
        self._closed = True
        self._loop.remove_reader(self._listener)
        for handshake in list(self._silent):
            self._drop(handshake)
        for handshake in self._tasks.values():
            handshake.abort()

    async def wait_closed(self) -> None:
        """Wait until all handshakes have ended."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _resume(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(MAX_ACCEPTED):
            try:
                connection, (address, *_) = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                logger.warning("can't accept a connection: %s", error.strerror)
                self._loop.remove_reader(self._listener)
                self._loop.call_later(ACCEPT_PAUSE, self._resume)
                return
            connection.setblocking(False)
            handshake = _Handshake(connection, address)
            self._silent.add(handshake)
            self._loop.add_reader(connection, self._begin, handshake)
            self._limits.opened(handshake)

    def _begin(self, handshake: _Handshake) -> None:
        try:
            first = handshake.connection.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            first = b""
        if not first:
            self._drop(handshake)
            return
        self._loop.remove_reader(handshake.connection)
        self._silent.discard(handshake)
        task = self._loop.create_task(self._serve(handshake, is_tls=first == HANDSHAKE))
        self._tasks[task] = handshake
        task.add_done_callback(self._tasks.pop)

    async def _serve(self, handshake: _Handshake, *, is_tls: bool) -> None:
        app = self._create_protocol()
        app.handshake = handshake
        protocol: asyncio.BaseProtocol = app
        opened = self._loop.create_future()
        if is_tls:
            protocol = _Tls(self._loop, app, self._certificate.context, opened, server_side=True)
        try:
            await self._loop.connect_accepted_socket(lambda: protocol, handshake.connection)
            if is_tls:
                await opened
        except OSError as error:  # also of `ssl`
            logger.debug("the handshake with %s fails: %s", handshake.address, error)
            handshake.connection.close()
        finally:
            self._limits.lost(handshake)

    def _drop(self, handshake: _Handshake) -> None:
        self._loop.remove_reader(handshake.connection)
        self._silent.discard(handshake)
        self._limits.lost(handshake)
        handshake.connection.close()


class RequireTls:
    """Answers requests without TLS with an error, and passes all others on."""

    def __init__(self, app: ASGIApp, refusal: ASGIApp) -> None:
        self._app = app
        self._refusal = refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        is_plain = scope["type"] == "http" and scope["scheme"] == "http"
        await (self._refusal if is_plain else self._app)(scope, receive, send)
