"""What the operator does with a job that Kueue queues, and with an Indexed Job that others suspend."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from adascale_controller.operator.apply.applier import Applier
from adascale_controller.operator.observe.adascalejob import AdaScaleJob
from adascale_controller.operator.observe.observed_job import IndexedJob, JobRefusal, ObservedJob, QueueView
from adascale_controller.operator.observe.pods import PodProblem
from adascale_controller.operator.reconcile.job_phase import JobPhase, assess
from adascale_controller.operator.reconcile.reconciler import MAX_GATE_PAUSE
from adascale_controller.operator.schedule.quota import fixed_count, quota_limit
from adascale_controller.operator.schedule.scheduler import Scheduler
from adascale_controller.operator.types.actions import Actions
from adascale_controller.operator.types.conditions import ConditionType, JobCondition, Reason
from adascale_controller.operator.types.workload import ELASTIC_JOB, QUEUE_NAME, Queueing
from adascale_core.messages.allocation import Allocation
from support.decisions import decided
from support.fake_cluster import FakeCluster
from support.observed_jobs import (
    NOW,
    SPEC,
    actions_for,
    condition,
    failed_pod,
    indexed_job,
    job,
    observed,
    pending_pod,
    pod,
    training_job,
    view,
    with_status,
)
from support.world import World

QUEUED = Queueing({QUEUE_NAME: "gpus"}, {ELASTIC_JOB: "true"})


def queued_job(recorded: tuple[int, int] | None = None, **spec: Any) -> AdaScaleJob:
    return replace(job(recorded, **spec), queueing=QUEUED)


def queued(parallelism: int, *, elastic: bool = True, **changes: Any) -> IndexedJob:
    """Return an Indexed Job that Kueue manages."""
    built = indexed_job(parallelism, queue="gpus", queue_request=QUEUED.request, is_elastic=elastic)
    return replace(built, **changes)


def waiting_job(parallelism: int, *, elastic: bool = True) -> ObservedJob:
    """Return a job that Kueue has evicted, whose replicas have left."""
    held = queued(parallelism, elastic=elastic, suspended=True)
    return observed(queued_job((2, 0)), view((2, 0)), held)


def running_job(recorded: tuple[int, int] = (1, 2), *, elastic: bool = True, **changes: Any) -> ObservedJob:
    """Return a job that trains and that Kueue has admitted."""
    built = observed(queued_job(recorded), view(recorded, recorded), queued(recorded[1], elastic=elastic))
    return replace(built, **changes)


def writes_to_job(actions: Actions) -> tuple[int | None, int | None, bool]:
    """Return what is written to the Indexed Job: its creation, its size, its deletion."""
    return actions.create_indexed_job, actions.resize, actions.delete_indexed_job


# -- before admission ------------------------------------------------------------------------------------


def test_a_queued_job_waits_with_its_smallest_count_and_no_allocation() -> None:
    fresh = observed(queued_job(spec=replace(SPEC, min_replicas=2)), view())
    actions = actions_for(fresh)
    assert writes_to_job(actions) == (2, None, False)
    assert (actions.allocate, actions.status["state"]) == (None, "Pending")
    running = condition(actions, ConditionType.RUNNING)
    assert (running.status, running.reason) == (False, Reason.QUEUED)
    assert running.message == "Waiting to be admitted by Kueue, in LocalQueue gpus"
    assert [event.reason for event in actions.events] == ["Queued"]


def test_a_queued_job_whose_indexed_job_is_refused_says_so() -> None:
    refusal = JobRefusal(PodProblem(Reason.QUOTA_EXCEEDED, "exceeded quota: jobs"), extra=False)
    refused = observed(queued_job(), view(), refusal=refusal)
    actions = actions_for(refused)
    running = condition(actions, ConditionType.RUNNING)
    assert (running.status, running.reason, running.message) == (
        False,
        Reason.QUOTA_EXCEEDED,
        "exceeded quota: jobs",
    )
    assert (actions.status["state"], [event.warning for event in actions.events]) == ("Pending", [True])
    assert writes_to_job(actions) == (1, None, False), "it is tried again"
    extra = replace(refused, refusal=replace(refusal, extra=True))
    assert condition(actions_for(extra), ConditionType.RUNNING).reason == Reason.QUEUED


def test_a_job_without_a_queue_name_does_not_wait() -> None:
    assert assess(observed(job(), view())).phase is JobPhase.RUNNABLE


@pytest.mark.parametrize(("elastic", "count"), [(True, 1), (True, 4), (False, 4)])
def test_a_job_that_is_evicted_asks_for_the_smallest_count_if_kueue_lets_it_grow(
    elastic: bool, count: int
) -> None:
    """By another Job: Kueue does not resume an elastic one that is resized while it is suspended."""
    left = waiting_job(count, elastic=elastic)
    assert writes_to_job(actions_for(left)) == (None, None, elastic and count == 4)
    leaving = replace(left, pods=[pod(0)])
    assert writes_to_job(actions_for(leaving)) == (None, None, False)
    again = replace(left, indexed_job=None)
    assert writes_to_job(actions_for(again)) == (1, None, False)


def test_a_job_that_waits_shows_what_kueue_says() -> None:
    said = QueueView(message="couldn't assign flavors to pod set main")
    running = condition(actions_for(replace(waiting_job(1), queue=said)), ConditionType.RUNNING)
    assert running.message.endswith("in LocalQueue gpus: couldn't assign flavors to pod set main")


# -- admitted --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("decided", "allocated"), [(4, 4), (2, 2), (0, 1)])
def test_an_admitted_job_gets_what_is_decided_and_at_least_its_smallest_count(
    decided: int, allocated: int
) -> None:
    admitted = observed(queued_job(), view(), queued(1))
    assert actions_for(admitted, decided).allocate == Allocation(1, allocated)


def test_gated_pods_are_shown_with_the_reason_while_training_goes_on() -> None:
    gated = PodProblem(Reason.SCHEDULING_GATED, "waiting for Kueue to reserve the quota of more replicas")
    pods = (*(pod(rank) for rank in range(2)), pod(2, node=None, phase="Pending", problem=gated))
    growing = observed(queued_job((2, 3)), view((2, 3), (1, 2)), queued(3), pods)
    actions = actions_for(growing, 3)
    rescaling = condition(actions, ConditionType.RESCALING)
    assert (rescaling.status, rescaling.reason) == (True, Reason.SCHEDULING_GATED)
    assert rescaling.message.startswith("2 -> 3: waiting for Kueue")
    assert rescaling.message.endswith("training continues on 2 replicas")
    assert (actions.status["replicas"], actions.resize) == (2, None)


@pytest.mark.parametrize(
    ("age", "admitted", "checked", "elastic", "is_checked"),
    [
        pytest.param(20.0, 3, 0.0, True, True, id="stays gated"),
        pytest.param(20.0, 2, 0.0, True, False, id="is not admitted"),
        pytest.param(1.0, 3, 0.0, True, False, id="was just created"),
        pytest.param(20.0, 3, NOW - 1, True, False, id="was just looked at"),
        pytest.param(20.0, 3, NOW - 9, True, False, id="was looked at 9 s ago after 11 s"),
        pytest.param(20.0, 3, NOW - 11, True, True, id="was looked at 11 s ago after 9 s"),
        pytest.param(5000.0, 3, NOW - MAX_GATE_PAUSE, True, True, id="was looked at long ago"),
        pytest.param(20.0, 3, 0.0, False, False, id="is gated by others"),
    ],
)
def test_kueue_looks_again_at_a_pod_that_is_admitted_and_stays_gated(
    age: float, admitted: int, checked: float, elastic: bool, is_checked: bool
) -> None:
    gated = PodProblem(Reason.SCHEDULING_GATED, "waiting for Kueue to reserve the quota of more replicas")
    last = pod(2, node=None, phase="Pending", problem=gated, created_at=NOW - age)
    grown = queued(3, elastic=elastic, gates_checked_at=checked)
    job_, service = queued_job((2, 3)), view((2, 3), (1, 2))
    growing = observed(job_, service, grown, [pod(0), pod(1), last], queue=QueueView(admitted))
    assert actions_for(growing, 3).check_gates == ((grown.uid,) if is_checked else ())


def test_a_pod_that_others_keep_gated_delays_the_look_at_no_new_pod() -> None:
    gated = PodProblem(Reason.SCHEDULING_GATED, "waiting until scheduling gates are removed: others")
    old, new = (
        replace(pending_pod(rank), problem=gated, created_at=NOW - age) for rank, age in ((1, 5000), (2, 9))
    )
    grown = queued(3, gates_checked_at=NOW - 20)
    job_, service = queued_job((2, 3)), view((2, 3), (1, 1))
    growing = observed(job_, service, grown, [pod(0), old], queue=QueueView(3))
    assert not actions_for(growing, 3).check_gates
    assert actions_for(replace(growing, pods=[pod(0), old, new]), 3).check_gates


def test_the_job_of_gated_pods_is_changed_without_another_effect() -> None:
    world = World()
    world.submit()
    world.run_cycles(5)
    before = world.indexed_job
    assert before is not None
    indexed = indexed_job(1, uid=before["metadata"]["uid"])
    job_ = replace(training_job((1, 1)), indexed_job=indexed)
    applier = Applier(FakeCluster(world), world.service, lambda *_: None, "operator")
    actions = Actions({}, status_is_urgent=False, status_changed=False, check_gates=(indexed.uid,))
    asyncio.run(applier.apply(job_, actions))
    assert world.indexed_job is not None
    assert IndexedJob.read(world.indexed_job) == replace(IndexedJob.read(before), gates_checked_at=NOW)


def test_a_queued_job_that_its_user_stops_gives_its_quota_back() -> None:
    stopped = running_job(resource=queued_job((1, 2), suspend=True))
    assert writes_to_job(actions_for(stopped)) == (None, None, False), "its replicas save their state first"
    left = replace(stopped, service=view((2, 0), (2, 0)), pods=())
    assert writes_to_job(actions_for(left)) == (None, None, True)


def test_another_queue_takes_another_indexed_job() -> None:
    moved = replace(queued_job((1, 2)), queueing=Queueing({QUEUE_NAME: "others"}))
    before = running_job(resource=moved)
    assert assess(before).reason is Reason.QUEUE_CHANGED
    left = replace(before, service=view((2, 0), (2, 0)), pods=())
    assert writes_to_job(actions_for(left)) == (None, None, True)


def test_the_queue_that_kueue_has_chosen_is_no_change() -> None:
    default = training_job()
    assert default.indexed_job is not None
    assert assess(replace(default, indexed_job=replace(default.indexed_job, queue="default"))).phase is (
        JobPhase.RUNNABLE
    )


def test_a_queued_job_that_fails_ends_by_a_deadline_with_its_pods() -> None:
    failing = running_job(
        (1, 1), pods=[failed_pod(0, each, created_at=NOW - 50 + each) for each in (1, 2, 3, 4)]
    )
    actions = actions_for(failing, 1)
    assert actions.status["state"] == "Failed"
    assert (actions.resize, actions.active_deadline_seconds) == (1, 1), "Kueue would resume it"


def test_a_queued_job_whose_spec_is_invalid_leaves_the_queue_until_it_is_corrected() -> None:
    """A deadline would end it for good when it is admitted."""
    invalid = replace(queued_job(), job=None, invalid="spec.template: no image")
    waiting = observed(invalid, view(), queued(1, suspended=True))
    actions = actions_for(waiting)
    assert condition(actions, ConditionType.FAILED).reason == Reason.INVALID_SPEC
    assert writes_to_job(actions) == (None, None, True)
    corrected = replace(queued_job(), status=actions.status)
    again = actions_for(observed(corrected, view()))
    assert (writes_to_job(again), again.status["state"]) == ((1, None, False), "Pending")


# -- suspended by others ---------------------------------------------------------------------------------


@pytest.mark.parametrize("is_queued", [True, False])
def test_what_others_suspend_saves_its_state_and_stays_suspended(is_queued: bool) -> None:
    running = running_job((1, 1)) if is_queued else training_job((1, 1))
    assert running.indexed_job is not None
    evicted = replace(running, indexed_job=replace(running.indexed_job, suspended=True))
    actions = actions_for(evicted)
    assert actions.allocate == Allocation(2, 0)
    assert writes_to_job(actions) == (None, None, False)
    left = with_status(replace(evicted, service=view((2, 0), (2, 0)), pods=()), actions)
    assert writes_to_job(actions_for(left)) == (None, None, False)


def test_who_suspends_a_job_that_is_not_queued_is_told_so() -> None:
    running = training_job((1, 1))
    assert running.indexed_job is not None
    evicted = replace(running, indexed_job=replace(running.indexed_job, suspended=True))
    actions = actions_for(evicted)
    assert condition(actions, ConditionType.SUSPENDED) == JobCondition(
        ConditionType.SUSPENDED, False, Reason.JOB_SUSPENDED, "Saving state"
    )
    left = with_status(replace(evicted, service=view((2, 0), (2, 0)), pods=()), actions)
    actions = actions_for(left)
    assert actions.status["state"] == "Suspended"
    assert [event.reason for event in actions.events] == ["JobSuspended"]
    message = condition(actions, ConditionType.SUSPENDED).message
    assert message.startswith("spec.suspend of Job digits was set, and not by the operator: set it to false")


def test_a_job_that_an_earlier_operator_has_suspended_is_resumed() -> None:
    stopped = observed(job((5, 0)), view((5, 0)), indexed_job(2, suspended=True, suspended_by_operator=False))
    assert not stopped.is_held
    assert actions_for(stopped, 1).resize == 1


def test_the_operator_does_not_undo_a_suspension_and_continues_after_it() -> None:
    world = World()
    world.submit(minReplicas=2, maxReplicas=2)
    world.run_cycles(15)
    assert world.status["replicas"] == 2
    for suspend, replicas in ((True, 0), (False, 2)):
        assert world.indexed_job is not None
        before = world.indexed_job["metadata"]["uid"]
        world.suspend_job(suspend)
        world.run_cycles(30)
        assert world.indexed_job["spec"]["suspend"] is suspend
        assert world.indexed_job["metadata"]["uid"] == before
        assert world.status["replicas"] == replicas
        world.run_cycles(5)
        assert world.writes == []


# -- quota -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("queue", "limit"),
    [
        pytest.param(QueueView(2, room=1), 3, id="what is reserved and what is left"),
        pytest.param(QueueView(2, room=0), 2, id="nothing is left"),
        pytest.param(QueueView(2, room=100), 8, id="not above maxReplicas"),
        pytest.param(None, 2, id="not read yet"),
        pytest.param(QueueView(2), 3, id="may not be read, so one step at a time"),
    ],
)
def test_the_quota_of_kueue_is_capacity(queue: QueueView | None, limit: int) -> None:
    spec = replace(SPEC, local_bsz_bounds=(1, 16))
    job_ = queued_job((1, 2), spec=spec)
    assert quota_limit(running_job(resource=job_, queue=queue)) == limit


def test_without_a_queue_there_is_no_limit_by_quota() -> None:
    assert (quota_limit(training_job()), fixed_count(training_job())) == (None, None)


def test_a_growth_that_is_pending_is_not_followed_by_another() -> None:
    growing = observed(queued_job((2, 3)), view((2, 3), (1, 2)), queued(3), queue=QueueView(2))
    assert quota_limit(growing) == 3


def test_without_elastic_slices_the_count_is_fixed() -> None:
    fixed = running_job(elastic=False, queue=QueueView(2, room=6))
    assert (quota_limit(fixed), fixed_count(fixed)) == (2, 2)


def test_the_admitted_flavor_selects_the_nodes() -> None:
    flavor = {
        "nodeSelector": {"gpu": "h100"},
        "tolerations": [{"key": "spot", "operator": "Exists"}],
    }
    template = {"spec": {"nodeSelector": {"zone": "a"}, "containers": []}}
    admitted = running_job(
        resource=replace(queued_job((1, 2)), template=template), indexed_job=queued(2, scheduling=flavor)
    )
    spec = admitted.placement_spec
    assert spec["nodeSelector"] == {"zone": "a", "gpu": "h100"}
    assert spec["tolerations"] == flavor["tolerations"]
    assert "tolerations" not in admitted.pod_spec
    plain = replace(admitted, indexed_job=indexed_job(2, scheduling=flavor))
    assert plain.placement_spec == template["spec"]


def test_a_decision_stays_within_the_quota_and_says_so() -> None:
    template = {"spec": {"containers": [{"name": "worker"}]}}
    scheduler = Scheduler()
    loses = running_job((1, 4), resource=replace(queued_job((1, 4)), template=template))
    limited = replace(loses, queue=QueueView(2, room=0, cluster_queue="team"))
    decision = decided(scheduler, limited)[loses.resource.id]
    assert (decision.replicas, decision.reason) == (2, "the quota of ClusterQueue team holds 2 replicas")
    (explained,) = scheduler.explain()
    limits = [limit.reason for limit in explained.limits]
    assert (
        "at most 2 replicas may be scheduled at present: the quota of ClusterQueue team holds 2 replicas"
        in limits
    )
