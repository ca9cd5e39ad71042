"""The declaration of a job by the controller, and what trainers find out about its batch size."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from adascale_core import names
from adascale_core.batch.plans import BatchBounds, LocalBszBounds
from adascale_core.messages import Message


def steps_of(samples: int, batch_size: int) -> int:
    """Return the steps at `batch_size` in which so many samples are trained, rounded up."""
    return -(-samples // batch_size)


@dataclass(frozen=True)
class JobSpec(Message):
    """The bounds of a job, as the controller declares them to the metrics service.

    Args:
        batch_size: the batch size for which the learning rate was tuned (B0), in samples.
        max_batch_size: upper bound of the global batch size; None if unbounded.
        local_bsz_bounds: (lower, upper) bounds of the local batch size; None if unbounded. An upper bound of
            "auto" means what fits into memory.
        min_replicas, max_replicas: the bounds of the replica count.
        scale_invariant_steps: steps at `batch_size` after which the job is complete; None if the program
            decides.
        train_samples: samples after which the job is complete, in place of `scale_invariant_steps`; progress
            counts samples then, and not gains.
        efficiency_target: lower bound of the efficiency of a batch, above 0 and at most 1; None for the
            default (see `EfficiencyBound`).
        elastic_single_replica: whether the batch of a single replica may be larger than `batch_size` too.
        local_bsz_limit: the largest local batch size that is used, since a larger one did not fit into the
            memory of the replicas; None if none has failed. The service sets it.
        processes_per_replica: processes that share one copy of the model and divide the batch of a replica;
            None for replicas of one process with the whole model.
    """

    batch_size: int
    max_batch_size: int | None = None
    local_bsz_bounds: LocalBszBounds | None = None
    min_replicas: int = 1
    max_replicas: int = 1
    scale_invariant_steps: int | None = None
    efficiency_target: float | None = None
    elastic_single_replica: bool = False
    local_bsz_limit: int | None = None
    processes_per_replica: int | None = None
    train_samples: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the spec's JSON object, without the fields that the service adds to a declaration."""
        members = super().to_json()
        for name in ("local_bsz_limit", "processes_per_replica", "train_samples", "efficiency_target"):
            if members[name] is None:
                del members[name]
        return members

    @property
    def steps(self) -> int | None:
        """The progress at which the job is complete; None if the program decides."""
        if self.train_samples is not None:
            return steps_of(self.train_samples, self.batch_size)
        return self.scale_invariant_steps

    @property
    def bounds(self) -> BatchBounds:
        """The batch sizes that the job allows."""
        return BatchBounds(
            self.batch_size,
            self.max_batch_size,
            self.local_bsz_bounds,
            self.elastic_single_replica,
            self.local_bsz_limit,
            self.processes_per_replica or 1,
        )

    def with_limit(self, limit: int | None) -> JobSpec:
        """Return this spec for devices whose memory holds local batches of at most `limit` samples."""
        return replace(self, local_bsz_limit=self.bounds.with_limit(limit).local_bsz_limit)

    def environment(self) -> dict[str, str | None]:
        """Return the environment variables of a trainer; None for a variable that must not be set."""
        pair = self.local_bsz_bounds
        steps, samples = self.scale_invariant_steps, self.train_samples
        target = self.efficiency_target
        return {
            names.ENV_BATCH_SIZE: str(self.batch_size),
            names.ENV_MAX_BATCH_SIZE: None if self.max_batch_size is None else str(self.max_batch_size),
            names.ENV_LOCAL_BSZ_BOUNDS: None if pair is None else f"{pair[0]},{pair[1]}",
            names.ENV_LOCAL_BSZ_LIMIT: None if self.local_bsz_limit is None else str(self.local_bsz_limit),
            names.ENV_ELASTIC_SINGLE_REPLICA: "1" if self.elastic_single_replica else None,
            names.ENV_EFFICIENCY_TARGET: None if target is None else repr(target),
            names.ENV_SCALE_INVARIANT_STEPS: None if steps is None else str(steps),
            names.ENV_TRAIN_SAMPLES: None if samples is None else str(samples),
        }


@dataclass(frozen=True)
class LocalBszLimit(Message):
    """What fits into the memory of a type of accelerator, as far as training has shown.

    Args:
        accelerator: the type, as in a `Registration`.
        local_bsz: the largest local batch size that is used on it, since a larger one did not fit.
    """

    accelerator: str
    local_bsz: int
