"""Spares: pods beyond those that train, which take the place of lost ones and keep no job from training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from adascale_controller.job.phase import JobPhase
from adascale_controller.job.placement_backoff import TIMEOUT_TRAINING
from adascale_controller.job.reasons import Reason
from adascale_controller.operator.observe.observed_job import ObservedJob
from adascale_controller.operator.observe.pods import Pod
from adascale_controller.operator.reconcile.job_phase import assess, failures_of
from adascale_controller.operator.schedule.nodes import free_nodes
from adascale_controller.operator.schedule.scheduler import Scheduler
from adascale_controller.operator.types.kubernetes import ConditionType
from adascale_core.failures import EXIT_INVALID_PROGRAM, FailureCount
from adascale_core.messages.allocation import Allocation
from adascale_core.messages.registration import ReplicaState
from support.observed_jobs import (
    NOW,
    ON_GPU,
    actions_for,
    condition,
    decided,
    failed_pod,
    job,
    new_job,
    node,
    observed,
    pending_pod,
    pod,
    replica,
    report,
    training_job,
    view,
    writes,
)

RUNNING, RESCALING = ConditionType.RUNNING, ConditionType.RESCALING


def with_spares(
    replicas: int = 2,
    spares: int = 1,
    *,
    members: Sequence[int] | None = None,
    waiting: Sequence[int] | None = None,
    pods: Sequence[Pod] | int = 0,
) -> ObservedJob:
    """Return a job that trains on the first replicas by default, while the others wait."""
    indices = range(replicas + spares)
    members = range(replicas) if members is None else members
    waiting = [index for index in indices if index not in members] if waiting is None else waiting
    resource = job((1, replicas), spare_replicas=spares, template=ON_GPU)
    allocation = {"generation": 1, "replicas": replicas, "spares": spares}
    resource = replace(resource, status={**resource.status, "allocation": allocation})
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
    return observed(resource, service, pods or len(indices))


# -- pods ---------------------------------------------------------------------------------------------------


def test_pods_are_those_of_the_replicas_and_of_the_spares() -> None:
    starting = observed(job(spare_replicas=1), view())
    actions = actions_for(starting, 2)
    assert (actions.allocate, writes(actions)["create"]) == (Allocation(1, 2, spares=1), [0, 1, 2])
    assert actions.status["allocation"] == {"generation": 1, "replicas": 2, "spares": 1}
    assert actions_for(observed(job(spare_replicas=1), view()), 0).allocate is None
    training = with_spares()
    assert actions_for(training, 2).allocate is None
    assert writes(actions_for(training, 2)) == {}
    grown = writes(actions_for(training, 4))
    assert grown == {"allocate": Allocation(2, 4, spares=1), "create": [3, 4]}
    suspended = replace(training, resource=job((1, 2), spare_replicas=1, suspend=True))
    assert actions_for(suspended).allocate == Allocation(2, 0)


def test_an_edit_of_the_spares_is_another_allocation() -> None:
    edited = training_job((3, 2), spare_replicas=1)
    assert actions_for(edited, 2).allocate == Allocation(4, 2, spares=1)
    assert writes(actions_for(edited, 2))["create"] == [2]


def test_a_pod_beyond_the_spares_stays_until_its_trainer_has_left() -> None:
    """The spare of index 3 has taken the place of replica 1."""
    training = with_spares(3, 1, members=[0, 2, 3])
    assert writes(actions_for(training, 2)) == {"allocate": Allocation(2, 2, spares=1)}


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
        starting = observed(resource, service, pods)
        assert condition(actions_for(starting, 2), RUNNING).reason == reason


# -- failures -----------------------------------------------------------------------------------------------


def failed_starts(rank: int, count: int, **changes: Any) -> list[Pod]:
    return [failed_pod(rank, created_at=NOW - 50 - each, **changes) for each in range(count)]


SPARE_FAILED = [pod(0), pod(1), *failed_starts(2, 8), pod(2)]


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param(lambda each: each, id="the spare waits"),
        pytest.param(lambda each: replace(each, service=replace(each.service, broken=True)), id="a loss"),
        pytest.param(
            lambda _: with_spares(members=[0, 2], pods=SPARE_FAILED), id="the spare has taken the place"
        ),
        pytest.param(lambda each: replace(each, service=None), id="the metrics service is away"),
        pytest.param(
            lambda each: replace(
                each,
                resource=job((1, 0), spare_replicas=1, suspend=True),
                service=view((1, 0), (1, 2)),
            ),
            id="suspended",
        ),
    ],
)
def test_failures_of_a_spare_before_it_trained_never_end_the_job(
    changed: Callable[[ObservedJob], ObservedJob],
) -> None:
    training = changed(with_spares(pods=SPARE_FAILED))
    assert failures_of(training).count.count == 0
    assert assess(training).phase is not JobPhase.FAILED


def test_with_spares_a_failure_counts_if_the_replica_trained_or_too_few_can_start() -> None:
    assert failures_of(with_spares(pods=[pod(0), pod(1), failed_pod(2, 1)])).count.count == 1
    all_fail = [failed_pod(rank, created_at=NOW - each) for rank in range(3) for each in (1, 2)]
    starting = replace(with_spares(pods=all_fail), service=view((1, 2)))
    assert failures_of(starting).count.count == 2
    assert failures_of(starting).is_repeated


def test_the_failed_starts_of_spares_that_came_before_a_step_of_all_do_not_count_later() -> None:
    """Two replicas, one after the other, have been spares that failed."""
    pods = [pod(0), *failed_starts(1, 8), *failed_starts(2, 8), pod(1), pod(2)]
    training = with_spares(pods=pods)
    assert training.service is not None
    stepped = replace(training, service=replace(training.service, latest=report(1)))
    counted = failures_of(stepped).count
    assert counted == FailureCount(0, 0, 8)
    recorded = {**training.resource.status, "attempts": {"falseStarts": 8}}
    for later in (None, replace(training.service, broken=True)):
        lost = replace(stepped, resource=replace(training.resource, status=recorded), service=later)
        assert failures_of(lost).count == counted
        assert not failures_of(lost).is_repeated
    edited = replace(job((1, 2)), status={**job((1, 2)).status, "attempts": {"falseStarts": 8}})
    no_spares = replace(stepped, resource=edited, service=view((1, 2), (1, 2)))
    assert failures_of(no_spares).count == counted
    assert not failures_of(no_spares).is_repeated


def test_an_invalid_program_ends_the_job_only_if_more_than_the_spares_fail() -> None:
    def fails(rank: int) -> Pod:
        failed = failed_pod(rank)
        assert failed.exit is not None
        return replace(failed, exit=replace(failed.exit, exit_code=EXIT_INVALID_PROGRAM))

    one = with_spares(pods=[pod(0), pod(1), fails(2)])
    assert not failures_of(replace(one, service=None)).is_permanent
    assert failures_of(with_spares(pods=[fails(0), pod(1), fails(2)])).is_permanent


# -- the decision -------------------------------------------------------------------------------------------


def counts(gpus: int, *jobs: ObservedJob) -> list[int]:
    """Return the decided counts on a node with so many GPUs."""
    decisions = decided(Scheduler(), *jobs, nodes=[node("node1", gpus)])
    return [decisions[each.resource.id].replicas for each in jobs]


def unplaced(rank: int) -> Pod:
    return replace(pending_pod(rank), problem=None)


@pytest.mark.parametrize(
    ("gpus", "spares", "replicas"), [(4, 0, 4), (4, 1, 3), (4, 9, 1), (1, 1, 1), (9, 1, 8)]
)
def test_a_new_job_gets_what_its_spares_leave_and_at_least_its_smallest_count(
    gpus: int, spares: int, replicas: int
) -> None:
    with_spare, without = (new_job(spare_replicas=each, template=ON_GPU) for each in (spares, 0))
    assert counts(gpus, with_spare)[0] <= replicas
    assert counts(gpus, with_spare) == counts(replicas, without)


@pytest.mark.parametrize(
    "pods",
    [
        pytest.param([pod(0), pod(1), unplaced(2)], id="the spare fits nowhere"),
        pytest.param([pod(0), unplaced(1), pod(2)], id="the replacement of a lost one fits nowhere"),
    ],
)
def test_spares_that_can_not_be_placed_do_not_shrink_the_job(pods: list[Pod]) -> None:
    members = [each.rank for each in pods if each.node]
    assert counts(2, with_spares(members=members, waiting=[], pods=pods)) == [2]


def test_a_spare_on_a_node_takes_a_place_that_no_other_job_gets() -> None:
    waiting = new_job("other", template=ON_GPU)
    assert counts(3, with_spares(2, 0), waiting) == [2, 1]
    assert counts(3, with_spares(), waiting) == [1, 1]
    assert counts(4, with_spares(), waiting) == [2, 1]


def test_a_spare_that_can_not_be_placed_for_long_is_no_failed_placement() -> None:
    waiting = with_spares(waiting=[], pods=[pod(0), pod(1), pending_pod(2)])
    scheduler = Scheduler()
    scheduler.set_resources([node("node1", 2)], ())
    for passed in (0.0, TIMEOUT_TRAINING + 1):
        scheduler.update(replace(waiting, now=NOW + passed))
    assert scheduler.schedule(replace(waiting, now=NOW + TIMEOUT_TRAINING + 1)).failed_placement is None


def test_the_free_resources_are_computed_once_however_many_jobs_have_spares(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    computed = []

    def count(*given: Any) -> Any:
        computed.append(given)
        return free_nodes(*given)

    monkeypatch.setattr("adascale_controller.operator.schedule.pod_memory.free_nodes", count)
    # The second spare of each job is on no node.
    each = with_spares(1, 2, pods=[pod(0), pod(1)])
    resources = [
        replace(
            job((1, 1), name=f"job{index}", spare_replicas=2, template=ON_GPU), status=each.resource.status
        )
        for index in range(3)
    ]
    jobs = [replace(each, resource=resource) for resource in resources]
    decided(Scheduler(), *jobs, nodes=[node("node1", 9)])
    assert len(computed) == 1
