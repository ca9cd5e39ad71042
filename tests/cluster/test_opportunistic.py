"""A pod of a high priority takes the extra pods of a job, whose core trains on, and the job grows back."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from uuid import uuid4

import pytest

from cluster.devices import Devices
from cluster.system import JobUnderTest, System, Workspace, job_manifest, succeeded, wait_until

pytestmark = pytest.mark.timeout(600)

JOURNAL = """
import pathlib
for file in sorted(pathlib.Path('/tmp').glob('journal-*')):
    print(file.read_text())
"""
RESULT = re.compile(r"^chaos result: (.+)$", re.M)


@contextmanager
def priority_classes(system: System, **values: int) -> Iterator[dict[str, str]]:
    """PriorityClasses of these values. Yields their names in the cluster."""
    mark = uuid4().hex[:8]
    made = {name: f"test-{mark}-{name}" for name in values}
    kind = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass"}
    system.apply([{**kind, "metadata": {"name": made[name]}, "value": values[name]} for name in values])
    try:
        yield made
    finally:
        succeeded(system.kubectl("delete", "priorityclass", *made.values(), "--ignore-not-found"))


@pytest.fixture
def four(system: System) -> Iterator[Devices]:
    """Nodes with four devices each."""
    found = Devices(system, each=4)
    found.plug_in()
    yield found
    found.pull_out()


def steps_of_core(job: JobUnderTest) -> list[dict[str, Any]]:
    """Return the steps that the trainer of replica 0 has made, by time."""
    lines = [line for line in job.run_in(0, JOURNAL).splitlines() if line.endswith("}")]
    return [json.loads(line) for line in lines]


def longest_silence(steps: list[dict[str, Any]], since: float) -> float:
    """Return the longest time between two steps after a moment, in seconds."""
    times = [step["time"] for step in steps if step["time"] >= since]
    return max((later - earlier for earlier, later in pairwise(times)), default=0.0)


# Alone, and with slow samples, because the count to which it grows follows from step times, which other
# programs on these cores change.
@pytest.mark.disturbs
def test_a_pod_of_high_priority_takes_extra_pods_and_no_step_is_lost(
    system: System, workspace: Workspace, four: Devices
) -> None:
    near = four.nodes[0]
    environ = {"CHAOS_FOLDER": "/tmp", "PACE": "0.03", "OMP_NUM_THREADS": "1"}
    with priority_classes(system, high=1_000_000, core=1000, spare=-10) as classes:
        job = workspace.submit(
            job_manifest(
                name="mine",
                batchSize=8,
                maxBatchSize=32,
                localBszBounds={"lower": 2, "upper": 8},
                # More than it makes before an edit ends it.
                scaleInvariantSteps=1_000_000,
                opportunistic={"priorityClassName": classes["spare"]},
                container={
                    "command": ["python", "/programs/chaos/program.py"],
                    "env": [{"name": name, "value": value} for name, value in environ.items()],
                    **four.container(),
                },
                pod={
                    "nodeSelector": {"kubernetes.io/hostname": near},
                    "priorityClassName": classes["core"],
                },
            )
        )
        status = job.wait_until_training(4, 240)
        assert status["extraReplicas"] == 3
        wait_until(lambda: steps_of_core(job)[-1]["replicas"] == 4, "a step on four replicas")
        four_pods = job.uids()
        assert {pod.spec.priority for rank, pod in job.pods().items() if rank} == {-10}

        begun = time.time()
        with four.taken(workspace, near, count=3, priority=classes["high"]):
            ran = time.time() - begun
            status = job.wait_until_training(1)
            assert status["extraReplicas"] == 0
            assert job.uids() == {0: four_pods[0]}
            step = len(steps_of_core(job))
            wait_until(lambda: len(steps_of_core(job)) > step, "more steps of the core")
            taken = longest_silence(steps_of_core(job), begun)
        ended = time.time()
        job.wait_until_training(4, 240)
        grown = time.time() - ended
        assert job.uids()[0] == four_pods[0]
        steps = steps_of_core(job)
        print(
            f"the pod ran after {ran:.1f} s, the longest silence was {taken:.2f} s, on 4 replicas again "
            f"after {grown:.1f} s, with a silence of {longest_silence(steps, ended):.2f} s"
        )
        # One process has made all steps, each once. An entry is of a micro-batch, so steps may have several.
        numbers = [each["step"] for each in steps]
        assert numbers == sorted(numbers)
        assert set(numbers) | {0} == set(range(numbers[-1] + 1))
        assert {each["replicas"] for each in steps} >= {1, 4}
        reasons = [reason for reason, _ in job.events()]
        assert "ExtraPodsTaken" in reasons
        assert "ReplicaLost" not in reasons

        job.edit(scaleInvariantSteps=1)
        job.kubectl("wait", "--for=condition=Complete", f"asj/{job.name}", "--timeout=120s", timeout=140)
        status = job.status()
        assert (status["failures"], status["state"]) == (0, "Complete")
        found = RESULT.search(job.logs())
        assert found, job.report()
        result = json.loads(found[1])
        assert result["problems"] == [], "a sample was lost, or trained twice"
        assert result["finite"]
