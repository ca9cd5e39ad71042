"""What is kept of an object is all that is read of it, and much less than the object."""

from __future__ import annotations

import json
from typing import Any

import pytest

from adascale_controller.operator.observe.pods import cached_fields, read_pod
from adascale_controller.operator.schedule.nodes import eligible_nodes, free_nodes, pod_request
from adascale_controller.operator.types.kubernetes import Resource
from adascale_controller.operator.types.settings import KUEUE_FINALIZER, POD_GROUP_SIZE, QUEUE_NAME
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


def test_a_pod_takes_what_it_requests() -> None:
    read = read_pod({"metadata": METADATA, "spec": SPEC})
    assert pod_request(read.requests) == pod_request(SPEC)
    assert (read.job, read.version, read.node) == (("team", "digits"), 7, "node1")
    assert len(json.dumps(read.requests)) < 0.4 * len(json.dumps(SPEC))


@pytest.mark.parametrize("text", ["9" * 5000, "-1", "two"])
def test_a_group_size_that_is_no_number_of_pods_counts_as_none(text: str) -> None:
    meta = {**METADATA, "annotations": {POD_GROUP_SIZE: text}}
    assert read_pod({"metadata": meta, "spec": SPEC}).group_size == 0


def test_a_node_is_read_as_before() -> None:
    node = {
        "metadata": {"name": "node1", "labels": {"zone": "a"}, "managedFields": MANAGED},
        "spec": {"taints": [{"key": "gpu", "effect": "NoSchedule"}]},
        "status": {
            "conditions": [{"type": "Ready", "status": "True"}],
            "allocatable": {"cpu": "16", "gpu": 8, "pods": 110},
            "images": [{"names": [f"image-{number}"]} for number in range(50)],
        },
    }
    kept_node = cached_fields(Resource.NODES, node)
    assert isinstance(kept_node, dict)
    assert free_nodes([kept_node], []) == free_nodes([node], [])
    for spec in ({"nodeSelector": {"zone": "a"}}, {"tolerations": [{"operator": "Exists"}]}):
        assert eligible_nodes(spec, [kept_node]) == eligible_nodes(spec, [node])
    assert len(json.dumps(kept_node)) < 0.4 * len(json.dumps(node))


def test_equal_short_strings_of_several_objects_are_kept_once() -> None:
    first, second = (read_pod(json.loads(json.dumps({"metadata": METADATA, "spec": SPEC}))) for _ in range(2))
    assert first == second

    def strings(value: Any) -> list[str]:
        if isinstance(value, dict):
            return [*value, *(text for member in value.values() for text in strings(member))]
        if isinstance(value, list):
            return [text for member in value for text in strings(member)]
        return [value] if isinstance(value, str) else []

    found = {id(text) for text in strings(first.requests)}
    assert all(id(text) in found for text in strings(second.requests))
