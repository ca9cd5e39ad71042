"""The state of training in the memory of this process, and how it is saved without the other replicas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from adascale_worker.membership.links import StateNumber
from adascale_worker.reporting.progress import TrainingProgress
from adascale_worker.state.checkpoints.checkpointing import Checkpointing
from adascale_worker.state.saving import StateSaving
from adascale_worker.state.training import TrainingState


class Undo(Protocol):
    """Puts back what an unfinished step has changed."""

    @property
    def state(self) -> Mapping[str, Any] | None:
        """The parts of the state from before the step, which it may have changed; None if it has not."""

    def restore(self) -> None:
        """Put it back."""


@dataclass(eq=False)
class HeldState:
    """The state of training that this member has. See `membership.generations.MemberState`."""

    progress: TrainingProgress
    state: TrainingState
    saving: StateSaving
    undo: Undo
    checkpointing: Checkpointing
    # the generation in which the state was last equal on all members. None without a state.
    generation: int | None = field(default=None, init=False)
    # whether training has continued from a checkpoint, or from the state of other members
    was_restored: bool = field(default=False, init=False)

    @property
    def number(self) -> StateNumber | None:
        """The number of the state, as it is after an unfinished step is put back; None without a state."""
        if self.generation is None:
            return None
        if self.undo.state is None:
            return self.generation, self.progress.step, self.progress.consumed
        before = self.undo.state["progress"]
        return self.generation, before["step"], before["consumed"]

    def save_before_leaving(self) -> None:
        """Save the state of a trainer that waits for a generation, and leaves."""
        if self.generation is not None:
            self.saving.save_alone()

    def save_beside(self) -> bool:
        """Save the state in a thread, while the main thread cannot leave a collective call.

        That is the state from before an unfinished step.
        """
        if self.generation is None or not self.checkpointing.enabled:
            return False
        before = self.undo.state
        if before is None:
            self.undo.restore()
        else:
            self.progress.load_state_dict(before["progress"])
            self.state.replaced = before
        return self.saving.save_alone()
