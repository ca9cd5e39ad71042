"""How many replicas of a job Kueue lets run: its quota is capacity for the decision.

The limit of each job in a ClusterQueue has all of the unused quota. Kueue admits the growth of one of them,
and the limit of the others falls, so that they ask for no more than what they have.
"""

from __future__ import annotations

from adascale_controller.formatting import plural
from adascale_controller.operator.observe.observed_job import ObservedJob
from adascale_controller.operator.observe.queue import QueueView
from adascale_core.batch.plans import valid_replicas


def quota_limit(observed: ObservedJob) -> int | None:
    """Return the largest count for which Kueue has quota. None if the job is not queued.

    A job with extra pods grows by these, in a queue of their own or in none.
    """
    if observed.core is not None:
        return _extra_limit(observed, observed.core)
    indexed_job, view = observed.own_indexed_job, observed.queue
    if indexed_job is None or indexed_job.queue is None:
        return None
    if not indexed_job.is_elastic:
        return indexed_job.parallelism
    return _limit(observed, view, 0) if view is not None else _count(observed)


def _extra_limit(observed: ObservedJob, core: int) -> int | None:
    settings, extra = observed.resource.valid_job.opportunistic, observed.own_extra_job
    if settings is None or settings.queue_name is None or (extra is not None and not extra.is_elastic):
        # Without elastic slices Kueue admits another number of them by stopping those that run.
        return None
    if extra is not None and observed.extra_queue is None:
        return max(_count(observed), core)
    return max(_limit(observed, observed.extra_queue or QueueView(), core), core)


def _limit(observed: ObservedJob, view: QueueView, others: int) -> int:
    """Return the largest count for whose replicas beyond `others` Kueue has quota."""
    if view.room is not None:
        return min(others + view.admitted + view.room, observed.resource.valid_job.spec.max_replicas)
    count = _count(observed)
    if count != observed.training_replicas:
        return count
    # The quota is not known: it is found out by asking for the next larger count, one at a time.
    return next((larger for larger in _counts(observed) if larger > count), count)


def _count(observed: ObservedJob) -> int:
    current = observed.current_allocation
    return current.replicas if current is not None else 0


def fixed_count(observed: ObservedJob) -> int | None:
    """Return the only count of a job that Kueue admits without elastic slices. None for any other job."""
    indexed_job = observed.own_indexed_job
    if (
        indexed_job is None
        or indexed_job.queue is None
        or indexed_job.is_elastic
        or observed.core is not None
    ):
        return None
    return indexed_job.parallelism if indexed_job.parallelism in _counts(observed) else None


def describe_quota(observed: ObservedJob, limit: int) -> str:
    """Return why a job gets no more than a limit of its quota."""
    indexed_job, view = observed.own_indexed_job, observed.queue
    if observed.core is not None:
        view, indexed_job = observed.extra_queue, None
    if indexed_job is not None and not indexed_job.is_elastic:
        return f"Kueue has admitted {plural(limit, 'replica')} without elastic slices"
    if view is not None and view.room is not None:
        return f"the quota of ClusterQueue {view.cluster_queue} holds {plural(limit, 'replica')}"
    return f"Kueue is asked for {plural(limit, 'replica')} first"


def _counts(observed: ObservedJob) -> list[int]:
    spec = observed.resource.valid_job.spec
    return [count for count in valid_replicas(spec.bounds, spec.max_replicas) if count >= spec.min_replicas]
