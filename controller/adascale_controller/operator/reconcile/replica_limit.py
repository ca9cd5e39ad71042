"""A `replicaLimit`, as `kubectl scale` sets it, that is lower than what the job needs."""

from __future__ import annotations

from adascale_controller.formatting import plural
from adascale_controller.job import Job
from adascale_core.batch.plans import is_valid_replicas, require_valid_replicas


def replica_limit_problem(job: Job) -> str | None:
    """Return a message about a limit below the smallest valid count. None if there is no such limit."""
    spec, limit = job.spec, job.replica_limit
    if not limit or any(
        is_valid_replicas(spec.bounds, count) for count in range(spec.min_replicas, limit + 1)
    ):
        return None
    fewest = require_valid_replicas(spec.bounds, spec.min_replicas, spec.max_replicas)[0]
    return (
        f"spec.replicaLimit is {limit}, but the job needs at least {plural(fewest, 'replica')}, so the limit "
        f"is {fewest}: raise spec.replicaLimit to {fewest} or more, lower spec.minReplicas, or set "
        "spec.replicaLimit to 0 to stop the job"
    )
