"""The contents of a checkpoint: all that a trainer needs to continue bit for bit.

If the model is sharded over the processes of a replica, each process has the state with its own shards in
place of whole tensors. It is exchanged with the same process of the other replicas, and is that process's
part of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from adascale_worker.errors import UnusableCheckpointError
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.state.program import ProgramState, load_model
from adascale_worker.state.shards import KEY, Division, Shards
from adascale_worker.state.store import CheckpointInfo
from adascale_worker.state.tree import Tree


class TrainerPart(Protocol):
    """A part of the trainer that has a state."""

    def state_dict(self) -> Any:
        """Return the state, as tensors, numbers, strings, lists and dicts."""

    def load_state_dict(self, state: Any) -> None:
        """Restore a saved state."""


class TrainingState:
    """The state of a training program and of its trainer."""

    def __init__(
        self,
        group: ReplicaGroup,
        program: ProgramState,
        trainer: Mapping[str, TrainerPart],
        info: Callable[[], CheckpointInfo],
    ) -> None:
        self._group = group
        self.program = program
        self._trainer = trainer
        self.info = info
        self.replaced: Mapping[str, Any] = {}
        """Parts that are saved in place of those in memory, such as from before an unfinished step."""

    def state_dict(self) -> Tree:
        """Return the state, with the shards of this process in place of whole tensors.

        Its tensors are the program's own, not copies.
        """
        state = {
            "program": self.program.state_dict(),
            # Not with the program, whose state is copied in each step of several optimizers.
            "parameters": self.program.parameter_names(),
            "trained": self.program.trained.state_dict(),
            **{name: part.state_dict() for name, part in self._trainer.items()},
            **self.replaced,
        }
        return _converted(state, lambda tensor, _: _local(tensor)) if self._group.has_mesh else state

    @property
    def shards(self) -> Shards | None:
        """The part of the state that this process has; None if it has the whole state."""
        if not self._group.has_mesh:
            return None
        own = self._group.own
        found = {key: _division(tensor) for key, tensor in self._distributed_tensors().items()}
        divided = {key: division for key, division in found.items() if division is not None}
        return Shards(
            own.rank,
            own.count,
            {key: each for key, each in divided.items() if isinstance(key, str)},
            {key: each for key, each in divided.items() if isinstance(key, int)},
        )

    def for_checkpoint(self) -> Tree:
        """Return the state, or the part of it that this process has with its description, as it is saved."""
        shards = self.shards
        if shards is None or shards.count == 1:
            return self.state_dict()
        return {**self.state_dict(), KEY: shards.to_state()}

    def load_state_dict(self, state: Tree) -> None:
        """Restore a saved state. Tensors that `Checkpointing.load` has returned whole are divided.

        The batch plan is the saved one; `BatchPlanner.adapt` makes it valid for the present replicas.
        """
        if self._group.has_mesh:
            state = self._distributed(state)
        parts = (*self._trainer, "program", "parameters", "trained")
        if missing := [name for name in parts if name not in state]:
            raise UnusableCheckpointError(
                f"the saved state lacks {', '.join(missing)}: another version of adascale-operator has saved "
                "it. Continue with that version, or with an empty checkpoint folder"
            )
        for name, part in self._trainer.items():
            part.load_state_dict(state[name])
        load_model(self.program.model, state["program"]["model"])
        self.program.load_state_dict(state["program"])
        self.program.require_parameters(state["parameters"])
        self.program.load_trained(state["trained"])

    def _distributed(self, state: Tree) -> Tree:
        """Return a state with the DTensors of this process in place of their shards."""
        own = self._group.own
        templates = self._distributed_tensors()

        def distributed(tensor: Tensor, key: object) -> Tensor:
            template = templates.get(key)
            if template is None or tensor.dim() == 0:
                return tensor
            division, shape = _division(template), tuple(template.shape)
            if division is not None:
                start, stop = division.extent(own.rank, own.count)
                if tuple(tensor.shape) == shape:
                    tensor = tensor.narrow(division.dimension, start, stop - start).contiguous()
                shape = division.part_shape((start, stop))
            is_own = tuple(tensor.shape) == shape
            return _with_local(template, tensor.to(self._group.device)) if is_own else tensor

        return _converted(state, distributed)

    def _distributed_tensors(self) -> dict[object, Any]:
        """Return the DTensors of the state of the model by name, and those of the optimizer by number."""
        parameters = [p for group in self.program.optimizer.param_groups for p in group["params"]]
        found = (*self.program.model.state_dict().items(), *enumerate(parameters))
        return {key: each for key, each in found if hasattr(each, "device_mesh")}


def _division(tensor: Any) -> Division | None:
    """Return how a DTensor is divided; None if a module has gathered it, so that all processes have it."""
    placement = tensor.placements[0]
    return None if placement.is_replicate() else Division(int(placement.dim), tuple(tensor.shape))


def _with_local(template: Any, local: Tensor) -> Tensor:
    """Return a DTensor like another one, with another tensor on this process, whose memory it uses."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local,
        template.device_mesh,
        template.placements,
        run_check=False,
        shape=torch.Size(template.shape),
        stride=template.stride(),
    )


def _converted(state: Tree, convert: Callable[[Tensor, object], Tensor]) -> Tree:
    """Return a state in which the tensors of the model and of the optimizer are converted."""
    program = dict(state["program"])
    optimizer = dict(program["optimizer"])
    model = type(program["model"])()
    for name, value in program["model"].items():
        model[name] = convert(value, name) if isinstance(value, Tensor) else value
    vars(model).update(vars(program["model"]) if hasattr(program["model"], "__dict__") else {})
    optimizer["state"] = {
        number: {
            key: convert(value, number) if isinstance(value, Tensor) else value for key, value in kept.items()
        }
        for number, kept in optimizer["state"].items()
    }
    program["model"], program["optimizer"] = model, optimizer
    return {**state, "program": program}


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local().contiguous() if hasattr(tensor, "to_local") else tensor
    return local.detach()
