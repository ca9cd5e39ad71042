"""The pods of the smallest count are a gang, placed together, where the API server serves PodGroups."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from adascale_controller.job.phase import JobPhase
from adascale_controller.operator.apply.applier import Applier
from adascale_controller.operator.apply.kubernetes_cluster import ApiServerError
from adascale_controller.operator.apply.manifests import pod_group_manifest, pod_manifest
from adascale_controller.operator.observe.observed_job import Admission, ObservedJob
from adascale_controller.operator.observe.pods import Pod, read_pod
from adascale_controller.operator.reconcile.job_phase import assess
from adascale_controller.operator.types.actions import Actions, NewPod, StatusChange
from adascale_controller.operator.types.kubernetes import ApiObject, ConditionType, Resource
from support.definitions import changed
from support.fake_api_server import FakeApiServer, KilledError
from support.fake_cluster import FakeCluster
from support.observed_jobs import NOW, SPEC, actions_for, condition, job, observed, pod, view

TWO = replace(SPEC, min_replicas=2)
TEMPLATE = {"spec": {"containers": [{"name": "worker", "image": "trainer:1"}]}}
ADMITTED = Admission({"priority": 10, "priorityClassName": "high"})


def started(*pods: Pod, count: int = 2) -> ObservedJob:
    """Return a job that starts, with these pods."""
    job_ = job((1, count), spec=TWO, template=TEMPLATE)
    return observed(job_, view((1, count), spec=TWO), list(pods), admission=ADMITTED)


GANG = str(started().gang)


def waiting(rank: int, **changes: Any) -> Pod:
    """Return a pod that waits for a node."""
    return pod(rank, node=None, phase="Pending", has_started=False, **changes)


def groups(job_: ObservedJob, count: int) -> list[tuple[int, int]]:
    """Return the rank of each pod that is created, and the size of its gang."""
    made = actions_for(job_, count).create_pods
    assert all(each.gang in (None, job_.gang) for each in made)
    return [(each.rank, 2 if each.gang is not None else 0) for each in made]


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


def test_there_is_no_gang_while_the_priority_of_its_pods_is_not_known() -> None:
    job_ = replace(started(waiting(1, gang=GANG), count=3), admission=Admission(problem="no dry runs"))
    assert groups(job_, 3) == [(0, 0), (2, 0)]
    assert job_.outdated_pods == []


def other_gangs() -> list[str | None]:
    """Return the gangs of another size, template and priority than that of the job."""
    job_, lower = started(), Admission({"priority": 5, "priorityClassName": "high"})
    three = replace(job_.resource, job=changed(job_.resource.valid_job, replace(SPEC, min_replicas=3)))
    others = replace(job_, resource=three), replace(job_, digest="later"), replace(job_, admission=lower)
    return [each.gang for each in others]


@pytest.mark.parametrize("other", other_gangs())
@pytest.mark.parametrize(("node", "phase"), [(None, JobPhase.STOPPING), ("node1", JobPhase.RUNNABLE)])
def test_pods_that_wait_in_another_gang_are_replaced(other: str, node: str | None, phase: JobPhase) -> None:
    job_ = started(*(replace(waiting(rank, gang=other), node=node) for rank in range(2)))
    assert assess(job_).phase is phase
    if phase is JobPhase.STOPPING:
        assert "the smallest count or the PodGroup has changed" in assess(job_).message
        (stop, _) = actions_for(replace(job_, service=view((2, 0), (2, 0), spec=TWO))).stop_pods
        assert stop.name == "digits-0"


def test_the_status_of_a_job_that_trains_says_why_pods_of_another_gang_are_replaced() -> None:
    pods = [waiting(0, gang="another"), waiting(1, gang="another"), pod(2)]
    job_ = replace(started(*pods, count=3), service=view((1, 3), (1, 1), running=[2], spec=TWO))
    assert condition(actions_for(job_, 3), ConditionType.RUNNING).message == (
        "Training on 1 replica; spec.template, spec.stepTimeoutSeconds, spec.opportunistic, the smallest "
        "count or the PodGroup has changed: 2 pods left to replace, one by one"
    )


def test_a_pod_that_waits_in_a_gang_is_replaced_once_another_one_was_made_alone() -> None:
    first = waiting(0, gang=GANG)
    assert started(first, waiting(1, gang=GANG), waiting(2), count=3).outdated_pods == []
    for second in (waiting(1), pod(1)):
        assert started(first, second).outdated_pods == [first]
    assert started(replace(first, node="node1"), waiting(1)).outdated_pods == [], "it was placed"


def test_a_gang_and_its_pods_have_one_priority() -> None:
    template = {
        "spec": {**TEMPLATE["spec"], "priorityClassName": "high", "schedulingGroup": {"podGroupName": "mine"}}
    }
    made = replace(job(spec=TWO), template=template)
    name = GANG
    first, later = pod_manifest(made, NewPod(0, 0, gang=name)), pod_manifest(made, NewPod(2, 0))
    group = pod_group_manifest(made, name, {"priorityClassName": "high", "priority": 10})
    assert group["spec"] == {
        "schedulingPolicy": {"gang": {"minCount": 2}},
        "priorityClassName": "high",
    }
    assert group["metadata"]["name"] == name
    assert first["spec"]["schedulingGroup"] == {"podGroupName": name}
    assert "schedulingGroup" not in later["spec"], "that of the template would wait for other pods"
    assert group["metadata"]["ownerReferences"] == first["metadata"]["ownerReferences"]
    raw = {**first, "metadata": {**first["metadata"], "uid": "1"}}
    assert read_pod(raw).gang == name


def apply(cluster: FakeCluster, pods: int = 3) -> None:
    """Create the pods of a start, two times."""
    applier = Applier(cluster, cluster.service, lambda *_: None, "operator")
    made = tuple(NewPod(rank, 0, gang=GANG if rank < 2 else None) for rank in range(pods))
    for _ in range(2):
        asyncio.run(applier.apply(started(), Actions({}, StatusChange.NONE, create_pods=made)))


def gangs_of(cluster: FakeCluster) -> list[Any]:
    """Return the PodGroups of the pods, by rank."""
    pods = sorted(cluster.objects[Resource.PODS].items())
    return [(raw["spec"].get("schedulingGroup") or {}).get("podGroupName") for _, raw in pods]


def test_the_gang_is_created_before_its_pods_and_once() -> None:
    cluster = FakeCluster(pod_groups={})
    apply(cluster)
    assert gangs_of(cluster) == [GANG, GANG, None]
    assert cluster.pod_groups is not None
    assert [*cluster.pod_groups] == [GANG]
    assert cluster.writes[0] == f"create PodGroup {GANG}"


@pytest.mark.parametrize("status", [400, 403, 404, 422])
def test_pods_are_placed_alone_where_podgroups_are_not_served_or_refused(
    status: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def refuse(_: FakeApiServer, plural: str, manifest: ApiObject) -> ApiObject | None:
        if plural == "podgroups":
            raise ApiServerError("no", status, "no")
        return await cluster.create_pod(manifest)

    cluster = FakeCluster()
    monkeypatch.setattr(FakeApiServer, "create", refuse)
    with caplog.at_level(logging.INFO):
        apply(cluster)
    assert gangs_of(cluster) == [None] * 3
    assert [each for each in caplog.messages if "alone" in each] == [
        "team.digits: its pods are placed alone: no"
    ]


@pytest.mark.parametrize("status", [0, 429, 503])
def test_no_pods_are_created_while_the_api_server_does_not_answer(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise ApiServerError("the API server does not answer", status)

    cluster = FakeCluster()
    monkeypatch.setattr(FakeApiServer, "create", fail)
    with pytest.raises(ApiServerError, match="does not answer"):
        apply(cluster)
    assert gangs_of(cluster) == []


# -- with the scheduler of Kubernetes -----------------------------------------------------------------------


def placed(cluster: FakeCluster) -> list[bool]:
    """Return whether each live pod is on a node."""
    return ["nodeName" in raw["spec"] for raw in cluster.live_pods]


def submit(cluster: FakeCluster, **spec: Any) -> None:
    """Submit a job whose smallest and largest count is two replicas."""
    cluster.submit(
        minReplicas=2, maxReplicas=2, template={"spec": {"containers": [cluster.worker()], **spec}}
    )
    cluster.run_cycles()


def test_half_of_a_gang_is_never_placed() -> None:
    cluster = FakeCluster(pod_groups={}, node_slots=1)
    submit(cluster)
    assert placed(cluster) == [False, False]
    cluster.node_slots = 2
    cluster.run_cycles(100)
    assert (placed(cluster), cluster.status["replicas"]) == ([True, True], 2)


@pytest.mark.parametrize(("name", "value"), [("high", 20), (None, 5)])
def test_a_job_starts_again_after_the_priority_of_new_pods_has_changed(name: str | None, value: int) -> None:
    cluster = FakeCluster(pod_groups={}, priorities={None: 0, "high": 10})
    submit(cluster, **({"priorityClassName": name} if name is not None else {}))
    cluster.edit(suspend=True)
    cluster.run_cycles()
    cluster.priorities[name] = value
    cluster.edit(suspend=False)
    cluster.run_cycles(100)
    assert cluster.status["replicas"] == 2
    assert {raw["spec"]["priority"] for raw in cluster.live_pods} == {value}
    assert None not in gangs_of(cluster)


def test_a_gang_has_the_priority_that_a_webhook_sets() -> None:
    def admit(raw: Any) -> Any:
        return {**raw, "spec": {**raw["spec"], "priorityClassName": "high"}}

    cluster = FakeCluster(pod_groups={}, priorities={None: 0, "high": 10})
    submit(cluster)
    cluster.edit(suspend=True)
    cluster.run_cycles()
    cluster.admit = admit
    cluster.edit(suspend=False)
    cluster.run_cycles(100)
    assert cluster.status["replicas"] == 2
    assert None not in gangs_of(cluster)


def test_a_start_in_which_podgroups_were_refused_goes_on_with_pods_that_are_placed_alone() -> None:
    cluster = FakeCluster(pod_groups={})
    restarted = False

    def refuse() -> None:
        nonlocal restarted
        write = cluster.writes[-1]
        if write.startswith("create pod digits-1") and not restarted:
            restarted = True
            raise KilledError
        if write.startswith("create PodGroup") and restarted:
            raise ApiServerError("forbidden", 403, "forbidden")

    cluster.meanwhile = refuse
    submit(cluster)
    assert restarted
    assert (cluster.status["replicas"], gangs_of(cluster)) == (2, [None, None])
