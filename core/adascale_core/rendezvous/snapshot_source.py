"""Which replica has a state that the agents of others copy, so that its loss costs a step at most.

Several members keep the state for each other. The state of a single one is lost with its node, so the agents
of replicas that wait keep copies of it: one of these takes its place.
"""

from __future__ import annotations

from adascale_core.messages.allocation import AllocationView, Member


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
