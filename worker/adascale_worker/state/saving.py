"""Saves the state of a training program, if its weights are finite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from adascale_worker.errors import CheckpointError, NonFiniteWeightsError
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.program.optimizers import Optimizers
from adascale_worker.program.weight_checks import FiniteWeights, nonfinite_message
from adascale_worker.scaling.statistics.norms import local_shard
from adascale_worker.state.checkpoints.checkpointing import Checkpointing
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
