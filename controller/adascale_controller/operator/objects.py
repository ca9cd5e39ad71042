"""The objects of an AdaScaleJob, as pure functions of it.

One Indexed Job of the same name, whose size is the replica count, and the claim its state is saved in where
the user names no place. Both belong to the AdaScaleJob and go with it.
"""

from __future__ import annotations

from typing import Any, Final

from adascale_controller.operator.template import (
    Manifest,
    PodSettings,
    Workload,
    pod_template,
    template_digest,
)
from adascale_core import names
from adascale_core.exit_codes import IGNORED_EXIT_CODES

__all__ = [
    "Manifest",
    "PodSettings",
    "Workload",
    "claim_manifest",
    "job_manifest",
    "resize_patch",
    "template_digest",
    "template_warnings",
]

MAX_FAILURES: Final = 2**31 - 1
"""The Job never gives up by count: the operator counts, and counts a generation once. It counts each index by
itself, since the Job controller then also pauses for each by itself before it replaces a pod. Otherwise the
pauses double with each pod of all that was ever lost, up to ten minutes, for the growth of the Job too."""


def job_manifest(workload: Workload, replicas: int, *, suspend: bool, one_node: bool) -> Manifest:
    """The Job whose pods are the replicas.

    Args:
        workload: the AdaScaleJob.
        replicas: how many pods; zero must be suspended too, since a Job of zero completions is complete.
        suspend: whether it is to have no pods for now.
        one_node: whether all replicas must share a node, because only one node can mount the volume.
    """
    template = pod_template(workload, one_node=one_node)
    size = max(replicas, 1)
    spec: Manifest = {
        "completionMode": "Indexed",
        "completions": size,
        "parallelism": size,
        "suspend": suspend,
        "backoffLimit": MAX_FAILURES,
        "backoffLimitPerIndex": MAX_FAILURES,
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "Ignore",
                    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                },
                {
                    "action": "Ignore",
                    "onExitCodes": {
                        "containerName": template.worker,
                        "operator": "In",
                        "values": list(IGNORED_EXIT_CODES),
                    },
                },
            ]
        },
        # The only one that may stand beside a failure policy; an index never has two pods with it.
        "podReplacementPolicy": "Failed",
        # All ranks finish together; the last one may be on its way out when rank 0 is already gone.
        "successPolicy": {"rules": [{"succeededIndexes": "0"}]},
        "template": template.manifest,
    }
    if workload.job.active_deadline_seconds is not None:
        spec["activeDeadlineSeconds"] = workload.job.active_deadline_seconds
    metadata = _metadata(workload, workload.name)
    metadata["annotations"] = {names.ANNOTATION_TEMPLATE: template_digest(workload, one_node=one_node)}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}


def template_warnings(workload: Workload) -> tuple[str, ...]:
    """What of the user's pod template can't stay, in words."""
    return pod_template(workload, one_node=False).warnings


def resize_patch(replicas: int, *, suspend: bool, deadline: int | None = None) -> Manifest:
    """A merge patch that gives an existing Job its size, and all else that may be edited while it runs.

    Completions and parallelism change together, which is what the API server allows an Indexed Job.

    Args:
        replicas, suspend: as for `job_manifest`.
        deadline: the seconds that it may be active for; none: any.
    """
    size = max(replicas, 1)
    return {
        "spec": {
            "completions": size,
            "parallelism": size,
            "suspend": suspend,
            "activeDeadlineSeconds": deadline,
        }
    }


def claim_manifest(workload: Workload) -> Manifest | None:
    """The claim of the job's own, or None where the user names another place for its state."""
    checkpoint = workload.job.checkpoint
    if checkpoint.path is not None or checkpoint.claim_name is not None or workload.claim_name is None:
        return None
    spec: dict[str, Any] = {
        "accessModes": [checkpoint.access_mode],
        "resources": {"requests": {"storage": checkpoint.storage}},
    }
    if checkpoint.storage_class_name is not None:
        spec["storageClassName"] = checkpoint.storage_class_name
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": _metadata(workload, workload.claim_name),
        "spec": spec,
    }


def _metadata(workload: Workload, name: str) -> Manifest:
    return {
        "name": name,
        "namespace": workload.namespace,
        "labels": workload.labels,
        "ownerReferences": [
            {
                "apiVersion": names.GROUP_VERSION,
                "kind": names.KIND,
                "name": workload.name,
                "uid": workload.uid,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ],
    }
