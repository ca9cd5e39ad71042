"""What clusters add to pods, forbid, and preempt: admission, sidecars, priorities."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cluster.devices import EACH, Devices
from cluster.system import Manifest, System, Workspace, job_manifest, succeeded, wait_until
from cluster.test_opportunistic import priority_classes

pytestmark = pytest.mark.timeout(600)

ADMISSION = "admissionregistration.k8s.io/v1"


@contextmanager
def applied(system: System, *objects: Manifest) -> Iterator[None]:
    """These objects of the whole cluster exist."""
    system.apply(list(objects))
    try:
        yield
    finally:
        for each in objects:
            succeeded(system.kubectl("delete", each["kind"], each["metadata"]["name"], "--ignore-not-found"))


def test_a_container_beside_the_worker_keeps_no_job_from_its_end_and_no_worker_from_its_replacement(
    workspace: Workspace,
) -> None:
    sidecar = {
        "name": "proxy",
        "image": "adascale-worker:dev",
        "imagePullPolicy": "IfNotPresent",
        "command": ["python", "-c", "import signal; signal.signal(15, lambda *_: exit()); signal.pause()"],
    }
    manifest = job_manifest(maxReplicas=1, container={"name": "trainer"})
    template = manifest["spec"]["template"]
    template["spec"]["containers"].insert(0, sidecar)
    template["metadata"] = {"annotations": {"kubectl.kubernetes.io/default-container": "trainer"}}
    job = workspace.submit(manifest)
    job.wait_until_training(1)
    (first,) = job.pods().values()
    # The process of the agent is the first of its container.
    job.kubectl(
        "exec", first.metadata.name, "-c", "trainer", "--", "python", "-c", "import os; os.kill(1, 15)"
    )
    job.wait_for_event("SidecarRunsOn")
    wait_until(lambda: job.uids().get(0) not in (None, first.metadata.uid), "another pod")
    job.wait_until_training(1)
    assert job.status()["failures"] == 0
    job.edit(scaleInvariantSteps=1)
    job.kubectl("wait", "--for=condition=Complete", f"asj/{job.name}", "--timeout=120s", timeout=140)
    wait_until(lambda: not job.pods(), "the end of its pods")


def test_a_webhook_that_is_down_keeps_a_job_from_growing_and_from_nothing_else(
    system: System, workspace: Workspace
) -> None:
    job = workspace.submit(job_manifest(minReplicas=1, maxReplicas=2, replicaLimit=1))
    job.wait_until_training(1)
    first = job.uids()[0]
    webhook = {
        "apiVersion": ADMISSION,
        "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": f"{workspace.namespace}-down"},
        "webhooks": [
            {
                "name": "down.test.adascale.dev",
                "clientConfig": {"service": {"name": "missing", "namespace": workspace.namespace}},
                "rules": [
                    {
                        "apiGroups": [""],
                        "apiVersions": ["v1"],
                        "operations": ["CREATE"],
                        "resources": ["pods"],
                    }
                ],
                "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": workspace.namespace}},
                "failurePolicy": "Fail",
                "sideEffects": "None",
                "admissionReviewVersions": ["v1"],
            }
        ],
    }
    with applied(system, webhook):
        job.edit(replicaLimit=2)
        condition = job.wait_for_condition("Rescaling", "PodCreationFailed")
        assert 'failed calling webhook "down.test.adascale.dev"' in condition["message"]
        status = job.status()
        assert (status["state"], status["replicas"]) == ("Rescaling", 1)
    job.wait_until_training(2, timeout=240)
    assert job.uids()[0] == first


def test_a_job_of_a_high_priority_gets_the_place_of_a_pod_of_a_lower_one(
    system: System, workspace: Workspace, devices: Devices
) -> None:
    near, _ = devices.nodes
    with devices.taken(workspace, near), priority_classes(system, high=1000) as classes:
        container, needed = devices.container(), 2 * EACH
        plain = workspace.submit(job_manifest("plain", minReplicas=needed, container=container))
        plain.wait_for_condition("Running", "InsufficientCapacity", status="False")
        pod = {"priorityClassName": classes["high"]}
        urgent = workspace.submit(job_manifest("urgent", minReplicas=needed, container=container, pod=pod))
        urgent.wait_until_training(needed)
        assert "Preempting" in [reason for reason, _ in urgent.events()]
        assert plain.status()["state"] == "Pending"
