"""How long a step takes, fitted to what was measured.

    t(K, b, a) = a * (fixed + per_sample * b) + [K > 1] * (sync + sync_per_replica * (K - 2))

the shape that Pollux uses (Qiao et al., 2021, section 3.2), with compute and communication added up.
What the measurements leave open stays at a guess: half of a step's time is fixed and half grows with the
batch, and communication is free. The guess is optimistic, so that a job tries a count it has not seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Self

from adascale_core.batch import BatchPlan
from adascale_core.messages import StepTime

SHORTEST, LONGEST = 1e-9, 1e9
"""Seconds between which a measured step time is taken for one."""
MIN_COMPUTE = 1e-3
"""A micro-batch takes at least this share of the time of the smallest one measured."""

_RIDGE = (1e-6, 1e-6, 1e-4, 1e-4)
"""How firmly each guess is held; that communication is free more firmly than what compute consists of, so
that measurements of a single count do not make fewer replicas look faster."""
_SINGULAR = 1e-12


@dataclass(frozen=True)
class StepTimeModel:
    """Seconds per optimizer step of any batch plan.

    Args:
        fixed: seconds per micro-batch, whatever its size.
        per_sample: seconds per sample of a micro-batch.
        sync: seconds per step to communicate between two replicas.
        sync_per_replica: seconds per step that each replica beyond the second adds.
        separates_batch_size: whether the measurements cover two local batch sizes, so that `fixed` and
            `per_sample` are both determined.
    """

    fixed: float
    per_sample: float
    sync: float = 0.0
    sync_per_replica: float = 0.0
    separates_batch_size: bool = False

    def step_time(self, plan: BatchPlan) -> float:
        """Predicted seconds per optimizer step."""
        compute = plan.accumulation * (self.fixed + self.per_sample * plan.local_bsz)
        if plan.replicas == 1:
            return compute
        return compute + self.sync + self.sync_per_replica * (plan.replicas - 2)

    def throughput(self, plan: BatchPlan) -> float:
        """Predicted optimizer steps per second."""
        return 1 / self.step_time(plan)

    @classmethod
    def fit(cls, measured: Sequence[StepTime]) -> Self | None:
        """The model of least relative error, all its terms non-negative; none without a measurement.

        Ridge regression towards the guess: four unknowns, few measurements.
        """
        usable = [one for one in measured if SHORTEST <= one.step_time <= LONGEST]
        if not usable:
            return None
        reference = min(
            usable, key=lambda one: (one.replicas, one.local_bsz, one.accumulation, one.step_time)
        )
        micro_batch = reference.step_time / reference.accumulation
        longest = max(one.step_time for one in usable)
        # In these units all four unknowns are of the order of one.
        unit = (micro_batch, micro_batch / reference.local_bsz, longest, longest)
        guess = (0.5, 0.5, 0.0, 0.0)
        rows = [
            [value * u / one.step_time for value, u in zip(_row(one.plan), unit, strict=True)]
            for one in usable
        ]
        solution = _ridge(rows, guess)
        fixed, per_sample, sync, sync_per_replica = (x * u for x, u in zip(solution, unit, strict=True))
        if fixed + per_sample * reference.local_bsz < MIN_COMPUTE * micro_batch:
            fixed = MIN_COMPUTE * micro_batch
        separates = len({one.local_bsz for one in usable}) > 1
        return cls(fixed, per_sample, sync, sync_per_replica, separates)


def _row(plan: BatchPlan) -> tuple[float, float, float, float]:
    several = plan.replicas > 1
    return (
        plan.accumulation,
        plan.accumulation * plan.local_bsz,
        float(several),
        float(plan.replicas - 2) if several else 0.0,
    )


def _ridge(rows: Sequence[Sequence[float]], guess: Sequence[float]) -> list[float]:
    """Non-negative x that minimises sum((row . x - 1)^2) + sum(ridge * (x - guess)^2).

    The minimum is the one without bounds over those unknowns that are not zero. There are so few that
    each choice of them can be tried.
    """
    size = len(guess)
    gram = [[sum(row[i] * row[j] for row in rows) for j in range(size)] for i in range(size)]
    column = [sum(row[i] for row in rows) for i in range(size)]

    def error(x: Sequence[float]) -> float:
        misses = sum((sum(a * b for a, b in zip(row, x, strict=True)) - 1) ** 2 for row in rows)
        return misses + sum(w * (a - b) ** 2 for w, a, b in zip(_RIDGE, x, guess, strict=True))

    candidates = []
    for free in (free for count in range(1, size + 1) for free in combinations(range(size), count)):
        solved = _solve(
            [[gram[i][j] + _RIDGE[i] * (i == j) for j in free] for i in free],
            [column[i] + _RIDGE[i] * guess[i] for i in free],
        )
        if solved is not None and min(solved) >= 0:
            x = dict(zip(free, solved, strict=True))
            candidates.append([x.get(i, 0.0) for i in range(size)])
    return min(candidates, key=error)


def _solve(matrix: list[list[float]], column: list[float]) -> list[float] | None:
    """x with matrix x = column, for a positive definite matrix; none if it is as good as singular."""
    rows = [[*row, value] for row, value in zip(matrix, column, strict=True)]
    size = len(rows)
    for i in range(size):
        if rows[i][i] <= _SINGULAR * matrix[i][i]:
            return None
        for k in range(i + 1, size):
            factor = rows[k][i] / rows[i][i]
            rows[k] = [a - factor * b for a, b in zip(rows[k], rows[i], strict=True)]
    x = [0.0] * size
    for i in reversed(range(size)):
        x[i] = (rows[i][size] - sum(rows[i][j] * x[j] for j in range(i + 1, size))) / rows[i][i]
    return x
