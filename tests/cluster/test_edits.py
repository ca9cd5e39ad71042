"""What users do to a job while it runs: scale, edit, suspend, delete, and wait for its end."""

from __future__ import annotations

from typing import Any

import pytest
from kubernetes.client.exceptions import ApiException

from adascale_core import names
from cluster.system import JobUnderTest, System, Workspace, job_manifest, wait_until

pytestmark = pytest.mark.timeout(600)

NEVER = {"claimName": "shared", "intervalSeconds": 3600}
"""State is saved when pods leave, and only then."""


def step_of(job: JobUnderTest) -> int:
    """Wait for a report of the active generation, and return its step."""

    def latest_report() -> Any:
        view = job.view()
        latest = view["latest"]
        return latest if latest and latest["generation"] == view["active"]["generation"] else None

    return int(wait_until(latest_report, f"a report of {job.id}")["step"])


def exists(read: Any, *arguments: str) -> bool:
    """Whether an object can be read."""
    try:
        read(*arguments)
    except ApiException as error:
        if error.status != 404:
            raise
        return False
    return True


def is_in_service(system: System, job: JobUnderTest) -> bool:
    """Whether the metrics service has the job."""
    place = f"https:{names.API_SERVICE}:{names.DEFAULT_API_PORT}"
    path = f"/api/v1/namespaces/{names.SYSTEM_NAMESPACE}/services/{place}/proxy/jobs/{job.id}"
    answer = system.kubectl("get", "--raw", path)
    if answer.returncode:
        assert "NotFound" in answer.stderr, answer.stderr
    return answer.returncode == 0


def wait_until_nothing_is_left(system: System, job: JobUnderTest) -> None:
    """Wait until neither the cluster nor the service has anything of the job."""
    wait_until(lambda: not job.pods(ended=True), "the end of its pods", patience=90)
    wait_until(lambda: not is_in_service(system, job), "the service to delete it")


def wait_until_at_rest(job: JobUnderTest, reason: str) -> None:
    """Wait until a job is suspended, without pods."""
    job.wait_for_condition("Suspended", reason)
    wait_until(lambda: not job.pods(ended=True), "the end of its pods")
    status = job.status()
    assert (status["state"], status["replicas"], status["desiredReplicas"]) == ("Suspended", 0, 0)


def test_kubectl_scale_limits_the_replicas_and_zero_stops_the_job(workspace: Workspace) -> None:
    job = workspace.submit(job_manifest(replicaLimit=1, maxReplicas=2, checkpoint=NEVER))
    job.wait_until_training(1)
    first = job.uids()

    job.kubectl("scale", "asj/paced", "--replicas=2")
    job.wait_until_training(2)
    second = job.uids()
    assert first.items() <= second.items()

    job.kubectl("scale", "asj/paced", "--replicas=1")
    status = job.wait_until_training(1)
    wait_until(lambda: job.uids() == first, "the surplus pod's end")
    assert (status["rescales"], status["disruptions"], status["failures"]) == (2, 0, 0)
    assert ("Rescaling", "Rescaling 2 -> 1: spec.replicaLimit is 1") in job.events()

    step = step_of(job)
    job.kubectl("scale", "asj/paced", "--replicas=0")
    wait_until_at_rest(job, "ScaledToZero")
    job.kubectl("scale", "asj/paced", "--replicas=1")
    status = job.wait_until_training(1)
    assert job.entered() >= step > 0
    assert (status["rescales"], status["disruptions"], status["failures"]) == (2, 0, 0)
    assert job.condition("Suspended")["reason"] == "Resumed"


def test_a_job_is_edited_suspended_and_completes(system: System, workspace: Workspace) -> None:
    manifest = job_manifest(minReplicas=2, maxReplicas=2, maxBatchSize=8, checkpoint=NEVER)
    job = workspace.submit(manifest)
    job.wait_until_training(2)
    job.wait_for("batch size of 8", lambda status: status.get("batchSize") == 8)
    two = job.uids()

    # Bounds of the batch reach the trainers; the pods stay.
    job.edit(maxBatchSize=16, localBszBounds={"lower": 8, "upper": 8})
    status = job.wait_for("batch size of 16", lambda status: status.get("batchSize") == 16)
    assert status["localBatchSize"] == 8
    assert status["observedGeneration"] == 2
    assert job.uids() == two
    job.wait_for_event("SpecChanged")

    # So do bounds of the replicas.
    job.edit(minReplicas=3, maxReplicas=3, localBszBounds={"lower": 4, "upper": 4})
    job.wait_until_training(3)
    job.wait_for("batch size of 12", lambda status: status.get("batchSize") == 12)
    assert two.items() < job.uids().items()
    job.edit(minReplicas=1, maxReplicas=1)
    status = job.wait_until_training(1)
    wait_until(lambda: job.uids() == {0: two[0]}, "the surplus pods' end")
    assert (status["rescales"], status["disruptions"], status["failures"]) == (2, 0, 0)

    # Inside the cluster, the metrics service answers at the address that pods get.
    code = (
        "import os, ssl, urllib.request; "
        "context = ssl.create_default_context(cafile=os.environ['ADASCALE_CA_FILE']); "
        f"url = os.environ['ADASCALE_API_URL'] + '/jobs/{job.id}/gain'; "
        "print(urllib.request.urlopen(url, timeout=10, context=context).read().decode())"
    )
    assert '"progress":' in job.run_in(0, code)

    # Suspended: the pods are deleted and their state is saved.
    step = step_of(job)
    job.edit(suspend=True)
    wait_until_at_rest(job, "Suspended")
    job.edit(suspend=False)
    job.wait_until_training(1)
    entered = job.entered()
    assert entered >= step > 0

    # The job completes at scaleInvariantSteps, and is deleted after ttlSecondsAfterFinished.
    job.edit(scaleInvariantSteps=1)
    job.kubectl("wait", "--for=condition=Complete", "asj/paced", "--timeout=120s", timeout=140)
    status = job.status()
    assert (status["state"], status["progressText"]) == ("Complete", "100%")
    assert (status["disruptions"], status["failures"]) == (0, 0)
    assert "enters generation" in job.logs()
    job.edit(ttlSecondsAfterFinished=1)
    wait_until(lambda: not exists(job.raw), "the job's end")
    wait_until_nothing_is_left(system, job)
    assert exists(system.core.read_namespaced_persistent_volume_claim, "shared", job.namespace)


def test_after_edits_in_quick_succession_the_last_holds_and_no_step_is_lost(workspace: Workspace) -> None:
    manifest = job_manifest(maxReplicas=1, checkpoint=NEVER)
    template = manifest["spec"]["template"]
    environment = template["spec"]["containers"][0]["env"]
    job = workspace.submit(manifest)
    job.wait_until_training(1)
    step = step_of(job)

    environment.append({"name": "EDIT", "value": "0"})
    for edit in ("1", "2"):
        environment[-1]["value"] = edit
        job.edit(suspend=True)
        job.edit(template=template, replicaLimit=0)
        job.edit(suspend=False, minReplicas=2, maxReplicas=2)
        job.edit(replicaLimit=None, localBszBounds={"lower": 4, "upper": 8})

    generation = job.raw()["metadata"]["generation"]
    job.wait_for("its last spec", lambda status: status.get("observedGeneration") == generation)

    def edits() -> list[str]:
        pods = [pod for pod in job.pods().values() if pod.metadata.deletion_timestamp is None]
        return [each.value for pod in pods for each in pod.spec.containers[0].env if each.name == "EDIT"]

    # One more pod than wanted joins before the last of the template before leaves. A pod that is deleted just
    # after its start may not have got the signal.
    wait_until(lambda: edits() == ["2", "2"] and job.pods().keys() == {0, 1}, "the last template alone", 180)
    status = job.wait_until_training(2, timeout=180)
    assert status["failures"] == 0
    assert job.entered() >= step > 0

    def is_settled() -> bool:
        view, recorded = job.view(), job.status()["allocation"]["generation"]
        return bool(view["active"]["generation"] == view["desired"]["generation"] == recorded)

    wait_until(is_settled, "the last allocation")


def test_a_deleted_job_leaves_only_the_users_claim(system: System, workspace: Workspace) -> None:
    manifest = job_manifest("again", maxReplicas=1, checkpoint=NEVER)
    again = workspace.submit(manifest)
    if not system.storage.dynamic:
        system.storage.provide(workspace.namespace, "own-checkpoints", ["ReadWriteOnce"])
    own = workspace.submit(job_manifest("own", minReplicas=2, maxReplicas=2, checkpoint={}))
    read_claim = system.core.read_namespaced_persistent_volume_claim

    # A job that names no place for its state has a claim of its own, which keeps its replicas together.
    status = own.wait_until_training(2)
    assert status["claim"] == "own-checkpoints"
    assert len({pod.spec.node_name for pod in own.pods().values()}) == 1
    own.wait_for_event("SingleNode")
    assert exists(read_claim, "own-checkpoints", own.namespace)
    own.delete()

    # A new job of the same name continues from the checkpoints in the claim.
    again.wait_until_training(1)
    step = step_of(again)
    before = again.raw()["metadata"]["uid"]
    again.delete()
    again = workspace.submit(manifest)
    status = again.wait_until_training(1)
    assert again.raw()["metadata"]["uid"] != before
    assert status["allocation"] == {"generation": 1, "replicas": 1}
    assert (status["rescales"], status["disruptions"], status["failures"]) == (0, 0, 0)
    # Of its first report: for a moment the pod of the deleted job may still be there, with its output.
    assert step_of(again) >= step > 0

    wait_until(lambda: not exists(own.raw), "the job's end")
    wait_until_nothing_is_left(system, own)
    wait_until(lambda: not exists(read_claim, "own-checkpoints", own.namespace), "the end of its claim")

    # A deadline that has already passed ends a running job.
    again.edit(activeDeadlineSeconds=1)
    again.kubectl("wait", "--for=condition=Failed", "asj/again", "--timeout=60s", timeout=80)
    condition = again.condition("Failed")
    assert condition["reason"] == "DeadlineExceeded"
    assert condition["message"] == "activeDeadlineSeconds (1) exceeded"
    wait_until(lambda: not again.pods(), "the end of its pods")

    again.delete()
    wait_until_nothing_is_left(system, again)
    assert exists(read_claim, "shared", again.namespace)
