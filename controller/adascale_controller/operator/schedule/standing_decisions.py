"""Which decisions hold until the next one: a decision takes time, in which jobs and nodes may change."""

from __future__ import annotations

from dataclasses import replace

from adascale_core.decision.decide import Decision
from adascale_core.decision.job_utility import JobState
from adascale_core.performance.goodput_table import candidate_counts


def holding(decision: Decision | None, state: JobState) -> Decision | None:
    """Return what holds for a job until the next decision: the last one, or less if it allows less by now.

    A job that runs and was not decided about yet keeps its count. None if it has none either.
    """
    if decision is None:
        return Decision(state.replicas, "unchanged") if state.replicas else None
    counts = candidate_counts(state.bounds, state.min_replicas, state.max_replicas)
    allowed = [count for count in counts if state.limit is None or count <= state.limit] or counts[:1]
    smaller = [count for count in allowed if count < decision.replicas]
    if decision.replicas in allowed or not smaller:
        return decision
    return replace(
        decision, replicas=smaller[-1], reason=f"at most {smaller[-1]} may be used now", waiting=False
    )


def still_applies(state: JobState, decided_on: JobState, decision: Decision) -> bool:
    """Whether a decision about the state `decided_on` holds for `state`: only measurements are new."""
    if state is decided_on:
        return True
    return constraints(state) == constraints(decided_on) and state.replicas in (
        decided_on.replicas,
        decision.replicas,
    )


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
