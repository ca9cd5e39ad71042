"""What the operator does in its cycles where not all is as it should be."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from adascale_client import ServiceUnreachableError
from adascale_controller.operator.apply.kubernetes_cluster import ApiServerError
from adascale_controller.operator.runtime import control_loop
from adascale_controller.operator.types.kubernetes import Resource
from adascale_core.messages.registration import ReplicaState
from adascale_core.messages.reports import GainReport
from adascale_core.views.decision import LimitKind, Verdict
from support.fake_api_server import FakeApiServer
from support.fake_cluster import FakeCluster

ON_ONE_NODE = {"spec": {"accessModes": ["ReadWriteOnce"]}}


def trains(cluster: FakeCluster) -> bool:
    return [agent.state for agent in cluster.agents.values()] == [ReplicaState.RUNNING]


def answer_claims(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    """Set the answer of the API server to reads of a claim; an error is raised."""

    async def get_claim(*_: object) -> Any:
        if isinstance(answer, ApiServerError):
            raise answer
        return answer

    monkeypatch.setattr(FakeApiServer, "get_claim", get_claim)


def test_an_unreadable_job_does_not_stop_other_jobs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = FakeCluster()
    odd = cluster.add(Resource.ADASCALEJOBS, {"metadata": {"name": "odd"}, "spec": {}})
    del odd["metadata"]["generation"]
    cluster.submit()
    cluster.run_cycles()
    assert trains(cluster)
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [record.getMessage() for record in errors] == ["team.odd: unexpected error; the job is skipped"]
    assert errors[0].exc_info


def test_decisions_are_stored_with_their_explanation() -> None:
    cluster = FakeCluster()
    cluster.submit()
    cluster.run_cycles()
    decision = cluster.service.decision
    assert decision is not None
    assert (decision.job, decision.replicas, decision.waiting) == ("team.digits", 1, False)
    assert decision.reason == "unchanged: its last change is in progress"
    assert [each.verdict for each in decision.counts[:1]] == [Verdict.CHOSEN]
    assert LimitKind.MEASUREMENTS in [limit.kind for limit in decision.limits]


def test_a_decision_that_could_not_be_stored_is_stored_in_a_later_cycle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: object) -> None:
        raise ServiceUnreachableError("no answer")

    cluster = FakeCluster()
    with monkeypatch.context() as patched:
        patched.setattr(cluster.service, "put_decision", refuse)
        cluster.submit()
        cluster.run_cycles()
    assert trains(cluster)
    assert cluster.service.decision is None
    cluster.run_cycles()
    assert cluster.service.decision is not None


def test_a_job_that_is_created_again_at_once_does_not_count_the_end_of_the_old_pod_as_a_loss() -> None:
    """The pod of the old job registers after it was deregistered, and is killed without a word."""
    cluster = FakeCluster()
    cluster.submit()
    while not cluster.live_pods:
        cluster.deliver()
        cluster.cycle()
    cluster.remove(Resource.ADASCALEJOBS, "digits")
    cluster.submit()
    cluster.deliver()
    cluster.cycle()
    cluster.schedule_pods()
    (pod,) = cluster.agents
    cluster.run_agent(pod)
    cluster.collect_garbage()
    cluster.remove_pod(pod)
    for _ in range(4):
        cluster.deliver()
        cluster.cycle()
    cluster.run_cycles()
    assert trains(cluster)
    assert cluster.status["disruptions"] == 0


def test_reports_and_generations_reach_the_status() -> None:
    cluster = FakeCluster()
    cluster.submit()
    cluster.run_cycles()
    cluster.now += 60
    cluster.service.post(GainReport(1, 9, 9.0, 0, 1, 4, 1, 1.0, 1.0, 1.0, 1.0, 0.1, 0.0))
    cluster.cycle()
    assert cluster.writes == ["status"]
    assert cluster.status["progress"] == 9
    (pod,) = cluster.agents
    cluster.fail_program(pod)
    cluster.cycle()
    assert "status" in cluster.writes
    assert cluster.status["replicas"] == 0, "the generation has ended"


def test_a_job_that_has_only_reports_is_not_deregistered() -> None:
    cluster = FakeCluster()
    cluster.service.post(GainReport(1, 9, 9.0, 0, 1, 4, 1, 1.0, 1.0, 1.0, 1.0, 0.1, 0.0))
    cluster.run_cycles()
    assert cluster.service.list_jobs()


@pytest.mark.parametrize("error", [ApiServerError("no answer"), ApiServerError("out of order", 500)])
def test_running_pods_stay_while_the_claim_can_not_be_read(
    error: ApiServerError, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = FakeCluster()
    answer_claims(monkeypatch, ON_ONE_NODE)
    cluster.submit()
    cluster.run_cycles()
    pods = set(cluster.agents)
    answer_claims(monkeypatch, error)
    cluster.start_operator()
    cluster.run_cycles(20)
    assert set(cluster.agents) == pods
    answer_claims(monkeypatch, ON_ONE_NODE)
    cluster.run_cycles(20)
    assert set(cluster.agents) == pods
    assert cluster.writes == []


@pytest.mark.parametrize("checkpoint", [{"claimName": "theirs"}, {"storage": "1Gi"}])
def test_pods_are_created_once_where_claims_may_not_be_read(
    checkpoint: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_claims(monkeypatch, ApiServerError("forbidden", 403))
    cluster = FakeCluster()
    cluster.submit(checkpoint=checkpoint)
    cluster.run_cycles(30)
    pods = set(cluster.agents)
    assert trains(cluster)
    cluster.run_cycles(30)
    assert set(cluster.agents) == pods
    assert cluster.writes == []


def test_a_missed_deletion_is_found_when_a_write_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control_loop, "STALE_RESYNC_INTERVAL", 0.0)
    monkeypatch.setattr(control_loop, "INTERVAL", 0.01)
    monkeypatch.setattr(control_loop, "PAUSE", 0.01)
    cluster = FakeCluster()
    cluster.submit()
    cluster.run_cycles()
    for name in list(cluster.agents):
        cluster.remove_pod(name)
    cluster.undelivered.clear()
    cluster.run_cycles(3)
    assert not cluster.live_pods, "nothing was to be done"
    cluster.edit(suspend=True)
    cluster.run_until(lambda: not cluster.cache.pods_of(("team", "digits")))
