"""Which decisions hold until the next one, and which of them are explained.

A decision takes time, in which jobs may change, so it is checked what of it holds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from adascale_core.decision.decide import Decision, DecisionProblem
from adascale_core.decision.job_utility import JobState


def holding(decision: Decision | None, state: JobState) -> Decision | None:
    """Return what holds for a job until the next decision: the last one, or less if it allows less by now.

    A job that runs and was not decided about yet keeps its count. None if it has none either.
    """
    if decision is None:
        if not state.replicas:
            return None
        decision = Decision(state.replicas, "unchanged")
    counts = state.valid_counts
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
