"""The contents of a checkpoint: all that a trainer needs to continue bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from adascale_worker.state.checkpoints.store import CheckpointInfo
from adascale_worker.state.program import ProgramState, load_model
from adascale_worker.state.shards import Shards
from adascale_worker.state.tree import tensor_numbers


class TrainerPart(Protocol):
    """A part of the trainer that has a state."""

    def state_dict(self) -> Any:
        """Return the state, as tensors, numbers, strings, lists and dicts."""

    def load_state_dict(self, state: Any) -> None:
        """Restore a saved state."""


_ADDED_PARTS = frozenset({"division", "run"})
"""Parts that release 0.1.0 has not saved. If its state has another form, what follows says so."""


class TrainingState:
    """The state of a training program and of its trainer."""

    def __init__(
        self, program: ProgramState, trainer: Mapping[str, TrainerPart], info: Callable[[], CheckpointInfo]
    ) -> None:
        self._program = program
        self._trainer = trainer
        self.info = info
        self.replaced: Mapping[str, Any] = {}
        """Parts that are saved in place of those in memory, such as from before an unfinished step."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state. Its tensors are the program's own, not copies."""
        return {
            "program": self._program.state_dict(),
            # Not with the program, whose state is copied in each step of several optimizers.
            "parameters": self._program.parameter_names(),
            "trained": self._program.trained.state_dict(),
            **{name: part.state_dict() for name, part in self._trainer.items()},
            **self.replaced,
        }

    @property
    def shards(self) -> Shards | None:
        """The part of the state that this process has; None if it has the whole state."""
        return None

    def for_checkpoint(self) -> dict[str, Any]:
        """Return the state, or the part of it that this process has, as it is saved."""
        return self.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state.

        The batch plan is the saved one; `BatchPlanner.adapt` makes it valid for the present replicas.
        """
        for name, part in self._trainer.items():
            if name in state or name not in _ADDED_PARTS:
                part.load_state_dict(state[name])
        load_model(self._program.model, state["program"]["model"])
        self._program.load_state_dict(state["program"])
        # Earlier versions have not saved them.
        self._program.require_parameters(state.get("parameters", []))
        self._program.load_trained(state.get("trained"))


def model_tensor_numbers(spec: bytes) -> dict[str, int]:
    """Return the numbers of the tensors of the model in a flattened state, by their names."""
    return tensor_numbers(spec, ["program", "model"])
