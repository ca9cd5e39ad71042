"""Manifests of an AdaScaleJob's objects: the Indexed Job and the PersistentVolumeClaim for checkpoints.

The Indexed Job has the name of the AdaScaleJob, and its parallelism is the replica count. The AdaScaleJob
owns both objects, so they are deleted with it.
"""

from __future__ import annotations

from typing import Any, Final

from adascale_controller.operator.apply.pod_template import build_pod_template
from adascale_controller.operator.types.kubernetes import Manifest
from adascale_controller.operator.types.workload import Workload, template_digest
from adascale_core import names
from adascale_core.failures.exit_codes import IGNORED_EXIT_CODES

MAX_FAILURES: Final = 2**31 - 1
"""`backoffLimit` and `backoffLimitPerIndex` of the Job, which never fails by count: the operator counts
failures, a generation once. With a limit per index the Job controller also pauses per index before it
replaces a pod. Without it the pause doubles with each lost pod of the whole Job, up to ten minutes, and
delays growth too."""


def indexed_job_manifest(
    workload: Workload,
    replicas: int,
    *,
    suspend: bool,
    single_node: bool,
    accelerator: str | None = None,
) -> Manifest:
    """Return the Indexed Job whose pods are the replicas.

    Args:
        workload: the AdaScaleJob.
        replicas: the number of pods. For 0, `suspend` must be true: a Job with 0 completions is complete.
        suspend: `spec.suspend`.
        single_node: whether all replicas must share a node, because only one node can mount the claim.
        accelerator: the type of accelerator that the pods require. None if they require none.
    """
    template = build_pod_template(workload, single_node=single_node, accelerator=accelerator)
    parallelism = max(replicas, 1)
    spec: Manifest = {
        "completionMode": "Indexed",
        "completions": parallelism,
        "parallelism": parallelism,
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
        # The only value allowed with a failure policy; an index never has two pods.
        "podReplacementPolicy": "Failed",
        # An agent succeeds only when the program has finished on rank 0, which any index can be.
        "successPolicy": {"rules": [{"succeededCount": 1}]},
        "template": template.manifest,
    }
    if workload.job.active_deadline_seconds is not None:
        spec["activeDeadlineSeconds"] = workload.job.active_deadline_seconds
    metadata = _metadata(workload, workload.name)
    metadata["annotations"] = {names.ANNOTATION_TEMPLATE: template_digest(workload, single_node=single_node)}
    if accelerator is not None:
        metadata["annotations"][names.ANNOTATION_ACCELERATOR] = accelerator
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}


def template_warnings(workload: Workload) -> tuple[str, ...]:
    """Return which parts of the user's pod template are overridden."""
    return build_pod_template(workload, single_node=False).warnings


def resize_patch(replicas: int, *, suspend: bool, active_deadline_seconds: int | None = None) -> Manifest:
    """Return a merge patch with everything of an Indexed Job that may change while it runs.

    Completions and parallelism change together, which is what the API server allows for an Indexed Job.

    Args:
        replicas, suspend: as for `indexed_job_manifest`.
        active_deadline_seconds: `spec.activeDeadlineSeconds`. None for no deadline.
    """
    parallelism = max(replicas, 1)
    return {
        "spec": {
            "completions": parallelism,
            "parallelism": parallelism,
            "suspend": suspend,
            "activeDeadlineSeconds": active_deadline_seconds,
        }
    }


def claim_manifest(workload: Workload) -> Manifest | None:
    """Return the claim that the operator creates. None if the user names a claim or a path."""
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
