"""The pods of the smallest count are a gang, placed together, where the API server serves PodGroups."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from adascale_controller.job.phase import JobPhase
from adascale_controller.operator.apply.applier import Applier
from adascale_controller.operator.apply.kubernetes_cluster import ApiServerError
from adascale_controller.operator.apply.manifests import pod_group_manifest, pod_manifest
from adascale_controller.operator.observe.adascalejob import template_digest
from adascale_controller.operator.observe.observed_job import ObservedJob
from adascale_controller.operator.observe.pods import Pod, read_pod
from adascale_controller.operator.reconcile.job_phase import assess
from adascale_controller.operator.types.actions import Actions, NewPod, StatusChange
from adascale_controller.operator.types.kubernetes import ApiObject, Resource
from support.fake_api_server import FakeApiServer
from support.fake_cluster import FakeCluster
from support.observed_jobs import DIGEST, NOW, SPEC, actions_for, job, observed, pod, view

TWO = replace(SPEC, min_replicas=2)
TEMPLATE = {"spec": {"containers": [{"name": "worker", "image": "trainer:1"}]}}
GANG = job().gang_name(2, DIGEST)


def started(*pods: Pod, count: int = 2) -> ObservedJob:
    """Return a job that starts, with these pods."""
    return observed(job((1, count), spec=TWO, template=TEMPLATE), view((1, count), spec=TWO), list(pods))


def waiting(rank: int, **changes: Any) -> Pod:
    """Return a pod that waits for a node."""
    return pod(rank, node=None, phase="Pending", has_started=False, **changes)


def groups(job_: ObservedJob, count: int) -> list[tuple[int, int]]:
    """Return the rank of each pod that is created, and the size of its group."""
    return [(each.rank, each.group_size) for each in actions_for(job_, count).create_pods]


@pytest.mark.parametrize(
    ("present", "made"),
    [
        pytest.param((), [(0, 2), (1, 2), (2, 0)], id="a start"),
        pytest.param((waiting(0, gang=GANG),), [(1, 2), (2, 0)], id="a start that was interrupted"),
        pytest.param((waiting(0),), [(1, 0), (2, 0)], id="PodGroups are not served"),
        pytest.param((pod(0, gang=GANG),), [(1, 0), (2, 0)], id="a lost pod"),
        pytest.param((pod(2),), [(0, 2), (1, 2)], id="all of them are lost"),
        pytest.param((pod(1, deletion_deadline=NOW + 30),), [(0, 2), (2, 0)], id="one of them is leaving"),
    ],
)
def test_the_pods_of_the_smallest_count_are_a_gang_when_a_job_starts(
    present: Sequence[Pod], made: list[tuple[int, int]]
) -> None:
    assert groups(started(*present, count=3), 3) == made


def test_a_smallest_count_of_one_replica_needs_no_gang() -> None:
    assert groups(observed(job((1, 2)), view((1, 2))), 2) == [(0, 0), (1, 0)]


@pytest.mark.parametrize(("node", "phase"), [(None, JobPhase.STOPPING), ("node1", JobPhase.RUNNABLE)])
def test_pods_that_wait_in_a_gang_of_another_size_are_replaced(node: str | None, phase: JobPhase) -> None:
    other = job().gang_name(3, DIGEST)
    job_ = started(*(replace(waiting(rank, gang=other), node=node) for rank in range(2)))
    assert assess(job_).phase is phase
    if phase is JobPhase.STOPPING:
        assert "the smallest count has changed" in assess(job_).message
        (stop, _) = actions_for(replace(job_, service=view((2, 0), (2, 0), spec=TWO))).stop_pods
        assert stop.name == "digits-0"


def test_a_gang_and_its_pods_have_one_priority() -> None:
    template = {
        "spec": {**TEMPLATE["spec"], "priorityClassName": "high", "schedulingGroup": {"podGroupName": "mine"}}
    }
    made = replace(job(spec=TWO), template=template)
    first, later = pod_manifest(made, NewPod(0, 0, group_size=2)), pod_manifest(made, NewPod(2, 0))
    digest = first["metadata"]["annotations"]["adascale.dev/template"]
    group = pod_group_manifest(made, 2, digest, {"priorityClassName": "high", "priority": 10})
    assert group["spec"] == {
        "schedulingPolicy": {"gang": {"minCount": 2}},
        "priorityClassName": "high",
    }
    name = group["metadata"]["name"]
    assert first["spec"]["schedulingGroup"] == {"podGroupName": name}
    assert "schedulingGroup" not in later["spec"], "that of the template would wait for other pods"
    assert name == made.gang_name(2, digest) != made.gang_name(3, digest)
    assert group["metadata"]["ownerReferences"] == first["metadata"]["ownerReferences"]
    raw = {**first, "metadata": {**first["metadata"], "uid": "1"}}
    assert read_pod(raw).gang == name


def apply(cluster: FakeCluster, pods: int = 3) -> None:
    """Create the pods of a start."""
    job_ = started()
    job_ = replace(job_, digest=template_digest(job_.resource, single_node=False))
    applier = Applier(cluster, cluster.service, lambda *_: None, "operator")
    made = tuple(NewPod(rank, 0, group_size=2 if rank < 2 else 0) for rank in range(pods))
    asyncio.run(applier.apply(job_, Actions({}, StatusChange.NONE, create_pods=made)))


def gangs_of(cluster: FakeCluster) -> list[Any]:
    """Return the PodGroups of the pods, by rank."""
    pods = sorted(cluster.objects[Resource.PODS].items())
    return [(raw["spec"].get("schedulingGroup") or {}).get("podGroupName") for _, raw in pods]


def test_the_gang_is_created_before_its_pods_and_once() -> None:
    cluster = FakeCluster(pod_groups={})
    apply(cluster)
    gang, *others = gangs_of(cluster)
    assert others == [gang, None]
    assert (cluster.pod_groups, cluster.writes[0]) == ({gang: 2}, f"create PodGroup {gang}")
    apply(cluster)
    assert len(cluster.objects[Resource.PODS]) == 3


@pytest.mark.parametrize("status", [403, 404])
def test_pods_are_placed_alone_where_podgroups_are_not_served_or_not_allowed(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(_: FakeApiServer, plural: str, manifest: ApiObject) -> ApiObject | None:
        if plural == "podgroups":
            raise ApiServerError("no", status, "no")
        return await cluster.create_pod(manifest)

    cluster = FakeCluster()
    monkeypatch.setattr(FakeApiServer, "create", refuse)
    apply(cluster)
    assert gangs_of(cluster) == [None] * 3


def test_no_pods_are_created_while_the_api_server_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> None:
        raise ApiServerError("the API server does not answer")

    cluster = FakeCluster()
    monkeypatch.setattr(FakeApiServer, "create", fail)
    with pytest.raises(ApiServerError, match="does not answer"):
        apply(cluster)
