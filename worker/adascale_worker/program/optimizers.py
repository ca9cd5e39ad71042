"""The optimizers of a program, with AdaScale around each, and its schedulers: one or several."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from adascale_core.batch.gain import require_scale
from adascale_worker.adascale import AdaScale
from adascale_worker.program.patching import Scheduler
from adascale_worker.scaling.statistics.gradient_statistics import GradientStatistics
from adascale_worker.scaling.supported_optimizers import require_count
from adascale_worker.torch_private.modules import SCHEDULERS


class ElasticAdaScale(AdaScale):
    """AdaScale in a loop whose replicas and batches change between two steps, and whose steps may fail."""

    # -- as a set of one optimizer ------------------------------------------------------------------------

    @property
    def lead(self) -> ElasticAdaScale:
        """The optimizer that makes a step for each batch, and exchanges the requests of the replicas."""
        return self

    @property
    def slowest(self) -> ElasticAdaScale:
        """The optimizer with the lowest gain; the job uses its estimate."""
        return self

    # -- results ------------------------------------------------------------------------------------------

    @property
    def trains(self) -> bool:
        """Whether a group has a parameter that is not frozen, and its lr is not 0."""
        return self._estimator.statistics.parameters.has_trained

    @property
    def lr_factor(self) -> float:
        """The factor of the learning rates at `gain()`; groups with other gains have other factors."""
        group = {**self.param_groups[0], "lr": 1.0}
        return float(self._rule.hyperparameters_at(group, self.gain()).get("lr", 1.0))

    @property
    def lr(self) -> float:
        """The learning rate at `gain()` of the first parameter group. Waits for the device of a tensor."""
        return float(self.param_groups[0]["lr"]) * self.lr_factor

    @property
    def gradients_are_finite(self) -> bool | None:
        """Whether the gradients of the last step were finite after its backward passes, on all ranks.

        None if the last step was not measured.
        """
        return self._estimator.gradients_are_finite()

    # -- the requests of the replicas ---------------------------------------------------------------------

    @property
    def flags(self) -> Sequence[float]:
        """Local numbers to be summed over ranks in the same all-reduce; of the same length on all ranks.

        Read when the last backward pass of a measured step ends. Flags that are set between that time and
        `step()` are exchanged in the next measured step.
        """
        return self._estimator.statistics.flags

    @flags.setter
    def flags(self, flags: Sequence[float]) -> None:
        self._estimator.statistics.flags = flags

    @property
    def flags_sum(self) -> tuple[float, ...] | None:
        """Sums over ranks of `flags`, as they were when the last step's all-reduce began.

        The same on all ranks on the same step. None if the last step had no all-reduce, or no flags in it.
        With one replica, the local flags.
        """
        return self._estimator.flag_sums()

    # -- replicas, model and parameters -------------------------------------------------------------------

    def update_scale(self, scale: float, replicas: int) -> None:
        """Set the batch size, as a multiple of the initial batch size, and the number of replicas."""
        require_count("replicas", replicas)
        require_scale(scale)
        self._estimator.change_settings(scale=float(scale), world_size=replicas)

    def use_step(self, *, micro_batches: int, interval: int, compares_steps: bool) -> None:
        """Set how the next step is made and measured, before its first backward pass.

        Its measurement stands for `interval` steps; 0 if the sampling decides whether it is measured.
        """
        options = self._estimator.options
        settings = replace(options.settings, accumulation=micro_batches, interval=interval)
        sampling = replace(options.sampling, compares_steps=compares_steps)
        if (settings, sampling) != (options.settings, options.sampling):
            self._estimator.change_options(replace(options, settings=settings, sampling=sampling))

    def restart_statistics(self, parameters: Iterable[Tensor]) -> None:
        """Estimate the gradients of the groups of `parameters` from the beginning, as they were (un)frozen.

        The present step is left out of the estimates, since it may have begun.
        """
        changed = set(parameters)
        groups = [number for number, group in enumerate(self.param_groups) if changed & set(group["params"])]
        if groups:
            self._estimator.restart_groups(groups)

    # -- a step -------------------------------------------------------------------------------------------

    @property
    def statistics(self) -> GradientStatistics:
        """The statistics of a step, to which the training loop passes its gradients."""
        return self._estimator.statistics

    @property
    def awaits_comparison(self) -> bool:
        """Whether the state contains the gradient of the last step, which the next step no longer needs.

        Only with one replica and no accumulation. After the next step the state is smaller.
        """
        return self.statistics.awaits_comparison

    def discard_comparison(self) -> None:
        """Delete the gradient of the last step, because the next step is not made by one replica alone."""
        self.statistics.discard_comparison()


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

        One that trains nothing now counts only if none trains anything.
        """
        # At each scale above 1, the gain rises with the ratio of variance to squared gradient, so the
        # optimizer with the lowest gain at one such scale has it at all of them.
        parts = list(self.parts.values())
        return min([p for p in parts if p.trains] or parts, key=lambda part: part.predict_gain(2.0))

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
    def gradients_are_finite(self) -> bool | None:
        """Whether the gradients of the last steps were finite; None if none of these steps was measured."""
        known = [finite for part in self.parts.values() if (finite := part.gradients_are_finite) is not None]
        return all(known) if known else None

    @property
    def awaits_comparison(self) -> bool:
        """Whether the state contains a gradient that the next step no longer needs."""
        return any(part.awaits_comparison for part in self.parts.values())

    def discard_comparison(self) -> None:
        """Delete the gradients of the last step."""
        for part in self.parts.values():
            part.discard_comparison()

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
    """Several schedulers of a program, with the interface of one."""

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
