"""A model of the step time, fitted to measurements, and the performance that it predicts.

    compute(b)    = fixed + per_sample * b
    sync(K, N)    = 0                                                 for one replica
                    sync + sync_per_replica * (K - 2)                 on one node
                    node_sync + node_sync_per_replica * (K - 2)       on several nodes
    t(K, N, b, a) = (a - 1) * compute(b) + (compute(b)^overlap + sync(K, N)^overlap)^(1 / overlap)

for K replicas on N nodes, local batch size b and a micro-batches. This is the form of Qiao et al. 2021
(Pollux, section 3.2): at overlap 1 communication takes place after the computation, at large values
during it.

The fit is the most probable model under a prior: half of the time of a micro-batch is fixed, half is
proportional to its size, and communication takes nearly no time, between nodes a little more than on one
node. More replicas communicate for nearly as long as two: in a ring all-reduce each sends 2 (K - 1) / K times
the gradients (Patarasuk and Yuan 2009), so that the time is bounded, apart from latency. The prior is
optimistic, so that a job tries replica counts on which it was not measured. If there are measurements of
other jobs with the same template, their model is the prior.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import exp, log
from typing import Final, Self

from adascale_core.batch.gain import GradientEstimate
from adascale_core.batch.plans import (
    DEFAULT_EFFICIENCY,
    BatchBounds,
    BatchPlan,
    EfficiencyBound,
    plan_batch,
)
from adascale_core.messages.reports import StepTime

MIN_STEP_TIME, MAX_STEP_TIME = 1e-9, 1e9
"""Seconds; measurements outside of these bounds are ignored."""
MAX_OVERLAP = 10.0
MAX_MEASUREMENTS = 32
"""A fit uses at most this many measurements, spread over plans and nodes."""

NOISE = 0.03
"""Standard deviation of the logarithm of a measured step time."""
OUTLIER = 4.0
"""The error is quadratic below this many standard deviations, and linear above."""
ITERATIONS = 40
PRECISION = 1e-5
"""The fit ends when a step improves the error, in squared standard deviations, by less than this share."""
DAMPING, MIN_DAMPING, MAX_DAMPING = 1e-3, 1e-9, 1e7
"""Of the first step, and the bounds; it changes by a factor of 10. The fit ends above the upper bound."""
LIMIT = 30.0
"""Logarithms of parameters stay within this distance of zero, in units of the reference micro-batch."""

# The parameters, as logarithms: fixed, per_sample, sync, sync_per_replica, node_sync, node_sync_per_replica
# and overlap.
_PRIOR: Final = (log(0.5), log(0.5), log(2e-3), log(5e-5), log(4e-3), log(1e-4), log(1.0))
_SPREAD: Final = (1.0, 1.0, 2.5, 2.5, 2.5, 2.5, 0.3)
_TEMPLATE_SPREAD: Final = (0.1, 0.1, 0.2, 0.2, 0.2, 0.2, 0.1)
LINK_SPREAD = 1.5
"""How far communication between nodes is from that on one node, where only one of both is measured."""


@dataclass(frozen=True)
class StepTimeModel:
    """Seconds per optimizer step of any batch plan on any number of nodes."""

    fixed: float  # seconds per micro-batch, independent of its size
    per_sample: float  # seconds per sample of a micro-batch
    sync: float = 0.0  # seconds per step to communicate between two replicas on one node
    sync_per_replica: float = 0.0  # seconds per step that each replica beyond the second adds, on one node
    # whether the measurements cover two local batch sizes, so that `fixed` and `per_sample` are both
    # determined
    separates_batch_size: bool = False
    # node_sync, node_sync_per_replica: the same on several nodes; None for those on one node
    node_sync: float | None = None
    node_sync_per_replica: float | None = None
    overlap: float = 1.0  # how much communication overlaps with computation, from 1 (not at all) to 10

    def compute_time(self, local_bsz: int) -> float:
        """Predicted seconds of a micro-batch without communication."""
        return self.fixed + self.per_sample * local_bsz

    def sync_time(self, replicas: int, nodes: int) -> float:
        """Predicted seconds of communication per step, without overlap."""
        if replicas < 2:
            return 0.0
        if nodes > 1 and self.node_sync is not None and self.node_sync_per_replica is not None:
            return self.node_sync + self.node_sync_per_replica * (replicas - 2)
        return self.sync + self.sync_per_replica * (replicas - 2)

    def step_time(self, plan: BatchPlan, nodes: int = 1) -> float:
        """Predicted seconds per optimizer step."""
        compute = self.compute_time(plan.local_bsz)
        last = _overlapped(compute, self.sync_time(plan.replicas, nodes), self.overlap)
        return (plan.accumulation - 1) * compute + last

    def throughput(self, plan: BatchPlan, nodes: int = 1) -> float:
        """Predicted optimizer steps per second."""
        return 1 / self.step_time(plan, nodes)

    @classmethod
    def fit(cls, measurements: Sequence[StepTime], template: Sequence[StepTime] = ()) -> Self | None:
        """Return the most probable model; None without measurements."""
        fitted = _fit(usable(tuple(measurements)), usable(tuple(template)))
        return None if fitted is None else cls(**vars(fitted))


def _overlapped(compute: float, sync: float, overlap: float) -> float:
    if sync <= 0.0:
        return compute
    if overlap <= 1.0:
        return compute + sync
    larger, smaller = max(compute, sync), min(compute, sync)
    return float(larger * (1 + (smaller / larger) ** overlap) ** (1 / overlap))


@lru_cache(maxsize=16384)
def usable(measurements: tuple[StepTime, ...]) -> tuple[StepTime, ...]:
    """Return valid measurements, at most `MAX_MEASUREMENTS`, spread over plans and nodes.

    Without the stale ones, if there are others: where a job was slow for a moment, it is tried again.
    """
    usable = sorted(
        (each for each in measurements if MIN_STEP_TIME <= each.step_time <= MAX_STEP_TIME), key=_order
    )
    usable = [each for each in usable if not each.stale] or usable
    # Without its communication, a step is one of a single replica.
    alone = {
        (each.local_bsz, each.accumulation): StepTime(
            1, each.local_bsz, each.accumulation, each.step_time - each.sync_time
        )
        for each in usable
        if each.sync_time is not None and each.replicas > 1 and each.step_time > each.sync_time
    }
    usable = sorted([*usable, *alone.values()], key=_order)
    if len(usable) <= MAX_MEASUREMENTS:
        return tuple(usable)
    last = len(usable) - 1
    return tuple(usable[i * last // (MAX_MEASUREMENTS - 1)] for i in range(MAX_MEASUREMENTS))


def _order(measured: StepTime) -> tuple[int, int, int, int, float]:
    return (
        measured.replicas,
        measured.nodes,
        measured.local_bsz,
        measured.accumulation,
        measured.step_time,
    )


@lru_cache(maxsize=16384)
def _fit(measurements: tuple[StepTime, ...], template: tuple[StepTime, ...]) -> StepTimeModel | None:
    if not measurements:
        return _fit(template, ()) if template else None
    problem = FitProblem.of(measurements, _fit(template, ()) if template else None)
    return problem.model(problem.solve())


@dataclass(frozen=True)
class FitProblem:
    """A fit in units of a reference micro-batch, in which all parameters are of the order of 1."""

    seconds: float
    samples: int
    # replicas, nodes, size of a micro-batch in units of the reference, micro-batches, logarithm of the
    # step time
    rows: Sequence[tuple[int, int, float, int, float]]
    # prior, spread: mean and standard deviation of each parameter's logarithm
    prior: Sequence[float]
    spread: Sequence[float]
    is_linked: bool  # whether communication on one node and between nodes are tied together
    separates_batch_size: bool  # whether the measurements cover two local batch sizes

    @classmethod
    def of(cls, measurements: Sequence[StepTime], template: StepTimeModel | None) -> FitProblem:
        """Return the problem."""
        first = measurements[0]
        separates = len({each.local_bsz for each in measurements}) > 1
        seconds, samples = first.step_time / first.accumulation, first.local_bsz
        rows = [
            (
                each.replicas,
                each.nodes,
                each.local_bsz / samples,
                each.accumulation,
                log(each.step_time / seconds),
            )
            for each in measurements
        ]
        if template is None:
            return cls(
                seconds, samples, rows, _PRIOR, _SPREAD, is_linked=True, separates_batch_size=separates
            )
        node_sync = template.sync if template.node_sync is None else template.node_sync
        per_replica = template.node_sync_per_replica
        values = (
            template.fixed,
            template.per_sample * samples,
            template.sync,
            template.sync_per_replica,
            node_sync,
            template.sync_per_replica if per_replica is None else per_replica,
        )
        prior = [log(max(value / seconds, 1e-12)) for value in values]
        return cls(
            seconds,
            samples,
            rows,
            [*prior, log(template.overlap)],
            _TEMPLATE_SPREAD,
            is_linked=False,
            separates_batch_size=separates or template.separates_batch_size,
        )

    def solve(self) -> Sequence[float]:
        """Return the most probable parameters, by damped Gauss-Newton steps (Levenberg 1944, Marquardt 1963).

        `batched_fit` does the same for many problems at once.
        """
        x = self.start()
        damping = DAMPING
        matrix, column, error = self._normal_equations(x)
        for _ in range(ITERATIONS):
            if (x[6] <= 0.0 and column[6] < 0.0) or (x[6] >= log(MAX_OVERLAP) and column[6] > 0.0):
                _fix(matrix, column, 6)
            step = _solve(matrix, column, 1 + damping)
            trial = [min(max(value + change, -LIMIT), LIMIT) for value, change in zip(x, step, strict=True)]
            trial[6] = min(max(trial[6], 0.0), log(MAX_OVERLAP))
            new_matrix, new_column, new_error = self._normal_equations(trial)
            if new_error < error:
                is_small = error - new_error < PRECISION * (1 + new_error)
                x, matrix, column, error = trial, new_matrix, new_column, new_error
                damping = max(damping / 10, MIN_DAMPING)
                if is_small:
                    break
            else:
                damping *= 10
                if damping > MAX_DAMPING:
                    break
        return x

    def model(self, x: Sequence[float]) -> StepTimeModel:
        """Return the model of some parameters."""
        fixed, per_sample, sync, per_replica, node_sync, node_per_replica, overlap = map(exp, x)
        nodes = {row[1] > 1 for row in self.rows if row[0] > 1}
        if self.is_linked and True not in nodes:
            # Communication between nodes is not faster than on one node, unless it was measured to be.
            node_sync, node_per_replica = max(node_sync, sync), max(node_per_replica, per_replica)
        elif self.is_linked and False not in nodes:
            sync, per_replica = min(sync, node_sync), min(per_replica, node_per_replica)
        return StepTimeModel(
            self.seconds * fixed,
            self.seconds * per_sample / self.samples,
            self.seconds * sync,
            self.seconds * per_replica,
            self.separates_batch_size,
            self.seconds * node_sync,
            self.seconds * node_per_replica,
            overlap,
        )

    def start(self) -> list[float]:
        """Return where to start: the prior, with communication from what computation does not explain.

        A parameter that is much too small has no influence, so a search could not leave it.
        """
        x = list(self.prior)
        alone = [exp(row[4]) / row[3] for row in self.rows if row[0] == 1]
        compute = min(alone, default=exp(x[0]) + exp(x[1]))
        for first, between_nodes in ((2, False), (4, True)):
            rows = [row for row in self.rows if row[0] > 1 and (row[1] > 1) is between_nodes]
            rest = [exp(row[4]) - row[3] * compute for row in rows]
            mean = sum(rest) / len(rest) if rest else 0.0
            if mean > exp(x[first]):
                x[first + 1] += log(mean) - x[first]
                x[first] = log(mean)
        return x

    def _normal_equations(self, x: Sequence[float]) -> tuple[list[list[float]], list[float], float]:
        """Return the matrix (its lower triangle) and right-hand side of a step from `x`, and the total error.

        Residuals are weighted against outliers.
        """
        fixed, per_sample, sync, per_replica, node_sync, node_per_replica, overlap = map(exp, x)
        matrix = [[0.0] * 7 for _ in range(7)]
        column = [0.0] * 7
        error = 0.0
        for i, (value, mean, spread) in enumerate(zip(x, self.prior, self.spread, strict=True)):
            residual = (mean - value) / spread
            matrix[i][i] = 1 / spread**2
            column[i] = residual / spread
            error += residual * residual
        if self.is_linked:
            for near, far in ((2, 4), (3, 5)):
                residual = (x[near] - x[far] - (self.prior[near] - self.prior[far])) / LINK_SPREAD
                matrix[near][near] += 1 / LINK_SPREAD**2
                matrix[far][far] += 1 / LINK_SPREAD**2
                matrix[far][near] -= 1 / LINK_SPREAD**2
                column[near] -= residual / LINK_SPREAD
                column[far] += residual / LINK_SPREAD
                error += residual * residual
        row_0, row_1, row_6 = matrix[0], matrix[1], matrix[6]
        for replicas, nodes, size, accumulation, measured in self.rows:
            compute = fixed + per_sample * size
            # The derivatives of the logarithm of the step time are called by_<index of the parameter>.
            if replicas == 1:
                total = accumulation * compute
                by_0, by_1 = fixed / compute, per_sample * size / compute
            else:
                first, constant, slope = (
                    (2, sync, per_replica) if nodes < 2 else (4, node_sync, node_per_replica)
                )
                slope *= replicas - 2
                communication = constant + slope
                last = _overlapped(compute, communication, overlap)
                total = (accumulation - 1) * compute + last
                of_compute = (accumulation - 1 + (compute / last) ** (overlap - 1)) / total
                by_0, by_1 = of_compute * fixed, of_compute * per_sample * size
            residual = (measured - log(total)) / NOISE
            spread = (1 + (residual / OUTLIER) ** 2) ** 0.5
            weight = 1 / (spread * NOISE)
            error += 2 * OUTLIER**2 * (spread - 1)
            left = by_0 * weight
            column[0] += left * residual
            row_0[0] += left / NOISE * by_0
            left = by_1 * weight
            column[1] += left * residual
            left /= NOISE
            row_1[0] += left * by_0
            row_1[1] += left * by_1
            if replicas == 1:
                continue
            of_sync = (communication / last) ** (overlap - 1) / total
            share = (compute / last) ** overlap
            entropy = -(_xlogx(share) + _xlogx(1 - share)) / overlap
            by_first, by_second, by_6 = of_sync * constant, of_sync * slope, -last * entropy / total
            second = first + 1
            left = by_first * weight
            column[first] += left * residual
            left /= NOISE
            row = matrix[first]
            row[0] += left * by_0
            row[1] += left * by_1
            row[first] += left * by_first
            left = by_second * weight
            column[second] += left * residual
            left /= NOISE
            row = matrix[second]
            row[0] += left * by_0
            row[1] += left * by_1
            row[first] += left * by_first
            row[second] += left * by_second
            left = by_6 * weight
            column[6] += left * residual
            left /= NOISE
            row_6[0] += left * by_0
            row_6[1] += left * by_1
            row_6[first] += left * by_first
            row_6[second] += left * by_second
            row_6[6] += left * by_6
        return matrix, column, error


def _xlogx(share: float) -> float:
    return share * log(share) if share > 1e-12 else 0.0


def _fix(matrix: list[list[float]], column: list[float], index: int) -> None:
    """Keep an element of the solution at its present value, a bound."""
    for i in range(len(column)):
        matrix[i][index] = matrix[index][i] = 0.0
    matrix[index][index] = 1.0
    column[index] = 0.0


def _solve(matrix: list[list[float]], column: list[float], damping: float) -> list[float]:
    """Return x with `matrix` x = `column`, for a positive definite matrix, by Cholesky's decomposition."""
    size = len(column)
    lower: list[list[float]] = []
    solution: list[float] = []
    for i in range(size):
        row = matrix[i][: i + 1]
        row[i] *= damping
        value = column[i]
        for j, other in enumerate(lower):
            if row[j]:
                entry = row[j] = row[j] / other[j]
                value -= entry * solution[j]
                for k in range(j + 1, i):
                    row[k] -= entry * lower[k][j]
                row[i] -= entry * entry
        row[i] = row[i] ** 0.5
        lower.append(row)
        solution.append(value / row[i])
    for i in reversed(range(size)):
        value = solution[i] = solution[i] / lower[i][i]
        for j in range(i):
            solution[j] -= lower[i][j] * value
    return solution


@dataclass(frozen=True)
class Prediction:
    """The predicted performance of a replica count."""

    plan: BatchPlan
    scale: float
    gain: float  # steps at `batch_size` per step
    step_time: float  # seconds per optimizer step
    # the gains at one standard error of the estimate; twice `gain` if the error is not known
    gain_range: tuple[float, float]

    @property
    def efficiency(self) -> float:
        """gain / scale."""
        return self.gain / self.scale

    @property
    def goodput(self) -> float:
        """Steps at `batch_size` per second: throughput times gain (Qiao et al. 2021, section 3).

        With the lower gain of the range, which decides.
        """
        return self.gain_range[0] / self.step_time


def predict(
    bounds: BatchBounds,
    counts: Iterable[int],
    estimate: GradientEstimate,
    model: StepTimeModel,
    efficiency: EfficiencyBound = DEFAULT_EFFICIENCY,
) -> dict[int, Prediction]:
    """Return the prediction for each replica count."""
    predictions = {}
    for count in counts:
        plan = plan_batch(
            bounds,
            count,
            estimate=estimate.cautious,
            throughput=model.throughput,
            efficiency=efficiency,
        )
        scale = plan.scale(bounds)
        predictions[count] = Prediction(
            plan, scale, estimate.gain(scale), model.step_time(plan), estimate.gain_range(scale)
        )
    return predictions
