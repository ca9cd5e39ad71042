"""The liveness probe: an operator that is stuck is not healthy, one that waits or works is."""

from __future__ import annotations

import asyncio
import threading
import urllib.request
from typing import Any
from urllib.error import HTTPError

import pytest

from adascale_controller.operator.runtime import control_loop
from adascale_controller.operator.runtime.health import MAX_SILENCE, Health, OperatorMetrics
from adascale_core.decision.decide import DecisionProblem
from support.clock import Clock
from support.fake_cluster import FakeCluster
from support.launch import free_port


def answer_of(url: str) -> int:
    """Return the HTTP status of an answer."""
    try:
        with urllib.request.urlopen(url) as answer:
            return int(answer.status)
    except HTTPError as error:
        return error.code


def probe(health: Health) -> int:
    """Return the HTTP status of the probe."""
    port = free_port()

    async def serve() -> int:
        async with health.serve(f"127.0.0.1:{port}"):
            return await asyncio.to_thread(answer_of, f"http://127.0.0.1:{port}/healthz")

    return asyncio.run(serve())


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
@pytest.mark.parametrize("address", [":{port}", "[::]:{port}"])
def test_all_addresses_are_those_of_ipv4_and_ipv6(address: str, host: str) -> None:
    port = free_port()

    async def serve() -> int:
        async with Health(OperatorMetrics()).serve(address.format(port=port)):
            return await asyncio.to_thread(answer_of, f"http://{host}:{port}/healthz")

    assert asyncio.run(serve()) == 200


def test_an_operator_that_waits_for_the_lease_is_healthy() -> None:
    clock = Clock()
    health = Health(OperatorMetrics(), clock)
    clock.now += 10 * MAX_SILENCE
    assert probe(health) == 200


def test_an_operator_without_progress_is_unhealthy_from_the_moment_it_has_the_lease() -> None:
    clock = Clock()
    health = Health(OperatorMetrics(), clock)
    health.record_progress()
    clock.now += MAX_SILENCE
    assert probe(health) == 200
    clock.now += 1
    assert probe(health) == 503
    health.record_progress()
    assert probe(health) == 200


@pytest.fixture
def progress(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """What the operators of the test record as progress."""
    monkeypatch.setattr(control_loop, "PAUSE", 0.01)
    monkeypatch.setattr(control_loop, "INTERVAL", 0.01)
    recorded: list[None] = []
    original = control_loop.OperatorLoop.__init__

    def init(self: control_loop.OperatorLoop, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options, on_progress=lambda: recorded.append(None))

    monkeypatch.setattr(control_loop.OperatorLoop, "__init__", init)
    return recorded


def test_a_first_cycle_that_is_stuck_is_no_progress(
    progress: list[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = FakeCluster()
    begun, may_answer = threading.Event(), threading.Event()
    read_jobs = cluster.service.read_jobs

    def hang(share: float) -> Any:
        begun.set()
        assert may_answer.wait(30)
        return read_jobs(share)

    monkeypatch.setattr(cluster.service, "read_jobs", hang)
    seen: list[int] = []

    def is_over() -> bool:
        if begun.is_set() and not may_answer.is_set():
            seen.append(len(progress))
            if len(seen) == 5:
                may_answer.set()
        return bool(progress)

    cluster.run_until(is_over)
    assert seen == [0] * 5


def test_a_decision_that_hangs_is_no_progress(progress: list[None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_loop, "DECISION_DEADLINE", 0.0)
    may_end = threading.Event()
    begun = threading.Event()
    decide = DecisionProblem.decide

    def hang(problem: DecisionProblem, now: float) -> Any:
        begun.set()
        assert may_end.wait(30)
        return decide(problem, now)

    monkeypatch.setattr(DecisionProblem, "decide", hang)
    cluster = FakeCluster()
    cluster.submit()
    cycles = "adascale_operator_cycle_duration_seconds_count"
    counts: list[tuple[float, int]] = []

    def hung_for_cycles() -> bool:
        if begun.is_set():
            # What is written meanwhile is no sign of health: no new job gets pods.
            cluster.edit(maxReplicas=8 + len(counts) % 2)
            text = cluster.metrics.text().decode()
            found = next(line for line in text.splitlines() if line.startswith(cycles))
            counts.append((float(found.split()[1]), len(progress)))
        if not counts or counts[-1][0] < counts[0][0] + 4:
            return False
        may_end.set()
        return True

    cluster.run_until(hung_for_cycles)
    later = [recorded for cycle, recorded in counts if cycle > counts[0][0] + 1]
    assert len(set(later)) == 1, "cycles go on, but they are not counted as progress"


def test_a_long_observation_is_progress(progress: list[None]) -> None:
    cluster = FakeCluster()
    for number in range(2 * control_loop.SLICE):
        cluster.submit(f"job-{number}", suspend=True)
    cluster.deliver()
    at_first_write: list[int] = []
    cluster.meanwhile = lambda: at_first_write.append(len(progress))
    cluster.run_until(lambda: bool(at_first_write))
    assert at_first_write[0] >= 2
