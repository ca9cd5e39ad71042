"""Lost pods: which pods are deleted so that their replacements start at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from adascale_controller.operator.observe.pods import Pod, PodExit
from adascale_controller.operator.reconcile.failures import LONG_LIFE, is_lost
from adascale_core.failures import TerminationMessage
from support.observed_jobs import NOW, actions_for, indexed_job, job, observed, pod, view

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
    ("removed", "pods", "more"),
    [
        (("lost",), [pod(0), LOST], {}),
        ((), [pod(0), LOST, pod(1, created_at=NOW)], {}),
        ((), [pod(0), replace(LOST, rank=2)], {}),
        ((), [pod(0), LOST], {"suspended": True}),
        ((), [pod(0), LOST], {"complete": True}),
        ((), [pod(0), replace(LOST, created_at=NOW - 90), ended(1, FAILED)], {}),
    ],
)
def test_the_newest_pod_of_a_rank_is_deleted_if_it_is_lost(
    removed: tuple[str, ...], pods: list[Pod], more: dict[str, Any]
) -> None:
    observed_job = observed(job((1, 2)), view((1, 2), (1, 2)), indexed_job(2, **more), pods)
    assert actions_for(observed_job, 2).delete_pods == removed


@pytest.mark.parametrize(("suspended", "released"), [(True, ("kept",)), (False, ())])
def test_ended_pods_of_a_suspended_job_lose_their_finalizer(
    suspended: bool, released: tuple[str, ...]
) -> None:
    pods = [pod(0, tracked=True), ended(1, FAILED, name="kept", tracked=True), ended(2, FAILED)]
    observed_job = observed(job((1, 3)), view((1, 3)), indexed_job(3, suspended=suspended), pods)
    actions = actions_for(observed_job, 3)
    assert actions.release_pods == released
    assert actions.delete_pods == ()
