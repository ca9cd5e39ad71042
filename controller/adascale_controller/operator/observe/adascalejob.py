"""An AdaScaleJob as read from the API server."""

from __future__ import annotations

import posixpath
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Self

from adascale_controller.job_definition import JobDefinition, to_job
from adascale_controller.operator.types.kubernetes import ApiObject, JobKey, seconds
from adascale_controller.operator.types.workload import Queueing
from adascale_controller.schema import find_worker
from adascale_controller.validation import validate_document
from adascale_core import names
from adascale_core.messages.allocation import Allocation


@dataclass(frozen=True)
class AdaScaleJob:
    """An AdaScaleJob."""

    namespace: str
    name: str
    uid: str
    generation: int  # `metadata.generation`, which rises with each edit of the spec
    created_at: int  # seconds since 1970
    job: JobDefinition | None  # the parsed spec. None if it is invalid.
    invalid: str | None = None
    # `spec.template` as the user wrote it
    template: ApiObject = field(default_factory=lambda: MappingProxyType({}))
    # `status` as it was last written
    status: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    queueing: Queueing = field(default_factory=Queueing)  # the labels and annotations of Kueue

    @property
    def deadline(self) -> float | None:
        """When it should be complete, in seconds since 1970; None if it has no such target."""
        seconds = self.job.completion_deadline_seconds if self.job is not None else None
        return None if seconds is None else float(self.created_at + seconds)

    @classmethod
    def read(cls, raw: ApiObject, specs: SpecReader) -> Self:
        """Return the AdaScaleJob in an object of the API."""
        meta = raw["metadata"]
        spec = raw.get("spec") or {}
        job, invalid = specs.read(raw)
        return cls(
            namespace=meta["namespace"],
            name=meta["name"],
            uid=meta["uid"],
            generation=meta["generation"],
            created_at=int(seconds(meta["creationTimestamp"]) or 0),
            job=job,
            invalid=invalid,
            template=spec.get("template") or {},
            status=raw.get("status") or {},
            queueing=Queueing.read(meta),
        )

    @property
    def key(self) -> JobKey:
        """Namespace and name."""
        return self.namespace, self.name

    @property
    def id(self) -> str:
        """The job id, `<namespace>.<name>`."""
        return f"{self.namespace}.{self.name}"

    @property
    def recorded_allocation(self) -> Allocation | None:
        """The allocation in the status."""
        recorded = self.status.get("allocation")
        if not recorded:
            return None
        return Allocation(recorded["generation"], recorded["replicas"], spares=recorded.get("spares", 0))

    @property
    def valid_job(self) -> JobDefinition:
        """The parsed spec."""
        if self.job is None:
            raise ValueError(f"{self.id} has an invalid spec: {self.invalid}")
        return self.job


_Version = tuple[int, str | None]
"""The generation of a spec, and the queue of its AdaScaleJob, which is in a label."""


class SpecReader:
    """Parses specs, each generation of each AdaScaleJob once: parsing takes about a millisecond."""

    def __init__(self) -> None:
        self._parsed: dict[str, tuple[_Version, JobDefinition | None, str | None]] = {}

    def read(self, raw: ApiObject) -> tuple[JobDefinition | None, str | None]:
        """Return the parsed spec of an object of the API, or None and why it is invalid."""
        meta = raw["metadata"]
        parsed, version = self._parsed.get(meta["uid"]), (meta["generation"], Queueing.read(meta).queue)
        if parsed is None or parsed[0] != version:
            parsed = (version, *_parse(raw))
            self._parsed[meta["uid"]] = parsed
        return parsed[1], parsed[2]

    def reject(self, job: AdaScaleJob, reason: str) -> None:
        """Record that the API server rejects an object made from this generation of a spec."""
        self._parsed[job.uid] = ((job.generation, job.queueing.queue), None, reason)

    def retain(self, uids: Collection[str]) -> None:
        """Drop the specs of all other AdaScaleJobs."""
        for uid in self._parsed.keys() - set(uids):
            del self._parsed[uid]


def _parse(raw: ApiObject) -> tuple[JobDefinition | None, str | None]:
    content = {
        "apiVersion": names.GROUP_VERSION,
        "kind": names.KIND,
        "metadata": {
            "name": raw["metadata"]["name"],
            "namespace": raw["metadata"]["namespace"],
            "labels": raw["metadata"].get("labels"),
        },
        "spec": raw.get("spec"),
    }
    document = validate_document(content)
    if isinstance(document, list):
        return None, "; ".join(map(str, document))
    job = to_job(document)
    path = job.checkpoint.path
    if path is not None and job.spec.max_replicas > 1:
        reason = why_not_shared(raw["spec"]["template"], path)
        if reason is not None:
            return None, (
                f"spec.checkpoint.path: {reason}, so replicas can't read each other's checkpoints. Mount a "
                "volume there that all replicas share, or set spec.checkpoint.claimName"
            )
    return job, None


_POD_LOCAL: Final = frozenset({"emptyDir", "ephemeral"})
"""Volumes that are created and deleted with a pod."""
_READ_ONLY: Final = frozenset({"configMap", "secret", "downwardAPI", "projected", "image", "gitRepo"})
"""Volumes that a container can't write to."""


def why_not_shared(template: ApiObject, path: str) -> str | None:
    """Return why a checkpoint saved by one replica in `path` is not visible to the others.

    None if it is visible, or if the template does not show it: for example, whether a claim can be mounted
    on several nodes.
    """
    spec = template["spec"]
    worker = spec["containers"][find_worker(template)]
    mounts = {posixpath.normpath(mount["mountPath"]): mount for mount in worker.get("volumeMounts") or ()}
    mount_path = next((folder for folder in _with_parents(path) if folder in mounts), None)
    if mount_path is None:
        return f"container {worker['name']} mounts no volume at {path} or above it"
    mount = mounts[mount_path]
    volumes = {volume.get("name"): volume for volume in spec.get("volumes") or ()}
    source = next((key for key in volumes.get(mount.get("name"), {}) if key != "name"), "")
    volume = f"volume {mount.get('name')}, mounted at {mount_path} by container {worker['name']},"
    if source in _POD_LOCAL:
        return f"{volume} is of type {source}: each pod has its own"
    if source in _READ_ONLY or mount.get("readOnly"):
        return f"{volume} is read-only"
    return None


def _with_parents(path: str) -> list[str]:
    """Return a folder and all its parents, the innermost first."""
    folders = [posixpath.normpath(path)]
    while folders[-1] not in ("/", "//"):
        folders.append(posixpath.dirname(folders[-1]))
    return folders
