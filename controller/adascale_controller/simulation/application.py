"""What is true of a training program in a simulation: its step times, gradient statistics and length.

`ProfiledApplication` interpolates a table of measurements, as the simulator of Pollux does (Qiao et al. 2021,
section 5.3). `RecordedApplication` uses what a job of a real cluster reported.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import ceil
from typing import Protocol, TypeVar

from adascale_core.batch.gain import GradientEstimate
from adascale_core.batch.plans import BatchBounds, BatchPlan
from adascale_core.errors import AdaScaleError
from adascale_core.performance.throughput import StepTimeModel

Placement = tuple[int, ...]
"""The number of replicas on each node that has any."""

ROUNDING = 1e-8
"""Subtracted from a quotient before it is rounded up."""


class ProfileError(AdaScaleError):
    """A profile or workload that cannot be simulated."""


@lru_cache(maxsize=4096)
def canonical(placement: Placement) -> Placement:
    """Return the first of the placements that differ only in the node from which they are counted."""
    return min(placement[i:] + placement[:i] for i in range(len(placement)))


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

    def iterations(self, global_bsz: int, epoch: int) -> float:
        """Return the number of steps until the end of an epoch (from 0) at a constant batch size."""


@dataclass(frozen=True)
class ValidationRun:
    """A complete training run at one batch size, one element per epoch."""

    progress: Sequence[float]  # steps at the smallest batch size, summed up to the end of the epoch
    iterations: Sequence[float]  # steps up to the end of the epoch
    # in the epoch, in the units of `GradientEstimate`
    grad_sqr: Sequence[float]
    grad_var: Sequence[float]


StepTimes = Mapping[int, tuple[float, float]]
"""Local batch size -> (seconds of a step, of them seconds of communication)."""


@dataclass(frozen=True)
class ProfiledApplication:
    """An application whose step times and statistics are interpolated linearly between measurements."""

    name: str
    placements: Mapping[Placement, StepTimes]
    # (nodes, replicas) -> step times, for placements on more nodes than `placements` has
    scalability: Mapping[tuple[int, int], StepTimes]
    # global batch size -> the run at this size; the smallest is the `batch_size` of the bounds
    runs: Mapping[int, ValidationRun]
    bounds: BatchBounds  # the batch sizes that it allows
    epoch_ends: Sequence[float]  # the progress at the end of each epoch
    max_replicas: int | None = None  # the most replicas that it can use; None if the bounds decide
    pinned_batch_size: int | None = None  # the only global batch size that it uses; None if it is elastic
    min_replicas: int = 1  # the fewest replicas on which it runs
    slowdown: float = 1.0  # the factor of all step times
    _step_times: dict[tuple[bool, Placement, int], tuple[float, float]] = field(
        default_factory=dict, repr=False, compare=False
    )
    _runs: dict[int, tuple[ValidationRun, ValidationRun, float]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def step_time(self, placement: Placement, local_bsz: int) -> tuple[float, float]:
        """Return the seconds of a step without accumulation, and the seconds of it that are communication."""
        table = self.placements.get(canonical(placement))
        # Placements that were not measured differ only in their numbers of nodes and of replicas.
        key = (len(placement), sum(placement)) if table is None else canonical(placement)
        known = self._step_times.get((table is None, key, local_bsz))
        if known is None:
            known = (
                self._between_placements(placement, local_bsz)
                if table is None
                else self._between_sizes(table, local_bsz)
            )
            known = known[0] * self.slowdown, known[1] * self.slowdown
            self._step_times[table is None, key, local_bsz] = known
        return known

    def _between_sizes(self, table: StepTimes, local_bsz: int) -> tuple[float, float]:
        sizes = sorted(table)
        if not self.bounds.lower <= local_bsz <= (self.bounds.upper or local_bsz):
            raise ProfileError(
                f"application {self.name} allows local batch sizes {self.bounds.lower} to "
                f"{self.bounds.upper}, not {local_bsz}: narrow the bounds of the job"
            )
        if local_bsz > sizes[-1] and len(sizes) > 1:
            # Measured with smaller sizes only, because the global batch was bounded.
            low, high = sizes[-2:]
        else:
            low, high = _neighbours(sizes, min(max(local_bsz, sizes[0]), sizes[-1]))
        return _mix(table[low], table[high], _share(low, high, local_bsz))

    def _between_placements(self, placement: Placement, local_bsz: int) -> tuple[float, float]:
        """Interpolate over nodes, then replicas per node, then the local batch size."""
        grid = self._grid
        node_counts = sorted(grid)
        nodes = min(max(len(placement), node_counts[0]), node_counts[-1])
        low, high = _neighbours(node_counts, nodes)
        density = sum(placement) / len(placement)
        near, far = (self._at_density(grid[count], density, local_bsz) for count in (low, high))
        return _mix(near, far, _share(low, high, nodes))

    def _at_density(
        self, row: Mapping[float, StepTimes], density: float, local_bsz: int
    ) -> tuple[float, float]:
        densities = sorted(row)
        density = min(max(density, densities[0]), densities[-1])
        low, high = _neighbours(densities, density)
        near, far = (self._between_sizes(row[side], local_bsz) for side in (low, high))
        return _mix(near, far, _share(low, high, density))

    @cached_property
    def _grid(self) -> dict[int, dict[float, StepTimes]]:
        """Return nodes -> replicas per node -> step times: means over placements, and `scalability`."""
        grouped: dict[tuple[int, int], list[StepTimes]] = {}
        for placement, table in self.placements.items():
            grouped.setdefault((len(placement), sum(placement)), []).append(table)
        means = {
            shape: {
                size: (
                    _mean([table[size][0] for table in tables]),
                    _mean([table[size][1] for table in tables]),
                )
                for size in tables[0]
            }
            for shape, tables in grouped.items()
        }
        grid: dict[int, dict[float, StepTimes]] = {}
        for (nodes, replicas), table in {**means, **self.scalability}.items():
            grid.setdefault(nodes, {})[replicas / nodes] = table
        return grid

    def estimate(self, global_bsz: int, epoch: int) -> GradientEstimate:
        """Return squared norm and variance of the gradient in an epoch at a batch size."""
        low, high, share = self._runs_around(global_bsz)
        return GradientEstimate(
            low.grad_sqr[epoch] + share * (high.grad_sqr[epoch] - low.grad_sqr[epoch]),
            low.grad_var[epoch] + share * (high.grad_var[epoch] - low.grad_var[epoch]),
        )

    def iterations(self, global_bsz: int, epoch: int) -> float:
        """Return the number of steps until the end of an epoch at a constant batch size."""
        low, high, share = self._runs_around(global_bsz)
        return low.iterations[epoch] + share * (high.iterations[epoch] - low.iterations[epoch])

    def _runs_around(self, global_bsz: int) -> tuple[ValidationRun, ValidationRun, float]:
        if global_bsz not in self._runs:
            sizes = sorted(self.runs)
            size = min(max(global_bsz, sizes[0]), sizes[-1])
            low, high = _neighbours(sizes, size)
            self._runs[global_bsz] = self.runs[low], self.runs[high], _share(low, high, size)
        return self._runs[global_bsz]


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

    def iterations(self, global_bsz: int, epoch: int) -> float:
        """Return the number of steps until the end of an epoch at a constant batch size."""
        steps, before = 0.0, 0.0
        for i, end in enumerate(self.epoch_ends[: epoch + 1]):
            gain = self.estimate(global_bsz, i).gain(global_bsz / self.bounds.batch_size)
            steps, before = steps + (end - before) / gain, end
        return steps


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


_Number = TypeVar("_Number", int, float)


def _neighbours(ascending: Sequence[_Number], value: float) -> tuple[_Number, _Number]:
    """Return the largest element that is at most `value`, and the smallest that is at least `value`."""
    return ascending[bisect_right(ascending, value) - 1], ascending[bisect_left(ascending, value)]


def _share(low: float, high: float, value: float) -> float:
    return (value - low) / (high - low) if high > low else 0.0


def _mix(low: tuple[float, float], high: tuple[float, float], share: float) -> tuple[float, float]:
    return low[0] + share * (high[0] - low[0]), low[1] + share * (high[1] - low[1])


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


def packed(replicas: int, node: int) -> Placement:
    """Return the placement of replicas on as few nodes of a size as hold them."""
    full, rest = divmod(replicas, node)
    return (node,) * full + ((rest,) if rest else ())


def step_seconds(application: Application, placement: Placement, batch_size: int) -> float:
    """Return the true seconds of a step with a batch size."""
    plan = fixed_plan(application, sum(placement), batch_size)
    step, sync = application.step_time(placement, plan.local_bsz)
    return step + (step - sync) * (plan.accumulation - 1)


def training_seconds(application: Application, placement: Placement, batch_size: int) -> float:
    """Return the seconds of all steps with a batch size."""
    steps = application.iterations(batch_size, len(application.epoch_ends) - 1)
    return steps * step_seconds(application, placement, batch_size)
