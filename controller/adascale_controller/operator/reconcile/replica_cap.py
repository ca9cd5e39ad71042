"""A cap on the replicas, as `kubectl scale` sets it, that is lower than what the job needs."""

from __future__ import annotations

from adascale_controller.formatting import plural
from adascale_controller.job import Job
from adascale_core.batch.plans import is_valid_replicas, require_valid_replicas


def cap_problem(job: Job) -> str | None:
    """Return a message about a cap below the smallest valid count. None if there is no such cap."""
    spec, cap = job.spec, job.replicas
    if not cap or any(is_valid_replicas(spec.bounds, count) for count in range(spec.min_replicas, cap + 1)):
        return None
    fewest = require_valid_replicas(spec.bounds, spec.min_replicas, spec.max_replicas)[0]
    return (
        f"spec.replicas is {cap}, but the job needs at least {plural(fewest, 'replica')}, so the limit is "
        f"{fewest}: raise spec.replicas to {fewest} or more, lower spec.minReplicas, or set spec.replicas to "
        "0 to stop the job"
    )
