"""Deregisters the jobs whose AdaScaleJob is deleted from the metrics service."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence

from adascale_client import ServiceError, ServiceRefusedError
from adascale_controller.operator.apply.service import AllocationService
from adascale_core.views.jobs import JobView

logger = logging.getLogger(__name__)

MAX_DEREGISTERED = 100_000
"""How many deregistered jobs are remembered."""


class Deregistration:
    """Removes jobs from the metrics service that the cluster no longer has."""

    def __init__(self, service: AllocationService, namespace: str | None) -> None:
        self._service = service
        self._namespace = namespace
        self._deregistered: dict[str, None] = {}

    def deleted(
        self,
        views: Mapping[str, JobView],
        present: Collection[str],
        with_pods: Callable[[], Collection[str]],
    ) -> Sequence[str]:
        """Return the jobs of the metrics service that the cluster no longer has."""
        deleted = [view.id for view in views.values() if view.id not in present and self._is_ours(view)]
        # Reading all pods is expensive, and most cycles find no deleted job.
        ending = with_pods() if deleted else ()
        return [job_id for job_id in deleted if job_id not in ending]

    async def deregister(self, deleted: Sequence[str], exists: Callable[[str], bool]) -> None:
        """Delete these jobs from the metrics service. What fails is logged, and left to the next call."""
        for job_id in deleted:
            if exists(job_id):
                continue
            try:
                await asyncio.to_thread(self._service.delete_job, job_id)
                self._deregistered[job_id] = None
                if len(self._deregistered) > MAX_DEREGISTERED:
                    del self._deregistered[next(iter(self._deregistered))]
                logger.info("%s is deleted; removed it from the metrics service", job_id)
            except ServiceError as error:
                if not (isinstance(error, ServiceRefusedError) and error.status == 404):
                    logger.warning("%s: %s", job_id, error)

    def _is_ours(self, view: JobView) -> bool:
        """Whether the operator may delete a job that has no AdaScaleJob.

        A job that only has reports was created by hand and stays, unless it was deregistered before and a
        late report created it again.
        """
        watched = self._namespace in (None, view.id.partition(".")[0])
        managed = view.spec is not None or view.desired is not None or bool(view.replicas)
        return watched and (managed or view.id in self._deregistered)
