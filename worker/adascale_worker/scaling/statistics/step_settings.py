"""How a step is made of backward passes and replicas."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepSettings:
    """How a step is made."""

    world_size: int
    accumulation: int
    scale: float
    is_scaled_loss: bool  # whether each loss is divided by `accumulation`
    # the number of steps for which the measurement of this step stands, if the training loop has chosen
    # to measure it. 0: `Sampling` chooses.
    interval: int = 0

    @property
    def micro_gradients(self) -> int:
        """n: the number of gradients that a step is the mean of."""
        return self.world_size * self.accumulation


@dataclass(frozen=True, slots=True)
class StepWeights:
    """The weights of the micro-batches of a step, by which their losses are multiplied."""

    # their sum over all ranks, divided by the number of ranks. The sum over the backward passes of the
    # averaged gradients is divided by it, in place of the accumulation count.
    divisor: float
    positive: int  # how many are above 0, on all ranks
