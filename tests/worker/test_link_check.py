"""The check whether a replica reaches the members that train, with real connections."""

import socket
from collections.abc import Iterator

import pytest

from adascale_core.messages.allocation import ActiveAllocation, Allocation, AllocationView, Member
from adascale_worker.agent.link_check import PATIENCE, LinkCheck
from adascale_worker.errors import ReplicaCheckError
from support.clock import Clock
from support.launch import free_port


@pytest.fixture
def port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def view(*ports: int, generation: int = 1, broken: bool = False, complete: bool = False) -> AllocationView:
    members = tuple(
        Member(replica, f"{replica}.1", "127.0.0.1", port, holds=True, node=f"node-{replica}")
        for replica, port in enumerate(ports)
    )
    active = ActiveAllocation(generation, len(members), members)
    return AllocationView(1, Allocation(2, 3), active, broken=broken, complete=complete)


def test_a_replica_passes_once_it_has_reached_the_member_of_rank_0(port: int) -> None:
    closed = free_port()
    check = LinkCheck(2)
    assert not check.passes(view(closed, port), is_current=True)
    assert check.passes(view(port, closed), is_current=True)
    assert check.passes(view(closed, closed), is_current=True)


def test_a_replica_passes_if_no_generation_runs_without_it() -> None:
    """All replicas may have been lost at once. The service learns of it by their registrations."""
    closed = free_port()
    before_the_first = AllocationView(1, Allocation(1, 2), None, broken=False, complete=False)
    without = [
        before_the_first,
        view(),
        view(closed, closed, closed),
        view(closed, broken=True),
        view(closed, complete=True),
    ]
    assert [LinkCheck(2).passes(each, is_current=True) for each in without] == [True] * len(without)


def test_a_replica_fails_if_a_generation_runs_on_whose_member_is_out_of_reach() -> None:
    closed, clock = free_port(), Clock()
    check = LinkCheck(1, clock)
    assert not check.passes(view(closed), is_current=True)
    clock.now += PATIENCE - 1
    assert not check.passes(view(closed, generation=2), is_current=True)
    clock.now += PATIENCE
    assert not check.passes(view(closed, generation=2), is_current=False)
    clock.now += PATIENCE - 1
    assert not check.passes(view(closed, generation=2), is_current=True)
    clock.now += 1
    message = (
        rf"could not connect to replica 0 on node node-0, which trains, at 127.0.0.1 port {closed} for 30 s: "
        "Connection refused"
    )
    with pytest.raises(ReplicaCheckError, match=message):
        check.passes(view(closed, generation=2), is_current=True)
