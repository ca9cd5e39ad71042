"""Measures what TLS costs the metrics service: reports on open connections, new connections, and memory.

    python bench/tls.py --rounds 5

Each round starts a service with TLS and one without, one after the other. The processor time of the
service does not depend on the load of the machine; rates and latencies do, so compare the ratios.
"""

import argparse
import os
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from metrics_service import RunningService, metrics_service
from reports_per_second import connect, is_complete, load

from adascale_controller.operator.runtime.certificate_keeper import issue_server_certificate, make_authority


@dataclass(frozen=True)
class Costs:
    """What one service needs.

    Args:
        rate: reports per second on open connections.
        latency: of such a report, the median in milliseconds.
        per_report, per_connection: processor time of the service, in milliseconds.
        memory: of the service, per open connection, in KiB.
    """

    rate: float
    latency: float
    per_report: float
    per_connection: float
    memory: float


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="alternations (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=16, help="connections (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=4.0, help="per measurement (default: %(default)s)")
    parser.add_argument("--opened", type=int, default=500, help="new connections (default: %(default)s)")
    options = parser.parse_args()
    print(f"{options.clients} clients, {os.cpu_count()} cores, Python {sys.version.split()[0]}")
    print(f"{'':>6} {'reports/s':>10} {'median ms':>10} {'ms/report':>10} {'ms/connection':>14} {'KiB':>8}")
    found: dict[bool, list[Costs]] = {False: [], True: []}
    for _ in range(options.rounds):
        for has_tls in (False, True):
            costs = measure(options.clients, options.seconds, options.opened, has_tls=has_tls)
            found[has_tls].append(costs)
            print(
                f"{'TLS' if has_tls else 'plain':>6} {costs.rate:>10.0f} {costs.latency:>10.1f}"
                f" {costs.per_report:>10.3f} {costs.per_connection:>14.3f} {costs.memory:>8.1f}",
                flush=True,
            )
    for field in ("rate", "latency", "per_report", "per_connection", "memory"):
        ratios = [
            getattr(tls, field) / getattr(plain, field)
            for plain, tls in zip(found[False], found[True], strict=True)
        ]
        print(f"{field}, TLS/plain: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


def measure(clients: int, seconds: float, opened: int, *, has_tls: bool) -> Costs:
    token = secrets.token_hex(16)
    with (
        tempfile.TemporaryDirectory() as folder,
        certificate(Path(folder), has_tls=has_tls) as (ca, options),
        metrics_service(f"sqlite:///{folder}/bench.db", token, *options) as service,
    ):
        begun = service.processor_time
        posted = load(service.port, token, clients, seconds, 1, ca)
        used = service.processor_time - begun
        per_connection, memory = open_connections(service, opened, ca)
        return Costs(
            posted.reports / posted.seconds,
            posted.quantile(0.5) * 1e3,
            used / posted.reports * 1e3,
            per_connection,
            memory,
        )


@contextmanager
def certificate(folder: Path, *, has_tls: bool) -> Iterator[tuple[Path | None, list[str]]]:
    """Yield the file of the authority, and the options of the service."""
    if not has_tls:
        yield None, []
        return
    now = datetime.now(UTC)
    authority = make_authority(now)
    pair = issue_server_certificate(authority, ["127.0.0.1"], now)
    contents = {"ca.crt": authority.certificate, "tls.crt": pair.certificate, "tls.key": pair.key}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    yield folder / "ca.crt", ["--tls-cert", str(folder / "tls.crt"), "--tls-key", str(folder / "tls.key")]


def open_connections(service: RunningService, count: int, ca: Path | None) -> tuple[float, float]:
    """Return the processor time and the memory of a connection that makes a request, and then stays open."""
    before, begun = service.memory, service.processor_time
    with ExitStack() as stack:
        for _ in range(count):
            connection = stack.enter_context(connect(service.port, ca))
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: bench\r\n\r\n")
            answer = b""
            while not is_complete(answer):
                answer += connection.recv(65536)
        time.sleep(0.2)
        used = service.processor_time - begun
        return used / count * 1e3, (service.memory - before) / count * 1024


if __name__ == "__main__":
    main()
