"""Chooses the replica counts of all jobs at once."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType

from adascale_controller.explanation_schedule import ExplanationSchedule
from adascale_controller.failing_counts import FailingCount, FailingCounts
from adascale_controller.measurements import JobMeasurements, TemplateMeasurements, training_target
from adascale_controller.operator.observe.adascalejob import AdaScaleJob
from adascale_controller.operator.observe.failed_pods import failed_pods
from adascale_controller.operator.observe.observed_job import ObservedJob
from adascale_controller.operator.schedule.node_selection import NodeSelection
from adascale_controller.operator.schedule.nodes import free_nodes, pod_request
from adascale_controller.operator.schedule.placement_backoff import PlacementBackoff
from adascale_controller.operator.types.actions import FailedPlacement, Isolation
from adascale_controller.operator.types.kubernetes import ApiObject
from adascale_core.batch import valid_replicas
from adascale_core.capacity import Capacity, NodeCapacity, ReplicaCapacity
from adascale_core.decision import Decision, DecisionProblem
from adascale_core.exit_codes import ExitClass, classify_exit, describe_exit
from adascale_core.explanation import explain
from adascale_core.job_state import JobState
from adascale_core.packing import Demand
from adascale_core.views import DecisionView, JobView


@dataclass
class _JobMemory:
    """The scheduler's state of one job. A restarted operator measures it again."""

    measurements: JobMeasurements = field(default_factory=JobMeasurements)
    backoff: PlacementBackoff = field(default_factory=PlacementBackoff)
    failing_counts: FailingCounts = field(default_factory=FailingCounts)
    request: tuple[int, Mapping[str, int]] = (-1, MappingProxyType({}))
    """What a pod requests, and the generation of the AdaScaleJob for which that was computed."""


class Scheduler:
    """Chooses the replica counts of all jobs that may run."""

    def __init__(self) -> None:
        self._memories: dict[str, _JobMemory] = {}
        self._templates = TemplateMeasurements()
        self._node_selection = NodeSelection()
        self._explanations = ExplanationSchedule()
        self.explained: dict[str, DecisionView] = {}
        """Decisions of the last `schedule` to store with the metrics service, by job id."""

    def retain(self, uids: Collection[str]) -> None:
        """Drop the memory of all AdaScaleJobs with other uids."""
        self._memories = {uid: memory for uid, memory in self._memories.items() if uid in uids}

    def failed_placement(self, job: ObservedJob) -> FailedPlacement | None:
        """Return the count of a job that could not be placed and may not be scheduled yet."""
        memory = self._memories.get(job.resource.uid)
        return memory.backoff.failed_placement(job.now) if memory is not None else None

    def failing_count(self, job: ObservedJob) -> FailingCount | None:
        """Return the count on which the program of a job fails at once; None if there is none."""
        memory = self._memories.get(job.resource.uid)
        return memory.failing_counts.given_up if memory is not None else None

    def schedule(
        self,
        jobs: Iterable[ObservedJob],
        nodes: Sequence[ApiObject] | None,
        pods: Sequence[ApiObject],
        isolation: Isolation,
    ) -> dict[str, Decision]:
        """Return the replica count of each job, by job id. A job whose state can't be computed has none.

        Args:
            jobs: the jobs that may run.
            nodes: all nodes. None if the operator may not read nodes.
            pods: all pods of the cluster.
            isolation: handles the errors of a single job.
        """
        jobs_by_id = {job.resource.id: job for job in jobs}
        demands = {}
        self._node_selection.update(nodes or ())
        for job_id, job in jobs_by_id.items():
            with isolation(job_id):
                demands[job_id] = self._demand(job)
        capacity: Capacity
        if nodes is None:
            max_replicas = (job.resource.valid_job.spec.max_replicas for job in jobs_by_id.values())
            capacity = ReplicaCapacity(sum(max_replicas))
        else:
            capacity = NodeCapacity(free_nodes(nodes, pods, demands), demands)
        states = []
        for job_id in demands:
            with isolation(job_id):
                states.append(self._state(jobs_by_id[job_id], capacity))
        # Durations are measured on the monotonic clock, so the decision gets its time from it too.
        now = time.monotonic()
        problem = DecisionProblem.of(states, capacity)
        decisions = problem.decide(now)
        for state in states:
            cap, decision = jobs_by_id[state.id].resource.valid_job.replicas, decisions[state.id]
            failing = self.failing_count(jobs_by_id[state.id])
            if state.limit is None or decision.replicas >= state.replicas:
                continue
            if state.limit == cap:
                decisions[state.id] = replace(decision, reason=f"spec.replicas is {cap}")
            elif failing is not None and state.limit == failing.limit:
                decisions[state.id] = replace(decision, reason=str(failing))
        due = self._explanations.due(decisions, now)
        self.explained = explain(problem, now, decisions=decisions, time=time.time(), only=due) if due else {}
        return decisions

    def _demand(self, observed: ObservedJob) -> Demand:
        """Return what a job requests of the nodes."""
        job = observed.resource
        pod_spec = job.template["spec"]
        memory = self._memories.setdefault(job.uid, _JobMemory())
        if memory.request[0] != job.generation:
            memory.request = (job.generation, pod_request(pod_spec))
            memory.measurements.template = self._templates.of(_program(job))
        return Demand(
            request=memory.request[1],
            nodes=self._node_selection.eligible(pod_spec),
            placed={rank: pod.node for rank, pod in observed.live_pods.items() if pod.node},
            one_node=observed.single_node,
        )

    def explain_again(self, job_id: str) -> None:
        """Have the decision about a job explained in the next cycle, since it could not be stored."""
        self._explanations.repeat(job_id)

    def _state(self, observed: ObservedJob, capacity: Capacity) -> JobState:
        """Return a job's state for the decision."""
        job, view = observed.resource.valid_job, observed.service or JobView.empty()
        memory = self._memories.setdefault(observed.resource.uid, _JobMemory())
        memory.measurements.update(view, time.monotonic())
        state = memory.measurements.job_state(job, view, training_target(job, view))
        current = observed.current_allocation
        trains_current = view.desired == current and observed.training_replicas > 0
        most = partial(capacity.max_replicas, job.id)  # Costly on many nodes, and rarely needed.
        _update_backoff(memory.backoff, observed, most)
        _update_failing_counts(memory.failing_counts, observed, view)
        limits = [job.replicas, memory.backoff.limit(most, observed.now), memory.failing_counts.limit]
        return replace(
            state,
            arrival=float(observed.resource.created_at),
            replicas=current.replicas if current is not None else 0,
            stable_since=state.stable_since if trains_current else None,
            limit=min((limit for limit in limits if limit is not None), default=None),
        )


def _program(job: AdaScaleJob) -> str:
    """Return a key that is equal for jobs of a namespace that run the same program in the same way.

    Gradients are estimated for a batch size, so that is a part of the key. Jobs of another namespace do not
    influence the decision.
    """
    parts = [job.namespace, job.valid_job.spec.batch_size, job.template]
    text = json.dumps(parts, sort_keys=True, default=dict)
    return hashlib.sha256(text.encode()).hexdigest()


def _update_failing_counts(counts: FailingCounts, observed: ObservedJob, view: JobView) -> None:
    counts.update(view)
    for pod in failed_pods(observed.own_pods):
        end = pod.exit
        if end is not None and end.exit_code is not None and end.termination is not None:
            failure = f"replica {pod.rank}: {describe_exit(end.exit_code)}"
            single = classify_exit(end.exit_code) is ExitClass.SINGLE_REPLICA_PROGRAM
            counts.fail(end.termination.generation, view, failure, at_once=single)


def _update_backoff(backoff: PlacementBackoff, observed: ObservedJob, capacity: Callable[[], int]) -> None:
    current = observed.current_allocation
    if current is None or current.replicas == 0:
        return
    problem = observed.placement_problem(range(current.replicas))
    live, refusals = observed.live_pods, observed.refusals
    placed = 0
    while placed in live and live[placed].is_placed and placed not in refusals:
        placed += 1
    spec = observed.resource.valid_job.spec
    if observed.service is not None:
        spec = spec.with_limit(observed.service.local_bsz_limit)
    backoff.update(
        generation=current.generation,
        count=current.replicas,
        training=observed.training_replicas,
        problem=(problem.reason, problem.message) if problem is not None else None,
        placed=placed,
        valid=lambda: [
            count for count in valid_replicas(spec.bounds, spec.max_replicas) if count >= spec.min_replicas
        ],
        capacity=capacity,
        now=observed.now,
    )
