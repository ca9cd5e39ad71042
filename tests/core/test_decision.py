"""The number of replicas of each job: a table of cases for each rule."""

import re
from collections.abc import Sequence
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given

from adascale_core.batch.gain import GradientEstimate
from adascale_core.batch.plans import (
    DEFAULT_EFFICIENCY,
    BatchBounds,
    EfficiencyBound,
    Prediction,
    candidate_plans,
    plan_batch,
)
from adascale_core.decision.job_utility import (
    HORIZON,
    STABILIZATION_RESTARTS,
    STABILIZATION_SECONDS,
    JobState,
    JobUtility,
)
from adascale_core.performance.goodput_table import MAX_PLANS, predict
from adascale_core.performance.throughput import StepTimeModel
from adascale_core.placement.capacity import NodeCapacity
from adascale_core.placement.packing import Demand, Node
from support.job_states import (
    ANY,
    CLEAR,
    EVEN_SPLIT,
    FIXED,
    GPU,
    NOISY,
    NOW,
    OF_SAMPLES,
    SLOW_SYNC,
    counts,
    decide,
    gpus,
    job,
    job_states,
    on,
    unmeasured,
)


def with_priority(state: JobState, priority: int, *, preempts: bool = True) -> JobState:
    return replace(state, priority=priority, preempts=preempts)


# -- a single job ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "capacity", "decided"),
    [
        # starts on the smallest valid count if it is not measured
        (unmeasured("a"), 8, 1),
        (unmeasured("a", at_least=3), 8, 3),
        # doubles the largest measured count
        (job("a", 1), 8, 2),
        (job("a", 2), 8, 4),
        (job("a", 4), 8, 8),
        (job("a", 8), 8, 8),
        (job("a", 8), 64, 8),
        # does not grow before its current count is measured
        (job("a", 4, measured=[1, 2]), 8, 4),
        # was measured on larger counts earlier
        (job("a", 1, measured=[1, 2, 4]), 8, 8),
        # resumes with measurements: starts on the best count
        (job("a", 0, measured=[1, 2]), 8, 4),
        # grows up to the capacity
        (job("a", 2), 3, 3),
        (job("a", 2), 2, 2),
        # does not grow if it would not be faster
        (job("a", 1, estimate=CLEAR, truth=FIXED), 8, 1),
        (job("a", 1, measured=[1, 2, 3], estimate=CLEAR, truth=SLOW_SYNC), 8, 1),
        # shrinks if fewer replicas are faster
        (job("a", 4, measured=[1, 2, 3, 4], estimate=CLEAR, truth=SLOW_SYNC), 8, 1),
        # does not shrink if fewer replicas are only as fast
        (job("a", 4, estimate=CLEAR, truth=FIXED), 8, 4),
        # keeps its count if it is not measured
        (unmeasured("a", 4), 8, 4),
        (job("a", 4, estimate=None), 8, 4),
        (replace(job("a", 4), step_times=()), 8, 4),
        # unless the capacity is less
        (unmeasured("a", 4), 3, 3),
        (unmeasured("a", 4), 0, 0),
        # only 1, 2, 4 and 8 are valid
        (job("a", 1, bounds=EVEN_SPLIT), 8, 2),
        (job("a", 2, bounds=EVEN_SPLIT), 3, 2),
        (job("a", 8, bounds=EVEN_SPLIT), 7, 4),
        (job("a", 4, bounds=EVEN_SPLIT), 8, 8),
        # grows to the next valid count, also if that is more than twice as large
        (job("a", 1, bounds=BatchBounds(9), at_most=9), 9, 3),
        # its count is no longer valid
        (job("a", 3, bounds=EVEN_SPLIT, measured=[1, 2]), 8, 4),
        (replace(unmeasured("a", 3), bounds=EVEN_SPLIT), 8, 2),
        (replace(unmeasured("a", 1), min_replicas=2), 8, 2),
        (replace(unmeasured("a", 8), max_replicas=4), 8, 4),
        # does not fit, or has no valid count
        (unmeasured("a", at_least=4), 3, 0),
        (replace(unmeasured("a", at_least=3), bounds=EVEN_SPLIT, max_replicas=3), 8, 0),
    ],
)
def test_the_count_of_a_single_job(state: JobState, capacity: int, decided: int) -> None:
    assert counts([state], capacity) == {"a": decided}


@pytest.mark.parametrize(
    ("remaining", "restart", "moves"),
    [
        (None, 10.0, True),  # within the horizon
        (None, HORIZON, False),
        (1e6, 10.0, True),
        (1e6, 1e5, True),
        # 330 s remain, at 0.33 s per step; two replicas are at most twice as fast
        (1000.0, 100.0, True),
        (1000.0, 250.0, False),
        (1000.0, 1000.0, False),
        (10.0, 10.0, False),
        (0.0, 10.0, False),
        (0.0, 0.0, False),
    ],
)
def test_a_job_is_resized_only_if_the_speedup_outweighs_the_restart(
    remaining: float | None, restart: float, moves: bool
) -> None:
    state = job("a", 1, remaining=remaining, restart=restart, stable_for=inf)
    assert counts([state], 8)["a"] == (2 if moves else 1)


@pytest.mark.parametrize(("prepare", "moves"), [(0.0, True), (100.0, True), (250.0, False), (1e6, False)])
def test_a_job_is_resized_only_if_it_pays_off_in_the_time_after_the_preparation(
    prepare: float, moves: bool
) -> None:
    """330 s remain, and a restart takes 50 s."""
    state = job("a", 1, remaining=1000.0, restart=50.0, stable_for=inf)
    assert counts([replace(state, prepare_seconds=prepare)], 8)["a"] == (2 if moves else 1)


@pytest.mark.parametrize(
    ("stable_for", "restart", "moves"),
    [
        (None, 10.0, False),
        (0.0, 10.0, False),
        (STABILIZATION_RESTARTS * 10.0 - 0.1, 10.0, False),
        (STABILIZATION_RESTARTS * 10.0, 10.0, True),
        (STABILIZATION_SECONDS - 0.1, 0.0, False),
        (STABILIZATION_SECONDS, 0.0, True),
    ],
)
def test_a_job_is_not_resized_within_its_stabilization_window(
    stable_for: float | None, restart: float, moves: bool
) -> None:
    state = job("a", 1, stable_for=stable_for, restart=restart)
    assert counts([state], 8)["a"] == (2 if moves else 1)


def test_a_recently_changed_job_shrinks_if_capacity_is_insufficient() -> None:
    assert counts([job("a", 4, stable_for=None)], 3) == {"a": 3}
    resized, stable = job("a", 4, stable_for=None), job("b", 4, arrival=1.0)
    assert counts([resized, stable], 7) == {"a": 4, "b": 3}
    assert counts([resized, stable, unmeasured("c", arrival=2.0)], 8) == {"a": 4, "b": 3, "c": 1}


# -- several jobs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("jobs", "capacity", "decided"),
    [
        # the smallest count for each, by arrival; a later job may fit where an earlier one waits
        ([unmeasured("a"), unmeasured("b", arrival=1)], 2, [1, 1]),
        ([unmeasured("a"), unmeasured("b", arrival=1)], 1, [1, 0]),
        ([unmeasured("a", arrival=1), unmeasured("b")], 1, [0, 1]),
        ([unmeasured("a"), unmeasured("b")], 1, [1, 0]),
        (
            [unmeasured("a"), unmeasured("b", arrival=1, at_least=4), unmeasured("c", arrival=2)],
            4,
            [1, 0, 1],
        ),
        # an earlier job gets its smallest count, also if later jobs run
        ([unmeasured("a", at_least=4), unmeasured("b", 2, arrival=1)], 4, [4, 0]),
        ([unmeasured("a", at_least=2), unmeasured("b", 4, arrival=1)], 4, [2, 2]),
        # a new job gets its smallest count until it is measured
        ([job("a", 8), unmeasured("b", arrival=1)], 8, [7, 1]),
        ([unmeasured("a", 8), unmeasured("b", arrival=1)], 8, [7, 1]),
        ([job("a", 8, bounds=EVEN_SPLIT), unmeasured("b", arrival=1)], 8, [4, 1]),
        # then equal jobs converge to equal counts
        ([job("a", 7), job("b", 1, arrival=1)], 8, [6, 2]),
        ([job("a", 6), job("b", 2, arrival=1)], 8, [4, 4]),
        ([job("a", 4), job("b", 4, arrival=1)], 8, [4, 4]),
        # the job with the higher speedup gets more replicas
        ([job("a", 4, estimate=CLEAR, truth=FIXED), job("b", 4, arrival=1)], 8, [1, 7]),
        (
            [
                job("a", 4, estimate=CLEAR, truth=SLOW_SYNC, measured=[1, 2, 3, 4]),
                job("b", 4, arrival=1),
            ],
            8,
            [1, 7],
        ),
        # less capacity: the smallest count for each first, then equal counts
        ([job("a", 4), job("b", 4, arrival=1)], 4, [2, 2]),
        ([job("a", 4), job("b", 4, arrival=1), unmeasured("c", arrival=2)], 3, [1, 1, 1]),
        ([job("a", 4), job("b", 4, arrival=1)], 1, [1, 0]),
        # unmeasured jobs keep their counts; the others share the rest
        ([unmeasured("a", 4), job("b", 1, arrival=1)], 8, [4, 2]),
        ([unmeasured("a", 4), job("b", 3, arrival=1)], 8, [4, 4]),
        # the earlier of two equal jobs gets the odd replica
        ([job("b", 0, measured=[4], arrival=1), job("a", 0, measured=[4])], 5, [2, 3]),
        ([], 8, []),
        # priority comes before arrival: others shrink, to zero at last
        ([unmeasured("a"), with_priority(unmeasured("b", arrival=1), 5)], 1, [0, 1]),
        ([unmeasured("a", 4), with_priority(unmeasured("b", arrival=1, at_least=2), 5)], 4, [2, 2]),
        (
            [unmeasured("a", 4, at_least=2), with_priority(unmeasured("b", arrival=1, at_least=3), 5)],
            4,
            [0, 3],
        ),
        ([with_priority(unmeasured("a", 4), -1), unmeasured("b", arrival=1, at_least=4)], 4, [0, 4]),
        # without preemption it waits behind jobs that run, and is before those that wait
        (
            [
                unmeasured("a", 3, at_least=3),
                unmeasured("b", at_least=2),
                with_priority(unmeasured("c", arrival=1, at_least=2), 5, preempts=False),
            ],
            4,
            [3, 0, 0],
        ),
    ],
)
def test_the_counts_of_several_jobs(jobs: Sequence[JobState], capacity: int, decided: list[int]) -> None:
    assert counts(jobs, capacity) == dict(zip([state.id for state in jobs], decided, strict=True))


def test_two_jobs_exchange_replicas_only_if_both_restarts_pay_off() -> None:
    """The products 5 x 3 and 4 x 4 differ by less than the cost of two restarts."""
    assert counts([job("a", 5), job("b", 3, arrival=1)], 8) == {"a": 5, "b": 3}


# -- placement limits -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "decided", "reason"),
    [
        (replace(job("a", 2), limit=3), 3, "times the progress"),
        (replace(job("a", 2), limit=2), 2, "unchanged"),
        (replace(job("a", 2, bounds=EVEN_SPLIT), limit=3), 2, "unchanged"),
        (replace(job("a", 4, measured=[2]), limit=2), 2, "4 replicas could not be scheduled"),
        # the smallest valid count is always allowed
        (replace(unmeasured("a", at_least=3), limit=2), 3, "started on 3 replicas"),
        (replace(unmeasured("a"), limit=0), 1, "started on 1 replica"),
        # unless the bounds allow no count
        (replace(unmeasured("a"), max_replicas=0), 0, "minReplicas 1 is greater than maxReplicas 0"),
    ],
)
def test_counts_above_the_limit_are_not_chosen(state: JobState, decided: int, reason: str) -> None:
    decision = decide([state], 8, NOW)["a"]
    assert decision.replicas == decided
    assert reason in decision.reason


M4_N4 = [gpus("m", 4), gpus("n", 4)]


@pytest.mark.parametrize(
    ("jobs", "demands", "nodes", "decided"),
    [
        # a single job
        ([job("a", 4)], [on(1, "mmmm")], M4_N4, [8]),
        ([job("a", 2)], [on(3, "mn")], M4_N4, [2]),
        ([job("a", 1)], [on(3, "m")], [*M4_N4, gpus("o", 4)], [2]),
        ([unmeasured("a")], [on(5)], M4_N4, [0]),
        # a job that needs a single node
        ([job("a", 4)], [on(1, "mmmm", one_node=True)], M4_N4, [4]),
        ([job("a", 2)], [on(1, "mm", one_node=True)], [gpus("m", 3), gpus("n", 8)], [3]),
        ([unmeasured("a", at_least=5)], [on(1, one_node=True)], M4_N4, [0]),
        # a lost node, with and without capacity on other nodes
        ([job("a", 4)], [on(1, "mmxx")], [gpus("m", 2), gpus("n", 2)], [4]),
        ([job("a", 4)], [on(1, "mmxx")], [gpus("m", 2)], [2]),
        ([unmeasured("a", 4)], [on(1, "xxxx", one_node=True)], [gpus("m", 3)], [3]),
        ([unmeasured("a", 4)], [on(1, "xxxx")], [], [0]),
        # placed replicas stay on a node without free capacity
        ([job("a", 4)], [on(1, "mmmm")], [gpus("m", 0)], [4]),
        # a job shrinks on the nodes that a second job needs
        ([job("a", 8), unmeasured("b", arrival=1)], [on(1, "mmmmnnnn"), on(4)], M4_N4, [4, 1]),
        ([unmeasured("a", 8), unmeasured("b", arrival=1)], [on(1, "mmmmnnnn"), on(2)], M4_N4, [6, 1]),
        ([job("a", 8), unmeasured("b", arrival=1)], [on(1, "mmmmnnnn"), on(5)], M4_N4, [8, 0]),
        ([job("a", 8), unmeasured("b", arrival=1)], [on(1, "mnmnmnmn"), on(4)], M4_N4, [1, 1]),
        # a job shrinks only if another job can use its nodes
        (
            [job("a", 4), job("b", 4, arrival=1), unmeasured("c", arrival=2)],
            [on(1, "mmmm"), on(1, "nnnn"), Demand({GPU: 2}, frozenset("m"))],
            M4_N4,
            [2, 4, 1],
        ),
        # counts that are not valid are skipped
        ([job("a", 4, bounds=EVEN_SPLIT), unmeasured("b", arrival=1)], [on(1, "mmmm"), on(2)], M4_N4, [4, 1]),
        (
            [job("a", 4, bounds=EVEN_SPLIT), unmeasured("b", arrival=1)],
            [on(1, "mmmm"), on(2)],
            [*M4_N4, gpus("o", 2)],
            [8, 1],
        ),
        # an earlier job runs first, also if a later job runs already
        ([unmeasured("a"), unmeasured("b", 2, arrival=1)], [on(4), on(2, "mm")], [gpus("m", 4)], [1, 0]),
        ([unmeasured("a", 2), unmeasured("b", arrival=1)], [on(2, "mm"), on(4)], [gpus("m", 4)], [2, 0]),
        # a later job may fit where an earlier one waits
        (
            [unmeasured("a"), unmeasured("b", arrival=1), unmeasured("c", arrival=2)],
            [on(2), on(4), on(1)],
            [gpus("m", 4)],
            [1, 0, 1],
        ),
        ([], [], M4_N4, []),
    ],
)
def test_the_counts_of_jobs_on_nodes(
    jobs: Sequence[JobState], demands: Sequence[Demand], nodes: Sequence[Node], decided: Sequence[int]
) -> None:
    names = [state.id for state in jobs]
    capacity = NodeCapacity(nodes, dict(zip(names, demands, strict=True)))
    assert counts(jobs, capacity) == dict(zip(names, decided, strict=True))


def test_only_a_job_with_a_valid_count_waits_for_capacity() -> None:
    invalid = replace(unmeasured("b"), max_replicas=0)
    jobs = [unmeasured("a", at_least=4), invalid, unmeasured("c")]
    for capacity in (1, NodeCapacity([gpus("m", 2)], {"a": on(1), "b": on(1), "c": on(2)})):
        decided = decide(jobs, capacity, NOW)
        assert {name: decision.waiting for name, decision in decided.items()} == {
            "a": True,
            "b": False,
            "c": False,
        }


# -- reasons --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "capacity", "reason"),
    [
        (unmeasured("a"), 8, "started on 1 replica"),
        (unmeasured("a", at_least=2), 8, "started on 2 replicas"),
        (
            job("a", 1),
            8,
            "predicted gain 1.0 -> 7.9, step time 338 ms -> 1.23 s, 2.2 times the progress per second",
        ),
        (
            job("a", 4),
            2,
            "frees capacity for other jobs: predicted gain 13.1 -> 7.9, step time 1.03 s -> 1.24 s, 0.5",
        ),
        (
            job("a", 4, measured=[1, 2, 3, 4], estimate=CLEAR, truth=SLOW_SYNC),
            8,
            "fewer replicas are faster: predicted gain",
        ),
        (job("a", 8), 8, "unchanged"),
        (unmeasured("a", 4), 8, "unchanged"),
        (unmeasured("a", 4), 3, "frees capacity for other jobs"),
        (unmeasured("a", at_least=4), 3, "Insufficient capacity for 4 replicas"),
        (unmeasured("a", 2), 0, "Insufficient capacity for 1 replica"),
        (
            replace(unmeasured("a", at_least=3), bounds=EVEN_SPLIT, max_replicas=3),
            8,
            "no replica count from 3 to 3 is valid",
        ),
        (replace(unmeasured("a", 3), bounds=EVEN_SPLIT), 8, "3 replicas are no longer valid"),
    ],
)
def test_a_decision_has_a_reason(state: JobState, capacity: int, reason: str) -> None:
    assert reason in decide([state], capacity, NOW)["a"].reason


@pytest.mark.parametrize(
    ("replicas", "efficiency", "count"),
    [
        (1, DEFAULT_EFFICIENCY, 8),
        (1, OF_SAMPLES, 2),  # 4 / (3 + S) is 0.8 at S = 2
        (1, EfficiencyBound(0.5, counts_samples=True), 5),
        (1, EfficiencyBound(0.9, counts_samples=True), 1),
        (4, OF_SAMPLES, 2),
        (4, EfficiencyBound(0.6, counts_samples=True), 4),  # 0.57 is not enough, and not much less
    ],
)
def test_a_job_of_samples_grows_only_to_where_a_batch_is_efficient_enough(
    replicas: int, efficiency: EfficiencyBound, count: int
) -> None:
    """Each replica has 8 samples, so S is the count. A step takes the same time on each."""
    state = job(
        "a",
        replicas,
        bounds=BatchBounds(8, None, (8, 8)),
        measured=range(1, 9),
        truth=FIXED,
        estimate=GradientEstimate(1.0, 3.0),
    )
    decision = decide([replace(state, efficiency=efficiency)], 8, NOW)["a"]
    assert decision.replicas == count
    if count < replicas:
        assert "below efficiencyTarget 0.8" in decision.reason
        changed = replace(state, efficiency=efficiency, stable_since=NOW)
        assert decide([changed], 8, NOW)["a"].replicas == replicas


def test_a_job_of_samples_keeps_the_smallest_count_if_no_batch_is_efficient_enough() -> None:
    state = job("a", 4, bounds=BatchBounds(8, None, (8, 8)), at_least=3, estimate=CLEAR)
    assert decide([replace(state, efficiency=OF_SAMPLES)], 8, NOW)["a"].replicas == 3


@given(job_states("a"))
def test_predictions_are_those_of_the_plan_that_a_trainer_chooses(state: JobState) -> None:
    utility = JobUtility.of(state)
    if utility.table is None or utility.model is None or state.estimate is None:
        return
    for count, goodput in zip(utility.table.counts, utility.table.one_node, strict=True):
        if len(candidate_plans(state.bounds, count)) <= MAX_PLANS:
            plan = plan_batch(
                state.bounds,
                count,
                estimate=state.estimate.cautious,
                throughput=utility.model.throughput,
                efficiency=state.efficiency,
            )
            gain = state.estimate.cautious.gain(plan.scale(state.bounds))
            assert goodput == pytest.approx(gain * utility.model.throughput(plan))


def test_a_prediction_has_an_efficiency_and_a_goodput() -> None:
    model = StepTimeModel.fit(job("a", 2).step_times)
    assert model is not None
    prediction = predict(ANY, [2], NOISY, model)[0]
    assert prediction.scale == prediction.plan.scale(ANY)
    assert prediction.gain == NOISY.gain(prediction.scale)
    assert prediction.efficiency == NOISY.efficiency(prediction.scale)
    assert prediction.goodput == pytest.approx(prediction.gain / prediction.step_time)
    assert Prediction(prediction.plan, 4.0, 3.0, 0.5, (2.0, 4.0)).goodput == 4.0


def test_a_decision_is_made_by_the_lower_gain_and_names_the_range() -> None:
    """With few measured steps the squared gradient may be zero by chance, and the gain as large as S."""
    certain = replace(job("a", 1), estimate=GradientEstimate(0.05, 1.0))
    by_chance = replace(job("a", 1), estimate=GradientEstimate(-0.02, 1.0, grad_sqr_error=0.05))

    decision, same = decide([by_chance], 8, NOW)["a"], decide([certain], 8, NOW)["a"]

    assert decision.replicas == same.replicas == 2
    found = re.search(r"gain 1\.0 -> (\S+) \((\S+) to (\S+)\), .*, (\S+) times", decision.reason)
    expected = re.search(r"gain 1\.0 -> (\S+), .*, (\S+) times", same.reason)
    assert found is not None, decision.reason
    assert expected is not None, same.reason
    assert (found[2], found[4]) == expected.groups()
    assert float(found[1]) == float(found[3]) > float(found[2])
