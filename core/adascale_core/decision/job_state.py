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
    """The state of a job.

    Args:
        id: the job id.
        arrival: when the job was created, in any unit. Of jobs of equal priority, the earlier one is admitted
            first.
        bounds: the batch sizes that it allows.
        min_replicas, max_replicas: the bounds of its replica count.
        limit: the largest count that could be scheduled, or that a quota holds; None if there is no limit.
            The smallest valid count is always tried, since no smaller count is valid.
        replicas: its present replica count; 0 if it does not run.
        stable_since: when training on the present count began, in seconds; None while a change is in
            progress.
        largest: the largest count on which it was measured.
        estimate: squared norm and variance of its gradient; None if not measured.
        step_times: its measured step times.
        template_step_times: measured step times of jobs with the same template.
        efficiency: lower bound of the efficiency of its batches.
        remaining: remaining progress; None if unknown.
        later_estimates: what jobs of the same template have estimated of their gradients later: (progress
            from now, estimate), ascending, all before the end.
        restart_seconds: how long a change of the count interrupts training.
        prepare_seconds: how long a change is prepared while training continues.
        accelerator: the type of accelerator to which it is tied; None if it is not tied.
        priority: jobs of higher priority are admitted first, and take replicas from others.
        preempts: whether it takes replicas from running jobs of lower priority. If not, it waits behind
            them.
        limit_reason: what the limit comes from. Empty if that is not known.
        moves: whether its present replicas are on another type of accelerator than `accelerator`.
        move_seconds: how long a move to another type interrupts training; None for `restart_seconds`.
        assumption: where `template_step_times` are from if they were measured on another type, for people.
            Empty if they were not.
        deadline: when the job should be complete, in seconds on the clock of `stable_since`; None if it has
            no deadline, or if that has passed. Of jobs of equal priority, the earlier deadline is admitted
            first.
    """

    id: str
    arrival: float
    bounds: BatchBounds
    min_replicas: int
    max_replicas: int
    replicas: int = 0
    stable_since: float | None = None
    largest: int = 0
    estimate: GradientEstimate | None = None
    step_times: Sequence[StepTime] = ()
    efficiency: EfficiencyBound = DEFAULT_EFFICIENCY
    remaining: float | None = None
    restart_seconds: float = 10.0
    prepare_seconds: float = 0.0
    limit: int | None = None
    template_step_times: Sequence[StepTime] = ()
    accelerator: str | None = None
    priority: int = 0
    preempts: bool = True
    limit_reason: str = ""
    moves: bool = False
    move_seconds: float | None = None
    assumption: str = ""
    deadline: float | None = None
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
