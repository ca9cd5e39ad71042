"""Which steps of a single replica are divided into micro-batches, so that their gradients can be compared.

The noise of a gradient shows in the differences between gradients at the same weights. A single replica
without accumulation has one gradient in each step. So some of its steps are divided: the same samples, in two
micro-batches of half the size, whose mean gradient is that of the whole batch.

A divided step takes about twice as long, where half a batch takes as long as a whole one. So there are few of
them: `STEPS_PER_OCTAVE` at first, as many again until the number of steps has doubled, and so on, down to one
of `MAX_INTERVAL` steps. `bench/single_replica.py` measures the cost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from adascale_core.batch.plans import BatchBounds, BatchPlan

STEPS_PER_OCTAVE = 8
"""Divided steps until the number of steps has doubled."""
MAX_INTERVAL = 128
"""Largest interval between two divided steps."""
OBSERVED_STEPS = 8
"""Steps of a job before the first one is divided. They show whether what the program does for a batch can
be done for parts of it. And the first gradients that an Adam measures are divided by the second moment of few
gradients: they are so large that they would decide the averages for hundreds of steps."""


@dataclass(frozen=True)
class StepPlan:
    """How the samples of one step are delivered."""

    plan: BatchPlan  # with the global batch size of the job's plan
    interval: int = 0  # steps for which the measurement of a divided step stands; 0 if it is not divided


class StepDivision:
    """Decides which steps are divided."""

    def __init__(
        self,
        bounds: Callable[[], BatchBounds],
        *,
        is_allowed: bool = True,
        has_batch_norm: bool = False,
        observed_steps: int = OBSERVED_STEPS,
    ) -> None:
        self.loads_parts = True  # False for a stream, whose samples cannot be loaded in parts
        self._bounds = bounds
        self._is_allowed = is_allowed
        self._is_divisible = True
        """Whether what the program has done for its batches can be done for parts of them."""
        self._has_batch_norm = has_batch_norm
        self._left_to_observe = observed_steps
        self._whole_until = 0
        """Position up to which steps are whole, because they were loaded while others were still observed."""

    def is_possible(self, plan: BatchPlan) -> bool:
        """Whether steps of `plan` can be divided, and the gain of other batch sizes is of use."""
        if not (self._is_allowed and self._is_divisible and self.loads_parts and self._has_other_batches()):
            return False
        if (plan.replicas, plan.accumulation) != (1, 1):
            return False
        smallest = plan.local_bsz // smallest_divisor(plan.local_bsz)
        return plan.local_bsz > 1 and (smallest > 1 or not self._has_batch_norm)

    def compares_steps(self, plan: BatchPlan) -> bool:
        """Whether the gradients of consecutive steps of `plan` are compared.

        Not for a fixed batch, whose gain is 1, unless the program has chosen it.
        """
        return not self._is_allowed or (self._has_other_batches() and not self.is_possible(plan))

    def _has_other_batches(self) -> bool:
        """Whether the bounds allow another global batch size than `batch_size`."""
        bounds = self._bounds()
        return bounds.elastic and bounds.max_batch_size != bounds.batch_size

    def observe_step(self, *, is_divisible: bool) -> None:
        """Record a step that was not divided."""
        self._left_to_observe -= self._left_to_observe > 0
        self._is_divisible = self._is_divisible and is_divisible

    def state_dict(self) -> dict[str, Any]:
        """Return what the steps so far have shown, so that a job that resumes divides the same steps."""
        return {
            "left_to_observe": self._left_to_observe,
            "is_divisible": self._is_divisible,
            "whole_until": self._whole_until,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._left_to_observe, self._is_divisible = state["left_to_observe"], state["is_divisible"]
        self._whole_until = state["whole_until"]

    def step_at(self, position: int, plan: BatchPlan) -> StepPlan:
        """Return how the step is delivered that begins at a position in the stream."""
        if self._left_to_observe:
            self._whole_until = position + plan.global_bsz
        if position < self._whole_until or not self.is_possible(plan):
            return StepPlan(plan)
        number = position // plan.local_bsz
        interval = interval_at(number)
        if number % interval:
            return StepPlan(plan)
        # The smallest divisor, so that all micro-batches have the same size. It takes more time if it is not
        # 2, and is used less often then.
        parts = smallest_divisor(plan.local_bsz)
        if number // interval % (parts - 1):
            return StepPlan(plan)
        return StepPlan(BatchPlan(1, plan.local_bsz // parts, parts), interval * (parts - 1))


def interval_at(number: int) -> int:
    """Return the interval between two steps that are divided in two, at a step with a number from 0."""
    octave = max((number // STEPS_PER_OCTAVE).bit_length() - 1, 0)
    return min(1 << octave, MAX_INTERVAL)


def smallest_divisor(number: int) -> int:
    """Return the smallest divisor above 1; `number` itself if it is a prime number or 1."""
    candidate = 2
    while candidate * candidate <= number:
        if number % candidate == 0:
            return candidate
        candidate += 1
    return number
