"""What trainers measure and report: the gain, and step times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from adascale_core.batch.gain import GradientEstimate
from adascale_core.batch.plans import BatchPlan
from adascale_core.messages import Message


@dataclass(frozen=True)
class GainReport(Message):
    """A snapshot of training, posted by rank 0.

    Args:
        generation: the generation in which it was measured.
        step: optimizer steps since the job was created, over all generations.
        progress: sum of gains so far, or with `counts_samples` the samples over `batch_size`; both in steps
            at `batch_size`.
        epoch: the present epoch, from 0.
        replicas: number of replicas (K).
        local_bsz: samples in a micro-batch of one replica (b).
        accumulation: micro-batches of one replica per optimizer step (a).
        scale: S = K*b*a / `batch_size`.
        gain: how many steps at `batch_size` one step is worth, between 1 and S for S >= 1.
        grad_sqr: estimated squared norm of the true gradient; noise can make it negative.
        grad_var: estimated variance of a gradient at `batch_size`; noise can make it negative.
        step_time: mean seconds per optimizer step since the last report; 0 if not measured yet.
        goodput: progress per second, the mean of about the last minute of training without interruptions;
            None if not measured yet.
        time: when the step was made, in seconds since 1970 by the worker's clock.
        loss: mean training loss since the last report, or its last mean; None if the program does not log it.
        target: the progress at which training ends; None if the program decides.
        nodes: the number of nodes on which the replicas ran.
        lr_factor: the factor by which the learning rate is multiplied for this gain; None if not reported.
        lr: the learning rate of the step: that of the first parameter group, times `lr_factor`; None if not
            reported.
        sync_time: seconds of gradient exchange in a step that computation does not hide; None if not measured
            since the last report.
        grad_sqr_error: standard error of `grad_sqr`; 0 if it is not known.
        metrics: other values that the program has logged, by name: the mean of each since the last report, or
            its last mean before.
        gpu_use: the share of the time in which the GPU of rank 0 computed, from 0 to 1; None without a GPU
            that measures it.
        gpu_memory: the share of the memory of that GPU that all its processes use, from 0 to 1; None as
            `gpu_use`.
        slow_replica: the index of the replica for which the others wait in each step; None if no replica is
            slow.
        slow_factor: the time in which that replica computes a step, over that of the others; None if no
            replica is slow.
        accelerator: the type of accelerator of the replicas, as in the `Registration` of rank 0.
        counts_samples: whether a step adds its scale to the progress, and not its gain.
    """

    generation: int
    step: int
    progress: float
    epoch: int
    replicas: int
    local_bsz: int
    accumulation: int
    scale: float
    gain: float
    grad_sqr: float
    grad_var: float
    step_time: float
    time: float
    goodput: float | None = None
    loss: float | None = None
    target: float | None = None
    nodes: int = 1
    lr_factor: float | None = None
    lr: float | None = None
    sync_time: float | None = None
    grad_sqr_error: float = 0.0
    gpu_use: float | None = None
    gpu_memory: float | None = None
    slow_replica: int | None = None
    slow_factor: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    accelerator: str = ""
    counts_samples: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the report's JSON object, without members that metrics services of version 0.1.0 refuse.

        These are left out unless they are set.
        """
        members = super().to_json()
        if not self.counts_samples:
            del members["counts_samples"]
        for name in ("slow_replica", "slow_factor"):
            if members[name] is None:
                del members[name]
        return members

    @property
    def estimate(self) -> GradientEstimate:
        """The estimate of the gradients."""
        return GradientEstimate(self.grad_sqr, self.grad_var, grad_sqr_error=self.grad_sqr_error)

    @property
    def efficiency(self) -> float:
        """gain / scale."""
        return self.gain / self.scale

    @property
    def plan(self) -> BatchPlan:
        """The batch plan with which it was measured."""
        return BatchPlan(self.replicas, self.local_bsz, self.accumulation)

    def seconds_left(self, target: float | None) -> float | None:
        """Return the predicted seconds until a progress is reached; None if it is unknown or not measured."""
        if target is None or not self.goodput:
            return None
        return max(target - self.progress, 0.0) / self.goodput


@dataclass(frozen=True)
class StepTime(Message):
    """The measured step time of a batch plan on a number of nodes.

    Args:
        replicas, local_bsz, accumulation: the batch plan (K, b, a).
        step_time: seconds per optimizer step, the median over the reports.
        reports: the number of reports.
        nodes: the number of nodes on which the replicas ran.
        sync_time: seconds of gradient exchange in `step_time` that computation does not hide; None if not
            measured.
        accelerator: the type of accelerator of the replicas, as in `GainReport`.
        stale: whether it has few reports and more replicas than the job has now, and so many reports came
            later that the plan is worth another try.
    """

    replicas: int
    local_bsz: int
    accumulation: int
    step_time: float
    reports: int = 1
    nodes: int = 1
    sync_time: float | None = None
    accelerator: str = ""
    stale: bool = False

    @property
    def plan(self) -> BatchPlan:
        """The batch plan with which it was measured."""
        return BatchPlan(self.replicas, self.local_bsz, self.accumulation)
