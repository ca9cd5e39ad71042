"""What is true of a training program in a simulation: its step times, gradient statistics and length.

`RecordedApplication` uses what a job of a real cluster reported. `bench/published_workloads.py` has the
applications of published simulations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Protocol

from adascale_core.batch.gain import GradientEstimate
from adascale_core.batch.plans import BatchBounds, BatchPlan
from adascale_core.performance.throughput import StepTimeModel

Placement = tuple[int, ...]
"""The number of replicas on each node that has any."""

ROUNDING = 1e-8
"""Subtracted from a quotient before it is rounded up."""


class Application(Protocol):
    """What is true of a training program."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def bounds(self) -> BatchBounds:
        """The batch sizes that it allows."""

    @property
    def min_replicas(self) -> int:
        """The fewest replicas on which it runs."""

    @property
    def max_replicas(self) -> int | None:
        """The most replicas that it can use; None if the batch bounds decide."""

    @property
    def pinned_batch_size(self) -> int | None:
        """The only global batch size that it uses; None if it is elastic."""

    @property
    def epoch_ends(self) -> Sequence[float]:
        """The progress at the end of each epoch, in steps at `batch_size`."""

    def step_time(self, placement: Placement, local_bsz: int) -> tuple[float, float]:
        """Return the seconds of a step without accumulation, and the seconds of it that are communication."""

    def estimate(self, global_bsz: int, epoch: int) -> GradientEstimate:
        """Return squared norm and variance of the gradient in an epoch (from 0) at a batch size."""


@dataclass(frozen=True)
class RecordedApplication:
    """An application as a job of a real cluster reported it."""

    name: str
    bounds: BatchBounds  # the batch sizes that it allows
    model: StepTimeModel  # fitted to the step times that it reported
    progress: Sequence[float]  # the progress of each report, ascending
    estimates: Sequence[GradientEstimate]
    total: float  # the progress at which it ends
    max_replicas: int | None = None  # the most replicas that it can use
    pinned_batch_size: int | None = None  # the only global batch size that it uses; None if it is elastic
    min_replicas: int = 1  # the fewest replicas on which it runs

    @property
    def least_seconds(self) -> float:
        """The seconds without communication and noise, on the most replicas with the largest local batch."""
        bounds = self.bounds
        sizes = [size for size in (bounds.upper, bounds.max_batch_size) if size is not None]
        local_bsz = min(sizes) if bounds.elastic else bounds.batch_size
        samples_per_second = (self.max_replicas or 1) * local_bsz / self.model.compute_time(local_bsz)
        return self.total * bounds.batch_size / samples_per_second

    @property
    def epoch_ends(self) -> Sequence[float]:
        """The progress at which the statistics change: that of each report, and the end."""
        inner = [progress for progress in self.progress[1:] if progress < self.total]
        return [*inner, self.total]

    def step_time(self, placement: Placement, local_bsz: int) -> tuple[float, float]:
        """Return the seconds of a step without accumulation, and the seconds of it that are communication."""
        compute = self.model.compute_time(local_bsz)
        total = self.model.step_time(BatchPlan(sum(placement), local_bsz), len(placement))
        return total, max(total - compute, 0.0)

    def estimate(self, global_bsz: int, epoch: int) -> GradientEstimate:
        """Return squared norm and variance of the gradient at a report."""
        del global_bsz
        return self.estimates[min(epoch, len(self.estimates) - 1)]


def shape(nodes: Sequence[int]) -> Placement:
    """Return the placement of replicas on nodes, in the order of the first replica of each node."""
    return tuple(Counter(nodes).values())


def fixed_plan(application: Application, replicas: int, batch_size: int) -> BatchPlan:
    """Return the plan of a fixed batch size: the fewest micro-batches, rounded up (Qiao et al. 2021).

    A single replica with more than the initial batch size has two micro-batches at least, as their gradients
    are compared to measure the noise.
    """
    bounds = application.bounds
    upper = bounds.upper or batch_size
    share = ceil(batch_size / replicas - ROUNDING)
    accumulation = ceil(share / upper - ROUNDING)
    if replicas == 1 and batch_size > bounds.batch_size:
        accumulation = max(accumulation, 2)
    local_bsz = ceil(share / accumulation - ROUNDING)
    most = (bounds.max_batch_size or batch_size) // (replicas * accumulation)
    return BatchPlan(replicas, min(local_bsz, most), accumulation)
