"""When time alone changes the actions for a job."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from adascale_controller.operator.observe.observed_job import ObservedJob
from adascale_controller.operator.reconcile.failures import LONG_LIFE, is_lost
from adascale_controller.operator.reconcile.job_phase import Assessment
from adascale_controller.operator.reconcile.reconciler import TERMINATION_OVERDUE
from adascale_controller.operator.reconcile.stale_gates import stale_gates
from adascale_controller.operator.types.kubernetes import seconds


def next_deadline(observed: ObservedJob, assessment: Assessment) -> float:
    """Return when `reconcile` may return other actions though nothing has changed, in seconds since 1970.

    Infinite if it never does. What is overdue is repeated until it is done, so a time may be in the past.
    """
    times = (
        *_overdue_pods(observed),
        *_lost_pods(observed),
        *_registrations(observed),
        *(due for _, due in stale_gates(observed)),
        *_expiry(observed, assessment),
        *_target(observed, assessment),
    )
    return min(times, default=inf)


def _overdue_pods(observed: ObservedJob) -> Iterator[float]:
    for pod in observed.pods:
        if pod.deletion_deadline is not None and not pod.has_ended:
            yield pod.deletion_deadline + TERMINATION_OVERDUE


def _lost_pods(observed: ObservedJob) -> Iterator[float]:
    for pod in observed.own_pods:
        if not is_lost(pod, observed.now) and is_lost(pod, inf):
            yield pod.created_at + LONG_LIFE


def _registrations(observed: ObservedJob) -> Iterator[float]:
    if observed.registrations_due is not None:
        yield observed.registrations_due


def _expiry(observed: ObservedJob, assessment: Assessment) -> Iterator[float]:
    job, ended_at = observed.resource.job, seconds(observed.resource.status.get("completionTime"))
    ttl = job.ttl_seconds_after_finished if job is not None else None
    if assessment.ended and ttl is not None and ended_at is not None:
        yield ended_at + ttl


def _target(observed: ObservedJob, assessment: Assessment) -> Iterator[float]:
    due = observed.resource.deadline
    if due is not None and due > observed.now and not assessment.ended:
        yield due
