"""A job as the decision sees it, what was observed of it before, and the nodes that it competes for."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from adascale_controller.formatting import plural
from adascale_controller.job.failing_counts import FailingCounts
from adascale_controller.job.placement_backoff import PlacementBackoff, startable
from adascale_controller.job.reasons import Reason
from adascale_controller.operator.observe.adascalejob import AdaScaleJob
from adascale_controller.operator.observe.observed_job import ObservedJob
from adascale_controller.operator.observe.pods import Pod, failed_pods, program_failures
from adascale_controller.operator.schedule.nodes import TypedDemands, free_nodes, pod_request
from adascale_controller.operator.schedule.quota import describe_quota, quota_limit
from adascale_controller.operator.types.kubernetes import ApiObject
from adascale_controller.schedule.capacity_requests import CapacityRequests
from adascale_controller.schedule.cycle import Contender, Solution
from adascale_controller.schedule.measurements import JobMeasurements, TemplateMeasurements, training_target
from adascale_core.decision.decide import Decision
from adascale_core.decision.job_utility import JobState
from adascale_core.decision.type_choice import Accelerator, TypeChoice, TypeOptions
from adascale_core.performance.goodput_table import candidate_counts
from adascale_core.placement.capacity import NodeCapacity
from adascale_core.placement.packing import Demand, Node
from adascale_core.views.jobs import JobView


class JobMemory:
    """What the scheduler has observed of one job.

    A restarted operator measures it again. Only the count that is given up is read from the status, because
    trying it again would cost a failure of the program.
    """

    def __init__(self) -> None:
        self.measurements = JobMeasurements()
        self.backoff = PlacementBackoff()
        self.requests = CapacityRequests()
        self.failing_counts = FailingCounts()
        self._early_failures: set[str] = set()
        """The pods whose program has failed before it joined a generation."""
        self.digest: str | None = None
        """The digest of the template of `failing_counts`."""
        self.request: Mapping[str, int] = MappingProxyType({})
        """What a pod requests."""
        self.deadline: float | None = None
        """The deadline of the job on the monotonic clock; None if it has none, or if it has passed."""
        self._due: float | None = None
        """The deadline in seconds since 1970, of which `deadline` was computed."""
        self._generation = -1
        """The generation of the AdaScaleJob of whose template jobs are measured."""
        self._spec: ApiObject | None = None
        """The PodSpec of which `request` was computed."""

    def observe_spec(self, job: ObservedJob, templates: TemplateMeasurements) -> None:
        """Record what a pod of a job requests, and the template that it belongs to."""
        if self._spec is not job.pod_spec:
            self._spec, self.request = job.pod_spec, pod_request(job.pod_spec)
        if self._generation != job.resource.generation:
            self._generation = job.resource.generation
            self.measurements.template = templates.of(_program(job.resource))

    def observe(self, observed: ObservedJob, types: TypedDemands, fitting: Callable[[], int]) -> None:
        """Record the state of a job."""
        view = observed.view
        self.measurements.update(view, time.monotonic())
        if self.digest != observed.digest:
            # The program is another, or the operator has been restarted.
            self.failing_counts = FailingCounts(observed.recorded_failing_count)
            self.digest = observed.digest
        self._observe_deadline(observed)
        self._observe_failures(observed, view)
        self._observe_placement(observed, view, types, fitting)

    def _observe_deadline(self, observed: ObservedJob) -> None:
        due = observed.resource.deadline
        if due is not None and due <= observed.now:
            due = None
        if due != self._due:
            # Once, since the clocks differ a little at each reading.
            self.deadline = None if due is None else time.monotonic() + due - observed.now
            self._due = due

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
        current, spec = observed.current_allocation, observed.resource.valid_job.spec
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
        if (
            problem is not None
            and problem.reason is Reason.UNSCHEDULABLE
            and self.requests.active is not None
        ):
            # It does not fit yet, and that has a timeout of its own.
            problem = None
        if problem is not None and problem.reason in {Reason.QUEUED, Reason.SCHEDULING_GATED}:
            # It waits in a queue, as long as its quota allows it.
            problem = None

        def valid() -> Sequence[int]:
            present = types.by_type[types.present].accelerator if types.present is not None else None
            accelerator = present.type if present is not None and present.required else None
            bounds = spec.bounds.with_limit(view.local_bsz_limit_on(accelerator))
            return candidate_counts(bounds, spec.min_replicas, spec.max_replicas)

        self.backoff.update(
            generation=current.generation,
            count=current.replicas,
            training=observed.training_replicas,
            problem=(problem.reason, problem.message) if problem is not None else None,
            placed=placed,
            valid=valid,
            capacity=fitting,
            now=observed.now,
        )


def _program(job: AdaScaleJob) -> str:
    """Return a key that is equal for jobs of a namespace that run the same program in the same way.

    Gradients are estimated for a batch size, so that is a part of the key. Jobs of another namespace do not
    influence the decision.
    """
    parts = [job.namespace, job.valid_job.spec.batch_size, job.template]
    text = json.dumps(parts, sort_keys=True, default=dict)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Candidate:
    """A job that may run, as the decision sees it."""

    observed: ObservedJob
    demand: Demand  # what it requests of the nodes, of any type of accelerator
    # its state, on the type on which it was measured last, with the limit of the local batch size of its
    # replicas
    state: JobState
    types: TypedDemands  # the types of accelerators that it may run on
    states: Mapping[str, JobState]
    template: tuple[object, ...]  # what jobs of its template had reported when the state was computed
    limit_reason: str | None  # why it has `state.limit`; None if the decision has a better reason

    def demand_on(self, accelerator: str | None) -> Demand:
        """Return what it requests if it runs on a type of accelerator. None if it is not tied to a type."""
        return self.demand if accelerator is None else self.types.by_type[accelerator].demand

    def state_on(self, accelerator: str | None) -> JobState:
        """Return its state on a type of accelerator. None if it is not tied to a type."""
        return self.state if accelerator is None else self.states[accelerator]

    def decided_state(self, decision: Decision | None) -> JobState:
        """Return its state on the type of a decision, if it may run on that now."""
        return self.state_on(self.decided_type(decision))

    def decided_type(self, decision: Decision | None) -> str | None:
        """Return the type of a decision. None if it has none, or none on which the job may run now."""
        accelerator = decision.accelerator if decision is not None else None
        name = accelerator.type if accelerator is not None else None
        return name if name in self.types.by_type else None

    @property
    def growth_priority(self) -> int:
        """The priority of the pods that it gets or loses next, beyond its smallest count."""
        extra = self.observed.admission.extra_priority
        core = self.observed.core
        return self.state.priority if extra is None or core is None or self.state.replicas < core else extra

    @property
    def smallest(self) -> int | None:
        """The smallest valid count. None if no count is valid."""
        counts = candidate_counts(self.state.bounds, self.state.min_replicas, self.state.max_replicas)
        return counts[0] if counts else None

    @cached_property
    def contender(self) -> Contender:
        """It as the decision compares it: with the types on which a count is valid."""
        smallest = {}
        for name, state in self.states.items():
            counts = candidate_counts(state.bounds, state.min_replicas, state.max_replicas)
            if counts:
                smallest[name] = counts[0]
        demands = {name: self.types.by_type[name].demand for name in smallest}
        states = {name: self.states[name] for name in smallest}
        options = TypeOptions(self.state.id, smallest, demands, self.types.present, states)
        return Contender(self.state, self.demand, options)

    def explained(self, decision: Decision, choice: TypeChoice | None) -> Decision:
        """Return a decision about it with the type that was chosen, and with why it has to shrink."""
        if choice is not None:
            name = choice.types.get(self.state.id)
            accelerator = Accelerator() if name is None else self.types.by_type[name].accelerator
            decision = replace(decision, accelerator=accelerator)
        if self.limit_reason is not None and decision.replicas < self.state.replicas:
            decision = replace(decision, reason=self.limit_reason)
        return decision

    def has_same_demand(self, other: Candidate) -> bool:
        """Whether two candidates request the same, apart from the nodes and the type of their replicas."""

        def compared(each: Candidate) -> object:
            types = {
                name: (typed.accelerator, typed.demand.nodes) for name, typed in each.types.by_type.items()
            }
            return replace(each.demand, placed={}), types

        return compared(self) == compared(other)


def make_candidate(
    observed: ObservedJob,
    memory: JobMemory,
    demand: Demand,
    types: TypedDemands,
    fitting: Callable[[], int],
    requested: int | None,
) -> Candidate:
    """Return a job as the decision sees it. Changes nothing."""
    job, view = observed.resource.valid_job, observed.view
    target, measured = training_target(job, view), memory.measurements
    state = measured.job_state(job, view, target)
    on_types = {
        name: measured.job_state(job, view, target, name) if each.accelerator.required else state
        for name, each in types.by_type.items()
    }
    failing = memory.failing_counts.given_up
    extra = observed.extra_pods_problem
    # Extra pods that run are not affected.
    extra_limit = max(job.core_replicas, observed.training_replicas) if extra is not None else None
    quota, current = quota_limit(observed), observed.current_allocation
    backoff = memory.backoff.limit(fitting, observed.now)
    spares_limit = _limit_beside_spares(observed, fitting) if observed.missing_spares else None
    limits = [
        extra_limit,
        job.replica_limit,
        backoff,
        memory.failing_counts.limit,
        quota,
        spares_limit,
    ]
    limit = min((limit for limit in limits if limit is not None), default=None)
    limit_reason = None
    if limit is not None and limit == job.replica_limit:
        limit_reason = f"spec.replicaLimit is {limit}"
    elif extra is not None and limit == extra_limit:
        limit_reason = f"no extra pods are made: {extra}"
    elif failing is not None and limit == failing.limit:
        limit_reason = str(failing)
    elif quota is not None and limit == quota and current is not None and quota < current.replicas:
        limit_reason = describe_quota(observed, quota)
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
            limit_reason=_describe_limit(observed, limit, quota, spares_limit),
            **of_type,
        )

    states = {
        name: completed(each, accelerator=name, moves=types.present is not None and name != types.present)
        for name, each in on_types.items()
    }
    state = completed(state)
    return Candidate(observed, demand, state, types, states, measured.template.reported, limit_reason)


def _describe_limit(
    observed: ObservedJob, limit: int | None, quota: int | None, spares_limit: int | None
) -> str:
    """Return what a limit comes from. Empty if that is not known."""
    if quota is not None and limit == quota:
        return describe_quota(observed, quota)
    if spares_limit is not None and limit == spares_limit:
        return f"beside {plural(observed.resource.valid_job.spare_replicas, 'spare')}"
    return ""


def _limit_beside_spares(observed: ObservedJob, fitting: Callable[[], int]) -> int:
    """Return the largest count beside which the missing spares fit, but not less than the job has.

    So spares keep a job from growing, and a job on too few nodes trains without them. Spares that are on
    nodes take their places from all jobs (`Resources.free`).
    """
    current = observed.current_allocation
    replicas = current.replicas if current is not None else 0
    return max(fitting() - observed.missing_spares, replicas, observed.resource.valid_job.core_replicas)


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

    def places(self, candidates: Iterable[Candidate]) -> Sequence[Node] | int:
        """Return the free nodes, or where they are not known, how many replicas there can be."""
        return sum(each.state.max_replicas for each in candidates) if self.free is None else self.free


def _without(node: Node, taken: Mapping[str, int]) -> Node:
    return replace(node, free={name: units - taken.get(name, 0) for name, units in node.free.items()})


def find_preempting(
    candidates: Iterable[Candidate], solution: Solution, resources: Resources
) -> frozenset[str]:
    """Return the jobs without replicas whose smallest count fits if pods of lower priority are preempted."""
    lowest, decisions = resources.lowest_priority, solution.decisions
    counts = {job_id: decision.replicas for job_id, decision in decisions.items() if decision.replicas}
    found: set[str] = set()
    free: dict[int, Sequence[Node]] = {}
    for candidate in sorted(candidates, key=lambda each: each.state.admission_order):
        state, smallest = candidate.state, candidate.smallest
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
