"""The command `adascale-api`."""

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from starlette.types import ASGIApp

from adascale_api.app import create_app, create_runs_app
from adascale_api.auth.authorization import Authorizer, shared_token
from adascale_api.auth.service_accounts import DEFAULT_CONTROLLER, ServiceAccountAuthorizer
from adascale_api.bodies import MAX_INTEGER
from adascale_api.data.database import Database, without_password
from adascale_api.data.store.reports import Retention
from adascale_api.errors import TlsRequiredError
from adascale_api.http.connection_limits import MAX_CONNECTIONS, REQUEST_TIMEOUT
from adascale_api.http.tls import MAX_CONNECTIONS as MAX_TLS_CONNECTIONS
from adascale_api.http.tls import RequireTls, server_certificate
from adascale_api.routes.common import response_to
from adascale_api.routes.workers import MetricsService
from adascale_api.server import is_loopback, open_limits, open_listener, remove_port_file, serve
from adascale_api.service.run_services import RunServices
from adascale_api.service.service import Settings
from adascale_core.errors import AdaScaleError, UsageError, requires_extra
from adascale_core.names import (
    DEFAULT_API_PORT,
    ENV_OTLP_ENDPOINT,
    ENV_READ_TOKEN,
    ENV_READ_TOKEN_FILE,
    ENV_TOKEN,
    ENV_TOKEN_FILE,
)

ENV_DATABASE = "ADASCALE_DATABASE"
"""The URL of the database. A password in it is then in no list of processes."""
DEFAULT_DATABASE = "sqlite:///adascale.db"
MAX_RECORDS = 10
"""Log records of one place in the source in `INTERVAL`."""
INTERVAL = 60.0
"""Seconds for which log records are counted."""


def main() -> NoReturn:
    """Run the metrics service until SIGTERM or SIGINT."""
    logging.basicConfig(format="adascale-api: %(levelname)s: %(message)s", level=logging.WARNING)
    for handler in logging.getLogger().handlers:
        handler.addFilter(LogLimit())
    try:
        run(sys.argv[1:], os.environ)
    except AdaScaleError as error:
        print(f"adascale-api: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    sys.exit(0)


def run(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run the metrics service until SIGTERM or SIGINT."""
    options = _parser().parse_args(arguments)
    authorizer = _authorizer(options, environment)
    if authorizer is not None:
        authorizer = shared_token(environment, ENV_READ_TOKEN, ENV_READ_TOKEN_FILE, authorizer) or authorizer
    if options.require_tls and options.tls_cert is None:
        raise UsageError("--require-tls needs a certificate: add --tls-cert and --tls-key")
    if (options.tls_cert is None) != (options.tls_key is None):
        given, missing = ("--tls-cert", "--tls-key") if options.tls_cert else ("--tls-key", "--tls-cert")
        raise UsageError(f"{given} is given but {missing} is not: give both, or neither")
    certificate = server_certificate(options.tls_cert, options.tls_key) if options.tls_cert else None
    if options.port_file is not None:
        remove_port_file(options.port_file)
    most = options.max_connections or (MAX_TLS_CONNECTIONS if certificate else MAX_CONNECTIONS)
    limits = open_limits(most, options.request_timeout)
    # First, so that clients wait while the database is opened.
    with open_listener(options.host, options.port, options.fd) as listener:
        stop: Callable[[], None] = lambda: None  # noqa: E731
        app: ASGIApp
        if options.runs is not None:
            app = create_runs_app(RunServices(options.runs, authorizer, limits))
            data = f"runs of {options.runs}"
        else:
            url = options.database or environment.get(ENV_DATABASE) or DEFAULT_DATABASE
            settings = Settings(
                protect_reads=options.protect_reads,
                reports=Retention(options.keep_newest_reports, options.keep_earlier_reports),
                finished_days=options.keep_finished_days,
                unfinished_days=options.keep_unfinished_days,
                logs=options.logs,
            )
            database = Database(url)
            api = create_app(database, authorizer, settings, connections=limits)
            if environment.get(ENV_OTLP_ENDPOINT):
                with requires_extra(ENV_OTLP_ENDPOINT, "opentelemetry"):
                    from adascale_api.service.opentelemetry import OpenTelemetryExport
                api.state.service.export = OpenTelemetryExport(database, time.time)
            app, stop = MetricsService(api), api.state.service.stop
            data = f"database {without_password(url)}"
        if options.require_tls:
            app = RequireTls(app, response_to(TlsRequiredError()))
        serve(
            listener,
            app,
            data,
            limits=limits,
            on_stopping=stop,
            port_file=options.port_file,
            certificate=certificate,
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="adascale-api",
        description="Run the metrics service. Workers post gain reports to it and register; the controller "
        "declares jobs and sets replica counts.",
        epilog=f"Writing needs a bearer token: the token in the file that {ENV_TOKEN_FILE} names (read again "
        f"when it changes) or in {ENV_TOKEN}; with --token-review, the token of a service account. "
        "Reading logs and addresses needs one too, or the token in "
        f"{ENV_READ_TOKEN_FILE} or {ENV_READ_TOKEN}. With {ENV_OTLP_ENDPOINT}, spans and counters are sent "
        "to that collector of OpenTelemetry.",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument(
        "--port",
        type=partial(_integer, least=0, most=65535),
        default=DEFAULT_API_PORT,
        help="port to listen on; 0 for any free port (default: %(default)s)",
    )
    parser.add_argument(
        "--fd",
        metavar="NUMBER",
        type=int,
        help="listen on the socket of this inherited file descriptor, instead of --host and --port",
    )
    data = parser.add_mutually_exclusive_group()
    data.add_argument(
        "--database",
        metavar="URL",
        help="URL of the database, sqlite:///PATH or postgresql://USER:PASSWORD@HOST/NAME "
        f"(default: the variable {ENV_DATABASE}, or else {DEFAULT_DATABASE})",
    )
    parser.add_argument(
        "--port-file", metavar="PATH", type=Path, help="write the port to this file once the service listens"
    )
    parser.add_argument(
        "--logs",
        metavar="DIR",
        type=Path,
        help="the folder with the output of replicas on this machine, `replica-N.log`, which readers with a "
        "token may read; set by `adascale run`",
    )
    data.add_argument(
        "--runs",
        metavar="FILE",
        type=Path,
        help="show the runs in this list and change nothing, instead of using a database; set by "
        "`adascale ui`",
    )
    parser.add_argument(
        "--tls-cert",
        metavar="FILE",
        type=Path,
        help="serve with TLS and the certificate in this file, in PEM, followed by those of intermediate "
        "authorities; read again when it changes. Requests without TLS are answered at the same port",
    )
    parser.add_argument("--tls-key", metavar="FILE", type=Path, help="the key of that certificate, in PEM")
    parser.add_argument("--require-tls", action="store_true", help="refuse requests without TLS")
    parser.add_argument("--protect-reads", action="store_true", help="require a token for reading too")
    tokens = parser.add_mutually_exclusive_group()
    tokens.add_argument(
        "--token-review",
        action="store_true",
        help="accept the tokens of service accounts, verified by the Kubernetes API of this cluster, or of "
        "the cluster that KUBECONFIG names",
    )
    parser.add_argument(
        "--controller-account",
        metavar="NAMESPACE:NAME",
        default=DEFAULT_CONTROLLER,
        help="with --token-review, the operator's service account, which may control all jobs "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--max-connections",
        metavar="NUMBER",
        type=_integer,
        help="open connections, where one whose request waits counts one and a half times; the limit of open "
        f"files must allow as many (default: {MAX_CONNECTIONS}, with TLS {MAX_TLS_CONNECTIONS})",
    )
    parser.add_argument(
        "--request-timeout",
        metavar="SECONDS",
        type=_integer,
        default=REQUEST_TIMEOUT,
        help="seconds for a request to arrive, until its connection is closed (default: %(default)g)",
    )
    for option, default, what in (
        ("--keep-newest-reports", Retention.newest, "newest reports of each job that are all kept"),
        (
            "--keep-earlier-reports",
            Retention.earlier,
            "earlier reports of each job that are kept at least, evenly spread; at most twice as many",
        ),
        (
            "--keep-finished-days",
            Settings.finished_days,
            "days after which a finished job is deleted, from its last change and report",
        ),
        ("--keep-unfinished-days", Settings.unfinished_days, "as above, for any other job"),
    ):
        parser.add_argument(
            option,
            metavar="DAYS" if option.endswith("days") else "NUMBER",
            type=_integer,
            default=default,
            help=f"{what} (default: %(default)s)",
        )
    tokens.add_argument(
        "--no-auth",
        action="store_true",
        help="allow every request without a token; only with a loopback address",
    )
    return parser


def _integer(text: str, least: int = 1, most: int = MAX_INTEGER) -> int:
    number = int(text) if text.isdecimal() and len(text) <= len(str(most)) else -1
    if not least <= number <= most:
        raise argparse.ArgumentTypeError(f"got {text}, expected an integer from {least} to {most}")
    return number


def _authorizer(options: argparse.Namespace, environment: Mapping[str, str]) -> Authorizer | None:
    if options.token_review:
        for name in (ENV_TOKEN_FILE, ENV_TOKEN):
            if environment.get(name):
                raise UsageError(
                    f"--token-review and {name} contradict each other: unset {name}, or remove --token-review"
                )
        # Imported here because importing the Kubernetes client takes as long as all other imports together.
        with requires_extra("--token-review", "kubernetes"):
            from adascale_api.auth.kubernetes_token_review import KubernetesTokenReviewer

        return ServiceAccountAuthorizer(KubernetesTokenReviewer(environment), options.controller_account)
    if options.no_auth:
        if not is_loopback(options.host):
            raise UsageError(
                f"--no-auth would allow every client that can reach {options.host} to write: "
                "use --host 127.0.0.1, or a token"
            )
        if options.protect_reads:
            raise UsageError("--no-auth and --protect-reads contradict each other: remove one of them")
        logging.getLogger(__name__).warning(
            "NO AUTHENTICATION: every program on this machine can write to this service"
        )
        return None
    if token := shared_token(environment, ENV_TOKEN, ENV_TOKEN_FILE):
        return token
    raise UsageError(
        f"no token is set to protect the service: set {ENV_TOKEN} or {ENV_TOKEN_FILE}, for example\n"
        f"    export {ENV_TOKEN}=$(openssl rand -hex 32)\n"
        "or use --no-auth to allow every program on this machine to write"
    )


class LogLimit(logging.Filter):
    """Drops the records of a place in the source after `MAX_RECORDS` in `INTERVAL`, and counts them.

    What a client can cause again and again must not fill the log.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._counts: dict[tuple[str, int], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is logged; the first one of an interval says how many were dropped."""
        place = (record.pathname, record.lineno)
        now = self._clock()
        since, count = self._counts.get(place, (now, 0))
        if now - since >= INTERVAL:
            if count > MAX_RECORDS:
                record.msg = f"{record.getMessage()} ({count - MAX_RECORDS} more before were not logged)"
                record.args = ()
            since, count = now, 0
        self._counts[place] = (since, count + 1)
        return count < MAX_RECORDS
