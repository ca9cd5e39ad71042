"""The choice of the batch plan: local batch size and gradient accumulation, the same on all replicas."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from adascale_core.batch.plans import (
    BatchBounds,
    BatchPlan,
    EfficiencyBound,
    allows,
    invalid_count,
    is_valid_replicas,
    limit_after,
    plan_batch,
    valid_replicas,
)
from adascale_core.performance.throughput import StepTimeModel
from adascale_worker.errors import FROM_SCRATCH, UnusableCheckpointError
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.program.parts import Optimizers
from adascale_worker.reporting.progress import StepTimer

REPLAN_INTERVAL = 1.0
"""Seconds of training after which the batch plan is chosen again, at the next end of an epoch."""
LONGEST_REPLAN_INTERVAL = 60.0
"""Seconds to which this interval grows in an epoch of a stream, which may have no end."""
PROBE_FACTOR = 2
"""Without an upper bound of the local batch size, a batch is at most this many times as large as one that has
fit into memory."""


class BatchPlanner:
    """Holds the current batch plan, and chooses the next plan."""

    def __init__(self, bounds: BatchBounds, group: ReplicaGroup, efficiency: EfficiencyBound) -> None:
        replicas = group.replicas
        if group.is_elastic:
            replicas = _valid_replicas_near(bounds, replicas)
        _require_valid_replicas(bounds, replicas)
        self.bounds = bounds
        self.plan = plan_batch(bounds, replicas)
        """The plan of the current epoch."""
        self.fitting = 0
        """The largest local batch size of a finished step; 0 before the first step."""
        self.step_plan = self.plan
        """The plan of the present step: that of the epoch, or one with smaller micro-batches."""
        self._group = group
        self._efficiency = efficiency
        self._planned_at = time.monotonic()
        self._patience = 1
        """Multiple of `REPLAN_INTERVAL` until the next choice."""

    @property
    def scale(self) -> float:
        """The scale of the current plan."""
        return self.plan.scale(self.bounds)

    @property
    def is_due(self) -> bool:
        """Whether the plan should be chosen again, at the end of this epoch or in one of a stream."""
        interval = min(self._patience * REPLAN_INTERVAL, LONGEST_REPLAN_INTERVAL)
        return time.monotonic() - self._planned_at >= interval

    def postpone(self) -> None:
        """Double the time until the next choice, after one inside an epoch, where a change costs more."""
        self._patience *= 2

    def finished_step(self) -> None:
        """Record that a step was made with its plan."""
        self.fitting = max(self.fitting, self.step_plan.local_bsz)

    def smaller_local_bsz(self) -> int | None:
        """Return the limit to try after the current batch did not fit into memory; None if none is left."""
        size = self.plan.local_bsz
        for limit in (limit_after(size, self.fitting), self.bounds.lower, size - 1):
            if 0 < limit < size and is_valid_replicas(self.bounds.with_limit(limit), self._group.replicas):
                return limit
        return None

    def replan(self, optimizer: Optimizers, step_timer: StepTimer) -> None:
        """Choose a plan on rank 0 and use it on all ranks. A collective call."""
        self._planned_at = time.monotonic()
        self._share(self._choose(optimizer, step_timer) if self._group.is_main else self.plan)

    def _choose(self, optimizer: Optimizers, step_timer: StepTimer) -> BatchPlan:
        model = StepTimeModel.fit(step_timer.step_times())
        estimate, nodes = optimizer.slowest.estimate, self._group.nodes
        return plan_batch(
            self._bounds_to_try(),
            self._group.replicas,
            estimate=None if estimate is None else estimate.cautious,
            throughput=(lambda plan: model.throughput(plan, nodes)) if model is not None else None,
            efficiency=self._efficiency,
        )

    def _share(self, plan: BatchPlan) -> None:
        """Use the plan of rank 0 on all ranks."""
        local_bsz, accumulation = self._group.broadcast([plan.local_bsz, plan.accumulation])
        self._use(BatchPlan(self._group.replicas, local_bsz, accumulation))

    def _use(self, plan: BatchPlan) -> None:
        self.step_plan = self.plan = plan

    def _bounds_to_try(self) -> BatchBounds:
        """Return the bounds of the next plan. Without an upper bound, batches grow by `PROBE_FACTOR`."""
        if self.bounds.declared_upper is not None or not self.bounds.elastic or not self.fitting:
            return self.bounds
        probed = self.bounds.with_limit(PROBE_FACTOR * self.fitting)
        return probed if is_valid_replicas(probed, self._group.replicas) else self.bounds

    def state_dict(self) -> dict[str, Any]:
        """Return the plan, the batch size that it is for, and the largest local batch size that has fit."""
        plan = self.plan
        return {
            "batch_size": self.bounds.batch_size,
            "plan": [plan.replicas, plan.local_bsz, plan.accumulation],
            "fitting": self.fitting,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the plan of a saved state, until `adapt` is called."""
        saved, batch_size = state["batch_size"], self.bounds.batch_size
        if saved != batch_size:
            raise UnusableCheckpointError(
                f"the checkpoint was saved with batch_size {saved}, but batch_size is now {batch_size}: "
                f"progress counts steps at batch_size, so it cannot change. Set it back to {saved}, or "
                f"{FROM_SCRATCH}"
            )
        self._use(BatchPlan(*state["plan"]))
        self.fitting = int(state["fitting"])

    def begin(self, bounds: BatchBounds) -> None:
        """Choose the first plan of a job for the replicas that there are."""
        _require_valid_replicas(bounds, self._group.replicas)
        self.bounds = bounds
        self._use(plan_batch(bounds, self._group.replicas))

    def adapt(self, bounds: BatchBounds, optimizer: Optimizers, step_timer: StepTimer) -> None:
        """Keep the plan of rank 0 if it is valid for the present bounds and replicas, else choose a plan.

        A collective call. Before it, ranks can have different plans: some may have got the next one at the
        end of an epoch, when others were lost.
        """
        _require_valid_replicas(bounds, self._group.replicas)
        self.bounds = bounds
        if bounds.upper is not None:
            self.fitting = min(self.fitting, bounds.upper)
        plan, is_main = self.plan, self._group.is_main
        if is_main and (plan.replicas != self._group.replicas or not allows(bounds, plan)):
            self._planned_at = time.monotonic()
            plan = self._choose(optimizer, step_timer)
        self._share(plan)


def _valid_replicas_near(bounds: BatchBounds, replicas: int) -> int:
    """Return a valid number of replicas for the time before a trainer's first generation.

    The bounds of the environment may be older than the number of replicas. The generation has newer bounds.
    """
    if is_valid_replicas(bounds, replicas):
        return replicas
    valid = valid_replicas(bounds, max(16, 2 * replicas))
    return max((count for count in valid if count <= replicas), default=min(valid, default=replicas))


def _require_valid_replicas(bounds: BatchBounds, replicas: int) -> None:
    if not is_valid_replicas(bounds, replicas):
        raise invalid_count(bounds, replicas)
