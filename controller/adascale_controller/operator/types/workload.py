"""An AdaScaleJob in the form from which its Kubernetes objects are made."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Final

from adascale_controller.job import Job
from adascale_controller.operator.types.kubernetes import ApiObject
from adascale_core import names

CHECKPOINT_FOLDER: Final = "/var/lib/adascale/checkpoints"
"""The mount path of the checkpoint claim. Each job has its own folder in it."""


@dataclass(frozen=True)
class PodSettings:
    """Settings that all pods get.

    Args:
        api_url: base URL of the metrics service, as pods reach it.
        accelerator_label: the label of nodes that names the type of their accelerators; empty if types are
            not distinguished.
    """

    api_url: str
    accelerator_label: str = names.DEFAULT_ACCELERATOR_LABEL


@dataclass(frozen=True)
class Workload:
    """An AdaScaleJob in the form from which its Kubernetes objects are made.

    Args:
        name: name of the AdaScaleJob.
        namespace: namespace of the AdaScaleJob and of all its objects.
        uid: uid of the AdaScaleJob.
        job: the parsed spec.
        template: `spec.template` as the user wrote it.
        created_at: creation time of the AdaScaleJob, in seconds since 1970.
        settings: the settings of its pods.
    """

    name: str
    namespace: str
    uid: str
    job: Job
    template: ApiObject
    created_at: int
    settings: PodSettings

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


def template_digest(workload: Workload, *, single_node: bool) -> str:
    """Return a digest of everything that takes new pods to change.

    That is: the user's template, where and how often checkpoints are saved, the timeout of a step, the URL of
    the metrics service, and whether all replicas share a node. The bounds are not part of it: replicas read
    new bounds from the metrics service. What the operator adds to the template is not part of it either, so
    that an upgrade of the operator does not restart every job. For the same reason a part that was added
    later is left out where the spec does not set it.
    """
    checkpoint, step_timeout = workload.job.checkpoint, workload.job.step_timeout_seconds
    parts = {
        "template": workload.template,
        "checkpoint": [workload.claim_name, checkpoint.path, checkpoint.interval_seconds]
        + ([checkpoint.url, checkpoint.credentials_secret] if checkpoint.url is not None else []),
        "apiUrl": workload.settings.api_url,
        "oneNode": single_node,
        **({"stepTimeout": step_timeout} if step_timeout is not None else {}),
    }
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), default=dict)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
