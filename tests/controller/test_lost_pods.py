"""The next pod of a replica: when it is made, and what becomes of those that have ended."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from adascale_controller.operator.observe.pods import Pod, PodExit
from adascale_controller.operator.reconcile.job_phase import (
    FIRST_PAUSE,
    LONG_LIFE,
    MAX_PAUSE,
    is_lost,
    replaced_at,
)
from adascale_core.failures import TerminationMessage
from support.observed_jobs import NOW, actions_for, job, observed, pod, view, writes

KILLED = PodExit(137)
REENTERS = PodExit(75)
FAILED = PodExit(3, termination=TerminationMessage(1, 3))


def ended(rank: int, how: PodExit, **more: Any) -> Pod:
    return pod(rank, **{"phase": "Failed", "exit": how, **more})


@pytest.mark.parametrize(
    ("lost", "end"),
    [
        (False, pod(0)),
        (False, pod(0, deletion_deadline=NOW)),
        (True, ended(0, REENTERS, deletion_deadline=NOW)),
        (True, ended(0, replace(REENTERS, disruption=True))),
        (True, ended(0, PodExit(None, reason="Evicted", disruption=True))),
        (True, ended(0, KILLED, deletion_deadline=NOW)),
        (False, ended(0, KILLED)),
        (True, ended(0, KILLED, created_at=NOW - LONG_LIFE - 1)),
        (False, ended(0, FAILED)),
        (False, ended(0, FAILED, created_at=NOW - LONG_LIFE - 1)),
        (False, ended(0, FAILED, deletion_deadline=NOW)),
        (False, ended(0, PodExit(0), phase="Succeeded", deletion_deadline=NOW)),
    ],
)
def test_a_pod_is_lost_if_it_was_ended_from_outside(lost: bool, end: Pod) -> None:
    assert is_lost(end, NOW) == lost


LOST = ended(1, replace(REENTERS, disruption=True), name="lost")


@pytest.mark.parametrize(
    ("ends", "pause"),
    [
        ([], 0.0),
        ([LOST], 0.0),
        ([ended(1, replace(KILLED, ended_at=NOW))], FIRST_PAUSE),
        ([ended(1, replace(FAILED, ended_at=NOW))], FIRST_PAUSE),
        ([LOST, ended(1, replace(KILLED, ended_at=NOW), attempt=1)], FIRST_PAUSE),
        ([ended(1, KILLED), ended(1, replace(KILLED, ended_at=NOW), attempt=1)], 2 * FIRST_PAUSE),
        ([ended(1, KILLED), replace(LOST, attempt=1)], 0.0),
        ([ended(1, replace(FAILED, ended_at=NOW), attempt=each) for each in range(99)], MAX_PAUSE),
    ],
)
def test_a_pod_is_replaced_after_a_pause_that_doubles_unless_it_is_lost(
    ends: list[Pod], pause: float
) -> None:
    assert replaced_at(ends, NOW) == NOW + pause
    seen = observed(job((1, 2)), view((1, 2), (1, 2)), [pod(0), *ends], digest="")
    seen = replace(seen, pods=[replace(each, template=None) for each in seen.pods])
    assert [each.rank for each in actions_for(seen, 2).create_pods] == ([] if pause else [1])
    due = replace(seen, now=NOW + pause)
    assert [each.attempt for each in actions_for(due, 2).create_pods] in ([len(ends)], [])


NEXT = pod(1, uid="next", attempt=1)


@pytest.mark.parametrize(
    ("deleted", "pods"),
    [
        (["lost"], [pod(0), LOST, NEXT]),
        ([], [pod(0), LOST, replace(NEXT, has_started=False)]),
        ([], [pod(0), ended(1, KILLED, name="killed"), NEXT]),
        (["killed"], [pod(0), ended(1, KILLED, name="killed", created_at=NOW - LONG_LIFE - 1), NEXT]),
        ([], [pod(0), ended(1, FAILED, name="failed", created_at=NOW - LONG_LIFE - 1), NEXT]),
    ],
)
def test_a_lost_pod_stays_until_the_next_one_runs(deleted: list[str], pods: list[Pod]) -> None:
    seen = observed(job((1, 2)), view((1, 2), (1, 2)), pods)
    assert writes(actions_for(seen, 2)).get("delete", []) == deleted


def test_of_two_pods_of_a_rank_the_later_one_is_deleted() -> None:
    seen = observed(job((1, 2)), view((1, 2), (1, 2)), [pod(0), pod(1), replace(NEXT, name="second")])
    assert writes(actions_for(seen, 2)) == {"delete": ["second"]}
