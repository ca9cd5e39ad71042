"""Looks at all jobs: what the store, the service and the API server say of each."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from adascale_controller.measurements import JobMeasurements
from adascale_controller.operator.apart import Apart
from adascale_controller.operator.capacity import eligible_nodes, lost_nodes, pod_request
from adascale_controller.operator.cluster import Cluster, ClusterError
from adascale_controller.operator.failures import count_failures
from adascale_controller.operator.objects import PodSettings, Workload, template_digest
from adascale_controller.operator.pods import Pod, Problem, read_pod
from adascale_controller.operator.resource import ElasticJob, SpecReader
from adascale_controller.operator.sighting import BatchJob, Claim, Sighting
from adascale_controller.operator.stage import Kind as StageKind
from adascale_controller.operator.stage import Stage, has_ended, stage_of
from adascale_controller.operator.store import Kind, Store
from adascale_controller.operator.trials import Trials
from adascale_core import names
from adascale_core.failure_count import FailureCount
from adascale_core.packing import Demand
from adascale_core.views import JobView

logger = logging.getLogger(__name__)

CLAIM_INTERVAL = 5.0
"""Seconds between two looks at a volume claim that is not there."""
REFUSAL_TIMEOUT = 1.0
"""Seconds that pods may be missing before it is asked why."""
REFUSAL_INTERVAL = 5.0
"""Seconds between two such questions about one job."""
CREATION_TIMEOUT = 10.0
"""Seconds that a node may take for a pod's volumes and network before it is asked what is wrong: at first,
they often are not there yet."""


@dataclass
class Memory:
    """What is remembered of a job from one cycle to the next; all of it can be learned again."""

    measurements: JobMeasurements = field(default_factory=JobMeasurements)
    trials: Trials = field(default_factory=Trials)
    claim: Claim | None = None
    claim_seen_at: float = float("-inf")
    short_since: float | None = None
    refusal: Problem | None = None
    refusal_seen_at: float = float("-inf")
    hindrance: tuple[str, Problem] | None = None
    hindrance_seen_at: float = float("-inf")
    written_at: float = float("-inf")


@dataclass(frozen=True)
class Look:
    """A job, with what is made of it in this cycle."""

    seen: Sighting
    workload: Workload | None
    failures: FailureCount
    stage: Stage
    demand: Demand | None
    memory: Memory


class Looker:
    """Sees all jobs.

    Args:
        store: the objects as they were last seen.
        cluster: the Kubernetes API.
        pod_settings: what pods are told of the cluster.
        apart: keeps what goes wrong with one job from the others.
        clock: the time, in seconds since 1970.
    """

    def __init__(
        self,
        store: Store,
        cluster: Cluster,
        pod_settings: PodSettings,
        apart: Apart,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._cluster = cluster
        self._pod_settings = pod_settings
        self._apart = apart
        self._clock = clock
        self._memories: dict[str, Memory] = {}
        self._pods: dict[str, tuple[str, Pod]] = {}
        self.specs = SpecReader()
        """The specs as they were read."""

    async def look(self, views: Mapping[str, JobView] | None) -> list[Look]:
        """All jobs that are not on their way out.

        Args:
            views: what the metrics service knows, by job id; none: it does not answer.
        """
        raws = self._store.all(Kind.ADASCALEJOBS)
        raws = [raw for raw in raws if "deletionTimestamp" not in raw["metadata"]]
        uids = {raw["metadata"]["uid"] for raw in raws}
        self.specs.forget_all_but(uids)
        self._apart.forget_all_but({".".join(_key(raw)) for raw in raws})
        self._memories = {uid: memory for uid, memory in self._memories.items() if uid in uids}
        batches = {_key(raw): raw for raw in self._store.all(Kind.JOBS)}
        pods = self.pods_by_job()
        nodes = self._store.all(Kind.NODES)
        lost = lost_nodes(nodes)
        looks = []
        for raw in raws:
            memory = self._memories.setdefault(raw["metadata"]["uid"], Memory())
            with self._apart.job(".".join(_key(raw))):
                job = ElasticJob.read(raw, self.specs)
                raw_batch = batches.get((job.namespace, job.name))
                batch = BatchJob.read(raw_batch) if raw_batch is not None else None
                of_name = pods.get((job.namespace, job.name), [])
                own = batch.uid if batch is not None and batch.owner == job.uid else None
                mine = [one for one in of_name if own in (None, _owner(one))]
                workload = self._workload(job)
                claim = await self._claim(job, workload, memory)
                seen = Sighting(
                    job=job,
                    service=None if views is None else views.get(job.id, JobView.empty(job.id)),
                    batch=batch,
                    pods=[self._read_pod(one) for one in mine],
                    claim=claim,
                    digest=_digest(workload, batch, claim),
                    refusal=None,
                    lost_nodes=lost,
                    now=self._clock(),
                )
                seen = replace(seen, refusal=await self._refusal(seen, memory))
                seen = replace(seen, pods=await self._hindered(seen, memory))
                failures = count_failures(seen)
                stage = stage_of(seen, failures)
                demand = _demand(seen, nodes) if stage.kind is StageKind.RUN else None
                looks.append(Look(seen, workload, failures, stage, demand, memory))
        return looks

    def pods_by_job(self) -> Mapping[tuple[str, str], list[Mapping[str, Any]]]:
        """The pods of jobs, by namespace and name of the job."""
        found: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
        for raw in self._store.all(Kind.PODS):
            name = _job_of(raw)
            if name is not None:
                found[raw["metadata"]["namespace"], name].append(raw)
        present = {raw["metadata"]["uid"] for raws in found.values() for raw in raws}
        self._pods = {uid: known for uid, known in self._pods.items() if uid in present}
        return found

    def _read_pod(self, raw: Mapping[str, Any]) -> Pod:
        meta = raw["metadata"]
        version, pod = self._pods.get(meta["uid"], (None, None))
        if pod is None or version != meta["resourceVersion"]:
            pod = read_pod(raw)
            self._pods[meta["uid"]] = (meta["resourceVersion"], pod)
        return pod

    def _workload(self, job: ElasticJob) -> Workload | None:
        if job.job is None:
            return None
        return Workload(
            name=job.name,
            namespace=job.namespace,
            uid=job.uid,
            job=job.job,
            template=job.template,
            created_at=job.created_at,
            settings=self._pod_settings,
        )

    async def _claim(self, job: ElasticJob, workload: Workload | None, memory: Memory) -> Claim | None:
        name = workload.claim_name if workload is not None else None
        if workload is None or name is None:
            return None
        known = memory.claim
        if known is not None and known.name != name:
            known = memory.claim = None
        if known is not None:
            # One that the operator makes is looked at when it is made, and nobody waits for one meanwhile.
            awaited = not (known.exists or known.own or workload.job.suspend or has_ended(job.status))
            if not awaited or self._clock() - memory.claim_seen_at < CLAIM_INTERVAL:
                return known
        checkpoint = workload.job.checkpoint
        own = checkpoint.claim_name is None
        modes: Collection[str] = [checkpoint.access_mode]
        try:
            raw = await self._cluster.claim(job.namespace, name)
            exists = raw is not None
            modes = raw["spec"]["accessModes"] if raw is not None else modes
        except ClusterError as error:
            # Nothing is guessed where it may be known soon: other pods would be made for it.
            if error.status != 403:
                raise
            # Where claims may not be read, pods tell what is wrong with them.
            exists = not own
            modes = modes if own else ["ReadWriteMany"]
        memory.claim_seen_at = self._clock()
        memory.claim = Claim(name, own, exists, one_node="ReadWriteMany" not in modes)
        return memory.claim

    async def _refusal(self, seen: Sighting, memory: Memory) -> Problem | None:
        batch = seen.own_batch
        if batch is None or batch.suspended or batch.finished or len(seen.present) >= batch.size:
            memory.short_since = memory.refusal = None
            return None
        if memory.short_since is None:
            memory.short_since = seen.now
        if seen.now - memory.short_since < REFUSAL_TIMEOUT:
            return None
        if seen.now - memory.refusal_seen_at >= REFUSAL_INTERVAL:
            memory.refusal_seen_at = seen.now
            since = memory.short_since - 2 * REFUSAL_TIMEOUT
            try:
                memory.refusal = await self._cluster.refusal(seen.job.namespace, batch.uid, since)
            except ClusterError as error:
                logger.warning("%s: %s", seen.job.id, error)
        return memory.refusal

    async def _hindered(self, seen: Sighting, memory: Memory) -> Sequence[Pod]:
        """The pods, the first that a node has taken and does not start with what is wrong with it."""
        taken = [pod for pod in seen.present.values() if pod.scheduled and not pod.begun and not pod.problem]
        late = [pod for pod in taken if seen.now > pod.created_at + CREATION_TIMEOUT]
        if not late:
            memory.hindrance = None
            return seen.pods
        first = min(late, key=lambda pod: pod.rank)
        if seen.now - memory.hindrance_seen_at >= REFUSAL_INTERVAL:
            memory.hindrance_seen_at = seen.now
            try:
                problem = await self._cluster.hindrance(seen.job.namespace, first.uid)
                memory.hindrance = (first.uid, problem) if problem is not None else None
            except ClusterError as error:
                logger.warning("%s: %s", seen.job.id, error)
        if memory.hindrance is None or memory.hindrance[0] != first.uid:
            return seen.pods
        hindered = replace(first, problem=memory.hindrance[1])
        return [hindered if pod is first else pod for pod in seen.pods]


def _key(raw: Mapping[str, Any]) -> tuple[str, str]:
    return raw["metadata"]["namespace"], raw["metadata"]["name"]


def _job_of(pod: Mapping[str, Any]) -> str | None:
    found: str | None = (pod["metadata"].get("labels") or {}).get(names.LABEL_JOB)
    return found


def _owner(raw: Mapping[str, Any]) -> str | None:
    owners = raw["metadata"].get("ownerReferences") or ()
    return next((one["uid"] for one in owners if one.get("controller")), None)


def _demand(seen: Sighting, nodes: Collection[Mapping[str, Any]]) -> Demand:
    """What a job asks of the nodes."""
    pod_spec = seen.job.template["spec"]
    return Demand(
        request=pod_request(pod_spec),
        nodes=eligible_nodes(pod_spec, nodes),
        placed={rank: pod.node for rank, pod in seen.present.items() if pod.node},
        one_node=seen.one_node,
    )


def _digest(workload: Workload | None, batch: BatchJob | None, claim: Claim | None) -> str:
    """Of what the pods are to be made from; where that is not known, as it is."""
    if workload is None:
        return (batch.digest if batch is not None else None) or ""
    return template_digest(workload, one_node=claim is not None and claim.one_node)
