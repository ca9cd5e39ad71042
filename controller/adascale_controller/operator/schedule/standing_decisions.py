"""The decisions that hold until the next one, within what their jobs allow by now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from adascale_core.decision.decide import Decision
from adascale_core.decision.job_utility import JobState
from adascale_core.performance.goodput_table import candidate_counts


class StandingDecisions:
    """The last decision about each job.

    A decision takes time, in which jobs and nodes may change. So what it says about a job is adopted only if
    it still applies to that job, and until the next one a job shrinks to what its spec allows.
    """

    def __init__(self) -> None:
        self._decisions: dict[str, Decision] = {}

    def discard(self, job_id: str) -> None:
        """Drop the decision about a job."""
        self._decisions.pop(job_id, None)

    def adopt(
        self,
        decided: Mapping[str, Decision],
        decided_on: Mapping[str, JobState],
        present: Mapping[str, JobState],
        *,
        may_grow: bool,
    ) -> tuple[set[str], set[str]]:
        """Use these decisions, and return the jobs with another one than before, and those to decide on."""
        changed, outdated = set(), set()
        for job_id, decision in decided.items():
            state = present.get(job_id)
            if state is None:
                continue
            if not still_applies(state, decided_on[job_id], decision) or (
                decision.replicas > state.replicas and not may_grow
            ):
                outdated.add(job_id)
                continue
            before = self._decisions.get(job_id)
            self._decisions[job_id] = decision
            if before is None or _requested(before) != _requested(decision):
                changed.add(job_id)
        return changed, outdated

    def get(self, job_id: str) -> Decision | None:
        """Return the decision about a job as it was made. None if there is none."""
        return self._decisions.get(job_id)

    def decision(self, state: JobState) -> Decision | None:
        """Return what holds for a job: the last decision, or less if it allows less by now.

        A job that runs and was not decided about yet keeps its count. None if it has none either.
        """
        decision = self._decisions.get(state.id)
        if decision is None:
            if not state.replicas:
                return None
            decision = Decision(state.replicas, "unchanged")
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


def _requested(decision: Decision) -> object:
    """Return what a job gets by a decision; the reason matters where it is shown."""
    return decision.replicas or decision.reason, decision.accelerator
