"""Jobs get what the nodes have for them, or what is found by trying.

What replicas ask for here is a resource that the test gives to two nodes, two of it each, as a device plugin
would: other pods of the cluster take nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from adascale_core import names
from cluster.devices import Devices
from cluster.system import JobUnderTest, System, Workspace, job_manifest, succeeded, wait_until

pytestmark = pytest.mark.timeout(600)


@contextmanager
def drained(system: System, node: str, job: JobUnderTest) -> Iterator[None]:
    """The node is drained of the pods of a job, and takes no new pods."""
    # A node is drained of pods by their labels, in all namespaces.
    selected = f"--pod-selector={names.LABEL_JOB_UID}={job.raw()['metadata']['uid']}"
    try:
        succeeded(
            system.kubectl("drain", node, selected, "--delete-emptydir-data", "--timeout=60s", timeout=80)
        )
        yield
    finally:
        wait_until(lambda: system.kubectl("uncordon", node).returncode == 0, "the node to take pods again")


def waits_for_room(job: JobUnderTest, replicas: str) -> None:
    """It says so, and has no pods."""
    condition = job.wait_for_condition("Running", "InsufficientCapacity", status="False")
    assert condition["message"].startswith(f"Insufficient capacity for {replicas}")
    assert job.status()["state"] == "Pending"
    assert not job.pods()


def finish(job: JobUnderTest) -> None:
    """Have a job come to its end."""
    job.edit(scaleInvariantSteps=1)
    job.kubectl("wait", "--for=condition=Complete", f"asj/{job.name}", "--timeout=120s", timeout=140)


def test_jobs_share_the_free_resources_of_the_nodes(workspace: Workspace, devices: Devices) -> None:
    near, far = devices.nodes
    container = devices.container()
    with devices.taken(workspace, near):
        with devices.taken(workspace, far, count=2):
            # One is left.
            first = workspace.submit(job_manifest("first", minReplicas=2, container=container))
            waits_for_room(first, "2 replicas")
        # The room that is freed is used, and no more: the third of four is as far as it goes.
        status = first.wait_until_training(3)
        assert status["desiredReplicas"] == 3
        assert first.condition("Rescaling")["reason"] == "Stable"
        three = first.uids()
    first.wait_until_training(4)
    four = first.uids()
    assert three.items() < four.items()

    # A second job makes the first give replicas back; a third finds no room, since both have what they need.
    second = workspace.submit(job_manifest("second", minReplicas=2, maxReplicas=2, container=container))
    third = workspace.submit(job_manifest("third", maxReplicas=1, container=container))
    waits_for_room(third, "1 replica")
    first.wait_until_training(2)
    wait_until(lambda: first.uids().items() < three.items(), "the surplus pods' end")
    status = second.wait_until_training(2)
    assert (status["rescales"], status["disruptions"], status["failures"]) == (0, 0, 0)
    assert third.status()["state"] == "Pending"

    # With the end of the second there is room for the third.
    finish(second)
    third.wait_until_training(1)
    finish(first)
    finish(third)
    for job in (first, second, third):
        status = job.status()
        assert (status["state"], status["disruptions"], status["failures"]) == ("Complete", 0, 0)
        assert "ReplicaLost" not in [reason for reason, _ in job.events()]
    # No try was made for what there is no room for.
    assert "Unschedulable" not in [reason for reason, _ in first.events()]


def test_training_continues_at_the_old_size_when_replicas_are_unschedulable(
    workspace: Workspace, devices: Devices
) -> None:
    # The operator does not evaluate affinity between pods, so the second node seems to have capacity.
    _, far = devices.nodes
    apart = {"labelSelector": {"matchLabels": {"quiet": "please"}}, "topologyKey": "kubernetes.io/hostname"}
    affinity = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}}
    manifest = job_manifest(minReplicas=2, container=devices.container(), pod={"affinity": affinity})
    with devices.taken(workspace, far, quiet="please"):
        job = workspace.submit(manifest)
        job.wait_until_training(2)
        two = job.uids()

        condition = job.wait_for_condition("Rescaling", "Unschedulable")
        assert condition["message"].startswith("2 -> 3: ")
        assert condition["message"].endswith("; training continues on 2 replicas")
        assert job.condition("Running")["message"] == "Training on 2 replicas"
        step = job.view()["latest"]["step"]
        wait_until(lambda: job.view()["latest"]["step"] > step, "more steps")

        # The try is given up.
        condition = job.wait_for_condition("Rescaling", "Unschedulable", status="False", timeout=180)
        assert condition["message"].startswith("3 replicas could not be scheduled: ")
        status = job.status()
        assert (status["state"], status["replicas"], status["desiredReplicas"]) == ("Running", 2, 2)
        wait_until(lambda: job.uids() == two, "the end of the pod that found no place")
        assert (status["rescales"], status["disruptions"], status["failures"]) == (0, 0, 0)

    # More room than there seemed to be then: that is tried at once.
    job.wait_until_training(4)
    assert two.items() < job.uids().items()
    changes = [message.split(": ")[0] for reason, message in job.events() if reason == "Unschedulable"]
    assert set(changes) == {"2 -> 3", "3 replicas could not be scheduled"}


# -- types of accelerators --------------------------------------------------------------------------------


@contextmanager
def labelled(system: System, **types: str) -> Iterator[None]:
    """The nodes have accelerators of these types."""
    for node, name in types.items():
        succeeded(system.kubectl("label", "node", node, f"{names.DEFAULT_ACCELERATOR_LABEL}={name}"))
    try:
        yield
    finally:
        for node in types:
            succeeded(system.kubectl("label", "node", node, f"{names.DEFAULT_ACCELERATOR_LABEL}-"))


@pytest.mark.disturbs
def test_a_job_runs_on_one_type_of_accelerator_and_moves_when_its_nodes_are_gone(
    system: System, workspace: Workspace, devices: Devices
) -> None:
    near, far = devices.nodes
    if any(
        names.DEFAULT_ACCELERATOR_LABEL in (node.metadata.labels or {})
        for node in system.core.list_node().items
    ):
        pytest.skip("the nodes of this cluster have types already")

    def nodes_of(job: JobUnderTest) -> set[str]:
        return {pod.spec.node_name for pod in job.pods().values()}

    with labelled(system, **{near: "test-a", far: "test-b"}):
        # Of two types of the same size the first by name; the second job gets the type that is left.
        first = workspace.submit(job_manifest("first", minReplicas=2, container=devices.container()))
        first.wait_until_training(2)
        assert (first.status()["accelerator"], nodes_of(first)) == ("test-a", {near})
        made = first.pods()[0].metadata
        assert made.annotations[names.ANNOTATION_ACCELERATOR] == "test-a"
        second = workspace.submit(job_manifest("second", minReplicas=2, container=devices.container()))
        second.wait_until_training(2)
        assert (second.status()["accelerator"], nodes_of(second)) == ("test-b", {far})
        third = workspace.submit(job_manifest("third", maxReplicas=1, container=devices.container()))
        waits_for_room(third, "1 replica")
        times = first.view()["step_times"]
        assert {each["accelerator"] for each in times} <= {"test-a"}

        # With the node of its type gone, the first job continues on the other type, from its last checkpoint.
        finish(second)
        finish(third)
        wait_until(lambda: first.saved_step() > 0, "a checkpoint")
        step = first.saved_step()
        with drained(system, near, first):
            first.wait_for("the other type", lambda status: status.get("accelerator") == "test-b")
            first.wait_until_training(2)
            assert nodes_of(first) == {far}
            wait_until(lambda: first.view()["latest"]["step"] > step, "steps beyond the checkpoint")
        status = first.status()
        assert status["failures"] == 0
        finish(first)
