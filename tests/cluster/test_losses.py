"""A job loses replicas by disruptions and continues with the state of those that are left."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.system import JobUnderTest, Manifest, Workspace, job_manifest, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

KILL_TRAINERS = """
import os, pathlib, signal
for folder in pathlib.Path('/proc').glob('[0-9]*'):
    parent = (folder / 'stat').read_text().rpartition(')')[2].split()[1]
    if parent == '1' and 'paced.py' in (folder / 'cmdline').read_text():
        os.kill(int(folder.name), signal.SIGKILL)
"""
HUNGER = """
import os, pathlib
pathlib.Path('/tmp/new').write_text('4000')
os.rename('/tmp/new', '/tmp/hungry')
"""


def on_two_replicas(**spec: Any) -> Manifest:
    """A job that has two replicas or none."""
    manifest = job_manifest(minReplicas=2, maxReplicas=2, **spec)
    worker = manifest["spec"]["template"]["spec"]["containers"][0]
    worker["env"].append({"name": "HUNGRY", "value": "/tmp/hungry"})
    worker["resources"]["limits"] = {"memory": "2Gi"}
    return manifest


def wait_until_training_continues(job: JobUnderTest, disruptions: int) -> int:
    """Wait until the job trains again after `disruptions` disruptions. Returns its first step."""

    def is_running(status: Manifest) -> bool:
        return bool(status["disruptions"] >= disruptions and status["state"] == "Running")

    status = job.wait_for(f"training after disruption {disruptions}", is_running, 180)
    counts = ("replicas", "disruptions", "failures", "restarts", "rescales")
    assert [status[count] for count in counts] == [2, disruptions, 0, disruptions, 0], job.report()
    return job.entered()


def wait_for_a_checkpoint_after(job: JobUnderTest, step: int) -> int:
    return int(wait_until(lambda: (saved := job.saved_step()) > step and saved, "a checkpoint"))


def test_a_job_that_loses_replicas_continues_with_the_state_of_the_others(workspace: Workspace) -> None:
    """Its trainer is killed, then its pod is deleted by force, then it has no memory left."""
    job = workspace.submit(on_two_replicas())
    job.wait_until_training(2)
    first = job.uids()
    step = wait_for_a_checkpoint_after(job, job.entered())

    job.run_in(1, KILL_TRAINERS)
    again = wait_until_training_continues(job, 1)
    assert again >= step
    assert job.uids() == first

    step = wait_for_a_checkpoint_after(job, again)
    job.kubectl("delete", "pod", job.pods()[0].metadata.name, "--force", "--grace-period=0")
    again = wait_until_training_continues(job, 2)
    assert again >= step
    second = job.uids()
    assert second[0] != first[0]
    assert second[1] == first[1]

    step = wait_for_a_checkpoint_after(job, again)
    job.run_in(1, HUNGER)
    assert wait_until_training_continues(job, 3) >= step
    assert job.uids()[0] == second[0]
    reasons = [reason for reason, _ in job.events()]
    assert reasons.count("ReplicaLost") == 3
    assert "ProgramFailed" not in reasons
    job.delete()
