"""All that is used of Accelerate and not documented by it.

`Accelerator` keeps what it has prepared in lists, from which it saves, and unscales gradients. The prepared
objects of an elastic job are those of the program, which no public method adds to them.

Accelerate reads its rank and the number of processes once, when the process starts. Here they may change
between two steps. So its states begin as those of a process that runs alone, which wraps no model, and get
the present replicas when training has begun: its functions that communicate use torch's default process
group, which is that of the replicas.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.state import AcceleratorState, DistributedType, PartialState, is_initialized

from adascale_worker.errors import WorkerError


def add_optimizer(accelerator: Any, optimizer: Any) -> None:
    """Let `save_state` and `unscale_gradients` find an optimizer."""
    accelerator._optimizers.append(optimizer)


def add_scheduler(accelerator: Any, scheduler: Any) -> None:
    """Let `save_state` find a scheduler."""
    accelerator._schedulers.append(scheduler)


def checkpointed_objects(accelerator: Any) -> list[Any]:
    """Return the objects that were passed to `register_for_checkpointing`."""
    objects: list[Any] = accelerator._custom_objects
    return objects


def require_first() -> None:
    """Check that this process has made no `Accelerator` before."""
    if is_initialized():
        raise WorkerError(
            "an Accelerator was made before ElasticAccelerator in this process, and all of them share their "
            "state: make one ElasticAccelerator, in place of the first Accelerator"
        )


class AccelerateStates:
    """Sets the rank and the number of replicas in Accelerate's states."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._set: tuple[int, int] | None = None
        for state in self._states():
            state.device = device

    @staticmethod
    def _states() -> list[Any]:
        # AcceleratorState has copies of the values of PartialState.
        return [PartialState(), AcceleratorState()]

    def set(self, rank: int, replicas: int) -> None:
        """Set the rank, and the number of replicas; 1 before training has begun."""
        if self._set == (rank, replicas):
            return
        self._set = rank, replicas
        together = DistributedType.MULTI_GPU if self._device.type == "cuda" else DistributedType.MULTI_CPU
        for state in self._states():
            state.num_processes, state.process_index, state.local_process_index = replicas, rank, rank
            state.distributed_type = together if replicas > 1 else DistributedType.NO
            state.backend = torch.distributed.get_backend() if replicas > 1 else None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let Accelerate run as if alone, to write files on this replica without the others."""
        before, self._set = self._set, None
        self.set(0, 1)
        try:
            yield
        finally:
            self._set = None
            if before is not None:
                self.set(*before)
