"""Writes of the operator, as the applier carries them out."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from adascale_controller.operator.apply.applier import Applier
from adascale_controller.operator.apply.kubernetes_cluster import ApiServerError
from adascale_controller.operator.observe.observed_job import ObservedJob
from adascale_controller.operator.types.actions import Actions, NewPod, StatusChange, Stop, StoppedPod
from adascale_controller.operator.types.kubernetes import ApiObject, Resource
from support.fake_api_server import FakeApiServer
from support.fake_cluster import FakeCluster
from support.observed_jobs import job, observed, training_job, view


@pytest.mark.parametrize("gpus", ["1", "8"])
def test_gpus_that_a_replica_does_not_use_are_named_in_an_event(gpus: str) -> None:
    cluster = FakeCluster()
    worker = {**cluster.worker(), "resources": {"limits": {"nvidia.com/gpu": gpus}}}
    cluster.submit(template={"spec": {"containers": [worker]}})
    cluster.run_cycles(3)
    reasons = [event.reason for event in cluster.events]
    assert "Started" in reasons
    assert reasons.count("UnusedGPUs") == (gpus == "8")


@pytest.mark.parametrize(("status", "is_refused"), [(403, True), (500, True), (422, False)])
def test_no_further_pods_are_tried_after_the_first_is_rejected_and_others_are_stopped(
    status: int, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    async def refuse(_: FakeApiServer, manifest: ApiObject) -> ApiObject:
        tried.append(manifest["metadata"]["name"])
        raise ApiServerError("rejects it: no", status, "no")

    cluster = FakeCluster()
    monkeypatch.setattr(FakeApiServer, "create_pod", refuse)
    applier = Applier(cluster, cluster.service, lambda *_: None, "operator")
    pods = (NewPod(0, 0), NewPod(1, 0))
    stop = (StoppedPod("digits-2-0", "uid", Stop.DELETE),)
    actions = Actions({}, StatusChange.NONE, create_pods=pods, stop_pods=stop)
    applied = asyncio.run(applier.apply(job_without_pods(), actions))
    assert tried == ["digits-0-0"]
    assert (applied.refused is not None and applied.refused.reply == "no") == is_refused
    assert applied.template_rejection == (None if is_refused else "no")
    assert cluster.writes == ["delete pod digits-2-0"]
    assert applied.is_stale, "the pod does not exist"


def test_pods_are_created_each_once_after_their_namespace_is_prepared() -> None:
    cluster, prepared = FakeCluster(), list[tuple[str, list[str]]]()

    async def prepare(namespace: str) -> None:
        prepared.append((namespace, list(cluster.objects[Resource.PODS])))

    applier = Applier(cluster, cluster.service, lambda *_: None, "operator", before_pods=prepare)
    actions = Actions({}, StatusChange.NONE, create_pods=tuple(NewPod(rank, 0) for rank in range(5)))
    for _ in range(2):
        asyncio.run(applier.apply(job_without_pods(), actions))
    assert prepared[0] == ("team", [])
    assert sorted(cluster.objects[Resource.PODS]) == [f"digits-{rank}-0" for rank in range(5)]
    assert len(cluster.live_pods) == 5


def test_a_job_that_is_deregistered_already_is_no_error() -> None:
    """The jobs of the metrics service may be a moment older than the last call."""
    cluster = FakeCluster()
    applier = Applier(cluster, cluster.service, lambda *_: None, "operator")
    actions = Actions({}, status_change=StatusChange.NONE, deregister=True)
    asyncio.run(applier.apply(training_job(), actions))
    assert cluster.writes == ["deregister team.digits"]


def job_without_pods() -> ObservedJob:
    """Return a job whose pods do not exist yet."""
    template = {"spec": {"containers": [{"name": "worker", "image": "trainer:1"}]}}
    return observed(replace(job((1, 2)), template=template), view((1, 2)))
