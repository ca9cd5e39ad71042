"""Manifests of an AdaScaleJob's objects: its pods and the PersistentVolumeClaim for checkpoints.

A pod is named by job, replica and attempt, so that no second one is created for the same attempt. The
AdaScaleJob owns these objects, so they are deleted with it.
"""

from __future__ import annotations

from typing import Any

from adascale_controller.operator.apply.pod_template import build_pod_template
from adascale_controller.operator.observe.adascalejob import AdaScaleJob, template_digest
from adascale_controller.operator.types.actions import NewPod
from adascale_controller.operator.types.kubernetes import Manifest
from adascale_controller.operator.types.settings import (
    POD_GROUP,
    POD_GROUP_SIZE,
    QUEUE_NAME,
    Queueing,
)
from adascale_core import names


def pod_manifest(job: AdaScaleJob, pod: NewPod, *, single_node: bool = False) -> Manifest:
    """Return a pod of a replica."""
    template = build_pod_template(job, pod, single_node=single_node)
    metadata, added = template["metadata"], _metadata(job, f"{job.name}-{pod.rank}-{pod.attempt}")
    queue = job.queue_of(extra=pod.extra)
    queueing = job.queueing if queue is not None and not pod.extra else Queueing()
    group = {POD_GROUP: job.group_name} if pod.group_size else {}
    labels = {
        **queueing.labels,
        **({QUEUE_NAME: queue} if queue is not None else {}),
        **group,
        names.LABEL_JOB_UID: job.uid,
        names.LABEL_REPLICA: str(pod.rank),
        names.LABEL_ATTEMPT: str(pod.attempt),
        **({names.LABEL_EXTRA: "true"} if pod.extra else {}),
    }
    annotations = {
        **queueing.annotations,
        **({POD_GROUP_SIZE: str(pod.group_size)} if pod.group_size else {}),
        names.ANNOTATION_TEMPLATE: template_digest(job, single_node=single_node),
        **({names.ANNOTATION_ACCELERATOR: pod.accelerator} if pod.accelerator is not None else {}),
    }
    for field, values in (("labels", labels), ("annotations", annotations)):
        # A part of a wrong type stays: the API server names it.
        if isinstance(metadata, dict) and isinstance(metadata.get(field), dict):
            metadata[field].update(values)
    for field in ("name", "namespace", "ownerReferences"):
        metadata[field] = added[field]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def claim_manifest(job: AdaScaleJob) -> Manifest | None:
    """Return the claim that the operator creates. None if the user names a claim or a path."""
    checkpoint = job.valid_job.checkpoint
    if checkpoint.path is not None or checkpoint.claim_name is not None or job.claim_name is None:
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
        "metadata": _metadata(job, job.claim_name),
        "spec": spec,
    }


def _metadata(job: AdaScaleJob, name: str) -> Manifest:
    owner = {
        "apiVersion": names.GROUP_VERSION,
        "kind": names.KIND,
        "name": job.name,
        "uid": job.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
    return {
        "name": name,
        "namespace": job.namespace,
        "labels": job.labels,
        "ownerReferences": [owner],
    }
