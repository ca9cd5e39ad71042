"""Saves the state of training, if its weights are finite: in checkpoints, and in the agent's memory.

While no other replica has the state, the agent keeps copies of it. If this process is killed, the next one of
the same agent continues from the newest copy.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from adascale_core.errors import AdaScaleError
from adascale_worker.errors import CheckpointError, NonFiniteWeightsError
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.program.optimizers import Optimizers
from adascale_worker.program.weight_checks import FiniteWeights, nonfinite_message
from adascale_worker.scaling.statistics.norms import local_shard
from adascale_worker.state.checkpoints.checkpointing import Checkpointing, State
from adascale_worker.state.checkpoints.snapshot_memory import (
    KeptSnapshot,
    NoSnapshotMemoryError,
    SnapshotMemory,
)
from adascale_worker.state.training import TrainingState


class StateSaving:
    """Saves checkpoints of a state."""

    def __init__(
        self,
        state: TrainingState,
        optimizer: Optimizers,
        weights: FiniteWeights,
        checkpointing: Checkpointing,
        group: ReplicaGroup,
    ) -> None:
        self._state = state
        self._optimizer = optimizer
        self._weights = weights
        self._checkpointing = checkpointing
        self._group = group

    def save(self, *, final: bool = False, durable: bool = False, alone: bool = False) -> None:
        """Save a checkpoint; if `final` or `durable`, before this returns. A collective call.

        If `alone`, the other members may save too, and a checkpoint of a later step is as good.
        """
        checkpointing = self._checkpointing
        if final or (durable and checkpointing.enabled):
            self.require_finite_weights()
        checkpointing.save(
            self._state.info(),
            self._state.for_checkpoint,
            final=final,
            durable=durable,
            only_if_latest=alone,
            weights=self._weights.weights(),
            changed_by_step=_tensors_of(self._optimizer.state),
        )

    def save_if_possible(self, *, alone: bool = False) -> bool:
        """Save a checkpoint before this returns, or print why not; return whether it is saved."""
        try:
            self.save(durable=True, alone=alone)
        except (NonFiniteWeightsError, CheckpointError) as error:
            if self._group.is_main:
                print(f"adascale: {error}", flush=True)
            return False
        return True

    def save_alone(self) -> bool:
        """Save the state without the other replicas, and return whether it is saved."""
        self._group.be_alone()
        return self.save_if_possible(alone=True)

    def save_on_rank_0(self) -> None:
        """Save the state before this returns, without a collective call of the replicas."""
        self._checkpointing.save_on_rank_0(self._state.info(), self._state.for_checkpoint)

    def require_finite_weights(self) -> None:
        """Check the weights."""
        if not self._weights.are_finite():
            self._checkpointing.postpone()
            raise NonFiniteWeightsError(nonfinite_message(self._state.info().step))


def _tensors_of(state: Mapping[Any, Any]) -> list[torch.Tensor]:
    """Return the tensors that an optimizer keeps for its parameters."""
    return [
        local_shard(value)
        for kept in state.values()
        if isinstance(kept, Mapping)
        for value in kept.values()
        if isinstance(value, torch.Tensor)
    ]


SNAPSHOT_SHARE = 0.02
"""The largest share of the time that copies may take."""
SNAPSHOT_DELAY = 60.0
"""Seconds until memory is taken after the first step, and until it is tried again after a lack of memory."""


class AgentSnapshots:
    """Keeps copies of the state of the only replica."""

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
        self._next_at: float | None = None
        self._lack = ""
        """Why no copies are made, as it was reported."""

    def keep(self) -> float:
        """Copy the state between two steps, if this is the only replica and the last copy is long enough ago.

        Copies take at most `SNAPSHOT_SHARE` of the time. Returns how many seconds this one took.
        """
        if self._memory is None or self._group.replicas > 1:
            return 0.0
        info, begun = self._state.info(), time.monotonic()
        if info.step == 0:
            return 0.0
        if self._next_at is None:
            # By then the loading of data, and mostly an evaluation, have shown how much memory they need.
            self._next_at = begun if self._memory.is_taken else begun + SNAPSHOT_DELAY
        if begun < self._next_at:
            return 0.0
        if self._device.type == "cuda":
            # Otherwise the duration includes the rest of the step.
            torch.cuda.synchronize(self._device)
            begun = time.monotonic()
        pause = 0.0
        try:
            if self._weights.are_finite():
                self._memory.save(self._state.state_dict(), info, self._checkpointing.result)
                self._report("")
        except NoSnapshotMemoryError as error:
            self._memory.release()
            self._report(str(error))
            pause = SNAPSHOT_DELAY
        except Exception as error:  # noqa: BLE001 (training does not need the copy)
            self._memory.release()
            self._memory = None
            self._report(
                str(error) if isinstance(error, AdaScaleError) else f"{type(error).__name__}: {error}"
            )
        seconds = time.monotonic() - begun
        self._next_at = begun + max(seconds / SNAPSHOT_SHARE, pause)
        return seconds

    def _report(self, lack: str) -> None:
        """Report why no copies are made, once; and once that they are made again."""
        if lack and not self._lack:
            print(
                f"adascale: the agent keeps no copy of the state: {lack}. If this replica is lost while it "
                "is the only one, training continues from the last checkpoint",
                flush=True,
            )
        if self._lack and not lack:
            print("adascale: the agent keeps copies of the state now", flush=True)
        self._lack = lack

    def begin_generation(self) -> None:
        """Release the memory if there are other replicas, which keep the state."""
        if self._memory is not None and self._group.replicas > 1:
            self._memory.release()

    def newest(self) -> KeptSnapshot | None:
        """Return the newest copy. None if there is none."""
        return self._memory.newest() if self._memory is not None else None

    def restore(self, snapshot: KeptSnapshot, state: State) -> AdaScaleError | None:
        """Restore a copy. If that fails, delete it and return the error."""
        assert self._memory is not None
        self._memory.begin_restoring(snapshot)
        try:
            self._state.load_state_dict(state)
        except AdaScaleError as error:
            self._memory.release()
            return error
        self._memory.end_restoring(snapshot)
        return None
