"""Gives all members of a generation the same state, from the memory of the members that have it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from adascale_worker.membership.links import PeersLostError
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.state import transfer
from adascale_worker.state.checkpoints.checkpointing import Checkpointing
from adascale_worker.state.program import ProgramState
from adascale_worker.state.receive_memory import InitialWeights, ReceiveMemory, expected_sizes
from adascale_worker.state.training import TrainingState, model_tensor_numbers
from adascale_worker.state.tree import layouts, on_host


class StateExchange:
    """Copies a state between the members of a generation."""

    def __init__(
        self,
        group: ReplicaGroup,
        program: ProgramState,
        state: TrainingState,
        checkpointing: Checkpointing,
    ) -> None:
        self._group = group
        self._checkpointing = checkpointing
        self._program = program
        self._state = state
        self._memory = ReceiveMemory()
        self._initial_weights: InitialWeights | None = None
        """Of a replica that joins others, until it has a state."""

    def prepare(self) -> None:
        """Prepare memory on the host for the state of the other members, before they wait."""
        model = self._program.model
        self._initial_weights = InitialWeights(model)
        self._memory = ReceiveMemory(
            expected_sizes(model, self._program.optimizer, self._initial_weights.names)
        )

    def release_memory(self) -> None:
        """Release the memory that was prepared and not used."""
        self._memory.clear()

    def keep_initial_weights(self) -> None:
        """Train with the weights that the model was made with, because there is no state."""
        if self._initial_weights is not None:
            self._initial_weights.put_back()

    def end(self) -> None:
        """Release what was prepared: all members have the same state."""
        self.release_memory()
        self._initial_weights = None

    def copy(self, sources: Sequence[int], nodes: Sequence[str]) -> bool:
        """Copy the state of the ranks `sources`, which is the same, to all others. A collective call."""
        group = self._group
        receivers = [rank for rank in range(group.replicas) if rank not in sources]
        route = transfer.routes(sources, receivers, nodes).get(group.rank)
        if route is None:
            return False
        device = group.transfer_device
        state, failed = None, False
        try:
            if route.source is None:
                assert route.target is not None
                self._program.optimizer.discard_comparison()
                transfer.send(group, route.target, self._state.state_dict(), device=device)
            else:
                if device.type == "cpu":
                    # A former rank 0 has a copy for checkpoints, and a pod's memory has room for two states.
                    self._checkpointing.release_memory()
                state = transfer.receive(
                    group, route, device=device, memory=self._memory, places=self._places_for
                )
        except PeersLostError:
            failed = True
        # All processes of a replica use what they have received, or none.
        group.settle(failed=failed)
        if state is None:
            return False
        if device.type != "cpu":
            # As from a checkpoint: the program's objects may keep the tensors that they get.
            state["program"]["registered"] = on_host(state["program"]["registered"])
        self._state.load_state_dict(state)
        self._initial_weights = None
        return True

    def _places_for(self, spec: bytes) -> dict[int, torch.Tensor]:
        """Return the tensors that a state is received into, by their numbers in its structure."""
        if self._initial_weights is None:
            return {}
        return self._initial_weights.places(model_tensor_numbers(spec), layouts(spec))
