"""Manifests of an AdaScaleJob's objects: Indexed Jobs and the PersistentVolumeClaim for checkpoints.

The Indexed Job has the name of the AdaScaleJob, and its parallelism is the replica count. With
`spec.opportunistic`, that is the smallest count, and a second Indexed Job has the pods of all further
replicas, the extra pods. The AdaScaleJob owns these objects, so they are deleted with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from adascale_controller.operator.apply.pod_template import AGENT, build_pod_template
from adascale_controller.operator.types.kubernetes import COMPLETION_INDEX, Manifest
from adascale_controller.operator.types.workload import Queueing, Workload, template_digest
from adascale_core import names
from adascale_core.failures import IGNORED_EXIT_CODES

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
    fs_group: bool = True,
    adopts: bool = False,
    extra: bool = False,
) -> Manifest:
    """Return the Indexed Job whose pods are the replicas, or the extra pods."""
    settings = workload.job.opportunistic if extra else None
    template = build_pod_template(
        workload, single_node=single_node, accelerator=accelerator, fs_group=fs_group, extra=settings
    )
    annotations = {names.ANNOTATION_TEMPLATE: template_digest(workload, single_node=single_node)}
    if accelerator is not None:
        annotations[names.ANNOTATION_ACCELERATOR] = accelerator
    _mark_pods(template.manifest, workload, annotations)
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
    # The Job of the core ends the AdaScaleJob at its deadline.
    if workload.job.active_deadline_seconds is not None and settings is None:
        spec["activeDeadlineSeconds"] = workload.job.active_deadline_seconds
    if settings is not None:
        annotations[names.ANNOTATION_FIRST_REPLICA] = str(workload.job.core_replicas)
    queueing = workload.queueing if settings is None else Queueing.of_extra_pods(settings.queue_name)
    if adopts:
        _select_by_uid(spec, workload)
        queueing = Queueing()
    metadata = _metadata(workload, workload.name if settings is None else workload.extra_name)
    metadata["annotations"] = dict(annotations)
    if queueing.queue is not None and queueing.request is not None:
        metadata["labels"] |= queueing.labels
        metadata["annotations"] |= {**queueing.annotations, names.ANNOTATION_QUEUE: queueing.request}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}


def _mark_pods(template: Manifest, workload: Workload, annotations: Mapping[str, str]) -> None:
    """Have pods say which AdaScaleJob and which template they were made from: they may outlive their Job."""
    marks = {"labels": {names.LABEL_JOB_UID: workload.uid}, "annotations": annotations}
    for field, added in marks.items():
        present = template["metadata"].get(field) if isinstance(template["metadata"], dict) else ()
        if isinstance(present, dict):
            present.update(added)


def _select_by_uid(spec: Manifest, workload: Workload) -> None:
    """Have a Job own all pods of the AdaScaleJob that have no controller.

    With a selector of its own, a Job gives its pods no label of its name, by which people select pods.
    """
    spec["manualSelector"] = True
    spec["selector"] = {"matchLabels": {names.LABEL_JOB_UID: workload.uid}}
    metadata = spec["template"]["metadata"]
    if isinstance(metadata, dict) and isinstance(metadata.get("labels"), dict):
        metadata["labels"].update(dict.fromkeys(("job-name", "batch.kubernetes.io/job-name"), workload.name))


def pod_manifest(workload: Workload, *, fs_group: bool = True, extra: bool = False) -> Manifest:
    """Return a pod of an Indexed Job, for a dry run. It requires no type of accelerator."""
    settings = workload.job.opportunistic if extra else None
    template = build_pod_template(workload, single_node=False, fs_group=fs_group, extra=settings).manifest
    metadata = template["metadata"]
    # The labels and annotations that the Job controller adds: replicas read their rank there.
    for field in ("labels", "annotations"):
        metadata[field] = {**(metadata.get(field) or {}), COMPLETION_INDEX: "0"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            **metadata,
            "generateName": f"{workload.name if settings is None else workload.extra_name}-0-",
            "namespace": workload.namespace,
        },
        "spec": template["spec"],
    }


def check_pod_manifest(workload: Workload, name: str) -> Manifest:
    """Return a pod of the template that shows whether its image and its volumes are there.

    It runs the agent's help, where the job's replicas are, and requests nothing.
    """
    built = build_pod_template(workload, single_node=True)
    spec = built.manifest["spec"]
    (worker,) = (container for container in spec["containers"] if container["name"] == built.worker)
    # Sidecars, probes and hooks are of no use without the program.
    for field in (
        "resources",
        "args",
        "lifecycle",
        "livenessProbe",
        "readinessProbe",
        "startupProbe",
        "ports",
    ):
        worker.pop(field, None)
    worker["command"] = [AGENT, "--help"]
    spec["containers"] = [worker]
    for field in ("initContainers", "topologySpreadConstraints", "resourceClaims", "priorityClassName"):
        spec.pop(field, None)
    metadata = _metadata(workload, name)
    # Not a replica, so without the label of replicas.
    del metadata["labels"][names.LABEL_JOB]
    metadata["labels"][names.LABEL_CHECK] = workload.name
    metadata["annotations"] = built.manifest["metadata"]["annotations"]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def template_warnings(workload: Workload) -> tuple[str, ...]:
    """Return which parts of the user's pod template are overridden."""
    return build_pod_template(workload, single_node=False).warnings


def resize_patch(
    replicas: int, *, suspend: bool | None, active_deadline_seconds: int | None = None
) -> Manifest:
    """Return a merge patch with everything of an Indexed Job that may change while it runs.

    Completions and parallelism change together, which is what the API server allows for an Indexed Job.
    """
    spec: Manifest = {**_size(replicas), "activeDeadlineSeconds": active_deadline_seconds}
    if suspend is None:
        return {"spec": spec}
    # The mark by which the operator knows later that it may resume the Job.
    mark = {names.ANNOTATION_SUSPENDED: "true" if suspend else None}
    return {"metadata": {"annotations": mark}, "spec": {**spec, "suspend": suspend}}


def resize_extra_patch(replicas: int) -> Manifest:
    """Return a merge patch for an Indexed Job of extra pods. One that others have suspended stays so."""
    return {"spec": _size(replicas) if replicas else {"suspend": True}}


def _size(replicas: int) -> Manifest:
    parallelism = max(replicas, 1)
    return {"completions": parallelism, "parallelism": parallelism}


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


def owner_reference(workload: Workload) -> Manifest:
    """Return the reference by which an object is deleted with its AdaScaleJob."""
    return {
        "apiVersion": names.GROUP_VERSION,
        "kind": names.KIND,
        "name": workload.name,
        "uid": workload.uid,
    }


def _metadata(workload: Workload, name: str) -> Manifest:
    owner = {**owner_reference(workload), "controller": True, "blockOwnerDeletion": True}
    return {
        "name": name,
        "namespace": workload.namespace,
        "labels": workload.labels,
        "ownerReferences": [owner],
    }
