"""A job loses a replica that has no memory left, and continues with the state of the other one."""

from __future__ import annotations

import pytest

from cluster.system import Workspace, job_manifest, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

HUNGER = """
import os, pathlib
pathlib.Path('/tmp/new').write_text('4000')
os.rename('/tmp/new', '/tmp/hungry')
"""


def test_a_job_whose_replica_has_no_memory_left_continues_with_the_state_of_the_other(
    workspace: Workspace,
) -> None:
    manifest = job_manifest(minReplicas=2, maxReplicas=2)
    worker = manifest["spec"]["template"]["spec"]["containers"][0]
    worker["env"].append({"name": "HUNGRY", "value": "/tmp/hungry"})
    worker["resources"]["limits"] = {"memory": "2Gi"}
    job = workspace.submit(manifest)
    job.wait_until_training(2)
    first, entered = job.uids(), job.entered()
    step = wait_until(lambda: (saved := job.saved_step()) > entered and saved, "a checkpoint")
    job.run_in(1, HUNGER)
    status = job.wait_for(
        "training after the loss",
        lambda status: status["disruptions"] > 0 and status["state"] == "Running",
        timeout=180,
    )
    counts = ("replicas", "disruptions", "failures", "restarts", "rescales")
    assert [status[count] for count in counts] == [2, 1, 0, 1, 0], job.report()
    assert job.entered() >= step
    assert job.uids()[0] == first[0]
    reasons = [reason for reason, _ in job.events()]
    assert reasons.count("ReplicaLost") == 1
    assert "ProgramFailed" not in reasons
    job.delete()
