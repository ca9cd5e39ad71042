"""How a step is made of backward passes and replicas."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepSettings:
    """How a step is made.

    Attributes:
        world_size: number of replicas.
        accumulation: number of backward passes.
        scale: S of the whole step.
        is_scaled_loss: whether each loss is divided by `accumulation`.
    """

    world_size: int
    accumulation: int
    scale: float
    is_scaled_loss: bool

    @property
    def micro_gradients(self) -> int:
        """n: the number of gradients that a step is the mean of."""
        return self.world_size * self.accumulation
