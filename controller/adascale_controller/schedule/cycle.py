"""One decision about all jobs: the types of accelerators first, then the replica counts on each type.

The operator, `adascale run` and `adascale simulate` make it. It takes time, in which jobs may change, so it
is checked what of it holds until the next one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType

from adascale_core.decision.decide import Decision, DecisionProblem
from adascale_core.decision.explanation import explain
from adascale_core.decision.job_utility import JobState
from adascale_core.decision.type_choice import TypeChoice, TypeOptions
from adascale_core.performance.goodput_table import candidate_counts
from adascale_core.placement.capacity import Capacity, NodeCapacity, ReplicaCapacity
from adascale_core.placement.packing import Demand, Node
from adascale_core.views.decision import DecisionView


@dataclass(frozen=True)
class Contender:
    """A job that may run, with what it would be on each type of accelerator."""

    state: JobState  # if it is not tied to a type
    # what it requests of the nodes, if it is not tied to a type
    demand: Demand = field(default_factory=lambda: Demand({}))
    present: str | None = None  # the type of its replicas. None if it has none, or is not tied to a type.
    states: Mapping[str, JobState] = field(default_factory=lambda: MappingProxyType({}))
    demands: Mapping[str, Demand] = field(default_factory=lambda: MappingProxyType({}))

    def on(self, accelerator: str | None) -> tuple[JobState, Demand]:
        """Return its state and its demand on a type. None if it is not tied to a type."""
        if accelerator is None:
            return self.state, self.demand
        return self.states[accelerator], self.demands[accelerator]

    @property
    def smallest(self) -> int | None:
        """The smallest valid count. None if no count is valid."""
        return _smallest(self.state)

    @cached_property
    def options(self) -> TypeOptions:
        """The types on which a count is valid."""
        found = {name: _smallest(state) for name, state in self.states.items()}
        smallest = {name: count for name, count in found.items() if count is not None}
        states = {name: self.states[name] for name in smallest}
        demands = {name: self.demands[name] for name in smallest}
        return TypeOptions(self.state.id, smallest, demands, self.present, states)


def _smallest(state: JobState) -> int | None:
    counts = candidate_counts(state.bounds, state.min_replicas, state.max_replicas)
    return counts[0] if counts else None


@dataclass(frozen=True)
class Solution:
    """A decision about all jobs, of which the next one uses what is the same."""

    decisions: Mapping[str, Decision] = field(default_factory=lambda: MappingProxyType({}))
    problems: Sequence[DecisionProblem] = ()
    choice: TypeChoice | None = None  # of the types of accelerators. None if nodes are not known.
    # job id -> what each of its replicas requests
    demands: Mapping[str, Demand] = field(default_factory=lambda: MappingProxyType({}))

    def explain(self, jobs: Collection[str], now: float, time: float) -> dict[str, DecisionView]:
        """Return the explanations of the decisions about some jobs, made at `now`, which is `time`."""
        found: dict[str, DecisionView] = {}
        for problem in self.problems if jobs else ():
            found |= explain(problem, now, decisions=self.decisions, time=time, only=jobs, choice=self.choice)
        return found


def decide_all(
    jobs: Iterable[Contender],
    nodes: Sequence[Node] | int,
    now: float,
    before: Solution,
    *,
    fairness: float | None = None,
) -> Solution:
    """Return the replica count of each job, on nodes, or, where these are not known, of so many in all."""
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
    return Solution(decisions, problems, choice, demands)


def capacity_of(
    nodes: Sequence[Node] | int, demands: Mapping[str, Demand], known: Iterable[DecisionProblem] = ()
) -> Capacity:
    """Return what the replicas of jobs have to fit into; what `known` problems have is not computed again."""
    if isinstance(nodes, int):
        return ReplicaCapacity(nodes)
    before = (problem.bound for problem in known if isinstance(problem.bound, NodeCapacity))
    return NodeCapacity(nodes, demands, next(before, None))


# -- which decisions hold until the next one ----------------------------------------------------------------


def holding(decision: Decision | None, state: JobState) -> Decision | None:
    """Return what holds for a job until the next decision: the last one, or less if it allows less by now.

    A job that runs and was not decided about yet keeps its count. None if it has none either.
    """
    if decision is None:
        if not state.replicas:
            return None
        decision = Decision(state.replicas, "unchanged")
    counts = candidate_counts(state.bounds, state.min_replicas, state.max_replicas)
    allowed = [count for count in counts if state.limit is None or count <= state.limit] or counts[:1]
    smaller = [count for count in allowed if count < decision.replicas]
    if decision.replicas in allowed or not smaller:
        return decision
    is_limited = state.limit is not None and decision.replicas > state.limit
    reason = (is_limited and state.limit_reason) or f"at most {smaller[-1]} may be used now"
    return replace(decision, replicas=smaller[-1], reason=reason, waiting=False)


def still_applies(state: JobState, decided_on: JobState, decision: Decision) -> bool:
    """Whether a decision about the state `decided_on` holds for `state`: only measurements are new."""
    counts = decided_on.replicas, decision.replicas
    is_same = state is decided_on or constraints(state) == constraints(decided_on)
    return is_same and state.replicas in counts


def constraints(state: JobState) -> tuple[object, ...]:
    """Return what a decision must respect in a job."""
    return (
        state.bounds,
        state.min_replicas,
        state.max_replicas,
        state.limit,
        state.arrival,
        state.priority,
        state.preempts,
        state.deadline,
    )


def requested(decision: Decision) -> object:
    """Return what a job gets by a decision; the reason matters where it is shown."""
    return decision.replicas or decision.reason, decision.accelerator


def find_growth(
    problems: Iterable[DecisionProblem],
    decisions: Mapping[str, Decision],
    jobs: Collection[str],
    now: float,
) -> dict[str, int]:
    """Return job id -> the next larger count of a job that has a higher utility than the decided one."""
    found = {}
    for utility in (each for problem in problems for each in problem.queue if each.job.id in jobs):
        count = decisions[utility.job.id].replicas
        on_one_node, on_several = utility.utilities(now)
        if count in on_several:
            better = (
                larger
                for larger in on_several
                if larger > count and max(on_one_node[larger], on_several[larger]) > on_several[count]
            )
            following = min(better, default=None)
            if following is not None:
                found[utility.job.id] = following
    return found


# -- which decisions are explained ---------------------------------------------------------------------------

EXPLAIN_INTERVAL = 30.0
"""Seconds after which an unchanged decision is explained again, with newer predictions."""
MAX_EXPLAINED = 8
"""Jobs that are explained at the same time, so that a cycle with many jobs is not delayed."""


class ExplanationSchedule:
    """Which decisions are explained next."""

    def __init__(self) -> None:
        self._explained: dict[str, tuple[Decision, float]] = {}
        self.has_more = False
        """Whether there are more changed decisions than were explained the last time."""

    def due(self, decisions: Mapping[str, Decision], now: float) -> list[str]:
        """Return the jobs to explain now, those with a changed decision first, and drop all other jobs."""
        self._explained = {job: known for job, known in self._explained.items() if job in decisions}
        due: list[tuple[float, str]] = []
        for job, decision in decisions.items():
            known = self._explained.get(job)
            if known is None or known[0] != decision:
                due.append((float("-inf"), job))
            elif now - known[1] >= EXPLAIN_INTERVAL:
                due.append((known[1], job))
        self.has_more = sum(moment == float("-inf") for moment, _ in due) > MAX_EXPLAINED
        jobs = [job for _, job in sorted(due)[:MAX_EXPLAINED]]
        for job in jobs:
            self._explained[job] = decisions[job], now
        return jobs

    def repeat(self, job: str) -> None:
        """Explain the decision about a job again, because it could not be stored."""
        self._explained.pop(job, None)
