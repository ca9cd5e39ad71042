"""Two operators and one lease, as real processes on a real API server."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from cluster.system import wait_until

pytestmark = pytest.mark.cluster

PROGRAM = """
import asyncio, signal, sys, time
from contextlib import suppress
from kubernetes.aio import client, config
from adascale_controller.operator.apply.kubernetes_cluster import KubernetesCluster
from adascale_controller.operator.runtime.lease import Election

async def main(namespace, identity):
    await config.load_kube_config()
    terminated = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminated.set)
    async with client.ApiClient() as api:
        times = {"duration": 4, "renew_deadline": 2, "retry_interval": 0.2}
        election = Election(KubernetesCluster(api, None), (namespace, "operator"), identity, **times)
        await election.acquire()
        holding = asyncio.create_task(election.hold())
        while not terminated.is_set() and not holding.done():
            if election.held:
                print(time.monotonic(), flush=True)
            await asyncio.sleep(0.05)
        holding.cancel()
        with suppress(asyncio.CancelledError):
            await holding
        await election.release()

asyncio.run(main(*sys.argv[1:]))
"""


class Operator:
    """A process that writes the moments at which it holds the lease."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path) -> None:
        self.process = process
        self._output = output

    @property
    def moments(self) -> list[float]:
        """On the clock that all processes of a machine share."""
        lines = self._output.read_text().split("\n")[:-1]
        return [float(line) for line in lines]

    def works(self) -> bool:
        return bool(self.moments)


Start = Callable[[str], Operator]


@pytest.fixture
def start(namespace: str, tmp_path: Path) -> Iterator[Start]:
    with ExitStack() as stack:

        def start_operator(identity: str) -> Operator:
            output = tmp_path / f"{identity}.txt"
            with output.open("wb") as out:
                process = subprocess.Popen([sys.executable, "-c", PROGRAM, namespace, identity], stdout=out)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return Operator(process, output)

        yield start_operator


def took_over(first: Operator, second: Operator) -> float:
    """Return the seconds from the last moment of the first operator to the first moment of the second."""
    return second.moments[0] - first.moments[-1]


def test_another_operator_waits_and_takes_over_when_the_first_is_killed_or_stops(start: Start) -> None:
    first = start("first")
    wait_until(first.works, "the first operator to get the lease")
    second = start("second")
    # Longer than the lease lasts without renewals.
    wait_until(lambda: first.moments[-1] - first.moments[0] > 6, "the first operator to have worked on")
    assert not second.works()
    first.process.kill()
    wait_until(second.works, "the second operator to get the lease")
    assert took_over(first, second) > 2
    third = start("third")
    wait_until(lambda: second.moments[-1] - second.moments[0] > 3, "the second operator to have worked on")
    assert not third.works()
    second.process.send_signal(signal.SIGTERM)
    assert second.process.wait() == 0
    wait_until(third.works, "the third operator to get the lease")
    assert took_over(second, third) > 0


def test_an_operator_that_was_paused_has_lost_the_lease(start: Start) -> None:
    first = start("first")
    wait_until(first.works, "the first operator to get the lease")
    second = start("second")
    first.process.send_signal(signal.SIGSTOP)
    wait_until(second.works, "the second operator to get the lease")
    before = first.moments
    first.process.send_signal(signal.SIGCONT)
    assert first.process.wait() != 0
    # It may have been stopped while it wrote a moment.
    assert len(first.moments) <= len(before) + 1
    assert second.process.poll() is None
