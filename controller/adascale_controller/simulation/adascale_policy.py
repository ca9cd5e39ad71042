"""The policy `adascale`: the operator's decision, with the state of jobs built as the operator builds it.

The counts of the decision are placed onto nodes as a scheduler of Kubernetes would place the pods.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum

import numpy as np

from adascale_controller.schedule.measurements import JobMeasurements, TemplateMeasurements, training_target
from adascale_controller.simulation.application import Application, fixed_plan
from adascale_controller.simulation.engine import SimulatedJob, SimulationSettings
from adascale_core.batch.gain import GradientEstimate
from adascale_core.batch.plans import BatchPlan, plan_batch
from adascale_core.decision.decide import Contender, Solution, TypedDemands, decide
from adascale_core.decision.job_utility import JobState
from adascale_core.messages.allocation import ActiveAllocation, Allocation
from adascale_core.messages.job_spec import JobSpec, LocalBszLimit
from adascale_core.messages.reports import StepTime
from adascale_core.performance.goodput_table import goodputs
from adascale_core.performance.throughput import StepTimeModel, fit_all
from adascale_core.placement.packing import Demand, Node, choose_nodes
from adascale_core.views.jobs import JobView


class PlacementMode(StrEnum):
    """How new replicas are placed: `packed` by a scheduler that sees all new replicas of a job.

    `affinity` is the default scheduler of Kubernetes, one pod after the other, with a preference for the
    nodes of the job's other pods; `spread` is the same without this preference.
    """

    PACKED = "packed"
    AFFINITY = "affinity"
    SPREAD = "spread"


def place(
    present: Mapping[str, Sequence[int]],
    counts: Mapping[str, int],
    capacity: Sequence[int],
    mode: PlacementMode = PlacementMode.PACKED,
) -> dict[str, tuple[int, ...]]:
    """Return the nodes of the replicas of each job, by rank.

    Replicas that stay keep their node, those of the highest ranks stop first, and new replicas are placed
    job by job, those with the most new replicas first.
    """
    placed = {job: list(present.get(job, ()))[:count] for job, count in counts.items()}
    missing = {job: counts[job] - len(nodes) for job, nodes in placed.items() if counts[job] > len(nodes)}
    slots = np.array(capacity, dtype=np.int64)
    np.subtract.at(slots, [node for nodes in placed.values() for node in nodes], 1)
    for job, wanted in sorted(missing.items(), key=lambda item: -item[1]):
        nodes = placed[job]
        # The default scheduler places one pod after the other.
        for number in [wanted] if mode is PlacementMode.PACKED else [1] * wanted:
            own = [] if mode is PlacementMode.SPREAD else [node for node in nodes if slots[node] > 0]
            if mode is PlacementMode.PACKED:
                new = choose_nodes(slots, own, number)
            else:
                preferred = max(Counter(own).items(), key=lambda item: (item[1], -item[0]), default=None)
                emptiest = int(slots.argmax())
                new = {emptiest if preferred is None else preferred[0]: 1} if slots[emptiest] > 0 else None
            if new is None:
                raise ValueError(f"{sum(counts.values())} replicas do not fit on {len(capacity)} nodes")
            for node, count in new.items():
                slots[node] -= count
                nodes.extend([node] * count)
    return {job: tuple(nodes) for job, nodes in placed.items() if nodes}


GPU = "nvidia.com/gpu"


class AdaScalePolicy:
    """Decides with `adascale_core.decision.decide`, as the operator does."""

    def __init__(
        self, placement: PlacementMode = PlacementMode.PACKED, fairness: float | None = None
    ) -> None:
        self._placement = placement
        self._fairness = fairness
        self._templates = TemplateMeasurements()
        self._measurements: dict[str, JobMeasurements] = {}
        self._specs: dict[str, JobSpec] = {}
        self._nodes: list[Node] = []
        self._solution = Solution()
        self._demands: dict[tuple[str, str], tuple[tuple[int, ...], Demand]] = {}
        """Job name and type -> the nodes that it has there, and what it requests."""
        self._trainer_models: dict[str, tuple[Sequence[StepTime], str, StepTimeModel]] = {}
        """Job name -> the step times and the type of accelerator that a model is fitted to, and the model."""
        self._views: dict[str, tuple[object, JobView]] = {}
        """Job name -> what its last view depends on, and the view."""
        self._plans: dict[str, tuple[object, BatchPlan]] = {}
        """Job name -> what its last plan depends on, and the plan."""

    def allocate(
        self, jobs: Sequence[SimulatedJob], settings: SimulationSettings, now: float
    ) -> Mapping[str, tuple[int, ...]]:
        """Return job name -> node of each replica."""
        if not self._nodes:
            self._nodes = [
                Node(f"node-{i:06}", {GPU: units, "pods": 1_000_000})
                for i, units in enumerate(settings.nodes)
            ]
        contenders = [self._contender(job, settings, now) for job in jobs]
        self._solution = decide(contenders, self._nodes, now, self._solution, fairness=self._fairness)
        self._fit_trainer_models(jobs)
        assert self._solution.choice is not None
        types, decisions = self._solution.choice.types, self._solution.decisions
        placed: dict[str, tuple[int, ...]] = {}
        for name, nodes in settings.nodes_by_type().items():
            group = [job for job in jobs if types.get(job.name, "") == name]
            own = set(nodes)
            placed |= place(
                {job.name: job.nodes for job in group if settings.type_of(job.nodes) == name},
                # In the order of admission, in which equal jobs are placed.
                {job: each.replicas for job, each in decisions.items() if types.get(job, "") == name},
                [units if node in own else 0 for node, units in enumerate(settings.nodes)],
                self._placement,
            )
        return placed

    def _contender(self, job: SimulatedJob, settings: SimulationSettings, now: float) -> Contender:
        """Return a job as the decision sees it, with the types on which it may run if there are several."""
        types = settings.nodes_by_type() if settings.types else {}
        if not types:
            demand = self._demand(job, "", job.nodes, types)
            return Contender(self._state(job, settings, now), TypedDemands(demand))
        present = settings.type_of(job.nodes) if job.nodes else None
        states = {name: self._state(job, settings, now, name) for name in types}
        demands = {name: self._demand(job, name, job.nodes * (name == present), types) for name in types}
        name = next(iter(types))
        return Contender(states[name], TypedDemands(demands[name], demands, present=present), states)

    def _demand(
        self, job: SimulatedJob, name: str, nodes: tuple[int, ...], types: Mapping[str, Sequence[int]]
    ) -> Demand:
        """Return what the job requests on a type, the same object as before if its nodes are the same."""
        known = self._demands.get((job.name, name))
        if known is None or known[0] != nodes:
            placed = {rank: self._nodes[node].name for rank, node in enumerate(nodes)}
            among = frozenset(self._nodes[node].name for node in types[name]) if types else None
            known = self._demands[job.name, name] = nodes, Demand({GPU: 1}, among, placed)
        return known[1]

    def plan(self, job: SimulatedJob) -> BatchPlan:
        """Return the batch plan that the trainer chooses."""
        application, replicas = job.application, len(job.training_nodes)
        if application.pinned_batch_size is not None:
            return fixed_plan(application, replicas, application.pinned_batch_size)
        if job.report is None:
            return plan_batch(application.bounds, replicas)
        estimate = GradientEstimate(job.report.grad_sqr, job.report.grad_var)
        on_one_node = len(set(job.training_nodes)) < 2
        question = job.accelerator, replicas, on_one_node, estimate, job.step_times
        known = self._plans.get(job.name)
        if known is None or known[0] != question:
            if self._needs_fit(job):
                self._fit_trainer_models([job])
            if job.name not in self._trainer_models:
                # It has just moved to another type.
                return plan_batch(application.bounds, replicas)
            # The same plans and rules as `plan_batch`, which is slower.
            model = self._trainer_models[job.name][2]
            table = goodputs(application.bounds, (replicas,), estimate, model)
            known = self._plans[job.name] = question, table.plan(0, on_one_node=on_one_node)
        return known[1]

    def _needs_fit(self, job: SimulatedJob) -> bool:
        known = self._trainer_models.get(job.name)
        return bool(job.step_times) and (
            known is None or known[0] is not job.step_times or known[1] != job.accelerator
        )

    def _fit_trainer_models(self, jobs: Iterable[SimulatedJob]) -> None:
        """Fit the models of trainers that have measured another step time, or are on another type."""
        outdated = [job for job in jobs if self._needs_fit(job)]
        models = fit_all(
            [
                (tuple(each for each in job.step_times if each.accelerator == job.accelerator), ())
                for job in outdated
            ]
        )
        for job, model in zip(outdated, models, strict=True):
            if model is None:
                self._trainer_models.pop(job.name, None)
            else:
                self._trainer_models[job.name] = job.step_times, job.accelerator, model

    def _state(
        self, job: SimulatedJob, settings: SimulationSettings, now: float, accelerator: str | None = None
    ) -> JobState:
        """Return the state of a job, on a type of accelerator if types are distinguished."""
        if job.name not in self._specs:
            restart = settings.restart if job.submission.restart is None else job.submission.restart
            self._specs[job.name] = _spec(job, settings.total)
            self._measurements[job.name] = JobMeasurements(
                self._templates.of(job.application.name), restart, settings.prepare, restart
            )
        spec, measurements = self._specs[job.name], self._measurements[job.name]
        key = now, job.report, job.nodes
        if job.name not in self._views or self._views[job.name][0] != key:
            view = _view(job, spec)
            measurements.update(view, now)
            self._views[job.name] = key, view
        view = self._views[job.name][1]
        state = measurements.job_state(job.name, spec, view, training_target(spec, view), accelerator)
        is_training = job.replicas > 0 and now >= job.trains_from
        deadline = job.submission.deadline
        return replace(
            state,
            arrival=job.submission.time,
            replicas=job.replicas,
            stable_since=state.stable_since if is_training else None,
            accelerator=accelerator,
            moves=accelerator is not None and bool(job.nodes) and settings.type_of(job.nodes) != accelerator,
            deadline=deadline if deadline is not None and deadline > now else None,
        )


def _spec(job: SimulatedJob, total: int) -> JobSpec:
    application = job.application
    bounds = application.bounds
    most = _most_replicas(application, total)
    pair = bounds.local_bsz_bounds
    if pair is not None:
        # The memory of a type limits the local batch further, as `_view` says.
        uppers = [each.bounds.upper for each in job.submission.by_type.values()]
        pair = pair[0], max((upper for upper in uppers if upper is not None), default=pair[1])
    return JobSpec(
        bounds.batch_size,
        bounds.max_batch_size,
        pair,
        application.min_replicas,
        most,
        round(application.epoch_ends[-1]),
        elastic_single_replica=bounds.elastic_single_replica,
        local_bsz_limit=bounds.local_bsz_limit,
    )


def _most_replicas(application: Application, total: int) -> int:
    bounds = application.bounds
    most = total if bounds.max_batch_size is None else bounds.max_batch_size // bounds.lower
    return min(total, most if application.max_replicas is None else min(most, application.max_replicas))


def _view(job: SimulatedJob, spec: JobSpec) -> JobView:
    """Return what the metrics service would answer about a job."""
    desired = Allocation(job.generation, job.replicas) if job.generation else None
    return replace(
        JobView.empty(job.name),
        spec=spec,
        desired=desired,
        active=ActiveAllocation(job.generation, job.replicas) if job.generation else None,
        latest=job.report,
        step_times=job.step_times,
        local_bsz_limits=tuple(
            LocalBszLimit(name, application.bounds.upper)
            for name, application in job.submission.by_type.items()
            if application.bounds.upper is not None
        ),
    )
