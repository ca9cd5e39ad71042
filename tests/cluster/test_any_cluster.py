"""What clusters add to pods, forbid, and preempt: admission, sidecars, priorities."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from adascale_core import names
from cluster.devices import EACH, Devices
from cluster.system import Manifest, System, Workspace, job_manifest, succeeded, wait_until

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


@pytest.mark.release
@pytest.mark.disturbs
def test_a_node_is_drained_when_a_budget_allows_it_while_a_job_grows(
    system: System, workspace: Workspace, devices: Devices
) -> None:
    job = workspace.submit(
        job_manifest(minReplicas=1, maxReplicas=2 * EACH, replicaLimit=EACH, container=devices.container())
    )
    job.wait_until_training(EACH)
    first = job.uids()
    near = {pod.spec.node_name for pod in job.pods().values()}
    labels = {names.LABEL_JOB: job.name}
    budget = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "all", "namespace": workspace.namespace},
        "spec": {"minAvailable": EACH, "selector": {"matchLabels": labels}},
    }
    system.apply([budget])

    def is_counted() -> bool:
        found = json.loads(job.kubectl("get", "pdb", "all", "-o", "json"))
        return bool(found["status"].get("currentHealthy") == EACH)

    wait_until(is_counted, "the budget to count the pods")
    # Only the pods of this job: other tests have theirs on the node.
    selected = (
        f"--pod-selector={names.LABEL_JOB_UID}={job.raw()['metadata']['uid']}",
        "--delete-emptydir-data",
    )
    node = next(iter(near))
    try:
        refused = system.kubectl("drain", node, *selected, "--timeout=5s")
        assert "disruption budget" in refused.stderr
        assert job.uids() == first
        system.kubectl("uncordon", node)
        job.kubectl("delete", "pdb", "all")
        (node, *_) = set(devices.nodes) - near or devices.nodes
        job.edit(replicaLimit=2 * EACH)
        job.wait_for("a larger count", lambda status: status["desiredReplicas"] > EACH)
        succeeded(system.kubectl("drain", node, *selected, "--timeout=120s", timeout=140))
        status = job.wait_until_training(EACH, timeout=240)
        assert status["failures"] == 0
        assert {pod.spec.node_name for pod in job.pods().values()} == set(devices.nodes) - {node}
    finally:
        for each in devices.nodes:
            system.kubectl("uncordon", each)
    job.wait_until_training(2 * EACH, timeout=240)


def test_pods_of_an_edited_template_replace_the_others_one_by_one(workspace: Workspace) -> None:
    manifest = job_manifest(maxReplicas=2, checkpoint={"claimName": "shared", "intervalSeconds": 3600})
    job = workspace.submit(manifest)
    job.wait_until_training(2)
    before = set(job.uids().values())
    generation = job.view()["active"]["generation"]
    template = manifest["spec"]["template"]
    (container,) = template["spec"]["containers"]
    changed = {**container, "env": [*container["env"], {"name": "CHANGED", "value": "1"}]}
    job.edit(template={"spec": {**template["spec"], "containers": [changed]}})

    def has_new_pods() -> bool:
        uids = job.uids()
        return uids.keys() == {0, 1} and not before.intersection(uids.values())

    wait_until(has_new_pods, "two pods of the new template", patience=180)
    job.wait_until_training(2)
    # A loss and a growth for each of the pods: the job never stood at 0 replicas.
    view = job.view()
    assert view["active"]["generation"] >= generation + 4
    assert view["active"]["members"][0]["holds"]
    assert job.run_in(0, "import os; print(os.environ['CHANGED'])").strip() == "1"
    assert job.status()["failures"] == 0
    # Nothing is left of it.
    job.delete()
    wait_until(lambda: not job.pods(ended=True), "the end of its pods", patience=90)


def test_a_job_of_a_high_priority_gets_the_place_of_a_pod_of_a_lower_one(
    system: System, workspace: Workspace, devices: Devices
) -> None:
    near, _ = devices.nodes
    high = {
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": {"name": workspace.namespace},
        "value": 1000,
    }
    with devices.taken(workspace, near), applied(system, high):
        container, needed = devices.container(), 2 * EACH
        plain = workspace.submit(job_manifest("plain", minReplicas=needed, container=container))
        plain.wait_for_condition("Running", "InsufficientCapacity", status="False")
        pod = {"priorityClassName": workspace.namespace}
        urgent = workspace.submit(job_manifest("urgent", minReplicas=needed, container=container, pod=pod))
        urgent.wait_until_training(needed)
        assert "Preempting" in [reason for reason, _ in urgent.events()]
        assert plain.status()["state"] == "Pending"
