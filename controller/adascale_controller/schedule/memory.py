"""What is remembered of a job for the decisions about it, on pods and on processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from adascale_controller.job.failing_counts import FailingCounts
from adascale_controller.job.placement_backoff import PlacementBackoff
from adascale_controller.job.reasons import Reason
from adascale_controller.schedule.measurements import JobMeasurements
from adascale_core.messages.allocation import Allocation
from adascale_core.messages.job_spec import JobSpec
from adascale_core.performance.goodput_table import candidate_counts
from adascale_core.views.jobs import JobView

MAX_REASON = 400
"""Characters of the reason of a limit that are kept: messages of Kubernetes may be longer."""

Limit = tuple[int | None, str]
"""The largest count that a job may have, and why; None for any count."""


def lowest(limits: Iterable[Limit]) -> Limit:
    """Return the lowest of some limits, and the first of equal ones."""
    finite = [(limit, reason) for limit, reason in limits if limit is not None]
    limit, reason = min(finite, key=lambda each: each[0], default=(None, ""))
    return limit, reason[:MAX_REASON]


class JobMemory:
    """What is remembered of a job."""

    def __init__(self) -> None:
        self.measurements = JobMeasurements()
        self.backoff = PlacementBackoff()
        self.failing_counts = FailingCounts()
        self.deadline: float | None = None
        """The deadline of the job on the monotonic clock; None if it has none, or if it has passed."""
        self._due: float | None = None
        """The deadline of which `deadline` was computed."""

    def observe_deadline(self, due: float | None, now: float, monotonic: float) -> None:
        """Record when a job should be complete, on the clock of `now`, which is `monotonic` on the other."""
        if due is not None and due <= now:
            due = None
        if due != self._due:
            # Once, since the clocks differ a little at each reading.
            self.deadline = None if due is None else monotonic + due - now
            self._due = due

    def observe_placement(
        self,
        spec: JobSpec,
        view: JobView,
        current: Allocation,
        placed: int,
        problem: tuple[Reason, str] | None,
        capacity: Callable[[], int],
        now: float,
        *,
        accelerator: str | None = None,
    ) -> None:
        """Record how many ranks of an allocation, counted from 0, can start, and why others can not."""
        bounds = spec.bounds.with_limit(view.local_bsz_limit_on(accelerator))
        self.backoff.update(
            generation=current.generation,
            count=current.replicas,
            training=view.active.replicas if view.active is not None and not view.broken else 0,
            problem=problem,
            placed=placed,
            valid=lambda: candidate_counts(bounds, spec.min_replicas, spec.max_replicas),
            capacity=capacity,
            now=now,
        )

    def limits(self, capacity: Callable[[], int], now: float) -> Iterator[Limit]:
        """Yield the limits below the counts that are given up."""
        failing, failed = self.failing_counts.given_up, self.backoff.failed_placement(now)
        if failing is not None:
            yield failing.limit, str(failing)
        if failed is not None:
            yield self.backoff.limit(capacity, now), str(failed)
