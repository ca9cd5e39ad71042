"""What the program brought along, and is to be found again as it was: model, optimizer, scheduler, more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.optim.lr_scheduler import LRScheduler

from adascale_worker.adascale import AdaScale
from adascale_worker.errors import CheckpointError
from adascale_worker.patching import scheduler_state


class Stateful(Protocol):
    """Something whose state is saved with the job's."""

    def state_dict(self) -> Mapping[str, Any]:
        """Its state, in tensors, numbers, texts, lists and dicts."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> object:
        """Take up a saved state."""


@dataclass(frozen=True)
class Program:
    """The parts of a training program that have a state.

    Args:
        model: the model, under its own parameters' names.
        optimizer: AdaScale around the program's optimizer.
        scheduler: of the learning rate, if there is one.
        registered: whatever else the program wants saved, by name.
    """

    model: torch.nn.Module
    optimizer: AdaScale
    scheduler: LRScheduler | None
    registered: Mapping[str, Stateful]

    def state_dict(self) -> dict[str, Any]:
        """The state of all parts."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": scheduler_state(self.scheduler) if self.scheduler is not None else None,
            "registered": {name: dict(one.state_dict()) for name, one in self.registered.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a saved state, except the model's, which is loaded before it becomes data-parallel.

        Raises:
            CheckpointError: it was saved by a program with other parts.
        """
        if (self.scheduler is None) != (state["scheduler"] is None):
            had, has = ("no scheduler", "one") if self.scheduler is not None else ("a scheduler", "none")
            raise CheckpointError(
                f"the checkpoint was saved with {had}, program_reentry was given {has}: give it the same"
            )
        if set(self.registered) != set(state["registered"]):
            raise CheckpointError(
                f"the checkpoint has {sorted(state['registered']) or 'nothing'} registered, the program "
                f"registers {sorted(self.registered) or 'nothing'}: register the same"
            )
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        for name, one in self.registered.items():
            one.load_state_dict(state["registered"][name])


def load_model(model: torch.nn.Module, saved: dict[str, Any]) -> None:
    """Load a model's state.

    Raises:
        CheckpointError: it is of another model; the message names the differences.
    """
    own = model.state_dict()
    differences = [f"{name} is missing" for name in own if name not in saved]
    differences += [f"{name} is not in the model" for name in saved if name not in own]
    differences += [
        f"{name} has shape {tuple(saved[name].shape)}, the model's has {tuple(value.shape)}"
        for name, value in own.items()
        if name in saved and isinstance(value, torch.Tensor) and value.shape != saved[name].shape
    ]
    if differences:
        more = f"; and {len(differences) - 5} more" if len(differences) > 5 else ""
        raise CheckpointError(
            f"the checkpoint is of another model: {'; '.join(differences[:5])}{more}. "
            "Train the model that it was saved from, or give another checkpoint folder"
        )
    model.load_state_dict(saved)
