"""The actions after an edit of a job, and for a job whose name was in use before."""

from __future__ import annotations

from dataclasses import replace

import pytest

from adascale_controller.job.reasons import Reason
from adascale_controller.operator.reconcile.job_phase import assess
from adascale_controller.operator.reconcile.reconciler import next_deadline
from adascale_controller.operator.types.actions import Event, StatusChange
from adascale_controller.operator.types.kubernetes import ConditionType, timestamp
from adascale_core import names
from adascale_core.messages.job_spec import JobSpec
from adascale_core.messages.registration import ReplicaState
from adascale_core.views.jobs import JobView
from support.fake_cluster import FakeCluster
from support.observed_jobs import (
    NOW,
    SPEC,
    actions_for,
    condition,
    job,
    observed,
    pod,
    report,
    training_job,
    view,
    with_status,
    writes,
)


@pytest.mark.parametrize(("seconds", "ends"), [(None, False), (101, False), (100, True), (60, True)])
def test_a_job_fails_once_its_active_deadline_has_passed(seconds: int | None, ends: bool) -> None:
    """It counts from `startTime`, also after an edit."""
    started = {"startTime": timestamp(NOW - 100)}
    running = observed(job((1, 1), status=started, active_deadline_seconds=seconds), view((1, 1), (1, 1)), 1)
    actions = actions_for(running, 1)
    assert (actions.status["state"] == "Failed") == ends
    assert writes(actions) == ({"end": ["digits-0"]} if ends else {})
    if ends:
        failed = condition(actions, ConditionType.FAILED)
        assert (failed.reason, failed.message) == (
            Reason.DEADLINE_EXCEEDED,
            f"activeDeadlineSeconds ({seconds}) exceeded",
        )
    elif seconds is not None:
        assert next_deadline(running, assess(running)) == NOW - 100 + seconds


def test_the_time_in_which_a_job_is_stopped_does_not_count_for_its_deadline() -> None:
    stopped = observed(job((1, 1), suspend=True), view((1, 1)))
    assert "startTime" not in actions_for(stopped).status


@pytest.mark.parametrize(("before", "after"), [(None, 60), (60, 90), (60, None)])
def test_an_edited_step_timeout_reaches_the_replicas_in_new_pods(
    before: int | None, after: int | None
) -> None:
    cluster = FakeCluster()
    cluster.submit(stepTimeoutSeconds=before)
    cluster.run_cycles(10)
    assert _step_timeout(cluster) == before
    cluster.edit(stepTimeoutSeconds=after)
    cluster.run_cycles(20)
    assert _step_timeout(cluster) == after
    changed = next(event for event in cluster.events if event.reason == "TemplateChanged")
    assert changed.message.endswith("has changed: 1 pod left to replace, one by one")
    cluster.run_cycles(5)
    assert cluster.writes == []


@pytest.mark.parametrize(
    ("replicas", "fewest", "spec"),
    [
        (1, 2, replace(SPEC, min_replicas=2)),
        (2, 3, replace(SPEC, min_replicas=3)),
        (3, 4, JobSpec(4, None, None, 3, 8, 1000)),
    ],
)
def test_a_cap_below_the_smallest_valid_count_is_reported(replicas: int, fewest: int, spec: JobSpec) -> None:
    before = training_job((1, fewest), spec=spec)
    before = with_status(before, actions_for(before, fewest))
    edited = job((1, fewest), spec=spec, replica_limit=replicas, status=before.resource.status)
    actions = actions_for(replace(before, resource=replace(edited, generation=2)), fewest)
    message = (
        f"spec.replicaLimit is {replicas}, but the job needs at least {fewest} replicas, so the limit is "
        f"{fewest}: raise spec.replicaLimit to {fewest} or more, lower spec.minReplicas, or set "
        "spec.replicaLimit to 0 to stop the job"
    )
    rescaling = condition(actions, ConditionType.RESCALING)
    assert (rescaling.status, rescaling.reason, rescaling.message) == (False, Reason.STABLE, message)
    assert Event("ReplicaLimitTooLow", message, warning=True) in actions.events
    again = actions_for(with_status(replace(before, resource=replace(edited, generation=2)), actions), fewest)
    assert again.status_change is not StatusChange.URGENT
    assert not again.events, "once per generation of the spec"


@pytest.mark.parametrize("replicas", [None, 2, 5, 8])
def test_a_cap_with_which_the_job_can_run_is_not_reported(replicas: int | None) -> None:
    spec = replace(SPEC, min_replicas=2)
    actions = actions_for(training_job((1, 2), spec=spec, replica_limit=replicas), 2)
    assert condition(actions, ConditionType.RESCALING).message == ""
    assert "ReplicaLimitTooLow" not in [event.reason for event in actions.events]


def _step_timeout(cluster: FakeCluster) -> int | None:
    """Return the step timeout of the replicas that train. None if they have none."""
    assert [agent.state for agent in cluster.agents.values()] == [ReplicaState.RUNNING]
    (pod,) = cluster.live_pods
    environment = {each["name"]: each.get("value") for each in pod["spec"]["containers"][0]["env"]}
    value = environment.get(names.ENV_STEP_TIMEOUT)
    return int(value) if value is not None else None


def test_the_status_shows_nothing_of_an_earlier_job_of_the_same_name() -> None:
    service = view((7, 3), (7, 3), latest=report(7, 3))
    status = actions_for(observed(job(), service, pods=())).status
    assert (status["replicas"], status["state"]) == (0, "Pending")
    assert not {"allocation", "gain", "progress"} & status.keys()


@pytest.mark.parametrize(
    "service",
    [view((7, 1), (7, 1)), view(running=[0])],
    ids=["trained", "registered after it was deregistered"],
)
def test_an_earlier_job_of_the_same_name_is_deregistered_after_its_pods_have_ended(service: JobView) -> None:
    ending = actions_for(observed(job(), service, others=[pod(0, deletion_deadline=1_800_000_020.0)]))
    assert not ending.deregister
    assert condition(ending, ConditionType.RUNNING).reason == Reason.CLEANING_UP
    assert actions_for(observed(job(), service, pods=())).deregister
