"""All that is seen of one job at a moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from adascale_controller.operator.pods import Pod, Problem
from adascale_controller.operator.resource import ElasticJob
from adascale_core import names
from adascale_core.messages import Allocation, ReplicaState
from adascale_core.views import JobView


@dataclass(frozen=True)
class BatchJob:
    """The Indexed Job of an AdaScaleJob.

    Args:
        uid: which one.
        owner: the uid of the AdaScaleJob that it belongs to; none if it belongs to none.
        digest: of what its pods are made from.
        size: how many pods it is to have.
        suspended: whether it has none for now.
        deleting: whether it is on its way out.
        complete: whether index 0 has succeeded.
        failed: reason and message, if the Job controller has given it up.
        deadline: the seconds that it may be active for; none: any.
    """

    uid: str
    owner: str | None
    digest: str | None
    size: int
    suspended: bool
    deleting: bool
    complete: bool
    failed: tuple[str, str] | None
    deadline: int | None = None

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> Self:
        """The Job in an object of the API."""
        meta, spec = raw["metadata"], raw["spec"]
        owners = [one["uid"] for one in meta.get("ownerReferences") or () if one["kind"] == names.KIND]
        conditions = {
            one["type"]: one
            for one in raw.get("status", {}).get("conditions") or ()
            if one["status"] == "True"
        }
        # Both kinds of conditions come some time before the pods have ended; what they say is certain then.
        failed = conditions.get("Failed") or conditions.get("FailureTarget")
        return cls(
            uid=meta["uid"],
            owner=owners[0] if owners else None,
            digest=(meta.get("annotations") or {}).get(names.ANNOTATION_TEMPLATE),
            size=spec.get("parallelism", 1),
            suspended=bool(spec.get("suspend")),
            deleting="deletionTimestamp" in meta,
            complete="Complete" in conditions or "SuccessCriteriaMet" in conditions,
            failed=(failed.get("reason", "Failed"), failed.get("message", "")) if failed else None,
            deadline=spec.get("activeDeadlineSeconds"),
        )

    @property
    def finished(self) -> bool:
        """Whether it makes no more pods."""
        return self.complete or self.failed is not None


@dataclass(frozen=True)
class Claim:
    """The volume claim that state is saved in.

    Args:
        name: its name.
        own: whether the operator makes it.
        exists: whether there is one.
        one_node: whether only one node can mount it at a time.
    """

    name: str
    own: bool
    exists: bool
    one_node: bool


@dataclass(frozen=True)
class Sighting:
    """All that is seen of one job at a moment.

    Args:
        job: the AdaScaleJob.
        service: what the metrics service knows of it; none: it does not answer.
        batch: the Job of its name, if there is one.
        pods: the pods of its name.
        claim: where state is saved; none: at a path.
        digest: of what its pods are to be made from.
        refusal: why pods are missing that the Job controller tried to create.
        lost_nodes: nodes that are not heard of any more.
        now: the moment, in seconds since 1970.
    """

    job: ElasticJob
    service: JobView | None
    batch: BatchJob | None
    pods: Sequence[Pod]
    claim: Claim | None
    digest: str
    refusal: Problem | None
    lost_nodes: frozenset[str]
    now: float

    @property
    def standing(self) -> Allocation | None:
        """The newest allocation, whoever has it.

        Where the service has come to the recorded number by itself, agents follow the service.
        """
        recorded = self.job.recorded
        desired = self.service.desired if self.service is not None else None
        if recorded is None or desired is None:
            return recorded
        return desired if desired.generation >= recorded.generation else recorded

    @property
    def own_batch(self) -> BatchJob | None:
        """The Job, where it is this AdaScaleJob's and not on its way out."""
        batch = self.batch
        return batch if batch is not None and batch.owner == self.job.uid and not batch.deleting else None

    @property
    def own_pods(self) -> Sequence[Pod]:
        """The pods, where they are this AdaScaleJob's and not those of an earlier one of its name."""
        return self.pods if self.batch is not None and self.batch.owner == self.job.uid else ()

    @property
    def has_come_to_its_end(self) -> bool:
        """Whether the program has, on rank 0: how the other replicas fall then is no failure of it."""
        batch, service = self.own_batch, self.service
        return (batch is not None and batch.complete) or (service is not None and service.complete)

    @property
    def one_node(self) -> bool:
        """Whether all replicas have to share a node."""
        return self.claim is not None and self.claim.one_node

    @property
    def training(self) -> int:
        """The replicas of the generation that is whole and at work; 0 if there is none."""
        view = self.service
        if view is None or view.active is None or view.broken:
            return 0
        return view.active.replicas

    @property
    def present(self) -> dict[int, Pod]:
        """The pod of each rank that has not ended, by rank."""
        return {pod.rank: pod for pod in self.pods if pod.ended is None and pod.deleting_since is None}

    @property
    def held(self) -> int:
        """How many pods must stay, counted from rank 0, since a trainer still runs or saves there."""
        view = self.service
        if view is None:
            return self.own_batch.size if self.own_batch and not self.own_batch.suspended else 0
        if view.broken:
            # It re-enters from the last checkpoint: nothing is saved any more.
            return 0
        running = [one.rank for one in view.replicas if one.state is ReplicaState.RUNNING]
        # Who has a place in what is active, but has not told yet that it has taken it, is about to run.
        return max(self.training, max(running, default=-1) + 1)

    def problem(self, ranks: range) -> Problem | None:
        """What keeps one of these ranks from starting, the lowest first."""
        present = self.present
        for rank in ranks:
            pod = present.get(rank)
            if pod is None and self.refusal is not None:
                return self.refusal
            if pod is not None and pod.problem is not None:
                return pod.problem
        return None
