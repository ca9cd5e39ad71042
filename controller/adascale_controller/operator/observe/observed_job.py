"""The observed state of one AdaScaleJob."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from adascale_controller.failing_counts import FailingCount
from adascale_controller.operator.observe.adascalejob import AdaScaleJob
from adascale_controller.operator.observe.pods import Pod, PodProblem
from adascale_controller.operator.types.conditions import Reason
from adascale_controller.operator.types.kubernetes import ApiObject
from adascale_controller.operator.types.workload import Workload
from adascale_core import names
from adascale_core.decision.accelerators import Accelerator
from adascale_core.failures.exit_codes import EXIT_REFUSED
from adascale_core.messages.allocation import Allocation
from adascale_core.messages.pacing import MAX_INTERVAL
from adascale_core.rendezvous.rendezvous import DEPARTED_STATES, EXITED_STATES
from adascale_core.views.jobs import JobView

REGISTRATION_TIMEOUT = MAX_INTERVAL
"""Seconds within which all agents register with a metrics service that has lost its data."""


@dataclass(frozen=True)
class IndexedJob:
    """The Indexed Job (batch/v1) of an AdaScaleJob's name.

    Args:
        uid: its uid.
        owner: uid of the AdaScaleJob that owns it. None if no AdaScaleJob does.
        digest: digest of the template that its pods are made from.
        parallelism: how many pods it has when it is not suspended.
        suspended: `spec.suspend`.
        deleting: whether it has a deletion timestamp.
        complete: whether one of its pods has succeeded, so that its success policy is met.
        failed: reason and message, if the Job controller has failed it.
        active_deadline_seconds: `spec.activeDeadlineSeconds`.
        accelerator: the type of accelerator that its pods require. None if they require none.
    """

    uid: str
    owner: str | None
    digest: str | None
    parallelism: int
    suspended: bool
    deleting: bool
    complete: bool
    failed: tuple[str, str] | None
    active_deadline_seconds: int | None = None
    accelerator: str | None = None

    @classmethod
    def read(cls, raw: ApiObject) -> Self:
        """Return the Indexed Job in an object of the API."""
        meta, spec = raw["metadata"], raw["spec"]
        owners = [owner["uid"] for owner in meta.get("ownerReferences") or () if owner["kind"] == names.KIND]
        conditions = {
            condition["type"]: condition
            for condition in raw.get("status", {}).get("conditions") or ()
            if condition["status"] == "True"
        }
        # FailureTarget and SuccessCriteriaMet come before the pods have ended; the outcome is certain then.
        failed = conditions.get("Failed") or conditions.get("FailureTarget")
        return cls(
            uid=meta["uid"],
            owner=owners[0] if owners else None,
            digest=(meta.get("annotations") or {}).get(names.ANNOTATION_TEMPLATE),
            parallelism=spec.get("parallelism", 1),
            suspended=bool(spec.get("suspend")),
            deleting="deletionTimestamp" in meta,
            complete="Complete" in conditions or "SuccessCriteriaMet" in conditions,
            failed=(failed.get("reason", "Failed"), failed.get("message", "")) if failed else None,
            active_deadline_seconds=spec.get("activeDeadlineSeconds"),
            accelerator=(meta.get("annotations") or {}).get(names.ANNOTATION_ACCELERATOR),
        )

    def suits(self, accelerator: Accelerator) -> bool:
        """Whether its pods can run on this type of accelerator, and on no other if that is required."""
        return self.accelerator == accelerator.type or (self.accelerator is None and not accelerator.required)

    @property
    def finished(self) -> bool:
        """Whether it creates no more pods."""
        return self.complete or self.failed is not None


@dataclass(frozen=True)
class CheckpointClaim:
    """The PersistentVolumeClaim for checkpoints.

    Args:
        name: its name.
        own: whether the operator creates it.
        exists: whether it exists.
        single_node: whether only one node can mount it at a time.
    """

    name: str
    own: bool
    exists: bool
    single_node: bool


@dataclass(frozen=True)
class CachedJob:
    """An AdaScaleJob with its Indexed Job and pods, as the caches hold them.

    Args:
        resource: the AdaScaleJob.
        workload: what its objects are made from. None if the spec is invalid.
        indexed_job: the Job of the same name.
        pods: the pods of the same name.
        lost_nodes: names of nodes that are not ready.
    """

    resource: AdaScaleJob
    workload: Workload | None
    indexed_job: IndexedJob | None
    pods: Sequence[Pod]
    lost_nodes: frozenset[str]

    @property
    def own_indexed_job(self) -> IndexedJob | None:
        """The Indexed Job, if this AdaScaleJob owns it and it is not being deleted."""
        indexed_job = self.indexed_job
        owned = (
            indexed_job is not None and indexed_job.owner == self.resource.uid and not indexed_job.deleting
        )
        return indexed_job if owned else None

    @property
    def live_pods(self) -> dict[int, Pod]:
        """The pods that have not ended and are not being deleted, by rank."""
        return _live(self.pods)


@dataclass(frozen=True)
class ObservedJob(CachedJob):
    """The observed state of one AdaScaleJob at one moment: what the caches hold, and what had to be fetched.

    Args:
        service: its view in the metrics service. None if the metrics service does not answer.
        claim: the claim for checkpoints. None if checkpoints are saved at a path.
        digest: digest of the current template.
        pod_creation_failure: why the Job controller can't create pods.
        now: seconds since 1970.
    """

    service: JobView | None
    claim: CheckpointClaim | None
    digest: str
    pod_creation_failure: PodProblem | None
    now: float

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
        owned = self.indexed_job is not None and self.indexed_job.owner == self.resource.uid
        return self.pods if owned else ()

    @property
    def program_finished(self) -> bool:
        """Whether the program has finished on rank 0. Other replicas that fail afterwards do not count."""
        indexed_job, service = self.own_indexed_job, self.service
        return (indexed_job is not None and indexed_job.complete) or (
            service is not None and service.complete
        )

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
    def required_pods(self) -> int:
        """How many pods, counted from index 0, must stay because a trainer with state is there."""
        view = self.service
        if view is None:
            indexed_job = self.own_indexed_job
            return indexed_job.parallelism if indexed_job and not indexed_job.suspended else 0
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
    def refusals(self) -> dict[int, PodProblem]:
        """Why the metrics service has refused replicas, by rank, until it accepts another agent of theirs."""
        by_age = sorted(self.own_pods, key=lambda pod: pod.created_at)
        newest = {pod.rank: pod.exit for pod in by_age if pod.exit is not None}
        accepted = self._accepted_replicas
        return {
            rank: PodProblem(Reason.REPLICA_REFUSED, end.termination.log if end.termination else end.message)
            for rank, end in newest.items()
            if rank not in accepted and end.of_worker and end.exit_code == EXIT_REFUSED
        }

    @property
    def _accepted_replicas(self) -> set[int]:
        replicas = self.service.replicas if self.service is not None else ()
        gone = DEPARTED_STATES | EXITED_STATES
        return {replica.replica for replica in replicas if replica.state not in gone}

    def placement_problem(self, ranks: range) -> PodProblem | None:
        """Return why one of these ranks can't start, the lowest first. None if all can."""
        live, refusals = self.live_pods, self.refusals
        for rank in ranks:
            if rank in refusals:
                return refusals[rank]
            pod = live.get(rank)
            if pod is None and self.pod_creation_failure is not None:
                return self.pod_creation_failure
            if pod is not None and pod.problem is not None and pod.problem.blocks:
                return pod.problem
        return None

    def start_problem(self, ranks: range) -> PodProblem | None:
        """Return why one of these ranks can't start, or else why one of them starts slowly."""
        live = self.live_pods
        problems = (live[rank].problem for rank in ranks if rank in live)
        return self.placement_problem(ranks) or next((problem for problem in problems if problem), None)


def _live(pods: Iterable[Pod]) -> dict[int, Pod]:
    return {pod.rank: pod for pod in pods if pod.exit is None and pod.deletion_deadline is None}
