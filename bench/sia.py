"""A twin of Sia (Jayaram Subramanya et al. 2023), to compare with: an integer program in each round.

Each job gets a configuration, a type of accelerator and a number of GPUs that is a power of two below the
size of a node, or fills nodes. Of all, those are chosen that minimize the sum of

    (goodput / least goodput of the job)^p, p = -0.5;     1.1 for a job without a configuration

in which goodputs other than that of the present configuration are multiplied by the share of the job's life
that it would have trained if it restarted once more (section 3.4). The step times that a job has measured on
a type are known as to the decision of this project, by the same model. On other types goodput is multiplied
by the ratio of the throughputs of one GPU with the largest batch, which Sia measures beforehand.

As published, the goodput is that of batches up to the size of the workload, while a job trains with up to the
largest batch of its application. SciPy solves the program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import scipy.optimize  # type: ignore[import-untyped]
import scipy.sparse  # type: ignore[import-untyped]

from adascale_controller.simulation.application import ROUNDING, Application, fixed_plan
from adascale_controller.simulation.engine import SimulatedJob, SimulationSettings
from adascale_core.batch.gain import GradientEstimate
from adascale_core.batch.plans import BatchPlan
from adascale_core.errors import AdaScaleError
from adascale_core.performance.throughput import StepTimeModel

Floats = npt.NDArray[np.float64]

POWER = -0.5
"""The exponent of the normalized goodputs (p)."""
NOT_ALLOCATED = 1.1
"""What a job without a configuration costs."""
GAP = 1e-4
"""The relative gap at which the program is solved."""
MAX_COUNT = 64
"""The largest number of GPUs of a job."""
BATCH_SIZES = 50
"""Global batch sizes that are tried for a configuration, in a geometric series."""
RESTART_SECONDS: Mapping[str, float] = {
    "bert": 120.0,
    "cifar10": 30.0,
    "deepspeech2": 25.0,
    "imagenet": 250.0,
    "yolov3": 45.0,
}
"""Application -> the seconds of a restart that the published policy assumes, which differ from those that its
simulator counts."""
DEFAULT_RESTART_SECONDS = 30.0


class Configuration(NamedTuple):
    """What a job may get."""

    type: str
    # nodes, gpus: the numbers of nodes and of GPUs on all of them
    nodes: int
    gpus: int


def configurations(settings: SimulationSettings) -> list[Configuration]:
    """Return what a job may get on a cluster."""
    found = []
    for name, nodes in settings.nodes_by_type().items():
        sizes = {settings.nodes[node] for node in nodes}
        if len(sizes) > 1:
            raise AdaScaleError("the policy sia needs nodes of one size for each type of accelerator")
        (size,) = sizes
        powers = [1 << i for i in range(size.bit_length()) if 1 << i < size]
        found += [Configuration(name, 1, gpus) for gpus in powers]
        whole = range(1, len(nodes) + 1)
        found += [Configuration(name, count, count * size) for count in whole if count * size <= MAX_COUNT]
    return found


class Sia:
    """Sia with p = -0.5, as in the published simulation."""

    def __init__(self) -> None:
        self._configurations: list[Configuration] = []
        self._chosen: dict[str, int] = {}
        """Job -> the index of its configuration, of the jobs that have one."""
        self._models: dict[tuple[str, str], tuple[int, StepTimeModel]] = {}
        self._speeds: dict[tuple[str, str], float] = {}

    def allocate(
        self, jobs: Sequence[SimulatedJob], settings: SimulationSettings, now: float
    ) -> Mapping[str, tuple[int, ...]]:
        """Return job name -> node of each replica."""
        if not self._configurations:
            self._configurations = configurations(settings)
        speedups = np.array([self._speedups(job, settings, now) for job in jobs])
        fixed = {
            i: self._chosen[job.name] for i, job in enumerate(jobs) if job.nodes and job.trains_from > now
        }
        costs = np.where(speedups > 0, np.round(np.maximum(speedups, 1e-9) ** POWER, 2), np.inf)
        chosen = _solve(costs, self._configurations, settings, fixed)
        self._chosen = {jobs[i].name: index for i, index in chosen.items()}
        return self._place(settings)

    def _speedups(self, job: SimulatedJob, settings: SimulationSettings, now: float) -> Floats:
        """Return the goodput of each configuration in units of the smallest; 0 if it is not valid."""
        speedups = self._goodputs(job, settings)
        present = self._chosen.get(job.name)
        if present is not None:
            seconds = RESTART_SECONDS.get(job.application.name, DEFAULT_RESTART_SECONDS)
            age = now - job.submission.time
            trained = max(age - job.restarts * seconds, 0.0) / (age + seconds) if age >= seconds else 1.0
            kept = speedups[present]
            speedups = speedups * trained
            speedups[present] = kept
        return speedups

    def _goodputs(self, job: SimulatedJob, settings: SimulationSettings) -> Floats:
        types = list(settings.nodes_by_type())
        models = {name: self._model(job, name) for name in types}
        measured = next((name for name in types if models[name] is not None), None)
        if job.report is None or measured is None:
            return np.array([float(each.gpus == 1) for each in self._configurations])
        estimate = GradientEstimate(job.report.grad_sqr, job.report.grad_var)
        most = self._most_replicas(job)
        goodputs = np.zeros(len(self._configurations))
        for name in types:
            indices = [
                i for i, each in enumerate(self._configurations) if each.type == name and each.gpus <= most
            ]
            model, source, ratio = models[name], name, 1.0
            if model is None:
                model, source = models[measured], measured
                ratio = self._speed(job, name) / self._speed(job, measured)
            assert model is not None
            size = max(settings.nodes[node] for node in settings.nodes_by_type()[source])
            gpus = np.array([float(self._configurations[i].gpus) for i in indices])
            found, _, _ = best_batches(
                job.application_on(source),
                model,
                estimate,
                np.ceil(gpus / size),
                gpus,
                job.submission.batch_size,
            )
            goodputs[indices] = found * ratio
        usable = goodputs > 0
        normalized: Floats = goodputs / goodputs[usable].min()
        return normalized

    def _most_replicas(self, job: SimulatedJob) -> int:
        """Return twice as many as were measured on any type, and no more than the batch allows."""
        application = job.submission.application
        bounds = application.bounds
        largest = max((each.replicas for each in job.step_times), default=0)
        most = (bounds.max_batch_size or job.submission.batch_size) // bounds.lower
        return max(min(max(2 * largest, 1), MAX_COUNT, most, application.max_replicas or most), 1)

    def _speed(self, job: SimulatedJob, name: str) -> float:
        """Return the samples per second of one GPU with the largest batch, which are measured beforehand."""
        application = job.application_on(name)
        key = application.name, name
        if key not in self._speeds:
            size = application.bounds.upper or application.bounds.batch_size
            self._speeds[key] = size / application.step_time((1,), size)[0]
        return self._speeds[key]

    def _model(self, job: SimulatedJob, name: str) -> StepTimeModel | None:
        """Return the model that is fitted to what a job has measured on a type; None without measurements."""
        measured = [each for each in job.step_times if each.accelerator == name]
        key = job.name, name
        if measured and (key not in self._models or self._models[key][0] != len(measured)):
            model = StepTimeModel.fit(measured)
            assert model is not None
            self._models[key] = len(measured), model
        return self._models[key][1] if key in self._models else None

    def _place(self, settings: SimulationSettings) -> dict[str, tuple[int, ...]]:
        """Return the nodes of each job, the largest jobs first: powers of two and whole nodes always fit."""
        free = list(settings.nodes)
        nodes_of = settings.nodes_by_type()
        placed = {}
        for name in sorted(self._chosen, key=lambda each: -self._configurations[self._chosen[each]].gpus):
            wanted = self._configurations[self._chosen[name]]
            share = wanted.gpus // wanted.nodes
            used = [node for node in nodes_of[wanted.type] if free[node] >= share][: wanted.nodes]
            for node in used:
                free[node] -= share
            placed[name] = tuple(node for node in used for _ in range(share))
        return placed

    def plan(self, job: SimulatedJob) -> BatchPlan:
        """Return the batch plan that the trainer chooses."""
        application, replicas = job.application, len(job.training_nodes)
        model = self._model(job, job.accelerator)
        if job.report is None or model is None:
            least = max(application.bounds.batch_size, application.bounds.lower * replicas)
            return fixed_plan(application, replicas, least)
        estimate = GradientEstimate(job.report.grad_sqr, job.report.grad_var)
        most = application.bounds.max_batch_size or application.bounds.batch_size
        nodes = np.array([float(len(set(job.training_nodes)))])
        _, local_bsz, accumulation = best_batches(
            application, model, estimate, nodes, np.array([float(replicas)]), most
        )
        count = replicas * int(accumulation[0])
        return BatchPlan(replicas, min(int(local_bsz[0]), most // count), int(accumulation[0]))


def best_batches(
    application: Application,
    model: StepTimeModel,
    estimate: GradientEstimate,
    nodes: Floats,
    replicas: Floats,
    most: int,
) -> tuple[Floats, Floats, Floats]:
    """Return the best goodput, local batch size and accumulation of each configuration; goodput
    0 for none.
    """
    bounds = application.bounds
    upper = bounds.upper or most
    least = np.maximum(bounds.batch_size, bounds.lower * replicas)
    share = np.geomspace(least, np.full_like(least, most), BATCH_SIZES) / replicas
    accumulation = np.maximum(np.ceil(share / upper - ROUNDING), 1.0)
    is_larger = (replicas == 1) & (share > bounds.batch_size + ROUNDING)
    accumulation = np.where(is_larger, np.maximum(accumulation, 2.0), accumulation)
    local_bsz = np.ceil(share / accumulation - ROUNDING)
    scale = replicas * local_bsz * accumulation / bounds.batch_size
    sqr, var = estimate.grad_sqr, estimate.grad_var
    gain = (var + sqr) / (var / scale + sqr)
    goodput = gain / _step_times(model, nodes, replicas, local_bsz, accumulation)
    goodput = np.where((bounds.lower <= local_bsz) & (local_bsz <= upper), goodput, 0.0)
    best = goodput.argmax(axis=0), np.arange(len(replicas))
    return goodput[best], local_bsz[best], accumulation[best]


def _step_times(
    model: StepTimeModel, nodes: Floats, replicas: Floats, local_bsz: Floats, accumulation: Floats
) -> Floats:
    """Return the seconds of an optimizer step."""
    compute = model.fixed + model.per_sample * local_bsz
    sync = np.array([model.sync_time(int(k), int(n)) for k, n in zip(replicas, nodes, strict=True)])
    larger, smaller = np.maximum(compute, sync), np.minimum(compute, sync)
    last = larger * (1 + (smaller / larger) ** model.overlap) ** (1 / model.overlap)
    step_times: Floats = (accumulation - 1) * compute + last
    return step_times


def _solve(
    costs: Floats,
    configurations: Sequence[Configuration],
    settings: SimulationSettings,
    fixed: Mapping[int, int],
) -> dict[int, int]:
    """Return the index of a job -> that of its configuration, of the jobs that get one."""
    for i, index in fixed.items():
        costs[i, index] = min(costs[i, index], NOT_ALLOCATED)
    jobs, indices = np.nonzero(costs <= NOT_ALLOCATED)
    if not len(jobs):
        return {}
    types = list(settings.nodes_by_type())
    totals = [sum(settings.nodes[node] for node in nodes) for nodes in settings.nodes_by_type().values()]
    variables = np.arange(len(jobs))
    rows = len(costs) + np.array([types.index(configurations[int(i)].type) for i in indices])
    weights = np.array([configurations[int(i)].gpus for i in indices])
    matrix = scipy.sparse.csr_matrix(
        (
            np.concatenate([np.ones(len(jobs)), weights]),
            (np.concatenate([jobs, rows]), np.concatenate([variables, variables])),
        ),
        shape=(len(costs) + len(types), len(jobs)),
    )
    lower = np.array([float(fixed.get(int(i)) == index) for i, index in zip(jobs, indices, strict=True)])
    found = scipy.optimize.milp(
        costs[jobs, indices] - NOT_ALLOCATED,
        integrality=np.ones(len(jobs)),
        bounds=scipy.optimize.Bounds(lower, np.ones(len(jobs))),
        constraints=scipy.optimize.LinearConstraint(matrix, -np.inf, [1.0] * len(costs) + totals),
        options={"mip_rel_gap": GAP},
    )
    if found.x is None:
        raise AdaScaleError(f"the integer program of sia has no solution: {found.message}")
    return {int(jobs[i]): int(indices[i]) for i in np.nonzero(found.x > 0.5)[0]}
