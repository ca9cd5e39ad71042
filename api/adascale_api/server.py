"""The HTTP server: its socket, its port file, and its shutdown."""

import errno
import ipaddress
import os
import resource
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from adascale_api.app import create_app, create_runs_app
from adascale_api.auth.authorization import Authorizer
from adascale_api.data.database import Database, without_password
from adascale_api.errors import TlsRequiredError
from adascale_api.http.connection_limits import ConnectionLimits
from adascale_api.http.connections import Server, limited_protocol
from adascale_api.http.tls import RequireTls
from adascale_api.renewed import Renewed
from adascale_api.routes.common import response_to
from adascale_api.routes.worker_endpoints import MetricsService
from adascale_api.service.run_services import RunServices
from adascale_api.service.service import Service, Settings
from adascale_core.errors import AdaScaleError

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


class UsageError(AdaScaleError):
    """The options can't be used."""

    exit_code = 2


ServedApp = tuple[ASGIApp, Callable[[], None], str]
"""An application, what is called when the server begins to stop, and where its data are, for the user."""
AppFactory = Callable[[ConnectionLimits], ServedApp]


def serve_jobs(database_url: str, authorizer: Authorizer | None, settings: Settings) -> AppFactory:
    """Return a function that makes the metrics service of a database, once the server listens."""

    def make(limits: ConnectionLimits) -> ServedApp:
        app = create_app(Database(database_url), authorizer, settings, connections=limits)
        service: Service = app.state.service
        data = f"database {without_password(database_url)}"
        return MetricsService(app), service.stop, data

    return make


def serve_runs(path: Path, authorizer: Authorizer | None) -> AppFactory:
    """Return a function that makes the application that shows a list of runs, once the server listens."""

    def make(limits: ConnectionLimits) -> ServedApp:
        runs = RunServices(path, authorizer, limits)
        return create_runs_app(runs), lambda: None, f"runs of {path}"

    return make


def serve(
    *,
    host: str,
    port: int,
    descriptor: int | None,
    port_file: Path | None,
    serve_app: AppFactory,
    max_connections: int,
    request_timeout: float,
    certificate: Renewed[ssl.SSLContext] | None = None,
    require_tls: bool = False,
) -> None:
    """Serve until SIGTERM or SIGINT. A listening socket `descriptor` replaces `host` and `port`."""
    temporary = None if port_file is None else _prepare_port_file(port_file)
    with _listen(host, port) if descriptor is None else _inherit(descriptor) as listener:
        # Connections inherit it. Without it, an answer waits 40 ms for the client to acknowledge its headers:
        # asyncio sets it only on sockets that name their protocol, and `create_server` names none.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        limits = ConnectionLimits(max_connections, _allow_connections(max_connections), request_timeout)
        app, stop, data = serve_app(limits)
        address, port = listener.getsockname()[:2]
        scheme = "http" if certificate is None else "https"
        url = f"{scheme}://[{address}]:{port}" if ":" in address else f"{scheme}://{address}:{port}"
        if require_tls:
            app = RequireTls(app, response_to(TlsRequiredError()))

        def announce() -> None:
            if port_file is not None and temporary is not None:
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
        server = Server(config, on_listening=announce, on_stopping=stop)
        server.run([listener])


def is_loopback(host: str) -> bool:
    """Whether only programs on this machine can connect to `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _allow_connections(wanted: int) -> int:
    """Raise the process's limit of open files as far as it may, and return how many connections fit."""
    files = wanted + OTHER_FILES
    allowed, maximum = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed < files:
        allowed = files if maximum == resource.RLIM_INFINITY else min(files, maximum)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, maximum))
    return min(wanted, max(allowed - OTHER_FILES, OTHER_FILES))


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


def _prepare_port_file(path: Path) -> Path:
    """Return a file that will replace the port file. A reader must not take the port of an earlier run."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.unlink(missing_ok=True)
        temporary.touch()
        temporary.unlink()
    except OSError as error:
        raise UsageError(f"port file {path} can't be written: {error}") from error
    return temporary
