"""What the program brought along, and is to be found again as it was: model, optimizer, scheduler, more."""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.optim.lr_scheduler import LRScheduler

from adascale_worker.adascale import AdaScale
from adascale_worker.errors import CheckpointError, WorkerError


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
            "scheduler": self.scheduler.state_dict() if self.scheduler is not None else None,
            "scheduler_type": self._scheduler_type,
            "registered": {name: dict(one.state_dict()) for name, one in self.registered.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a saved state, except the model's, which is loaded before it becomes data-parallel.

        Raises:
            CheckpointError: it was saved by a program with other parts.
        """
        had, has = state["scheduler_type"], self._scheduler_type
        if had != has:
            raise CheckpointError(
                f"the checkpoint was saved with {_a(had)}, program_reentry was given {_a(has)}: "
                "give it the same, or give another checkpoint folder"
            )
        if set(self.registered) != set(state["registered"]):
            raise CheckpointError(
                f"the checkpoint has {sorted(state['registered']) or 'nothing'} registered, the program "
                f"registers {sorted(self.registered) or 'nothing'}: register the same"
            )
        try:
            self.optimizer.load_state_dict(state["optimizer"])
        except ValueError as error:
            raise CheckpointError(
                f"the checkpoint is of another optimizer: {error}. Make the one that it was saved from, or "
                "give another checkpoint folder"
            ) from error
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        for name, one in self.registered.items():
            one.load_state_dict(state["registered"][name])

    def require_loadable(self) -> None:
        """Find out now what could be saved well enough, and not be loaded when it is needed.

        Raises:
            WorkerError: a part's state has something in it that is not loaded without trust in its origin.
        """
        model = self.model.state_dict()
        parts = {
            "the model": {name: one for name, one in model.items() if not isinstance(one, torch.Tensor)},
            "the scheduler": self.scheduler.state_dict() if self.scheduler is not None else None,
            **{f"registered {name!r}": dict(one.state_dict()) for name, one in self.registered.items()},
        }
        for name, state in parts.items():
            try:
                file = io.BytesIO()
                torch.save(state, file)
                file.seek(0)
                torch.load(file, map_location="cpu", weights_only=True)
            except (pickle.PickleError, AttributeError, TypeError) as error:
                found = re.search(r"GLOBAL (\S+)", str(error))
                raise WorkerError(
                    f"the state_dict of {name} holds {found[1] if found else error}, which a checkpoint "
                    "cannot give back: let it hold tensors, numbers, texts, lists and dicts only"
                ) from error

    @property
    def _scheduler_type(self) -> str | None:
        return type(self.scheduler).__name__ if self.scheduler is not None else None


def _a(scheduler_type: str | None) -> str:
    return "no scheduler" if scheduler_type is None else f"a {scheduler_type}"


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
