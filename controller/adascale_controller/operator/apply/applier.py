"""Carries out the actions for one job."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field, replace
from math import inf

from adascale_client import MetricsServiceClient, ServiceError, ServiceRefusedError
from adascale_controller.operator.apply.kubernetes_cluster import (
    ApiServerError,
    KubernetesCluster,
    PodRefusedError,
)
from adascale_controller.operator.apply.manifests import claim_manifest, pod_group_manifest, pod_manifest
from adascale_controller.operator.observe.observed_job import ObservedJob
from adascale_controller.operator.types.actions import Actions, Event, NewPod, StatusChange, Stop
from adascale_controller.operator.types.kubernetes import ApiObject, Resource
from adascale_core.messages.allocation import Allocation
from adascale_core.placement.replica_gpus import describe_unused_gpus
from adascale_core.views.decision import DecisionView
from adascale_core.views.jobs import JobView

logger = logging.getLogger(__name__)

STATUS_INTERVAL = 10.0
"""Seconds between two writes of a status that is not urgent, at least."""
MAX_STATUS_RATE = 12.0
"""Such writes per second, for all jobs together, on average."""
MAX_CONCURRENT_PODS = 16
"""Pods of a job that are created at the same time."""


OnStored = Callable[[str, Callable[[JobView], bool]], None]
BeforePods = Callable[[str], Awaitable[None]]
OnWritten = Callable[[Resource, ApiObject, bool], None]


@dataclass
class Applied:
    """What the next cycle has to know about the actions that were carried out."""

    is_stale: bool = False  # whether a pod that was to be stopped does not exist
    claim_created: bool = False  # whether the checkpoint claim was created
    # the API server's message, if it rejects a pod as invalid
    template_rejection: str | None = None
    refused: PodRefusedError | None = None  # its answer, if it does not create a pod now


@dataclass(eq=False)
class Applier:
    """Writes to the API server and to the metrics service."""

    cluster: KubernetesCluster
    service: MetricsServiceClient
    on_written: OnWritten
    identity: str
    on_stored: OnStored = lambda _job_id, _has_written: None
    before_pods: BeforePods | None = None
    jobs: int = 0  # the number of all jobs
    _status_written_at: dict[str, float] = field(default_factory=dict)
    _refused_gangs: set[tuple[str, int]] = field(default_factory=set)  # namespaces and statuses

    def retain(self, uids: Collection[str]) -> None:
        """Drop the memory of all AdaScaleJobs with other uids."""
        self._status_written_at = {
            uid: moment for uid, moment in self._status_written_at.items() if uid in uids
        }

    def status_due_at(self, observed: ObservedJob, actions: Actions) -> float:
        """Return when a status that is not urgent may be written, in seconds since 1970, or infinity."""
        if actions.status_change is StatusChange.NONE:
            return inf
        written_at = self._status_written_at.get(observed.resource.uid, -inf)
        return written_at + max(STATUS_INTERVAL, self.jobs / MAX_STATUS_RATE)

    async def apply(self, observed: ObservedJob, actions: Actions) -> Applied:
        """Carry out the actions for a job, the status first."""
        job, applied = observed.resource, Applied()
        await self._write_status(observed, actions)
        if actions.deregister:
            await self._deregister(job.id)
            return applied
        if actions.declare is not None:
            spec = actions.declare
            await asyncio.to_thread(self.service.declare_job, job.id, spec)
            self.on_stored(job.id, lambda read: read.spec == spec)
        # If the metrics service already has a newer allocation, the next cycle adopts it.
        resizes = actions.allocate is None or await self._allocate(job.id, actions.allocate)
        if resizes:
            await self._create_pods(observed, actions, applied)
        for pod in actions.stop_pods:
            if resizes or pod.how is Stop.FORCE:
                logger.info("%s: pod %s: %s", job.id, pod.name, pod.how.name.lower())
                applied.is_stale |= not await self.cluster.stop_pod(job.namespace, pod)
                if pod.event is not None:
                    await self._record_event(observed, pod.event)
        if actions.delete_group:
            await self.cluster.delete_workload(job.namespace, job.group_name)
        if actions.status_change is StatusChange.URGENT:
            for event in actions.events:
                await self._record_event(observed, event)
        if actions.delete_job:
            logger.info("%s: ttlSecondsAfterFinished exceeded, deleting it", job.id)
            await self.cluster.delete_job(job)
        return applied

    async def store_decision(self, decision: DecisionView) -> bool:
        """Store an explained decision with the metrics service. Returns whether it is stored."""
        try:
            await asyncio.to_thread(self.service.put_decision, decision)
        except ServiceError as error:
            logger.debug("%s: the decision is not stored: %s", decision.job, error)
            return False
        return True

    async def _deregister(self, job_id: str) -> None:
        try:
            await asyncio.to_thread(self.service.delete_job, job_id)
        except ServiceRefusedError as error:
            # The view of it was older than the last call.
            if error.status != 404:
                raise

    async def _allocate(self, job_id: str, allocation: Allocation) -> bool:
        """Request an allocation. Returns whether the job may have its pods.

        It may not if the metrics service has a newer allocation, or if a larger generation has become active
        since the job was observed.
        """
        try:
            view = await asyncio.to_thread(self.service.allocate, job_id, allocation)
        except ServiceRefusedError as error:
            if error.status != 409:
                raise
            return False
        self.on_stored(job_id, lambda read: read.version >= view.version)
        return view.active is None or view.broken or view.active.replicas <= allocation.indices.stop

    async def _record_event(self, observed: ObservedJob, event: Event) -> None:
        job = observed.resource
        logger.info("%s: %s: %s", job.id, event.reason, event.message)
        await self.cluster.record_event(job, event, observed.now, self.identity)

    async def _write_status(self, observed: ObservedJob, actions: Actions) -> None:
        job, now = observed.resource, observed.now
        is_urgent = actions.status_change is StatusChange.URGENT
        if is_urgent or now >= self.status_due_at(observed, actions):
            written = await self.cluster.apply_status(job, actions.status)
            self.on_written(Resource.ADASCALEJOBS, written, is_urgent)
            self._status_written_at[job.uid] = now

    async def _create_pods(self, observed: ObservedJob, actions: Actions, applied: Applied) -> None:
        """Create pods, ever more at a time: where the first one is rejected, no others are tried."""
        job, left = observed.resource, list(actions.create_pods)
        if job.job is None or not left:
            return
        if observed.claim is not None and observed.claim.own and not observed.claim.exists:
            claim = claim_manifest(job)
            if claim is not None:
                await self.cluster.create("persistentvolumeclaims", claim)
                applied.claim_created = True
        if self.before_pods is not None:
            await self.before_pods(job.namespace)
        gang = left[0].gang
        if gang is not None and not await self._create_gang(observed, gang):
            left = [replace(pod, gang=None) for pod in left]
        size = 1
        while left and applied.refused is None and applied.template_rejection is None:
            batch, left = left[:size], left[size:]
            await asyncio.gather(*(self._create_pod(observed, pod, applied) for pod in batch))
            size = min(2 * size, MAX_CONCURRENT_PODS)
        is_first = not observed.pods and applied.template_rejection is None and applied.refused is None
        if is_first and not (job.status.get("attempts") or {}).get("trained"):
            unused = describe_unused_gpus(job.job.gpus, job.job.spec.processes_per_replica)
            if unused is not None:
                await self._record_event(observed, Event("UnusedGPUs", unused, warning=True))

    async def _create_gang(self, observed: ObservedJob, gang: str) -> bool:
        """Create the PodGroup of a start. Returns whether it exists: the API server may refuse it."""
        job = observed.resource
        try:
            await self.cluster.create("podgroups", pod_group_manifest(job, gang, observed.pod_spec))
        except ApiServerError as error:
            if error.status == 429 or not 400 <= error.status < 500:
                raise
            refusal = job.namespace, error.status
            if refusal not in self._refused_gangs:
                self._refused_gangs.add(refusal)
                logger.info("%s: its pods are placed alone: %s", job.id, error)
            return False
        return True

    async def _create_pod(self, observed: ObservedJob, pod: NewPod, applied: Applied) -> None:
        manifest = pod_manifest(observed.resource, pod, single_node=observed.single_node)
        try:
            created = await self.cluster.create("pods", manifest)
        except ApiServerError as error:
            if error.status in {400, 422}:
                # The manifest changes with the spec only: no use in trying again before.
                applied.template_rejection = error.reply
            elif error.reply and error.status != 429:
                # That keeps nothing else from being done.
                applied.refused = PodRefusedError(str(error), error.status, error.reply)
            else:
                raise
            return
        if created is not None:
            self.on_written(Resource.PODS, created, True)
