"""What an agent does when the generations of its job change."""

from __future__ import annotations

from enum import Enum, auto

from adascale_core.messages.allocation import ActiveAllocation, AllocationView


class Instruction(Enum):
    """What a trainer must do."""

    ASSIGN = auto()
    """Enter the active generation."""
    HOLD = auto()
    """Leave the active generation as after a loss, and wait with the state."""
    RELEASE = auto()
    """Leave for good: a generation is active, or has ended, that does not include this trainer."""


def instruction(
    view: AllocationView, replica: int, instance: str, assigned: int, *, holds: bool
) -> Instruction | None:
    """Return what the trainer `instance` of `replica` must do; None if nothing.

    `assigned` is the newest generation that it was assigned to or holds for, 0 if none; `holds` is whether it
    holds for that, with or without state.
    """
    active = view.active
    if active is None or active.generation < assigned:
        return None
    if not active.admits(replica, instance):
        # A trainer that waits for its first generation stays.
        return Instruction.RELEASE if assigned else None
    if view.broken:
        return None if holds and active.generation == assigned else Instruction.HOLD
    return Instruction.ASSIGN if active.generation > assigned else None


def is_taken_for_lost(
    view: AllocationView, replica: int, instance: str, assignment: ActiveAllocation | None
) -> bool:
    """Whether the others have taken a trainer for lost that is released, so they go on without it.

    In a planned change it makes the same steps as the others until all of them leave together.
    """
    active, desired = view.active, view.desired
    if active is None or desired is None or replica not in desired.indices:
        return False
    replacement = active.slow_replacement
    if replacement is not None and replacement.instance == instance:
        return False
    # In a planned change to fewer replicas, a member becomes a spare.
    shrinks = assignment is not None and assignment.replicas > active.replicas == desired.replicas
    return not (desired.spares and shrinks)
