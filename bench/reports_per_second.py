"""Measures how many reports per second the metrics service stores, posted one at a time or in lists.

    python bench/reports_per_second.py --clients 16 --seconds 5

Beside it, in turn, a bare FastAPI application with the same server, event loop and HTTP parser parses the
same reports and keeps nothing.

The service runs as for a user: in its own process, with a token, on an SQLite file. The clients run on the
same machine, in a few processes with several connections each. Every counted report was answered with 2xx, so
it is on disk; at the end the count is compared with the service's. The processor time of the service per
request (on systems with /proc) does not depend on the load of the machine; its inverse is the throughput of
the service on a core of its own.
"""

import argparse
import http.client
import json
import multiprocessing
import os
import secrets
import socket
import ssl
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from metrics_service import metrics_service, running

from adascale_core.messages.reports import GainReport

PROCESSES = 2
REPORT = GainReport(
    generation=1, step=0, progress=3110.5, epoch=8, replicas=2, local_bsz=16, accumulation=1, scale=8.0,
    gain=3.1, grad_sqr=0.0123456789, grad_var=0.0456789, step_time=0.0123, time=1760000000.5, loss=0.512,
)  # fmt: skip


@dataclass(frozen=True)
class Result:
    requests: int
    reports: int
    seconds: float
    latencies: list[float]
    processor_time: float = 0.0

    def quantile(self, fraction: float) -> float:
        ordered = sorted(self.latencies)
        return ordered[min(int(fraction * len(ordered)), len(ordered) - 1)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=16, help="connections (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=5.0, help="per measurement (default: %(default)s)")
    parser.add_argument(
        "--lists", type=int, nargs="*", default=[1, 10, 100], help="reports per request (default: 1 10 100)"
    )
    parser.add_argument("--rounds", type=int, default=1, help="alternations (default: %(default)s)")
    options = parser.parse_args()
    print(f"{options.clients} clients, {os.cpu_count()} cores, Python {sys.version.split()[0]}")
    print(
        f"{'reports/request':>15} {'':>8} {'requests/s':>11} {'reports/s':>10}"
        f" {'median ms':>10} {'99% ms':>8} {'service ms/request':>19}"
    )
    for size in options.lists:
        ratios = []
        for _ in range(options.rounds):
            rates = {}
            for name, measure in (("bare", measure_bare), ("service", measure_service)):
                result = measure(options.clients, options.seconds, size)
                rates[name] = result.requests / result.seconds
                print(
                    f"{size:>15} {name:>8} {rates[name]:>11.0f} {result.reports / result.seconds:>10.0f}"
                    f" {result.quantile(0.5) * 1e3:>10.1f} {result.quantile(0.99) * 1e3:>8.1f}"
                    f" {result.processor_time / result.requests * 1e3:>19.2f}",
                    flush=True,
                )
            ratios.append(rates["service"] / rates["bare"])
        print(
            f"{size:>15} service/bare: {statistics.median(ratios):.2f} (median of {len(ratios)})", flush=True
        )


def measure_bare(clients: int, seconds: float, size: int) -> Result:
    program = Path(__file__).with_name("bare_service.py")
    with running([sys.executable, str(program)], {}) as service:
        before = service.processor_time
        result = load(service.port, "none", clients, seconds, size)
        return replace(result, processor_time=service.processor_time - before)


def measure_service(clients: int, seconds: float, size: int) -> Result:
    token = secrets.token_hex(16)
    with (
        tempfile.TemporaryDirectory() as folder,
        metrics_service(f"sqlite:///{folder}/bench.db", token) as service,
    ):
        before = service.processor_time
        result = load(service.port, token, clients, seconds, size)
        result = replace(result, processor_time=service.processor_time - before)
        stored = sum(total(service.port, f"bench-{client}") for client in range(clients))
        if stored != result.reports:
            sys.exit(f"{result.reports} reports were answered with 2xx, but {stored} are stored")
        return result


def load(port: int, token: str, clients: int, seconds: float, size: int, ca: Path | None = None) -> Result:
    """Post reports on one connection of each client, with TLS if the service's authority is given."""
    processes = min(PROCESSES, clients)
    context = multiprocessing.get_context("spawn")
    ready = context.Barrier(processes + 1)
    answers: Any = context.Queue()
    workers = [
        context.Process(
            target=run_clients,
            args=(port, token, range(index, clients, processes), seconds, size, ca, ready, answers),
        )
        for index in range(processes)
    ]
    for worker in workers:
        worker.start()
    ready.wait()
    results: list[Result] = [answers.get() for _ in workers]
    for worker in workers:
        worker.join()
    return Result(
        sum(result.requests for result in results),
        sum(result.reports for result in results),
        max(result.seconds for result in results),
        [latency for result in results for latency in result.latencies],
    )


def run_clients(
    port: int,
    token: str,
    clients: range,
    seconds: float,
    size: int,
    ca: Path | None,
    ready: Any,
    answers: Any,
) -> None:
    done: list[Result] = []
    threads = [
        threading.Thread(target=lambda c=client: done.append(post(port, token, c, seconds, size, ca)))
        for client in clients
    ]
    ready.wait()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    answers.put(
        Result(
            sum(result.requests for result in done),
            sum(result.reports for result in done),
            max(result.seconds for result in done),
            [latency for result in done for latency in result.latencies],
        )
    )


def post(port: int, token: str, client: int, seconds: float, size: int, ca: Path | None) -> Result:
    """Post for `seconds`. Writes HTTP by hand, so that the clients use little processor time."""
    head = (
        f"POST /jobs/bench-{client}/gain HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer {token}\r\n"
        "Content-Type: application/json\r\nContent-Length: "
    )
    before, after = json.dumps(REPORT.to_json()).split(f'"step": {REPORT.step}')
    expected = f'"stored":{size},'.encode()
    latencies = []
    step = 0
    with connect(port, ca) as connection:
        started = time.perf_counter()
        while (now := time.perf_counter()) < started + seconds:
            body = ",".join(f'{before}"step": {step + index}{after}' for index in range(size))
            body = f"[{body}]" if size > 1 else body
            connection.sendall(f"{head}{len(body)}\r\n\r\n{body}".encode())
            answer = b""
            while not is_complete(answer):
                answer += connection.recv(65536)
            if not answer.startswith(b"HTTP/1.1 200 ") or expected not in answer:
                sys.exit(f"unexpected answer: {answer.decode()}")
            latencies.append(time.perf_counter() - now)
            step += size
        return Result(len(latencies), step, time.perf_counter() - started, latencies)


def connect(port: int, ca: Path | None) -> socket.socket:
    """Return an open connection, with TLS if the service's authority is given."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=30)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if ca is None:
        return connection
    return ssl.create_default_context(cafile=ca).wrap_socket(connection, server_hostname="127.0.0.1")


def is_complete(answer: bytes) -> bool:
    head, separator, body = answer.partition(b"\r\n\r\n")
    if not separator:
        return False
    length = head.lower().partition(b"content-length: ")[2].partition(b"\r")[0]
    return len(body) == int(length)


def total(port: int, job: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", f"/jobs/{job}/gain/history?points=1")
    count: int = json.loads(connection.getresponse().read())["total"]
    return count


if __name__ == "__main__":
    main()
