"""When decisions are explained and stored: at once if they have changed, and at intervals."""

from __future__ import annotations

from collections.abc import Mapping

from adascale_core.decision.decide import Decision

INTERVAL = 30.0
"""Seconds after which an unchanged decision is explained again, with newer predictions."""
MAX_JOBS = 8
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
            elif now - known[1] >= INTERVAL:
                due.append((known[1], job))
        self.has_more = sum(moment == float("-inf") for moment, _ in due) > MAX_JOBS
        jobs = [job for _, job in sorted(due)[:MAX_JOBS]]
        for job in jobs:
            self._explained[job] = decisions[job], now
        return jobs

    def repeat(self, job: str) -> None:
        """Explain the decision about a job again, because it could not be stored."""
        self._explained.pop(job, None)
