"""Reads the jobs of a cluster."""

from __future__ import annotations

from adascale_controller.cluster.api import (
    Api,
    job_path,
    jobs_path,
)
from adascale_controller.cluster.cluster_job import ClusterJob
from adascale_controller.cluster.errors import RejectedError
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


class AmbiguousNamespaceError(AdaScaleError):
    """A job whose namespace is given twice, differently."""

    exit_code = 2


class ClusterJobs:
    """The jobs of a cluster."""

    def __init__(self, api: Api, namespace_option: str | None = None) -> None:
        self._api = api
        self._option = namespace_option

    def read_all(self) -> list[ClusterJob]:
        """Return the jobs of the namespace, by name."""
        return self._read(self._api.namespace)

    def find(self, name: str) -> ClusterJob:
        """Return the job `name`, which is `<namespace>.<name>`, or a bare name."""
        namespace, bare = self.identity(name)
        try:
            return ClusterJob(self._api.get(job_path(namespace, bare)))
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

    def _read(self, namespace: str) -> list[ClusterJob]:
        found: list[ClusterJob] = []
        query = [("limit", str(PAGE_SIZE))]
        while True:
            page = self._api.get(jobs_path(namespace), query)
            found += [ClusterJob(raw) for raw in page["items"]]
            token = page["metadata"].get("continue")
            if not token:
                return sorted(found, key=lambda job: job.name)
            query = [("limit", str(PAGE_SIZE)), ("continue", token)]

    def _no_job(self, name: str, namespace: str) -> str:
        others = [job.name for job in self._read(namespace)]
        named = ", ".join(others[:MAX_NAMED])
        named += f" and {len(others) - MAX_NAMED} more" if len(others) > MAX_NAMED else ""
        context = f" of context {self._api.context}" if self._api.context else ""
        hint = f"the jobs there are {named}" if others else "it has no jobs; choose another with --namespace"
        return f"no job {name} in namespace {namespace}{context}: {hint}"
