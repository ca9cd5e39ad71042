"""Starts a pod of a changed template before the pods of the old one are stopped.

The pod runs only the agent's help, without devices, beside the replicas. So an image that does not exist, or
takes minutes to pull, a missing ConfigMap or an invalid security context stops no training.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Final

from adascale_controller.operator.apply.cluster import Cluster, ClusterError
from adascale_controller.operator.apply.indexed_job import check_pod_manifest
from adascale_controller.operator.observe.observed_job import CachedJob, TemplateCheck
from adascale_controller.operator.observe.pods import read_pod
from adascale_controller.operator.types.conditions import Reason
from adascale_controller.operator.types.kubernetes import ApiObject
from adascale_controller.operator.types.workload import Workload

logger = logging.getLogger(__name__)

INTERVAL: Final = 2.0
"""Seconds between two looks at the pod."""
UNSCHEDULABLE_TIMEOUT: Final = 60.0
"""Seconds after which a check ends whose pod finds no node: that says nothing about the template."""


@dataclass
class _Check:
    """A check that is in progress, or has ended."""

    name: str
    # began_at, looked_at: seconds since 1970
    began_at: float
    looked_at: float
    result: TemplateCheck
    dropped_at: float = float("-inf")  # when its pod was to be deleted last, in seconds since 1970


class TemplateChecker:
    """Checks of changed templates, one for each job."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._checks: dict[str, _Check] = {}

    def retain(self, uids: Collection[str]) -> None:
        """Drop the checks of all AdaScaleJobs with other uids; their pods are deleted with them."""
        self._checks = {uid: check for uid, check in self._checks.items() if uid in uids}

    def result(self, uid: str, digest: str) -> TemplateCheck | None:
        """Return what is known of a template of a job. None if it is not being checked."""
        check = self._checks.get(uid)
        return check.result if check is not None and check.result.digest == digest else None

    def due_at(self, uid: str, digest: str) -> float:
        """Return when to call `begin` and `look` for a job, in seconds since 1970; infinite if it is over."""
        check = self._checks.get(uid)
        if check is None or check.result.digest != digest:
            return float("-inf")
        return float("inf") if check.result.done else check.looked_at + INTERVAL

    def begin(self, job: CachedJob, digest: str, now: float) -> str | None:
        """Record that `look` is about to be called. Returns the pod of an earlier check, to be deleted."""
        check, uid = self._checks.get(job.resource.uid), job.resource.uid
        if check is not None and check.result.digest == digest:
            check.looked_at = now
            return None
        name = f"{job.resource.name}-check-{digest[:8]}"
        self._checks[uid] = _Check(name, now, now, TemplateCheck(digest))
        return check.name if check is not None and not check.result.done else None

    def left_due_at(self, uid: str) -> float:
        """Return when to call `begin_drop` and `drop` for a job whose template need not be checked.

        In seconds since 1970; infinite if no check of it is in progress.
        """
        check = self._checks.get(uid)
        if check is None or check.result.done:
            return float("inf")
        return check.dropped_at + INTERVAL

    def begin_drop(self, uid: str, now: float) -> None:
        """Record that `drop` is about to be called."""
        self._checks[uid].dropped_at = now

    async def drop(self, job: CachedJob) -> None:
        """Delete the pod of a check: the edit was undone, or the job is stopped."""
        check = self._checks[job.resource.uid]
        try:
            await self._cluster.delete_pod(job.resource.namespace, check.name)
        except ClusterError as error:
            logger.info("%s: pod %s stays: %s", job.resource.id, check.name, error)
            return
        self._checks.pop(job.resource.uid, None)

    async def look(self, job: CachedJob, workload: Workload, earlier: str | None, now: float) -> None:
        """Create the pod if it does not exist, and record how far it is."""
        check = self._checks[job.resource.uid]
        namespace = job.resource.namespace
        try:
            if earlier is not None:
                await self._cluster.delete_pod(namespace, earlier)
            if check.began_at == check.looked_at:
                await self._cluster.create_pod(check_pod_manifest(workload, check.name))
            raw = await self._cluster.get_pod(namespace, check.name)
        except ClusterError as error:
            if 400 <= error.status < 500:
                # Not allowed to, or a policy rejects it: the pods of the Job show what is wrong.
                logger.info("%s: the changed template is not checked: %s", job.resource.id, error)
                check.result = replace(check.result, done=True)
            return
        self._record(check, raw, now)
        if check.result.done and raw is not None:
            await self._cluster.delete_pod(namespace, check.name)

    @staticmethod
    def _record(check: _Check, raw: ApiObject | None, now: float) -> None:
        if raw is None:
            # Somebody has deleted it.
            check.result = replace(check.result, done=True)
            return
        pod = read_pod(raw)
        problem = pod.problem
        is_homeless = problem is not None and problem.reason is Reason.UNSCHEDULABLE
        has_waited = now - check.began_at > UNSCHEDULABLE_TIMEOUT
        if (pod.exit is not None and pod.phase == "Succeeded") or (is_homeless and has_waited):
            check.result = replace(check.result, done=True)
        elif pod.exit is not None:
            detail = pod.exit.message or pod.exit.reason or f"exit code {pod.exit.exit_code}"
            message = (
                f"its agent does not start: {detail.strip().splitlines()[-1] if detail.strip() else detail}"
            )
            check.result = replace(check.result, reason=Reason.CONTAINER_START_FAILED, message=message)
        elif problem is not None and not is_homeless:
            check.result = replace(check.result, reason=problem.reason, message=problem.message)
        else:
            check.result = replace(check.result, reason=None, message="")
