"""A model of the step time, fitted to measurements.

    t(K, b, a) = a * (fixed + per_sample * b) + [K > 1] * (sync + sync_per_replica * (K - 2))

This is the form of Qiao et al. 2021 (Pollux, section 3.2), with computation and communication not
overlapped. A parameter that the measurements do not determine keeps its prior: half of the time of a
micro-batch is fixed, half is proportional to its size, and communication takes no time. The prior is
optimistic, so that a job tries replica counts on which it was not measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Self

from adascale_core.batch import BatchPlan
from adascale_core.messages import StepTime

MIN_STEP_TIME, MAX_STEP_TIME = 1e-9, 1e9
"""Seconds; measurements outside of these bounds are ignored."""
MIN_COMPUTE = 1e-3
"""The least time of a micro-batch, as a share of that of the smallest measured batch."""

_RIDGE = (1e-6, 1e-6, 1e-4, 1e-4)
"""The weights of the priors. Those of communication are larger than those of computation, so that
measurements on a single replica count are not attributed to communication."""
_SINGULAR = 1e-12
"""A pivot below this share of its diagonal element is zero."""


@dataclass(frozen=True)
class StepTimeModel:
    """Seconds per optimizer step of any batch plan.

    Args:
        fixed: seconds per micro-batch, independent of its size.
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
    def fit(cls, measurements: Sequence[StepTime]) -> Self | None:
        """Return the non-negative model of the least relative squared error; None without measurements.

        It is a ridge regression towards the prior, since there are often fewer measurements than parameters.
        """
        usable = [
            measured for measured in measurements if MIN_STEP_TIME <= measured.step_time <= MAX_STEP_TIME
        ]
        if not usable:
            return None
        reference = min(
            usable,
            key=lambda measured: (
                measured.replicas,
                measured.local_bsz,
                measured.accumulation,
                measured.step_time,
            ),
        )
        micro_batch = reference.step_time / reference.accumulation
        longest = max(measured.step_time for measured in usable)
        # In these units all four parameters are of the order of 1.
        unit = (micro_batch, micro_batch / reference.local_bsz, longest, longest)
        prior = (0.5, 0.5, 0.0, 0.0)
        rows = [
            [value * u / measured.step_time for value, u in zip(_row(measured.plan), unit, strict=True)]
            for measured in usable
        ]
        solution = _ridge(rows, prior)
        fixed, per_sample, sync, sync_per_replica = (x * u for x, u in zip(solution, unit, strict=True))
        if fixed + per_sample * reference.local_bsz < MIN_COMPUTE * micro_batch:
            fixed = MIN_COMPUTE * micro_batch
        separates = len({measured.local_bsz for measured in usable}) > 1
        return cls(fixed, per_sample, sync, sync_per_replica, separates)


def _row(plan: BatchPlan) -> tuple[float, float, float, float]:
    """Return the factors of (fixed, per_sample, sync, sync_per_replica) in the step time of `plan`."""
    several = plan.replicas > 1
    return (
        plan.accumulation,
        plan.accumulation * plan.local_bsz,
        float(several),
        float(plan.replicas - 2) if several else 0.0,
    )


def _ridge(rows: Sequence[Sequence[float]], prior: Sequence[float]) -> list[float]:
    """Return the non-negative x that minimizes sum((row . x - 1)^2) + sum(ridge * (x - prior)^2).

    The solution is the unconstrained minimum over its non-zero elements (the optimality conditions of
    non-negative least squares). There are 4 elements at most, so all subsets are tried.
    """
    size = len(prior)
    gram = [[sum(row[i] * row[j] for row in rows) for j in range(size)] for i in range(size)]
    column = [sum(row[i] for row in rows) for i in range(size)]

    def error(x: Sequence[float]) -> float:
        misses = sum((sum(a * b for a, b in zip(row, x, strict=True)) - 1) ** 2 for row in rows)
        return misses + sum(w * (a - b) ** 2 for w, a, b in zip(_RIDGE, x, prior, strict=True))

    candidates = []
    for free in (free for count in range(1, size + 1) for free in combinations(range(size), count)):
        solved = _solve(
            [[gram[i][j] + _RIDGE[i] * (i == j) for j in free] for i in free],
            [column[i] + _RIDGE[i] * prior[i] for i in free],
        )
        if solved is not None and min(solved) >= 0:
            x = dict(zip(free, solved, strict=True))
            candidates.append([x.get(i, 0.0) for i in range(size)])
    return min(candidates, key=error)


def _solve(matrix: list[list[float]], column: list[float]) -> list[float] | None:
    """Return x with `matrix` x = `column`, for a positive definite matrix; None if it is singular."""
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
