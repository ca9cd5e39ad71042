"""What a run has seen of its job, as the decision has to know it."""

from __future__ import annotations

from statistics import fmean

from adascale_controller.job import Job
from adascale_controller.service_client import JobView
from adascale_core.decision import JobState
from adascale_core.gain import GradientEstimate
from adascale_core.messages import GainReport

FIRST_GUESS = 1.0
"""Seconds that a change of replicas is taken to cost before one has been measured."""
FIRST_PREPARATION = 5.0
"""Seconds that a change is taken to be prepared before one has been measured."""


class Observation:
    """Follows a job from one view of it to the next.

    Args:
        job: the job.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        """The job as it is by now."""
        self._since = 0
        self._last: GainReport | None = None
        self._downtimes: list[float] = []
        self._preparations: list[float] = []
        self._wanted: tuple[int, float] | None = None
        self._losses = 0
        self.last_downtime: float | None = None
        """Seconds between the last step before the last change of generation, and the first one after it."""
        self._settled: tuple[int, float] | None = None

    def begin(self, generation: int) -> None:
        """Leave aside what was reported in generations before this one, which is a run's first."""
        self._since = generation

    def see(self, view: JobView, now: float) -> GainReport | None:
        """Take in a view of the job, at `now` on a clock that never goes back.

        Returns:
            the first report of a generation, when it is seen.
        """
        if view.desired is not None and (self._wanted is None or self._wanted[0] != view.desired.generation):
            self._wanted = (view.desired.generation, now)
        report = view.latest
        if report is None or report.generation < self._since:
            return None
        before, self._last = self._last, report
        active = view.active.generation if view.active is not None else None
        settled = self._settled[0] if self._settled is not None else None
        if report.generation != active or report.generation == settled:
            return None
        self._settled = (report.generation, now)
        losses, self._losses = self._losses, view.failures + view.disruptions
        self.last_downtime = None if before is None else _downtime(before, report)
        # What a loss costs is no measure of what a change that is meant costs.
        if self.last_downtime is not None and losses == self._losses:
            self._downtimes.append(self.last_downtime)
            if self._wanted is not None and self._wanted[0] == report.generation:
                self._preparations.append(max(now - self._wanted[1] - self.last_downtime, 0.0))
        return report

    def state(self, view: JobView, until: float | None) -> JobState:
        """The job as the decision has to know it.

        Args:
            view: the newest view.
            until: the progress that it is to make, if bounded.
        """
        spec, report = self.job.spec, view.latest
        settled = self._settled is not None and self._settled[0] == view.generation and not view.broken
        return JobState(
            id=self.job.id,
            arrival=0.0,
            bounds=spec.bounds,
            min_replicas=spec.min_replicas,
            max_replicas=spec.max_replicas,
            replicas=view.desired.replicas if view.desired else 0,
            stable_since=self._settled[1] if settled and self._settled else None,
            largest=max((one.replicas for one in view.step_times), default=0),
            estimate=GradientEstimate(report.grad_sqr, report.grad_var) if report else None,
            step_times=view.step_times,
            efficiency_target=spec.efficiency_target,
            remaining=None if until is None else max(until - (report.progress if report else 0.0), 0.0),
            restart_seconds=fmean(self._downtimes) if self._downtimes else FIRST_GUESS,
            prepare_seconds=fmean(self._preparations) if self._preparations else FIRST_PREPARATION,
        )


def _downtime(before: GainReport, after: GainReport) -> float:
    """Seconds from the last step of a generation to the first of the next.

    The first report that is seen may be some steps late; the time that they took is taken off.
    """
    late = max(after.step - before.step - 1, 0) * after.step_time
    return max(after.time - late - before.time, 0.0)
