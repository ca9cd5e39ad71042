"""The actions after an edit of a job, and for a job whose name was in use before."""

from __future__ import annotations

from dataclasses import replace

import pytest

from adascale_controller.operator.observe.pods import Pod, PodExit
from adascale_controller.operator.types.actions import Event
from adascale_controller.operator.types.conditions import ConditionType, Reason
from adascale_core import names
from adascale_core.messages.job_spec import JobSpec
from adascale_core.messages.registration import ReplicaState
from adascale_core.views.jobs import JobView
from support.observed_jobs import (
    NOW,
    SPEC,
    actions_for,
    condition,
    failed_pod,
    indexed_job,
    job,
    observed,
    pod,
    report,
    training_job,
    view,
    with_status,
)
from support.world import World


def test_an_edited_deadline_is_written_without_a_change_of_parallelism() -> None:
    assert actions_for(training_job((1, 2)), 2).resize is None
    assert actions_for(training_job((1, 2), active_deadline_seconds=60), 2).resize == 2


@pytest.mark.parametrize(("before", "after"), [(None, 60), (60, 90), (60, None)])
def test_an_edited_step_timeout_reaches_the_replicas_in_new_pods(
    before: int | None, after: int | None
) -> None:
    world = World()
    world.submit(stepTimeoutSeconds=before)
    world.run_cycles(10)
    assert _step_timeout(world) == before
    world.edit(stepTimeoutSeconds=after)
    world.run_cycles(20)
    assert _step_timeout(world) == after
    changed = next(event for event in world.events if event.reason == "TemplateChanged")
    assert changed.message.startswith("spec.template or spec.stepTimeoutSeconds has changed")
    world.run_cycles(5)
    assert world.writes == []


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
    assert not again.status_is_urgent
    assert not again.events, "once per generation of the spec"


@pytest.mark.parametrize("replicas", [None, 2, 5, 8])
def test_a_cap_with_which_the_job_can_run_is_not_reported(replicas: int | None) -> None:
    spec = replace(SPEC, min_replicas=2)
    actions = actions_for(training_job((1, 2), spec=spec, replica_limit=replicas), 2)
    assert condition(actions, ConditionType.RESCALING).message == ""
    assert "ReplicaLimitTooLow" not in [event.reason for event in actions.events]


def _step_timeout(world: World) -> int | None:
    """Return the step timeout of the replicas that train. None if they have none."""
    assert [agent.state for agent in world.agents.values()] == [ReplicaState.RUNNING]
    (pod,) = world.live_pods
    environment = {each["name"]: each.get("value") for each in pod["spec"]["containers"][0]["env"]}
    value = environment.get(names.ENV_STEP_TIMEOUT)
    return int(value) if value is not None else None


@pytest.mark.parametrize(("deadline", "resize"), [(60, None), (90, 2), (None, 2)])
def test_the_indexed_job_is_patched_only_if_the_deadline_differs(
    deadline: int | None, resize: int | None
) -> None:
    observed_job = observed(
        job((1, 2), active_deadline_seconds=deadline),
        view((1, 2), (1, 2)),
        indexed_job(2, active_deadline_seconds=60),
    )
    assert actions_for(observed_job, 2).resize == resize


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
    ending = actions_for(observed(job(), service, pods=[pod(0, deletion_deadline=1_800_000_020.0)]))
    assert not ending.deregister
    assert condition(ending, ConditionType.RUNNING).reason == Reason.CLEANING_UP
    assert actions_for(observed(job(), service, pods=())).deregister


@pytest.mark.parametrize("changes", [{}, {"suspended": True}])
@pytest.mark.parametrize("ended", [failed_pod(0), pod(0, phase="Failed", exit=PodExit(75))])
def test_an_ended_pod_that_is_being_deleted_loses_its_finalizer(ended: Pod, changes: dict[str, bool]) -> None:
    observed_job = observed(job((1, 1)), view((1, 1)), indexed_job(1, **changes), [ended])
    assert actions_for(observed_job, 1).delete_pods == ()
    deleted = replace(observed_job, pods=[replace(ended, deletion_deadline=NOW + 20)])
    assert actions_for(deleted, 1).delete_pods == (ended.name,)
