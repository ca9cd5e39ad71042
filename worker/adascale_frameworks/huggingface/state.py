"""The state of the framework's trainer that a replica needs which joins, or resumes training."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any, Protocol

from transformers.trainer_callback import ExportableState, TrainerCallback, TrainerState

from adascale_frameworks.huggingface.losses import LossSums

_OF_THIS_REPLICA = frozenset({"is_local_process_zero", "is_world_process_zero", "stateful_callbacks"})
"""Attributes of `TrainerState` that are not restored."""


class FrameworkTrainer(Protocol):
    """The parts of a `Trainer` that have state."""

    state: TrainerState
    callback_handler: Any
    _globalstep_last_logged: int


class FrameworkState:
    """Saves and restores the state of a `Trainer` and its callbacks, with `program_reentry`.

    Callbacks have state if they are an `ExportableState`, as early stopping is, or have `state_dict` and
    `load_state_dict`.
    """

    def __init__(self, trainer: FrameworkTrainer, losses: LossSums) -> None:
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
