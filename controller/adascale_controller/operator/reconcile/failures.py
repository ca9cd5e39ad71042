"""Failures of the program and lost pods, from how pods have ended.

The status holds the count together with what is counted, so a restarted operator neither loses a failure nor
counts it twice. When pods are deleted, the count stays, and later failures are added to it. The failure in a
pod that is deleted while no operator runs is known from what its agent has registered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from adascale_controller.job.failures import Failures
from adascale_controller.operator.observe.observed_job import ObservedJob
from adascale_controller.operator.observe.pods import Pod, is_program_failure, program_failures
from adascale_core.failures import FailureCount
from adascale_core.messages.registration import ReplicaState

LONG_LIFE: Final = 600.0
"""Seconds after which the end of a pod does not delay its replacement."""
FIRST_PAUSE: Final = 10.0
"""Seconds from the end of a pod to its replacement, as of a Job. They double with each further end."""
MAX_PAUSE: Final = 600.0
"""The longest such pause, in seconds."""


def read_failures(status: Mapping[str, Any]) -> FailureCount:
    """Return the failures recorded in a status."""
    attempts = status.get("attempts") or {}
    return FailureCount(
        status.get("failures", 0), attempts.get("failedGeneration", 0), attempts.get("falseStarts", 0)
    )


def failures_of(observed: ObservedJob) -> Failures:
    """Return the failures of a job, from its status and its pods."""
    recorded, job = read_failures(observed.resource.status), observed.resource.job
    if not observed.program_finished:
        recorded = recorded.with_generations(_registered_failures(observed))
    return Failures(
        recorded,
        program_failures(observed.pods),
        observed.service,
        observed.current_allocation,
        # A suspended job has no spares, but its pods may have been spares.
        max(observed.spares, job.spare_replicas if job is not None else 0),
        finished=observed.program_finished,
    )


def _registered_failures(observed: ObservedJob) -> set[int]:
    """Return the generations in which agents have registered a failure of the program, and have no pod."""
    if observed.resource.recorded_allocation is None:
        # They may be those of an earlier job of this name.
        return set()
    ranks, replicas = {pod.rank for pod in observed.pods}, observed.view.replicas
    failed = (each for each in replicas if each.state is ReplicaState.FAILED and each.replica not in ranks)
    return {each.generation for each in failed}


def is_lost(pod: Pod, now: float) -> bool:
    """Whether a pod was ended from outside, so that its replacement may start at once.

    A pod that was killed or ran out of memory soon after its start is not lost: its replacement may end the
    same way.
    """
    if pod.exit is None or pod.phase != "Failed" or is_program_failure(pod.exit):
        return False
    return pod.exit.disruption or pod.deletion_deadline is not None or now > pod.created_at + LONG_LIFE


def replaced_at(pods: Sequence[Pod], now: float) -> float:
    """Return when another pod of a replica may be created after these, in the order of their attempts."""
    end = pods[-1].exit if pods else None
    if end is None or is_lost(pods[-1], now):
        return now
    number = sum(not is_lost(pod, now) for pod in pods)
    pause: float = min(FIRST_PAUSE * 2 ** (number - 1), MAX_PAUSE)
    return (end.ended_at or pods[-1].created_at) + pause
