"""Measures what the agents of many jobs do to a metrics service that is killed and starts again.

    python bench/service_restart.py --jobs 250 --replicas 4 --away 10

Each agent is the connection of a real one (`adascale_worker.agent.heartbeat`): a thread that registers the
replica and sends heartbeats, and one that waits for changes. They share some processes. The service is killed
(SIGKILL) and, after `--away` seconds, started again on the same port and database.

Printed are the attempts of all agents in each second while the service is away, the requests in each second
after it answers again, those of them that failed, and the seconds until it has a new heartbeat of each agent.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import multiprocessing
import os
import secrets
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import TypeVar

from metrics_service import metrics_service
from service_at_scale import registrations, store_jobs

from adascale_client import MetricsServiceClient, ServiceError
from adascale_core.messages.allocation import AllocationView, MemberView
from adascale_core.messages.registration import Registration
from adascale_worker.agent.heartbeat import Heartbeat

PER_PROCESS = 10
"""Agents in a process of the benchmark. More would wait for the interpreter lock and not for the service."""
STARTING = 10.0
"""Seconds over which the agents start."""
AFTER = 15
"""Seconds after the restart whose requests are counted, at least."""
TIMEOUT = 300.0

T = TypeVar("T")


class RecordedClient(MetricsServiceClient):
    """Records when each request began and whether it succeeded."""

    def __init__(self, url: str, token: str) -> None:
        super().__init__(url, token)
        self.requests: list[tuple[float, bool]] = []
        self.registered_at = 0.0

    def register(self, job_id: str, registration: Registration) -> MemberView:
        begun = time.time()
        answer = self._recorded(begun, lambda: super(RecordedClient, self).register(job_id, registration))
        self.registered_at = begun
        return answer

    def get_allocation(
        self, job_id: str, known_version: int | None = None, wait: float = 0.0
    ) -> AllocationView:
        return self._recorded(
            time.time(), lambda: super(RecordedClient, self).get_allocation(job_id, known_version, wait)
        )

    def _recorded(self, begun: float, call: Callable[[], T]) -> T:
        try:
            answer = call()
        except ServiceError:
            self.requests.append((begun, False))
            raise
        self.requests.append((begun, True))
        return answer


Agent = tuple[str, Registration]


def run_agents(
    agents: Sequence[Agent],
    url: str,
    token: str,
    since: Synchronized[float],
    count: Synchronized[int],
    requests: multiprocessing.Queue[list[tuple[float, bool]]],
    ended: threading.Event,
) -> None:
    """Run agents in this process, until the event is set.

    Args:
        agents: job and registration of each.
        url: of the service.
        token: of the service.
        since: the moment of the service's last start.
        count: becomes the number of agents that have registered since then.
        requests: gets the requests of all agents.
        ended: ends this function.
    """
    with Path(os.devnull).open("w") as devnull, contextlib.redirect_stdout(devnull):
        clients = []
        for job_id, registration in agents:
            # An agent has connections of its own.
            client = RecordedClient(url, token)
            heartbeat = Heartbeat(client, job_id, lambda: None)
            heartbeat.register(registration)
            heartbeat.start()
            clients.append(client)
            time.sleep(STARTING / len(agents))
        while not ended.wait(0.1):
            count.value = sum(client.registered_at > since.value for client in clients)
        requests.put([request for client in clients for request in client.requests])


def registered(counts: Sequence[Synchronized[int]]) -> int:
    """Return how many agents have registered with the present service."""
    return sum(count.value for count in counts)


def wait_until(condition: Callable[[], bool]) -> None:
    begun = time.monotonic()
    while not condition():
        if time.monotonic() - begun > TIMEOUT:
            sys.exit(f"not all agents have registered within {TIMEOUT:.0f} s")
        time.sleep(0.02)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=250, help="default: %(default)s")
    parser.add_argument("--replicas", type=int, default=4, help="of each job (default: %(default)s)")
    parser.add_argument("--away", type=float, default=10.0, help="seconds (default: %(default)s)")
    options = parser.parse_args()
    agents = [
        (f"bench.job-{number}", registration)
        for number in range(options.jobs)
        for registration in registrations(options.replicas)
    ]
    token = secrets.token_hex(16)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    ended = context.Event()
    since = context.Value("d", math.inf)
    queue: multiprocessing.Queue[list[tuple[float, bool]]] = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        database = f"sqlite:///{folder}/bench.db"
        asyncio.run(store_jobs(database, options.jobs, options.replicas))
        counts, processes = [], []
        for part in [agents[first : first + PER_PROCESS] for first in range(0, len(agents), PER_PROCESS)]:
            count = context.Value("i", 0)
            arguments = (part, f"http://127.0.0.1:{port}", token, since, count, queue, ended)
            process = context.Process(target=run_agents, args=arguments, daemon=True)
            process.start()
            counts.append(count)
            processes.append(process)
        with metrics_service(database, token, port=port, is_killed=True):
            since.value = time.time()
            wait_until(lambda: registered(counts) == len(agents))
            time.sleep(AFTER)
            since.value = math.inf
            wait_until(lambda: not registered(counts))
        killed_at = time.time()
        time.sleep(options.away)
        started_at = time.time()
        with metrics_service(database, token, port=port, is_killed=True) as service:
            since.value = answers_at = time.time()
            wait_until(lambda: registered(counts) == len(agents))
            seconds = time.time() - answers_at
            time.sleep(max(0.0, AFTER - seconds))
            used = service.processor_time
            ended.set()
            requests = [request for _ in processes for request in queue.get()]
            for process in processes:
                process.join()
    away = Counter(int(begun - killed_at) for begun, _ in requests if killed_at < begun < started_at)
    after = Counter(int(begun - answers_at) for begun, _ in requests if begun >= answers_at)
    failed = sum(begun >= answers_at and not succeeded for begun, succeeded in requests)
    away_for = answers_at - killed_at
    print(f"{len(agents)} agents of {options.jobs} jobs; the service is away for {away_for:.1f} s")
    print(f"attempts while it is away, in each second: {in_each_second(away, int(options.away))}")
    print(f"requests after it answers, in each second: {in_each_second(after, AFTER)}; {failed} failed")
    print(f"all agents have sent a heartbeat after {seconds:.1f} s; the service used {used:.1f} s of a core")


def in_each_second(counts: Counter[int], seconds: int) -> str:
    """Return the counts of the first seconds as text."""
    return " ".join(str(counts[second]) for second in range(seconds))


if __name__ == "__main__":
    main()
