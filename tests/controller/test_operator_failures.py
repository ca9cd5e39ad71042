"""The actions at the end of a job: complete, failed, refused replicas, and pods that do not end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from adascale_controller.job.reasons import Reason
from adascale_controller.operator.observe.pods import Pod, PodExit
from adascale_controller.operator.reconcile.reconciler import END_TIMEOUT, TERMINATION_OVERDUE
from adascale_controller.operator.types.kubernetes import ConditionType, condition_of
from adascale_core.failures import TerminationMessage
from adascale_core.messages.registration import ReplicaState
from support.definitions import changed
from support.observed_jobs import (
    NOW,
    actions_for,
    condition,
    events,
    finished_pod,
    job,
    observed,
    pod,
    replica,
    training_job,
    view,
    with_status,
    writes,
)

RUNNING, RESCALING = ConditionType.RUNNING, ConditionType.RESCALING


def test_a_job_is_complete_when_a_replica_has_finished_and_the_others_end_or_are_ended() -> None:
    seen = replace(training_job((3, 2)), pods=[finished_pod(0), pod(1), pod(2, has_started=False)])
    actions = actions_for(seen)
    assert writes(actions) == {"delete": ["digits-2"]}, "a pod that has not started would wait for ever"
    later = replace(with_status(seen, actions), now=NOW + END_TIMEOUT)
    assert writes(actions_for(later))["end"] == ["digits-1"]
    assert actions.status["state"] == "Complete"
    assert (actions.status["replicas"], actions.status["desiredReplicas"]) == (0, 0)
    assert "completionTime" in actions.status


def test_the_end_after_too_many_restarts_names_what_killed_the_last_pod() -> None:
    lost = replace(replica(0, ReplicaState.LOST, 5), exit_code=-9)
    service = view((6, 1), (5, 1), replicas=(lost,), broken=True, restarts_without_progress=3)
    pods = [pod(0, exit=PodExit(137, reason="OOMKilled"))]
    actions = actions_for(observed(job((6, 1), max_restarts_without_progress=2), service, pods), 1)
    failed = condition(actions, ConditionType.FAILED)
    assert (failed.status, failed.reason) == (True, Reason.NO_PROGRESS)
    assert failed.message.endswith("(OOMKilled, killed by SIGKILL)")
    assert writes(actions).keys() <= {"end", "allocate"}


REFUSAL = "replica 2 has adascale 9.9, but replica 0, which trains, has 0.1.0"
REFUSED = pod(
    2,
    uid="refused",
    created_at=NOW - 90,
    phase="Failed",
    exit=PodExit(80, termination=TerminationMessage(0, 80, REFUSAL)),
)


@pytest.mark.parametrize("pods", [[pod(0), pod(1), REFUSED], [pod(0), pod(1), pod(2), REFUSED]])
def test_a_replica_of_another_version_does_not_start_and_the_others_train(pods: list[Pod]) -> None:
    growing = observed(job((6, 3)), view((6, 3), (5, 2)), pods)
    actions = actions_for(growing, 3)
    assert condition_of(actions.status, ConditionType.FAILED) is None
    assert actions.status["failures"] == 0
    assert condition(actions, RUNNING).reason == Reason.TRAINING
    rescaling = condition(actions, RESCALING)
    assert (rescaling.status, rescaling.reason) == (True, Reason.REPLICA_REFUSED)
    assert rescaling.message == f"2 -> 3: {REFUSAL}; training continues on 2 replicas"
    assert Reason.REPLICA_REFUSED in events(actions)


def test_a_replica_that_has_failed_its_check_does_not_join_and_the_others_train() -> None:
    fault = "replica 2 on node node1 does not join: device cuda:0 has failed its check: got nan"
    failed = replace(REFUSED, exit=PodExit(81, termination=TerminationMessage(0, 81, fault)))
    growing = observed(job((6, 3)), view((6, 3), (5, 2)), [pod(0), pod(1), failed])
    actions = actions_for(growing, 3)
    assert actions.status["failures"] == 0
    assert condition(actions, RUNNING).reason == Reason.TRAINING
    (event,) = (each for each in actions.events if each.reason == Reason.REPLICA_CHECK_FAILED)
    assert event.warning
    assert event.message == f"2 -> 3: pod digits-2: {fault}; training continues on 2 replicas"


@pytest.mark.parametrize("state", [ReplicaState.WAITING, ReplicaState.LOST])
def test_a_replica_is_refused_until_the_metrics_service_accepts_it(state: ReplicaState) -> None:
    replicas = (replica(0, generation=5), replica(1, generation=5), replica(2, state))
    service = view((6, 3), (5, 2), replicas=replicas)
    growing = observed(job((6, 3)), service, [pod(0), pod(1), pod(2), REFUSED])
    refused = condition(actions_for(growing, 3), RESCALING).reason == Reason.REPLICA_REFUSED
    assert refused == (state is ReplicaState.LOST)


def test_a_later_end_of_a_replica_that_was_refused_is_no_refusal() -> None:
    later = pod(2, uid="later", created_at=NOW - 60, phase="Failed", exit=PodExit(137))
    growing = observed(job((6, 3)), view((6, 3), (5, 2)), [pod(0), pod(1), later, REFUSED])
    assert condition(actions_for(growing, 3), RESCALING).reason == Reason.PREPARING_REPLICAS


def test_a_failed_condition_with_a_reason_of_another_version_is_kept() -> None:
    ended = {"type": "Failed", "status": "True", "reason": "Exploded", "message": "at 12:00"}
    actions = actions_for(
        observed(job((3, 1), status={"conditions": [ended | {"lastTransitionTime": "t"}]}), view())
    )
    assert condition(actions, ConditionType.FAILED).message == "at 12:00"


@pytest.mark.parametrize(("ttl", "age", "removed"), [(None, 99, False), (60, 59, False), (60, 60, True)])
def test_an_ended_job_is_deleted_after_its_ttl(ttl: int | None, age: int, removed: bool) -> None:
    observed_job = replace(training_job(), pods=[finished_pod(0), finished_pod(1)])
    ended = with_status(observed_job, actions_for(observed_job))
    spec = changed(ended.resource.valid_job, ttl_seconds_after_finished=ttl)
    later = replace(ended, resource=replace(ended.resource, job=spec), now=NOW + age)
    assert actions_for(later).delete_job == removed


@pytest.mark.parametrize(
    ("spec", "node", "now", "removed"),
    [
        (None, "node1", NOW, False),
        (NOW, "node1", NOW + TERMINATION_OVERDUE, False),
        (NOW, "node1", NOW + TERMINATION_OVERDUE + 1, True),
        (NOW + 30, "lost", NOW, True),
        (None, "lost", NOW, False),
    ],
)
def test_overdue_pods_and_pods_on_lost_nodes_are_deleted_by_force(
    spec: float | None, node: str, now: float, removed: bool
) -> None:
    pods = [pod(0), pod(1, deletion_deadline=spec, node=node)]
    observed_job = replace(training_job(), pods=pods, lost_nodes=frozenset({"lost"}), now=now)
    assert writes(actions_for(observed_job, 2)).get("force", []) == (["digits-1"] if removed else [])


# -- agents that give up -----------------------------------------------------------------------------------


def test_what_an_agent_says_when_it_gives_up_is_in_the_condition() -> None:
    said = "the metrics service at http://adascale-api:8265 does not answer: Name or service not known"
    gave_up = pod(0, uid="old", phase="Failed", exit=PodExit(69, termination=TerminationMessage(0, 69, said)))
    starting = observed(job((1, 1)), view((1, 1)), [gave_up, pod(0, created_at=NOW)])
    actions = actions_for(starting, 1)
    running = condition(actions, ConditionType.RUNNING)
    assert (running.reason, running.message) == (Reason.METRICS_SERVICE_UNREACHABLE, said)
    assert Reason.METRICS_SERVICE_UNREACHABLE in [event.reason for event in actions.events]
    registered = view((1, 1), replicas=(replica(0, ReplicaState.WAITING),))
    started = observed(job((1, 1)), registered, [gave_up, pod(0, created_at=NOW)])
    assert condition(actions_for(started, 1), ConditionType.RUNNING).reason == Reason.STARTING
