"""Spares: pods beyond those that train, which take the place of lost ones and keep no job from training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from adascale_controller.operator.observe.observed_job import ObservedJob
from adascale_controller.operator.observe.pods import Pod
from adascale_controller.operator.reconcile.failures import count_failures
from adascale_controller.operator.schedule.placement_backoff import TIMEOUT_TRAINING
from adascale_controller.operator.schedule.scheduler import Scheduler
from adascale_controller.operator.types.conditions import ConditionType, Reason
from adascale_controller.operator.types.kubernetes import ApiObject
from adascale_core.messages.allocation import Allocation
from adascale_core.messages.registration import ReplicaState
from adascale_core.views.jobs import JobView
from support.observed_jobs import (
    NOW,
    actions_for,
    condition,
    failed_pod,
    indexed_job,
    job,
    observed,
    pending_pod,
    pod,
    replica,
    training_job,
    view,
)
from support.world import GPU

RUNNING, RESCALING = ConditionType.RUNNING, ConditionType.RESCALING
TEMPLATE: dict[str, Any] = {"spec": {"containers": [{"name": "worker", "resources": {"limits": {GPU: "1"}}}]}}


def node(gpus: int, name: str = "node1") -> ApiObject:
    return {
        "metadata": {"name": name, "resourceVersion": "1"},
        "spec": {},
        "status": {
            "conditions": [{"type": "Ready", "status": "True"}],
            "allocatable": {GPU: str(gpus), "pods": "110"},
        },
    }


def with_spares(
    replicas: int = 2,
    spares: int = 1,
    *,
    members: Sequence[int] | None = None,
    waiting: Sequence[int] | None = None,
    pods: Sequence[Pod] | None = None,
) -> ObservedJob:
    """Return a job that trains on the first replicas by default, while the others wait."""
    indices = range(replicas + spares)
    members = range(replicas) if members is None else members
    waiting = [index for index in indices if index not in members] if waiting is None else waiting
    resource = job((1, replicas), spare_replicas=spares)
    allocation = {"generation": 1, "replicas": replicas, "spares": spares}
    resource = replace(resource, status={**resource.status, "allocation": allocation}, template=TEMPLATE)
    base = view((1, replicas), (1, max(indices) + 1))
    assert base.active is not None
    active = replace(
        base.active, replicas=len(members), members=tuple(base.active.members[index] for index in members)
    )
    registered = [
        *(replica(index) for index in members),
        *(replica(index, ReplicaState.WAITING, 0) for index in waiting),
    ]
    desired = Allocation(1, replicas, spares=spares)
    service = replace(base, desired=desired, active=active, replicas=tuple(registered))
    return observed(resource, service, indexed_job(len(indices)), pods)


# -- pods ---------------------------------------------------------------------------------------------------


def test_pods_are_those_of_the_replicas_and_of_the_spares() -> None:
    starting = observed(job(spare_replicas=1), view())
    actions = actions_for(starting, 2)
    assert (actions.allocate, actions.create_indexed_job) == (Allocation(1, 2, spares=1), 3)
    assert actions.status["allocation"] == {"generation": 1, "replicas": 2, "spares": 1}
    assert actions_for(observed(job(spare_replicas=1), view()), 0).allocate is None
    training = with_spares()
    assert actions_for(training, 2).allocate is None
    assert actions_for(training, 2).resize is None
    grown = actions_for(training, 4)
    assert (grown.allocate, grown.resize) == (Allocation(2, 4, spares=1), 5)
    suspended = replace(training, resource=job((1, 2), spare_replicas=1, suspend=True))
    assert actions_for(suspended).allocate == Allocation(2, 0)


def test_an_edit_of_the_spares_is_another_allocation() -> None:
    edited = training_job((3, 2), spare_replicas=1)
    assert actions_for(edited, 2).allocate == Allocation(4, 2, spares=1)
    assert actions_for(edited, 2).resize == 3


def test_a_pod_beyond_the_spares_stays_until_its_trainer_has_left() -> None:
    """The spare of index 3 has taken the place of replica 1."""
    training = with_spares(3, 1, members=[0, 2, 3])
    shrunk = actions_for(training, 2)
    assert (shrunk.allocate, shrunk.resize) == (Allocation(2, 2, spares=1), None)


# -- status -------------------------------------------------------------------------------------------------


def test_the_status_shows_how_many_spares_wait() -> None:
    actions = actions_for(with_spares(members=[0, 2]), 2)
    assert (actions.status["replicas"], actions.status["spareReplicas"]) == (2, 1)
    assert condition(actions, RUNNING).message == "Training on 2 replicas; 1 of 1 spare waits"
    assert "spareReplicas" not in actions_for(training_job(), 2).status


def test_a_spare_that_can_not_be_placed_is_shown_and_keeps_nothing_from_training() -> None:
    waiting = with_spares(waiting=[], pods=[pod(0), pod(1), pending_pod(2)])
    actions = actions_for(waiting, 2)
    running = condition(actions, RUNNING)
    assert running.status
    assert running.message == ("Training on 2 replicas; 0 of 1 spare wait: message of Unschedulable")
    assert not condition(actions, RESCALING).status
    assert (actions.allocate, actions.status["spareReplicas"]) == (None, 0)


def test_a_job_starts_if_any_of_its_pods_but_the_spares_can_start() -> None:
    resource = job((1, 2), spare_replicas=1)
    allocation = {"generation": 1, "replicas": 2, "spares": 1}
    resource = replace(resource, status={**resource.status, "allocation": allocation})
    service = replace(view((1, 2)), desired=Allocation(1, 2, spares=1))
    for pods, reason in (
        ([pending_pod(0), pod(1), pod(2)], Reason.STARTING),
        ([pending_pod(0), pod(1), pending_pod(2)], Reason.UNSCHEDULABLE),
    ):
        starting = observed(resource, service, indexed_job(3), pods)
        assert condition(actions_for(starting, 2), RUNNING).reason == reason


# -- failures -----------------------------------------------------------------------------------------------


def test_the_failure_of_a_spare_before_it_trained_does_not_count() -> None:
    pods = [pod(0), pod(1), failed_pod(2)]
    assert count_failures(with_spares(pods=pods)).count == 0
    assert count_failures(with_spares(members=[0, 2], pods=pods)).count == 1
    assert count_failures(with_spares(pods=[pod(0), pod(1), failed_pod(2, 1)])).count == 1


# -- the decision -------------------------------------------------------------------------------------------


def decided(gpus: int, *jobs: ObservedJob) -> list[int]:
    """Return the decided counts on a node with so many GPUs."""
    scheduler = Scheduler()
    scheduler.set_resources([node(gpus)], ())
    for each in jobs:
        scheduler.update(each)
    scheduler.adopt(scheduler.solve(scheduler.decision_input()), NOW)
    decisions = [scheduler.decision(each.resource.id) for each in jobs]
    return [decision.replicas if decision is not None else 0 for decision in decisions]


def new_job(spares: int, **spec: Any) -> ObservedJob:
    made = replace(job(spare_replicas=spares, **spec), template=TEMPLATE)
    return observed(made, JobView.empty(made.id))


def unplaced(rank: int) -> Pod:
    return replace(pending_pod(rank), problem=None)


@pytest.mark.parametrize(
    ("gpus", "spares", "replicas"), [(4, 0, 4), (4, 1, 3), (4, 9, 1), (1, 1, 1), (9, 1, 8)]
)
def test_a_new_job_gets_what_its_spares_leave_and_at_least_its_smallest_count(
    gpus: int, spares: int, replicas: int
) -> None:
    counts = decided(gpus, new_job(spares, spec=replace(job().valid_job.spec, max_replicas=8)))
    assert counts[0] <= replicas
    limited = decided(replicas, new_job(0, spec=replace(job().valid_job.spec, max_replicas=8)))
    assert counts == limited


@pytest.mark.parametrize(
    "pods",
    [
        pytest.param([pod(0), pod(1), unplaced(2)], id="the spare fits nowhere"),
        pytest.param([pod(0), unplaced(1), pod(2)], id="the replacement of a lost one fits nowhere"),
    ],
)
def test_spares_that_can_not_be_placed_do_not_shrink_the_job(pods: list[Pod]) -> None:
    members = [each.rank for each in pods if each.node]
    assert decided(2, with_spares(members=members, waiting=[], pods=pods)) == [2]


def test_a_spare_on_a_node_takes_a_place_that_no_other_job_gets() -> None:
    other = job()
    other = replace(other, name="other", uid="other", template=TEMPLATE)
    other = replace(other, job=replace(other.valid_job, id=other.id))
    waiting = observed(other, JobView.empty(other.id))
    assert decided(3, with_spares(2, 0), waiting) == [2, 1]
    assert decided(3, with_spares(), waiting) == [1, 1]
    assert decided(4, with_spares(), waiting) == [2, 1]


def test_a_spare_that_can_not_be_placed_for_long_is_no_failed_placement() -> None:
    waiting = with_spares(waiting=[], pods=[pod(0), pod(1), pending_pod(2)])
    scheduler = Scheduler()
    scheduler.set_resources([node(2)], ())
    for passed in (0.0, TIMEOUT_TRAINING + 1):
        scheduler.update(replace(waiting, now=NOW + passed))
    assert scheduler.failed_placement(replace(waiting, now=NOW + TIMEOUT_TRAINING + 1)) is None
