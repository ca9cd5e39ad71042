"""A job moves between replica counts while it trains."""

from __future__ import annotations

import pytest

from cluster.system import System, Workspace, job_manifest, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


def test_a_job_grows_by_its_gain_and_keeps_its_pods(system: System, workspace: Workspace) -> None:
    """1 -> 2 -> 4, then as many as `kubectl scale` lets it, to its end."""
    job = workspace.submit(job_manifest(scaleInvariantSteps=4000))
    job.wait_until_training(1)
    first = job.uids()
    job.wait_until_training(2)
    second = job.uids()
    status = job.wait_until_training(4)
    third = job.uids()
    assert first.items() <= second.items() <= third.items()
    assert list(third) == [0, 1, 2, 3]
    assert (status["rescales"], status["disruptions"], status["failures"]) == (2, 0, 0)
    assert status["observedGeneration"] == 1
    # The status has the batch size of the latest report, which is written every ten seconds.
    job.wait_for("batch size of 4 replicas", lambda status: status["batchSize"] == 16)
    assert job.view()["active"]["replicas"] == 4

    # What a replica is worth is measured, on machines that do other things too; here it shall stay there.
    job.edit(minReplicas=2)
    job.kubectl("scale", "asj/paced", "--replicas=2")
    job.wait_until_training(2)
    wait_until(lambda: job.uids() == {rank: third[rank] for rank in (0, 1)}, "the surplus pods' end")

    job.kubectl("wait", "--for=condition=Complete", "asj/paced", "--timeout=180s", timeout=200)
    status = job.status()
    assert (status["state"], status["progressText"]) == ("Complete", "100%")
    assert (status["rescales"], status["disruptions"], status["failures"]) == (3, 0, 0)
    reasons = job.wait_for_event("Finished")
    assert reasons.count("Rescaling") == 3
    assert reasons[-1] == "Finished"
    assert system.get(f"/jobs/{job.id}/gain")["progress"] >= 4000
