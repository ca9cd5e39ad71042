"""Replica counts on which the program fails at once are given up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from adascale_controller.job.failing_counts import MAX_GENERATIONS, MIN_STEPS, FailingCounts
from adascale_controller.job.reasons import Reason
from adascale_controller.operator.observe.pods import Pod
from adascale_controller.operator.schedule.scheduler import Scheduler
from adascale_controller.operator.types.kubernetes import ConditionType
from adascale_core.failures import EXIT_SINGLE_REPLICA, ProgramFailure
from adascale_core.messages.registration import ReplicaState
from adascale_core.messages.reports import StepTime
from adascale_core.views.jobs import JobView
from controller.conftest import DecidedCount
from support.fake_cluster import FakeCluster
from support.observed_jobs import (
    ON_CPU,
    actions_for,
    condition,
    decided,
    failed_pod,
    job,
    observed,
    report,
    training_job,
    view,
)


def trains(counts: FailingCounts, generation: int, replicas: int, steps: int, first: int = 1) -> JobView:
    """Let the job make steps in a generation, and return the last view."""
    current = (generation, replicas)
    last = view(current, current)
    counts.update(last)
    for step in range(first, first + steps):
        last = replace(last, latest=replace(report(generation, replicas), step=step))
        counts.update(last)
    return last


def failed(generation: int, replica: int = 0, exit_code: int = 1) -> ProgramFailure:
    return ProgramFailure(replica, generation, exit_code, "")


def test_a_count_is_given_up_at_its_first_failure_if_the_program_has_trained_on_fewer() -> None:
    counts = FailingCounts()
    trains(counts, 1, 1, MIN_STEPS)
    last = trains(counts, 2, 2, 1, first=200)
    assert counts.limit is None
    given_up = counts.fail(failed(2, 0, 1), last)
    assert given_up is not None
    assert str(given_up) == (
        "the program failed at once on 2 replicas (replica 0: exit code 1), but trained on 1"
    )
    assert counts.limit == 1
    assert counts.fail(failed(2, 1, 1), last) is None, "once per generation"


def test_a_smaller_count_that_fails_too_is_given_up_with_it() -> None:
    counts = FailingCounts()
    trains(counts, 1, 1, MIN_STEPS)
    counts.fail(failed(2, 0, 1), trains(counts, 2, 4, 0))
    assert counts.limit == 1
    trains(counts, 3, 1, MIN_STEPS, first=50)
    assert counts.fail(failed(4, 0, 1), trains(counts, 4, 3, 0)) is None, "it is above the limit already"


def test_a_count_is_given_up_also_if_the_program_fails_before_it_joins() -> None:
    """For an error that it has only on several replicas. Another may be of that replica alone."""
    counts = FailingCounts()
    last = trains(counts, 1, 1, MIN_STEPS)
    waits = replace(last, desired=view((2, 2), (1, 1)).desired)
    counts.update(waits)
    assert counts.fail(failed(0, 1, 1), waits) is None
    assert counts.fail(failed(0, 1, 77), waits) is not None
    assert counts.limit == 1


def test_only_the_latest_generations_are_kept() -> None:
    counts = FailingCounts()
    for generation in range(1, MAX_GENERATIONS + 10):
        trains(counts, generation, 1, MIN_STEPS, first=MIN_STEPS * generation)
    newest = MAX_GENERATIONS + 10
    assert counts.fail(failed(1, 0, 1), trains(counts, newest, 2, 0)) is None, "it is not kept"
    assert counts.fail(failed(newest, 0, 1), view()) is not None
    assert counts.limit == 1


def test_a_count_is_kept_if_the_program_has_trained_on_it_in_this_generation() -> None:
    counts = FailingCounts()
    trains(counts, 1, 1, MIN_STEPS)
    assert counts.fail(failed(2, 0, 1), trains(counts, 2, 2, MIN_STEPS, first=11)) is None
    assert counts.limit is None


def test_a_count_is_kept_if_the_program_has_not_trained_on_fewer() -> None:
    counts = FailingCounts()
    assert counts.fail(failed(1, 0, 1), trains(counts, 1, 2, 1)) is None
    trains(counts, 2, 4, MIN_STEPS)
    assert counts.fail(failed(3, 0, 1), trains(counts, 3, 2, 1, first=50)) is None
    assert counts.fail(failed(9, 0, 1), view()) is None, "of an unknown generation"


def test_a_program_that_cannot_have_several_replicas_needs_no_failure_at_once() -> None:
    counts = FailingCounts()
    trains(counts, 1, 1, MIN_STEPS)
    last = trains(counts, 2, 2, MIN_STEPS, first=11)
    assert counts.fail(failed(2, 0, 77), last) is not None
    assert counts.limit == 1


def test_step_times_show_on_which_counts_the_program_has_trained_before_the_operator_started() -> None:
    counts = FailingCounts()
    last = replace(view((5, 2), (5, 2)), step_times=(StepTime(1, 4, 1, 0.1),))
    counts.update(last)
    assert counts.fail(failed(5, 0, 1), last) is not None
    assert counts.limit == 1


@pytest.mark.parametrize(("template", "expected"), [(None, 1), ("of another program", 2)])
def test_a_pod_that_has_failed_before_it_joined_counts_for_its_own_program(
    template: str | None, expected: int
) -> None:
    service = training_job((2, 2)).service
    assert service is not None
    failed = failed_pod(1)
    assert failed.exit is not None
    early = replace(failed, template=template, exit=replace(failed.exit, exit_code=EXIT_SINGLE_REPLICA))
    service = replace(service, step_times=(StepTime(1, 4, 1, 0.1),))
    assert _decide(Scheduler(), service, [early])[0] == expected


def test_the_operator_returns_to_the_count_that_works_and_says_why() -> None:
    scheduler = Scheduler()
    at_two = training_job((2, 2))
    assert at_two.service is not None
    service = replace(at_two.service, step_times=(StepTime(1, 4, 1, 0.1),))
    fails = [failed_pod(0, 2), failed_pod(1, 2)]
    assert _decide(scheduler, service) == (2, "unchanged")
    expected = "the program failed at once on 2 replicas (replica 0: exit code 3), but trained on 1"
    assert _decide(scheduler, service, fails) == (1, expected)
    failing = scheduler.schedule(at_two).failing_count
    assert failing is not None
    actions = actions_for(at_two, 1, failing_count=failing)
    rescaling = condition(actions, ConditionType.RESCALING)
    assert (rescaling.status, rescaling.reason) == (True, Reason.PREPARING_REPLICAS)
    at_one = observed(job((3, 1)), view((3, 1), (3, 1)), 1)
    rescaling = condition(actions_for(at_one, 1, failing_count=failing), ConditionType.RESCALING)
    assert (rescaling.status, rescaling.reason) == (False, Reason.PROGRAM_FAILED)
    assert rescaling.message == f"T{expected[1:]}; it gets 1 replica at most"


@pytest.fixture
def cluster(decided: DecidedCount) -> FakeCluster:
    """Return a job that trains on 1 replica, because its program has failed at once on 2."""
    decided.count = 2
    cluster = FakeCluster()
    cluster.submit(backoffLimit=1)
    cluster.run_cycles(10)
    cluster.service.step_times = (StepTime(1, 4, 1, 0.1),)
    cluster.full = True
    fail_on_two(cluster)
    assert (cluster.status["replicas"], cluster.status["failures"]) == (1, 1)
    return cluster


def fail_on_two(cluster: FakeCluster) -> None:
    """Have the program fail on 2 replicas."""
    second = next(name for name, agent in cluster.agents.items() if agent.rank == 1)
    assert cluster.agents[second].state is ReplicaState.RUNNING
    cluster.fail_program(second)
    cluster.run_cycles(20)


def test_a_restarted_operator_does_not_try_a_count_again_on_which_the_program_fails(
    cluster: FakeCluster,
) -> None:
    message = cluster.condition("Rescaling")["message"]
    assert message.startswith("The program failed at once on 2 replicas")
    cluster.start_operator()
    cluster.run_cycles(20)
    status = cluster.status
    assert (status["replicas"], status["failures"], cluster.condition("Rescaling")["message"]) == (
        1,
        1,
        message,
    )


def test_a_restarted_operator_keeps_such_a_count_while_the_job_is_suspended(cluster: FakeCluster) -> None:
    cluster.edit(suspend=True)
    cluster.run_cycles(20)
    cluster.start_operator()
    cluster.run_cycles(5)
    cluster.edit(suspend=False)
    cluster.run_cycles(20)
    assert cluster.status["replicas"] == 1


@pytest.mark.parametrize("restart", [False, True])
def test_a_count_on_which_the_program_failed_may_be_used_by_another_program(
    cluster: FakeCluster, restart: bool
) -> None:
    cluster.edit(template={"spec": {"containers": [cluster.worker(2)]}})
    if restart:
        cluster.start_operator()
    cluster.run_cycles(30)
    status = cluster.status
    assert (status["replicas"], status["failures"], cluster.condition("Rescaling")["message"]) == (2, 1, "")
    assert "failingCount" not in status["attempts"]


def test_a_count_on_which_another_program_fails_too_is_given_up_again(cluster: FakeCluster) -> None:
    cluster.edit(template={"spec": {"containers": [cluster.worker(2)]}}, backoffLimit=2)
    cluster.run_cycles(30)
    fail_on_two(cluster)
    assert (cluster.status["replicas"], cluster.status["failures"]) == (1, 2)
    cluster.start_operator()
    cluster.run_cycles(20)
    assert (cluster.status["replicas"], cluster.status["failures"]) == (1, 2)


def _decide(scheduler: Scheduler, service: JobView, pods: list[Pod] | None = None) -> tuple[int, str]:
    at_two = replace(training_job((2, 2), template=ON_CPU), service=service)
    if pods is not None:
        at_two = replace(at_two, pods=tuple(pods))
    decision = decided(scheduler, at_two)["team.digits"]
    # The Event of a change has the reason of the decision.
    (explained,) = scheduler.explain()
    assert explained.reason.startswith(decision.reason)
    return decision.replicas, decision.reason
