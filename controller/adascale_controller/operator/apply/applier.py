"""Carries out the actions for one job."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass
from heapq import nsmallest

from adascale_client import ServiceError, ServiceRefusedError
from adascale_controller.operator.apply.cluster import (
    AllocationService,
    ApiServerError,
    Cluster,
    JobRefusedError,
)
from adascale_controller.operator.apply.indexed_job import (
    claim_manifest,
    indexed_job_manifest,
    owner_reference,
    resize_extra_patch,
    resize_patch,
    template_warnings,
)
from adascale_controller.operator.observe.observed_job import IndexedJob, ObservedJob
from adascale_controller.operator.types.actions import Actions, Event
from adascale_controller.operator.types.kubernetes import ApiObject, Resource, timestamp
from adascale_controller.operator.types.workload import extra_name
from adascale_core import names
from adascale_core.messages.allocation import Allocation
from adascale_core.messages.job_spec import JobSpec
from adascale_core.placement.replica_gpus import describe_unused_gpus
from adascale_core.views.decision import DecisionView
from adascale_core.views.jobs import JobView

logger = logging.getLogger(__name__)

STATUS_INTERVAL = 10.0
"""Seconds between two writes of a status that is not urgent, at least."""
MAX_STATUS_RATE = 12.0
"""Such writes per second, for all jobs together, beyond `STATUS_BURST`."""
STATUS_BURST = 20
"""Such writes that may begin at any time, one after the other."""


OnStored = Callable[[str, Callable[[JobView], bool]], None]
BeforePods = Callable[[str], Awaitable[None]]
OnWritten = Callable[[Resource, ApiObject, bool], None]


@dataclass
class Applied:
    """What the next cycle has to know about the actions that were carried out."""

    claim_created: bool = False  # whether the checkpoint claim was created
    # the API server's message, if it rejects the Indexed Job as invalid
    template_rejection: str | None = None
    refused: JobRefusedError | None = None  # its answer, if it does not create an Indexed Job now


class Applier:
    """Writes to the API server and to the metrics service."""

    def __init__(
        self,
        cluster: Cluster,
        service: AllocationService,
        on_written: OnWritten,
        identity: str,
        on_stored: OnStored = lambda _job_id, _has_written: None,
        before_pods: BeforePods | None = None,
    ) -> None:
        self._cluster = cluster
        self._service = service
        self._on_written = on_written
        self._identity = identity
        self._on_stored = on_stored
        self._before_pods = before_pods
        self._status_written_at: dict[str, float] = {}
        self._statuses_until = float("-inf")
        """Until when the writes of such statuses so far use up their rate, in seconds since 1970."""
        self.jobs = 0
        """The number of all jobs."""

    def retain(self, uids: Collection[str]) -> None:
        """Drop the memory of all AdaScaleJobs with other uids."""
        self._status_written_at = {
            uid: moment for uid, moment in self._status_written_at.items() if uid in uids
        }

    def take_statuses(
        self, planned: Iterable[tuple[ObservedJob, Actions]], now: float
    ) -> list[tuple[ObservedJob, Actions]]:
        """Return the jobs whose status, which is not urgent, is written now, within the rate of such writes.

        Those whose status was not written for the longest time come first.
        """
        # A time that is too far away was set before the clock was set back.
        until = min(max(self._statuses_until, now - STATUS_BURST / MAX_STATUS_RATE), now)
        taken = nsmallest(
            int((now - until) * MAX_STATUS_RATE + 0.5), planned, key=lambda each: self._written_at(each[0])
        )
        self._statuses_until = until + len(taken) / MAX_STATUS_RATE
        return taken

    def _written_at(self, observed: ObservedJob) -> float:
        return self._status_written_at.get(observed.resource.uid, float("-inf"))

    def status_due(self, observed: ObservedJob, actions: Actions) -> bool:
        """Whether the status has changed, and the interval of statuses that are not urgent has passed."""
        return actions.status_changed and observed.now >= self.status_due_at(observed)

    def status_due_at(self, observed: ObservedJob) -> float:
        """Return when a status that is not urgent may be written, in seconds since 1970."""
        return self._written_at(observed) + max(STATUS_INTERVAL, self.jobs / MAX_STATUS_RATE)

    async def apply(self, observed: ObservedJob, actions: Actions) -> Applied:
        """Carry out the actions for a job, the status first."""
        job, applied = observed.resource, Applied()
        await self._write_status(observed, actions)
        if actions.deregister:
            await self._deregister(job.id)
            return applied
        if actions.declare is not None:
            await self._declare(job.id, actions.declare)
        # If the metrics service already has a newer allocation, the next cycle adopts it.
        resizes = actions.allocate is None or await self._allocate(job.id, actions.allocate)
        if resizes:
            await self._write_indexed_job(observed, actions, applied)
            await self._write_extra_job(observed, actions, applied)
        for name in actions.delete_pods:
            logger.info("%s: deleting pod %s by force", job.id, name)
            await self._cluster.delete_pod(job.namespace, name)
        for name, event in actions.end_pods:
            await self._cluster.end_pod(job.namespace, name)
            await self._record_event(observed, event)
        for name in actions.retire_pods:
            logger.info("%s: deleting pod %s of another template", job.id, name)
            await self._cluster.retire_pod(job.namespace, name)
        await self._check_gates(observed, actions.check_gates)
        for name in actions.release_pods:
            await self._cluster.release_pod(job.namespace, name)
        if actions.status_is_urgent:
            for event in actions.events:
                await self._record_event(observed, event)
        if actions.delete_job:
            logger.info("%s: ttlSecondsAfterFinished exceeded, deleting it", job.id)
            await self._cluster.delete_job(job.namespace, job.name, job.uid)
        return applied

    async def store_decision(self, decision: DecisionView) -> bool:
        """Store an explained decision with the metrics service. Returns whether it is stored."""
        try:
            await asyncio.to_thread(self._service.put_decision, decision)
        except ServiceError as error:
            logger.debug("%s: the decision is not stored: %s", decision.job, error)
            return False
        return True

    async def _deregister(self, job_id: str) -> None:
        try:
            await asyncio.to_thread(self._service.delete_job, job_id)
        except ServiceRefusedError as error:
            # The view of it was older than the last call.
            if error.status != 404:
                raise

    async def _declare(self, job_id: str, spec: JobSpec) -> None:
        await asyncio.to_thread(self._service.declare_job, job_id, spec)
        self._on_stored(job_id, lambda read: read.spec == spec)

    async def _allocate(self, job_id: str, allocation: Allocation) -> bool:
        """Request an allocation. Returns whether the Indexed Job may be resized to it.

        It may not if the metrics service has a newer allocation, or if a larger generation has become active
        since the job was observed.
        """
        try:
            view = await asyncio.to_thread(self._service.allocate, job_id, allocation)
        except ServiceRefusedError as error:
            if error.status != 409:
                raise
            return False
        self._on_stored(job_id, lambda read: read.version >= view.version)
        return view.active is None or view.broken or view.active.replicas <= allocation.indices.stop

    async def _record_event(self, observed: ObservedJob, event: Event) -> None:
        job = observed.resource
        logger.info("%s: %s: %s", job.id, event.reason, event.message)
        await self._cluster.record_event(
            job.namespace, job.name, job.uid, event, observed.now, self._identity
        )

    async def _write_status(self, observed: ObservedJob, actions: Actions) -> None:
        job, now = observed.resource, observed.now
        if actions.status_is_urgent or self.status_due(observed, actions):
            written = await self._cluster.apply_status(job.namespace, job.name, job.uid, actions.status)
            self._on_written(Resource.ADASCALEJOBS, written, actions.status_is_urgent)
            self._status_written_at[job.uid] = now

    async def _write_indexed_job(self, observed: ObservedJob, actions: Actions, applied: Applied) -> None:
        job, indexed_job = observed.resource, observed.own_indexed_job
        if actions.create_indexed_job is not None:
            await self._create_indexed_job(observed, actions, applied)
        elif actions.hand_over_pods and indexed_job is not None:
            await self._hand_over(observed, actions, applied)
        elif actions.delete_indexed_job and indexed_job is not None:
            await self._cluster.delete_indexed_job(job.namespace, job.name, indexed_job.uid)
        elif actions.resize is not None and indexed_job is not None:
            # A suspended Job keeps its parallelism.
            patch = resize_patch(
                actions.resize or indexed_job.parallelism,
                suspend=_suspend(observed, indexed_job, actions.resize),
                active_deadline_seconds=actions.active_deadline_seconds,
            )
            written = await self._cluster.patch_indexed_job(job.namespace, job.name, indexed_job.uid, patch)
            self._on_written(Resource.JOBS, written, True)

    async def _check_gates(self, observed: ObservedJob, uids: Collection[str]) -> None:
        namespace, name = observed.resource.key
        named = ((name, observed.own_indexed_job), (extra_name(name), observed.own_extra_job))
        patch = {"metadata": {"annotations": {names.ANNOTATION_GATES: timestamp(observed.now)}}}
        for each, indexed_job in named:
            if indexed_job is not None and indexed_job.uid in uids:
                logger.info("%s: pods of Job %s are admitted and gated", observed.resource.id, each)
                written = await self._cluster.patch_indexed_job(namespace, each, indexed_job.uid, patch)
                self._on_written(Resource.JOBS, written, True)

    async def _hand_over(self, observed: ObservedJob, actions: Actions, applied: Applied) -> None:
        """Delete the Indexed Job without its pods, if one of the new template would be accepted."""
        job, indexed_job, workload = observed.resource, observed.own_indexed_job, observed.workload
        if indexed_job is None or workload is None:
            return
        manifest = indexed_job_manifest(
            workload,
            indexed_job.parallelism,
            suspend=False,
            single_node=observed.single_node,
            accelerator=indexed_job.accelerator,
            fs_group=not observed.admission.forbids_fs_group,
            adopts=True,
        )
        try:
            await self._cluster.try_indexed_job(manifest)
        except ApiServerError as error:
            # A webhook may not support dry runs, and a quota of Jobs does not count the one that is replaced.
            if error.status in {400, 422} and "dry run" not in error.reply:
                applied.template_rejection = error.reply
                return
            if error.status not in {400, 403}:
                raise
        for name in actions.hand_over_pods:
            # They are deleted with the AdaScaleJob also while they have no other owner.
            await self._cluster.own_pod(job.namespace, name, owner_reference(workload))
        await self._cluster.leave_pods(job.namespace, job.name, indexed_job.uid)

    async def _write_extra_job(self, observed: ObservedJob, actions: Actions, applied: Applied) -> None:
        job, extra_job = observed.resource, observed.own_extra_job
        if actions.create_extra_job is not None and observed.workload is not None:
            # Without the others, extra pods would hold nodes and wait.
            if applied.refused is None and applied.template_rejection is None:
                await self._create(observed, actions, actions.create_extra_job, applied, extra=True)
        elif actions.delete_extra_job and extra_job is not None:
            await self._cluster.delete_indexed_job(job.namespace, extra_name(job.name), extra_job.uid)
        elif actions.resize_extra_job is not None and extra_job is not None:
            patch = resize_extra_patch(actions.resize_extra_job)
            written = await self._cluster.patch_indexed_job(
                job.namespace, extra_name(job.name), extra_job.uid, patch
            )
            self._on_written(Resource.JOBS, written, True)

    async def _create_indexed_job(self, observed: ObservedJob, actions: Actions, applied: Applied) -> None:
        workload, parallelism = observed.workload, actions.create_indexed_job
        if workload is None or parallelism is None:
            return
        if actions.create_claim:
            claim = claim_manifest(workload)
            if claim is not None:
                await self._cluster.create_claim(claim)
                applied.claim_created = True
        if not await self._create(observed, actions, parallelism, applied, extra=False):
            return
        for warning in template_warnings(workload):
            await self._record_event(observed, Event("TemplateOverridden", warning, warning=True))
        unused = describe_unused_gpus(workload.job.gpus, workload.job.spec.processes_per_replica)
        if unused is not None:
            await self._record_event(observed, Event("UnusedGPUs", unused, warning=True))

    async def _create(
        self, observed: ObservedJob, actions: Actions, parallelism: int, applied: Applied, *, extra: bool
    ) -> bool:
        """Create an Indexed Job. Returns whether the API server has created it."""
        assert observed.workload is not None
        opportunistic = observed.workload.job.opportunistic
        queue = None if actions.adopts_pods else observed.workload.queueing.queue
        if extra:
            queue = opportunistic.queue_name if opportunistic is not None else None
        manifest = indexed_job_manifest(
            observed.workload,
            parallelism,
            # Kueue resumes it.
            suspend=queue is not None,
            single_node=observed.single_node,
            accelerator=actions.accelerator,
            fs_group=not observed.admission.forbids_fs_group,
            adopts=actions.adopts_pods,
            extra=extra,
        )
        if self._before_pods is not None:
            await self._before_pods(observed.resource.namespace)
        try:
            created = await self._cluster.create_indexed_job(manifest)
        except ApiServerError as error:
            if error.reply and error.status not in {400, 409, 422, 429}:
                # That keeps nothing else from being done.
                applied.refused = JobRefusedError(error, extra=extra)
                return False
            if error.status not in {400, 422}:
                raise
            # The manifest changes with the spec only: no use in trying again before.
            applied.template_rejection = error.reply
            return False
        self._on_written(Resource.JOBS, created, True)
        return True


def _suspend(observed: ObservedJob, indexed_job: IndexedJob, resize: int) -> bool | None:
    """Return `spec.suspend` of a resized Indexed Job. None leaves it: others may have suspended it."""
    if resize == 0:
        return None if indexed_job.suspended else True
    return False if indexed_job.suspended and not observed.is_held else None
