"""The policy `adascale`: the operator's decision, with the state of jobs built as the operator builds it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from adascale_controller.job import Job
from adascale_controller.measurements import JobMeasurements, TemplateMeasurements, training_target
from adascale_controller.simulation.application import Application, fixed_plan
from adascale_controller.simulation.cluster import PlacementMode, place
from adascale_controller.simulation.engine import Settings, SimulatedJob
from adascale_core.batch.gain import GradientEstimate
from adascale_core.batch.plans import BatchBounds, BatchPlan, plan_batch
from adascale_core.decision.decide import DecisionProblem
from adascale_core.decision.job_state import JobState
from adascale_core.messages.allocation import ActiveAllocation, Allocation
from adascale_core.messages.job_spec import JobSpec
from adascale_core.messages.reports import StepTime
from adascale_core.performance.batched_fit import fit_all
from adascale_core.performance.goodput_table import PlanGrid, goodputs
from adascale_core.performance.throughput import StepTimeModel
from adascale_core.placement.capacity import NodeCapacity
from adascale_core.placement.packing import Demand, Node
from adascale_core.views.jobs import JobView

GPU = "nvidia.com/gpu"


class AdaScalePolicy:
    """Decides with `adascale_core.decision.decide.decide`, as the operator does.

    Args:
        placement: how new replicas are placed.
    """

    def __init__(self, placement: PlacementMode = PlacementMode.PACKED) -> None:
        self._placement = placement
        self._templates = TemplateMeasurements()
        self._measurements: dict[str, JobMeasurements] = {}
        self._jobs: dict[str, Job] = {}
        self._problems: Sequence[DecisionProblem] = ()
        self._capacity: NodeCapacity | None = None
        self._nodes: list[Node] = []
        self._demands: dict[str, tuple[tuple[int, ...], Demand]] = {}
        self._trainer_models: dict[str, tuple[Sequence[StepTime], StepTimeModel]] = {}
        self._plans: dict[str, tuple[object, BatchPlan]] = {}
        """Job name -> what its last plan depends on, and the plan."""
        self._grids: dict[tuple[BatchBounds, int], PlanGrid] = {}

    def allocate(
        self, jobs: Sequence[SimulatedJob], settings: Settings, now: float
    ) -> Mapping[str, tuple[int, ...]]:
        """Return job name -> node of each replica."""
        if not self._nodes:
            self._nodes = [
                Node(f"node-{i:06}", {GPU: units, "pods": 1_000_000})
                for i, units in enumerate(settings.nodes)
            ]
        demands = {job.name: self._demand(job) for job in jobs}
        self._capacity = NodeCapacity(self._nodes, demands, self._capacity)
        states = [self._state(job, settings, now) for job in jobs]
        problem = DecisionProblem.of(states, self._capacity, self._problems)
        self._problems = (problem,)
        counts = {name: decision.replicas for name, decision in problem.decide(now).items()}
        self._fit_trainer_models(jobs)
        present = {job.name: job.nodes for job in jobs}
        return place(present, counts, settings.nodes, self._placement)

    def _demand(self, job: SimulatedJob) -> Demand:
        """Return what the job requests, the same object as before if its nodes are the same."""
        known = self._demands.get(job.name)
        if known is None or known[0] != job.nodes:
            placed = {rank: self._nodes[node].name for rank, node in enumerate(job.nodes)}
            known = self._demands[job.name] = job.nodes, Demand({GPU: 1}, None, placed)
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
        question = replicas, on_one_node, estimate, job.step_times
        known = self._plans.get(job.name)
        if known is None or known[0] != question:
            if self._needs_fit(job):
                self._fit_trainer_models([job])
            # The same plans and rules as `plan_batch`, which is slower.
            key = application.bounds, replicas
            if key not in self._grids:
                self._grids[key] = PlanGrid.of(application.bounds, (replicas,))
            model = self._trainer_models[job.name][1]
            table = goodputs(application.bounds, (replicas,), estimate, model, self._grids[key])
            known = self._plans[job.name] = question, table.plan(0, on_one_node=on_one_node)
        return known[1]

    def _needs_fit(self, job: SimulatedJob) -> bool:
        known = self._trainer_models.get(job.name)
        return bool(job.step_times) and (known is None or known[0] is not job.step_times)

    def _fit_trainer_models(self, jobs: Iterable[SimulatedJob]) -> None:
        """Fit the models of trainers that have measured another step time."""
        outdated = [job for job in jobs if self._needs_fit(job)]
        models = fit_all([(job.step_times, ()) for job in outdated])
        for job, model in zip(outdated, models, strict=True):
            assert model is not None
            self._trainer_models[job.name] = job.step_times, model

    def _state(self, job: SimulatedJob, settings: Settings, now: float) -> JobState:
        if job.name not in self._jobs:
            self._jobs[job.name] = _job(job, settings.total)
            self._measurements[job.name] = JobMeasurements(
                self._templates.of(job.application.name), settings.restart, settings.prepare
            )
        spec, measurements = self._jobs[job.name], self._measurements[job.name]
        view = _view(job, spec)
        measurements.update(view, now)
        state = measurements.job_state(spec, view, training_target(spec, view))
        is_training = job.replicas > 0 and now >= job.trains_from
        return replace(
            state,
            arrival=job.submission.time,
            replicas=job.replicas,
            stable_since=state.stable_since if is_training else None,
        )


def _job(job: SimulatedJob, total: int) -> Job:
    application = job.application
    bounds = application.bounds
    most = _most_replicas(application, total)
    return Job(
        f"{job.name}",
        JobSpec(
            bounds.batch_size,
            bounds.max_batch_size,
            bounds.local_bsz_bounds,
            application.min_replicas,
            most,
            round(application.epoch_ends[-1]),
            elastic_single_replica=bounds.elastic_single_replica,
            local_bsz_limit=bounds.local_bsz_limit,
        ),
    )


def _most_replicas(application: Application, total: int) -> int:
    if application.max_replicas is not None:
        return min(application.max_replicas, total)
    most = application.bounds.max_batch_size
    return total if most is None else min(total, most // application.bounds.lower)


def _view(job: SimulatedJob, spec: Job) -> JobView:
    """Return what the metrics service would answer about a job."""
    desired = Allocation(job.generation, job.replicas) if job.generation else None
    return replace(
        JobView.empty(spec.id),
        spec=spec.spec,
        desired=desired,
        active=ActiveAllocation(job.generation, job.replicas) if job.generation else None,
        latest=job.report,
        step_times=job.step_times,
    )
