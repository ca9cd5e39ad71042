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
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import exp, log
from operator import attrgetter
from statistics import median
from typing import Final

import numpy as np
import numpy.typing as npt

from adascale_core.batch.plans import BatchBounds, BatchPlan, batch_choice
from adascale_core.messages.reports import StepTime

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

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
_PRIOR: Final = np.array([log(0.5), log(0.5), log(2e-3), log(5e-5), log(4e-3), log(1e-4), log(1.0)])
_SPREAD: Final = np.array([1.0, 1.0, 2.5, 2.5, 2.5, 2.5, 0.3])
_TEMPLATE_SPREAD: Final = np.array([0.1, 0.1, 0.2, 0.2, 0.2, 0.2, 0.1])
MAX_BATCH = 512
"""Fits at once, so that their arrays stay in the processor's caches."""
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
        compute, sync = self.compute_time(plan.local_bsz), self.sync_time(plan.replicas, nodes)
        larger, smaller = max(compute, sync), min(compute, sync)
        last = float(larger * (1 + (smaller / larger) ** self.overlap) ** (1 / self.overlap))
        return (plan.accumulation - 1) * compute + last

    def throughput(self, plan: BatchPlan, nodes: int = 1) -> float:
        """Predicted optimizer steps per second."""
        return 1 / self.step_time(plan, nodes)

    @staticmethod
    def fit(measurements: Sequence[StepTime], template: Sequence[StepTime] = ()) -> StepTimeModel | None:
        """Return the most probable model; None without measurements."""
        return _fit_one(tuple(measurements), tuple(template))


def single_replica_seconds(
    progress: float, bounds: BatchBounds, measured: Sequence[StepTime]
) -> tuple[float, float] | None:
    """Return between which the time of a progress on one replica with the initial batch is; None if unknown.

    The prediction from measured step times, and three times the median error of these.
    """
    times, plans = usable(tuple(measured)), batch_choice(bounds, 1)
    model = StepTimeModel.fit(times)
    if model is None or not plans:
        return None
    errors = [abs(log(each.step_time / model.step_time(each.plan, each.nodes))) for each in times]
    spread = exp(max(3 * median(errors), 2 * NOISE))  # For a normal distribution, two standard deviations.
    seconds = progress / plans[0].scale(bounds) * model.step_time(plans[0])
    return seconds / spread, seconds * spread


def overlapped(compute: Floats, sync: Floats, overlap: float | Floats) -> Floats:
    """Return the seconds of computation with the communication that it does not hide."""
    larger, smaller = np.maximum(compute, sync), np.minimum(compute, sync)
    last: Floats = larger * (1 + (smaller / larger) ** overlap) ** (1 / overlap)
    return last


@lru_cache(maxsize=16384)
def usable(measurements: tuple[StepTime, ...]) -> tuple[StepTime, ...]:
    """Return valid measurements, at most `MAX_MEASUREMENTS`, spread over plans and nodes.

    Without the stale ones, if there are others: where a job was slow for a moment, it is tried again.
    """
    usable = sorted(
        (each for each in measurements if MIN_STEP_TIME <= each.step_time <= MAX_STEP_TIME), key=_row
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
    usable = sorted([*usable, *alone.values()], key=_row)
    if len(usable) <= MAX_MEASUREMENTS:
        return tuple(usable)
    last = len(usable) - 1
    return tuple(usable[i * last // (MAX_MEASUREMENTS - 1)] for i in range(MAX_MEASUREMENTS))


Measured = tuple[Sequence[StepTime], Sequence[StepTime]]
"""The step times of a job, and of other jobs with the same template."""


def fit_all(measured: Iterable[Measured]) -> list[StepTimeModel | None]:
    """Return `StepTimeModel.fit` of each element. A model does not depend on the others."""
    pairs = [(usable(tuple(job)), usable(tuple(template))) for job, template in measured]
    templates = list({template: None for _, template in pairs if template})
    priors = dict(zip(templates, _solve([(each, None) for each in templates]), strict=True))
    own = iter(_solve([(job, priors.get(template)) for job, template in pairs if job]))
    return [next(own) if job else priors.get(template) for job, template in pairs]


@lru_cache(maxsize=16384)
def _fit_one(measurements: tuple[StepTime, ...], template: tuple[StepTime, ...]) -> StepTimeModel | None:
    return fit_all([(measurements, template)])[0]


_Question = tuple[tuple[StepTime, ...], StepTimeModel | None]
"""Measurements, and the model that is the prior; None for the general prior."""
_row = attrgetter("replicas", "nodes", "local_bsz", "accumulation", "step_time")
_NO_TEMPLATE: Final = StepTimeModel(1.0, 1.0)
_parameters = attrgetter(
    "fixed", "per_sample", "sync", "sync_per_replica", "node_sync", "node_sync_per_replica", "overlap"
)


@dataclass(frozen=True)
class _Problems:
    """Fits in units of the first micro-batch of a job, in which all parameters are of the order of 1.

    Arrays have an element per job in the last dimension. Those with a row per measurement are padded.
    """

    # near, far: 1 for a row with several replicas on one node, and on several nodes; 0 for others
    near: Floats
    far: Floats
    further: Floats  # replicas beyond the second
    size: Floats  # samples of a micro-batch, in units of the first
    accumulation: Floats
    time: Floats  # the logarithm of the step time
    weight: Floats  # 0 for padding
    prior: Floats  # the mean of each parameter's logarithm, of shape (7, jobs)
    certainty: Floats  # the inverse of their covariance, of shape (7, 7, jobs)
    # whether communication on one node and between nodes are tied together, without a template; shape (jobs,)
    is_tied: Flags
    # seconds, samples: of the first micro-batch, of shape (jobs,)
    seconds: Floats
    samples: Floats

    @classmethod
    def of(cls, questions: Sequence[_Question]) -> _Problems:
        most = max(len(times) for times, _ in questions)
        padded = [[*times, *[times[-1]] * (most - len(times))] for times, _ in questions]
        rows = np.array([[_row(each) for each in times] for times in padded], dtype=np.float64)
        replicas, nodes, local_bsz, accumulation, step_time = np.ascontiguousarray(rows.transpose(2, 1, 0))
        seconds, samples = step_time[0] / accumulation[0], local_bsz[0]
        lengths = np.array([len(times) for times, _ in questions])
        has_template = np.array([model is not None for _, model in questions])
        given = np.array([_parameters(model or _NO_TEMPLATE) for _, model in questions], dtype=np.float64).T
        given[1] *= samples
        # A model without measurements on several nodes has None there, which is not a number.
        given[4:6] = np.where(np.isnan(given[4:6]), given[2:4], given[4:6])
        given[:6] = np.maximum(given[:6] / seconds, 1e-12)
        prior = np.where(has_template, np.log(given), _PRIOR[:, None])
        spread = np.where(has_template, _TEMPLATE_SPREAD[:, None], _SPREAD[:, None])
        certainty = np.eye(7)[..., None] / spread**2
        for near, far in ((2, 4), (3, 5)):
            link = np.zeros(7)
            link[[near, far]] = 1 / LINK_SPREAD, -1 / LINK_SPREAD
            certainty += np.outer(link, link)[..., None] * ~has_template
        return cls(
            np.where((replicas > 1) & (nodes == 1), 1.0, 0.0),
            np.where((replicas > 1) & (nodes > 1), 1.0, 0.0),
            np.maximum(replicas - 2, 0.0),
            local_bsz / samples,
            accumulation,
            np.log(step_time / seconds),
            (np.arange(most)[:, None] < lengths).astype(np.float64),
            prior,
            certainty,
            ~has_template,
            seconds,
            samples,
        )

    def take(self, jobs: npt.NDArray[np.intp]) -> _Problems:
        """Return the problems of some jobs."""
        return _Problems(*(getattr(self, field.name)[..., jobs] for field in fields(self)))

    def start(self) -> Floats:
        """Return where to start: the prior, with communication from what computation does not explain.

        A parameter that is much too small has no influence, so a search could not leave it.
        """
        x, times = self.prior.copy(), np.exp(self.time)
        alone = np.where(self.near + self.far > 0, np.inf, times / self.accumulation).min(axis=0)
        compute = np.where(np.isfinite(alone), alone, np.exp(x[0]) + np.exp(x[1]))
        for first, is_measured in ((2, self.near), (4, self.far)):
            weight = self.weight * is_measured
            mean = sum(weight * (times - self.accumulation * compute)) / np.maximum(sum(weight), 1.0)
            x[first : first + 2] += np.maximum(np.log(np.maximum(mean, 1e-300)) - x[first], 0.0)
        return x

    def normal_equations(self, x: Floats) -> tuple[Floats, Floats, Floats]:
        """Return the matrices, right-hand sides and total errors of a step from `x`."""
        distance = self.prior - x
        column = (self.certainty * distance).sum(axis=1)
        error = (distance * column).sum(axis=0)
        derivatives, rest = self._derivatives(x)
        residual = rest / NOISE
        spread = np.sqrt(1 + (residual / OUTLIER) ** 2)
        weighted = derivatives * (self.weight / spread / NOISE)
        column += (weighted * residual).sum(axis=1)
        matrix = self.certainty + (weighted[:, None] * (derivatives / NOISE)).sum(axis=2)
        error += 2 * OUTLIER**2 * (self.weight * (spread - 1)).sum(axis=0)
        return matrix, column, error

    def _derivatives(self, x: Floats) -> tuple[Floats, Floats]:
        """Return the derivatives of the logarithm of each step time, and what it leaves."""
        fixed, per_sample, sync, per_replica, node_sync, node_per_replica, overlap = np.exp(x)
        of_samples = per_sample * self.size
        compute = fixed + of_samples
        constant = self.near * sync + self.far * node_sync
        slope = (self.near * per_replica + self.far * node_per_replica) * self.further
        communication = constant + slope
        last = overlapped(compute, communication, overlap)
        total = (self.accumulation - 1) * compute + last
        of_compute = (self.accumulation - 1 + (compute / last) ** (overlap - 1)) / total
        of_sync = (communication / last) ** (overlap - 1) / total
        share = np.minimum((compute / last) ** overlap, 1.0)
        entropy = -(_xlogx(share) + _xlogx(1 - share)) / overlap
        by_constant, by_slope = of_sync * constant, of_sync * slope
        of_links = [mask * each for mask in (self.near, self.far) for each in (by_constant, by_slope)]
        derivatives = np.array(
            [of_compute * fixed, of_compute * of_samples, *of_links, -last * entropy / total]
        )
        return derivatives, self.time - np.log(total)

    def models(self, x: Floats) -> list[StepTimeModel]:
        """Return the models of some parameters."""
        values = np.exp(x)
        near, far = ((self.weight * each).any(axis=0) for each in (self.near, self.far))
        # Communication between nodes is not faster than on one node, unless it was measured to be.
        slower, faster = np.maximum(values[2:4], values[4:6]), np.minimum(values[2:4], values[4:6])
        values[4:6] = np.where(self.is_tied & ~far, slower, values[4:6])
        values[2:4] = np.where(self.is_tied & far & ~near, faster, values[2:4])
        values[:6] *= self.seconds
        values[1] /= self.samples
        separates = (self.size != 1.0).any(axis=0).tolist()
        return [
            StepTimeModel(
                fixed, per_sample, sync, per_replica, separate, node_sync, node_per_replica, overlap
            )
            for (fixed, per_sample, sync, per_replica, node_sync, node_per_replica, overlap), separate in zip(
                values.T.tolist(), separates, strict=True
            )
        ]


def _solve(questions: Sequence[_Question]) -> list[StepTimeModel]:
    """Return the most probable models, by damped Gauss-Newton steps (Levenberg 1944, Marquardt 1963)."""
    models: list[StepTimeModel] = []
    for begin in range(0, len(questions), MAX_BATCH):
        batch = questions[begin : begin + MAX_BATCH]
        given = _Problems.of(batch)
        models += given.models(_most_probable(given))
    return [
        replace(model, separates_batch_size=True)
        if prior is not None and prior.separates_batch_size
        else model
        for model, (_, prior) in zip(models, questions, strict=True)
    ]


def _most_probable(given: _Problems) -> Floats:
    """Return the most probable parameters of each problem, of shape (7, jobs)."""
    solution = given.start()
    # Two at least, of which one may be there twice: NumPy adds the rows of a single one in another order.
    jobs = np.resize(np.arange(solution.shape[1]), max(solution.shape[1], 2))
    given, x, damping = given.take(jobs), solution[:, jobs], np.full(len(jobs), DAMPING)
    matrix, column, error = given.normal_equations(x)
    most = log(MAX_OVERLAP)
    for _ in range(ITERATIONS):
        bound = ((x[6] <= 0.0) & (column[6] < 0.0)) | ((x[6] >= most) & (column[6] > 0.0))
        trial = np.clip(x + _step(matrix, column, 1 + damping, bound), -LIMIT, LIMIT)
        trial[6] = np.clip(trial[6], 0.0, most)
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
            left = np.resize(left, max(len(left), 2))
            given, jobs, x, damping = given.take(left), jobs[left], x[:, left], damping[left]
            matrix, column, error = matrix[:, :, left], column[:, left], error[left]
    return solution


def _step(matrix: Floats, column: Floats, damping: Floats, bound: Flags) -> Floats:
    """Return the solution of each system; without a change of the overlap where it is at a bound."""
    left, right = matrix.transpose(2, 0, 1).copy(), column.T.copy()
    left[:, np.arange(7), np.arange(7)] *= damping[:, None]
    left[bound, 6, :6] = left[bound, :6, 6] = right[bound, 6] = 0.0
    return np.linalg.solve(left, right[..., None])[..., 0].T.astype(np.float64)


def _xlogx(share: Floats) -> Floats:
    return share * np.log(np.maximum(share, 1e-12))
