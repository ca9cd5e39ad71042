"""Measurements of training, and their reports to the metrics service."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

import torch

from adascale_core.batch.plans import BatchBounds, BatchPlan
from adascale_core.messages.reports import GainReport
from adascale_core.names import REPORT_INTERVAL
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.process.device_clock import DeviceClock
from adascale_worker.program.optimizer_set import Optimizers
from adascale_worker.reporting.logged_metrics import LoggedMetrics
from adascale_worker.reporting.progress import TrainingProgress
from adascale_worker.reporting.reporter import Reporter
from adascale_worker.reporting.step_timer import StepTimer


class Telemetry:
    """Collects logged metrics and step times, and reports them at an interval.

    Args:
        bounds: the job's batch size and bounds.
        group: the replicas; rank 0 reports.
        make_reporter: returns what posts the reports; None if there is no metrics service.
        clock: of the device.
        accelerator: the type of accelerator of the replicas.
        measure_sync: returns the seconds in which a recent step has waited for the exchange of gradients;
            None if there is no new measurement.
    """

    def __init__(
        self,
        bounds: BatchBounds,
        group: ReplicaGroup,
        make_reporter: Callable[[], Reporter | None],
        clock: DeviceClock,
        accelerator: str = "",
        measure_sync: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._bounds = bounds
        self._group = group
        self._make_reporter = make_reporter
        self._reporter: Reporter | None = None
        self._metrics = LoggedMetrics()
        self._reported_at = float("-inf")
        self._reported_step = 0
        self._accelerator = accelerator
        self._clock = clock
        self.step_timer = StepTimer(accelerator, clock)
        self._measure_sync = measure_sync

    def begin_generation(self, bounds: BatchBounds) -> None:
        """Start to report if this replica is rank 0 now, and stop if it is no longer.

        Args:
            bounds: the job's present batch size and bounds.
        """
        self._bounds = bounds
        self.step_timer.pause()
        if self._group.is_main and self._reporter is None:
            self._reporter = self._make_reporter()
        elif not self._group.is_main and self._reporter is not None:
            # In the background: its last reports may wait for the service.
            threading.Thread(target=self._reporter.close, name="adascale-last-reports", daemon=True).start()
            self._reporter = None
            self._metrics.clear()

    def log(self, values: Mapping[str, torch.Tensor | float]) -> None:
        """Keep values of a micro-batch for the next report. Does not synchronize with the device."""
        if self._reporter is not None:
            self._metrics.log(values)

    def step(self, plan: BatchPlan, progress: TrainingProgress, optimizer: Optimizers) -> None:
        """Record the time of a step, and report if the report interval has passed."""
        self.step_timer.step(plan, self._clock.mark(), self._group.nodes)
        asked_for = 0.0 if self._reporter is None else self._reporter.interval
        if time.monotonic() - self._reported_at >= max(REPORT_INTERVAL, asked_for):
            self.report(plan, progress, optimizer)

    def report_last(self, plan: BatchPlan, progress: TrainingProgress, optimizer: Optimizers) -> None:
        """Report the last step, unless it is reported, or no step was made."""
        if progress.step > self._reported_step:
            self.report(plan, progress, optimizer)

    def report(self, plan: BatchPlan, progress: TrainingProgress, optimizer: Optimizers) -> None:
        """Report now."""
        if self._reporter is None:
            return
        self._reported_step = progress.step
        self._reported_at = time.monotonic()
        sync_time = self._measure_sync() if plan.replicas > 1 else None
        if sync_time is not None:
            self.step_timer.add_sync_time(plan, self._group.nodes, sync_time)
        metrics = self._metrics.means()
        self._reporter.report(
            GainReport(
                generation=self._group.generation,
                nodes=self._group.nodes,
                step=progress.step,
                progress=progress.progress,
                epoch=progress.epoch,
                replicas=plan.replicas,
                local_bsz=plan.local_bsz,
                accumulation=plan.accumulation,
                scale=plan.scale(self._bounds),
                gain=optimizer.gain(),
                grad_sqr=optimizer.grad_sqr,
                grad_var=optimizer.grad_var,
                step_time=self.step_timer.lap(),
                time=time.time(),
                loss=metrics.pop("loss", None),
                target=progress.target,
                lr_factor=optimizer.lr_factor,
                sync_time=sync_time,
                metrics=metrics,
                accelerator=self._accelerator,
            )
        )

    def close(self) -> None:
        """Post the outstanding reports, for a limited time, and stop the reporter. May be called again."""
        if self._reporter is not None:
            self._reporter.close()
