"""The state of a job, as far as its replica count depends on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from adascale_core.batch.gain import GradientEstimate
from adascale_core.batch.plans import BatchBounds
from adascale_core.messages.reports import StepTime
from adascale_core.names import DEFAULT_EFFICIENCY_TARGET


@dataclass(frozen=True)
class JobState:
    """The state of a job.

    Args:
        id: the job id.
        arrival: when the job was created, in any unit; jobs are admitted in this order.
        bounds: the batch sizes that it allows.
        min_replicas, max_replicas: the bounds of its replica count.
        limit: the largest count that could be scheduled; None if no count has failed. The smallest valid
            count is always tried, since no smaller count is valid.
        replicas: its present replica count; 0 if it does not run.
        stable_since: when training on the present count began, in seconds; None while a change is in
            progress.
        largest: the largest count on which it was measured.
        estimate: squared norm and variance of its gradient; None if not measured.
        step_times: its measured step times.
        template_step_times: measured step times of jobs with the same template.
        efficiency_target: lower bound of the efficiency while its throughput is unknown.
        remaining: remaining steps at `batch_size`; None if unknown.
        restart_seconds: how long a change of the count interrupts training.
        prepare_seconds: how long a change is prepared while training continues.
        accelerator: the type of accelerator to which it is tied; None if it is not tied.
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
    efficiency_target: float = DEFAULT_EFFICIENCY_TARGET
    remaining: float | None = None
    restart_seconds: float = 10.0
    prepare_seconds: float = 0.0
    limit: int | None = None
    template_step_times: Sequence[StepTime] = ()
    accelerator: str | None = None
