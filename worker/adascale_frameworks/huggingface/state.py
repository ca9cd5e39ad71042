"""The state of the framework's trainer, which a replica that joins or resumes gets, with its losses."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

import torch
from torch import Tensor
from transformers.trainer_callback import ExportableState, TrainerCallback, TrainerState


class LossSums:
    """The mean loss of the steps since the last log and since the beginning, weighted as the gradient is.

    This replica adds up its part of it on its device. The parts of all replicas are added when the framework
    logs, evaluates or saves.
    """

    def __init__(self) -> None:
        self._micro_batches: Tensor | float = 0.0
        """Of the present step: the sum of the losses times their weights."""
        self._weight = 0.0
        """Of these micro-batches."""
        self._steps: Tensor | float = 0.0
        """The sum of the losses of the steps that are not exchanged yet, the part of this replica."""
        self._parts = 0.0
        """The sum of the parts of these steps that this replica has made."""
        self._sums = {name: {"loss": 0.0, "steps": 0.0} for name in ("interval", "total")}
        """Since the last log, and since the beginning: what all replicas have taken."""

    def begin_step(self) -> None:
        """Delete the losses of a step that was not completed."""
        self._micro_batches, self._weight = 0.0, 0.0

    def add(self, loss: Tensor, weight: float) -> None:
        """Add the mean loss of a micro-batch of this replica. Does not wait for the device."""
        if weight:
            self._micro_batches = loss.detach().double().mean() * weight + self._micro_batches
            self._weight += weight

    def finish_step(self, weight: float, *, only_finite: bool) -> None:
        """Add the loss of a step whose micro-batches on all replicas have the sum of weights `weight`.

        A loss that is not finite counts as zero if `only_finite`. Does not wait for the device.
        """
        if weight:
            loss = torch.as_tensor(self._micro_batches) / weight
            if only_finite:
                loss = torch.where(torch.isfinite(loss), loss, torch.zeros_like(loss))
            self._steps = loss + self._steps
            self._parts += self._weight / weight
        self.begin_step()

    def take(self) -> dict[str, float]:
        """Return what this replica has added since the last call. Waits for the device."""
        taken = {"loss": float(self._steps), "steps": self._parts}
        self._steps, self._parts = 0.0, 0.0
        return taken

    def add_sums(self, loss: float, steps: float) -> None:
        """Add the sums over the replicas of what each has taken."""
        for sums in self._sums.values():
            sums["loss"] += loss
            sums["steps"] += steps

    def take_interval(self) -> float:
        """Return the mean loss of the steps since the last call."""
        mean = self._mean("interval")
        self._sums["interval"] = {"loss": 0.0, "steps": 0.0}
        return mean

    @property
    def total_mean(self) -> float:
        """The mean loss of all steps."""
        return self._mean("total")

    def _mean(self, name: str) -> float:
        sums = self._sums[name]
        return sums["loss"] / sums["steps"] if sums["steps"] else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return what all replicas have taken."""
        return {name: dict(sums) for name, sums in self._sums.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what all replicas have taken."""
        self._sums = {name: dict(sums) for name, sums in state.items()}


_OF_THIS_REPLICA = frozenset({"is_local_process_zero", "is_world_process_zero", "stateful_callbacks"})
"""Attributes of `TrainerState` that are not restored."""


class FrameworkState:
    """Saves and restores the state of a `Trainer` and its callbacks, with `program_reentry`.

    Callbacks have state if they are an `ExportableState`, as early stopping is, or have `state_dict` and
    `load_state_dict`.
    """

    def __init__(self, trainer: Any, losses: LossSums) -> None:
        self._trainer = trainer
        self._losses = losses

    def state_dict(self) -> dict[str, Any]:
        """Return the state, without what belongs to this replica."""
        trainer_state = asdict(self._trainer.state)
        return {
            "trainer": {name: value for name, value in trainer_state.items() if name not in _OF_THIS_REPLICA},
            "last_logged": self._trainer._globalstep_last_logged,
            "losses": self._losses.state_dict(),
            "callbacks": [[type(each).__name__, _state_of(each)] for each in self._stateful()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state."""
        callbacks = self._stateful()
        names = [type(each).__name__ for each in callbacks]
        saved = [name for name, _ in state["callbacks"]]
        if names != saved:
            raise ValueError(
                f"the callbacks with state are {', '.join(names) or 'none'}, and were "
                f"{', '.join(saved) or 'none'}"
            )
        known = {field.name for field in fields(TrainerState)}
        for name, value in state["trainer"].items():
            if name in known:
                setattr(self._trainer.state, name, value)
        self._trainer._globalstep_last_logged = state["last_logged"]
        self._losses.load_state_dict(state["losses"])
        for callback, (_, callback_state) in zip(callbacks, state["callbacks"], strict=True):
            _restore(callback, callback_state)

    def _stateful(self) -> list[TrainerCallback]:
        return [
            each
            for each in self._trainer.callback_handler.callbacks
            if isinstance(each, ExportableState) or _has_state_dict(each)
        ]


def _has_state_dict(callback: object) -> bool:
    return hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict")


def _state_of(callback: Any) -> dict[str, Any]:
    if _has_state_dict(callback):
        return dict(callback.state_dict())
    return dict(callback.state()["attributes"])


def _restore(callback: Any, state: dict[str, Any]) -> None:
    if _has_state_dict(callback):
        callback.load_state_dict(state)
        return
    for name, value in state.items():
        setattr(callback, name, value)
