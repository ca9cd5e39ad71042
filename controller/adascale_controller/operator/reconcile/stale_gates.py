"""Pods that stay gated though Kueue has admitted them.

Kueue 0.17 removes the gates of the pods that it knows when the Job of an elastic workload changes. A pod that
it does not know yet stays gated until the Job changes again, so the operator changes an annotation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from adascale_controller.operator.observe.observed_job import IndexedJob, ObservedJob
from adascale_controller.operator.types.conditions import Reason

TIMEOUT: Final = 5.0
"""Seconds from the creation of a pod until its Job is changed for it the first time."""
MAX_PAUSE: Final = 600.0
"""Seconds between two such changes at most. They double, because others may gate the pod too."""


def stale_gates(observed: ObservedJob) -> Iterator[tuple[IndexedJob, float]]:
    """Yield the Indexed Jobs with such pods, and when to change them, in seconds since 1970."""
    views = ((observed.own_indexed_job, observed.queue), (observed.own_extra_job, observed.extra_queue))
    for indexed_job, view in views:
        if indexed_job is None or view is None or not indexed_job.is_elastic:
            continue
        admitted = range(indexed_job.first, indexed_job.first + min(view.admitted, len(indexed_job.ranks)))
        gated = [
            pod.created_at
            for pod in observed.live_pods.values()
            if pod.rank in admitted
            and pod.problem is not None
            and pod.problem.reason is Reason.SCHEDULING_GATED
        ]
        if gated:
            yield indexed_job, min(_due(created, indexed_job.gates_checked_at) for created in gated)


def _due(created: float, checked: float) -> float:
    pause = min(max(TIMEOUT, checked - created), MAX_PAUSE)
    return max(created, checked) + pause
