"""How long a step takes, fitted to what was measured.

    t(K, b, a) = a * (fixed + per_sample * b) + [K > 1] * (sync + sync_per_replica * (K - 2))

the shape that Pollux uses (Qiao et al., 2021, section 3.2), with compute and communication added up.
What the measurements leave open stays at a guess: half of a step's time is fixed and half grows with the
batch, and communication is free. The guess is optimistic, so that a job tries a count it has not seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from adascale_core.batch import BatchPlan
from adascale_core.messages import StepTime

_RIDGE = 1e-4
_ROUNDS = 500


@dataclass(frozen=True)
class StepTimeModel:
    """Seconds per optimizer step of any batch plan.

    Args:
        fixed: seconds per micro-batch, whatever its size.
        per_sample: seconds per sample of a micro-batch.
        sync: seconds per step to communicate between two replicas.
        sync_per_replica: seconds per step that each replica beyond the second adds.
        known: whether measurements tell `fixed` from `per_sample`, that is, cover two local batch sizes.
    """

    fixed: float
    per_sample: float
    sync: float = 0.0
    sync_per_replica: float = 0.0
    known: bool = False

    def step_time(self, plan: BatchPlan) -> float:
        """Predicted seconds per optimizer step."""
        compute = plan.accumulation * (self.fixed + self.per_sample * plan.local_bsz)
        if plan.replicas == 1:
            return compute
        return compute + self.sync + self.sync_per_replica * (plan.replicas - 2)

    def throughput(self, plan: BatchPlan) -> float:
        """Predicted optimizer steps per second."""
        return 1 / self.step_time(plan)

    @classmethod
    def fit(cls, measured: Sequence[StepTime]) -> Self | None:
        """The model of least relative error, all its terms non-negative; none without a measurement.

        Ridge regression towards the guess, by coordinate descent: four unknowns, few measurements.
        """
        usable = [one for one in measured if one.step_time > 0]
        if not usable:
            return None
        reference = min(usable, key=lambda one: (one.replicas, one.local_bsz, one.accumulation))
        micro_batch = reference.step_time / reference.accumulation
        # In units of the reference, all four unknowns are of the order of one.
        unit = (micro_batch, micro_batch / reference.local_bsz, micro_batch, micro_batch)
        guess = (0.5, 0.5, 0.0, 0.0)
        rows = [
            [value * u / one.step_time for value, u in zip(_row(one.plan), unit, strict=True)]
            for one in usable
        ]
        solution = _ridge(rows, guess)
        fixed, per_sample, sync, sync_per_replica = (x * u for x, u in zip(solution, unit, strict=True))
        known = len({one.local_bsz for one in usable}) > 1
        return cls(fixed, per_sample, sync, sync_per_replica, known)


def _row(plan: BatchPlan) -> tuple[float, float, float, float]:
    several = plan.replicas > 1
    return (
        plan.accumulation,
        plan.accumulation * plan.local_bsz,
        float(several),
        float(plan.replicas - 2) if several else 0.0,
    )


def _ridge(rows: Sequence[Sequence[float]], guess: Sequence[float]) -> list[float]:
    """Non-negative x that minimises sum((row . x - 1)^2) + ridge * |x - guess|^2."""
    x = list(guess)
    for _ in range(_ROUNDS):
        for i in range(len(x)):
            rest = [1 - sum(row[j] * x[j] for j in range(len(x)) if j != i) for row in rows]
            numerator = sum(row[i] * r for row, r in zip(rows, rest, strict=True)) + _RIDGE * guess[i]
            denominator = sum(row[i] ** 2 for row in rows) + _RIDGE
            x[i] = max(numerator / denominator, 0.0)
    if not any(x):
        return list(guess)
    return x
