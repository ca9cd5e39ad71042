"""What is measured of training, and told to the metrics service every so often."""

from __future__ import annotations

import time

import torch

from adascale_core.batch import BatchBounds, BatchPlan
from adascale_core.messages import GainReport
from adascale_core.names import REPORT_INTERVAL
from adascale_worker.adascale import AdaScale
from adascale_worker.reporter import Reporter
from adascale_worker.step_timer import StepTimer
from adascale_worker.training_progress import TrainingProgress


class Telemetry:
    """Gathers losses and times of steps, and makes reports of them.

    Args:
        bounds: of the job's batch.
        generation: the generation that this trainer runs in.
        reporter: posts the reports; none: nobody is told.
    """

    def __init__(self, bounds: BatchBounds, generation: int, reporter: Reporter | None) -> None:
        self._bounds = bounds
        self._generation = generation
        self._reporter = reporter
        self._losses: list[torch.Tensor] = []
        self._reported_at = float("-inf")
        self.step_timer = StepTimer()

    @property
    def generation_is_over(self) -> bool:
        """Whether the service has told that this generation has to be left.

        One that no agent has started (generation 0) has nowhere to go on.
        """
        return self._generation > 0 and self._reporter is not None and self._reporter.generation_is_over

    def log_loss(self, loss: torch.Tensor | float) -> None:
        """Keep the loss of a micro-batch for the next report, without waiting for the device."""
        if self._reporter is not None:
            loss = torch.as_tensor(loss).detach()
            self._losses.append(loss.mean() if loss.dim() else loss)

    def step(self, plan: BatchPlan, position: TrainingProgress, optimizer: AdaScale) -> None:
        """A step was made: measure it, and report if it is time."""
        self.step_timer.step(plan, time.perf_counter())
        if time.monotonic() - self._reported_at >= REPORT_INTERVAL:
            self.report(plan, position, optimizer)

    def report(self, plan: BatchPlan, position: TrainingProgress, optimizer: AdaScale) -> None:
        """Report now."""
        if self._reporter is None:
            return
        self._reported_at = time.monotonic()
        self._reporter.report(
            GainReport(
                generation=self._generation,
                step=position.step,
                progress=position.progress,
                epoch=position.epoch,
                replicas=plan.replicas,
                local_bsz=plan.local_bsz,
                accumulation=plan.accumulation,
                scale=plan.scale(self._bounds),
                gain=optimizer.gain(),
                grad_sqr=optimizer.grad_sqr,
                grad_var=optimizer.grad_var,
                step_time=self.step_timer.lap(),
                time=time.time(),
                loss=self._mean_loss(),
            )
        )

    def close(self) -> None:
        """Post what waits, for a moment, and end."""
        if self._reporter is not None:
            self._reporter.close()

    def _mean_loss(self) -> float | None:
        if not self._losses:
            return None
        mean = torch.stack(self._losses).float().mean().item()
        self._losses.clear()
        return mean if abs(mean) < float("inf") else None
