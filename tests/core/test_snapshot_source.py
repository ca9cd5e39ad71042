"""Whose state the agent of a replica copies, and when it needs no copy."""

import pytest

from adascale_core.messages.allocation import ActiveAllocation, Allocation, AllocationView, Member
from adascale_core.rendezvous.instruction import others_keep_state, snapshot_source


def view(*replicas: int, port: int = 40124, broken: bool = False, complete: bool = False) -> AllocationView:
    members = tuple(Member(each, f"{each}.1", "host", 40123, snapshot_port=port) for each in replicas)
    active = ActiveAllocation(3, len(members), members)
    return AllocationView(1, Allocation(3, 1, spares=1), active, broken=broken, complete=complete)


BEFORE_THE_FIRST = AllocationView(1, Allocation(1, 1, spares=1), None, broken=False, complete=False)


@pytest.mark.parametrize(
    ("generations", "source", "is_kept"),
    [
        (BEFORE_THE_FIRST, None, False),
        (view(), None, False),
        (view(0), 0, False),
        # The agent of the lost member may remain, with the latest copy.
        (view(0, broken=True), 0, False),
        (view(0, complete=True), None, False),
        # The agent has no copies, or is of a version before.
        (view(0, port=0), None, False),
        # The replica itself.
        (view(2), None, False),
        (view(2, 1), None, False),
        (view(0, 1), None, True),
        # If all members are lost, the copy of an earlier generation may be all that is left.
        (view(0, 1, broken=True), None, False),
    ],
)
def test_a_replica_copies_the_state_of_the_only_other_one_that_trains(
    generations: AllocationView, source: int | None, is_kept: bool
) -> None:
    found = snapshot_source(generations, 2)
    assert (None if found is None else found.replica) == source
    assert others_keep_state(generations, 2) == is_kept
