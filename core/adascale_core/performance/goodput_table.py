"""The predicted goodput of many replica counts at once: decisions take most of their time here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from adascale_core.batch.gain import GradientEstimate
from adascale_core.batch.plans import (
    DEFAULT_EFFICIENCY,
    TOLERANCE,
    BatchBounds,
    BatchPlan,
    EfficiencyBound,
    Prediction,
    batch_choice,
    candidate_plans,
    valid_replicas,
)
from adascale_core.performance.throughput import Floats, StepTimeModel, overlapped

MAX_PLANS = 32
"""Plans that are considered for a count."""
ALL_COUNTS_TO = 64
"""Larger counts are candidates only in a geometric series, and if they fill nodes."""
COUNT_RATIO = 1.04
MAX_STEP_TIMES = 1024
"""Grids of step times that are kept, up to about 50 kB each. A new estimate does not change them."""


@lru_cache(maxsize=65536)
def candidate_counts(bounds: BatchBounds, smallest: int, largest: int) -> tuple[int, ...]:
    """Return the replica counts that a decision considers, ascending: valid, and within the limits."""
    if largest <= ALL_COUNTS_TO or not bounds.elastic:
        return tuple(count for count in valid_replicas(bounds, largest) if count >= smallest)
    counts = {count for count in valid_replicas(bounds, ALL_COUNTS_TO) if count >= smallest}
    value = float(max(ALL_COUNTS_TO, smallest))
    sizes = {smallest, largest}
    while value < largest:
        sizes.add(int(value))
        value *= COUNT_RATIO
    sizes |= {size - size % 8 for size in sizes}
    counts |= {size for size in sizes if smallest <= size <= largest and batch_choice(bounds, size)}
    return tuple(sorted(counts))


@lru_cache(maxsize=1024)
def smallest_scales(bounds: BatchBounds, counts: tuple[int, ...]) -> tuple[float, ...]:
    """Return the scale of the smallest batch of each of some valid counts."""
    return tuple(batch_choice(bounds, count)[0].scale(bounds) for count in counts)


@dataclass(frozen=True, eq=False)
class PlanGrid:
    """The candidate plans of some replica counts: a row per count, a column per plan."""

    replicas: Floats  # the counts, of shape (counts, 1)
    # local_bsz, accumulation, scale: of the plans; rows are padded with their last plan
    local_bsz: Floats
    accumulation: Floats
    scale: Floats

    @classmethod
    def of(cls, bounds: BatchBounds, counts: tuple[int, ...]) -> PlanGrid:
        """Return the grid of valid counts."""
        rows = [candidate_plans(bounds, count, MAX_PLANS) for count in counts]
        width = max(map(len, rows), default=1)
        padded = [row + [row[-1]] * (width - len(row)) for row in rows]
        numbers = [
            [(each.local_bsz, each.accumulation, each.scale(bounds)) for each in row] for row in padded
        ]
        local_bsz, accumulation, scale = np.array(numbers).reshape(len(counts), width, 3).transpose(2, 0, 1)
        return cls(np.array(counts, dtype=np.float64).reshape(-1, 1), local_bsz, accumulation, scale)


# Many jobs have the same bounds and counts. A grid takes 50 kB at most, and a table keeps its own.
_grid = lru_cache(maxsize=4096)(PlanGrid.of)


@dataclass(frozen=True, eq=False)
class Goodputs:
    """The goodput of each of some replica counts, with the plan that reaches it."""

    counts: tuple[int, ...]  # ascending
    # one_node, several_nodes: steps at `batch_size` per second, where the replicas share a node or not
    one_node: Floats
    several_nodes: Floats
    columns: tuple[Any, Any]  # the column in `grid` of the best plan, on one node and on several
    gains: tuple[Floats, Floats]  # the gain of the best plan, on one node and on several
    grid: PlanGrid

    @cached_property
    def throughputs(self) -> tuple[Floats, Floats]:
        """Samples per second over `batch_size`, with the same plans, on one node and on several."""
        rows = np.arange(len(self.counts))
        one, several = (self.grid.scale[rows, columns] for columns in self.columns)
        return self.one_node * one / self.gains[0], self.several_nodes * several / self.gains[1]

    def plan(self, index: int, *, on_one_node: bool) -> BatchPlan:
        """Return the best plan of the count at an index."""
        at = index, self.columns[0 if on_one_node else 1][index]
        return BatchPlan(self.counts[index], int(self.grid.local_bsz[at]), int(self.grid.accumulation[at]))

    def prediction(self, index: int, estimate: GradientEstimate, *, on_one_node: bool = True) -> Prediction:
        """Return the prediction for the count at an index, by the estimate that is not cautious."""
        plan = self.plan(index, on_one_node=on_one_node)
        column = int(self.columns[0 if on_one_node else 1][index])
        scale = float(self.grid.scale[index, column])
        between = estimate.gain_range(scale)
        goodput = float((self.one_node if on_one_node else self.several_nodes)[index])
        return Prediction(plan, scale, estimate.gain(scale), between[0] / goodput, between)


def predict(
    bounds: BatchBounds,
    counts: Sequence[int],
    estimate: GradientEstimate,
    model: StepTimeModel,
    efficiency: EfficiencyBound = DEFAULT_EFFICIENCY,
) -> list[Prediction]:
    """Return the prediction for each of some valid counts, on one node."""
    least = efficiency.least_at_goodput
    table = goodputs(bounds, tuple(counts), estimate.cautious, model, least_efficiency=least)
    return [table.prediction(index, estimate) for index in range(len(counts))]


def goodputs(
    bounds: BatchBounds,
    counts: tuple[int, ...],
    estimate: GradientEstimate,
    model: StepTimeModel,
    *,
    least_efficiency: float = 0.0,
) -> Goodputs:
    """Return the goodput of each count, with the plan that a trainer would choose (see `plan_batch`).

    The smallest plan of a count is allowed at any efficiency.
    """
    grid = _grid(bounds, counts)
    sqr, var = max(estimate.grad_sqr, 0.0), max(estimate.grad_var, 0.0)
    largest = max(sqr, var)
    if largest == 0.0:
        gain = np.ones_like(grid.scale)
    else:
        sqr, var = sqr / largest, var / largest
        gain = (var + sqr) / (var / grid.scale + sqr)
        # Rounding may exceed the bounds by the last bit.
        gain = np.clip(gain, np.minimum(grid.scale, 1.0), np.maximum(grid.scale, 1.0))
    one, several = (gain / step_times for step_times in _step_times(grid, model))
    if least_efficiency:
        refused = gain / grid.scale < least_efficiency * (1 - TOLERANCE)
        refused[:, 0] = False
        one, several = (np.where(refused, 0.0, each) for each in (one, several))
    columns = one.argmax(axis=1), several.argmax(axis=1)
    best, best_of_several = ((np.arange(len(counts)), each) for each in columns)
    gains = gain[best], gain[best_of_several]
    return Goodputs(counts, one[best], several[best_of_several], columns, gains, grid)


@lru_cache(maxsize=MAX_STEP_TIMES)
def _step_times(grid: PlanGrid, model: StepTimeModel) -> tuple[Floats, Floats]:
    """Return the seconds of a step of each plan, on one node and on several."""
    compute = model.fixed + model.per_sample * grid.local_bsz
    before = (grid.accumulation - 1) * compute
    sync = []
    for nodes in (1, 2):
        first, second = model.sync_time(2, nodes), model.sync_time(3, nodes)
        several = first + (second - first) * (grid.replicas - 2)
        sync.append(np.where(grid.replicas > 1, several, 0.0))
    one, several = (before + overlapped(compute, each, model.overlap) for each in sync)
    return one, several
