"""Leader election in virtual time, with an API server that fails: at most one operator runs at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adascale_controller.operator.apply.kubernetes_cluster import ApiServerError, KubernetesCluster
from adascale_controller.operator.runtime.lease import Election, LeaseLostError
from adascale_controller.operator.types.kubernetes import ApiObject
from support.event_loops import in_virtual_time, now
from support.examples import examples

PLACE = ("system", "operator")

# -- an API server with one lease -----------------------------------------------------------------------


class Server:
    """A lease that is only replaced by a write with its current resource version."""

    def __init__(self) -> None:
        self.lease: ApiObject | None = None
        self.version = 0
        self.down = False

    def read(self) -> ApiObject | None:
        return self.lease

    def create(self, manifest: ApiObject) -> ApiObject | None:
        return self._put(manifest) if self.lease is None else None

    def replace(self, manifest: ApiObject) -> ApiObject | None:
        versions = [each and each["metadata"]["resourceVersion"] for each in (self.lease, manifest)]
        is_same = versions[0] == versions[1]
        return self._put(manifest) if is_same else None

    def _put(self, manifest: ApiObject) -> ApiObject:
        self.version += 1
        self.lease = {"spec": dict(manifest["spec"]), "metadata": {"resourceVersion": str(self.version)}}
        return self.lease

    @property
    def holder(self) -> str:
        return str(self.lease["spec"]["holderIdentity"]) if self.lease else ""


class Connection(KubernetesCluster):
    """The connection of an operator to the server, with delays and faults.

    Args:
        server: the server.
        delay: from the number of the request, the seconds that it takes, and its answer too.
        fault: from the number of the request: "" for none, "lost" if it does not arrive, "deaf" if its answer
            does not.
    """

    def __init__(
        self,
        server: Server,
        delay: Callable[[int], float] = lambda count: 0.01,
        fault: Callable[[int], str] = lambda count: "",
    ) -> None:
        self.server = server
        self.delay = delay
        self.fault = fault
        self.count = 0
        self.writes_in_flight = 0
        """Writes that are on their way, or their answers."""

    async def get(self, plural: str, namespace: str, name: str) -> ApiObject | None:
        return await self._ask(self.server.read)

    async def create(self, plural: str, manifest: ApiObject) -> ApiObject | None:
        return await self._ask(lambda: self.server.create(manifest), writes=True)

    async def replace(self, plural: str, manifest: ApiObject) -> ApiObject | None:
        return await self._ask(lambda: self.server.replace(manifest), writes=True)

    async def _ask(self, call: Callable[[], ApiObject | None], *, writes: bool = False) -> ApiObject | None:
        self.count += 1
        delay, fault = self.delay(self.count), self.fault(self.count)
        # A cancelled request still arrives.
        request = asyncio.ensure_future(self._arrive(call, delay, fault))
        self.writes_in_flight += writes
        request.add_done_callback(lambda _: self._arrived(writes))
        return await asyncio.shield(request)

    def _arrived(self, writes: bool) -> None:
        self.writes_in_flight -= writes

    async def _arrive(
        self, call: Callable[[], ApiObject | None], delay: float, fault: str
    ) -> ApiObject | None:
        await asyncio.sleep(delay)
        answer: ApiObject | None = None
        if self.server.down or fault == "lost":
            fault = "lost"
        else:
            answer = call()
        await asyncio.sleep(delay)
        if fault:
            # Nobody reads the exception of a cancelled request.
            asyncio.current_task().add_done_callback(lambda task: task.exception())  # type: ignore[union-attr]
            raise ApiServerError(fault)
        return answer


def election(connection: Connection, identity: str) -> Election:
    return Election(connection, PLACE, identity, clock=now)


class Operator:
    """A simulated operator that runs while it holds the lease."""

    def __init__(self, connection: Connection, identity: str) -> None:
        self.connection = connection
        self.election = election(connection, identity)
        self.working = False
        self.lost = 0
        self._task = asyncio.ensure_future(self._live())

    async def _live(self) -> None:
        while True:
            await self.election.acquire()
            self.working = True
            try:
                await self.election.hold()
            except LeaseLostError:
                self.lost += 1
            finally:
                self.working = False

    async def kill(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    async def leave(self) -> None:
        await self.kill()
        await self.election.release()


@asynccontextmanager
async def operators(*connections: Connection) -> AsyncIterator[list[Operator]]:
    made = [Operator(connection, f"operator-{number}") for number, connection in enumerate(connections)]
    try:
        yield made
    finally:
        for operator in made:
            await operator.kill()
        await asyncio.sleep(200)  # until all requests have arrived


async def seconds_until(holds: Callable[[], bool]) -> float:
    began = now()
    while not holds():
        assert now() - began < 600
        await asyncio.sleep(0.05)
    return now() - began


# -- takeover -------------------------------------------------------------------------------------------


@in_virtual_time
async def test_the_second_takes_over_when_the_lease_of_a_killed_operator_expires() -> None:
    server = Server()
    async with operators(Connection(server), Connection(server, lambda count: 0.02)) as (first, second):
        await seconds_until(lambda: first.working)
        await asyncio.sleep(100)
        await first.kill()
        assert 26 <= await seconds_until(lambda: second.working) <= 32
        assert server.lease is not None
        assert server.lease["spec"]["leaseTransitions"] == 1


@in_virtual_time
async def test_the_second_takes_over_at_once_when_the_first_releases_the_lease() -> None:
    server = Server()
    async with operators(Connection(server), Connection(server, lambda count: 0.02)) as (first, second):
        await seconds_until(lambda: first.working)
        await asyncio.sleep(100)
        await first.leave()
        assert not first.election.held
        assert await seconds_until(lambda: second.working) <= 1.2


@in_virtual_time
async def test_a_restarted_operator_takes_over_its_own_lease_at_once() -> None:
    server = Server()
    before, after = election(Connection(server), "same"), election(Connection(server), "same")
    await before.acquire()
    began = now()
    await after.acquire()
    assert now() - began < 1
    with pytest.raises(LeaseLostError):
        await before.hold()
    assert not before.held
    assert after.held
    await before.release()
    assert server.holder == "same"


@in_virtual_time
async def test_the_holder_stops_before_the_lease_expires() -> None:
    server = Server()
    connection = Connection(server)
    async with operators(connection, Connection(server, lambda count: 0.02)) as (first, second):
        await seconds_until(lambda: first.working)
        connection.fault = lambda count: "lost"
        stopped = await seconds_until(lambda: not first.working)
        assert 16 <= stopped <= 20.1
        assert not first.election.held
        assert await seconds_until(lambda: second.working) >= 30 - stopped - 4


@in_virtual_time
async def test_a_process_that_was_paused_no_longer_holds_the_lease() -> None:
    """As after SIGSTOP and SIGCONT."""
    server = Server()
    only = election(Connection(server), "only")
    await only.acquire()
    assert only.held
    await asyncio.sleep(19)
    assert only.held
    await asyncio.sleep(2)
    assert not only.held
    with pytest.raises(LeaseLostError, match="within 20 s: this process did not run: it was paused"):
        await only.hold()


@in_virtual_time
async def test_a_lease_that_is_lost_because_the_server_does_not_answer_says_so() -> None:
    server = Server()
    connection = Connection(server)
    only = election(connection, "only")
    await only.acquire()
    server.down = True
    with pytest.raises(LeaseLostError, match="within 20 s: lost"):
        await only.hold()
    server.down = False
    await asyncio.sleep(100)
    await only.acquire()
    connection.delay = lambda count: 100.0
    with pytest.raises(LeaseLostError, match="within 20 s: the API server does not answer in time"):
        await only.hold()


@pytest.mark.parametrize("fault", ["lost", "deaf"])
@in_virtual_time
async def test_the_holder_keeps_running_in_an_outage_shorter_than_the_renew_deadline(fault: str) -> None:
    server = Server()
    connection = Connection(server)
    async with operators(connection) as (only,):
        await seconds_until(lambda: only.working)
        for _ in range(5):
            connection.fault = lambda count: fault
            await asyncio.sleep(15)
            connection.fault = lambda count: ""
            await asyncio.sleep(5)
        assert only.working
        assert only.lost == 0


@in_virtual_time
async def test_a_new_label_on_the_lease_does_not_stop_the_holder() -> None:
    server = Server()
    async with operators(Connection(server)) as (only,):
        await seconds_until(lambda: only.working)
        assert server.lease is not None
        metadata = {"resourceVersion": "label", "labels": {"a": "b"}}
        server.lease = {"spec": server.lease["spec"], "metadata": metadata}
        await asyncio.sleep(100)
        assert only.working
        assert only.lost == 0


@in_virtual_time
async def test_a_candidate_waits_for_the_duration_of_the_holder() -> None:
    server = Server()
    patient = Election(Connection(server), PLACE, "patient", duration=120, clock=now)
    await patient.acquire()
    other = election(Connection(server), "other")
    began = now()
    await other.acquire()
    assert now() - began >= 120


@in_virtual_time
async def test_a_lease_that_is_not_held_is_not_released() -> None:
    server = Server()
    first, second = election(Connection(server), "first"), election(Connection(server), "second")
    await first.acquire()
    await second.release()
    assert server.holder == "first"
    with pytest.raises(LeaseLostError, match="never acquired"):
        await second.hold()


@in_virtual_time
async def test_a_lease_is_released_after_a_cancelled_renewal() -> None:
    server = Server()
    connection = Connection(server)
    only = Operator(connection, "only")
    await seconds_until(lambda: only.working)
    connection.delay = lambda count: 0.5
    calls = connection.count
    await seconds_until(lambda: connection.count > calls)
    await asyncio.sleep(0.6)  # the server has the request, the client does not have its answer
    await only.leave()
    assert server.holder == ""
    await asyncio.sleep(10)


# -- random faults --------------------------------------------------------------------------------------

delays = st.lists(st.sampled_from([0.0, 0.1, 1.0, 4.0, 12.0, 40.0]), min_size=1, max_size=12)
faults = st.lists(st.sampled_from(["", "", "", "lost", "deaf"]), min_size=1, max_size=12)
connections = st.lists(st.tuples(delays, faults), min_size=2, max_size=3)
events = st.lists(
    st.tuples(
        st.sampled_from([0.0, 5.0, 15.0, 25.0, 60.0]),
        st.integers(0, 2),
        st.sampled_from(["kill", "leave", "down", "up", "cut", "cut", "mend", "delete"]),
    ),
    max_size=6,
)


@settings(max_examples=examples(20))
@given(connections, events)
@in_virtual_time
async def test_at_most_one_operator_runs_and_exactly_one_after_the_faults(
    made: list[tuple[list[float], list[str]]], events: list[tuple[float, int, str]]
) -> None:
    server = Server()
    faulty = True
    cut: set[int] = set()

    def connection(position: int) -> Connection:
        delays, faults = made[position]
        return Connection(
            server,
            lambda count: delays[count % len(delays)] if faulty else 0.01,
            lambda count: "lost" if position in cut else faults[count % len(faults)] if faulty else "",
        )

    async with operators(*(connection(position) for position in range(len(made)))) as running:

        async def wait(seconds: float) -> None:
            end = now() + seconds
            while now() < end:
                assert sum(operator.election.held for operator in running) <= 1
                assert sum(operator.working for operator in running) <= 1
                await asyncio.sleep(0.5)

        for number, (seconds, chosen, event) in enumerate(events):
            await wait(seconds)
            position = chosen % len(made)
            operator = running[position]
            if event in ("kill", "leave"):
                await (operator.kill() if event == "kill" else operator.leave())
                running[position] = Operator(connection(position), f"restarted-{number}")
            elif event == "cut":
                cut.add(position)
            elif event == "mend":
                cut.discard(position)
            elif event == "delete":
                # A user deletes the lease. No election is safe against that while the lease is held, or
                # may be once an answer arrives.
                if not any(each.election.held or each.connection.writes_in_flight for each in running):
                    server.lease = None
            else:
                server.down = event == "down"
        await wait(100)
        faulty = server.down = False
        cut.clear()
        await wait(100)
        assert sum(operator.working for operator in running) == 1
