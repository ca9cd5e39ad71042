"""A slow replica in the operator: the condition and its Event."""

from __future__ import annotations

from dataclasses import replace

from adascale_controller.operator.observe.observed_job import ObservedJob
from adascale_controller.operator.types.actions import StatusChange
from adascale_controller.operator.types.kubernetes import ConditionType, condition_of
from adascale_core.messages.allocation import SlowReplacement
from support.observed_jobs import actions_for, condition, observed, report, training_job, with_status

SLOW = ConditionType.SLOW_REPLICA


def with_slow(job: ObservedJob, replica: int | None, factor: float | None = 1.25) -> ObservedJob:
    """Return a job whose latest report names a slow replica."""
    assert job.service is not None
    latest = replace(report(1, 2), slow_replica=replica, slow_factor=factor if replica is not None else None)
    return replace(job, service=replace(job.service, latest=latest))


def test_a_slow_replica_is_named_in_the_condition_and_in_one_event() -> None:
    job = training_job()
    assert condition_of(actions_for(job, 2).status, SLOW) is None
    actions = actions_for(with_slow(job, 1), 2)
    found = condition(actions, SLOW)
    pod = job.live_pods[1]
    assert (found.status, found.reason) == (True, "ReplicaSlow")
    assert found.message == (
        f"Replica 1 (pod {pod.name}, node {pod.node}) is slow: in each step it computes 1.25 times as long "
        "as the others, which wait for it"
    )
    (event,) = (each for each in actions.events if each.reason == "ReplicaSlow")
    assert (event.message, event.warning) == (found.message, True)
    # The factor changes with each report. That is no other status.
    later = actions_for(with_slow(with_status(job, actions), 1, 1.31), 2)
    assert condition(later, SLOW) == found
    assert later.status_change is not StatusChange.URGENT
    ended = actions_for(with_slow(with_status(job, actions), None), 2)
    assert (condition(ended, SLOW).status, condition(ended, SLOW).reason) == (False, "NoReplicaSlow")
    assert not [each for each in ended.events if "Slow" in each.reason]


def test_a_spare_in_the_place_of_a_slow_replica_is_in_the_condition_and_in_one_event() -> None:
    job = training_job()
    before = with_slow(with_status(job, actions_for(with_slow(job, 1), 2)), 1)
    assert before.service is not None
    assert before.service.active is not None
    replacement = SlowReplacement(1, "trainer-1", "node1", 1.25, 2)
    active = replace(before.service.active, generation=2, slow_replacement=replacement)
    replaced = replace(before, service=replace(before.service, active=active))
    actions = actions_for(replaced, 2)
    found = condition(actions, SLOW)
    assert (found.status, found.reason) == (False, "SlowReplicaReplaced")
    assert found.message == (
        "Replica 1 on node node1 was slow, it computed 1.25 times as long as the others: replica 2, a spare, "
        "trains in its place"
    )
    (event,) = (each for each in actions.events if each.reason == "SlowReplicaReplaced")
    assert (event.message, event.warning) == (found.message, False)
    later = actions_for(with_status(replaced, actions), 2)
    assert (condition(later, SLOW), later.events) == (found, ())


def test_another_slow_replica_is_another_message_and_event() -> None:
    job = training_job()
    before = with_status(job, actions_for(with_slow(job, 1), 2))
    actions = actions_for(with_slow(before, 0), 2)
    found = condition(actions, SLOW)
    assert found.message.startswith(f"Replica 0 (pod {job.live_pods[0].name}, ")
    (event,) = (each for each in actions.events if each.reason == "ReplicaSlow")
    assert event.message == found.message


def test_a_report_names_nobody_once_no_step_ends() -> None:
    job = training_job()
    before = with_slow(with_status(job, actions_for(with_slow(job, 1), 2)), 1)
    assert before.service is not None
    stalled = tuple(replace(each, stall="waits for the others") for each in before.service.replicas)
    actions = actions_for(replace(before, service=replace(before.service, replicas=stalled)), 2)
    assert not condition(actions, SLOW).status


def test_the_condition_stays_while_the_metrics_service_does_not_answer() -> None:
    before = with_status(training_job(), actions_for(with_slow(training_job(), 1), 2))
    silent = observed(before.resource, None, before.pods)
    assert condition(actions_for(silent), SLOW).status
