"""The state of a job, as far as its replica count depends on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from adascale_core.batch.gain import GradientEstimate
from adascale_core.batch.plans import DEFAULT_EFFICIENCY, BatchBounds, EfficiencyBound
from adascale_core.messages.reports import StepTime


@dataclass(frozen=True)
class JobState:
    """The state of a job."""

    id: str
    # when the job was created, in any unit. Of jobs of equal priority, the earlier one is admitted first.
    arrival: float
    bounds: BatchBounds  # the batch sizes that it allows
    # min_replicas, max_replicas: the bounds of its replica count
    min_replicas: int
    max_replicas: int
    replicas: int = 0  # its present replica count; 0 if it does not run
    # when training on the present count began, in seconds; None while a change is in progress
    stable_since: float | None = None
    largest: int = 0  # the largest count on which it was measured
    # squared norm and variance of its gradient; None if not measured
    estimate: GradientEstimate | None = None
    step_times: Sequence[StepTime] = ()
    efficiency: EfficiencyBound = DEFAULT_EFFICIENCY  # lower bound of the efficiency of its batches
    remaining: float | None = None  # remaining progress; None if unknown
    restart_seconds: float = 10.0  # how long a change of the count interrupts training
    prepare_seconds: float = 0.0  # how long a change is prepared while training continues
    # the largest count that could be scheduled, or that a quota holds; None if there is no limit. The
    # smallest valid count is always tried, since no smaller count is valid.
    limit: int | None = None
    template_step_times: Sequence[StepTime] = ()  # measured step times of jobs with the same template
    accelerator: str | None = None  # the type of accelerator to which it is tied; None if it is not tied
    priority: int = 0  # jobs of higher priority are admitted first, and take replicas from others
    # whether it takes replicas from running jobs of lower priority. If not, it waits behind them.
    preempts: bool = True
    limit_reason: str = ""  # what the limit comes from. Empty if that is not known.
    moves: bool = False  # whether its present replicas are on another type of accelerator than `accelerator`
    # how long a move to another type interrupts training; None for `restart_seconds`
    move_seconds: float | None = None
    # where `template_step_times` are from if they were measured on another type, for people. Empty if
    # they were not.
    assumption: str = ""
    # when the job should be complete, in seconds on the clock of `stable_since`; None if it has no
    # deadline, or if that has passed. Of jobs of equal priority, the earlier deadline is admitted first.
    deadline: float | None = None
    # what jobs of the same template have estimated of their gradients later: (progress from now,
    # estimate), ascending, all before the end
    later_estimates: Sequence[tuple[float, GradientEstimate]] = ()

    @property
    def counts_samples(self) -> bool:
        """Whether a step adds its scale to the progress, and not its gain."""
        return self.efficiency.counts_samples

    @property
    def admission_order(self) -> tuple[bool, int, float, float, str]:
        """The key by which jobs are admitted: by priority, then by deadline, then by arrival."""
        waits_behind = not self.preempts and not self.replicas
        deadline = inf if self.deadline is None else self.deadline
        return waits_behind, -self.priority, deadline, self.arrival, self.id
