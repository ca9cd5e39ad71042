"""Properties of decisions, over drawn jobs, capacities and nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, log2
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adascale_core.decision.decide import Decision, DecisionProblem
from adascale_core.decision.job_utility import (
    MAX_GROWTH,
    MIN_CHANGE,
    MIN_SPEEDUP,
    JobState,
    JobUtility,
    stabilization_seconds,
    weighted,
)
from adascale_core.placement.capacity import Capacity, NodeCapacity, ReplicaCapacity
from adascale_core.placement.packing import Demand, Node
from support.examples import examples
from support.job_states import (
    GPU,
    NOISY,
    NOW,
    Demands,
    allowed,
    capacities,
    counts,
    decide,
    gpus,
    job,
    job_states,
    on,
    placed,
    several_jobs,
    unmeasured,
)

# -- any capacity ---------------------------------------------------------------------------------------

requests = st.builds(
    Demand,
    request=st.fixed_dictionaries({GPU: st.integers(0, 3)}, optional={"cpu": st.integers(1, 3)}),
    nodes=st.none() | st.frozensets(st.sampled_from("mno"), min_size=1),
    one_node=st.booleans(),
)
clusters = st.tuples(
    *(
        st.builds(
            lambda gpu, cpu, pods, name=name: Node(name, {GPU: gpu, "cpu": cpu, "pods": pods}),
            st.integers(0, 8),
            st.integers(0, 16),
            st.integers(0, 12),
        )
        for name in "mno"
    )
)


@dataclass(frozen=True)
class Problem:
    """Jobs, and their capacity: a number of replicas, or nodes and what each job demands of them."""

    jobs: Sequence[JobState]
    room: int | Sequence[Node]
    demands: Demands

    @property
    def capacity(self) -> Capacity:
        if isinstance(self.room, int):
            return ReplicaCapacity(self.room)
        return NodeCapacity(self.room, self.demands)

    def applied(self, decided: Mapping[str, int], stable_since: float | None) -> Problem:
        """Return the problem once a decision is applied; `stable_since` is that of resized jobs."""
        jobs = [
            state
            if state.replicas == decided[state.id]
            else replace(state, replicas=decided[state.id], stable_since=stable_since)
            for state in self.jobs
        ]
        if isinstance(self.room, int):
            return replace(self, jobs=jobs)
        packing = NodeCapacity(self.room, self.demands).pack(decided)
        assert packing is not None
        demands = {
            name: replace(demand, placed=packing.placements.get(name, {}))
            for name, demand in self.demands.items()
        }
        return Problem(jobs, self.room, demands)


@st.composite
def problems_on_nodes(draw: st.DrawFn) -> Problem:
    jobs, nodes = draw(several_jobs), draw(clusters)
    demands = {state.id: draw(requests) for state in jobs}
    if draw(st.booleans()):
        demands = placed(nodes, demands, {state.id: state.replicas for state in jobs})
    return Problem(jobs, nodes, demands)


on_nodes = problems_on_nodes()
problems = on_nodes | st.builds(Problem, several_jobs, capacities, st.just({}))


@given(problems, st.randoms())
def test_every_count_is_valid_or_0_and_all_fit_in_any_order_of_jobs_and_nodes(
    problem: Problem, random: Random
) -> None:
    jobs, room = list(problem.jobs), problem.room
    decided = decide(jobs, problem.capacity, NOW)
    replicas = {name: decision.replicas for name, decision in decided.items()}
    assert set(replicas) == {state.id for state in jobs}
    assert problem.capacity.fits(replicas)
    for state in jobs:
        assert replicas[state.id] == 0 or replicas[state.id] in allowed(state)
    random.shuffle(jobs)
    if not isinstance(room, int):
        room = random.sample(room, len(room))
    shuffled = replace(problem, jobs=jobs, room=room)
    assert decide(jobs, shuffled.capacity, NOW) == decided


@given(problems, st.just(0.0) | st.floats(0, 1))
def test_a_decision_is_unchanged_once_it_is_applied(problem: Problem, fairness: float) -> None:
    """Before the replicas are placed, and afterwards."""

    def decided(jobs: Sequence[JobState], capacity: Capacity) -> dict[str, int]:
        found = decide(jobs, capacity, NOW, fairness=fairness)
        return {name: decision.replicas for name, decision in found.items()}

    first = decided(problem.jobs, problem.capacity)
    for stable_since in (None, NOW):
        after = problem.applied(first, stable_since)
        assert decided(after.jobs, problem.capacity) == first
        again = decided(after.jobs, after.capacity)
        # A stopped job has no placed replicas any more, so it may fit on other nodes.
        is_moved = not isinstance(problem.room, int) and any(
            again[name] and not first[name] for name in first
        )
        assert again == first or is_moved


@given(problems)
def test_repeated_decisions_converge(problem: Problem) -> None:
    """Every change increases the total utility, so no decision repeats."""
    decisions: list[dict[str, int]] = []
    for _ in range(40):
        decided = counts(problem.jobs, problem.capacity)
        if decided == {state.id: state.replicas for state in problem.jobs}:
            return
        assert decided not in decisions[1:]
        decisions.append(decided)
        applied = problem.applied(decided, -inf)
        problem = replace(applied, jobs=[replace(state, stable_since=-inf) for state in applied.jobs])
    pytest.fail(f"the decisions do not converge: {decisions[-3:]}")


@given(problems)
def test_a_later_job_never_stops_an_earlier_one(problem: Problem) -> None:
    ordered = sorted(problem.jobs, key=lambda state: state.admission_order)
    running = {name for name, count in counts(ordered, problem.capacity).items() if count}
    for i in range(len(ordered)):
        assert {name for name, count in counts(ordered[:i], problem.capacity).items() if count} == running & {
            state.id for state in ordered[:i]
        }


# -- a number of replicas -------------------------------------------------------------------------------


@given(several_jobs, capacities)
def test_no_job_waits_because_of_a_later_job(jobs: Sequence[JobState], capacity: int) -> None:
    decided = counts(jobs, capacity)
    free = capacity
    for state in sorted(jobs, key=lambda state: state.admission_order):
        smallest = min(allowed(state), default=inf)
        if decided[state.id] == 0:
            assert smallest > free
        else:
            free -= int(smallest)


@given(several_jobs, capacities)
def test_no_job_grows_beyond_twice_its_largest_measured_count_or_the_next_valid_count(
    jobs: Sequence[JobState], capacity: int
) -> None:
    decided = counts(jobs, capacity)
    for state in jobs:
        largest = max([state.largest, *(time.replicas for time in state.step_times)])
        following = next((count for count in allowed(state) if count > largest), 0)
        smallest = min(allowed(state), default=0)
        assert decided[state.id] <= max(MAX_GROWTH * largest, following, smallest, state.replicas)


@given(several_jobs, capacities)
def test_unmeasured_and_recently_changed_jobs_keep_their_count_if_capacity_allows(
    jobs: Sequence[JobState], capacity: int
) -> None:
    decided = counts(jobs, capacity)
    admitted = [state for state in jobs if decided[state.id]]
    fixed = [
        state
        for state in admitted
        if state.replicas in allowed(state)
        and (
            state.stable_since is None
            or NOW - state.stable_since < stabilization_seconds(state.restart_seconds)
            or state.estimate is None
            or not state.step_times
        )
    ]
    needed = sum(state.replicas if state in fixed else allowed(state)[0] for state in admitted)
    if needed <= capacity:
        assert all(decided[state.id] == state.replicas for state in fixed)


@given(several_jobs, capacities)
def test_a_job_that_fits_alone_runs_at_the_latest_when_all_earlier_jobs_are_complete(
    jobs: Sequence[JobState], capacity: int
) -> None:
    """So it starts within a bounded time, whatever arrives later."""
    ordered = sorted(jobs, key=lambda state: state.admission_order)
    for i, state in enumerate(ordered):
        if min(allowed(state), default=inf) <= capacity:
            assert counts(ordered[i:], capacity)[state.id] > 0


@given(several_jobs, capacities)
@settings(max_examples=examples(20))
def test_more_capacity_never_lowers_the_count_of_a_job_that_is_alone(
    jobs: Sequence[JobState], capacity: int
) -> None:
    for state in jobs:
        assert counts([state], capacity)[state.id] <= counts([state], capacity + 1)[state.id]


@given(several_jobs, capacities)
@settings(max_examples=examples(20))
def test_more_capacity_never_lowers_the_total_utility_of_the_same_jobs(
    jobs: Sequence[JobState], capacity: int
) -> None:
    found = weighted([JobUtility.of(state) for state in jobs])
    if sum(utility.counts[0] for utility in found if utility.counts) > capacity:
        return
    totals = []
    for size in (capacity, capacity + 1):
        decided = counts(jobs, size)
        totals.append(
            sum(utility.utilities(NOW)[0][decided[utility.job.id]] for utility in found if utility.counts)
        )
    assert totals[0] <= totals[1]


@given(several_jobs, capacities)
@settings(max_examples=examples(20))
def test_with_equal_smallest_counts_more_capacity_never_stops_a_job(
    jobs: Sequence[JobState], capacity: int
) -> None:
    """With unlike ones it may: an earlier job that now fits takes the place of smaller later jobs."""
    smallest = min((allowed(state)[0] for state in jobs if allowed(state)), default=0)
    equal = [state for state in jobs if allowed(state)[:1] == [smallest]]
    running = [
        {job for job, count in counts(equal, size).items() if count} for size in (capacity, capacity + 1)
    ]
    assert running[0] <= running[1]


# -- on nodes ---------------------------------------------------------------------------------------------


@given(several_jobs, st.integers(0, 24), st.integers(1, 2), st.booleans())
def test_on_one_node_equal_replicas_are_allocated_as_with_a_replica_capacity(
    jobs: Sequence[JobState], size: int, request: int, are_placed: bool
) -> None:
    """On several nodes, jobs that do not fit on a node are predicted to be slower."""
    nodes = [gpus("m", size)]
    demands = {state.id: on(request) for state in jobs}
    if are_placed:
        demands = placed(nodes, demands, {state.id: state.replicas for state in jobs})
    number = size // request
    problem = DecisionProblem.of(jobs, ReplicaCapacity(number))
    tables = {each.job.id: each.utilities(NOW)[0] for each in problem.queue}

    def decided(capacity: int | Capacity) -> tuple[dict[str, int], int]:
        """Return the counts, and their total utility: of counts with the same, any may be chosen."""
        found = counts(jobs, capacity)
        return found, sum(tables[name].get(count, 0) for name, count in found.items())

    expected, utility = decided(number)
    for capacity in (NodeCapacity(nodes, demands), ReplicaCapacity(number)):
        found, same = decided(capacity)
        assert {name for name, count in found.items() if count} == {n for n, c in expected.items() if c}
        assert found == expected or same == pytest.approx(utility, abs=len(jobs))


@given(several_jobs, problems)
def test_a_problem_with_predictions_from_the_problem_before_has_the_same_decision(
    earlier: Sequence[JobState], problem: Problem
) -> None:
    jobs, capacity = problem.jobs, problem.capacity
    # Some jobs are as before, some have changed, and some are new.
    before = DecisionProblem.of([*earlier, *jobs[: len(jobs) // 2]], ReplicaCapacity(8))
    again = DecisionProblem.of(jobs, capacity, (before,))
    fresh = DecisionProblem.of(jobs, capacity)
    assert again.decide(NOW) == fresh.decide(NOW)
    for reused, made in zip(again.queue, fresh.queue, strict=True):
        assert (reused.counts, reused.model, reused.weight) == (made.counts, made.model, made.weight)
        if made.counts:
            assert reused.utilities(NOW) == made.utilities(NOW)


@given(several_jobs, capacities, st.data())
def test_a_solved_problem_with_changed_jobs_has_the_decision_of_a_new_one(
    jobs: Sequence[JobState], capacity: int, data: st.DataObject
) -> None:
    solved = DecisionProblem.of(jobs, ReplicaCapacity(capacity))
    assert solved.decide(NOW) == solved.decide(NOW) == decide(jobs, capacity, NOW)
    changed = list(jobs)
    for i in data.draw(st.sets(st.integers(0, len(jobs) - 1)) if jobs else st.just(set[int]())):
        changed[i] = replace(data.draw(job_states(jobs[i].id)), arrival=jobs[i].arrival)
    size = ReplicaCapacity(data.draw(st.sampled_from([capacity, capacity + 1])))
    now = NOW + data.draw(st.sampled_from([0.0, 10.0]))
    assert DecisionProblem.of(changed, size, (solved,)).decide(now) == decide(changed, size, now)


@given(several_jobs, capacities)
def test_a_job_with_enough_capacity_changes_only_for_more_than_the_noise_of_its_goodputs(
    jobs: Sequence[JobState], capacity: int
) -> None:
    for utility in (JobUtility.of(state) for state in jobs):
        before, after = utility.present_count, counts([utility.job], capacity)[utility.job.id]
        if before is not None and before <= capacity and after != before:
            old, new = utility.goodput(before), utility.goodput(after)
            assert old is not None
            assert new is not None
            is_trial = after > max(before, utility.largest_measured)
            least = MIN_SPEEDUP if is_trial else MIN_CHANGE
            assert new / old >= least * MIN_SPEEDUP ** max(log2(after / before), 0.0) * (1 - 1e-6)


@given(on_nodes)
def test_until_the_next_change_time_alone_changes_no_decision(drawn: Problem) -> None:
    problem = DecisionProblem.of(drawn.jobs, drawn.capacity)
    end = min(problem.next_change(NOW), NOW + 10_000)
    assert end > NOW
    for moment in (NOW + 0.5 * (end - NOW), NOW + 0.999 * (end - NOW)):
        assert moment >= end or problem.decide(moment) == problem.decide(NOW)


@pytest.mark.timeout(20)
def test_200_jobs_on_100_nodes_are_decided_within_the_timeout() -> None:
    nodes = [Node(f"{i:02}", {GPU: 8, "cpu": 96_000, "pods": 110}) for i in range(100)]
    jobs = [
        job(f"{i:03}", 4, arrival=i, at_most=16)
        if i % 2
        else unmeasured(f"{i:03}", arrival=i, at_least=1 + i % 3)
        for i in range(200)
    ]
    demands = {
        state.id: Demand({GPU: 1 + i % 4, "cpu": 1000 * (1 + i % 7)}, None, {}, i % 10 == 0)
        for i, state in enumerate(jobs)
    }
    capacity = NodeCapacity(nodes, demands)
    decided = counts(jobs, capacity)
    assert capacity.fits(decided)
    assert sum(count * demands[name].request[GPU] for name, count in decided.items()) > 700


@pytest.mark.timeout(20)
def test_32_jobs_on_256_replicas_are_decided_within_the_timeout() -> None:
    jobs = [job(f"{i:02}", 8, arrival=i, at_most=64, measured=[1, 8, 16]) for i in range(32)]
    decided = decide(jobs, 256, NOW)
    assert sum(decision.replicas for decision in decided.values()) == 256
    assert set(decided.values()) == {Decision(8, "unchanged")}


def test_an_earlier_prediction_does_not_change_a_later_one() -> None:
    """The estimate is uncertain: its gains are the lower ones, also if plans of the state before are used."""
    uncertain = replace(NOISY, grad_sqr_error=5.0)
    after = job("a", 4, estimate=uncertain)
    before = JobUtility.of(replace(after, estimate=NOISY))
    fresh, reused = JobUtility.of(after), JobUtility.of(after, before=before)
    assert [fresh.goodput(count) for count in (1, 4, 8)] == [reused.goodput(count) for count in (1, 4, 8)]
