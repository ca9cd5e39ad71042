"""Reads and changes the jobs of a cluster."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from adascale_controller.cluster.api import (
    APPLY_PATCH,
    FIELD_MANAGER,
    MERGE_PATCH,
    Api,
    ApiObject,
    job_path,
    jobs_path,
)
from adascale_controller.cluster.cluster_job import ClusterJob
from adascale_controller.cluster.errors import RejectedError
from adascale_controller.operator.types.conditions import ConditionType, is_true
from adascale_core import names
from adascale_core.errors import AdaScaleError
from adascale_core.job_id import job_id

PAGE_SIZE = 200
"""Jobs in one answer of a list."""
INTERVAL = 0.5
"""Seconds between two reads of a job that is waited for."""
MAX_NAMED = 10
"""Jobs that a message names."""


class NoSuchJobError(AdaScaleError):
    """A job that the cluster does not have."""


class StillRunningError(AdaScaleError):
    """A job that runs, and so is not deleted."""


class StopTimeoutError(AdaScaleError):
    """A job that has not stopped in time."""


class EndedError(AdaScaleError):
    """A job that has ended, so that it cannot be changed."""


class AmbiguousNamespaceError(AdaScaleError):
    """A job whose namespace is given twice, differently."""

    exit_code = 2


class ClusterJobs:
    """The jobs of a cluster."""

    def __init__(self, api: Api, namespace_option: str | None = None) -> None:
        self._api = api
        self._option = namespace_option

    # -- reading --------------------------------------------------------------------------------------------

    def read_all(self, *, all_namespaces: bool = False) -> list[ClusterJob]:
        """Return the jobs by id."""
        return self._read(None if all_namespaces else self._api.namespace)

    def find(self, name: str) -> ClusterJob:
        """Return the job `name`, which is `<namespace>.<name>`, or a bare name."""
        namespace, bare = self.identity(name)
        try:
            return ClusterJob(self._api.call("GET", job_path(namespace, bare)))
        except RejectedError as error:
            if error.status != 404:
                raise
        raise NoSuchJobError(self._no_job(bare, namespace))

    def identity(self, name: str) -> tuple[str, str]:
        """Return namespace and name of the job that a user names. Errors as for `find`."""
        namespace, dot, bare = name.rpartition(".")
        if dot and self._option not in (None, namespace):
            raise AmbiguousNamespaceError(
                f"job {name} is in namespace {namespace}, but --namespace is {self._option}: omit one of them"
            )
        namespace = namespace if dot else self._api.namespace
        job_id(bare, namespace)
        return namespace, bare

    # -- writing --------------------------------------------------------------------------------------------

    def apply(self, document: ApiObject, *, force: bool) -> ClusterJob:
        """Create a job, or change its spec to that of a job file."""
        metadata = document["metadata"]
        query = [("fieldManager", FIELD_MANAGER), ("force", "true" if force else "false")]
        path = job_path(metadata["namespace"], metadata["name"])
        return ClusterJob(self._api.call("PATCH", path, query, document, APPLY_PATCH))

    def resume(self, job: ClusterJob) -> ClusterJob:
        """Let a job run that was stopped. Its `replicaLimit` is removed if it is 0."""
        _require_not_ended(job)
        spec: dict[str, Any] = {}
        if job.spec.get("suspend"):
            spec["suspend"] = None
        if job.spec.get("replicaLimit") == 0:
            spec["replicaLimit"] = None
        return self._patch(job, spec) if spec else job

    def scale(self, job: ClusterJob, replicas: int) -> int:
        """Set the most replicas of a job. Returns those that it may use, at most its `maxReplicas`."""
        _require_not_ended(job)
        path, query = f"{job_path(job.namespace, job.name)}/scale", [("fieldManager", FIELD_MANAGER)]
        # The same right as for `kubectl scale`.
        self._api.call("PATCH", path, query, {"spec": {"replicas": replicas}}, MERGE_PATCH)
        return min(replicas, int(job.spec.get("maxReplicas") or replicas))

    def suspend(self, job: ClusterJob) -> ClusterJob:
        """Request a job to save its state and to stop."""
        _require_not_ended(job)
        return self._patch(job, {"suspend": True})

    def wait_until_stopped(
        self, job: ClusterJob, timeout: float, sleep: Callable[[float], None] = time.sleep
    ) -> ClusterJob:
        """Wait until the replicas of a job have saved its state and have stopped, or it has ended."""
        deadline = time.monotonic() + timeout
        while True:
            now = self.find(job.id)
            if now.has_ended or (now.is_observed and is_true(now.status, ConditionType.SUSPENDED)):
                return now
            if time.monotonic() > deadline:
                where = (
                    "the operator has not read the request yet"
                    if not now.is_observed
                    else "it saves its state"
                )
                raise StopTimeoutError(
                    f"job {job.name} has not stopped within {timeout:g} s ({where}): wait longer with "
                    "--timeout. The request stays"
                )
            sleep(INTERVAL)

    def delete(self, job: ClusterJob) -> None:
        """Delete a job and what belongs to it."""
        if job.runs and not job.is_stopped:
            raise StillRunningError(
                f"job {job.name} in namespace {job.namespace} is {job.state.lower()}: stop it first, with "
                "`adascale stop` and the same options"
            )
        body = {"propagationPolicy": "Background", "preconditions": {"uid": job.uid}}
        self._api.call("DELETE", job_path(job.namespace, job.name), body=body)

    # -- calls ----------------------------------------------------------------------------------------------

    def _read(self, namespace: str | None) -> list[ClusterJob]:
        found: list[ClusterJob] = []
        query = [("limit", str(PAGE_SIZE))]
        while True:
            page = self._api.call("GET", jobs_path(namespace), query)
            found += [ClusterJob(raw) for raw in page["items"]]
            token = page["metadata"].get("continue")
            if not token:
                return sorted(found, key=lambda job: (job.namespace, job.name))
            query = [("limit", str(PAGE_SIZE)), ("continue", token)]

    def _patch(self, job: ClusterJob, spec: ApiObject) -> ClusterJob:
        query = [("fieldManager", FIELD_MANAGER)]
        # The uid, so that a job that has replaced it is not changed.
        body = {"metadata": {"uid": job.uid}, "spec": spec}
        return ClusterJob(
            self._api.call("PATCH", job_path(job.namespace, job.name), query, body, MERGE_PATCH)
        )

    def _no_job(self, name: str, namespace: str) -> str:
        others = [job.name for job in self._read(namespace)]
        named = ", ".join(others[:MAX_NAMED])
        named += f" and {len(others) - MAX_NAMED} more" if len(others) > MAX_NAMED else ""
        context = f" of context {self._api.context}" if self._api.context else ""
        hint = f"the jobs there are {named}" if others else "it has no jobs; choose another with --namespace"
        return f"no job {name} in namespace {namespace}{context}: {hint}"


def _require_not_ended(job: ClusterJob) -> None:
    if job.has_ended:
        raise EndedError(
            f"job {job.name} has ended ({job.state}), so it cannot be changed: delete it, and submit it again"
        )


def manifest(content: ApiObject, namespace: str) -> ApiObject:
    """Return the content of a job file for server-side apply: with its namespace, and without its status."""
    metadata = {**content["metadata"], "namespace": namespace}
    return {
        "apiVersion": names.GROUP_VERSION,
        "kind": names.KIND,
        "metadata": metadata,
        "spec": content["spec"],
    }
