"""What admission makes of pods: capacity is estimated from the pod as it will be, not from the template."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from adascale_controller.job.placement_backoff import FailedPlacement
from adascale_controller.job.reasons import Reason
from adascale_controller.operator.apply.kubernetes_cluster import ApiServerError
from adascale_controller.operator.observe.observed_job import ObservedJob
from adascale_controller.operator.runtime import lookup_fetcher
from adascale_controller.operator.runtime.lookup_fetcher import AdmissionReader
from adascale_controller.operator.types.kubernetes import ApiObject, ConditionType, Resource, merged
from support.fake_api_server import FakeApiServer
from support.fake_cluster import FakeCluster
from support.observed_jobs import NOW, ON_CPU, actions_for, condition, job, pod, training_job

TAINT = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
TOLERATION = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
NO_QUOTA = FailedPlacement(4, 2, Reason.QUOTA_EXCEEDED, "exceeded quota: gpus", NOW + 60, 8, 60.0)
Object = dict[str, Any]


def tolerate(pod: Object) -> Object:
    """Add a toleration, as ExtendedResourceToleration does for pods that request a GPU."""
    tolerations = [*(pod["spec"].get("tolerations") or []), TOLERATION]
    return {**pod, "spec": {**pod["spec"], "tolerations": tolerations}}


def tainted(**settings: Any) -> FakeCluster:
    """Return a cluster whose only node has a taint."""
    cluster = FakeCluster(types=["a100"], **settings)
    (node,) = cluster.objects[Resource.NODES].values()
    cluster.write(Resource.NODES, {**node, "spec": {"taints": [TAINT]}})
    return cluster


def test_a_toleration_that_admission_adds_makes_tainted_nodes_eligible() -> None:
    cluster = tainted(admit=tolerate)
    cluster.submit()
    cluster.run_cycles()
    assert [raw["spec"]["nodeName"] for raw in cluster.live_pods] == ["a100"]
    assert cluster.condition()["reason"] == "Training"


def test_a_job_without_the_toleration_waits_and_names_the_taint() -> None:
    cluster = tainted()
    cluster.submit()
    cluster.run_cycles()
    assert cluster.live_pods == []
    assert cluster.condition()["reason"] == "InsufficientCapacity"
    assert cluster.condition()["message"] == (
        "Insufficient capacity for 1 replica. 1 node: taint nvidia.com/gpu=present:NoSchedule, and the pods "
        "have no toleration of it (spec.template.spec.tolerations)"
    )


def test_requests_that_admission_adds_are_counted() -> None:
    def limit(pod: Object) -> Object:
        containers = [
            {**each, "resources": {"requests": {"nvidia.com/gpu": "60"}}}
            for each in pod["spec"]["containers"]
        ]
        return {**pod, "spec": {**pod["spec"], "containers": containers}}

    cluster = FakeCluster(types=["a100"], admit=limit)
    cluster.submit(minReplicas=2)
    cluster.run_cycles()
    assert cluster.condition()["reason"] == "InsufficientCapacity", "the node has 100"


def test_jobs_of_a_template_share_a_dry_run_and_it_is_repeated_later() -> None:
    asked = []

    def record(pod: Object) -> Object:
        if "generateName" in pod["metadata"]:
            asked.append(pod["metadata"]["namespace"])
        return tolerate(pod)

    cluster = tainted(admit=record)
    cluster.submit()
    cluster.submit("other")
    cluster.run_cycles(5)
    assert asked == ["team"]
    cluster.now += lookup_fetcher.ADMISSION_INTERVAL
    cluster.full = True
    cluster.run_cycles(2)
    assert asked == ["team", "team"]


@pytest.mark.parametrize(
    "error",
    [
        ApiServerError("bad request", 400, "admission webhook x does not support dry run"),
        ApiServerError("forbidden", 403, "exceeded quota: compute"),
        ApiServerError("the API server does not answer"),
    ],
)
def test_without_an_answer_of_admission_the_template_is_used(error: ApiServerError) -> None:
    def refuse(pod: Object) -> Object:
        if "generateName" in pod["metadata"]:
            raise error
        return pod

    cluster = FakeCluster(types=["a100"], admit=refuse)
    cluster.submit()
    cluster.run_cycles()
    assert cluster.condition()["reason"] == "Training"


def refuse_dry_runs(pod: Object) -> Object:
    """Add a toleration, by a webhook that does not support dry runs."""
    if "generateName" in pod["metadata"]:
        raise ApiServerError("bad request", 400, "admission webhook x does not support dry run")
    return tolerate(pod)


def test_without_dry_runs_the_priority_is_not_that_of_an_extra_pod() -> None:
    cluster = FakeCluster(admit=refuse_dry_runs)
    cluster.objects[Resource.PODS] = {f"digits-{rank}": {"spec": {"priority": rank}} for rank in range(2)}
    resource = job(template=ON_CPU)
    reader = AdmissionReader(cluster, lambda _: None)
    cached = ObservedJob(resource, [pod(1, is_extra=True, namespace="team"), pod(0)], frozenset())

    async def ask() -> None:
        await reader.ask(cached, NOW, asyncio.Semaphore())

    asyncio.run(ask())
    admission = reader.admission(resource)
    assert admission is not None
    assert admission.spec is not None
    assert admission.spec["priority"] == 0


def test_a_quota_that_limits_a_job_is_asked_for_often_and_noticed_when_it_is_raised() -> None:
    replies: list[str] = ["", "pods are forbidden: exceeded quota: gpus", ""]

    class Quota(FakeApiServer):
        async def admit_pod(self, manifest: ApiObject) -> ApiObject:
            if reply := replies.pop(0):
                raise ApiServerError("forbidden", 403, reply)
            return manifest

    limited = condition(actions_for(training_job(), 2, failed_placement=NO_QUOTA), ConditionType.RESCALING)
    status = {"conditions": merged((), [limited], 1, NOW)}
    resource = job(status=status, template=ON_CPU)
    cached = ObservedJob(resource, (), frozenset())
    reader = AdmissionReader(Quota(), lambda _: None)
    found = []
    for number in range(3):
        now = NOW + number * lookup_fetcher.ADMISSION_QUOTA_INTERVAL
        assert reader.due_at(resource) <= now

        async def ask(moment: float = now) -> None:
            await reader.ask(cached, moment, asyncio.Semaphore())

        asyncio.run(ask())
        admission = reader.admission(resource)
        assert admission is not None
        assert admission.spec is not None
        found.append((admission.has_quota, admission.asked_at - NOW))
    assert found == [(True, 0.0), (False, 10.0), (True, 20.0)]


def test_an_answer_stays_while_admission_can_not_be_asked_again() -> None:
    cluster = tainted(admit=tolerate)
    cluster.submit()
    cluster.run_cycles()

    def refuse(pod: Object) -> Object:
        raise ApiServerError("the API server does not answer")

    cluster.admit = refuse
    cluster.now += lookup_fetcher.ADMISSION_INTERVAL
    cluster.run_cycles()
    assert cluster.condition()["reason"] == "Training"
    assert cluster.writes == []
