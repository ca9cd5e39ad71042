"""The observed state of one AdaScaleJob."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from types import MappingProxyType
from typing import Self

from adascale_controller.failing_counts import FailingCount
from adascale_controller.operator.observe.adascalejob import AdaScaleJob
from adascale_controller.operator.observe.pods import Pod, PodExit, PodProblem
from adascale_controller.operator.types.conditions import ConditionType, Reason, condition_of
from adascale_controller.operator.types.kubernetes import (
    ORPHAN_FINALIZER,
    SCHEDULING_FIELDS,
    ApiObject,
    first_replica,
    seconds,
)
from adascale_controller.operator.types.workload import ELASTIC_JOB, QUEUE_NAME, Workload, extra_name
from adascale_core import names
from adascale_core.decision.type_choice import Accelerator
from adascale_core.failures import EXIT_CHECK_FAILED, EXIT_REFUSED, EXIT_SERVICE_UNAVAILABLE
from adascale_core.messages.allocation import Allocation
from adascale_core.messages.registration import MAX_INTERVAL
from adascale_core.rendezvous.rendezvous import DEPARTED_STATES, EXITED_STATES
from adascale_core.views.jobs import JobView


@dataclass(frozen=True)
class QueueView:
    """What Kueue says about one job."""

    admitted: int = 0  # the number of replicas for which quota is reserved
    # the number of further replicas that the unused quota of its flavor holds. None if that is not known.
    room: int | None = None
    cluster_queue: str = ""  # the ClusterQueue that has reserved the quota. Empty if none has.
    message: str = ""  # why Kueue has not admitted it, has evicted it, or does not admit more replicas


_AGENT_ERRORS = {
    EXIT_CHECK_FAILED: Reason.REPLICA_CHECK_FAILED,
    EXIT_REFUSED: Reason.REPLICA_REFUSED,
    EXIT_SERVICE_UNAVAILABLE: Reason.METRICS_SERVICE_UNREACHABLE,
}
"""Exit codes of agents that give up, and the reasons of the conditions that show what they say."""
REGISTRATION_TIMEOUT = MAX_INTERVAL
"""Seconds within which all agents register with a metrics service that has lost its data."""


@dataclass(frozen=True)
class IndexedJob:
    """An Indexed Job (batch/v1) of an AdaScaleJob's name, or of the name of its extra pods' Job."""

    uid: str
    owner: str | None  # uid of the AdaScaleJob that owns it. None if no AdaScaleJob does.
    digest: str | None  # digest of the template that its pods are made from
    parallelism: int  # how many pods it has when it is not suspended
    suspended: bool
    deleting: bool
    complete: bool  # whether one of its pods has succeeded, so that its success policy is met
    failed: tuple[str, str] | None  # reason and message, if the Job controller has failed it
    # in seconds since 1970; None if it is not known
    completed_at: float | None = None
    active_deadline_seconds: int | None = None
    accelerator: str | None = None  # the type that its pods require
    first: int = 0  # the index of the replica of its first pod: 0, or for extra pods the number of others
    of: str | None = None  # the name of the AdaScaleJob that it was made for, by its label
    created_at: float = 0.0  # seconds since 1970
    # when the Job controller has started or resumed it, in seconds since 1970; infinite before
    started_at: float = 0.0
    leaves_pods: bool = False  # whether it is being deleted without its pods
    suspended_by_operator: bool = False
    queue: str | None = None  # the LocalQueue of Kueue that it is queued in. None if it is not queued.
    queue_request: str | None = None  # `Queueing.request` of its AdaScaleJob when it was created
    # whether Kueue lets its parallelism change while it is admitted, and gates new pods
    is_elastic: bool = False
    gates_checked_at: float = 0.0  # when it was changed last because of gated pods, in seconds since 1970
    # `nodeSelector` and `tolerations` of its pods, to which Kueue adds those of a flavor
    scheduling: ApiObject = field(default_factory=lambda: MappingProxyType({}))

    @classmethod
    def read(cls, raw: ApiObject) -> Self:
        """Return the Indexed Job in an object of the API."""
        meta, spec = raw["metadata"], raw["spec"]
        annotations = meta.get("annotations") or {}
        pod_spec = (spec.get("template") or {}).get("spec") or {}
        owners = [owner["uid"] for owner in meta.get("ownerReferences") or () if owner["kind"] == names.KIND]
        conditions = {
            condition["type"]: condition
            for condition in raw.get("status", {}).get("conditions") or ()
            if condition["status"] == "True"
        }
        # FailureTarget and SuccessCriteriaMet come before the pods have ended; the outcome is certain then.
        failed = conditions.get("Failed") or conditions.get("FailureTarget")
        complete = conditions.get("SuccessCriteriaMet") or conditions.get("Complete")
        return cls(
            uid=meta["uid"],
            owner=owners[0] if owners else None,
            digest=annotations.get(names.ANNOTATION_TEMPLATE),
            parallelism=spec.get("parallelism", 1),
            suspended=bool(spec.get("suspend")),
            deleting="deletionTimestamp" in meta,
            complete=complete is not None,
            completed_at=seconds(complete.get("lastTransitionTime")) if complete else None,
            failed=(failed.get("reason", "Failed"), failed.get("message", "")) if failed else None,
            active_deadline_seconds=spec.get("activeDeadlineSeconds"),
            accelerator=annotations.get(names.ANNOTATION_ACCELERATOR),
            first=first_replica(meta),
            of=(meta.get("labels") or {}).get(names.LABEL_JOB),
            created_at=seconds(meta.get("creationTimestamp")) or 0.0,
            started_at=seconds((raw.get("status") or {}).get("startTime")) or inf,
            leaves_pods=ORPHAN_FINALIZER in (meta.get("finalizers") or ()),
            suspended_by_operator=names.ANNOTATION_SUSPENDED in annotations,
            queue=(meta.get("labels") or {}).get(QUEUE_NAME) or None,
            queue_request=annotations.get(names.ANNOTATION_QUEUE),
            # Kueue gates the pods only where its feature gate is on.
            is_elastic=any(gate["name"] == ELASTIC_JOB for gate in pod_spec.get("schedulingGates") or ()),
            gates_checked_at=seconds(annotations.get(names.ANNOTATION_GATES)) or 0.0,
            scheduling={name: pod_spec[name] for name in SCHEDULING_FIELDS if name in pod_spec},
        )

    def suits(self, accelerator: Accelerator) -> bool:
        """Whether its pods can run on this type of accelerator, and on no other if that is required."""
        return self.accelerator == accelerator.type or (self.accelerator is None and not accelerator.required)

    @property
    def finished(self) -> bool:
        """Whether it creates no more pods."""
        return self.complete or self.failed is not None

    @property
    def ranks(self) -> range:
        """The ranks that it has pods for."""
        return range(self.first, self.first + (0 if self.suspended else self.parallelism))

    @property
    def end(self) -> int:
        """The rank after the highest that it has a pod for; 0 if it has none."""
        return self.ranks.stop if self.ranks else 0


@dataclass(frozen=True)
class CheckpointClaim:
    """The PersistentVolumeClaim for checkpoints."""

    name: str
    own: bool
    exists: bool
    single_node: bool  # whether only one node can mount it at a time


@dataclass(frozen=True)
class Admission:
    """What admission makes of the pods of a template."""

    spec: ApiObject | None = None  # the PodSpec after admission. None if it is not known.
    problem: str = ""  # why it is not known: the API server's message
    forbids_fs_group: bool = False  # whether pods with an `fsGroup` are rejected
    has_quota: bool = True  # whether a quota allowed another pod when that was asked
    asked_at: float = 0.0  # when it was asked, in seconds since 1970
    # the priority of extra pods. None if the job has none, or it is not known.
    extra_priority: int | None = None
    extra_problem: str = ""  # why the API server rejects extra pods


@dataclass(frozen=True)
class TemplateCheck:
    """What is known of a changed template, of which a pod is started before the old ones are stopped."""

    digest: str
    done: bool = False  # whether the pod has started, or can't be tried
    # why it does not start; None if no reason is known
    reason: Reason | None = None
    message: str = ""


@dataclass(frozen=True)
class JobRefusal:
    """That the API server does not create an Indexed Job now."""

    problem: PodProblem
    extra: bool  # whether it is the Indexed Job of extra pods

    def is_past(self, job: CachedJob) -> bool:
        """Whether a job has the Indexed Job, or needs it no more."""
        if self.extra:
            return job.own_extra_job is not None or job.core is None
        return job.own_indexed_job is not None


@dataclass(frozen=True)
class CachedJob:
    """An AdaScaleJob with its Indexed Job and pods, as the caches hold them."""

    resource: AdaScaleJob
    workload: Workload | None  # what its objects are made from. None if the spec is invalid.
    indexed_job: IndexedJob | None  # the Job of the same name, of whichever owner
    pods: Sequence[Pod]
    lost_nodes: frozenset[str]  # names of nodes that are not ready
    extra_job: IndexedJob | None = field(default=None, kw_only=True)  # the Indexed Job of extra pods
    # the other pods of the same name that have not ended: those of a Job that was deleted
    leaving: Sequence[Pod] = field(default=(), kw_only=True)

    @property
    def own_indexed_job(self) -> IndexedJob | None:
        """The Indexed Job, if this AdaScaleJob owns it and it is not being deleted."""
        return self._own(self.indexed_job)

    @property
    def own_extra_job(self) -> IndexedJob | None:
        """The Indexed Job of extra pods, if this AdaScaleJob owns it and it is not being deleted."""
        return self._own(self.extra_job)

    @property
    def own_indexed_jobs(self) -> Sequence[IndexedJob]:
        """The Indexed Jobs that this AdaScaleJob owns and that are not being deleted."""
        return [each for each in (self.own_indexed_job, self.own_extra_job) if each is not None]

    def _own(self, indexed_job: IndexedJob | None) -> IndexedJob | None:
        owned = (
            indexed_job is not None and indexed_job.owner == self.resource.uid and not indexed_job.deleting
        )
        return indexed_job if owned else None

    @property
    def core(self) -> int | None:
        """The number of replicas that are not extra pods; None if none of its pods are."""
        job = self.resource.job
        return job.core_replicas if job is not None and job.opportunistic is not None else None

    def replaces(self, rank: int) -> bool:
        """Whether an Indexed Job of its own makes another pod of a rank if that ends."""
        return any(rank in each.ranks and not each.finished for each in self.own_indexed_jobs)

    @property
    def live_pods(self) -> dict[int, Pod]:
        """The pods that have not ended and are not being deleted, by rank."""
        return _live(self.pods)


@dataclass(frozen=True)
class ObservedJob(CachedJob):
    """An AdaScaleJob at one moment: what the caches hold, and what had to be fetched."""

    service: JobView | None  # its view in the metrics service. None if the metrics service does not answer.
    claim: CheckpointClaim | None  # the claim for checkpoints. None if checkpoints are saved at a path.
    digest: str
    pod_creation_failure: PodProblem | None  # why the Job controller can't create pods
    now: float  # seconds since 1970
    admission: Admission = Admission()  # what admission makes of its pods
    template_check: TemplateCheck | None = None  # of a changed template. None if it is not checked.
    # what Kueue says about it. None if that was not read yet, or there is nothing.
    queue: QueueView | None = None
    extra_queue: QueueView | None = None  # the same about its extra pods
    refusal: JobRefusal | None = None  # that the API server does not create an Indexed Job that it lacks

    @property
    def is_held(self) -> bool:
        """Whether its Indexed Job is suspended by others: by Kueue, until it is admitted, or by a user."""
        indexed_job = self.own_indexed_job
        if indexed_job is None or not indexed_job.suspended or indexed_job.suspended_by_operator:
            return False
        return indexed_job.queue is not None or not self._is_stopped_by_status

    @property
    def _is_stopped_by_status(self) -> bool:
        """Whether the operator has suspended the Job by the status: earlier versions set no mark."""
        recorded = self.resource.recorded_allocation
        suspended = condition_of(self.resource.status, ConditionType.SUSPENDED)
        by_others = suspended is not None and suspended.reason == Reason.JOB_SUSPENDED
        return recorded is not None and recorded.replicas == 0 and not by_others

    @property
    def is_queued(self) -> bool:
        """Whether Kueue decides when it may run."""
        indexed_job = self.own_indexed_job
        return (self.resource.queueing.queue if indexed_job is None else indexed_job.queue) is not None

    @property
    def placement_spec(self) -> ApiObject:
        """The PodSpec that says which nodes its pods may use, with what Kueue adds for its flavor."""
        indexed_job, spec = self.own_indexed_job, self.pod_spec
        if indexed_job is None or indexed_job.queue is None:
            return spec
        selector = {**(spec.get("nodeSelector") or {}), **(indexed_job.scheduling.get("nodeSelector") or {})}
        tolerations = [*(spec.get("tolerations") or ()), *(indexed_job.scheduling.get("tolerations") or ())]
        return {**spec, "nodeSelector": selector, "tolerations": tolerations}

    @property
    def pod_spec(self) -> ApiObject:
        """The PodSpec of its pods as admission makes it, or else as the user wrote it."""
        if self.admission.spec is not None:
            return self.admission.spec
        spec: ApiObject = self.resource.template["spec"]
        return spec

    @property
    def priority(self) -> int:
        """The priority of its pods, by which it is admitted before other jobs."""
        admitted = self.pod_spec.get("priority")
        known = [admitted] if isinstance(admitted, int) else [pod.priority for pod in self.own_pods]
        return max((each for each in known if each is not None), default=0)

    @property
    def preempts(self) -> bool:
        """Whether its pods take the place of pods of lower priority."""
        return bool(self.pod_spec.get("preemptionPolicy") != "Never")

    @property
    def current_allocation(self) -> Allocation | None:
        """The newest allocation, from the status or from the metrics service.

        With equal generations the metrics service's allocation holds, since agents follow it.
        """
        recorded = self.resource.recorded_allocation
        desired = self.service.desired if self.service is not None else None
        if recorded is None or desired is None:
            return recorded
        return desired if desired.generation >= recorded.generation else recorded

    @property
    def recorded_failing_count(self) -> FailingCount | None:
        """The count in the status on which the program fails at once. None if the template has changed."""
        recorded = (self.resource.status.get("attempts") or {}).get("failingCount")
        if not recorded or recorded["template"] != self.digest:
            return None
        return FailingCount(recorded["count"], recorded["limit"], recorded["failure"])

    @property
    def own_pods(self) -> Sequence[Pod]:
        """The pods, if they belong to this AdaScaleJob and not to an earlier AdaScaleJob of its name."""
        jobs = (self.indexed_job, self.extra_job)
        owned = any(each is not None and each.owner == self.resource.uid for each in jobs)
        return self.pods if owned else ()

    @property
    def outdated_pods(self) -> list[Pod]:
        """The live pods that were made from another template, by rank."""
        live = _live(self.own_pods)
        return [live[rank] for rank in sorted(live) if live[rank].template not in (None, self.digest)]

    @property
    def program_finished(self) -> bool:
        """Whether the program has finished on rank 0. Other replicas that fail afterwards do not count."""
        service = self.service
        return (
            any(each.complete for each in self.own_indexed_jobs)
            or self.finished_beside_others is not None
            or (service is not None and service.complete)
        )

    @property
    def finished_beside_others(self) -> Pod | None:
        """A pod whose worker has finished while other containers run on, so that the pod does not end."""
        finished = (pod for pod in self.own_pods if pod.exit is not None and pod.exit.others)
        return next((pod for pod in finished if pod.exit is not None and pod.exit.exit_code == 0), None)

    @property
    def single_node(self) -> bool:
        """Whether all replicas have to share a node."""
        return self.claim is not None and self.claim.single_node

    @property
    def training_replicas(self) -> int:
        """The number of replicas of the active generation, 0 if it is broken or there is none."""
        view = self.service
        if view is None or view.active is None or view.broken:
            return 0
        return view.active.replicas

    @property
    def spares(self) -> int:
        """The number of replicas of its allocation beyond those that train."""
        current = self.current_allocation
        return current.spares if current is not None else 0

    @property
    def replica_pods(self) -> tuple[Mapping[int, str], Sequence[str]]:
        """The nodes of its pods: by rank, and those of the spares, which are pods of any ranks.

        With spares, the first ranks stand for the pods that train.
        """
        nodes = {rank: pod.node for rank, pod in self.live_pods.items() if pod.node}
        current, view = self.current_allocation, self.service
        if current is None or not current.spares:
            return nodes, ()
        active = view.active.indices if view is not None and view.active is not None else frozenset()
        ordered = sorted(nodes, key=lambda rank: (rank not in active, rank))
        training, spares = ordered[: current.replicas], ordered[current.replicas : current.indices.stop]
        placed = {rank: nodes[index] for rank, index in enumerate(sorted(training))}
        return placed, [nodes[index] for index in spares]

    @property
    def missing_spares(self) -> int:
        """The number of spares of its spec that are on no node."""
        return max(self.resource.valid_job.spare_replicas - len(self.replica_pods[1]), 0)

    @property
    def lacks_only_extra_pods(self) -> bool:
        """Whether pods of its allocation are missing or start, and all of them are extra pods."""
        core, allocation = self.core, self.current_allocation
        if core is None or allocation is None:
            return False
        started = {rank for rank, pod in self.live_pods.items() if pod.has_started}
        missing = set(range(allocation.replicas)) - started
        return bool(missing) and min(missing) >= core

    @property
    def training_extra_pods(self) -> int:
        """The number of extra pods in the active generation."""
        if self.core is None or not self.training_replicas or self.service is None:
            return 0
        active = self.service.active
        return sum(index >= self.core for index in active.indices) if active is not None else 0

    @property
    def pod_count(self) -> int:
        """For how many ranks, counted from 0, its Indexed Jobs have pods."""
        return max((each.end for each in self.own_indexed_jobs), default=0)

    @property
    def extra_pods_problem(self) -> str | None:
        """Why extra pods can't be made as the spec says; None if they can, or it is not known."""
        job = self.resource.job
        if job is None or job.opportunistic is None:
            return None
        name, priority = job.opportunistic.priority_class_name, self.admission.extra_priority
        if self.admission.extra_problem:
            return (
                f"the API server rejects extra pods: {self.admission.extra_problem}. Create PriorityClass "
                f"{name}, or change spec.opportunistic.priorityClassName"
            )
        if priority is None or self.admission.spec is None or priority < self.priority:
            return None
        return (
            f"PriorityClass {name} of extra pods has the priority {priority}, which is not lower than that "
            f"of the other pods, {self.priority}: name a lower one in spec.opportunistic.priorityClassName, "
            "or a higher one in spec.template.spec.priorityClassName"
        )

    @property
    def required_pods(self) -> int:
        """How many pods, counted from index 0, must stay because a trainer with state is there."""
        view = self.service
        if view is None:
            return self.pod_count
        required = {replica.replica for replica in view.replicas if replica.holds}
        if view.active is not None and not view.broken:
            # A member of the active generation that has not reported RUNNING yet is about to run.
            required |= view.active.indices
        return max(required | self._unregistered, default=-1) + 1

    @property
    def registrations_due(self) -> float | None:
        """When pods that are not registered are taken for ended, in seconds since 1970; None if all are."""
        if self.service is None or not self._unregistered:
            return None
        return self.service.created_at + REGISTRATION_TIMEOUT

    @property
    def _unregistered(self) -> set[int]:
        """The ranks of pods that are older than the job in the metrics service, and not registered there.

        It has lost its data. Their trainers may have state, and may be in a generation that is still active.
        """
        view = self.service
        if view is None or self.now >= view.created_at + REGISTRATION_TIMEOUT:
            return set()
        registered = {replica.replica for replica in view.replicas}
        return {
            rank
            for rank, pod in _live(self.own_pods).items()
            if pod.has_started and pod.created_at <= view.created_at and rank not in registered
        }

    @property
    def agent_errors(self) -> dict[int, PodProblem]:
        """Why agents have given up, by rank, until the metrics service accepts another one of the replica."""
        by_age = sorted(self.own_pods, key=lambda pod: pod.created_at)
        newest = {pod.rank: (pod.name, pod.exit) for pod in by_age if pod.exit is not None}
        accepted = self._accepted_replicas
        return {
            rank: _agent_error(name, end)
            for rank, (name, end) in newest.items()
            if rank not in accepted and end.of_worker and end.exit_code in _AGENT_ERRORS
        }

    @property
    def _rejections(self) -> dict[int, PodProblem]:
        """Why kubelets have not admitted the newest pods, by rank: the scheduler knew the node otherwise."""
        newest = {pod.rank: pod for pod in sorted(self.own_pods, key=lambda pod: pod.created_at)}
        return {
            rank: PodProblem(
                Reason.UNSCHEDULABLE,
                f"node {pod.node} rejects the pod: {pod.exit.reason}: {pod.exit.message}",
            )
            for rank, pod in newest.items()
            if pod.exit is not None and pod.exit.is_rejection
        }

    @property
    def _accepted_replicas(self) -> set[int]:
        replicas = self.service.replicas if self.service is not None else ()
        gone = DEPARTED_STATES | EXITED_STATES
        return {replica.replica for replica in replicas if replica.state not in gone}

    def placement_problem(self, ranks: range, spares: int = 0) -> PodProblem | None:
        """Return why one of these ranks can't start, the lowest first. None if all but the spares can."""
        problems = list(islice(self._placement_problems(ranks), spares + 1))
        return problems[-1] if len(problems) > spares else self._suspension_problem(ranks)

    def _placement_problems(self, ranks: range) -> Iterator[PodProblem]:
        """Yield why ranks can't start, in their order."""
        live, errors, rejections = self.live_pods, self.agent_errors, self._rejections
        for rank in ranks:
            pod = live.get(rank)
            if rank in errors:
                yield errors[rank]
            elif pod is None and rank in rejections:
                yield rejections[rank]
            elif pod is None and self.pod_creation_failure is not None:
                yield self.pod_creation_failure
            elif (
                pod is None
                and self.refusal is not None
                and (not self.refusal.extra or rank >= (self.core or 0))
            ):
                yield self.refusal.problem
            elif pod is not None and pod.problem is not None and pod.problem.blocks:
                yield pod.problem

    def start_problem(self, ranks: range, spares: int = 0) -> PodProblem | None:
        """Return why one of these ranks can't start, or else why one of them starts slowly."""
        live = self.live_pods
        problems = [problem for rank in ranks if rank in live and (problem := live[rank].problem)]
        slow = problems[spares] if len(problems) > spares else None
        return self.placement_problem(ranks, spares) or slow

    def _suspension_problem(self, ranks: range) -> PodProblem | None:
        """Return that somebody, such as Kueue, has suspended the Job of extra pods, if a rank is one."""
        extra = self.own_extra_job
        if extra is None or not extra.suspended or not ranks or ranks[-1] < extra.first:
            return None
        name = extra_name(self.resource.name)
        message = (
            f"Job {name}, which has the extra pods, is suspended, and not by the operator: set its "
            "spec.suspend to false. If Kueue manages jobs without a queue name here, set "
            "spec.opportunistic.queueName"
        )
        if extra.queue is not None:
            message = (
                f"Job {name}, which has the extra pods, waits to be admitted in LocalQueue {extra.queue}"
            )
        return PodProblem(Reason.EXTRA_PODS_SUSPENDED, message)


def _agent_error(pod: str, end: PodExit) -> PodProblem:
    assert end.exit_code is not None
    message = end.termination.log if end.termination else end.message
    if end.exit_code == EXIT_CHECK_FAILED:
        # Another pod of the replica, maybe on another node, has taken its place.
        message = f"pod {pod}: {message}"
    return PodProblem(_AGENT_ERRORS[end.exit_code], message)


def _live(pods: Iterable[Pod]) -> dict[int, Pod]:
    return {pod.rank: pod for pod in pods if pod.exit is None and pod.deletion_deadline is None}
