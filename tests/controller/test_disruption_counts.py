"""The count of disruptions in the status, from the count of the metrics service."""

from __future__ import annotations

import pytest

from adascale_core.messages.job_spec import LocalBszLimit
from support.observed_jobs import actions_for, job, observed, pod, view


@pytest.mark.parametrize(
    ("counted", "included", "disruptions", "failures", "expected"),
    [
        (0, 0, 0, 0, 0),
        (0, 0, 1, 0, 1),
        (3, 3, 3, 1, 3),
        (3, 3, 5, 0, 5),
        # What was a disruption at first turns out to be a failure.
        (1, 1, 0, 1, 0),
        (5, 3, 2, 1, 4),
        # The metrics service has lost its data and counts from zero.
        (3, 3, 0, 0, 3),
        (3, 3, 1, 0, 4),
        (1, 1, 0, 0, 1),
    ],
)
def test_new_disruptions_of_the_metrics_service_are_added(
    counted: int, included: int, disruptions: int, failures: int, expected: int
) -> None:
    status = {"disruptions": counted, "attempts": {"reportedDisruptions": included, "trained": 2}}
    service = view((2, 2), (2, 2), disruptions=disruptions, failures=failures)
    actions = actions_for(observed(job((2, 2), status=status), service, 2), 2)
    assert actions.status["disruptions"] == expected
    assert actions.status["attempts"]["reportedDisruptions"] == disruptions
    lost = [event for event in actions.events if event.reason == "ReplicaLost"]
    assert bool(lost) == (expected > counted)


@pytest.mark.parametrize(
    ("recorded", "limit", "expected", "has_event"),
    [
        (None, None, None, False),
        (None, 6, 6, True),
        (6, 6, 6, False),
        (6, 4, 4, True),
        (6, None, None, False),
    ],
)
def test_what_does_not_fit_into_memory_is_in_the_status_and_a_lower_limit_is_an_event(
    recorded: int | None, limit: int | None, expected: int | None, has_event: bool
) -> None:
    status = {"localBatchLimit": recorded} if recorded else {}
    service = view((2, 2), (2, 2), local_bsz_limit=limit)
    actions = actions_for(observed(job((2, 2), status=status), service, 2), 2)
    assert actions.status.get("localBatchLimit") == expected
    events = [event for event in actions.events if event.reason == "LocalBatchLimited"]
    assert len(events) == has_event
    assert not events or f"at most {limit} samples" in events[0].message


@pytest.mark.parametrize(("required", "expected"), [("NVIDIA-H200", 6), ("NVIDIA-L4", None), (None, 4)])
def test_the_limit_in_the_status_is_that_of_the_type_of_accelerator_that_the_pods_require(
    required: str | None, expected: int | None
) -> None:
    """While its pods start, a job has no replicas, whose types the metrics service would know."""
    limits = (LocalBszLimit("NVIDIA-H200", 6), LocalBszLimit("NVIDIA-T4", 4))
    service = view((2, 0), (2, 0), local_bsz_limits=limits, local_bsz_limit=4)
    actions = actions_for(observed(job((2, 0)), service, [pod(0, accelerator=required)]), 0)
    assert actions.status.get("localBatchLimit") == expected
