"""Several optimizers of one program, such as those of a GAN, as one for the parts of the trainer.

Each has its own AdaScale, with its own statistics and its own gain for its learning rate. A job has one
progress and one batch size, and they follow the lowest gain, that of the optimizer whose gradients have the
least noise. So no optimizer makes less progress than is counted. (A sum of the statistics, as over parameter
groups, would add numbers in different units: those of an SGD and of an Adam, for example.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from adascale_core.batch.gain import GradientEstimate
from adascale_worker.program.elastic_adascale import ElasticAdaScale
from adascale_worker.program.patching import Scheduler
from adascale_worker.torch_private.optim import SCHEDULERS


class OptimizerSet:
    """The optimizers of a program by name, each with AdaScale around it.

    The first one leads: it makes a step for each batch, and exchanges the requests of the replicas.
    """

    def __init__(self, parts: Mapping[str, ElasticAdaScale]) -> None:
        self.parts = dict(parts)
        self.lead = next(iter(self.parts.values()))

    # -- the gain of the job ------------------------------------------------------------------------------

    @property
    def slowest(self) -> ElasticAdaScale:
        """The optimizer with the lowest gain; the job uses its estimate.

        One that trains nothing now, because its parameters are frozen or its lr is 0, counts only if none
        trains anything.

        At each scale above 1, the gain rises with the ratio of variance to squared gradient, so the optimizer
        with the lowest gain at one such scale has it at all of them. Without an estimate, the gain is 1.
        """
        parts = list(self.parts.values())
        return min([p for p in parts if p.trains] or parts, key=lambda part: part.predict_gain(2.0))

    @property
    def estimate(self) -> GradientEstimate | None:
        """The estimate of the slowest optimizer; None if it has none yet."""
        return self.slowest.estimate

    @property
    def grad_sqr(self) -> float:
        """Estimated squared norm of the true gradient; 0 without an estimate."""
        return self.slowest.grad_sqr

    @property
    def grad_var(self) -> float:
        """Estimated total variance of a gradient at the initial batch size; 0 without an estimate."""
        return self.slowest.grad_var

    @property
    def grad_sqr_error(self) -> float:
        """Standard error of `grad_sqr`; 0 without an estimate."""
        return self.slowest.grad_sqr_error

    def gain(self) -> float:
        """Return how many steps at the initial batch size this step is worth."""
        return self.slowest.gain()

    @property
    def lr_factor(self) -> float:
        """The factor of the slowest optimizer's learning rates."""
        return self.slowest.lr_factor

    @property
    def lr(self) -> float:
        """The learning rate of the first parameter group of the slowest optimizer."""
        return self.slowest.lr

    # -- as one optimizer ---------------------------------------------------------------------------------

    @property
    def optimizer(self) -> OptimizerSet:
        """The parameter groups of the inner optimizers."""
        return self

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers."""
        return [group for part in self.parts.values() for group in part.param_groups]

    @property
    def state(self) -> dict[Any, Any]:
        """What the inner optimizers keep for each parameter."""
        return {parameter: state for part in self.parts.values() for parameter, state in part.state.items()}

    @property
    def flags(self) -> Sequence[float]:
        """What the replicas exchange with the statistics of the first optimizer."""
        return self.lead.flags

    @flags.setter
    def flags(self, flags: Sequence[float]) -> None:
        self.lead.flags = flags

    @property
    def flags_sum(self) -> tuple[float, ...] | None:
        """The sums over the replicas of `flags`, as `AdaScale.flags_sum`."""
        return self.lead.flags_sum

    @property
    def gradients_are_finite(self) -> bool | None:
        """Whether the gradients of the last steps were finite; None if none of these steps was measured."""
        known = [finite for part in self.parts.values() if (finite := part.gradients_are_finite) is not None]
        return all(known) if known else None

    @property
    def backward_passes(self) -> int:
        """Backward passes are not counted."""
        return 0

    @property
    def awaits_comparison(self) -> bool:
        """Whether the state contains a gradient that the next step no longer needs."""
        return any(part.awaits_comparison for part in self.parts.values())

    def discard_comparison(self) -> None:
        """Delete the gradients of the last step."""
        for part in self.parts.values():
            part.discard_comparison()

    def change_model(self, model: DistributedDataParallel | None) -> None:
        """The gradients are averaged without `DistributedDataParallel`, so there is nothing to change."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each optimizer by its name."""
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if set(state) != set(self.parts):
            raise ValueError(f"it has the optimizers {sorted(state)}, the program has {sorted(self.parts)}")
        for name, part in self.parts.items():
            part.load_state_dict(state[name])


class SchedulerSet:
    """Several schedulers of one program, as one for the parts of the trainer."""

    def __init__(self, schedulers: Mapping[str, Scheduler]) -> None:
        self._schedulers = dict(schedulers)

    @property
    def kind(self) -> str:
        """Names and types."""
        named = (f"{name}: {type(each).__name__}" for name, each in self._schedulers.items())
        return f"set of schedulers ({', '.join(named)})"

    @property
    def schedulers(self) -> list[Scheduler]:
        """The schedulers."""
        return list(self._schedulers.values())

    def state_dict(self) -> dict[str, Any]:
        """Return the states, in the form in which torch's schedulers have those of others."""
        return {SCHEDULERS: [scheduler.state_dict() for scheduler in self._schedulers.values()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for scheduler, saved in zip(self._schedulers.values(), state[SCHEDULERS], strict=True):
            scheduler.load_state_dict(saved)


Optimizers = ElasticAdaScale | OptimizerSet
"""The optimizer of a program, or its optimizers."""
