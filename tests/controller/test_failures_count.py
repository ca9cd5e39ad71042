"""How often the program has failed: a generation counts once, a round of starts counts once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from adascale_controller.operator.failures import Failures
from adascale_controller.operator.pods import Ended, Pod
from support.sightings import batch, failed_pod, job, pod, seen, view

EVICTED = pod(0, phase="Failed", ended=Ended(3, disruption=True))


@pytest.mark.parametrize(
    ("known", "pods", "expected"),
    [
        (Failures(), [], Failures()),
        (Failures(), [pod(0), pod(1)], Failures()),
        (Failures(), [failed_pod(0, 3)], Failures(1, 3)),
        (Failures(), [failed_pod(0, 3), failed_pod(1, 3)], Failures(1, 3)),
        (Failures(), [failed_pod(0, 3), failed_pod(0, 4)], Failures(2, 4)),
        (Failures(1, 3), [failed_pod(0, 3)], Failures(1, 3)),
        (Failures(1, 3), [failed_pod(0, 3), failed_pod(1, 5)], Failures(2, 5)),
        (Failures(), [failed_pod(0), failed_pod(1), failed_pod(2)], Failures(1, 0, 1)),
        (Failures(), [failed_pod(0), failed_pod(0), failed_pod(1)], Failures(2, 0, 2)),
        (Failures(2, 0, 2), [failed_pod(0), failed_pod(0)], Failures(2, 0, 2)),
        (Failures(), [EVICTED], Failures()),
    ],
    ids=str,
)
def test_what_counts(known: Failures, pods: list[Pod], expected: Failures) -> None:
    assert known.seen(pods) == expected


def test_what_fails_after_the_job_was_made_anew_counts_again() -> None:
    known = Failures(2, 0, 2).seen([])
    assert known.count == 2
    assert known.seen([failed_pod(0)]).count == 3


def test_what_is_counted_is_found_in_the_status_again() -> None:
    status = {"failures": 4, "attempts": {"failedGeneration": 7, "falseStarts": 2}}
    assert Failures.read(status) == Failures(4, 7, 2)
    assert Failures.read({}) == Failures()


def test_failures_of_an_earlier_job_of_the_same_name_are_not_its_own() -> None:
    sighting = seen(job(), None, batch(1, owner="earlier-uid"), pods=[failed_pod(0, 3)])
    assert sighting.own_pods == ()
    assert replace(sighting, batch=None).own_pods == ()
    assert len(replace(sighting, batch=batch(1)).own_pods) == 1


@pytest.mark.parametrize(
    ("complete", "known_by_service", "expected"), [(False, False, 1), (True, False, 0), (False, True, 0)]
)
def test_how_replicas_fall_when_the_first_has_finished_is_no_failure(
    complete: bool, known_by_service: bool, expected: int
) -> None:
    service = view((3, 2), (3, 2), complete=known_by_service)
    at_its_end = seen(job((3, 2)), service, batch(2, complete=complete), [pod(0), failed_pod(1, 3)])
    assert Failures.of(at_its_end).count == expected
