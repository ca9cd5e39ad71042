"""A job on the cluster under faults drawn from a seed: trains every sample exactly once, and finishes.

As `tests/chaos` does for `adascale run`, with the same program. By default nine faults of one seed, as
many as there are kinds; for more:

    ADASCALE_TEST_CHAOS_SEEDS=1,2,3 ADASCALE_TEST_CHAOS_FAULTS=20 make e2e TESTS=tests/cluster/test_chaos.py

One test needs Kueue (`.ci/kueue`): its job is in a queue, whose quota changes, and which evicts it.
Faults of nodes and of the API server need the commands that `test_outages.py` describes.
"""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from adascale_core import names
from cluster.system import JobUnderTest, Manifest, System, Workspace, job_manifest, wait_until
from cluster.test_kueue import Queue, in_queue, queue

SEEDS = [int(seed) for seed in os.environ.get("ADASCALE_TEST_CHAOS_SEEDS", "1").split(",")]
FAULTS = int(os.environ.get("ADASCALE_TEST_CHAOS_FAULTS", "9"))
NODE = os.environ.get("ADASCALE_TEST_NODE")
API_SERVER = os.environ.get("ADASCALE_TEST_APISERVER")
STEPS = 1500
"""Scale-invariant steps of the job."""
KINDS = (
    "kill_trainer",
    "freeze_trainer",
    "delete_pod",
    "delete_pod_by_force",
    "change_bounds",
    "kill_service",
    "kill_operator",
    *(["freeze_node"] if NODE else []),
    *(["stop_api_server"] if API_SERVER else []),
)
"""Names of methods of `Faults`: the faults that can be made here."""
TARGET_REPLICAS = (1, 2, 3, 4)
LONGEST = 420.0
"""Seconds within which the job must finish."""
NOT_SUPPORTED = 2
"""Exit code of a command that does not have the requested action."""
RESULT = re.compile(r"^chaos result: (.+)$", re.M)
SIGNAL_TRAINERS = """
import os, pathlib, signal, time
found = []
for folder in pathlib.Path('/proc').glob('[0-9]*'):
    try:
        parent = (folder / 'stat').read_text().rpartition(')')[2].split()[1]
        if parent == '1' and 'program.py' in (folder / 'cmdline').read_text():
            found.append(int(folder.name))
    except OSError:
        pass
# One of the processes of a replica.
found = sorted(found)[int({choice} * len(found)) :][:1]
for pid in found:
    os.kill(pid, signal.{signal})
time.sleep({seconds})
for pid in found:
    os.kill(pid, signal.SIGCONT)
"""

LATEST = 0.85
"""The part of the training after which no fault happens."""
EARLY = {"kill_service": 0.4, "freeze_node": 0.4, "stop_api_server": 0.4}
"""The same for kinds during which training continues, and may end. The scheduler needs a while after a stop
of the API server, and could leave the pods of the next test pending for minutes."""
SECONDS = (1.0, 9.0)
"""How long something is frozen or down."""
LONGER = {"freeze_trainer": (6.0, 9.0), "freeze_node": (6.0, 9.0)}
"""The same for kinds that have an effect only if members take a silent peer for lost, after 5 s."""
CHANCE_OF_OVERLAP = 0.3
"""Of a fault to happen at the same moment as the one before."""

__all__ = ["queue"]  # A fixture.
pytestmark = [pytest.mark.disturbs, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Fault:
    """A fault and its moment.

    Args:
        kind: what happens.
        progress: the part of the training after which it happens.
        choice: chooses the replica, the node or the replica count, from 0 to 1.
        seconds: how long something is frozen or down.
    """

    kind: str
    progress: float
    choice: float
    seconds: float

    def __str__(self) -> str:
        return (
            f"at {self.progress:.0%} {self.kind.replace('_', ' ')} ({self.choice:.2f}, {self.seconds:.1f} s)"
        )


def draw(seed: int, count: int, kinds: Sequence[str]) -> list[Fault]:
    """Return the faults of a seed, in the order of their moments.

    Each kind is drawn once before any is drawn again.

    Args:
        seed: of the random numbers.
        count: of faults.
        kinds: what can happen.
    """
    drawn = random.Random(seed)
    order: list[str] = []
    while len(order) < count:
        order += drawn.sample(kinds, len(kinds))
    timed = sorted((drawn.uniform(0.03, EARLY.get(kind, LATEST)), kind) for kind in order[:count])
    faults: list[Fault] = []
    for moment, kind in timed:
        if faults and drawn.random() < CHANCE_OF_OVERLAP:
            moment = faults[-1].progress
        seconds = drawn.uniform(*LONGER.get(kind, SECONDS))
        faults.append(Fault(kind, moment, drawn.random(), seconds))
    return faults


class Faults:
    """Makes faults for a job.

    Attributes:
        left_out: why a fault could not be made here; empty if all could.
    """

    def __init__(self, system: System, job: JobUnderTest) -> None:
        self.left_out = ""
        self._system = system
        self._job = job

    def _rank(self, fault: Fault) -> int | None:
        running = [rank for rank, pod in self._job.pods().items() if pod.status.phase == "Running"]
        return sorted(running)[int(fault.choice * len(running))] if running else None

    def _signal(self, fault: Fault, name: str, seconds: float) -> None:
        rank = self._rank(fault)
        if rank is not None:
            choice = fault.choice * 100 % 1  # Another one than that of the replica.
            code = SIGNAL_TRAINERS.format(signal=name, seconds=seconds, choice=choice)
            pod = self._job.pods()[rank].metadata.name
            # The pod may end meanwhile.
            self._system.kubectl(
                *("-n", self._job.namespace, "exec", pod, "-c", "worker", "--", "python", "-c", code)
            )

    def kill_trainer(self, fault: Fault) -> None:
        self._signal(fault, "SIGKILL", 0)

    def freeze_trainer(self, fault: Fault) -> None:
        self._signal(fault, "SIGSTOP", fault.seconds)

    def _delete(self, fault: Fault, *options: str) -> None:
        rank = self._rank(fault)
        if rank is not None:
            pod = self._job.pods()[rank].metadata.name
            self._system.kubectl("-n", self._job.namespace, "delete", "pod", pod, "--wait=false", *options)

    def delete_pod(self, fault: Fault) -> None:
        self._delete(fault)

    def delete_pod_by_force(self, fault: Fault) -> None:
        self._delete(fault, "--force", "--grace-period=0")

    def change_bounds(self, fault: Fault) -> None:
        self._job.edit(maxReplicas=TARGET_REPLICAS[int(fault.choice * len(TARGET_REPLICAS))])

    def kill_service(self, _: Fault) -> None:
        self._system.kill(names.API_SERVICE)

    def kill_operator(self, _: Fault) -> None:
        self._system.kill(names.CONTROLLER)

    def freeze_node(self, fault: Fault) -> None:
        nodes = sorted({pod.spec.node_name for pod in self._job.pods().values() if pod.spec.node_name})
        if nodes:
            name = nodes[int(fault.choice * len(nodes))]
            self._during(fault.seconds, NODE or "", [name, "freeze"], [name, "thaw"])

    def stop_api_server(self, fault: Fault) -> None:
        self._during(fault.seconds, API_SERVER or "", ["stop"], ["start"])
        wait_until(lambda: attempt(self._job.raw) is not None, "the API server")

    def _during(self, seconds: float, command: str, begin: list[str], end: list[str]) -> None:
        def run(arguments: list[str]) -> bool:
            done = subprocess.run([*shlex.split(command), *arguments], check=False, timeout=120)
            if done.returncode == NOT_SUPPORTED:
                self.left_out = self.left_out or f"`{shlex.join(done.args)}` is not supported"
                return False
            done.check_returncode()
            return True

        with ExitStack() as undo:
            undo.callback(run, end)
            if run(begin):
                time.sleep(seconds)


def attempt(call: Callable[[], Any]) -> Any:
    """Return the result of a call; None while the API server or the service does not answer."""
    try:
        return call()
    except (ApiException, HTTPError, AssertionError):
        return None


def progress_of(job: JobUnderTest) -> float:
    """Return the part of the training that is done; 0 if that is not known."""
    view = attempt(job.view)
    return float(view["latest"]["progress"]) / STEPS if view and view["latest"] else 0.0


class QueueFaults(Faults):
    """Makes faults for a job that Kueue queues."""

    def __init__(self, system: System, job: JobUnderTest, queue: Queue) -> None:
        super().__init__(system, job)
        self._queue = queue

    def change_quota(self, fault: Fault) -> None:
        self._queue.set_quota(TARGET_REPLICAS[int(fault.choice * len(TARGET_REPLICAS))])

    def evict(self, fault: Fault) -> None:
        self._queue.stop("HoldAndDrain")
        try:
            time.sleep(fault.seconds)
        finally:
            self._queue.stop("None")


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.release)])
@pytest.mark.parametrize("seed", SEEDS)
def test_under_any_faults_each_sample_is_trained_once(
    seed: int, processes: int, system: System, workspace: Workspace
) -> None:
    job = workspace.submit(chaos_manifest(processes))
    train_under_faults(job, Faults(system, job), draw(seed, FAULTS, KINDS))


@pytest.mark.release
@pytest.mark.parametrize("seed", SEEDS)
def test_under_any_faults_a_queued_job_trains_each_sample_once(
    seed: int, system: System, workspace: Workspace, queue: Queue
) -> None:
    queue.set_quota(4)
    job = workspace.submit(in_queue(queue, chaos_manifest(1)))
    kinds = (*KINDS, "change_quota", "evict")
    train_under_faults(job, QueueFaults(system, job, queue), draw(seed, FAULTS + 4, kinds))


def chaos_manifest(processes: int) -> Manifest:
    """Return a job of the program of `tests/chaos`, whose replicas have this number of processes."""
    environ = {"CHAOS_FOLDER": "/tmp", "PACE": "0.005", "OMP_NUM_THREADS": "1"}
    return job_manifest(
        name="chaos",
        batchSize=8,
        maxBatchSize=32,
        localBszBounds={"lower": 2 * processes, "upper": 8},
        maxReplicas=4,
        **({} if processes == 1 else {"processesPerReplica": processes}),
        scaleInvariantSteps=STEPS,
        backoffLimit=0,
        container={
            "command": ["python", "/programs/chaos/program.py"],
            "env": [{"name": name, "value": value} for name, value in environ.items()],
        },
    )


def train_under_faults(job: JobUnderTest, faults: Faults, pending: list[Fault]) -> None:
    """Make faults while a job trains, and check what it has trained."""
    planned = len(pending)
    job.wait_for("training", lambda status: status.get("state") == "Running")
    deadline = time.monotonic() + LONGEST
    applied: list[str] = []
    while attempt(lambda: job.condition("Complete").get("status")) != "True":
        done = f"applied: {'; '.join(applied)}"
        assert time.monotonic() < deadline, f"not finished within {LONGEST:.0f} s; {done}; {job.report()}"
        failed = attempt(lambda: job.condition("Failed").get("status"))
        assert failed != "True", f"{done}; {job.report()}"
        if pending and progress_of(job) >= pending[0].progress:
            fault = pending.pop(0)
            print(fault, flush=True)
            applied.append(str(fault))
            getattr(faults, fault.kind)(fault)
        time.sleep(0.2)
    # Training may reach its end while the service, which knows the progress, is away.
    assert len(applied) >= planned / 2, f"training has ended before {len(pending)} faults"
    assert job.status()["failures"] == 0
    # A pod that is not needed any more may be deleted meanwhile.
    pods = [pod.metadata.name for pod in job.pods(ended=True).values()]
    logs = [attempt(partial(job.kubectl, "logs", name, "--tail=-1")) or "" for name in pods]
    results = [json.loads(found[1]) for text in logs for found in RESULT.finditer(text)]
    assert results, "no replica has printed a result"
    for result in results:
        generations = [generation for generation, _ in result["generations"]]
        assert result["problems"] == []
        assert result["finite"]
        assert result["progress"] >= STEPS
        assert generations == sorted(set(generations))
    assert len({result["weights"] for result in results}) == 1
    if faults.left_out:
        pytest.skip(f"all holds, but without one of the faults: {faults.left_out}")
