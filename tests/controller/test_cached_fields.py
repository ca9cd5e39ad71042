"""What is kept of an object is all that is read of it, and much less than the object."""

from __future__ import annotations

import json
from typing import Any

import pytest

from adascale_controller.operator.observe.cached_fields import cached_fields
from adascale_controller.operator.observe.pods import job_of_pod, read_pod
from adascale_controller.operator.schedule.nodes import eligible_nodes, free_nodes, pod_request
from adascale_controller.operator.types.kubernetes import Resource
from adascale_controller.operator.types.workload import KUEUE_FINALIZER, POD_GROUP_SIZE, QUEUE_NAME
from adascale_core import names

MANAGED = [{"manager": "kwok", "fieldsV1": {"f:status": {f"f:field-{number}": {} for number in range(50)}}}]
METADATA = {
    "name": "digits-0-abcde",
    "namespace": "team",
    "uid": "pod-0",
    "resourceVersion": "7",
    "creationTimestamp": "2027-01-15T08:00:00Z",
    "deletionTimestamp": "2027-01-15T08:01:00Z",
    "finalizers": [KUEUE_FINALIZER],
    "labels": {
        names.LABEL_JOB: "digits",
        names.LABEL_REPLICA: "0",
        names.LABEL_ATTEMPT: "2",
        names.LABEL_EXTRA: "true",
        QUEUE_NAME: "team",
        "app": "x",
    },
    "annotations": {POD_GROUP_SIZE: "2", "note": "z" * 500},
    "ownerReferences": [{"kind": "AdaScaleJob", "name": "digits", "uid": "job", "controller": True}],
    "managedFields": MANAGED,
}
SPEC = {
    "nodeName": "node1",
    "overhead": {"cpu": "10m"},
    "tolerations": [{"key": "gpu"}],
    "containers": [
        {
            "name": "worker",
            "image": "trainer:1",
            "env": [{"name": f"VARIABLE_{number}", "value": "x"} for number in range(20)],
            "resources": {"limits": {"cpu": "2", "gpu": 1}, "requests": {"cpu": "1"}},
        }
    ],
    "initContainers": [
        {"name": "copy", "resources": {"requests": {"cpu": "4"}}},
        {"name": "proxy", "restartPolicy": "Always", "resources": {"requests": {"cpu": "1"}}},
    ],
    "volumes": [
        {"name": "data", "persistentVolumeClaim": {"claimName": "shared"}},
        {"name": "token", "projected": {"sources": [{"serviceAccountToken": {"path": "token"}}] * 5}},
    ],
}
SCHEDULED = {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2027-01-15T08:00:05Z"}
UNBOUND = {"type": "PodScheduled", "status": "False", "message": "unbound immediate PersistentVolumeClaims"}
FAILED = {"terminated": {"exitCode": 3, "reason": "Error", "message": "ValueError"}}
STATUSES: list[dict[str, Any]] = [
    {"phase": "Running", "conditions": [SCHEDULED], "podIP": "10.0.0.1"},
    {"phase": "Pending", "conditions": [UNBOUND]},
    {
        "phase": "Pending",
        "conditions": [SCHEDULED],
        "containerStatuses": [
            {
                "name": "worker",
                "image": "trainer:1",
                "state": {"waiting": {"reason": "ErrImagePull", "message": "not found"}},
            }
        ],
    },
    {
        "phase": "Failed",
        "reason": "Evicted",
        "message": "The node had condition: MemoryPressure",
        "conditions": [SCHEDULED, {"type": "DisruptionTarget", "status": "True"}],
        "containerStatuses": [{"name": "worker", "image": "trainer:1", "state": FAILED}],
        "initContainerStatuses": [
            {"name": "copy", "image": "copy:1", "state": {"terminated": {"exitCode": 0}}}
        ],
    },
]


@pytest.mark.parametrize("status", STATUSES, ids=["running", "unbound", "no-image", "failed"])
def test_a_pod_is_read_as_before(status: dict[str, Any]) -> None:
    for node in ("node1", ""):
        raw = {"metadata": METADATA, "spec": {**SPEC, "nodeName": node}, "status": status}
        kept = cached_fields(Resource.PODS, raw)
        assert read_pod(kept) == read_pod(raw)
        assert job_of_pod(kept) == job_of_pod(raw)
        assert pod_request(kept["spec"]) == pod_request(raw["spec"])
        assert len(json.dumps(kept)) < 0.4 * len(json.dumps(raw))


def test_a_pod_of_another_owner_takes_what_it_requests() -> None:
    node = {
        "metadata": {"name": "node1", "labels": {"zone": "a"}, "managedFields": MANAGED},
        "spec": {"taints": [{"key": "gpu", "effect": "NoSchedule"}]},
        "status": {
            "conditions": [{"type": "Ready", "status": "True"}],
            "allocatable": {"cpu": "16", "gpu": 8, "pods": 110},
            "images": [{"names": [f"image-{number}"]} for number in range(50)],
        },
    }
    pod = {"metadata": {"name": "x", "namespace": "y", "managedFields": MANAGED}, "spec": SPEC, "status": {}}
    kept_node, kept_pod = cached_fields(Resource.NODES, node), cached_fields(Resource.PODS, pod)
    assert free_nodes([kept_node], [kept_pod]) == free_nodes([node], [pod])
    for spec in ({"nodeSelector": {"zone": "a"}}, {"tolerations": [{"operator": "Exists"}]}):
        assert eligible_nodes(spec, [kept_node]) == eligible_nodes(spec, [node])
    assert len(json.dumps(kept_node)) < 0.4 * len(json.dumps(node))


def test_equal_short_strings_of_several_objects_are_kept_once() -> None:
    first, second = (
        cached_fields(Resource.PODS, json.loads(json.dumps({"metadata": METADATA, "spec": SPEC})))
        for _ in range(2)
    )
    assert first == second

    def strings(value: Any) -> list[str]:
        if isinstance(value, dict):
            return [*value, *(text for member in value.values() for text in strings(member))]
        if isinstance(value, list):
            return [text for member in value for text in strings(member)]
        return [value] if isinstance(value, str) else []

    found = {id(text) for text in strings(first)}
    assert all(id(text) in found for text in strings(second))
