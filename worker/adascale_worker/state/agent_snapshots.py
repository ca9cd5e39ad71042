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
from adascale_worker.state.checkpoints.snapshot_memory import (
    KeptSnapshot,
    NoSnapshotMemoryError,
    SnapshotMemory,
)
from adascale_worker.state.training import TrainingState

SHARE = 0.02
"""The largest share of the time that copies may take."""
DELAY = 60.0
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
        """The memory that is missing, as it was reported."""

    def keep(self) -> float:
        """Copy the state between two steps, if this is the only replica and the last copy is long enough ago.

        The time until the next copy follows from the duration of this one, so that copies take at most
        `SHARE` of the time. The first one is made `DELAY` seconds after the first step, unless a process
        before this one has made one: by then the loading of data, and mostly an evaluation, have shown how
        much memory they need. No copy is made of weights that are not finite. A lack is reported, and the
        memory is released for `DELAY` seconds at least.
        """
        if self._memory is None or self._group.replicas > 1:
            return 0.0
        info, begun = self._state.info(), time.monotonic()
        if info.step == 0:
            return 0.0
        if self._next_at is None:
            self._next_at = begun if self._memory.is_taken else begun + DELAY
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
            pause = DELAY
        except Exception as error:  # noqa: BLE001 (training does not need the copy)
            self._memory.release()
            self._memory = None
            self._report(
                str(error) if isinstance(error, AdaScaleError) else f"{type(error).__name__}: {error}"
            )
        seconds = time.monotonic() - begun
        self._next_at = begun + max(seconds / SHARE, pause)
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
