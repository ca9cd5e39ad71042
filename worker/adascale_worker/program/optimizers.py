"""The optimizers of a program, with AdaScale around each, and its schedulers: one or several."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adascale_worker.adascale import AdaScale
from adascale_worker.program.patching import Scheduler
from adascale_worker.torch_private.modules import SCHEDULERS


class Optimizers:
    """The optimizers of a program by name, each with AdaScale around it; one alone has the name "".

    The first one leads: it makes a step for each batch, and exchanges the requests of the replicas.
    """

    def __init__(self, parts: Mapping[str, AdaScale]) -> None:
        self.parts = dict(parts)
        self.lead = next(iter(self.parts.values()))
        self.are_several = "" not in self.parts
        """Whether the program has passed a dict of optimizers."""

    # -- the gain of the job ------------------------------------------------------------------------------

    @property
    def slowest(self) -> AdaScale:
        """The optimizer with the lowest gain; the job uses its estimate.

        One that trains nothing now counts only if none trains anything.
        """
        parts = list(self.parts.values())
        if len(parts) == 1:
            return self.lead
        # At each scale above 1, the gain rises with the ratio of variance to squared gradient, so the
        # optimizer with the lowest gain at one such scale has it at all of them.
        trained = [part for part in parts if part.statistics.parameters.has_trained]
        return min(trained or parts, key=lambda part: part.predict_gain(2.0))

    # -- as one optimizer ---------------------------------------------------------------------------------

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
        found = [part.statistics.gradients_are_finite() for part in self.parts.values()]
        known = [finite for finite in found if finite is not None]
        return all(known) if known else None

    @property
    def awaits_comparison(self) -> bool:
        """Whether the state contains the gradient of the last step, which the next step no longer needs.

        Only with one replica and no accumulation. After the next step the state is smaller.
        """
        return any(part.statistics.awaits_comparison for part in self.parts.values())

    def discard_comparison(self) -> None:
        """Delete the gradients of the last step, because the next is not made by one replica alone."""
        for part in self.parts.values():
            part.statistics.discard_comparison()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the only optimizer, or of each by its name."""
        states = {name: part.state_dict() for name, part in self.parts.items()}
        return states if self.are_several else states[""]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        states: Mapping[str, Any] = state if self.are_several else {"": state}
        if set(states) != set(self.parts):
            raise ValueError(f"it has the optimizers {sorted(states)}, the program has {sorted(self.parts)}")
        for name, part in self.parts.items():
            part.load_state_dict(dict(states[name]))


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
