"""Fits the step times of many jobs at once.

It takes the same steps as `throughput.FitProblem.solve`, for arrays: one element per job, in the last
dimension. NumPy makes it ten times faster for a hundred jobs. The results are equal up to rounding, and do
not depend on which jobs are fitted together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import log

import numpy as np
import numpy.typing as npt

from adascale_core.messages.reports import StepTime
from adascale_core.performance.throughput import (
    DAMPING,
    ITERATIONS,
    LIMIT,
    LINK_SPREAD,
    MAX_DAMPING,
    MAX_OVERLAP,
    MIN_DAMPING,
    NOISE,
    OUTLIER,
    PRECISION,
    FitProblem,
    StepTimeModel,
    usable,
)

Floats = npt.NDArray[np.float64]
MIN_BATCH = 24
"""Fewer fits are faster one by one."""
MAX_BATCH = 512
"""Fits at once, so that their arrays stay in the processor's caches."""
Measured = tuple[Sequence[StepTime], Sequence[StepTime]]
"""The step times of a job, and of other jobs with the same template."""


def fit_all(measured: Sequence[Measured]) -> list[StepTimeModel | None]:
    """Return `StepTimeModel.fit` of each element."""
    if len(measured) < MIN_BATCH:
        return [StepTimeModel.fit(*each) for each in measured]
    models: list[StepTimeModel | None] = []
    problems: dict[int, FitProblem] = {}
    for i, (job, template) in enumerate(measured):
        own = usable(tuple(job))
        prior = StepTimeModel.fit(template) if template or not own else None
        models.append(prior)
        if own:
            problems[i] = FitProblem.of(own, prior)
    indices = list(problems)
    for begin in range(0, len(indices), MAX_BATCH):
        batch = indices[begin : begin + MAX_BATCH]
        solutions = _solve([problems[i] for i in batch])
        for i, x in zip(batch, solutions.T.tolist(), strict=True):
            models[i] = problems[i].model(x)
    return models


@dataclass(frozen=True)
class _Problems:
    """Problems of the same form, for R rows: those of a problem with fewer rows are padded."""

    # is_parallel, is_between_nodes: of each row, whether it has several replicas, and on several nodes;
    # shape (R, jobs), as all rows
    is_parallel: npt.NDArray[np.bool_]
    is_between_nodes: npt.NDArray[np.bool_]
    further: Floats  # replicas beyond the second
    # size, accumulation, time: as in `FitProblem.rows`; `time` is the logarithm
    size: Floats
    accumulation: Floats
    time: Floats
    weight: Floats
    # prior, precision: mean and inverse standard deviation of the parameters, of shape (7, jobs)
    prior: Floats
    precision: Floats
    # the inverse standard deviation of the link between communication on one node and between nodes, of
    # shape (jobs,); 0 if they are not tied together
    link: Floats

    @classmethod
    def of(cls, problems: Sequence[FitProblem]) -> _Problems:
        most = max(len(each.rows) for each in problems)
        rows = np.array(
            [[*each.rows, *[each.rows[-1]] * (most - len(each.rows))] for each in problems], dtype=np.float64
        ).transpose(2, 1, 0)
        replicas, nodes, size, accumulation, time = np.ascontiguousarray(rows)
        lengths = np.array([len(each.rows) for each in problems])
        return cls(
            replicas > 1,
            (replicas > 1) & (nodes > 1),
            np.maximum(replicas - 2, 0.0),
            size,
            accumulation,
            time,
            (np.arange(most).reshape(-1, 1) < lengths).astype(np.float64),
            np.array([each.prior for each in problems]).T.copy(),
            1 / np.array([each.spread for each in problems]).T,
            np.array([1 / LINK_SPREAD if each.is_linked else 0.0 for each in problems]),
        )

    def take(self, jobs: npt.NDArray[np.intp]) -> _Problems:
        """Return the problems of some jobs."""
        return _Problems(*(getattr(self, field.name)[..., jobs] for field in fields(self)))

    def normal_equations(self, x: Floats) -> tuple[Floats, Floats, Floats]:
        """Return the matrices, right-hand sides and total errors of a step from `x`."""
        matrix = np.zeros((7, *x.shape))
        diagonal = np.arange(7)
        residual = (self.prior - x) * self.precision
        matrix[diagonal, diagonal] = self.precision**2
        column = residual * self.precision
        error = (residual * residual).sum(axis=0)
        for near, far in ((2, 4), (3, 5)):
            tied = (x[near] - x[far] - (self.prior[near] - self.prior[far])) * self.link
            squared = self.link**2
            matrix[near, near] += squared
            matrix[far, far] += squared
            matrix[far, near] -= squared
            column[near] -= tied * self.link
            column[far] += tied * self.link
            error += tied * tied
        derivatives, rest = self._derivatives(x)
        residual = rest / NOISE
        spread = np.sqrt(1 + (residual / OUTLIER) ** 2)
        weight = self.weight / spread
        weighted = derivatives * (weight / NOISE)
        # Row by row, so that a sum does not depend on the padding.
        for i in range(len(rest)):
            column += weighted[:, i] * residual[i]
            matrix += weighted[:, None, i] * (derivatives[None, :, i] / NOISE)
            error += 2 * OUTLIER**2 * self.weight[i] * (spread[i] - 1)
        return matrix, column, error

    def _derivatives(self, x: Floats) -> tuple[Floats, Floats]:
        """Return the derivatives of the logarithm of each step time, (7, R, jobs), and what it leaves."""
        fixed, per_sample, sync, per_replica, node_sync, node_per_replica, overlap = np.exp(x)
        of_samples = per_sample * self.size
        compute = fixed + of_samples
        far = self.is_between_nodes
        constant = np.where(self.is_parallel, np.where(far, node_sync, sync), 0.0)
        slope = np.where(far, node_per_replica, per_replica) * self.further
        communication = constant + slope
        larger, smaller = np.maximum(compute, communication), np.minimum(compute, communication)
        last = larger * (1 + (smaller / larger) ** overlap) ** (1 / overlap)
        total = (self.accumulation - 1) * compute + last
        of_compute = (self.accumulation - 1 + (compute / last) ** (overlap - 1)) / total
        of_sync = (communication / last) ** (overlap - 1) / total
        share = np.minimum((compute / last) ** overlap, 1.0)
        entropy = -(_xlogx(share) + _xlogx(1 - share)) / overlap
        by_constant, by_slope = of_sync * constant, of_sync * slope
        derivatives = np.zeros((7, *compute.shape))
        derivatives[0], derivatives[1] = of_compute * fixed, of_compute * of_samples
        derivatives[2], derivatives[3] = np.where(far, 0.0, by_constant), np.where(far, 0.0, by_slope)
        derivatives[4], derivatives[5] = np.where(far, by_constant, 0.0), np.where(far, by_slope, 0.0)
        derivatives[6] = -last * entropy / total
        return derivatives, self.time - np.log(total)


def _solve(problems: Sequence[FitProblem]) -> Floats:
    """Return the most probable parameters of each problem, of shape (7, jobs)."""
    given = _Problems.of(problems)
    solution = np.array([each.start() for each in problems]).T.copy()
    jobs = np.arange(len(problems))
    x, damping = solution.copy(), np.full(len(problems), DAMPING)
    matrix, column, error = given.normal_equations(x)
    for _ in range(ITERATIONS):
        bound = ((x[6] <= 0.0) & (column[6] < 0.0)) | ((x[6] >= log(MAX_OVERLAP)) & (column[6] > 0.0))
        trial = np.clip(x + _step(matrix, column, 1 + damping, bound), -LIMIT, LIMIT)
        trial[6] = np.clip(trial[6], 0.0, log(MAX_OVERLAP))
        new_matrix, new_column, new_error = given.normal_equations(trial)
        better = new_error < error
        small = better & (error - new_error < PRECISION * (1 + new_error))
        x = np.where(better, trial, x)
        matrix, column = np.where(better, new_matrix, matrix), np.where(better, new_column, column)
        error = np.where(better, new_error, error)
        damping = np.where(better, np.maximum(damping / 10, MIN_DAMPING), damping * 10)
        ended = small | (damping > MAX_DAMPING)
        solution[:, jobs] = x
        if ended.any():
            left = np.flatnonzero(~ended)
            if not len(left):
                break
            given, jobs, x, damping = given.take(left), jobs[left], x[:, left], damping[left]
            matrix, column, error = matrix[:, :, left], column[:, left], error[left]
    return solution


def _step(matrix: Floats, column: Floats, damping: Floats, bound: npt.NDArray[np.bool_]) -> Floats:
    """Return the solution of each system, by Cholesky's decomposition."""
    lower, solution = matrix.copy(), column.copy()
    diagonal = np.arange(7)
    lower[diagonal, diagonal] *= damping
    lower[6, :6] = np.where(bound, 0.0, lower[6, :6])
    solution[6] = np.where(bound, 0.0, solution[6])
    for i in range(7):
        lower[i:, i] /= np.sqrt(lower[i, i])
        solution[i] /= lower[i, i]
        solution[i + 1 :] -= lower[i + 1 :, i] * solution[i]
        lower[i + 1 :, i + 1 :] -= lower[i + 1 :, None, i] * lower[None, i + 1 :, i]
    for i in reversed(range(7)):
        solution[i] /= lower[i, i]
        solution[:i] -= lower[i, :i] * solution[i]
    return solution


def _xlogx(share: Floats) -> Floats:
    return share * np.log(np.maximum(share, 1e-12))
