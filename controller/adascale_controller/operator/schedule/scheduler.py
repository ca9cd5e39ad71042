"""Chooses the replica counts of all jobs at once."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from types import MappingProxyType

from adascale_controller.formatting import plural
from adascale_controller.operator.observe.observed_job import ObservedJob
from adascale_controller.operator.observe.pods import Pod
from adascale_controller.operator.schedule.nodes import AcceleratorTypes, NodeSelection
from adascale_controller.operator.schedule.pod_memory import (
    PodMemory,
    Resources,
    SparePods,
    find_preempting,
    make_contender,
)
from adascale_controller.operator.types.actions import Schedule
from adascale_controller.operator.types.kubernetes import ApiObject
from adascale_controller.schedule.capacity_requests import (
    MAX_REQUESTING_JOBS,
    NODES,
    PREEMPTION,
    CapacityRequest,
    RequestKind,
)
from adascale_controller.schedule.measurements import TemplateMeasurements
from adascale_controller.schedule.standing import (
    ExplanationSchedule,
    find_growth,
    holding,
    requested,
    still_applies,
)
from adascale_core.decision.decide import Contender, Decision, Solution, TypedDemands, capacity_of, decide
from adascale_core.decision.explanation import explain
from adascale_core.names import DEFAULT_ACCELERATOR_LABEL
from adascale_core.placement.packing import Demand
from adascale_core.views.decision import DecisionView, LimitKind, LimitView

MIN_INTERVAL = 1.0
"""Seconds between two decisions for which there are only new measurements."""
MAX_SHARE = 0.05
"""The share of the time that such decisions take."""
MAX_CHANGE_SHARE = 0.5
"""The share of the time that decisions about changes take, beyond `BURST`."""
POSTPONED_INTERVAL = 10.0
"""Seconds until a job that waits for the requests of others is looked at again."""
MAX_HOLD = 90.0
"""Seconds for which a job waits for replicas of jobs of lower priority to leave. A grace period is 30 s."""
HOLD_INTERVAL = 1.0
"""Seconds until a job that waits for them is looked at again."""
BURST = 1.0
"""Seconds of processor time that such decisions may take at any time, one after the other."""


@dataclass(frozen=True)
class DecisionInput:
    """The jobs and the nodes that a decision is about, at one moment."""

    contenders: Mapping[str, Contender]  # job id -> the job, of all jobs that may run
    observed: Mapping[str, ObservedJob]  # job id -> the same as they were last observed
    resources: Resources
    before: DecisionResult | None  # the last decision. None if there is none.
    same_jobs: bool  # whether no job has changed since the last decision


@dataclass(frozen=True)
class DecisionResult:
    """A decision about all jobs that may run."""

    input: DecisionInput
    solution: Solution
    decided_at: float
    next_change: float  # when the same problem may have another solution, on the monotonic clock
    cost: float  # the seconds of processor time that it took
    # the jobs without replicas whose smallest count fits if pods of lower priority leave
    preempting: frozenset[str] = frozenset()
    # job id -> the next larger count of a job that may request nodes, and would use them
    growth: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))


class Scheduler:
    """Chooses the replica counts of all jobs that may run.

    A decision is due at once if a job or the nodes have changed in what the counts must respect, unless such
    decisions take more than half of the time. For new measurements they take at most `MAX_SHARE` of it.
    """

    def __init__(
        self,
        accelerator_label: str = DEFAULT_ACCELERATOR_LABEL,
        *,
        request_nodes: bool = False,
        fairness: float | None = None,
    ) -> None:
        self._accelerator_label = accelerator_label
        self._request_nodes = request_nodes
        self._fairness = fairness
        self._accelerator_types = AcceleratorTypes(accelerator_label)
        self._memories: dict[str, PodMemory] = {}
        self._templates = TemplateMeasurements()
        self._node_selection = NodeSelection()
        self._explanations = ExplanationSchedule()
        self._jobs: dict[str, PodMemory] = {}
        """Job id -> the memory of a job that may run."""
        self._resources = Resources(None, ())
        self._spares: dict[str, SparePods] = {}
        """Job id -> its spares that are on nodes."""
        self._result: DecisionResult | None = None
        self._adopted_at = -inf
        self._share_used_until = -inf
        """When decisions will have taken `MAX_CHANGE_SHARE` of the time, if no more are made."""
        self._outdated: set[str] = set()
        self._is_explained = True
        self._explain_cost = 0.0
        self._explain_at = -inf
        """When more jobs may be explained, on the monotonic clock."""
        self._not_stored: set[str] = set()
        self._jobs_changed = self._resources_changed = self._measurements_changed = False

    # -- what has changed -----------------------------------------------------------------------------------

    def retain(self, uids: Collection[str]) -> None:
        """Drop the memory of all AdaScaleJobs with other uids."""
        self._memories = {uid: memory for uid, memory in self._memories.items() if uid in uids}
        for job_id, job in list(self._jobs.items()):
            if job.observed.resource.uid not in uids:
                self.remove(job_id)

    def set_resources(self, nodes: Sequence[ApiObject] | None, pods: Sequence[Pod]) -> None:
        """Use these nodes and pods from now on."""
        self._resources = Resources(nodes, pods, tuple(self._spares.values()))
        self._resources_changed = True
        selects_others = self._node_selection.update(nodes or ())
        if selects_others:
            self._accelerator_types = AcceleratorTypes(self._accelerator_label, nodes or ())
        for job in self._jobs.values():
            failed = job.backoff.failed_placement(job.observed.now)
            if selects_others or job.observed.missing_spares or failed is not None:
                self._replace(job, self._demands(job))

    def update(self, job: ObservedJob) -> None:
        """Use this state of a job that may run from now on."""
        job_id, known = job.resource.id, self._jobs.get(job.resource.id)
        memory = self._memories.setdefault(job.resource.uid, PodMemory())
        if known is not None and known is not memory:
            # Another AdaScaleJob of this name.
            self.remove(job_id)
        memory.observe_spec(job, self._templates)
        self._update_spares(job)
        types = self._demands(memory)
        memory.observe(types, lambda: self._fitting(job_id, types))
        memory.requested = None
        if known is memory:
            self._replace(memory, types)
            return
        memory.begin()
        self._renew(memory, types)
        self._jobs[job_id] = memory
        self._jobs_changed = True

    def _update_spares(self, job: ObservedJob) -> None:
        """Count the spares of a job that are on nodes as taken."""
        _, nodes = job.replica_pods
        spares = SparePods(self._memories[job.resource.uid].request, nodes) if nodes else None
        if spares != self._spares.get(job.resource.id):
            if spares is not None:
                self._spares[job.resource.id] = spares
            else:
                del self._spares[job.resource.id]
            self._resources = self._resources.with_spares(tuple(self._spares.values()))
            self._resources_changed = True

    def _replace(self, job: PodMemory, types: TypedDemands) -> None:
        """Compute the state of a job again, and record whether that makes a decision due."""
        before = job.contender
        self._renew(job, types)
        present = job.contender
        kept = job.standing or Decision(before.state.replicas, "")
        decided_type = kept.accelerator.type if kept.accelerator is not None else None
        if (
            not still_applies(present.decided_state(kept), before.decided_state(kept), kept)
            or present.types.apart_from_replicas != before.types.apart_from_replicas
            or present.types.present not in (before.types.present, decided_type)
        ):
            self._jobs_changed = True
        elif (present.state, present.states, present.types.any) != (
            before.state,
            before.states,
            before.types.any,
        ):
            self._measurements_changed = True

    def note_request(self, job_id: str, replicas: int) -> None:
        """Use this replica count of a job, which is being requested, until the job is observed again.

        Otherwise a decision that is made meanwhile would be about a count that the job no longer has.
        """
        job = self._jobs.get(job_id)
        if job is not None:
            job.requested = replicas
            self._renew(job, job.contender.types)

    def _renew(self, job: PodMemory, types: TypedDemands) -> None:
        """Compute the state of a job from what was last observed."""
        fitting = partial(self._fitting, job.observed.resource.id, types)
        job.contender = make_contender(job, types, fitting)
        job.reported = job.measurements.template.reported

    def remove(self, job_id: str) -> None:
        """Drop a job that may not run, or is gone."""
        if self._spares.pop(job_id, None) is not None:
            self._resources = self._resources.with_spares(tuple(self._spares.values()))
        if self._jobs.pop(job_id, None) is not None:
            self._jobs_changed = True

    def explain_again(self, job_id: str) -> None:
        """Explain the decision about a job again, because it could not be stored."""
        self._not_stored.add(job_id)
        self._measurements_changed = True

    def decide_again(self) -> None:
        """Make a decision due, even if no change is known."""
        self._jobs_changed = True

    # -- deciding -------------------------------------------------------------------------------------------

    def due_at(self, now: float) -> float:
        """Return when to decide, in seconds since 1970; infinite until something changes."""
        if self._result is None:
            return now if self._jobs else inf
        if self._jobs_changed or self._resources_changed:
            due = max(self._adopted_at, self._share_used_until - BURST / MAX_CHANGE_SHARE)
        elif self._measurements_changed or time.monotonic() >= self._result.next_change:
            due = self._adopted_at + max(MIN_INTERVAL, (self._result.cost + self._explain_cost) / MAX_SHARE)
        else:
            return inf
        # A decision in the future was made before the clock was set back.
        return due if self._adopted_at <= now else now

    def is_due(self, now: float) -> bool:
        """Whether to decide at `now`, in seconds since 1970."""
        return self.due_at(now) <= now

    def decision_input(self) -> DecisionInput:
        """Return what a decision is about now."""
        for job in self._jobs.values():
            if job.reported != job.measurements.template.reported:
                self._renew(job, job.contender.types)
                self._measurements_changed = True
        same_jobs = not (self._jobs_changed or self._measurements_changed)
        self._jobs_changed = self._resources_changed = self._measurements_changed = False
        observed = {job_id: job.observed for job_id, job in self._jobs.items()}
        return DecisionInput(self._contenders, observed, self._resources, self._result, same_jobs)

    def solve(self, given: DecisionInput) -> DecisionResult:
        """Return the replica count of each job. To be called in a thread, one at a time."""
        begun = time.thread_time()
        # Durations are measured on the monotonic clock, so the decision gets its time from it too.
        now = time.monotonic()
        before, contenders, resources = given.before, given.contenders, given.resources
        same_jobs = given.same_jobs and before is not None and now < before.next_change
        if before is not None and same_jobs and before.input.resources.free == resources.free:
            cost = max(before.cost, time.thread_time() - begun)
            return replace(before, input=given, cost=cost)
        solution = decide(
            contenders.values(),
            resources.places(contenders.values()),
            now,
            before.solution if before is not None else Solution(),
            fairness=self._fairness,
        )
        next_change = min((problem.next_change(now) for problem in solution.problems), default=inf)
        preempting = find_preempting(contenders.values(), solution, resources)
        growing = {job_id for job_id, each in given.observed.items() if self._may_request_nodes(each)}
        growth = find_growth(solution.problems, solution.decisions, growing, now)
        cost = time.thread_time() - begun
        return DecisionResult(given, solution, now, next_change, cost, preempting, growth)

    def adopt(self, result: DecisionResult, now: float) -> set[str]:
        """Use a decision, except about jobs that have changed since, and return the jobs to look at again."""
        decisions, known = result.solution.decisions, result.input.contenders
        outdated = {
            job_id
            for job_id, job in self._jobs.items()
            if (each := decisions.get(job_id)) is not None
            and not still_applies(job.contender.decided_state(each), known[job_id].decided_state(each), each)
        }
        may_grow, changed = self._still_fits(result, outdated), set()
        without_decision = self._without_decision()
        for job_id, job in self._jobs.items():
            decision = decisions.get(job_id)
            if decision is None or job_id in outdated:
                continue
            if not may_grow and decision.replicas > job.contender.decided_state(decision).replicas:
                outdated.add(job_id)
                continue
            if job.standing is None or requested(job.standing) != requested(decision):
                changed.add(job_id)
            job.standing, job.present_type = decision, known[job_id].types.present
        still_without = self._without_decision()
        if outdated or still_without:
            self._jobs_changed = True
        # Without the decision before, of which it holds the predictions.
        self._result, self._adopted_at = replace(result, input=replace(result.input, before=None)), now
        # Later only if the clock was set back.
        earlier = min(self._share_used_until, now + BURST / MAX_CHANGE_SHARE)
        self._share_used_until = max(earlier, now - result.cost) + result.cost / MAX_CHANGE_SHARE
        self._outdated = outdated
        self._is_explained = False
        requesting = {*result.growth, *result.preempting} & self._jobs.keys()
        return changed | requesting | (without_decision - still_without)

    def explain(self) -> Sequence[DecisionView]:
        """Return the explanations to store with the metrics service, of the last decision, each once.

        To be called in a thread, while no decision is made, again and again: a call explains a few jobs.
        """
        result = self._result
        if result is None or self._is_explained or time.monotonic() < self._explain_at:
            return ()
        solution = result.solution
        begun = time.thread_time()
        for job_id in self._not_stored:
            self._explanations.repeat(job_id)
        self._not_stored.clear()
        decisions = {job: each for job, each in solution.decisions.items() if job not in self._outdated}
        due = self._explanations.due(decisions, result.decided_at)
        self._is_explained = not self._explanations.has_more
        if not due:
            return ()
        found = explain(solution, result.decided_at, time.time(), due)
        self._explain_cost = time.thread_time() - begun
        pause = 0.0 if self._is_explained else self._explain_cost / MAX_SHARE
        self._explain_at = time.monotonic() + pause
        return [self._with_extra_pods(result.input.observed[job], each) for job, each in found.items()]

    @staticmethod
    def _with_extra_pods(observed: ObservedJob, explained: DecisionView) -> DecisionView:
        """Return an explained decision that says which replicas may be taken at any time."""
        job, core = observed.resource.job, observed.core
        if core is None or job is None or job.spec.opportunistic is None:
            return explained
        name = job.spec.opportunistic.priority_class_name[:100]
        reason = (
            f"beyond {plural(core, 'replica')} it has extra pods, of PriorityClass {name}, which pods of "
            "higher priority may take at any time"
        )
        return replace(explained, limits=(*explained.limits, LimitView(LimitKind.PRIORITY, reason)))

    def leave_unexplained(self) -> None:
        """Explain nothing more of the last decision."""
        self._is_explained = True

    def schedule(self, job: ObservedJob) -> Schedule:
        """Return what is scheduled for a job."""
        memory, decision = self._memories.get(job.resource.uid), self.decision(job.resource.id)
        failing = job.recorded_failing_count
        if memory is None:
            return Schedule(decision, failing_count=failing)
        if memory.digest == job.digest:
            failing = memory.failing_counts.given_up
        return Schedule(decision, memory.backoff.failed_placement(job.now), failing, memory.requests.active)

    def decision(self, job_id: str) -> Decision | None:
        """Return what holds for a job. None if it may not run, or waits for its first decision."""
        job = self._jobs.get(job_id)
        if job is None:
            return None
        contender = job.contender
        decision = holding(job.standing, contender.decided_state(job.standing))
        if decision is None:
            return None
        if _is_about_another_type(job):
            replicas = contender.state.replicas
            return Decision(replicas, "unchanged") if replicas else None
        decided_type = contender.decided_type(decision)
        if decided_type is not None:
            # The type is what was decided. Whether its pods have to require it depends on where they are now.
            decision = replace(decision, accelerator=contender.types.accelerator(decided_type))
        request = self._request(job, decision)
        if request is not None:
            return replace(decision, replicas=request.count, reason=request.message, waiting=False)
        if decision.waiting:
            return replace(decision, reason=self._waiting_reason(job, decision.reason))
        return self._after_leaving(job, decision)

    # -- jobs of lower priority -----------------------------------------------------------------------------

    def _after_leaving(self, job: PodMemory, decision: Decision) -> Decision:
        """Return a decision, without growth while replicas of jobs of lower priority leave for it.

        The Kubernetes scheduler would preempt pods of these jobs for a pending pod, and others than those
        that leave.
        """
        now, state = job.observed.now, job.contender.state
        leaving = self._leaving_for(job) if decision.replicas > state.replicas else None
        if leaving is None:
            job.held_since = None
            return decision
        if job.held_since is None:
            job.held_since = now
        if now > job.held_since + MAX_HOLD:
            return decision
        reason = (
            f"Waiting for replicas of {leaving}, which has a lower priority, to save their state and leave"
        )
        return replace(decision, replicas=state.replicas, reason=reason, waiting=state.replicas == 0)

    def _leaving_for(self, job: PodMemory) -> str | None:
        """Return a job of lower priority whose replicas are about to leave nodes that a job may use."""
        nodes, priority = job.contender.types.any.nodes, job.growth_priority
        if priority == min(each.growth_priority for each in self._jobs.values()):
            return None
        for other in self._jobs.values():
            if other.growth_priority >= priority:
                continue
            observed = other.observed
            kept = other.standing.replicas if other.standing is not None else other.contender.state.replicas
            for pod in observed.pods:
                may_leave = pod.rank >= kept + observed.spares and not pod.has_ended
                if may_leave and (nodes is None or pod.node in nodes):
                    return observed.resource.id
        return None

    # -- requests beyond the capacity -----------------------------------------------------------------------

    def _request(self, job: PodMemory, decision: Decision) -> CapacityRequest | None:
        """Return the count that a job requests although it does not fit, which may be a new request."""
        contender, requests, now = job.contender, job.requests, job.observed.now
        job.is_postponed = False
        active = requests.active
        if active is not None:
            limit = contender.state.limit
            is_allowed = limit is None or active.count <= max(limit, contender.smallest or 0)
            if requests.granted and job.granted_after == inf:
                # The decisions so far do not count its replicas.
                job.granted_after = time.monotonic()
                self._jobs_changed = True
            is_counted = self._result is not None and self._result.decided_at > job.granted_after
            if decision.replicas == active.fitting and is_allowed and not is_counted:
                return active
            # It fits, or is not wanted any more.
            requests.cancel()
            job.granted_after = inf
            return None
        found = self._due_request(job, decision)
        if found is None or not requests.may_begin(now):
            return None
        requesting = sum(memory.requests.active is not None for memory in self._memories.values())
        takes_nodes = found[0] is NODES and any(map(_awaits_nodes, self._jobs.values()))
        job.is_postponed = requesting >= MAX_REQUESTING_JOBS or takes_nodes
        if not job.is_postponed:
            requests.begin(*found, decision.replicas, now)
        return requests.active

    def _due_request(self, job: PodMemory, decision: Decision) -> tuple[RequestKind, int] | None:
        """Return why to request which count of a job that does not fit. None if there is no reason to."""
        contender, observed = job.contender, job.observed
        result, smallest, job_id = self._result, contender.smallest, contender.state.id
        if result is None or smallest is None:
            return None
        if not decision.waiting:
            count = result.growth.get(job_id)
            is_settled = decision.replicas == contender.state.replicas == observed.training_replicas
            may_grow = (
                is_settled
                and job.backoff.failed_placement(observed.now) is None
                and self._may_request_nodes(observed)
            )
            return (NODES, count) if count is not None and count > decision.replicas and may_grow else None
        if job_id in result.preempting:
            return PREEMPTION, smallest
        if self._may_request_nodes(observed):
            return NODES, smallest
        return None

    def _may_request_nodes(self, observed: ObservedJob) -> bool:
        """Whether a job may request replicas that do not fit, so that an autoscaler adds nodes."""
        of_job = observed.resource.valid_job.spec.request_nodes
        return self._request_nodes if of_job is None else of_job

    def _waiting_reason(self, job: PodMemory, reason: str) -> str:
        """Return the reason of a decision that a job waits for capacity, with what keeps it from nodes."""
        observed = job.observed
        obstacles = self._node_selection.obstacles(observed.pod_spec, job.request)
        problem = observed.admission.problem
        refusal = job.requests.describe_refusal(observed.now)
        unknown = f"What admission makes of the pods is not known ({problem})" if problem else ""
        return ". ".join(filter(None, (reason, obstacles, unknown, refusal)))

    def _without_decision(self) -> set[str]:
        """Return the jobs of which the last decision no longer holds."""
        return {job_id for job_id, job in self._jobs.items() if _is_about_another_type(job)}

    @property
    def waiting(self) -> int:
        """The number of jobs that may run and have no replicas by the last decision."""
        decisions = (job.standing for job in self._jobs.values())
        return sum(decision is not None and decision.replicas == 0 for decision in decisions)

    def _still_fits(self, result: DecisionResult, stale: Collection[str]) -> bool:
        """Whether the counts of a decision fit on the present nodes, beside the jobs that keep theirs."""
        before, present = result.input.resources, self._resources
        if not stale and (before is present or before.free == present.free):
            return True
        demands, counts = {}, {}
        for job_id, job in self._jobs.items():
            decision = result.solution.decisions.get(job_id) if job_id not in stale else None
            demands[job_id] = job.contender.on(job.contender.decided_type(decision))[1]
            if decision is not None:
                replicas = decision.replicas
            else:
                replicas = max(job.contender.state.replicas, job.standing.replicas if job.standing else 0)
            if replicas:
                counts[job_id] = replicas
        places = present.places(self._contenders.values())
        return capacity_of(places, demands, result.solution.problems).fits(counts)

    # -- one job --------------------------------------------------------------------------------------------

    def next_due(self, job: ObservedJob) -> float:
        """Return when time alone changes the state of a job, in seconds since 1970; infinite if never."""
        memory = self._memories.get(job.resource.uid)
        if memory is None:
            return inf
        known = self._jobs.get(job.resource.id)
        postponed = job.now + POSTPONED_INTERVAL if known is not None and known.is_postponed else inf
        held = job.now + HOLD_INTERVAL if known is not None and known.held_since is not None else inf
        return min(memory.backoff.next_due(job.now), memory.requests.next_due(job.now), postponed, held)

    @property
    def _contenders(self) -> dict[str, Contender]:
        return {job_id: job.contender for job_id, job in self._jobs.items()}

    def _demands(self, job: PodMemory) -> TypedDemands:
        """Return the requests of a job to nodes of any type of accelerator, and to nodes of each type."""
        observed = job.observed
        demand = Demand(
            request=job.request,
            nodes=self._node_selection.eligible(observed.placement_spec),
            placed=observed.replica_pods[0],
            one_node=observed.single_node,
        )
        if self._resources.nodes is None:
            return TypedDemands(demand)
        return self._accelerator_types.demands(observed, demand)

    def _fitting(self, job_id: str, types: TypedDemands) -> int:
        """Return how many replicas of a job seem to fit."""
        problems = self._result.solution.problems if self._result is not None else ()
        places = self._resources.places(self._contenders.values())
        capacity = capacity_of(places, {job_id: types.on_present}, problems)
        return capacity.max_replicas(job_id)


def _awaits_nodes(job: PodMemory) -> bool:
    """Whether pods of a job that fits are on no node yet, which pods of a request would take from it."""
    if job.standing is None or job.requests.active is not None or job.observed.is_queued:
        return False
    return len(job.observed.replica_pods[0]) < job.standing.replicas


def _is_about_another_type(job: PodMemory) -> bool:
    """Whether a job has left the type of accelerator on which it was when it was decided about.

    A job without replicas may get any type, so both decisions would hold in turn.
    """
    accelerator = job.standing.accelerator if job.standing is not None else None
    if accelerator is None or accelerator.type is None:
        return False
    return job.contender.types.present not in (job.present_type, accelerator.type)
