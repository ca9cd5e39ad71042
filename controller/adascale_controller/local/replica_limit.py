"""The most replicas that a run may have at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from adascale_controller.formatting import plural
from adascale_controller.job import Job
from adascale_controller.local.machine import default_replica_limit
from adascale_core.batch.plans import require_valid_replicas
from adascale_core.errors import AdaScaleError


class ReplicaLimitError(AdaScaleError):
    """A limit that is too low for the job, or too high for the machine."""

    exit_code = 2


@dataclass(frozen=True)
class ReplicaLimit:
    """The most replicas that a run may have at once."""

    replicas: int
    spares: int = 0  # the number of spares beyond them

    def __str__(self) -> str:
        """Return both numbers in words."""
        spares = f" and {plural(self.spares, 'spare')}" if self.spares else ""
        return f"{plural(self.replicas, 'replica')}{spares}"


def replica_limit(job: Job, requested: int | None, devices: Sequence[str]) -> ReplicaLimit:
    """Return the most replicas at once. Spares take the places of others, but not of the fewest."""
    processes = job.spec.processes_per_replica or 1
    limit = requested or max(default_replica_limit(devices) // processes, 1)
    if devices and limit * processes > len(devices):
        raise ReplicaLimitError(
            f"--replicas {limit} exceeds the {plural(len(devices), 'GPU')} of this machine, and each replica "
            f"needs {'one' if processes == 1 else processes}; to train on the CPU, set CUDA_VISIBLE_DEVICES "
            "to the empty string"
        )
    spec = job.spec
    fewest = require_valid_replicas(spec.bounds, spec.min_replicas, spec.max_replicas)[0]
    needs = f"{job.short_id} needs at least {plural(fewest, 'replica')}"
    if fewest > limit:
        source = f"--replicas is {limit}" if requested else f"the default on this machine is {limit}"
        raise ReplicaLimitError(
            f"{needs}, but {source}: use --replicas {fewest} or more, or lower spec.minReplicas"
        )
    specified = spec.max_replicas if job.replica_limit is None else job.replica_limit
    if fewest > specified:
        raise ReplicaLimitError(
            f"{needs}, but spec.replicaLimit is {specified}: raise spec.replicaLimit to {fewest} or more, or "
            "lower spec.minReplicas"
        )
    spares = min(job.spare_replicas, limit - fewest)
    return ReplicaLimit(min(limit - spares, specified, spec.max_replicas), spares)
