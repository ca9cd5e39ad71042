"""Which connections the service closes when they need too much."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from adascale_api.http.connection_limits import MAX_DATA, REQUEST_TIMEOUT, RESPONSE_TIMEOUT, ConnectionLimits
from support.clock import Clock


class Connection:
    def __init__(self, limits: ConnectionLimits, address: str = "10.0.0.1") -> None:
        self.limits = limits
        self.address = address
        self.is_closed = False
        self.head = 0
        limits.opened(self)

    def abort(self) -> None:
        self.is_closed = True

    def close(self) -> None:
        self.is_closed = True
        self.limits.lost(self)

    def send_head(self, size: int) -> None:
        self.head += size
        self.limits.keep(self.limits.heads, self, self.head)

    def send_body(self, size: int) -> None:
        self.limits.keep(self.limits.bodies, self, size)

    def request(self) -> None:
        self.limits.expect_request(self)
        self.limits.request_complete(self, waits=True)

    def answer(self) -> None:
        self.limits.response_complete(self)

    def leave_unread(self, size: int) -> None:
        self.limits.unread(self, size)


def closed(*connections: Connection) -> list[bool]:
    return [connection.is_closed for connection in connections]


def closed_count(limits: ConnectionLimits) -> float | None:
    registry = CollectorRegistry()
    registry.register(limits.closed)
    return registry.get_sample_value("adascale_connections_closed_total")


def test_of_one_client_the_oldest_incomplete_request_is_closed_first_and_then_what_did_nothing_longest() -> (
    None
):
    limits = ConnectionLimits(max_connections=4)
    idle, half, busy, recent = (Connection(limits) for _ in range(4))
    for connection in (idle, busy, recent):
        connection.request()
        connection.answer()
    idle.limits.expect_request(idle)
    idle.limits.request_complete(idle, waits=False)
    first, second = Connection(limits), Connection(limits)
    assert closed(idle, half, busy, recent, first, second) == [False, True, False, False, True, False]
    second.request()
    second.answer()
    busy.request()
    busy.answer()
    third = Connection(limits)
    assert third.is_closed, "the only incomplete one"
    assert closed(idle, busy, recent, second) == [False] * 4


def test_a_request_that_waits_counts_one_and_a_half_times() -> None:
    limits = ConnectionLimits(max_connections=30)
    waiting = [Connection(limits) for _ in range(30)]
    for connection in waiting:
        if not connection.is_closed:
            connection.request()
    assert sum(closed(*waiting)) == 10
    for connection in waiting:
        connection.answer()
    others = [Connection(limits) for _ in range(10)]
    assert sum(closed(*waiting, *others)) == 10


def test_no_more_are_open_than_the_process_may_have_files() -> None:
    limits = ConnectionLimits(max_connections=30, max_open=20)
    connections = [Connection(limits) for _ in range(20)]
    for connection in connections:
        connection.request()
    assert not any(closed(*connections)), "20 that wait count as 30"
    assert sum(closed(*connections, Connection(limits))) == 1


def test_a_request_that_was_answered_before_its_end_does_not_wait() -> None:
    limits = ConnectionLimits(max_connections=10)
    connections = [Connection(limits) for _ in range(10)]
    for connection in connections:
        limits.response_complete(connection)
        limits.request_complete(connection, waits=False)
    assert not any(closed(*connections))


def test_what_happens_to_a_closed_connection_afterwards_has_no_effect() -> None:
    limits = ConnectionLimits(max_connections=1)
    first = Connection(limits)
    first.request()
    second = Connection(limits)
    assert closed(first, second) == [False, True], "the request of the first is complete"
    first.answer()
    first.close()
    first.answer()
    first.close()
    assert not Connection(limits).is_closed


def test_the_oldest_of_the_data_that_take_most_are_closed() -> None:
    limits = ConnectionLimits()
    third = MAX_DATA // 3
    heads = [Connection(limits) for _ in range(4)]
    readers = [Connection(limits) for _ in range(2)]
    senders = [Connection(limits) for _ in range(2)]
    for connection in heads:
        connection.send_head(third // 4)
    for connection in readers:
        connection.leave_unread(third // 2)
    for connection in senders:
        connection.send_body(third // 2)
    assert not any(closed(*heads, *readers, *senders))
    heads[-1].send_head(third // 4)
    assert closed(*heads, *readers, *senders) == [True, *[False] * 7]
    readers[1].leave_unread(third)
    assert closed(*heads, *readers, *senders) == [True, *[False] * 3, True, *[False] * 3]
    senders[1].send_body(third)
    assert closed(*heads, *readers, *senders) == [True, *[False] * 3, True, False, True, False]


def test_a_connection_that_keeps_several_kinds_of_data_is_closed_once() -> None:
    limits = ConnectionLimits()
    both, other = Connection(limits), Connection(limits)
    both.send_head(1)
    both.leave_unread(MAX_DATA - 1)
    other.send_head(2)
    assert closed(both, other) == [True, False]
    assert closed_count(limits) == 1


@pytest.mark.parametrize(("seconds", "kind"), [(REQUEST_TIMEOUT, "request"), (RESPONSE_TIMEOUT, "answer")])
def test_overdue_connections_are_closed(seconds: float, kind: str) -> None:
    clock = Clock(0.0)
    limits = ConnectionLimits(clock=clock)
    connection = Connection(limits)
    if kind == "answer":
        connection.request()
        connection.leave_unread(1)
    clock.now = seconds - 0.1
    asyncio.run(limits.close_overdue())
    assert not connection.is_closed
    clock.now = seconds
    asyncio.run(limits.close_overdue())
    assert connection.is_closed
    assert closed_count(limits) == 1


def test_a_request_that_begins_late_does_not_delay_the_end_of_others() -> None:
    clock = Clock(0.0)
    limits = ConnectionLimits(clock=clock)
    late, silent = Connection(limits), Connection(limits)
    clock.now = REQUEST_TIMEOUT - 1
    limits.expect_request(late)
    clock.now = REQUEST_TIMEOUT
    asyncio.run(limits.close_overdue())
    assert closed(late, silent) == [False, True]


events = st.lists(
    st.tuples(st.sampled_from(["open", "request", "answer", "close"]), st.integers(0, 2), st.integers(0, 50)),
    max_size=200,
)


@given(events=events, maximum=st.integers(1, 12))
def test_the_connections_never_exceed_the_maximum_and_only_the_largest_client_loses_one(
    events: list[tuple[str, int, int]], maximum: int
) -> None:
    limits = ConnectionLimits(max_connections=maximum)
    all_connections: list[Connection] = []
    waiting: set[Connection] = set()
    for event, client, index in events:
        live = [connection for connection in all_connections if not connection.is_closed]
        before = Counter(connection.address for connection in live)
        address = f"10.0.0.{client}"
        if event == "open":
            before[address] += 1
            all_connections.append(Connection(limits, address))
            live.append(all_connections[-1])
        elif live:
            connection = live[index % len(live)]
            if event == "request" and connection not in waiting:
                waiting.add(connection)
                connection.request()
            elif event == "answer" and connection in waiting:
                waiting.discard(connection)
                connection.answer()
            elif event == "close":
                before[connection.address] -= 1
                connection.close()
        waiting = {connection for connection in waiting if not connection.is_closed}
        after = Counter(connection.address for connection in live if not connection.is_closed)
        assert after.total() + len(waiting) // 2 <= maximum
        for loser in before:
            if after[loser] < before[loser]:
                assert before[loser] >= max(before.values()) - (before[loser] - after[loser]) - 1
