"""The observed state of one AdaScaleJob: its cached objects, and lookups.

Lookups are reads of the API server that the caches don't answer. A job may need three: its checkpoint claim,
what admission makes of its pods, and the Events of a pod whose containers don't start.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from adascale_controller.job.failing_counts import FailingCount
from adascale_controller.job.reasons import Reason
from adascale_controller.operator.observe.adascalejob import AdaScaleJob, digest_of, template_digest
from adascale_controller.operator.observe.pods import Pod, PodExit, PodProblem, with_start_problem
from adascale_controller.operator.types.kubernetes import ApiObject, only
from adascale_controller.operator.types.settings import OperatorSettings
from adascale_controller.schema import DEFAULT_ACCESS_MODE
from adascale_core.failures import EXIT_CHECK_FAILED, EXIT_REFUSED, EXIT_SERVICE_UNAVAILABLE
from adascale_core.messages.allocation import ActiveAllocation, Allocation
from adascale_core.messages.registration import MAX_INTERVAL
from adascale_core.rendezvous.rendezvous import DEPARTED_STATES, EXITED_STATES
from adascale_core.views.jobs import JobView


@dataclass(frozen=True)
class QueueView:
    """What Kueue says about a pod, or about all pods of a job."""

    admitted: int = 0  # the number of pods for which quota is reserved
    # the number of further replicas that the unused quota of its flavor holds. None if that is not known.
    room: int | None = None
    cluster_queue: str = ""  # the ClusterQueue that has reserved the quota. Empty if none has.
    message: str = ""  # why Kueue does not admit a pod


_AGENT_ERRORS = {
    EXIT_CHECK_FAILED: Reason.REPLICA_CHECK_FAILED,
    EXIT_REFUSED: Reason.REPLICA_REFUSED,
    EXIT_SERVICE_UNAVAILABLE: Reason.METRICS_SERVICE_UNREACHABLE,
}
"""Exit codes of agents that give up, and the reasons of the conditions that show what they say."""
REGISTRATION_TIMEOUT = MAX_INTERVAL
"""Seconds within which all agents register with a metrics service that has lost its data."""


_UNKNOWN = JobView.empty()
_PRIORITY_FIELDS = ("priority", "priorityClassName", "preemptionPolicy")


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
    has_quota: bool = True  # whether a quota allowed another pod when that was asked
    asked_at: float = 0.0  # when it was asked, in seconds since 1970
    # the priority of extra pods. None if the job has none, or it is not known.
    extra_priority: int | None = None
    extra_problem: str = ""  # why the API server rejects extra pods


@dataclass(frozen=True)
class ObservedJob:
    """An AdaScaleJob at one moment: what the caches hold, and, once it is known, what had to be fetched."""

    resource: AdaScaleJob
    pods: Sequence[Pod]  # those that it controls
    lost_nodes: frozenset[str]  # names of nodes that are not ready
    # the other pods with its name that have not ended, of an earlier AdaScaleJob or an earlier version
    others: Sequence[Pod] = ()
    service: JobView | None = None  # its view in the metrics service. None if that does not answer.
    # the claim for checkpoints. None if checkpoints are saved at a path.
    claim: CheckpointClaim | None = None
    digest: str = ""
    refusal: PodProblem | None = None  # why the API server creates no pod that is missing
    now: float = 0.0  # seconds since 1970
    admission: Admission = Admission()  # what admission makes of its pods
    queue: QueueView | None = None  # what Kueue says about its pods. None if that is not known.

    @property
    def core(self) -> int | None:
        """The number of replicas that are not extra pods; None if none of its pods are."""
        job = self.resource.job
        return job.core_replicas if job is not None and job.spec.opportunistic is not None else None

    @property
    def accelerator(self) -> str | None:
        """The type that its pods require. None if they require none, or there are none."""
        return next((pod.accelerator for pod in self.live_pods.values() if pod.accelerator is not None), None)

    @property
    def group_size(self) -> int:
        """How many pods, counted from rank 0, are admitted as one: its pods say it, or else the spec."""
        # A pod that Kubernetes has placed and that leaves does not keep the next ones from being a gang.
        stays = [pod for pod in self.pods if pod.queue is not None or pod.deletion_deadline is None]
        job, present = self.resource.job, [pod for pod in stays if not pod.is_over]
        smallest = job.core_replicas if job is not None else 0
        if any(pod.rank < smallest and not (pod.group_size or pod.awaits_gang) for pod in present):
            # They were admitted alone, before an edit of the smallest count, or are placed.
            return 1
        return max((pod.group_size for pod in present), default=0) or smallest

    @property
    def gang(self) -> str | None:
        """The name of the PodGroup of its smallest count; None while the priority of its pods is not known.

        The scheduler of Kubernetes places no pod in a PodGroup of another priority, and no fewer than its
        number. So each template, priority and size has its own.
        """
        job, spec = self.resource.job, self.admission.spec
        if job is None or spec is None:
            return None
        digest = digest_of([self.digest, only(spec, _PRIORITY_FIELDS)])
        return f"{self.resource.group_name}-{job.core_replicas}-{digest[:8]}"

    @property
    def live_pods(self) -> dict[int, Pod]:
        """The pods that have not ended and are not being deleted, by rank."""
        return {pod.rank: pod for pod in self.pods if pod.exit is None and pod.deletion_deadline is None}

    @property
    def is_queued(self) -> bool:
        """Whether Kueue decides when it may run."""
        return self.resource.queueing.queue is not None

    @property
    def is_held(self) -> bool:
        """Whether Kueue has not admitted its smallest count, and none of its replicas trains."""
        live = self.live_pods
        admitted = {rank for rank, pod in live.items() if not pod.is_gated}
        return self.is_queued and not self.required_pods and not admitted.issuperset(range(self.group_size))

    @property
    def placement_spec(self) -> ApiObject:
        """The PodSpec that says which nodes its pods may use, with what Kueue adds for its flavor."""
        return {**self.pod_spec, **self.flavor}

    @property
    def flavor(self) -> Mapping[str, Any]:
        """`nodeSelector` and `tolerations` of the first pod that Kueue has admitted, for all its pods."""
        live = self.live_pods
        admitted = (live[rank] for rank in sorted(live) if live[rank].queue and not live[rank].is_gated)
        return next((pod.scheduling for pod in admitted), {})

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
        known = [admitted] if isinstance(admitted, int) else [pod.priority for pod in self.pods]
        return max((each for each in known if each is not None), default=0)

    @property
    def current_allocation(self) -> Allocation | None:
        """The newest allocation, from the status or from the metrics service.

        With equal generations the metrics service's allocation holds, since agents follow it.
        """
        recorded = self.resource.recorded_allocation
        desired = self.view.desired
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
    def outdated_pods(self) -> list[Pod]:
        """The live pods of another template or priority, or that wait in another or broken gang, by rank."""
        live, core, gang, job = self.live_pods, self.core, self.gang, self.resource.job
        smallest = job.core_replicas if job is not None else 0
        is_broken = any(rank < smallest and pod.gang is None for rank, pod in live.items())
        return [
            pod
            for rank, pod in sorted(live.items())
            if pod.template not in (None, self.digest)
            or pod.is_extra is not (core is not None and rank >= core)
            or (pod.awaits_gang and (is_broken or pod.gang != (gang or pod.gang)))
        ]

    @property
    def program_finished(self) -> bool:
        """Whether the program has finished on rank 0. Other replicas that fail afterwards do not count."""
        return self.finished_pod is not None or self.view.complete

    @property
    def finished_pod(self) -> Pod | None:
        """A pod whose worker has finished: an agent succeeds only when the program has finished on rank 0."""
        finished = [
            (pod.exit.ended_at or pod.created_at, pod.rank, pod)
            for pod in self.pods
            if pod.exit is not None and pod.exit.of_worker and pod.exit.exit_code == 0
        ]
        return min(finished, key=lambda each: each[:2])[2] if finished else None

    @property
    def single_node(self) -> bool:
        """Whether all replicas have to share a node."""
        return self.claim is not None and self.claim.single_node

    @property
    def view(self) -> JobView:
        """Its view in the metrics service; an empty one if the metrics service does not answer."""
        return _UNKNOWN if self.service is None else self.service

    @property
    def training(self) -> ActiveAllocation | None:
        """The active generation. None if it is broken or there is none."""
        return None if self.view.broken else self.view.active

    @property
    def training_replicas(self) -> int:
        """The number of replicas of the active generation, 0 if it is broken or there is none."""
        return self.training.replicas if self.training is not None else 0

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
        current, view = self.current_allocation, self.view
        if current is None or not current.spares:
            return nodes, ()
        active = view.active.indices if view.active is not None else frozenset()
        ordered = sorted(nodes, key=lambda rank: (rank not in active, rank))
        training, spares = ordered[: current.replicas], ordered[current.replicas : current.indices.stop]
        placed = {rank: nodes[index] for rank, index in enumerate(sorted(training))}
        return placed, [nodes[index] for index in spares]

    @property
    def missing_spares(self) -> int:
        """The number of spares of its spec that are on no node."""
        return max(self.resource.valid_job.spec.spare_replicas - len(self.replica_pods[1]), 0)

    @property
    def extra_pods_problem(self) -> str | None:
        """Why extra pods can't be made as the spec says; None if they can, or it is not known."""
        job = self.resource.job
        if job is None or job.spec.opportunistic is None:
            return None
        name, priority = job.spec.opportunistic.priority_class_name, self.admission.extra_priority
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
        if self.service is None:
            return max(self.live_pods, default=-1) + 1
        required = {replica.replica for replica in self.view.replicas if replica.holds}
        if self.training is not None:
            # A member of the active generation that has not reported RUNNING yet is about to run.
            required |= self.training.indices
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
            for rank, pod in self.live_pods.items()
            if pod.has_started and pod.created_at <= view.created_at and rank not in registered
        }

    @property
    def agent_errors(self) -> dict[int, PodProblem]:
        """Why agents have given up, by rank, until the metrics service accepts another one of the replica."""
        by_age = sorted(self.pods, key=lambda pod: pod.created_at)
        newest = {pod.rank: (pod.name, pod.exit) for pod in by_age if pod.exit is not None}
        gone = DEPARTED_STATES | EXITED_STATES
        accepted = {replica.replica for replica in self.view.replicas if replica.state not in gone}
        return {
            rank: _agent_error(name, end)
            for rank, (name, end) in newest.items()
            if rank not in accepted and end.of_worker and end.exit_code in _AGENT_ERRORS
        }

    @property
    def _rejections(self) -> dict[int, PodProblem]:
        """Why kubelets have not admitted the newest pods, by rank: the scheduler knew the node otherwise."""
        newest = {pod.rank: pod for pod in sorted(self.pods, key=lambda pod: pod.created_at)}
        return {
            rank: PodProblem(
                Reason.UNSCHEDULABLE,
                f"node {pod.node} rejects the pod: {pod.exit.reason}: {pod.exit.message}",
            )
            for rank, pod in newest.items()
            if pod.exit is not None and pod.exit.is_rejection
        }

    def placement_problem(self, ranks: range, spares: int = 0) -> PodProblem | None:
        """Return why one of these ranks can't start, the lowest first. None if all but the spares can."""
        problems = list(islice(self._placement_problems(ranks), spares + 1))
        return problems[-1] if len(problems) > spares else None

    def _placement_problems(self, ranks: range) -> Iterator[PodProblem]:
        """Yield why ranks can't start, in their order."""
        live, errors, rejections = self.live_pods, self.agent_errors, self._rejections
        for rank in ranks:
            pod = live.get(rank)
            if rank in errors:
                yield errors[rank]
            elif pod is None and rank in rejections:
                yield rejections[rank]
            elif pod is None and self.refusal is not None:
                yield self.refusal
            elif pod is not None and pod.problem is not None and pod.problem.blocks:
                yield pod.problem

    def start_problem(self, ranks: range, spares: int = 0) -> PodProblem | None:
        """Return why one of these ranks can't start, or else why one of them starts slowly."""
        live = self.live_pods
        problems = [problem for rank in ranks if rank in live and (problem := live[rank].problem)]
        slow = problems[spares] if len(problems) > spares else None
        return self.placement_problem(ranks, spares) or slow


def _agent_error(pod: str, end: PodExit) -> PodProblem:
    assert end.exit_code is not None
    message = end.termination.log if end.termination else end.message
    if end.exit_code == EXIT_CHECK_FAILED:
        # Another pod of the replica, maybe on another node, has taken its place.
        message = f"pod {pod}: {message}"
    return PodProblem(_AGENT_ERRORS[end.exit_code], message)


# -- observing it -------------------------------------------------------------------------------------------


@dataclass
class LookupResults:
    """The newest results of a job's lookups. Each is None until it is known."""

    claim: CheckpointClaim | None = None
    # uid of a pod that starts slowly, and the Events about it, of `START_EVENTS`
    slow_pod: tuple[str, Sequence[ApiObject]] = ("", ())
    admission: Admission | None = None  # what admission makes of its pods
    refusal: PodProblem | None = None  # why the API server creates no pod that is missing


def read_claim(job: AdaScaleJob, name: str, raw: ApiObject | None) -> CheckpointClaim:
    """Return the checkpoint claim of a job."""
    checkpoint = job.valid_job.spec.checkpoint
    modes = raw["spec"]["accessModes"] if raw is not None else [checkpoint.access_mode or DEFAULT_ACCESS_MODE]
    own = checkpoint.claim_name is None
    return CheckpointClaim(name, own, raw is not None, single_node="ReadWriteMany" not in modes)


def assumed_claim(job: AdaScaleJob) -> ApiObject | None:
    """Return the checkpoint claim of a job where claims may not be read.

    A claim of the user's is assumed to exist and to be ReadWriteMany. If it is not, its pods show it.
    """
    is_own = job.valid_job.spec.checkpoint.claim_name is None
    return None if is_own else {"spec": {"accessModes": ["ReadWriteMany"]}}


def creation_problem(message: str) -> PodProblem:
    """Return why there are no pods, from the API server's message about a pod that it rejects."""
    exceeded = "exceeded quota" in message
    return PodProblem(Reason.QUOTA_EXCEEDED if exceeded else Reason.POD_CREATION_FAILED, message)


class Observer:
    """Reads cached objects. Parsed specs are kept until their objects change."""

    def __init__(self, settings: OperatorSettings) -> None:
        self._settings = settings
        self._jobs: dict[str, AdaScaleJob] = {}

    def retain(self, uids: Collection[str]) -> None:
        """Drop the memory of all AdaScaleJobs with other uids."""
        self._jobs = {uid: job for uid, job in self._jobs.items() if uid in uids}

    def read(self, raw: ApiObject, pods: Sequence[Pod], lost_nodes: frozenset[str]) -> ObservedJob:
        """Return an AdaScaleJob as the caches hold it."""
        uid = raw["metadata"]["uid"]
        job = self._jobs[uid] = AdaScaleJob.read(raw, self._settings, self._jobs.get(uid))
        own = [pod for pod in pods if pod.controller[2] == uid and pod.rank >= 0]
        others = [pod for pod in pods if pod not in own and not pod.has_ended]
        return ObservedJob(job, own, lost_nodes, others)

    def reject(self, job: AdaScaleJob, reason: str) -> None:
        """Record that the API server rejects an object made from the current spec of a job."""
        self._jobs[job.uid] = replace(job, job=None, invalid=reason)


def observe(
    cached: ObservedJob,
    lookups: LookupResults,
    views: Mapping[str, JobView] | None,
    now: float,
    queue: QueueView | None = None,
) -> ObservedJob:
    """Return a job with what had to be fetched."""
    job = cached.resource
    return replace(
        cached,
        # The next write creates a job that the metrics service does not have.
        service=None if views is None else views.get(job.id, JobView.empty(job.id, created_at=now)),
        pods=[_with_problem(pod, lookups, now, queue) for pod in cached.pods],
        claim=lookups.claim,
        digest=_digest(cached, lookups),
        refusal=lookups.refusal,
        now=now,
        admission=lookups.admission or Admission(),
        queue=queue,
    )


def _with_problem(pod: Pod, lookups: LookupResults, now: float, queue: QueueView | None) -> Pod:
    """Return a pod that starts slowly, or is gated by Kueue, with why that is."""
    if pod.problem is not None and pod.is_gated and queue is not None and queue.message:
        return replace(pod, problem=replace(pod.problem, message=f"{pod.problem.message}: {queue.message}"))
    uid, events = lookups.slow_pod
    return with_start_problem(pod, events if pod.uid == uid else (), now)


def _digest(cached: ObservedJob, lookups: LookupResults) -> str:
    """Return the digest of the current template. An invalid spec leaves the pods as they are."""
    if cached.resource.job is None:
        return next((pod.template for pod in cached.live_pods.values() if pod.template), "")
    single_node = lookups.claim is not None and lookups.claim.single_node
    return template_digest(cached.resource, single_node=single_node)
