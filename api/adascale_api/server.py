"""The HTTP server: its socket, its port file, and its shutdown."""

import errno
import ipaddress
import os
import resource
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from adascale_api.http.connection_limits import ConnectionLimits
from adascale_api.http.connections import Server, limited_protocol
from adascale_api.renewed import Renewed
from adascale_core.errors import UsageError

BACKLOG = 16384
"""Connections that may wait to be accepted, if `net.core.somaxconn` allows as many: after a restart, all
agents connect at the same time."""
SHUTDOWN_GRACE = 2
"""Seconds that open requests may take to finish after the service begins to stop."""
KEEP_ALIVE = 75
"""Seconds that an idle connection stays open, longer than the interval of heartbeats."""


SEND_BUFFER = 64 * 1024
"""Bytes of an answer that the kernel keeps for a client that does not read. By default these are megabytes,
which count as memory of the service in a container."""
OTHER_FILES = 128
"""Files that the process may open besides its connections."""


def open_listener(host: str, port: int, descriptor: int | None) -> socket.socket:
    """Listen on an address, or return the listening socket `descriptor` that replaces it."""
    listener = _listen(host, port) if descriptor is None else _inherit(descriptor)
    # Connections inherit it. Without it, an answer waits 40 ms for the client to acknowledge its headers:
    # asyncio sets it only on sockets that name their protocol, and `create_server` names none.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    return listener


def serve(
    listener: socket.socket,
    app: ASGIApp,
    data: str,
    *,
    limits: ConnectionLimits,
    on_stopping: Callable[[], None],
    port_file: Path | None,
    certificate: Renewed[ssl.SSLContext] | None,
) -> None:
    """Serve an application until SIGTERM or SIGINT; `data` says where its data are, for the user."""
    address, port = listener.getsockname()[:2]
    scheme = "http" if certificate is None else "https"
    url = f"{scheme}://[{address}]:{port}" if ":" in address else f"{scheme}://{address}:{port}"

    def announce() -> None:
        if port_file is not None:
            temporary = _temporary(port_file)
            temporary.write_text(f"{port}\n")
            temporary.replace(port_file)
        print(f"adascale-api: listening on {url}, {data}", flush=True)

    config = uvicorn.Config(
        app,
        loop="uvloop",
        backlog=BACKLOG,
        proxy_headers=False,
        http=limited_protocol(limits, certificate),
        lifespan="on",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=SHUTDOWN_GRACE,
    )
    server = Server(config, on_listening=announce, on_stopping=on_stopping)
    server.run([listener])


def is_loopback(host: str) -> bool:
    """Whether only programs on this machine can connect to `host`."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def open_limits(wanted: int, request_timeout: float) -> ConnectionLimits:
    """Return the limits of connections, after raising that of the process's open files as far as it may."""
    files = wanted + OTHER_FILES
    allowed, maximum = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed < files:
        allowed = files if maximum == resource.RLIM_INFINITY else min(files, maximum)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, maximum))
    return ConnectionLimits(wanted, min(wanted, max(allowed - OTHER_FILES, OTHER_FILES)), request_timeout)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, *_, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # `::` means all addresses, of IPv4 too; by default Python leaves these out.
        dual_stack = address[0] == "::" and socket.has_dualstack_ipv6()
        return socket.create_server(address[:2], family=family, backlog=BACKLOG, dualstack_ipv6=dual_stack)
    except OSError as error:
        if host == "::" and error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
            # A kernel without IPv6. All other addresses are meant too.
            return _listen("0.0.0.0", port)
        raise UsageError(
            f"can't listen on {host} port {port}: {error}; use another --port (0 for any free port) or --host"
        ) from error


def _inherit(descriptor: int) -> socket.socket:
    try:
        listener = socket.socket(fileno=descriptor)
        listening = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except (OSError, ValueError) as error:
        raise UsageError(f"file descriptor {descriptor} of --fd is no socket: {error}") from error
    if not listening or listener.family not in (socket.AF_INET, socket.AF_INET6):
        listener.close()
        raise UsageError(f"file descriptor {descriptor} of --fd is no listening TCP socket")
    return listener


def remove_port_file(path: Path) -> None:
    """Remove the port file of an earlier run, and refuse one that can't be written."""
    try:
        path.unlink(missing_ok=True)
        _temporary(path).touch()
        _temporary(path).unlink()
    except OSError as error:
        raise UsageError(f"port file {path} can't be written: {error}") from error


def _temporary(port_file: Path) -> Path:
    return port_file.with_name(f"{port_file.name}.{os.getpid()}")
