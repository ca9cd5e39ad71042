"""What the operator does in its cycles where not all is as it should be."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from adascale_controller.operator.apply.cluster import ClusterError
from adascale_controller.operator.runtime import control_loop
from adascale_controller.operator.types.kubernetes import Resource
from adascale_core.messages import GainReport, ReplicaState
from support.fake_cluster import FakeCluster
from support.world import World

SHARED = {"spec": {"accessModes": ["ReadWriteMany"]}}
ON_ONE_NODE = {"spec": {"accessModes": ["ReadWriteOnce"]}}


def trains(world: World) -> bool:
    return [agent.state for agent in world.agents.values()] == [ReplicaState.RUNNING]


def answer_claims(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    """Have the API server answer so when asked for a claim; an error is raised."""

    async def get_claim(*_: object) -> Any:
        if isinstance(answer, ClusterError):
            raise answer
        return answer

    monkeypatch.setattr(FakeCluster, "get_claim", get_claim)


def test_an_object_that_can_not_be_read_does_not_stop_the_other_jobs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World()
    odd = world.create(Resource.ADASCALEJOBS, {"metadata": {"name": "odd"}, "spec": {}})
    del odd["metadata"]["generation"]
    world.submit()
    world.run_cycles()
    assert trains(world)
    told = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [record.getMessage() for record in told] == ["team.odd: unexpected error; the job is skipped"]
    assert told[0].exc_info


def test_a_job_made_anew_begins_with_counts_of_its_own() -> None:
    world = World()
    world.submit()
    world.run_cycles()
    assert world.job is not None
    world.delete(Resource.ADASCALEJOBS, "digits")
    world.submit()
    world.run_cycles()
    assert trains(world)
    assert world.job["status"]["allocation"] == {"generation": 1, "replicas": 1}


def test_a_report_that_comes_when_its_job_is_forgotten_already_leaves_nothing_behind() -> None:
    world = World()
    world.submit()
    world.run_cycles()
    world.delete(Resource.ADASCALEJOBS, "digits")
    world.run_cycles()
    assert world.service.list_jobs() == []
    world.service.latest = GainReport(1, 9, 9.0, 0, 1, 4, 1, 1.0, 1.0, 1.0, 1.0, 0.1, 0.0)
    world.run_cycles()
    assert world.service.list_jobs() == []


def test_what_was_only_posted_by_hand_stays() -> None:
    world = World()
    world.service.latest = GainReport(1, 9, 9.0, 0, 1, 4, 1, 1.0, 1.0, 1.0, 1.0, 0.1, 0.0)
    world.run_cycles()
    assert world.service.list_jobs()


@pytest.mark.parametrize("error", [ClusterError("nobody answers"), ClusterError("out of order", 500)])
def test_where_a_claim_is_not_known_for_now_running_pods_are_left_alone(
    error: ClusterError, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    answer_claims(monkeypatch, ON_ONE_NODE)
    world.submit()
    world.run_cycles()
    pods = set(world.agents)
    answer_claims(monkeypatch, error)
    world.start_operator()
    world.run_cycles(20)
    assert set(world.agents) == pods
    answer_claims(monkeypatch, ON_ONE_NODE)
    world.run_cycles(20)
    assert set(world.agents) == pods
    assert world.writes == []


@pytest.mark.parametrize("checkpoint", [{"claimName": "theirs"}, {"storage": "1Gi"}])
def test_where_claims_may_not_be_read_pods_are_made_once(
    checkpoint: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_claims(monkeypatch, ClusterError("forbidden", 403))
    world = World()
    world.submit(checkpoint=checkpoint)
    world.run_cycles(30)
    pods = set(world.agents)
    assert trains(world)
    world.run_cycles(30)
    assert set(world.agents) == pods
    assert world.writes == []


def test_a_deletion_that_no_watch_has_told_of_is_found_when_something_is_to_be_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control_loop, "STALE_RESYNC_INTERVAL", 0.0)
    monkeypatch.setattr(control_loop, "INTERVAL", 0.01)
    monkeypatch.setattr(control_loop, "PAUSE", 0.01)
    world = World()
    world.submit()
    world.run_cycles()
    world.delete(Resource.JOBS, "digits")
    world.control_jobs()
    world.run_kubelet()
    world.lose_undelivered()
    world.run_cycles(3)
    assert world.indexed_job is None, "nothing was to be done"
    world.edit(activeDeadlineSeconds=600)
    world.deliver()
    world.run(0.5)
    assert world.indexed_job is not None
