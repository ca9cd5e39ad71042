"""A job as the decision sees it, what was observed of it before, and the nodes that it competes for."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from types import MappingProxyType
from typing import Any

from adascale_controller.formatting import plural
from adascale_controller.job.failing_counts import FailingCounts
from adascale_controller.job.placement_backoff import startable
from adascale_controller.job.reasons import Reason
from adascale_controller.operator.observe.adascalejob import AdaScaleJob, digest_of
from adascale_controller.operator.observe.observed_job import ObservedJob
from adascale_controller.operator.observe.pods import Pod, failed_pods, program_failures
from adascale_controller.operator.schedule.nodes import free_nodes, pod_request
from adascale_controller.operator.schedule.quota import quota_limit
from adascale_controller.operator.types.kubernetes import ApiObject
from adascale_controller.schedule.capacity_requests import CapacityRequests
from adascale_controller.schedule.measurements import TemplateMeasurements, training_target
from adascale_controller.schedule.memory import JobMemory, Limit, lowest
from adascale_core.decision.decide import Contender, Decision, Solution, TypedDemands
from adascale_core.decision.job_utility import JobState
from adascale_core.placement.capacity import NodeCapacity
from adascale_core.placement.packing import Node
from adascale_core.views.jobs import JobView


class PodMemory(JobMemory):
    """What is remembered of a job on pods, and, while it may run, of the decisions about it.

    A restarted operator measures it again. Only the count that is given up is read from the status, because
    trying it again would cost a failure of the program.
    """

    observed: ObservedJob
    """The job as it was last observed."""
    contender: Contender
    """The job as the decision sees it."""
    reported: tuple[object, ...]
    """What jobs of its template had reported when `contender` was computed."""

    def __init__(self) -> None:
        super().__init__()
        self.begin()
        self.requests = CapacityRequests()
        self._early_failures: set[str] = set()
        """The pods whose program has failed before it joined a generation."""
        self.digest: str | None = None
        """The digest of the template of `failing_counts`."""
        self.request: Mapping[str, int] = MappingProxyType({})
        """What a pod requests."""
        self._generation = -1
        """The generation of the AdaScaleJob of whose template jobs are measured."""
        self._spec: ApiObject | None = None
        """The PodSpec of which `request` was computed."""

    def begin(self) -> None:
        """Begin to follow decisions: the job may run from now on."""
        self.requested: int | None = None
        """The count that is being requested since the job was observed."""
        self.standing: Decision | None = None
        """The last decision about it, as it was made."""
        self.present_type: str | None = None
        """The type on which its replicas were when that was made."""
        self.is_postponed = False
        """Whether it may request more than fits once fewer others do, and what fits is on nodes."""
        self.granted_after = inf
        """When its request has succeeded, on the monotonic clock."""
        self.held_since: float | None = None
        """Since when it waits for replicas of jobs of lower priority to leave, in seconds since 1970."""

    def observe_spec(self, job: ObservedJob, templates: TemplateMeasurements) -> None:
        """Record a job, what a pod of it requests, and the template that it belongs to."""
        self.observed = job
        if self._spec is not job.pod_spec:
            self._spec, self.request = job.pod_spec, pod_request(job.pod_spec)
        if self._generation != job.resource.generation:
            self._generation = job.resource.generation
            self.measurements.template = templates.of(_program(job.resource))

    @property
    def growth_priority(self) -> int:
        """The priority of the pods that it gets or loses next, beyond its smallest count."""
        extra, core, state = self.observed.admission.extra_priority, self.observed.core, self.contender.state
        return state.priority if extra is None or core is None or state.replicas < core else extra

    def observe(self, types: TypedDemands, fitting: Callable[[], int]) -> None:
        """Record the state of the job."""
        observed, view, now = self.observed, self.observed.view, time.monotonic()
        self.measurements.update(view, now)
        if self.digest != observed.digest:
            # The program is another, or the operator has been restarted.
            self.failing_counts = FailingCounts(observed.recorded_failing_count)
            self.digest = observed.digest
        self.observe_deadline(observed.resource.deadline, observed.now, now)
        self._observe_failures(observed, view)
        self._observe_placement(observed, view, types, fitting)

    def _observe_failures(self, observed: ObservedJob, view: JobView) -> None:
        self.failing_counts.update(view)
        self._early_failures &= {pod.uid for pod in observed.pods}
        ended = zip(failed_pods(observed.pods), program_failures(observed.pods), strict=True)
        for pod, failure in ended:
            if not failure.is_reported:
                continue
            if not failure.generation:
                # It names no count itself, so only news of the present program count.
                is_old = pod.uid in self._early_failures or pod.rank in observed.live_pods
                self._early_failures.add(pod.uid)
                if is_old or pod.template not in (None, observed.digest):
                    continue
            self.failing_counts.fail(failure, view)

    def _observe_placement(
        self, observed: ObservedJob, view: JobView, types: TypedDemands, fitting: Callable[[], int]
    ) -> None:
        current = observed.current_allocation
        live, errors = observed.live_pods, observed.agent_errors
        spares = observed.spares
        ready = {rank for rank, pod in live.items() if pod.is_placed and rank not in errors}
        placed = startable(ready, spares)
        self.requests.update(placed, observed.now)
        if observed.admission.has_quota:
            self.backoff.allow(Reason.QUOTA_EXCEEDED, observed.admission.asked_at)
        if current is None or current.replicas == 0:
            return
        problem = observed.placement_problem(current.indices, spares)
        # In a queue it waits as long as its quota allows. A request beyond the capacity has its own timeout.
        waits = {Reason.QUEUED, Reason.SCHEDULING_GATED}
        if self.requests.active is not None:
            waits.add(Reason.UNSCHEDULABLE)
        self.observe_placement(
            observed.resource.valid_job.declaration,
            view,
            current,
            placed,
            None if problem is None or problem.reason in waits else (problem.reason, problem.message),
            fitting,
            observed.now,
            accelerator=types.present if types.present in types.required else None,
        )


def _program(job: AdaScaleJob) -> str:
    """Return a key that is equal for jobs of a namespace that run the same program in the same way.

    Gradients are estimated for a batch size, so that is a part of the key. Jobs of another namespace do not
    influence the decision.
    """
    return digest_of([job.namespace, job.valid_job.spec.batch_size, job.template])


def make_contender(memory: PodMemory, types: TypedDemands, fitting: Callable[[], int]) -> Contender:
    """Return a job as the decision sees it. Changes nothing."""
    observed = memory.observed
    job, view = observed.resource.valid_job, observed.view
    spec, measured = job.declaration, memory.measurements
    target = training_target(spec, view)
    state = measured.job_state(job.id, spec, view, target)
    on_types = {
        name: measured.job_state(job.id, spec, view, target, name) if name in types.required else state
        for name in types.by_type
    }
    limit, reason = lowest(
        [
            (job.spec.replica_limit, f"spec.replicaLimit is {job.spec.replica_limit}"),
            _limit_of_extra_pods(observed),
            *memory.limits(fitting, observed.now),
            quota_limit(observed),
            _limit_beside_spares(observed, fitting),
        ]
    )
    current, requested = observed.current_allocation, memory.requested
    trains_current = view.desired == current and observed.training_replicas > 0
    replicas = current.replicas if current is not None else 0

    def completed(state: JobState, **of_type: Any) -> JobState:
        return replace(
            state,
            arrival=float(observed.resource.created_at),
            priority=observed.priority,
            preempts=observed.pod_spec.get("preemptionPolicy") != "Never",
            deadline=memory.deadline,
            replicas=replicas if requested is None else requested,
            stable_since=state.stable_since if trains_current and requested is None else None,
            limit=limit,
            limit_reason=reason,
            **of_type,
        )

    states = {
        name: completed(each, accelerator=name, moves=types.present is not None and name != types.present)
        for name, each in on_types.items()
    }
    return Contender(completed(state), types, states)


def _limit_of_extra_pods(observed: ObservedJob) -> Limit:
    """Return the largest count if no extra pods are made. Those that run are not affected."""
    problem = observed.extra_pods_problem
    if problem is None:
        return None, ""
    core = observed.resource.valid_job.core_replicas
    return max(core, observed.training_replicas), f"no extra pods are made: {problem}"


def _limit_beside_spares(observed: ObservedJob, fitting: Callable[[], int]) -> Limit:
    """Return the largest count beside which the missing spares fit, but not less than the job has.

    So spares keep a job from growing, and a job on too few nodes trains without them. Spares that are on
    nodes take their places from all jobs (`Resources.free`).
    """
    if not observed.missing_spares:
        return None, ""
    job, current = observed.resource.valid_job, observed.current_allocation
    replicas = current.replicas if current is not None else 0
    limit = max(fitting() - observed.missing_spares, replicas, job.core_replicas)
    return limit, f"beside {plural(job.spec.spare_replicas, 'spare')}"


@dataclass(frozen=True)
class SparePods:
    """The spares of a job that are on nodes, and so take what they request."""

    request: Mapping[str, int]
    nodes: Sequence[str]


@dataclass(eq=False)
class Resources:
    """The nodes and the pods on them that a decision can't change."""

    nodes: Sequence[ApiObject] | None
    pods: Sequence[Pod]
    spares: Collection[SparePods] = ()

    def with_spares(self, spares: Collection[SparePods]) -> Resources:
        """Return the same with other spares. What the other pods take is not computed again."""
        changed = copy(self)
        changed.spares = spares
        vars(changed).pop("free", None)
        return changed

    @cached_property
    def free(self) -> Sequence[Node] | None:
        """The nodes with their free resources."""
        return None if self.nodes is None else self._beside_spares(self._beside_pods)

    @cached_property
    def _beside_pods(self) -> Sequence[Node]:
        """The nodes with what the pods leave."""
        return free_nodes(self.nodes or (), self.pods)

    def free_below(self, priority: int) -> Sequence[Node]:
        """Return the nodes as if no pod of a lower priority were on them that no decision changes."""
        pods = [pod for pod in self.pods if (pod.priority or 0) >= priority]
        return self._beside_spares(free_nodes(self.nodes or (), pods))

    def _beside_spares(self, free: Sequence[Node]) -> Sequence[Node]:
        taken: dict[str, Counter[str]] = {}
        for spares in self.spares:
            for node in spares.nodes:
                taken.setdefault(node, Counter()).update(spares.request)
        return [_without(node, taken[node.name]) if node.name in taken else node for node in free]

    @cached_property
    def lowest_priority(self) -> int | None:
        """The lowest priority of those pods that are on a node. None if there are none."""
        return min((pod.priority or 0 for pod in self.pods if pod.node), default=None)

    def places(self, contenders: Iterable[Contender]) -> Sequence[Node] | int:
        """Return the free nodes, or where they are not known, how many replicas there can be."""
        return sum(each.state.max_replicas for each in contenders) if self.free is None else self.free


def _without(node: Node, taken: Mapping[str, int]) -> Node:
    return replace(node, free={name: units - taken.get(name, 0) for name, units in node.free.items()})


def find_preempting(
    contenders: Iterable[Contender], solution: Solution, resources: Resources
) -> frozenset[str]:
    """Return the jobs without replicas whose smallest count fits if pods of lower priority are preempted."""
    lowest, decisions = resources.lowest_priority, solution.decisions
    counts = {job_id: decision.replicas for job_id, decision in decisions.items() if decision.replicas}
    found: set[str] = set()
    free: dict[int, Sequence[Node]] = {}
    for contender in sorted(contenders, key=lambda each: each.state.admission_order):
        state, smallest = contender.state, contender.smallest
        if not decisions[state.id].waiting or not state.preempts or smallest is None:
            continue
        if lowest is None or state.priority <= lowest:
            continue
        if state.priority not in free:
            free[state.priority] = resources.free_below(state.priority)
        if NodeCapacity(free[state.priority], solution.demands).fits(counts | {state.id: smallest}):
            counts[state.id] = smallest
            found.add(state.id)
    return frozenset(found)
