"""What an agent does when the generations of its job change, and whose state it copies.

Several members keep the state for each other. The state of a single member is lost with its node, so the
agents of replicas that wait keep copies of it, and one of them takes its place.
"""

from __future__ import annotations

from enum import Enum, auto

from adascale_core.messages.allocation import ActiveAllocation, AllocationView, Member


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


def snapshot_source(view: AllocationView, replica: int) -> Member | None:
    """Return the member whose state the agent of `replica` copies; None if it copies none.

    A generation that has lost its only member still has a source: the agent may remain, and its copy is the
    latest one.
    """
    members = () if view.active is None or view.complete else view.active.members
    if len(members) != 1 or members[0].replica == replica or not members[0].snapshot_port:
        return None
    return members[0]


def others_keep_state(view: AllocationView, replica: int) -> bool:
    """Whether several members, without `replica`, keep the state for each other, so it needs no copy."""
    active = view.active
    if active is None or view.broken or replica in active.indices:
        return False
    return len(active.members) > 1
