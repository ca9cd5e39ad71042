"""Replicas of two processes, in pods with two devices each. The program checks which samples are trained."""

from __future__ import annotations

import json
import re
from itertools import pairwise

import pytest

from cluster.devices import EACH, Devices
from cluster.system import JobUnderTest, System, Workspace, job_manifest

pytestmark = [pytest.mark.disturbs, pytest.mark.release, pytest.mark.timeout(600)]

KILL_ONE = """
import os, pathlib, signal
found = []
for folder in pathlib.Path('/proc').glob('[0-9]*'):
    parent = (folder / 'stat').read_text().rpartition(')')[2].split()[1]
    if parent == '1' and 'program.py' in (folder / 'cmdline').read_text():
        found.append(int(folder.name))
os.kill(max(found), signal.SIGKILL)
print(len(found))
"""
JOURNALS = """
import pathlib
for file in pathlib.Path('/tmp').glob('journal-*'):
    for line in file.read_text().splitlines(keepends=True):
        if line.endswith('\\n'):
            print(file.name, line, end='')
"""


def steps_by_process(job: JobUnderTest, rank: int) -> list[list[int]]:
    """Return the steps that each process of a replica has made, in order."""
    found: dict[str, list[int]] = {}
    for line in job.run_in(rank, JOURNALS).splitlines():
        name, entry = line.split(maxsplit=1)
        found.setdefault(name, []).append(int(json.loads(entry)["step"]))
    return list(found.values())


def test_a_job_with_two_processes_per_replica_grows_and_repeats_no_step_after_the_kill_of_one(
    system: System, workspace: Workspace, devices: Devices
) -> None:
    del system
    amount = {devices.name: str(EACH)}
    environ = {"CHAOS_FOLDER": "/tmp", "PACE": "0.01", "OMP_NUM_THREADS": "1"}
    manifest = job_manifest(
        name="sharded",
        batchSize=8,
        maxBatchSize=16,
        localBszBounds={"lower": 4, "upper": 8},
        maxReplicas=1,
        processesPerReplica=2,
        scaleInvariantSteps=100_000,
        # A state from a checkpoint would repeat steps.
        checkpoint={"claimName": "shared", "intervalSeconds": 3600},
        container={
            "command": ["python", "/programs/chaos/program.py"],
            "env": [{"name": name, "value": value} for name, value in environ.items()],
            "resources": {"requests": {"cpu": "100m", "memory": "512Mi", **amount}, "limits": amount},
        },
    )
    job = workspace.submit(manifest)
    job.wait_until_training(1, 180)
    job.edit(minReplicas=2, maxReplicas=2)
    job.wait_until_training(2, 180)
    pods = job.pods()
    assert {pod.spec.node_name for pod in pods.values()} == set(devices.nodes)
    assert int(job.run_in(1, KILL_ONE)) == 2
    job.wait_for(
        "training after the loss",
        lambda status: status["disruptions"] == 1 and status["state"] == "Running",
        180,
    )
    assert job.uids() == {rank: pod.metadata.uid for rank, pod in pods.items()}
    survivors = steps_by_process(job, 0)
    assert len(survivors) == 2
    for steps in survivors:
        # An entry is of a micro-batch, so a step may have several.
        assert all(earlier <= later <= earlier + 1 for earlier, later in pairwise(steps))

    job.edit(scaleInvariantSteps=1)
    job.kubectl("wait", "--for=condition=Complete", f"asj/{job.name}", "--timeout=120s", timeout=140)
    (result, *others) = [
        json.loads(found) for found in re.findall(r"^chaos result: (.+)$", job.logs(), re.MULTILINE)
    ]
    assert len(others) == 1
    assert result["problems"] == []
    # One replica, and two before and after the loss, with one alone in between where that was long enough.
    sizes = [replicas for _, replicas in result["generations"]]
    assert (sizes[0], sizes[-1]) == (1, 2)
    assert sizes.count(2) == 2
