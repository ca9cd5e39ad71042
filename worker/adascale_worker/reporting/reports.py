"""What the program logs and the trainer measures, and how it is reported to the metrics service.

Reports are posted from a background thread, so that no training step waits for the service. While it does
not answer, the newest reports are queued. A report that the service refuses is dropped, and the others of
its request are posted without it.
"""

from __future__ import annotations

import math
import re
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from numbers import Integral, Real

import torch
from torch import Tensor

from adascale_client import Backoff, MetricsServiceClient, ServiceError, ServiceRefusedError
from adascale_core.batch.plans import BatchBounds, BatchPlan
from adascale_core.messages.registration import MAX_INTERVAL, report_interval
from adascale_core.messages.reports import GainReport
from adascale_core.names import MAX_METRICS, METRIC_NAME, REPORT_INTERVAL
from adascale_core.performance.slow_replica import SlowReplica
from adascale_worker.errors import WorkerError
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.process.device import DeviceClock, monitor_of
from adascale_worker.program.parts import Optimizers
from adascale_worker.reporting.progress import Goodput, StepTimer, TrainingProgress
from adascale_worker.reporting.trackers import TrackedRun, Tracker

MAX_QUEUED = 1000
"""Reports that are queued while the service does not answer, and the maximum in one request."""
SHORTEST_POST_INTERVAL = REPORT_INTERVAL
"""Seconds between two requests up to which each report is posted at once."""
INVALID_REPORT = frozenset({400, 413, 422})
"""Statuses that the same reports would get again."""


class Reporter:
    """Posts reports in the background."""

    def __init__(self, client: MetricsServiceClient, job_id: str) -> None:
        self._client = client
        self._job_id = job_id
        self._queue: deque[GainReport] = deque(maxlen=MAX_QUEUED)
        self._changed = threading.Condition()
        self._closing = False
        self.interval = 0.0
        """Seconds between two reports, at least, as the service asks for."""
        self._failing = False
        self._status: int | None = None
        """Of the refusal that was logged last; None if the service did not answer."""
        self._thread = threading.Thread(target=self._run, name="adascale-reporter", daemon=True)
        self._thread.start()

    def report(self, report: GainReport) -> None:
        """Queue a report. Does not wait for the service."""
        with self._changed:
            self._queue.append(report)
            self._changed.notify()

    def close(self, timeout: float = 2.0) -> None:
        """Post the queued reports, and stop the thread. May be called again.

        Reports that are not posted within `timeout` seconds are lost when the process exits.
        """
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout)

    def _run(self) -> None:
        backoff = Backoff()
        requests: list[list[GainReport]] = []
        """The reports of the next requests, the first one last."""
        while True:
            with self._changed:
                if not requests:
                    self._changed.wait_for(lambda: self._queue or self._closing)
                    if not self._queue:
                        return
                    requests.append([*self._queue])
                    self._queue.clear()
            try:
                answer = self._client.post_gain(self._job_id, requests[-1])
            except ServiceError as error:
                status = error.status if isinstance(error, ServiceRefusedError) else None
                if status in INVALID_REPORT:
                    # Find the invalid report by bisection.
                    reports = requests.pop()
                    half = len(reports) // 2
                    if half > 0:
                        requests += [reports[half:], reports[:half]]
                    else:
                        print(f"adascale: {error}; dropping this report", flush=True)
                    continue
                self._log_error(error, status)
                with self._changed:
                    if self._closing:
                        return
                    self._changed.wait(backoff.next())
                continue
            requests.pop()
            if self._failing:
                self._failing = False
                print("adascale: the metrics service answers again", flush=True)
            backoff.reset()
            self._wait_for_next(answer.post_interval)

    def _wait_for_next(self, post_interval: float) -> None:
        """Collect reports for the next request, if the service asks for fewer requests than reports."""
        self.interval = 0.0
        if post_interval > SHORTEST_POST_INTERVAL:
            self.interval = report_interval(post_interval)
            with self._changed:
                self._changed.wait_for(lambda: self._closing, min(post_interval, MAX_INTERVAL))

    def _log_error(self, error: ServiceError, status: int | None) -> None:
        """Log an error once, although its reason may change while a service stops and starts again."""
        if not self._failing or self._status != status:
            self._failing, self._status = True, status
            print(f"adascale: {error}; training continues, reports are queued", flush=True)


class Telemetry:
    """Collects logged metrics and step times, and reports them at an interval."""

    def __init__(
        self,
        group: ReplicaGroup,
        progress: TrainingProgress,
        optimizer: Optimizers,
        make_reporter: Callable[[], Reporter | None],
        accelerator: str = "",
        measure_sync: Callable[[], float | None] = lambda: None,
        tracker: Tracker | None = None,
        run: str | None = None,
    ) -> None:
        self._group = group
        self._progress = progress
        self._optimizer = optimizer
        self._make_reporter = make_reporter
        self._reporter: Reporter | None = None
        self._tracker = tracker
        self._run = run or secrets.token_hex(8)
        """The id of the job's run in the tracker, a part of the state of training."""
        self._is_taken_over = False
        """Whether another replica may have had that run."""
        self._tracked: TrackedRun | None = None
        self._logged: dict[str, list[Tensor]] = {}
        self._means: dict[str, float] = {}
        """The last mean of each metric."""
        self._goodput = Goodput()
        self._reported_at = float("-inf")
        self._reported_step = 0
        self._accelerator = accelerator
        self._clock = DeviceClock(group.device)
        self.step_timer = StepTimer(accelerator, self._clock)
        self._slow: SlowReplica | None = None
        """The replica that is slower than the others, by its index; None if none is."""
        self._measure_sync = measure_sync
        self._gpu = monitor_of(group.device)

    def state_dict(self) -> str:
        """Return the id of the run in the tracker."""
        return self._run

    def load_state_dict(self, run: str) -> None:
        """Continue the run of the job whose state is restored."""
        self._run, self._is_taken_over = run, True

    def begin_generation(self) -> None:
        """Start to report if this replica is rank 0 now, and stop if it is no longer."""
        self._slow = None
        self.step_timer.pause()
        if self._group.is_main:
            if self._reporter is None:
                self._reporter = self._make_reporter()
            if self._tracked is None and self._tracker is not None:
                self._tracked = TrackedRun(self._tracker, self._run, is_taken_over=self._is_taken_over)
            return
        self._is_taken_over = True
        # In the background: its last reports may wait for the service.
        for each in self._receivers():
            threading.Thread(target=each.close, name="adascale-last-reports", daemon=True).start()
        self._reporter = self._tracked = None
        self._logged.clear()
        self._means.clear()

    def _receivers(self) -> list[Reporter | TrackedRun]:
        """Return what gets the reports of this replica; empty unless it is rank 0."""
        return [each for each in (self._reporter, self._tracked) if each is not None]

    def log(self, values: Mapping[str, torch.Tensor | float]) -> None:
        """Keep values of a micro-batch for the next report; of a tensor of any shape, its mean.

        Does not synchronize with the device.
        """
        for name, value in values.items() if self._receivers() else ():
            if isinstance(value, Tensor):
                # A new tensor, also of a single number: the program may change its own.
                mean = value.detach().double().mean()
            else:
                mean = torch.tensor(as_number(value), dtype=torch.float64)
            self._logged.setdefault(name, []).append(mean)

    def _metrics(self) -> dict[str, float]:
        """Return the mean of each metric since the last report, or its last mean if it was not logged since.

        A mean that is not finite is left out.
        """
        for name, values in self._logged.items():
            mean = torch.stack([value.to(values[-1].device) for value in values]).mean().item()
            self._means.pop(name, None)
            if math.isfinite(mean):
                self._means[name] = mean
        self._logged.clear()
        return dict(self._means)

    def step(self, plan: BatchPlan, bounds: BatchBounds, *, is_divided: bool) -> None:
        """Record the time of a step, and report if the report interval has passed."""
        self.step_timer.step(None if is_divided else plan, self._clock.mark(), self._group.nodes)
        asked_for = 0.0 if self._reporter is None else self._reporter.interval
        if time.monotonic() - self._reported_at >= max(REPORT_INTERVAL, asked_for):
            self.report(plan, bounds)

    def compare(self, slow: SlowReplica | None) -> None:
        """Keep for the next reports which rank is slower than the others. On rank 0, print another one."""
        before, self._slow = self._slow, None
        if slow is None:
            return
        self._slow = SlowReplica(self._group.indices[slow.replica], slow.factor)
        if self._group.is_main and (before is None or before.replica != self._slow.replica):
            print(f"adascale: step {self._progress.step}: {self._slow}", flush=True)

    def report_last(self, plan: BatchPlan, bounds: BatchBounds) -> None:
        """Report the last step, unless it is reported, or no step was made."""
        if self._progress.step > self._reported_step:
            self.report(plan, bounds)

    def report(self, plan: BatchPlan, bounds: BatchBounds) -> None:
        """Report now."""
        if not self._receivers():
            return
        progress = self._progress
        self._reported_step = progress.step
        self._reported_at = time.monotonic()
        sync_time = self._measure_sync() if plan.replicas > 1 else None
        if sync_time is not None:
            self.step_timer.add_sync_time(plan, self._group.nodes, sync_time)
        step_time = self.step_timer.lap()
        metrics, adascale = self._metrics(), self._optimizer.slowest
        gpu_use, gpu_memory = self._gpu.read()
        gain = adascale.gain()
        lr_factor = adascale.statistics.rule.lr_factor(gain)
        report = GainReport(
            generation=self._group.generation,
            nodes=self._group.nodes,
            step=progress.step,
            progress=progress.progress,
            epoch=progress.epoch,
            replicas=plan.replicas,
            local_bsz=plan.local_bsz,
            accumulation=plan.accumulation,
            scale=plan.scale(bounds),
            gain=gain,
            grad_sqr=adascale.grad_sqr,
            grad_var=adascale.grad_var,
            grad_sqr_error=adascale.grad_sqr_error,
            step_time=step_time,
            time=time.time(),
            goodput=self._goodput.update(progress.step, progress.progress, step_time),
            loss=metrics.pop("loss", None),
            target=progress.target,
            lr_factor=lr_factor,
            lr=float(adascale.param_groups[0]["lr"]) * lr_factor,
            sync_time=sync_time,
            gpu_use=gpu_use,
            gpu_memory=gpu_memory,
            metrics=metrics,
            accelerator=self._accelerator,
            counts_samples=progress.counts_samples,
            slow_replica=self._slow.replica if self._slow is not None else None,
            slow_factor=self._slow.factor if self._slow is not None else None,
        )
        for each in self._receivers():
            each.report(report)

    def close(self) -> None:
        """Post the outstanding reports, for a limited time, and stop the reporter. May be called again."""
        for each in self._receivers():
            each.close()


def as_number(value: object) -> int | float | None:
    """Return a number of Python or NumPy, or of an array without dimensions; None for others and tensors, and
    for an integer that no float can have."""
    if not isinstance(value, Tensor) and getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, bool):
        return None
    if isinstance(value, Integral):
        return int(value) if abs(int(value)) <= sys.float_info.max else None
    return float(value) if isinstance(value, Real) else None


def require_metrics(values: Mapping[str, object], known: int) -> None:
    """Check what the program logs."""
    if not values:
        raise WorkerError("trainer.log() got no value: call trainer.log(loss=loss, accuracy=accuracy)")
    for name, value in values.items():
        is_tensor = isinstance(value, Tensor) and value.numel() > 0 and not value.is_complex()
        if not is_tensor and as_number(value) is None:
            got = "an empty or complex tensor" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise WorkerError(
                f"trainer.log() got {got} for {name}: pass a number or a tensor of real numbers"
            )
        if not re.fullmatch(METRIC_NAME, name):
            raise WorkerError(
                f"trainer.log() got the name {name!r}: use at most 64 of a-z, A-Z, 0-9 and _, and do "
                "not begin with a digit"
            )
    if known + len(values) > MAX_METRICS:
        raise WorkerError(
            f"trainer.log() got {', '.join(values)} after {known} other metrics, but a job has at most "
            f"{MAX_METRICS}, the loss included: log fewer, or use a logger of your own"
        )


def plain_result(values: Mapping[str, object]) -> dict[str, float | str]:
    """Return the result of training as values for a manifest: a number that is not finite as text."""
    plain: dict[str, float | str] = {}
    for name, value in values.items():
        if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
            value = value.item()
        number = value if isinstance(value, str | bool) else as_number(value)
        if number is None:
            shape = tuple(getattr(value, "shape", ()))
            got = f"a tensor of shape {shape}" if isinstance(value, Tensor) else type(value).__name__
            raise WorkerError(
                f"trainer.report_result() got {got} for {name}: pass a number, a tensor of one number, or a "
                "text"
            )
        is_finite = isinstance(number, str) or math.isfinite(number)
        plain[name] = (int(number) if isinstance(number, bool) else number) if is_finite else str(number)
    return plain
