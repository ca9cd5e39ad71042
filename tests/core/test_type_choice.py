"""The types of accelerators by what they are worth: cases, and what holds for any jobs and nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adascale_core.decision.decide import DecisionProblem, Solution
from adascale_core.decision.explanation import explain
from adascale_core.decision.job_utility import JobState, JobUtility
from adascale_core.decision.placing import choose_counts
from adascale_core.decision.type_choice import TypeChoice, TypeOptions
from adascale_core.messages.reports import StepTime
from adascale_core.performance.throughput import StepTimeModel
from adascale_core.placement.capacity import NodeCapacity
from adascale_core.placement.packing import Demand, Node
from adascale_core.views.decision import LimitKind
from support.job_states import GPU, NOW, job

SIZES = {"a100": 4, "t4": 4}


def cluster(sizes: Mapping[str, int] = SIZES) -> list[Node]:
    """Return a node of each type."""
    return [Node(name, {GPU: size, "pods": 100}) for name, size in sizes.items()]


def options(
    name: str,
    seconds: Mapping[str, float],
    present: str | None = None,
    replicas: int = 1,
    measured: Sequence[int] = (1, 2, 4),
    **fields: object,
) -> TypeOptions:
    """Return a job with the seconds of a sample on each type, on which it was measured.

    It runs on the present type, if there is one.
    """
    states = {}
    for kind, per_sample in seconds.items():
        times = tuple(
            StepTime(count, 64, 1, per_sample * 64 + 0.001 * (count > 1), sync_time=0.001, accelerator=kind)
            for count in measured
        )
        state = job(name, replicas if present else 0, at_most=4, remaining=1e6)
        state = replace(
            state,
            accelerator=kind,
            largest=max(measured, default=0),
            step_times=times,
            moves=present is not None and kind != present,
            **fields,  # type: ignore[arg-type]
        )
        states[kind] = state
    demands = {
        kind: Demand(
            {GPU: 1}, frozenset({kind}), dict.fromkeys(range(replicas), kind) if kind == present else {}
        )
        for kind in seconds
    }
    return TypeOptions(name, dict.fromkeys(seconds, 1), demands, present, states)


def decide(jobs: Sequence[TypeOptions], nodes: Sequence[Node]) -> dict[str, tuple[str, int]]:
    """Return job -> its type and its replica count there."""
    choice = TypeChoice.of(jobs, nodes, NOW)
    states = [each.states[choice.types[each.job]] for each in jobs]
    capacity = NodeCapacity(nodes, {each.job: each.demands[choice.types[each.job]] for each in jobs})
    return {
        name: (choice.types[name], decision.replicas)
        for problem in DecisionProblem.independent(states, capacity, (), choice)
        for name, decision in problem.decide(NOW).items()
    }


FAST = {"a100": 0.01, "t4": 0.04}
EVEN = {"a100": 0.01, "t4": 0.01}


@pytest.mark.parametrize(
    ("jobs", "types"),
    [
        # the fastest type, if it is free
        ([options("a", FAST)], ["a100"]),
        # the job that gains more from the fast type gets it, wherever it arrives in the order
        ([options("a", FAST), options("b", EVEN)], ["a100", "t4"]),
        ([options("a", EVEN), options("b", FAST)], ["t4", "a100"]),
        # a job moves for a type that is faster by more than the move costs
        ([options("a", FAST, "t4")], ["a100"]),
        ([options("a", {"a100": 0.010, "t4": 0.0102}, "t4", 4)], ["t4"]),
        ([options("a", FAST, "t4", move_seconds=1e9)], ["t4"]),
        # and not while its last change is in progress
        ([options("a", FAST, "t4", stable_since=None)], ["t4"]),
        # two jobs swap types, where neither fits beside the other
        ([options("a", FAST, "t4", 4), options("b", EVEN, "a100", 4)], ["a100", "t4"]),
    ],
)
def test_the_type_that_is_worth_most_to_all(jobs: Sequence[TypeOptions], types: Sequence[str]) -> None:
    found = decide(jobs, cluster())
    assert [found[each.job][0] for each in jobs] == types


def test_a_decision_before_does_not_change_the_choice() -> None:
    jobs = [options("a", FAST), options("b", EVEN, "t4", 2)]
    first = TypeChoice.of(jobs, cluster(), NOW)
    again = TypeChoice.of(jobs, cluster(), NOW, first)
    assert again.types == first.types
    assert all(again.known[key].table is utility.table for key, utility in first.known.items())


speeds = st.floats(0.002, 0.05)


@st.composite
def workloads(draw: st.DrawFn) -> tuple[list[Node], list[TypeOptions]]:
    """Draw nodes of two types, and jobs of which some run and fit."""
    sizes = {kind: draw(st.integers(1, 6)) for kind in SIZES}
    free = dict(sizes)
    jobs = []
    for i in range(draw(st.integers(1, 6))):
        seconds = {kind: draw(speeds) for kind in SIZES}
        present = draw(st.none() | st.sampled_from(sorted(SIZES)))
        replicas = draw(st.integers(1, 3))
        if present is not None and free[present] < replicas:
            present = None
        if present is not None:
            free[present] -= replicas
        jobs.append(options(f"job-{i}", seconds, present, replicas))
    return cluster(sizes), jobs


DECISIONS_UNTIL_REST = 3


@given(workloads())
def test_what_holds_for_any_jobs(drawn: tuple[list[Node], list[TypeOptions]]) -> None:
    nodes, jobs = drawn
    sizes = {node.name: node.free[GPU] for node in nodes}
    found = decide(jobs, nodes)
    for kind, size in sizes.items():
        assert sum(count for name, count in found.values() if name == kind) <= size
    for each in jobs:
        if len(jobs) <= sum(sizes.values()):
            assert found[each.job][1], "all jobs run if all fit"
    # Moves and swaps are tried one after another, so a decision may find one that the one before has not.
    for _ in range(DECISIONS_UNTIL_REST):
        before = {name: each for name, each in found.items() if each[1]}
        jobs = [_decided(each, *found[each.job]) for each in jobs]
        found = decide(jobs, nodes)
        if {name: each for name, each in found.items() if each[1]} == before:
            break
    else:
        pytest.fail(
            f"{DECISIONS_UNTIL_REST} decisions after another still change something: {before}, {found}"
        )


def _decided(each: TypeOptions, kind: str, count: int) -> TypeOptions:
    """Return the options of a job after a decision, which it has followed for long."""
    present = kind if count else None
    states = {
        name: replace(state, replicas=count, moves=present is not None and name != present)
        for name, state in each.states.items()
    }
    demands = {
        name: replace(demand, placed=dict.fromkeys(range(count), kind) if name == present else {})
        for name, demand in each.demands.items()
    }
    return replace(each, present=present, states=states, demands=demands)


@given(workloads())
def test_the_choice_is_near_the_best_of_all_choices(drawn: tuple[list[Node], list[TypeOptions]]) -> None:
    """Of all jobs without replicas, so that nothing but the utilities of counts matters."""
    nodes, jobs = drawn
    jobs = [_decided(each, "t4", 0) for each in jobs]
    sizes = {node.name: node.free[GPU] for node in nodes}
    if len(jobs) > min(sizes.values()):
        jobs = jobs[: min(sizes.values())]
    choice = TypeChoice.of(jobs, nodes, NOW)

    def total(types: Mapping[str, str]) -> int:
        value = 0
        for kind, size in sizes.items():
            tables = [_table(choice, name, kind) for name, each in types.items() if each == kind]
            if tables:
                counts = choose_counts(tables, size)
                value += sum(table[count] for table, count in zip(tables, counts, strict=True))
        return value

    names = [each.job for each in jobs]
    best = max(total(dict(zip(names, types, strict=True))) for types in product(SIZES, repeat=len(names)))
    assert total(choice.types) >= best - 0.5e9


def _table(choice: TypeChoice, name: str, kind: str) -> Mapping[int, int]:
    utility: JobUtility = choice.known[name, kind]
    return utility.utilities(NOW)[0]


def test_the_explanation_compares_types() -> None:
    """With where unmeasured step times are from, and what a move costs."""
    jobs = [options("a", FAST, "t4", 4, move_seconds=1e9, assumption="from another type")]
    choice = TypeChoice.of(jobs, cluster(), NOW)
    capacity = NodeCapacity(cluster(), {"a": jobs[0].demands[choice.types["a"]]})
    (problem,) = DecisionProblem.independent([jobs[0].states["t4"]], capacity, (), choice)
    view = explain(Solution(problem.decide(NOW), [problem], choice), NOW, 0.0, ["a"])["a"]
    texts = [limit.reason for limit in view.limits if limit.kind is LimitKind.TYPES]
    assert [text.split(":")[0] for text in texts] == ["on a100", "on t4, which was chosen"]
    assert "steps per second on 1, " in texts[0]
    assert texts[0].endswith("a move interrupts training for 1e+09 s; from another type")
    assert "move" not in texts[1]


def test_the_state_that_is_used_is_that_of_the_type() -> None:
    slow = StepTimeModel(fixed=0.0, per_sample=0.04)
    choice = TypeChoice.of([options("a", FAST)], cluster(), NOW)
    model = choice.known["a", "t4"].model
    assert model is not None
    assert model.compute_time(64) == pytest.approx(slow.compute_time(64), rel=0.05)
    assert isinstance(choice.utilities["a"].job, JobState)
