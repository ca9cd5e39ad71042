"""Measures the metrics service with many jobs: its reads, and its processor time for all agents.

    python bench/service_at_scale.py --jobs 5000
    python bench/service_at_scale.py --jobs 2000 --replicas 4 --agents

The first form stores the jobs, each with a declaration, four replicas and reports, and times reads. With
`--agents`, simulated agents on the same machine hold a connection each: every replica sends heartbeats, and
rank 0 of each job posts its reports in lists, at the intervals that the options set. The processor time of
the service per second shows which part of a core it takes.
"""

import argparse
import asyncio
import json
import os
import random
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

import uvloop
from reports_per_second import REPORT, processor_time, wait_for_port

from adascale_api.database import Database
from adascale_api.store import jobs, replicas, reports
from adascale_core.messages import Allocation, JobSpec, Registration, ReplicaState
from adascale_core.names import ENV_TOKEN, HEARTBEAT_INTERVAL, REPORT_INTERVAL
from adascale_core.pacing import REPORTS_PER_POST


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=5000, help="default: %(default)s")
    parser.add_argument("--replicas", type=int, default=4, help="of each job (default: %(default)s)")
    parser.add_argument("--agents", action="store_true", help="simulate the agents")
    parser.add_argument("--seconds", type=float, default=20.0, help="with agents (default: %(default)s)")
    parser.add_argument("--heartbeat", type=float, default=HEARTBEAT_INTERVAL, help="seconds between two")
    parser.add_argument("--report", type=float, default=2.0, help="seconds between two lists of reports")
    options = parser.parse_args()
    token = secrets.token_hex(16)
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/bench.db"
        asyncio.run(store_jobs(url, options.jobs, options.replicas))
        port_file = Path(folder) / "port"
        command = [sys.executable, "-m", "adascale_api", "--port", "0", "--port-file", str(port_file)]
        service = subprocess.Popen(
            [*command, "--database", url], env={**os.environ, ENV_TOKEN: token}, stdout=subprocess.DEVNULL
        )
        try:
            port = wait_for_port(service, port_file)
            if options.agents:
                simulate(service.pid, port, token, options)
            else:
                read(port, token)
            print(f"memory of the service: {memory(service.pid):.0f} MiB")
        finally:
            service.terminate()
            service.wait()


async def store_jobs(url: str, count: int, size: int) -> None:
    database = Database(url)
    now = time.time()
    for number in range(count):
        job_id = f"bench.job-{number}"

        def store(transaction: object, job_id: str = job_id) -> None:
            jobs.declare(transaction, job_id, JobSpec(32, max_replicas=8), now)  # type: ignore[arg-type]
            jobs.allocate(transaction, job_id, Allocation(1, size), now)  # type: ignore[arg-type]
            for registration in registrations(size):
                replicas.register(transaction, job_id, registration, now)  # type: ignore[arg-type]
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


def simulate(pid: int, port: int, token: str, options: argparse.Namespace) -> None:
    counts = {"heartbeats": 0, "lists of reports": 0, "errors": 0}
    latencies: list[float] = []
    before, after = uvloop.run(run_agents(pid, port, token, options, counts, latencies))
    seconds = options.seconds
    share = (after - before) / seconds
    for name, count in counts.items():
        print(f"{name}: {count / seconds:.0f} per second")
    ordered = sorted(latencies)
    slow = ordered[int(len(ordered) * 0.99)]
    print(f"answers: median {ordered[len(ordered) // 2] * 1e3:.1f} ms, 99% {slow * 1e3:.1f}")
    print(f"processor time of the service: {share:.2f} cores; {share / options.jobs * 1e6:.0f} us/s per job")


async def run_agents(
    pid: int,
    port: int,
    token: str,
    options: argparse.Namespace,
    counts: dict[str, int],
    latencies: list[float],
) -> tuple[float, float]:
    tasks = []
    for number in range(options.jobs):
        for registration in registrations(options.replicas):
            agent = run_agent(port, token, number, registration, options, counts, latencies)
            tasks.append(asyncio.create_task(agent))
    # Past the start, when all agents have registered with the new service.
    await asyncio.sleep(options.heartbeat * 2 + 5)
    for name in counts:
        counts[name] = 0
    latencies.clear()
    before = processor_time(pid)
    await asyncio.sleep(options.seconds)
    after = processor_time(pid)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    return before, after


async def run_agent(
    port: int,
    token: str,
    number: int,
    registration: Registration,
    options: argparse.Namespace,
    counts: dict[str, int],
    latencies: list[float],
) -> None:
    await asyncio.sleep(random.random() * max(options.heartbeat, options.report))
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    path = f"/jobs/bench.job-{number}"

    async def send(method: str, path: str, body: object) -> None:
        text = json.dumps(body)
        started = time.perf_counter()
        writer.write(
            f"{method} {path} HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer {token}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode()
        )
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
        await reader.readexactly(length)
        latencies.append(time.perf_counter() - started)
        if not head.startswith(b"HTTP/1.1 200"):
            counts["errors"] += 1

    index = next(iter(registration.to_json().values()))
    step = 100
    next_heartbeat = next_report = time.monotonic()
    try:
        while True:
            if time.monotonic() >= next_heartbeat:
                await send("PUT", f"{path}/replicas/{index}", registration.to_json())
                counts["heartbeats"] += 1
                next_heartbeat += options.heartbeat
            if index == 0 and time.monotonic() >= next_report:
                size = max(int(min(options.report / REPORT_INTERVAL, REPORTS_PER_POST)), 1)
                body = [replace(REPORT, step=step + number).to_json() for number in range(size)]
                step += size
                await send("POST", f"{path}/gain", body)
                counts["lists of reports"] += 1
                next_report += options.report
            deadline = min(next_heartbeat, next_report) if index == 0 else next_heartbeat
            await asyncio.sleep(max(deadline - time.monotonic(), 0))
    except (ConnectionError, asyncio.IncompleteReadError):
        counts["errors"] += 1
    finally:
        writer.close()


def memory(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    main()
