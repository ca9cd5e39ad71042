"""The command `adascale-api`."""

import argparse
import ipaddress
import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import NoReturn

import uvicorn

from adascale_api.app import create_app
from adascale_api.auth import Authenticator, SharedToken, SharedTokenFile
from adascale_api.database import Database
from adascale_api.token_review import DEFAULT_CONTROLLER, TokenReviewer
from adascale_core.errors import AdaScaleError
from adascale_core.names import DEFAULT_API_PORT, ENV_TOKEN, ENV_TOKEN_FILE

DEFAULT_DATABASE = "sqlite:///adascale.db"
GRACE = 2
"""Seconds that requests under way have to end after the service was asked to leave."""
KEEP_ALIVE = 75
"""Seconds that an idle connection stays open: well over the interval of heartbeats."""


class UsageError(AdaScaleError):
    """Options that can't be followed."""

    exit_code = 2


def main() -> NoReturn:
    """Run the metrics service until it is asked to leave."""
    options = _parser().parse_args()
    logging.basicConfig(format="adascale-api: %(levelname)s: %(message)s", level=logging.WARNING)
    try:
        serve(options, os.environ)
    except AdaScaleError as error:
        print(f"adascale-api: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    sys.exit(0)


def serve(options: argparse.Namespace, environment: Mapping[str, str]) -> None:
    """Serve as `options` say.

    Raises:
        AdaScaleError: it can't be done; the message says why.
    """
    authenticator = _authenticator(options, environment)
    if options.port_file is not None:
        _remove_port_file(options.port_file)
    listener = _listen(options.host, options.port)
    with listener:
        database = Database(options.database)
        app = create_app(database, authenticator, protect_reads=options.protect_reads)
        host, port = listener.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

        def tell() -> None:
            if options.port_file is not None:
                _write_port_file(options.port_file, port)
            print(f"adascale-api: listening on {url}, database {options.database}", flush=True)

        config = uvicorn.Config(
            app,
            lifespan="on",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=GRACE,
        )
        server = _Server(config, on_listening=tell, on_leaving=app.state.service.waiting.close)
        server.run([listener])
        if server.refused is not None:
            raise server.refused


class _Server(uvicorn.Server):
    """Tells when it listens, and wakes the waiting requests when it is asked to leave."""

    def __init__(
        self, config: uvicorn.Config, on_listening: Callable[[], None], on_leaving: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._on_listening = on_listening
        self._on_leaving = on_leaving
        self.refused: AdaScaleError | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        try:
            self._on_listening()
        except AdaScaleError as error:
            # Raised again when the server has shut down in order.
            self.refused = error
            self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 (of the base class)
        # The base class would raise the signal again at the end; leaving as asked is no failure.
        self.should_exit = True
        self._on_leaving()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="adascale-api",
        description="Run the metrics service: workers post the gain of their batch size to it, and meet the "
        "controller.",
        epilog=f"Writing needs a bearer token, taken from the file that {ENV_TOKEN_FILE} names (read again "
        f"when it changes) or from {ENV_TOKEN}; with --token-review, from the cluster's service accounts.",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument(
        "--port",
        type=_port,
        default=DEFAULT_API_PORT,
        help="port to listen on; 0: any free one (default: %(default)s)",
    )
    parser.add_argument(
        "--database",
        metavar="URL",
        default=DEFAULT_DATABASE,
        help="where everything is kept (default: %(default)s)",
    )
    parser.add_argument(
        "--port-file", metavar="PATH", type=Path, help="write the port to this file once it listens"
    )
    parser.add_argument("--protect-reads", action="store_true", help="ask for the token for reading too")
    parser.add_argument(
        "--token-review",
        action="store_true",
        help="let the Kubernetes API say whose tokens are good: that of the cluster it runs in, or that "
        "KUBECONFIG names",
    )
    parser.add_argument(
        "--controller-account",
        metavar="NAMESPACE:NAME",
        default=DEFAULT_CONTROLLER,
        help="with --token-review, the operator's service account, which may do everything "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--no-auth",
        action="store_true",
        help="let everyone on this machine write, without a token; only with a loopback address",
    )
    return parser


def _port(text: str) -> int:
    port = int(text) if text.isdecimal() else -1
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"got {text}, allowed are 1 to 65535, or 0 for any free port")
    return port


def _authenticator(options: argparse.Namespace, environment: Mapping[str, str]) -> Authenticator | None:
    if options.token_review:
        return _token_reviewer(options, environment)
    if options.no_auth:
        if not _is_loopback(options.host):
            raise UsageError(
                f"--no-auth would let everyone who reaches {options.host} write: "
                "use --host 127.0.0.1, or a token"
            )
        if options.protect_reads:
            raise UsageError("--no-auth and --protect-reads contradict each other: leave one out")
        logging.getLogger(__name__).warning(
            "WITHOUT A TOKEN: every program on this machine can write to this service"
        )
        return None
    if path := environment.get(ENV_TOKEN_FILE):
        return SharedTokenFile(Path(path))
    if token := environment.get(ENV_TOKEN):
        return SharedToken(token)
    raise UsageError(
        f"there is no token to protect the service with: set {ENV_TOKEN} or {ENV_TOKEN_FILE}, for example\n"
        f"    export {ENV_TOKEN}=$(openssl rand -hex 32)\n"
        "or pass --no-auth to let every program on this machine write"
    )


def _token_reviewer(options: argparse.Namespace, environment: Mapping[str, str]) -> Authenticator:
    if options.no_auth:
        raise UsageError("--token-review and --no-auth contradict each other: leave one out")
    for name in (ENV_TOKEN_FILE, ENV_TOKEN):
        if environment.get(name):
            raise UsageError(
                f"--token-review and {name} contradict each other: unset it, or leave --token-review out"
            )
    # Only here: it takes as long to import as all the rest.
    from adascale_api.kubernetes_reviews import KubernetesReviews

    reviews = KubernetesReviews(environment)
    return TokenReviewer(reviews.review, options.controller_account, close=reviews.close)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, *_, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # `::` means every address, those of IPv4 too; by itself Python would leave these out.
        every = address[0] == "::" and socket.has_dualstack_ipv6()
        listener = socket.create_server(address[:2], family=family, backlog=2048, dualstack_ipv6=every)
        # Connections inherit it. Without, an answer waits 40 ms for the client to acknowledge its headers:
        # asyncio sets it only for sockets that name their protocol, which `create_server` does not.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as error:
        raise UsageError(
            f"can't listen on {host} port {port}: {error}; choose another --port (0: any free one) or --host"
        ) from error
    return listener


def _remove_port_file(path: Path) -> None:
    # Lest someone take the port of an earlier run for that of this one.
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"port file {path} can't be written: {error}") from error


def _write_port_file(path: Path, port: int) -> None:
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        beside.write_text(f"{port}\n")
        beside.replace(path)
    except OSError as error:
        raise UsageError(f"port file {path} can't be written: {error}") from error
