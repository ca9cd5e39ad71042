"""An AdaScaleJob as read from the API server."""

from __future__ import annotations

import hashlib
import json
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final, Self

from adascale_controller.operator.types.kubernetes import ApiObject, JobKey, seconds
from adascale_controller.operator.types.settings import CHECKPOINT_FOLDER, OperatorSettings, Queueing
from adascale_controller.schema import JobDefinition, find_worker
from adascale_controller.validation import validate_document
from adascale_core import names
from adascale_core.messages.allocation import Allocation

Digests = dict[bool, str]
"""What `template_digest` has returned, by `single_node`."""


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
    settings: OperatorSettings = field(default_factory=lambda: OperatorSettings(""))
    digests: Digests = field(default_factory=dict, compare=False, repr=False)

    @property
    def deadline(self) -> float | None:
        """When it should be complete, in seconds since 1970; None if it has no such target."""
        seconds = self.job.spec.completion_deadline_seconds if self.job is not None else None
        return None if seconds is None else float(self.created_at + seconds)

    @classmethod
    def read(cls, raw: ApiObject, settings: OperatorSettings, known: Self | None = None) -> Self:
        """Return the AdaScaleJob in an object of the API; `known` has what it was before.

        A spec takes about a millisecond to parse, so it is parsed once.
        """
        meta, status = raw["metadata"], raw.get("status") or {}
        queueing = Queueing.read(meta)
        # The queue is in a label, which an edit does not count.
        version = meta["generation"], queueing.queue
        if known is not None and version == (known.generation, known.queueing.queue):
            return replace(known, status=status, queueing=queueing)
        job, invalid = _parse(raw)
        return cls(
            namespace=meta["namespace"],
            name=meta["name"],
            uid=meta["uid"],
            generation=meta["generation"],
            created_at=int(seconds(meta["creationTimestamp"]) or 0),
            job=job,
            invalid=invalid,
            template=(raw.get("spec") or {}).get("template") or {},
            status=status,
            queueing=queueing,
            settings=settings,
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

    @property
    def group_name(self) -> str:
        """The name of the group of pods that Kueue admits together; the uid tells jobs of one name apart."""
        return f"{self.name}-{self.uid[-4:]}"

    def queue_of(self, *, extra: bool) -> str | None:
        """Return the LocalQueue of its pods, or of its extra pods. None if they are in none."""
        settings = self.valid_job.spec.opportunistic
        return settings.queue_name if extra and settings is not None else self.queueing.queue

    @property
    def labels(self) -> dict[str, str]:
        """The labels of the objects that are made for it."""
        return {
            names.LABEL_JOB: self.name,
            "app.kubernetes.io/name": "adascale",
            "app.kubernetes.io/instance": self.name,
            "app.kubernetes.io/component": "worker",
            "app.kubernetes.io/managed-by": names.FIELD_MANAGER,
        }

    @property
    def claim_name(self) -> str | None:
        """The PersistentVolumeClaim for checkpoints.

        None if they are saved in an object store, or the template mounts `checkpoint.path` itself.
        """
        if self.valid_job.spec.checkpoint.path is not None or self.valid_job.spec.checkpoint.url is not None:
            return None
        return self.valid_job.spec.checkpoint.claim_name or f"{self.name}-checkpoints"

    @property
    def checkpoint_dir(self) -> str:
        """Where checkpoints are saved: a URL, `checkpoint.path`, or the job's own folder in the claim."""
        folder = self.valid_job.spec.checkpoint.path or f"{CHECKPOINT_FOLDER}/{self.namespace}.{self.name}"
        return self.valid_job.checkpoint_url or folder


def template_digest(job: AdaScaleJob, *, single_node: bool) -> str:
    """Return a digest of everything that takes new pods to change; the job keeps it for each cycle."""
    if single_node not in job.digests:
        job.digests[single_node] = _digest(job, single_node=single_node)
    return job.digests[single_node]


def _digest(job: AdaScaleJob, *, single_node: bool) -> str:
    checkpoint, step_timeout = job.valid_job.spec.checkpoint, job.valid_job.spec.step_timeout_seconds
    opportunistic = job.valid_job.spec.opportunistic
    # Replicas read new bounds from the metrics service. What the operator adds to the template is left out
    # too, so that an upgrade does not replace all pods.
    parts = {
        "template": job.template,
        "checkpoint": [job.claim_name, checkpoint.path, checkpoint.url, checkpoint.credentials_secret],
        "checkpointInterval": checkpoint.interval_seconds,
        "apiUrl": job.settings.url_in_pods,
        "oneNode": single_node,
        "stepTimeout": step_timeout,
        "opportunistic": [*opportunistic.model_dump().values()] if opportunistic is not None else None,
    }
    return digest_of(parts)


def digest_of(value: object) -> str:
    """Return a digest of a value of JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=dict)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


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
    path = document.spec.checkpoint.path
    if path is not None and document.spec.max_replicas > 1:
        reason = why_not_shared(raw["spec"]["template"], path)
        if reason is not None:
            return None, (
                f"spec.checkpoint.path: {reason}, so replicas can't read each other's checkpoints. Mount a "
                "volume there that all replicas share, or set spec.checkpoint.claimName"
            )
    return document, None


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
