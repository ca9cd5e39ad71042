"""The type of accelerator of each job: a table of cases, and what holds for any jobs and nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adascale_core.decision.decide import DecisionProblem
from adascale_core.decision.type_choice import TypeOptions, admit
from adascale_core.placement.capacity import NodeCapacity
from adascale_core.placement.packing import Demand, Node
from support.job_states import GPU, NOW, decide, job


def nodes_of(name: str, sizes: Sequence[int]) -> list[Node]:
    """Return nodes of one type with these numbers of accelerators."""
    return [Node(f"{name}-{i}", {GPU: size, "pods": 10}) for i, size in enumerate(sizes)]


def options(
    name: str,
    smallest: int | Mapping[str, int],
    nodes: Mapping[str, Sequence[Node]],
    present: str | None = None,
    placed: Sequence[str] = (),
    one_node: bool = False,
) -> TypeOptions:
    """Return the options of a job that may run on these types, of which it is placed on the present one.

    Its smallest count may depend on the type.
    """
    if isinstance(smallest, int):
        smallest = dict.fromkeys(nodes, smallest)
    demands = {
        kind: Demand(
            {GPU: 1},
            frozenset(node.name for node in group),
            dict(enumerate(placed)) if kind == present else {},
            one_node,
        )
        for kind, group in nodes.items()
    }
    return TypeOptions(name, smallest, demands, present)


H200, L4 = nodes_of("h200", [4, 4]), nodes_of("l4", [2, 2, 2])
BOTH = {"H200": H200, "L4": L4}


@pytest.mark.parametrize(
    ("jobs", "chosen"),
    [
        # the largest share; then, with a job there, 8 / 2 and 6 / 1
        ([options("a", 1, BOTH), options("b", 1, BOTH), options("c", 1, BOTH)], ["H200", "L4", "H200"]),
        # the first of equal shares by name
        ([options("a", 1, {"z": H200, "y": L4 + nodes_of("l4-more", [2])})], ["y"]),
        # only where it may run
        ([options("a", 1, {"L4": L4})], ["L4"]),
        # only where the smallest count fits, beside those of the jobs before it
        ([options("a", 7, BOTH), options("b", 2, BOTH), options("c", 6, BOTH)], ["H200", "L4", "H200"]),
        ([options("a", 3, BOTH, one_node=True), options("b", 6, BOTH)], ["H200", "L4"]),
        # waits for the type with the largest share
        ([options("a", 3, BOTH), options("b", 7, BOTH)], ["H200", "L4"]),
        # a smaller job behind one that waits
        ([options("a", 9, BOTH), options("b", 1, BOTH)], ["H200", "H200"]),
        # the smallest count of each type
        ([options("a", {"H200": 9, "L4": 6}, BOTH), options("b", 1, BOTH)], ["L4", "H200"]),
        ([options("a", {"H200": 3, "L4": 1}, {"H200": H200[:1], "L4": L4[:1]}, "L4")], ["L4"]),
        ([options("a", {"H200": 4, "L4": 3}, {"H200": H200[:1], "L4": L4[:1]}, "L4")], ["H200"]),
        # leaves a type on which it has no valid count
        ([options("a", 1, {"H200": H200}, "L4")], ["H200"]),
        # stays, however the shares are
        (
            [options("a", 1, BOTH, "L4", ["l4-0"]), options("b", 1, BOTH, "L4", ["l4-1"])],
            ["L4", "L4"],
        ),
        # a job that runs takes its share from the beginning
        ([options("a", 1, BOTH), options("b", 1, BOTH, "H200", ["h200-0"])], ["L4", "H200"]),
        # leaves a type that has no nodes any more, or that can't hold its smallest count
        ([options("a", 1, {"H200": [], "L4": L4}, "H200")], ["L4"]),
        ([options("a", 3, {"H200": H200[:1], "L4": L4[:1]}, "L4")], ["H200"]),
        # but not if another type can't hold it either, or while its replicas are placed
        ([options("a", 5, {"H200": H200[:1], "L4": L4[:1]}, "L4")], ["L4"]),
        ([options("a", 1, {"H200": [], "L4": L4}, "H200", ["h200-0"])], ["H200"]),
    ],
)
def test_the_type_of_each_job(jobs: list[TypeOptions], chosen: list[str]) -> None:
    found = admit(jobs, [*H200, *L4, *nodes_of("l4-more", [2])])[0]
    assert [found[each.job] for each in jobs] == chosen


sizes = st.lists(st.integers(0, 4), max_size=4)


@st.composite
def clusters(draw: st.DrawFn) -> tuple[dict[str, list[Node]], list[TypeOptions]]:
    """Draw nodes of three types, and jobs, some of which run on a type."""
    cluster = {kind: nodes_of(kind, draw(sizes)) for kind in ("h200", "l4", "t4")}
    jobs = []
    for i in range(draw(st.integers(1, 5))):
        kinds = draw(st.sets(st.sampled_from(sorted(cluster)), min_size=1))
        present = draw(st.none() | st.sampled_from(sorted(kinds)))
        jobs.append(
            options(
                f"job-{i}",
                {kind: draw(st.integers(1, 4)) for kind in sorted(kinds)},
                {kind: cluster[kind] for kind in kinds},
                present,
            )
        )
    return cluster, jobs


@given(clusters())
def test_a_job_gets_a_type_where_it_fits_beside_earlier_jobs(
    drawn: tuple[dict[str, list[Node]], list[TypeOptions]],
) -> None:
    cluster, jobs = drawn
    nodes = [node for group in cluster.values() for node in group]
    chosen = admit(jobs, reversed(nodes))[0]
    assert chosen == admit(jobs, nodes)[0], "it does not depend on the order of the nodes"
    room = {kind: sum(node.free[GPU] for node in group) for kind, group in cluster.items()}
    free = dict(room)
    for each in jobs:
        kind = chosen[each.job]
        assert kind in each.demands
        able = [name for name in each.demands if room[name] >= each.smallest[name]]
        if each.present is not None and (each.present in able or not able):
            assert kind == each.present
        elif any(free[name] >= each.smallest[name] for name in each.demands):
            assert free[kind] >= each.smallest[kind]
        if free[kind] >= each.smallest[kind]:
            free[kind] -= each.smallest[kind]


@given(clusters())
def test_the_jobs_of_each_type_are_decided_separately(
    drawn: tuple[dict[str, list[Node]], list[TypeOptions]],
) -> None:
    cluster, jobs = drawn
    nodes = [node for group in cluster.values() for node in group]
    chosen = admit(jobs, nodes)[0]
    demands = {each.job: each.demands[chosen[each.job]] for each in jobs}
    states = [
        replace(
            job(each.job, measured=[1, 2, 4], remaining=1000.0 * i + 100),
            min_replicas=each.smallest[chosen[each.job]],
        )
        for i, each in enumerate(jobs)
    ]
    together = decide(states, NodeCapacity(nodes, demands), NOW)
    for kind, group in cluster.items():
        own = [state for state in states if chosen[state.id] == kind]
        alone = decide(own, NodeCapacity(group, {state.id: demands[state.id] for state in own}), NOW)
        assert {state.id: together[state.id] for state in own} == alone


def test_jobs_on_separate_nodes_are_separate_problems_unless_a_replica_is_placed_elsewhere() -> None:
    on_h200 = Demand({GPU: 1}, frozenset({"h200-0", "h200-1"}))
    on_l4 = Demand({GPU: 1}, frozenset({"l4-0"}))
    states = [job("a"), job("b"), job("c")]

    def groups(**demands: Demand) -> list[list[str]]:
        problems = DecisionProblem.independent(states, NodeCapacity([*H200, *L4], demands))
        return [[utility.job.id for utility in problem.queue] for problem in problems]

    assert groups(a=on_h200, b=on_l4, c=on_h200) == [["a", "c"], ["b"]]
    assert groups(a=on_h200, b=on_l4, c=Demand({GPU: 2}, frozenset({"h200-1"}))) == [["a", "c"], ["b"]]
    assert groups(a=on_h200, b=replace(on_l4, placed={0: "h200-1"}), c=on_h200) == [["a", "b", "c"]]
    assert groups(a=on_h200, b=on_l4, c=Demand({GPU: 1})) == [["a", "b", "c"]]
    assert groups(a=on_h200, b=on_l4, c=Demand({GPU: 1}, frozenset())) == [["a"], ["b"], ["c"]]
