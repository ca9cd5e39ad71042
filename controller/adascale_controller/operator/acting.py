"""Does about a job what its course says."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from adascale_client import MetricsServiceClient, ServiceRefusedError
from adascale_controller.operator.apart import Apart
from adascale_controller.operator.cluster import Cluster, ClusterError
from adascale_controller.operator.looking import Look
from adascale_controller.operator.objects import (
    Workload,
    claim_manifest,
    job_manifest,
    resize_patch,
    template_warnings,
)
from adascale_controller.operator.resource import SpecReader
from adascale_controller.operator.status import own_part, worth_writing
from adascale_controller.operator.steering import Course, Event, steer
from adascale_controller.operator.store import Kind, Store
from adascale_core.decision import Decision
from adascale_core.messages import Allocation

logger = logging.getLogger(__name__)

TELEMETRY_INTERVAL = 10.0
"""Seconds between two writes of numbers that change with every step."""


class Actor:
    """Writes to the cluster and to the metrics service; what is as it should be, it leaves alone.

    Args:
        store: takes in what was written.
        cluster: the Kubernetes API.
        service: the metrics service.
        specs: the specs as they were read, to which those belong that the API server refuses.
        apart: keeps what goes wrong with one job from the others.
        identity: the name of the operator, for its events.
    """

    def __init__(
        self,
        store: Store,
        cluster: Cluster,
        service: MetricsServiceClient,
        specs: SpecReader,
        apart: Apart,
        identity: str,
    ) -> None:
        self._store = store
        self._cluster = cluster
        self._service = service
        self._specs = specs
        self._apart = apart
        self._identity = identity

    async def carry_out(self, look: Look, decision: Decision | None) -> None:
        """Do what is to be done about a job, once."""
        seen, memory = look.seen, look.memory
        if decision is not None and seen.service is not None and seen.service.complete and seen.standing:
            # Its program has come to its end; its pods are about to.
            decision = replace(decision, replicas=seen.standing.replicas)
        with self._apart.job(seen.job.id):
            course = steer(seen, look.stage, look.failures, decision, memory.trials.standing(seen.now))
            await self._act(look, course)
            self._apart.went_well(seen.job.id)

    async def _act(self, look: Look, course: Course) -> None:
        seen = look.seen
        job = seen.job
        news = await self._write_status(look, course)
        if course.forget:
            await asyncio.to_thread(self._service.delete_job, job.id)
            return
        if course.declare is not None:
            await asyncio.to_thread(self._service.declare_job, job.id, course.declare)
        # Where the job has moved on by itself, the next cycle takes that up.
        if course.want is None or await self._have_service_want(job.id, course.want):
            await self._size_batch(look, course)
        for name in course.remove_pods:
            logger.info("%s: removing what is left of pod %s", job.id, name)
            await self._cluster.remove_pod(job.namespace, name)
        for name in course.release_pods:
            await self._cluster.release_pod(job.namespace, name)
        if news:
            for event in course.events:
                await self._tell(look, event)
        if course.remove_job:
            logger.info("%s: ttlSecondsAfterFinished is over, deleting it", job.id)
            await self._cluster.remove_job(job.namespace, job.name, job.uid)

    async def _have_service_want(self, job_id: str, want: Allocation) -> bool:
        """Whether the service wants it, and nothing larger has become active since it was looked at."""
        try:
            told = await asyncio.to_thread(self._service.allocate, job_id, want)
        except ServiceRefusedError as error:
            if error.status != 409:
                raise
            return False
        return told.active is None or told.broken or told.active.replicas <= want.replicas

    async def _tell(self, look: Look, event: Event) -> None:
        job = look.seen.job
        logger.info("%s: %s: %s", job.id, event.reason, event.message)
        await self._cluster.tell(job.namespace, job.name, job.uid, event, look.seen.now, self._identity)

    async def _write_status(self, look: Look, course: Course) -> bool:
        """Write the status if that is worth it; whether it told something new."""
        job, memory, now = look.seen.job, look.memory, look.seen.now
        news = worth_writing(job.status, course.status)
        late = own_part(job.status) != course.status and now - memory.written_at >= TELEMETRY_INTERVAL
        if news or late:
            written = await self._cluster.apply_status(job.namespace, job.name, job.uid, course.status)
            self._store.put(Kind.ADASCALEJOBS, written)
            memory.written_at = now
        return news

    async def _size_batch(self, look: Look, course: Course) -> None:
        seen, workload = look.seen, look.workload
        job, batch = seen.job, seen.own_batch
        if course.create is not None and workload is not None:
            if course.make_claim:
                await self._make_claim(look, workload)
            manifest = job_manifest(workload, course.create, suspend=False, one_node=seen.one_node)
            try:
                self._store.put(Kind.JOBS, await self._cluster.create_batch(manifest))
            except ClusterError as error:
                if error.status not in {400, 422}:
                    raise
                # It will be no other before the spec is: no use in trying again.
                self._specs.refuse(job, f"spec.template: {error.told}")
                self._store.changed.set()
                return
            for warning in template_warnings(workload):
                await self._tell(look, Event("TemplateOverruled", warning, warning=True))
        elif course.remove_batch and batch is not None:
            await self._cluster.remove_batch(job.namespace, job.name, batch.uid)
        elif course.resize is not None and batch is not None:
            # A suspended Job keeps its size.
            size = course.resize or batch.size
            known = job.job is not None
            deadline = job.valid.active_deadline_seconds if known else batch.deadline
            patch = resize_patch(size, suspend=course.resize == 0, deadline=deadline)
            self._store.put(
                Kind.JOBS, await self._cluster.patch_batch(job.namespace, job.name, batch.uid, patch)
            )

    async def _make_claim(self, look: Look, workload: Workload) -> None:
        manifest = claim_manifest(workload)
        if manifest is not None:
            await self._cluster.create_claim(manifest)
            look.memory.claim = None
