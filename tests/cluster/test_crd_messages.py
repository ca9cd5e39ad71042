"""What the API server says about an invalid AdaScaleJob: the messages of a job file."""

from __future__ import annotations

from typing import Any

import pytest

from adascale_controller.validation import validate_document
from cluster.adascalejobs import Jobs, RejectedError, document, valid

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("crd")]


@pytest.mark.parametrize(
    ("changes", "counts"),
    [
        ({"maxBatchSize": 16}, ""),
        ({"localBszBounds": {"lower": 128, "upper": 16}}, ""),
        ({"localBszBounds": {"lower": 4}}, ""),
        ({"maxBatchSize": 64, "localBszBounds": {"lower": 4, "upper": "64"}}, ""),
        ({"maxBatchSize": 64, "localBszBounds": {"lower": 4, "upper": 2**20 + 1}}, ""),
        ({"minReplicas": 9}, ""),
        ({"minReplicas": 6, "maxReplicas": 7}, "valid are the divisors of batchSize"),
        (
            {
                "minReplicas": 11,
                "maxReplicas": 12,
                "maxBatchSize": 1000,
                "localBszBounds": {"lower": 99, "upper": 200},
            },
            "no count above 10 is valid",
        ),
        ({"maxReplicas": 1, "localBszBounds": {"lower": 33, "upper": 64}}, "valid are 2 and more"),
        ({"processesPerReplica": 3}, ""),
        ({"processesPerReplica": 4, "localBszBounds": {"lower": 5, "upper": 7}}, ""),
        (
            {"processesPerReplica": 2, "minReplicas": 17, "maxReplicas": 32},
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
            "no count above 3 is valid",
        ),
        ({"spareReplicas": 1, "opportunistic": {"priorityClassName": "low"}}, ""),
        ({"spareReplicas": 1024, "maxReplicas": 8}, ""),
        ({"checkpoint": {"claimName": "a", "path": "/b", "storage": "1Gi"}}, ""),
        ({"checkpoint": {"claimName": "a", "accessMode": "ReadWriteMany"}}, ""),
        ({"checkpoint": {"path": "/a", "storageClassName": "fast", "storage": 1}}, ""),
        ({"checkpoint": {"path": "state"}}, ""),
        ({"checkpoint": {"storage": "big"}}, ""),
        ({"checkpoint": {"storage": 0}}, ""),
    ],
)
def test_an_error_has_the_field_and_message_of_a_job_file(
    dry_run_jobs: Jobs, changes: dict[str, Any], counts: str
) -> None:
    """`test_jobfile.py` has these messages. Those about replica counts end with other valid counts."""
    sent = document(valid(**changes))
    validated = validate_document(sent)
    assert isinstance(validated, list)
    (expected,) = validated
    with pytest.raises(RejectedError) as rejected:
        dry_run_jobs.create(sent)
    ((field, reported),) = rejected.value.errors
    assert field == expected.field
    # Kubernetes puts the value, or its type, before the message.
    assert reported.startswith("Invalid value: ")
    message = f"{expected.message.partition(';')[0]}; {counts}" if counts else expected.message
    assert reported.endswith(f": {message}")


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
