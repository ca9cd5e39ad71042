"""How often the program has failed: a generation counts once, a round of starts counts once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from adascale_controller.job.failures import Failures
from adascale_controller.operator.observe.pods import Pod, PodExit, program_failures
from adascale_controller.operator.reconcile.job_phase import failures_of, read_failures
from adascale_core.failures import FailureCount
from adascale_core.messages.registration import ReplicaState
from support.observed_jobs import failed_pod, finished_pod, job, observed, pod, replica, view

EVICTED = pod(0, phase="Failed", exit=PodExit(3, disruption=True))


def with_pods(known: FailureCount, pods: list[Pod]) -> FailureCount:
    return Failures(known, program_failures(pods), view(), None).count


@pytest.mark.parametrize(
    ("known", "pods", "expected"),
    [
        (FailureCount(), [pod(0), pod(1)], FailureCount()),
        (FailureCount(1, 3), [failed_pod(0, 3), failed_pod(1, 5)], FailureCount(2, 5)),
        (FailureCount(), [failed_pod(0), failed_pod(0), failed_pod(1)], FailureCount(2, 0, 2)),
        (FailureCount(), [EVICTED], FailureCount()),
    ],
    ids=str,
)
def test_failures_of_pods_are_added_to_the_recorded_count(
    known: FailureCount, pods: list[Pod], expected: FailureCount
) -> None:
    assert with_pods(known, pods) == expected


def test_the_count_is_read_from_the_status() -> None:
    status = {"failures": 4, "attempts": {"failedGeneration": 7, "falseStarts": 2}}
    assert read_failures(status) == FailureCount(4, 7, 2)
    assert read_failures({}) == FailureCount()


def test_the_failure_in_a_pod_that_is_gone_is_known_from_the_registration_of_its_agent() -> None:
    gone = (replica(0, ReplicaState.FAILED, 3), replica(1, generation=3))
    seen = observed(job((3, 2)), view((3, 2), (3, 2), replicas=gone), [pod(1)])
    assert failures_of(seen).count == FailureCount(1, 3)
    assert failures_of(replace(seen, pods=[failed_pod(0, 3), pod(1)])).count == FailureCount(1, 3)
    assert failures_of(replace(seen, pods=[pod(0), pod(1)])).count == FailureCount(), "its pod will say why"


@pytest.mark.parametrize(
    ("complete", "known_by_service", "expected"), [(False, False, 1), (True, False, 0), (False, True, 0)]
)
def test_pods_that_fail_after_rank_0_has_finished_do_not_count(
    complete: bool, known_by_service: bool, expected: int
) -> None:
    service = view((3, 2), (3, 2), complete=known_by_service)
    first = finished_pod(0) if complete else pod(0)
    at_its_end = observed(job((3, 2)), service, [first, failed_pod(1, 3)])
    assert failures_of(at_its_end).count.count == expected
