"""Copies of the state in the memory of the agent, while no other replica has the state.

If this process is killed, the next one of the same agent continues from the newest copy.
"""

from __future__ import annotations

import time

import torch

from adascale_core.errors import AdaScaleError
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.program.weight_checks import FiniteWeights
from adascale_worker.state.checkpoints.checkpointing import Checkpointing, State
from adascale_worker.state.checkpoints.snapshot_memory import KeptSnapshot, SnapshotMemory
from adascale_worker.state.training import TrainingState

SHARE = 0.02
"""The largest share of the time that copies may take."""


class AgentSnapshots:
    """Keeps copies of the state of the only replica.

    Args:
        memory: of the agent. None without one.
        group: the replicas.
        state: of the program and its trainer.
        weights: checks that they are finite.
        checkpointing: has the result of training.
        device: of the model.
    """

    def __init__(
        self,
        memory: SnapshotMemory | None,
        group: ReplicaGroup,
        state: TrainingState,
        weights: FiniteWeights,
        checkpointing: Checkpointing,
        device: torch.device,
    ) -> None:
        self._memory = memory
        self._group = group
        self._state = state
        self._weights = weights
        self._checkpointing = checkpointing
        self._device = device
        self._next_at = float("-inf")

    def keep(self) -> None:
        """Copy the state between two steps, if this is the only replica and the last copy is long enough ago.

        The time until the next copy follows from the duration of this one, so that copies take at most
        `SHARE` of the time. No copy is made of weights that are not finite. Without enough memory, it is
        reported, and no copies are made any more.
        """
        if self._memory is None or self._group.replicas > 1 or time.monotonic() < self._next_at:
            return
        info = self._state.info()
        if info.step == 0:
            return
        if self._device.type == "cuda":
            # Otherwise the duration includes the rest of the step.
            torch.cuda.synchronize(self._device)
        begun = time.monotonic()
        try:
            if self._weights.are_finite():
                self._memory.save(self._state.state_dict(), info, self._checkpointing.result)
        except Exception as error:  # noqa: BLE001 (training does not need the copy)
            self._give_up(self._memory, error)
        ended = time.monotonic()
        self._next_at = ended + (ended - begun) * (1 / SHARE - 1)

    def _give_up(self, memory: SnapshotMemory, error: Exception) -> None:
        memory.release()
        self._memory = None
        reason = error if isinstance(error, AdaScaleError) else f"{type(error).__name__}: {error}"
        print(
            f"adascale: the agent keeps no copy of the state: {reason}. If this replica is lost while it is "
            "the only one, training continues from the last checkpoint",
            flush=True,
        )

    def begin_generation(self) -> None:
        """Release the memory if there are other replicas, which keep the state."""
        if self._memory is not None and self._group.replicas > 1:
            self._memory.release()

    def newest(self) -> KeptSnapshot | None:
        """Return the newest copy. None if there is none."""
        return self._memory.newest() if self._memory is not None else None

    def restore(self, snapshot: KeptSnapshot, state: State) -> AdaScaleError | None:
        """Restore a copy. If that fails, delete it and return the error.

        Args:
            snapshot: the copy.
            state: that it contains.
        """
        assert self._memory is not None
        self._memory.begin_restoring(snapshot)
        try:
            self._state.load_state_dict(state)
        except AdaScaleError as error:
            self._memory.release()
            return error
        self._memory.end_restoring(snapshot)
        return None
