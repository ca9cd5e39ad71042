"""An AdaScaleJob in the form from which its Kubernetes objects are made."""

from __future__ import annotations

import hashlib
import json
from dataclasses import astuple, dataclass, field, replace
from typing import Final

from adascale_controller.job import Job
from adascale_controller.operator.types.kubernetes import ApiObject
from adascale_controller.operator.types.queueing import Queueing
from adascale_core import names

CHECKPOINT_FOLDER: Final = "/var/lib/adascale/checkpoints"
"""The mount path of the checkpoint claim. Each job has its own folder in it."""


@dataclass(frozen=True)
class PodSettings:
    """Settings that all pods get."""

    api_url: str  # base URL of the metrics service, as pods reach it
    # the label of nodes that names the type of their accelerators; empty if types are not distinguished
    accelerator_label: str = names.DEFAULT_ACCELERATOR_LABEL
    fs_group: bool = True  # whether volumes get a group that may write to them, where a template sets none
    has_authority: bool = False  # whether pods get the certificate of the authority of the metrics service
    # base URL of the metrics service without TLS, which the pods of a job may keep that were made with
    # it. None if they may not.
    plain_url: str | None = None

    def without_tls(self) -> PodSettings | None:
        """Return the settings of the pods that were made before TLS was turned on. None if there are none."""
        if self.plain_url is None:
            return None
        return replace(self, api_url=self.plain_url, has_authority=False, plain_url=None)


@dataclass(frozen=True)
class Workload:
    """An AdaScaleJob in the form from which its Kubernetes objects are made."""

    name: str
    namespace: str  # namespace of the AdaScaleJob and of all its objects
    uid: str
    job: Job
    template: ApiObject  # `spec.template` as the user wrote it
    created_at: int  # creation time of the AdaScaleJob, in seconds since 1970
    settings: PodSettings
    # the labels and annotations of Kueue on the AdaScaleJob
    queueing: Queueing = field(default_factory=Queueing)
    # the digests that `template_digest` has returned, by `single_node`
    digests: dict[bool, str] = field(default_factory=dict, compare=False, repr=False)

    @property
    def extra_name(self) -> str:
        """The name of the Indexed Job of its extra pods."""
        return extra_name(self.name)

    @property
    def labels(self) -> dict[str, str]:
        """The labels of all its objects."""
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
        if self.job.checkpoint.path is not None or self.job.checkpoint.url is not None:
            return None
        return self.job.checkpoint.claim_name or f"{self.name}-checkpoints"

    @property
    def checkpoint_dir(self) -> str:
        """Where checkpoints are saved: a URL, `checkpoint.path`, or the job's own folder in the claim."""
        folder = self.job.checkpoint.path or f"{CHECKPOINT_FOLDER}/{self.namespace}.{self.name}"
        return self.job.checkpoint_url or folder


def extra_name(name: str) -> str:
    """Return the name of the Indexed Job of a job's extra pods."""
    return f"{name}{names.EXTRA_SUFFIX}"


def template_digest(workload: Workload, *, single_node: bool) -> str:
    """Return a digest of everything that takes new pods to change.

    That is: the user's template, where and how often checkpoints are saved, the timeout of a step, the URL of
    the metrics service, whether all replicas share a node, and which replicas are extra pods. The bounds are
    not part of it: replicas read new bounds from the metrics service. What the operator adds to the template
    is not part of it either, so that an upgrade of the operator does not restart every job. For the same
    reason a part that was added later is left out where the spec does not set it. Each cycle needs it several
    times, so the workload keeps it.
    """
    if single_node not in workload.digests:
        workload.digests[single_node] = _digest(workload, single_node=single_node)
    return workload.digests[single_node]


def _digest(workload: Workload, *, single_node: bool) -> str:
    checkpoint, step_timeout = workload.job.checkpoint, workload.job.step_timeout_seconds
    opportunistic = workload.job.opportunistic
    parts = {
        "template": workload.template,
        "checkpoint": [workload.claim_name, checkpoint.path, checkpoint.interval_seconds]
        + ([checkpoint.url, checkpoint.credentials_secret] if checkpoint.url is not None else []),
        "apiUrl": workload.settings.api_url,
        "oneNode": single_node,
        **({"stepTimeout": step_timeout} if step_timeout is not None else {}),
        **(
            {"opportunistic": [*astuple(opportunistic), workload.job.core_replicas]}
            if opportunistic is not None
            else {}
        ),
    }
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), default=dict)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
