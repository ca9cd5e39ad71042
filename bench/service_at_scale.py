"""Measures the metrics service with many jobs: its reads, and its processor time for all agents.

    python bench/service_at_scale.py --jobs 5000
    python bench/service_at_scale.py --jobs 2000 --replicas 4 --agents

The first form stores the jobs, each with a declaration, four replicas and reports, and times reads. With
`--agents`, the agents and trainers on the same machine are simulated: every agent sends heartbeats on one
connection and waits for changes on another, and the trainer of rank 0 posts its reports in lists on a third,
at the intervals that the service asks for with so many jobs. The processor time of the service per second
shows which part of a core it takes; `--kinds` measures the requests of one kind alone.
"""

import argparse
import asyncio
import json
import random
import secrets
import statistics
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import uvloop
from metrics_service import RunningService, metrics_service
from reports_per_second import REPORT

from adascale_api.data.database import Database
from adascale_api.data.store import jobs, reports
from adascale_core.messages.allocation import Allocation
from adascale_core.messages.job_spec import JobSpec
from adascale_core.messages.registration import (
    REPORTS_PER_POST,
    Registration,
    ReplicaState,
    change_wait,
    heartbeat_interval,
    post_interval,
)
from adascale_worker.agent.heartbeat import CHANGE_TIMEOUT

KINDS = ("heartbeats", "reports", "waits")
"""The requests of agents and trainers."""
CONNECTING = 15.0
"""Seconds over which the agents of the benchmark connect."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=5000, help="default: %(default)s")
    parser.add_argument("--replicas", type=int, default=4, help="of each job (default: %(default)s)")
    parser.add_argument("--agents", action="store_true", help="simulate the agents")
    parser.add_argument("--seconds", type=float, default=20.0, help="with agents (default: %(default)s)")
    parser.add_argument("--heartbeat", type=float, help="seconds between two (default: as the service asks)")
    parser.add_argument(
        "--report", type=float, help="seconds between two lists of reports (default: as the service asks)"
    )
    parser.add_argument(
        "--kinds", nargs="+", choices=KINDS, default=KINDS, help="requests of the agents (default: all)"
    )
    options = parser.parse_args()
    options.heartbeat = options.heartbeat or heartbeat_interval(options.jobs * options.replicas)
    options.report = options.report or post_interval(options.jobs)
    token = secrets.token_hex(16)
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/bench.db"
        asyncio.run(store_jobs(url, options.jobs, options.replicas))
        with metrics_service(url, token) as service:
            if options.agents:
                simulate(service, token, options)
            else:
                read(service.port, token)
            print(f"memory of the service, at most: {service.peak_memory:.0f} MiB")


async def store_jobs(url: str, count: int, size: int) -> None:
    database = Database(url)
    now = time.time()
    for number in range(count):
        job_id = f"bench.job-{number}"

        def store(transaction: object, job_id: str = job_id) -> None:
            jobs.declare(transaction, job_id, JobSpec(32, max_replicas=8), now)  # type: ignore[arg-type]
            jobs.allocate(transaction, job_id, Allocation(1, size), now)  # type: ignore[arg-type]
            for registration in registrations(size):
                jobs.register(transaction, job_id, registration, now)  # type: ignore[arg-type]
            new = [replace(REPORT, step=step, local_bsz=8 + step % 3) for step in range(20)]
            reports.post(transaction, job_id, new, now)  # type: ignore[arg-type]

        await database.write(store)
    await database.close()


def registrations(size: int) -> list[Registration]:
    return [
        Registration(rank, f"agent-{rank}", ReplicaState.WAITING, 0, f"10.0.0.{rank}", 40000 + rank)
        for rank in range(size)
    ]


def read(port: int, token: str) -> None:
    for path in ("/metrics", "/jobs", "/jobs?limit=1000", "/jobs/bench.job-1"):
        for headers in ({"Authorization": f"Bearer {token}"}, {}):
            times, size = [], 0
            for _ in range(20):
                request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers)
                started = time.perf_counter()
                with urllib.request.urlopen(request) as answer:
                    size = len(answer.read())
                times.append(time.perf_counter() - started)
            print(
                f"{path:>20} {'with a token' if headers else 'without':>12} "
                f"{statistics.median(times) * 1e3:7.1f} ms (min {min(times) * 1e3:.1f}), {size} bytes"
            )


def simulate(service: RunningService, token: str, options: argparse.Namespace) -> None:
    load = Load(
        service.port, token, options.jobs, options.replicas, options.heartbeat, options.report, options.kinds
    )
    print(f"memory of the service before the agents: {service.peak_memory:.0f} MiB")
    used, cpu = uvloop.run(load.measure(service, options.seconds))
    requests = sum(load.counts.values())
    for name, count in load.counts.items():
        print(f"{name}: {count / used:.0f} per second")
    print(f"open connections: {load.open}, requests that failed: {dict(load.errors) or 0}")
    if load.latencies:
        ordered = sorted(load.latencies)
        slow = ordered[int(len(ordered) * 0.99)]
        print(f"answers: median {ordered[len(ordered) // 2] * 1e3:.1f} ms, 99% {slow * 1e3:.1f}")
    each = cpu / max(requests, 1) * 1e3
    print(f"processor time of the service: {cpu / used:.3f} cores, {each:.2f} ms per request")


@dataclass
class Load:
    """The agents of all jobs."""

    port: int
    token: str
    jobs: int
    replicas: int
    heartbeat: float
    report: float
    kinds: list[str]

    def __post_init__(self) -> None:
        self.counts = dict.fromkeys(self.kinds, 0)
        self.errors: Counter[str] = Counter()
        self.connections = self.open = 0
        self.latencies: list[float] = []

    async def measure(self, service: RunningService, seconds: float) -> tuple[float, float]:
        """Return how long it measured, and the processor time of the service meanwhile, in seconds."""
        tasks = []
        for number in range(self.jobs):
            path = f"/jobs/bench.job-{number}"
            for registration in registrations(self.replicas):
                if "heartbeats" in self.kinds:
                    tasks.append(asyncio.create_task(self.send_heartbeats(path, registration)))
                if "waits" in self.kinds:
                    tasks.append(asyncio.create_task(self.wait_for_changes(path)))
            if "reports" in self.kinds:
                tasks.append(asyncio.create_task(self.post_reports(path)))
        # Past the start, when all agents have registered with the new service.
        await asyncio.sleep(CONNECTING + max(self.heartbeat, self.report) + 2)
        self.counts = dict.fromkeys(self.counts, 0)
        self.errors.clear()
        self.latencies.clear()
        started, before = time.monotonic(), service.processor_time
        await asyncio.sleep(seconds)
        used, cpu = time.monotonic() - started, service.processor_time - before
        self.open = self.connections
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        return used, cpu

    async def send_heartbeats(self, path: str, registration: Registration) -> None:
        body = registration.to_json()

        async def send(connection: Connection) -> None:
            await connection.send("PUT", f"{path}/replicas/{registration.replica}", body)

        await self.repeat("heartbeats", self.heartbeat, send)

    async def post_reports(self, path: str) -> None:
        step = 100

        async def send(connection: Connection) -> None:
            nonlocal step
            body = [replace(REPORT, step=step + number).to_json() for number in range(REPORTS_PER_POST)]
            step += REPORTS_PER_POST
            await connection.send("POST", f"{path}/gain", body)

        await self.repeat("reports", self.report, send)

    async def wait_for_changes(self, path: str) -> None:
        version = 0
        wait = change_wait(self.heartbeat, CHANGE_TIMEOUT)

        async def send(connection: Connection) -> None:
            nonlocal version
            answer = await connection.send("GET", f"{path}/allocation?version={version}&wait={wait}", None)
            version = json.loads(answer)["version"]

        await self.repeat("waits", 0.0, send)

    async def repeat(
        self, kind: str, interval: float, send: Callable[["Connection"], Awaitable[None]]
    ) -> None:
        """Send on a connection, a request per `interval`, and connect again after an error."""
        await asyncio.sleep(random.random() * CONNECTING)
        while True:
            try:
                async with Connection(self) as connection:
                    # Not all at the same time, as they all begin together here.
                    await send(connection)
                    await asyncio.sleep(random.random() * interval)
                    while True:
                        started = time.monotonic()
                        await send(connection)
                        self.counts[kind] += 1
                        if interval:
                            self.latencies.append(time.monotonic() - started)
                        await asyncio.sleep(max(started + interval - time.monotonic(), 0))
            except (OSError, asyncio.IncompleteReadError) as error:
                self.errors[f"{kind}: {type(error).__name__}"] += 1
                await asyncio.sleep(1)


class Connection:
    """A connection to the service, kept open. Writes HTTP by hand, to use little processor time."""

    def __init__(self, load: Load) -> None:
        self._load = load

    async def __aenter__(self) -> "Connection":
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._load.port)
        self._load.connections += 1
        return self

    async def __aexit__(self, *_: object) -> None:
        self._load.connections -= 1
        self._writer.close()

    async def send(self, method: str, path: str, body: object) -> bytes:
        text = "" if body is None else json.dumps(body)
        self._writer.write(
            f"{method} {path} HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer {self._load.token}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode()
        )
        head = await self._reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
        answer = await self._reader.readexactly(length)
        if not head.startswith(b"HTTP/1.1 200"):
            self._load.errors[f"{method} {head[9:12].decode()}: {answer[:80].decode()}"] += 1
        return answer


if __name__ == "__main__":
    main()
