"""What the API server says about an invalid AdaScaleJob: the messages of a job file, and its own."""

from __future__ import annotations

from typing import Any

import pytest

from adascale_controller.validation import validate_document
from cluster.adascalejobs import TEMPLATE, Jobs, RejectedError, document, valid

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("crd")]

COUNTS = "widen the bounds, or change minReplicas and maxReplicas"
OWN_MESSAGES: list[tuple[dict[str, Any], str, str]] = [
    (
        {"maxBatchSize": 16},
        "spec.maxBatchSize",
        "16 is less than batchSize 32: raise maxBatchSize, or lower batchSize",
    ),
    (
        {"localBszBounds": {"lower": 128, "upper": 16}},
        "spec.localBszBounds",
        "lower 128 is greater than upper 16: lower must be at most upper",
    ),
    (
        {"localBszBounds": {"lower": 4}},
        "spec.localBszBounds",
        "upper is auto, which needs maxBatchSize: set maxBatchSize, or an integer as upper",
    ),
    (
        {"maxBatchSize": 64, "localBszBounds": {"lower": 4, "upper": "64"}},
        "spec.localBszBounds.upper",
        "must be an integer from 1 to 1048576 or auto, got the string '64'",
    ),
    (
        {"maxBatchSize": 64, "localBszBounds": {"lower": 4, "upper": 2**20 + 1}},
        "spec.localBszBounds.upper",
        "must be an integer from 1 to 1048576 or auto, got 1048577",
    ),
    (
        {"minReplicas": 9},
        "spec.minReplicas",
        "9 is greater than maxReplicas 8: lower minReplicas, or raise maxReplicas",
    ),
    (
        {"minReplicas": 6, "maxReplicas": 7},
        "spec",
        f"no replica count from 6 to 7 is valid with batchSize 32: {COUNTS}; valid are the divisors of "
        "batchSize",
    ),
    (
        {
            "minReplicas": 11,
            "maxReplicas": 12,
            "maxBatchSize": 1000,
            "localBszBounds": {"lower": 99, "upper": 200},
        },
        "spec",
        "no replica count from 11 to 12 is valid with batchSize 32, maxBatchSize 1000, "
        f"localBszBounds 99 to 200: {COUNTS}; no count above 10 is valid",
    ),
    (
        {"maxReplicas": 1, "localBszBounds": {"lower": 33, "upper": 64}},
        "spec",
        "no replica count from 1 to 1 is valid with batchSize 32, localBszBounds 33 to 64: "
        f"{COUNTS}; valid are 2 and more",
    ),
    (
        {"processesPerReplica": 3},
        "spec.batchSize",
        "32 is not a multiple of processesPerReplica 3: the processes of a replica divide its batches "
        "equally, so change one of them",
    ),
    (
        {"processesPerReplica": 4, "localBszBounds": {"lower": 5, "upper": 7}},
        "spec.localBszBounds",
        "5 to 7 have no multiple of processesPerReplica 4: the processes of a replica divide its local batch "
        "equally, so widen the bounds",
    ),
    (
        {"processesPerReplica": 2, "minReplicas": 17, "maxReplicas": 32},
        "spec",
        f"no replica count from 17 to 32 is valid with batchSize 32, replicas of 2 processes: {COUNTS}; "
        "valid are the divisors of batchSize / 2",
    ),
    (
        {
            "processesPerReplica": 2,
            "minReplicas": 4,
            "maxReplicas": 8,
            "maxBatchSize": 35,
            "localBszBounds": {"lower": 9, "upper": 12},
        },
        "spec",
        "no replica count from 4 to 8 is valid with batchSize 32, maxBatchSize 35, localBszBounds 9 to 12, "
        f"replicas of 2 processes: {COUNTS}; no count above 3 is valid",
    ),
    (
        {"spareReplicas": 1, "opportunistic": {"priorityClassName": "low"}},
        "spec",
        "spareReplicas and opportunistic are both set, which was not tried; set at most one of them",
    ),
    (
        {"spareReplicas": 1024, "maxReplicas": 8},
        "spec.spareReplicas",
        "must be at most 1016 with maxReplicas 8, since replicas and spares together are at most 1024, got "
        "1024",
    ),
    (
        {"checkpoint": {"claimName": "a", "path": "/b", "storage": "1Gi"}},
        "spec.checkpoint",
        "claimName and path are both set; set at most one of them",
    ),
    (
        {"checkpoint": {"claimName": "a", "accessMode": "ReadWriteMany"}},
        "spec.checkpoint",
        "accessMode applies only to a PersistentVolumeClaim that the operator creates, but claimName is set: "
        "remove accessMode or claimName",
    ),
    (
        {"checkpoint": {"path": "/a", "storageClassName": "fast", "storage": 1}},
        "spec.checkpoint",
        "storage applies only to a PersistentVolumeClaim that the operator creates, but path is set: "
        "remove storage or path",
    ),
    (
        {"checkpoint": {"path": "state"}},
        "spec.checkpoint.path",
        "must be an absolute path such as /state, got the string 'state'",
    ),
    (
        {"checkpoint": {"storage": "big"}},
        "spec.checkpoint.storage",
        "must be a positive quantity such as 10Gi, got the string 'big'",
    ),
    (
        {"checkpoint": {"storage": 0}},
        "spec.checkpoint.storage",
        "must be a positive quantity such as 10Gi, got 0",
    ),
]


@pytest.mark.parametrize(("changes", "field", "message"), OWN_MESSAGES)
def test_an_error_has_the_field_and_message_of_a_job_file(
    dry_run_jobs: Jobs, changes: dict[str, Any], field: str, message: str
) -> None:
    sent = document(valid(**changes))
    with pytest.raises(RejectedError) as rejected:
        dry_run_jobs.create(sent)
    ((reported_field, reported),) = rejected.value.errors
    assert reported_field == field
    # Kubernetes puts the value, or its type, before the message.
    assert reported.startswith("Invalid value: ")
    assert reported.endswith(f": {message}")
    validated = validate_document(sent)
    assert isinstance(validated, list)
    (error,) = validated
    assert error.field == field
    # The core's message ends with more valid counts.
    assert error.message.partition(";")[0] == message.partition(";")[0]


def test_all_errors_are_reported_at_once(dry_run_jobs: Jobs) -> None:
    changes = {"maxBatchSize": 16, "localBszBounds": {"lower": 9, "upper": 8}, "minReplicas": 9}
    with pytest.raises(RejectedError) as rejected:
        dry_run_jobs.create(document(valid(**changes)))
    assert {field for field, _ in rejected.value.errors} == {
        "spec.maxBatchSize", "spec.localBszBounds", "spec.minReplicas"
    }  # fmt: skip


def test_an_invalid_name_is_an_error(dry_run_jobs: Jobs) -> None:
    with pytest.raises(RejectedError) as rejected:
        dry_run_jobs.create(document(valid(), "a" * 59))
    ((field, message),) = rejected.value.errors
    assert field == "metadata.name"
    assert message.endswith(
        "must consist of lower case letters, digits and '-', start and end with a letter or digit, and "
        f"have at most 58 characters, got the string '{'a' * 59}'"
    )


KUBERNETES_MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({"batchSize": 0}, r"spec\.batchSize in body should be greater than or equal to 1"),
    ({"batchSize": 2**20 + 1}, r"spec\.batchSize in body should be less than or equal to 1048576"),
    ({"batchSize": "32"}, r"spec\.batchSize in body must be of type integer: \"string\""),
    ({"batchSize": None}, r"spec\.batchSize: Required value"),
    ({"maxReplicas": 1025}, r"spec\.maxReplicas in body should be less than or equal to 1024"),
    ({"replicaLimit": -1}, r"spec\.replicaLimit in body should be greater than or equal to 0"),
    ({"efficiencyTarget": 0}, r"spec\.efficiencyTarget in body should be greater than 0"),
    ({"max_batch_size": 64}, r'unknown field "spec\.max_batch_size"'),
    (
        {"checkpoint": {"accessMode": "X"}},
        r"accessMode: Unsupported value: \"X\": supported values: \"ReadWriteOnce\"",
    ),
    ({"template": {"spec": {"containers": []}}}, r"containers in body should have at least 1 items"),
    ({"template": {"specs": {}, **TEMPLATE}}, r'unknown field "spec\.template\.specs"'),
]


@pytest.mark.parametrize(("changes", "message"), KUBERNETES_MESSAGES)
def test_an_invalid_field_is_an_error(dry_run_jobs: Jobs, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RejectedError, match=message):
        dry_run_jobs.create(document(valid(**changes)))
