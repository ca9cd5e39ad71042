"""Jobs that a real Kueue queues: they run once admitted, grow within the quota, and save state when evicted.

Each test has queues of its own, with a quota of pods. Without Kueue, only the tests that need none run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
from kubernetes import client
from kubernetes.client.exceptions import ApiException

from cluster.system import JobUnderTest, Manifest, System, Workspace, job_manifest, succeeded, wait_until
from cluster.test_opportunistic import priority_classes

# CI runs one of them: `.ci/kueue` installs Kueue.
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

GROUP = "kueue.x-k8s.io"
VERSION = "v1beta2"
QUEUE_NAME = f"{GROUP}/queue-name"


class Queue:
    """A LocalQueue in a namespace, with a ClusterQueue and flavors of its own.

    Args:
        api: a client with all permissions.
        namespace: the namespace.
        flavors: the labels of the nodes of each flavor, in the order in which Kueue tries them.
    """

    def __init__(
        self, api: client.ApiClient, namespace: str, flavors: Mapping[str, Mapping[str, str]] | None = None
    ) -> None:
        self._api = api
        self._objects: Any = client.CustomObjectsApi(api)
        self.namespace = namespace
        self.name = namespace
        self._flavors = {f"{self.name}{suffix}": labels for suffix, labels in (flavors or {"": {}}).items()}

    def create(self) -> None:
        """Create them, without any quota."""
        try:
            client.ApiextensionsV1Api(self._api).read_custom_resource_definition(f"workloads.{GROUP}")
        except ApiException as error:
            if error.status != 404:
                raise
            pytest.skip("needs Kueue")
        for flavor, labels in self._flavors.items():
            self._create("resourceflavors", "ResourceFlavor", flavor, {"nodeLabels": dict(labels)})
        spec = {
            "namespaceSelector": {},
            "preemption": {"withinClusterQueue": "LowerPriority"},
            **self._groups({}),
        }
        self._create("clusterqueues", "ClusterQueue", self.name, spec)
        local = _object("LocalQueue", self.name, {"clusterQueue": self.name})
        self._objects.create_namespaced_custom_object(GROUP, VERSION, self.namespace, "localqueues", local)

    def delete(self) -> None:
        """Delete those that the namespace does not have."""
        for plural, kinds in (("clusterqueues", [self.name]), ("resourceflavors", self._flavors)):
            for name in kinds:
                self._objects.delete_cluster_custom_object(GROUP, VERSION, plural, name)

    def set_quota(self, pods: int, **others: int) -> None:
        """Let this number of pods run, on the first flavor, or on the one with a suffix."""
        self._objects.patch_cluster_custom_object(
            GROUP, VERSION, "clusterqueues", self.name, {"spec": self._groups({"": pods, **others})}
        )

    def stop(self, policy: str) -> None:
        """Set whether it admits: `None`, `Hold`, or `HoldAndDrain`, which evicts what is admitted, too."""
        self._objects.patch_cluster_custom_object(
            GROUP, VERSION, "clusterqueues", self.name, {"spec": {"stopPolicy": policy}}
        )

    def reserved(self) -> int:
        """Return the number of pods for which quota is reserved."""
        found = self._objects.get_cluster_custom_object(GROUP, VERSION, "clusterqueues", self.name)
        flavors = (found.get("status") or {}).get("flavorsReservation") or ()
        return sum(
            int(each["total"]) for flavor in flavors for each in flavor["resources"] if each["name"] == "pods"
        )

    def _groups(self, pods: Mapping[str, int]) -> Manifest:
        flavors = []
        for flavor in self._flavors:
            count = pods.get(flavor.removeprefix(self.name).removeprefix("-"), 0)
            quotas = {"pods": str(count), "cpu": "100", "memory": "1Ti", "nvidia.com/gpu": "100"}
            resources = [{"name": name, "nominalQuota": quota} for name, quota in quotas.items()]
            flavors.append({"name": flavor, "resources": resources})
        return {"resourceGroups": [{"coveredResources": list(quotas), "flavors": flavors}]}

    def _create(self, plural: str, kind: str, name: str, spec: Manifest) -> None:
        made = _object(kind, name, spec)
        self._objects.create_cluster_custom_object(GROUP, VERSION, plural, made)


def _object(kind: str, name: str, spec: Manifest) -> Manifest:
    return {"apiVersion": f"{GROUP}/{VERSION}", "kind": kind, "metadata": {"name": name}, "spec": spec}


@pytest.fixture
def queue(system: System, workspace: Workspace) -> Iterator[Queue]:
    """A queue without quota."""
    made = Queue(system.api, workspace.namespace)
    made.create()
    yield made
    made.delete()


def queued(queue: Queue, **spec: Any) -> Manifest:
    """Return a job of the queue."""
    return in_queue(queue, job_manifest(**spec))


def in_queue(queue: Queue, manifest: Manifest) -> Manifest:
    """Put a job into the queue."""
    manifest["metadata"] |= {"labels": {QUEUE_NAME: queue.name}}
    return manifest


def waits_in_queue(job: JobUnderTest) -> None:
    """Wait until Kueue has said why it does not admit the job."""

    def says_why() -> bool:
        condition = job.condition("Running")
        return condition.get("reason") == "Queued" and "quota" in condition["message"].lower()

    wait_until(says_why, "Kueue's reason")


def resumed_step(job: JobUnderTest, last: int) -> int:
    """Wait until the job trains again. Returns the step from which it has continued."""
    job.wait_for("training", lambda status: status.get("replicas", 0) > 0)
    step = job.entered()
    assert step >= last, "it has continued from an earlier step than the last one that was reported"
    return step


def test_a_queued_job_waits_for_its_quota_and_grows_and_shrinks_with_it(
    workspace: Workspace, queue: Queue
) -> None:
    job = workspace.submit(queued(queue, scaleInvariantSteps=100000))
    waits_in_queue(job)
    assert (job.status()["state"], job.status().get("allocation")) == ("Pending", None)
    queue.set_quota(1)
    job.wait_until_training(1)
    first = job.uids()
    queue.set_quota(2)
    status = job.wait_until_training(2)
    assert first.items() <= job.uids().items(), "the replica that trained stays"
    assert (status["disruptions"], status["failures"]) == (0, 0)
    assert queue.reserved() == 2
    job.kubectl("scale", f"asj/{job.name}", "--replicas=1")
    job.wait_until_training(1)
    wait_until(lambda: queue.reserved() == 1, "the quota that is given back")
    wait_until(lambda: job.uids() == first, "the pod that leaves to be gone")


@pytest.mark.release
def test_replicas_that_wait_for_quota_let_the_others_train(workspace: Workspace, queue: Queue) -> None:
    queue.set_quota(1)
    job = workspace.submit(queued(queue, scaleInvariantSteps=100000))
    job.wait_until_training(1)
    first = job.uids()
    # More than there is quota for, by the spec alone.
    job.edit(minReplicas=2)
    condition = job.wait_for_condition("Rescaling", "Queued")
    assert condition["message"].startswith("1 -> 2: waiting for Kueue to reserve quota")
    before = job.view()["latest"]["step"]
    wait_until(lambda: job.view()["latest"]["step"] > before, "a step beside the pods that wait")
    begun = time.monotonic()
    queue.set_quota(2)
    status = job.wait_until_training(2)
    print(f"2 replicas {time.monotonic() - begun:.1f} s after there was quota")
    assert first.items() <= job.uids().items()
    assert (status["disruptions"], status["failures"]) == (0, 0)


@pytest.mark.release
def test_a_job_that_kueue_preempts_saves_its_state_and_continues_when_there_is_quota(
    system: System, workspace: Workspace, queue: Queue
) -> None:
    queue.set_quota(2)
    job = workspace.submit(queued(queue, scaleInvariantSteps=100000))
    job.wait_until_training(2)
    with preempted_by_another_job(system, queue):
        job.wait_for("end of all replicas", lambda status: status["replicas"] == 0)
        last = job.view()["latest"]["step"]
        condition = job.wait_for_condition("Running", "Queued", status="False")
        assert "LocalQueue" in condition["message"]
        assert job.status()["state"] == "Pending"
        assert "Queued" in job.wait_for_event("Queued")
    resumed_step(job, last)
    assert (job.status()["failures"], job.status()["state"]) != (1, "Failed")


@pytest.mark.release
def test_kueue_admits_extra_pods_one_by_one_and_preempts_as_many_as_it_needs_while_the_others_train(
    system: System, workspace: Workspace, queue: Queue
) -> None:
    with priority_classes(system, spare=-10) as classes:
        settings = {"priorityClassName": classes["spare"], "queueName": queue.name}
        job = workspace.submit(job_manifest(scaleInvariantSteps=100000, opportunistic=settings))
        job.wait_until_training(1)
        core = job.uids()
        condition = job.wait_for_condition("Rescaling", "Queued")
        assert "waiting for Kueue to reserve quota" in condition["message"]
        queue.set_quota(1)
        job.wait_until_training(2)
        queue.set_quota(3)
        status = job.wait_until_training(4, 240)
        assert (status["extraReplicas"], status["disruptions"]) == (3, 0)
        with preempted_by_another_job(system, queue):
            status = job.wait_until_training(2)
            assert core.items() <= job.uids().items()
            assert (status["extraReplicas"], status["failures"]) == (1, 0)
            before = job.view()["latest"]["step"]
            wait_until(lambda: job.view()["latest"]["step"] > before, "a step of the others")

        def may_grow() -> bool:
            # What was measured beside other tests may keep it from growing.
            limits = system.get(f"/jobs/{job.id}/decision")["limits"]
            return any(each["reason"].endswith("holds 4 replicas") for each in limits)

        wait_until(may_grow, "a limit of 4 replicas after there is quota again", patience=60)
        assert core.items() <= job.uids().items()


@contextmanager
def preempted_by_another_job(system: System, queue: Queue) -> Iterator[None]:
    """Have Kueue preempt for a Job of a higher priority, which is deleted after the context."""
    priority = {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "WorkloadPriorityClass",
        "metadata": {"name": queue.name},
        "value": 1000,
    }
    system.apply([priority, other_job(queue, queue.name)])
    try:
        yield
    finally:
        succeeded(system.kubectl("-n", queue.namespace, "delete", "job", "other", "--wait=false"))
        succeeded(system.kubectl("delete", "workloadpriorityclass", queue.name))


def other_job(queue: Queue, priority: str) -> Manifest:
    """Return a Job that takes all of the quota."""
    restricted = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    container = {
        "name": "other",
        "image": "adascale-controller:dev",
        "imagePullPolicy": "IfNotPresent",
        "command": ["python", "-c", "import time; time.sleep(3600)"],
        "securityContext": restricted,
        "resources": {"requests": {"cpu": "10m", "memory": "16Mi"}},
    }
    labels = {QUEUE_NAME: queue.name, f"{GROUP}/priority-class": priority}
    pod = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 0, "containers": [container]}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "other", "namespace": queue.namespace, "labels": labels},
        "spec": {"parallelism": 2, "completions": 2, "suspend": True, "template": {"spec": pod}},
    }


def test_two_jobs_start_one_after_the_other_under_a_quota_that_holds_one_of_them(
    workspace: Workspace, queue: Queue
) -> None:
    """Neither ever holds a part of its smallest count."""
    queue.set_quota(3)
    spec = {"minReplicas": 2, "maxReplicas": 2, "scaleInvariantSteps": 100000}
    jobs = [workspace.submit(in_queue(queue, job_manifest(name, **spec))) for name in ("first", "second")]
    wait_until(lambda: any(job.status().get("replicas") == 2 for job in jobs), "one that trains")
    (waits,) = (job for job in jobs if job.status().get("replicas") != 2)
    (trains,) = (job for job in jobs if job is not waits)
    waits_in_queue(waits)
    assert queue.reserved() == 2
    assert {pod.spec.node_name for pod in waits.pods().values()} == {None}
    trains.edit(suspend=True)
    waits.wait_until_training(2)
    wait_until(lambda: not trains.pods(ended=True), "the end of its pods")
    assert queue.reserved() == 2
    waits.edit(scaleInvariantSteps=1)
    waits.wait_for("its end", lambda status: status["state"] == "Complete")
    trains.edit(suspend=False)
    trains.wait_until_training(2)
    for job in jobs:
        job.delete()
    wait_until(lambda: not any(job.pods(ended=True) for job in jobs), "the end of their pods", patience=90)
    wait_until(lambda: queue.reserved() == 0, "the return of their quota")
