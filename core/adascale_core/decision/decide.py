"""Which job gets how many replicas, decided for all jobs at the same time.

First, the types of accelerators are chosen (`type_choice`). Then, for the jobs of each type:

1. Every job is admitted, by priority, then by deadline, then by arrival, whose smallest valid count fits
   beside those of the admitted jobs before it.
2. Of all valid counts of the admitted jobs, those of the highest total utility (`job_utility`) are chosen
   (`solver`), and on nodes placed (`placing`).

A job changes only for lack of capacity while its last change is in progress or recent, while it is not
measured, and shortly before its end. Every change raises the total utility, so jobs do not alternate between
counts: without new measurements, the same input gives the same decision, and the next one changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf, nextafter
from types import MappingProxyType
from typing import Self

from adascale_core.decision.deadline import Feasibility
from adascale_core.decision.job_utility import JobState, JobUtility, change_allowed_at, utilities_of, weighted
from adascale_core.decision.placing import admitted, allocate_on_nodes, choose_counts
from adascale_core.decision.type_choice import Accelerator, TypeChoice, TypeOptions
from adascale_core.names import DEFAULT_FAIRNESS
from adascale_core.placement.capacity import Capacity, NodeCapacity, ReplicaCapacity
from adascale_core.placement.packing import Demand, Node


@dataclass(frozen=True)
class Decision:
    """The replica count for a job."""

    replicas: int  # the count; 0 if the job does not run
    reason: str
    waiting: bool = False  # whether the job does not run because of insufficient capacity
    # the type of accelerator that it runs on; None if types are not known
    accelerator: Accelerator | None = None
    # whether the job can meet its deadline; None if it has none, or is not measured
    feasibility: Feasibility | None = None


@dataclass(frozen=True)
class DecisionProblem:
    """What a decision is about: jobs that share capacity, with their predictions, and that capacity."""

    queue: Sequence[JobUtility]  # the jobs, in the order of their admission
    bound: Capacity
    valid: Sequence[str]  # the ids of the jobs that have a valid count
    # how many replicas each node holds, if all nodes hold equally many and jobs get whole nodes
    filled_nodes: int | None = None

    @classmethod
    def of(
        cls,
        jobs: Iterable[JobState],
        bound: Capacity,
        before: Sequence[DecisionProblem] = (),
        choice: TypeChoice | None = None,
        *,
        fairness: float | None = None,
    ) -> Self:
        """Return the problem. What is the same as in the problems `before` is not computed again."""
        ordered = sorted(jobs, key=lambda job: job.admission_order)
        valid = [job.id for job in ordered if job.valid_counts]
        sizes: Sequence[int | None] = [None] * len(ordered)
        fills_nodes = False
        if isinstance(bound, NodeCapacity):
            sizes, fills_nodes = bound.node_sizes([job.id for job in ordered], valid)
        known = {utility.job.id: utility for problem in before for utility in problem.queue}
        if choice is not None:
            known |= choice.utilities
        queue = weighted(
            utilities_of(ordered, sizes, fills_nodes=fills_nodes, before=known),
            None if choice is None else choice.weights,
            DEFAULT_FAIRNESS if fairness is None else fairness,
        )
        return cls(queue, bound, valid, sizes[0] if fills_nodes else None)

    @classmethod
    def independent(
        cls,
        jobs: Iterable[JobState],
        bound: Capacity,
        before: Sequence[DecisionProblem] = (),
        choice: TypeChoice | None = None,
        *,
        fairness: float | None = None,
    ) -> list[Self]:
        """Return the problems that can be solved one by one, because their jobs share no node.

        On a cluster with several types of accelerators, these are the jobs of each type, which `choice` has
        chosen.
        """
        by_id = {job.id: job for job in jobs}
        groups = bound.independent(list(by_id))
        return [
            cls.of([by_id[name] for name in group], bound, before, choice, fairness=fairness)
            for group in groups
        ]

    def solve(self, now: float) -> list[int]:
        """Return the count of each job of the queue. `now` is on the clock of `JobState.stable_since`."""
        tables = [utility.utilities(now) for utility in self.queue]
        if isinstance(self.bound, NodeCapacity):
            return allocate_on_nodes(self.queue, tables, self.bound)
        total = self.bound.total_for(self.valid)
        running = admitted(self.queue, total)
        counts = dict(zip(running, choose_counts([tables[i][0] for i in running], total), strict=True))
        return [counts.get(i, 0) for i in range(len(self.queue))]

    def next_change(self, now: float) -> float:
        """Return the first moment after `now` at which time alone may change the decision, or infinity."""
        moments = [change_allowed_at(utility.job) for utility in self.queue]
        outlooks = (utility.deadline_outlook(now) for utility in self.queue)
        # A count that meets a deadline exactly now misses it a moment later.
        soonest = nextafter(now, inf)
        moments += [max(now + outlook.next_change(), soonest) for outlook in outlooks if outlook is not None]
        return min((moment for moment in moments if moment > now), default=inf)

    def decide(self, now: float) -> dict[str, Decision]:
        """Return the replica count of every job, valid for it or 0, such that all fit at the same time."""
        return {
            utility.job.id: Decision(
                count,
                utility.reason(count),
                waiting=count == 0 and bool(utility.counts),
                feasibility=utility.feasibility(now),
            )
            for utility, count in zip(self.queue, self.solve(now), strict=True)
        }


@dataclass(frozen=True)
class TypedDemands:
    """What a job requests of the nodes, and of those of each type that it may run on."""

    any: Demand  # of nodes of any type
    # type -> what it requests there. Empty if it is not tied to a type.
    by_type: Mapping[str, Demand] = field(default_factory=lambda: MappingProxyType({}))
    required: frozenset[str] = frozenset()  # the types on which its pods have to be kept from others
    present: str | None = None  # the type of its replicas. None if it has none, or is not tied to a type.

    @property
    def on_present(self) -> Demand:
        """What it requests of nodes of its present type, if it has one."""
        return self.any if self.present is None else self.by_type[self.present]

    @property
    def apart_from_replicas(self) -> object:
        """What it requests apart from the nodes and the type of its replicas, to be compared."""
        nodes = {name: demand.nodes for name, demand in self.by_type.items()}
        return replace(self.any, placed={}), nodes, self.required

    def accelerator(self, name: str | None) -> Accelerator:
        """Return a type as that of a decision. None if the job is not tied to a type."""
        return Accelerator(name, required=name in self.required)


@dataclass(frozen=True)
class Contender:
    """A job that may run, with what it would be on each type of accelerator."""

    state: JobState  # if it is not tied to a type
    types: TypedDemands = field(default_factory=lambda: TypedDemands(Demand({})))
    states: Mapping[str, JobState] = field(default_factory=lambda: MappingProxyType({}))

    def on(self, accelerator: str | None) -> tuple[JobState, Demand]:
        """Return its state and its demand on a type. None if it is not tied to a type."""
        if accelerator is None:
            return self.state, self.types.any
        return self.states[accelerator], self.types.by_type[accelerator]

    def decided_type(self, decision: Decision | None) -> str | None:
        """Return the type of a decision. None if it has none, or none on which the job may run now."""
        accelerator = decision.accelerator if decision is not None else None
        name = accelerator.type if accelerator is not None else None
        return name if name in self.types.by_type else None

    def decided_state(self, decision: Decision | None) -> JobState:
        """Return its state on the type of a decision, if it may run on that now."""
        return self.on(self.decided_type(decision))[0]

    @property
    def smallest(self) -> int | None:
        """The smallest valid count. None if no count is valid."""
        return next(iter(self.state.valid_counts), None)

    @cached_property
    def options(self) -> TypeOptions:
        """The types on which a count is valid."""
        smallest = {name: state.valid_counts[0] for name, state in self.states.items() if state.valid_counts}
        states = {name: self.states[name] for name in smallest}
        demands = {name: self.types.by_type[name] for name in smallest}
        return TypeOptions(self.state.id, smallest, demands, self.types.present, states)


@dataclass(frozen=True)
class Solution:
    """A decision about all jobs, of which the next one uses what is the same."""

    decisions: Mapping[str, Decision] = field(default_factory=lambda: MappingProxyType({}))
    problems: Sequence[DecisionProblem] = ()
    choice: TypeChoice | None = None  # of the types of accelerators. None if nodes are not known.
    # job id -> what each of its replicas requests
    demands: Mapping[str, Demand] = field(default_factory=lambda: MappingProxyType({}))


def decide(
    jobs: Iterable[Contender],
    nodes: Sequence[Node] | int,
    now: float,
    before: Solution,
    *,
    fairness: float | None = None,
) -> Solution:
    """Return the replica count of each job, on nodes, or, where these are not known, of so many in all.

    Replicas that run have their place there. `now` is on the clock of `JobState.stable_since`, and `fairness`
    is that of `weights_by_size`.
    """
    ordered, choice = sorted(jobs, key=lambda each: each.state.admission_order), None
    if not isinstance(nodes, int):
        options = [each.options for each in ordered]
        choice = TypeChoice.of(options, nodes, now, before.choice, fairness=fairness)
    types = choice.types if choice is not None else {}
    chosen = [each.on(types.get(each.state.id)) for each in ordered]
    demands = {state.id: demand for state, demand in chosen}
    capacity = capacity_of(nodes, demands, before.problems)
    problems = DecisionProblem.independent(
        [state for state, _ in chosen], capacity, before.problems, choice, fairness=fairness
    )
    decisions = {job: each for problem in problems for job, each in problem.decide(now).items()}
    if choice is not None:
        for each in ordered:
            name = each.state.id
            accelerator = each.types.accelerator(types.get(name))
            decisions[name] = replace(decisions[name], accelerator=accelerator)
    return Solution(decisions, problems, choice, demands)


def capacity_of(
    nodes: Sequence[Node] | int, demands: Mapping[str, Demand], known: Iterable[DecisionProblem] = ()
) -> Capacity:
    """Return what the replicas of jobs have to fit into; what `known` problems have is not computed again."""
    if isinstance(nodes, int):
        return ReplicaCapacity(nodes)
    before = (problem.bound for problem in known if isinstance(problem.bound, NodeCapacity))
    return NodeCapacity(nodes, demands, next(before, None))
