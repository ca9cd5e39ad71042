"""The connections between members, in one process and over real sockets."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import socket
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from adascale_core.messages.allocation import Member
from adascale_core.messages.channel import Assignment, encode
from adascale_worker.errors import WorkerError
from adascale_worker.loop.context import Context
from adascale_worker.loop.generations import Generations
from adascale_worker.membership import links as membership_links
from adascale_worker.membership.links import AgentChannel, MembershipLinks
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.process.environment import RankAssignment, listen, package_version
from adascale_worker.process.shutdown_request import ShutdownRequest
from adascale_worker.reporting.time_spent import TimeSpent
from adascale_worker.state.following import Followers
from support.launch import wait_until

ADDRESS = "127.0.0.1"
GENERATION = 4
SECRET = "the secret of the job"
STATE = (3, 10, 80)
PATIENCE = 30.0
"""Seconds for what happens within milliseconds."""


class Coordinator:
    """The real rank 0 of a generation, whose other members the test plays or makes."""

    def __init__(self, replicas: int = 2) -> None:
        self.listener = listen(ADDRESS)
        port = self.listener.getsockname()[1]
        members = tuple(Member(replica, f"i{replica}", ADDRESS, port) for replica in range(replicas))
        self.assignments = [Assignment(GENERATION, rank, members, SECRET, {}) for rank in range(replicas)]
        self.changed = threading.Event()
        self.links = self.connect(0, SECRET)

    def connect(self, rank: int, secret: str) -> MembershipLinks:
        """Return the links of a real member."""
        return MembershipLinks(
            self.assignments[rank], self.listener, secret, PATIENCE, lambda _: self.changed.set()
        )

    def close(self) -> None:
        self.links.close()
        self.listener.close()


def generations_of(trainer: socket.socket) -> Generations:
    """Return the generations of a trainer, with its end of the connection with its agent."""
    parts = SimpleNamespace(
        group=ReplicaGroup(RankAssignment(0, 1), torch.device("cpu"), is_elastic=True, peer_timeout=PATIENCE),
        shutdown_request=ShutdownRequest(),
        state=SimpleNamespace(
            number=None, has_followed=False, is_mixed=False, followers=Followers([], dict, ())
        ),
        accelerator="",
        channel=AgentChannel(trainer),
        spent=TimeSpent(lambda _: None),
    )
    return Generations(cast(Context, parts))


class ScriptedMember:
    """A connection to the coordinator, over which the test sends what it likes."""

    def __init__(self, coordinator: Coordinator) -> None:
        address = coordinator.listener.getsockname()
        self._connection = socket.create_connection(address, timeout=PATIENCE)
        self._lines = self._connection.makefile("r")
        self.challenge = str(self.receive()["challenge"])

    def receive(self) -> dict[str, Any]:
        """Return the next message; an empty object when the coordinator has closed the connection."""
        message: dict[str, Any] = json.loads(self._lines.readline() or "{}")
        return message

    def send(self, **message: object) -> None:
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def send_bytes(self, content: bytes) -> None:
        self._connection.sendall(content)

    def authenticate(self, **changes: Any) -> dict[str, Any]:
        """Send the handshake of rank 1 with `changes`, and return the answer.

        The HMAC is that of the changed message, unless `changes` has another one.
        """
        message = {
            "generation": GENERATION,
            "rank": 1,
            "instance": "i1",
            "version": package_version(),
            "challenge": "00" * 16,
            **changes,
        }
        self.send(**{"mac": mac("member", self.challenge, message), **message})
        return self.receive()

    def close(self) -> None:
        self._lines.close()
        self._connection.close()


def mac(role: str, challenge: str, message: dict[str, Any], secret: str = SECRET) -> str:
    """Return the HMAC with which a member proves that it knows the secret."""
    text = "|".join([role, challenge, *(str(message[key]) for key in ("generation", "rank", "version"))])
    return hmac.new(secret.encode(), text.encode(), hashlib.sha256).hexdigest()


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    made = Coordinator()
    yield made
    made.close()


@pytest.fixture
def connect(coordinator: Coordinator) -> Iterator[Callable[[], ScriptedMember]]:
    """Makes connections to the coordinator."""
    made: list[ScriptedMember] = []

    def connect() -> ScriptedMember:
        made.append(ScriptedMember(coordinator))
        return made[-1]

    yield connect
    for member in made:
        member.close()


def require_no_arrival(coordinator: Coordinator, member: ScriptedMember) -> None:
    """Check that the coordinator has closed the connection, and counts no other member."""
    assert member.receive() == {}, "the connection is closed"
    coordinator.links.arrive(STATE)
    assert coordinator.changed.wait(PATIENCE)
    assert not coordinator.links.all_arrived
    assert not coordinator.links.broken, "an unknown process cannot end the generation"


def test_the_coordinators_own_arrival_ends_a_wait(coordinator: Coordinator) -> None:
    """It arrives last in most changes, because the new replicas wait while it trains."""
    coordinator.links.arrive(STATE)
    assert coordinator.changed.wait(PATIENCE)
    assert not coordinator.links.all_arrived


def test_members_that_know_the_secret_exchange_their_states(coordinator: Coordinator) -> None:
    member = coordinator.connect(1, SECRET)
    try:
        member.arrive(None)
        coordinator.links.arrive(STATE)
        wait_until(lambda: coordinator.links.all_arrived, "all members arrive", PATIENCE)
        coordinator.links.announce_store(1)
        formation = wait_until(lambda: member.formation, "the formation", PATIENCE)
        assert formation.states == (STATE, None)
        assert formation.sources == [0]
    finally:
        member.close()


def test_a_handshake_proves_the_knowledge_of_the_secret_in_both_directions(
    coordinator: Coordinator, connect: Callable[[], ScriptedMember]
) -> None:
    member = connect()
    sent = {"generation": GENERATION, "rank": 1, "version": package_version(), "challenge": "ab" * 16}
    assert member.authenticate(challenge="ab" * 16) == {"mac": mac("coordinator", "ab" * 16, sent)}
    member.send(arrived=None)
    coordinator.links.arrive(STATE)
    wait_until(lambda: coordinator.links.all_arrived, "all members arrive", PATIENCE)


@pytest.mark.parametrize(
    "changes",
    [
        {"mac": ""},
        {"mac": None},
        {"rank": 0, "instance": "i0"},
        {"rank": 2, "instance": "i2"},
        {"rank": -1},
        {"rank": "one"},
        {"instance": "i0"},
        {"instance": None},
        {"generation": GENERATION - 1},
        {"generation": GENERATION + 1},
    ],
    ids=str,
)
def test_a_process_that_is_not_a_member_is_refused(
    coordinator: Coordinator, connect: Callable[[], ScriptedMember], changes: dict[str, Any]
) -> None:
    member = connect()
    assert member.authenticate(**changes) == {}
    require_no_arrival(coordinator, member)


@pytest.mark.parametrize(
    "content", [b"[" * 200_000 + b"\n", b"[" * 3_000 + b"\n", b"x" * 200_000], ids=["deep", "nested", "long"]
)
def test_what_is_no_handshake_ends_its_connection_and_nothing_else(
    coordinator: Coordinator, connect: Callable[[], ScriptedMember], content: bytes
) -> None:
    connect().send_bytes(content)
    member = coordinator.connect(1, SECRET)
    try:
        member.arrive(None)
        coordinator.links.arrive(STATE)
        wait_until(lambda: coordinator.links.all_arrived, "all members arrive", PATIENCE)
    finally:
        member.close()


def test_connections_without_a_handshake_do_not_keep_members_out(coordinator: Coordinator) -> None:
    address = coordinator.listener.getsockname()
    idle = [socket.create_connection(address, timeout=PATIENCE) for _ in range(membership_links.MAX_PENDING)]
    late = [socket.create_connection(address, timeout=PATIENCE) for _ in range(10)]
    member = coordinator.connect(1, SECRET)
    try:
        member.arrive(None)
        coordinator.links.arrive(STATE)
        wait_until(lambda: coordinator.links.all_arrived, "all members arrive", PATIENCE)
        idle[0].recv(4096)
        assert idle[0].recv(1) == b"", "the oldest connection is closed"
    finally:
        member.close()
        for connection in [*idle, *late]:
            connection.close()


def test_the_hmac_of_another_secret_is_refused(
    coordinator: Coordinator, connect: Callable[[], ScriptedMember]
) -> None:
    member = connect()
    sent = {"generation": GENERATION, "rank": 1, "version": package_version()}
    assert member.authenticate(mac=mac("member", member.challenge, sent, "another secret")) == {}
    require_no_arrival(coordinator, member)


def test_the_hmac_of_another_rank_is_refused(connect: Callable[[], ScriptedMember]) -> None:
    """A member cannot take the place of another one with what it has computed for its own."""
    member = connect()
    sent = {"generation": GENERATION, "rank": 0, "version": package_version()}
    assert member.authenticate(mac=mac("member", member.challenge, sent)) == {}


def test_a_repeated_hmac_is_refused(coordinator: Coordinator, connect: Callable[[], ScriptedMember]) -> None:
    """Each connection has a challenge of its own."""
    observed, replay = connect(), connect()
    assert observed.challenge != replay.challenge
    sent = {"generation": GENERATION, "rank": 1, "version": package_version()}
    assert replay.authenticate(mac=mac("member", observed.challenge, sent)) == {}
    require_no_arrival(coordinator, replay)


def test_the_coordinators_own_hmac_is_no_proof_of_a_member(
    coordinator: Coordinator, connect: Callable[[], ScriptedMember]
) -> None:
    """Otherwise a process could let a member compute the answer to the coordinator's challenge."""
    member = connect()
    sent = {"generation": GENERATION, "rank": 1, "version": package_version()}
    assert member.authenticate(mac=mac("coordinator", member.challenge, sent)) == {}
    require_no_arrival(coordinator, member)


def test_a_message_before_the_handshake_is_refused(
    coordinator: Coordinator, connect: Callable[[], ScriptedMember]
) -> None:
    member = connect()
    member.send(arrived=[9, 99, 999])
    require_no_arrival(coordinator, member)


def test_a_coordinator_without_the_secret_gets_no_arrival() -> None:
    """A process at the coordinator's address cannot take part in the generation."""
    with listen(ADDRESS) as listener:
        listener.setblocking(True)
        listener.settimeout(PATIENCE)
        members = tuple(
            Member(replica, f"i{replica}", ADDRESS, listener.getsockname()[1]) for replica in range(2)
        )
        links = MembershipLinks(
            Assignment(GENERATION, 1, members, SECRET, {}), listener, SECRET, PATIENCE, lambda _: None
        )
        try:
            links.arrive(STATE)
            received = []
            for _ in range(2):
                # The member connects again, because the real coordinator may not listen yet.
                connection, _ = listener.accept()
                with connection, connection.makefile("r") as lines:
                    connection.sendall(json.dumps({"challenge": "00"}).encode() + b"\n")
                    answer = json.loads(lines.readline())
                    forged = mac("coordinator", answer["challenge"], answer, "another secret")
                    connection.sendall(json.dumps({"mac": forged}).encode() + b"\n")
                    received += [json.loads(line) for line in lines]
            assert received == []
            assert links.formation is None
            assert not links.broken
        finally:
            links.close()


def test_a_member_connects_again_to_a_coordinator_that_was_silent() -> None:
    """It may have been frozen, and knows then which replicas are lost."""
    with listen(ADDRESS) as listener:
        listener.setblocking(True)
        listener.settimeout(PATIENCE)
        members = tuple(Member(rank, f"i{rank}", ADDRESS, listener.getsockname()[1]) for rank in range(3))
        links = MembershipLinks(
            Assignment(GENERATION, 1, members, SECRET, {}), listener, SECRET, 1.0, lambda _: None
        )
        try:
            for news in ({}, {"lost": [2]}):
                connection, _ = listener.accept()
                with connection, connection.makefile("r") as lines:
                    connection.sendall(json.dumps({"challenge": "00"}).encode() + b"\n")
                    answer = json.loads(lines.readline())
                    proof = mac("coordinator", answer["challenge"], answer)
                    connection.sendall(json.dumps({"mac": proof}).encode() + b"\n")
                    connection.sendall(json.dumps(news).encode() + b"\n")
                    if news:
                        wait_until(lambda: links.lost == {0, 2}, "the news of the coordinator")
                    else:
                        assert not any(json.loads(line) for line in lines), "it is silent, and closed"
        finally:
            links.close()


@pytest.mark.parametrize("begins", ["to wait", "to arrive"])
def test_a_coordinator_that_does_not_answer_is_lost_once_a_member_waits(
    begins: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while that follows a replica that trains, which may be the same, and frozen."""
    monkeypatch.setattr(membership_links, "MIN_ARRIVAL_TIMEOUT", 0.05)
    with listen(ADDRESS) as listener:
        members = tuple(Member(rank, f"i{rank}", ADDRESS, listener.getsockname()[1]) for rank in range(2))
        assignment = Assignment(GENERATION, 1, members, SECRET, {})
        links = MembershipLinks(assignment, listener, SECRET, 0.05, lambda _: None)
        try:
            if begins == "to wait":
                links.begin_to_wait()
            else:
                links.arrive(None)
            wait_until(lambda: links.lost == {0}, "the loss")
        finally:
            links.close()


# -- another version ------------------------------------------------------------------------------------


def test_a_member_with_another_version_is_refused_with_both_versions(
    coordinator: Coordinator, connect: Callable[[], ScriptedMember]
) -> None:
    member = connect()
    refused = member.authenticate(version="9.9")["refused"]
    assert "this replica has version 9.9 of adascale-operator" in refused
    assert f"have version {package_version()}: use the same image" in refused
    require_no_arrival(coordinator, member)


def test_a_loss_in_an_earlier_generation_breaks_up_no_later_one(coordinator: Coordinator) -> None:
    generation = coordinator.links.assignment.generation
    agent, trainer = socket.socketpair()
    with agent, trainer:
        generations = generations_of(trainer)
        generations._links = coordinator.links
        generations.peers_lost(generation - 1)
        coordinator.links.arrive(STATE)
        assert coordinator.changed.wait(PATIENCE)
        assert not coordinator.links.broken
        generations.peers_lost(generation)
        wait_until(lambda: coordinator.links.broken, "the end of the generation")


def test_links_that_close_leave_no_connection_without_an_answer(coordinator: Coordinator) -> None:
    """Its other end would not connect to the links of the next generation."""
    links, others = coordinator.links, []

    def connect() -> None:
        others.append(socket.create_connection(coordinator.listener.getsockname(), timeout=PATIENCE))

    def close() -> None:
        links._closing.set()
        links._loop.call_soon(connect)

    links._loop.call_soon_threadsafe(close)
    links._thread.join()
    with contextlib.suppress(BlockingIOError):  # those of the next generation
        coordinator.listener.accept()[0].close()
    with others[0] as other, contextlib.suppress(ConnectionResetError):
        assert other.recv(1) == b""


def test_a_trainer_with_another_version_ends_with_the_error_that_it_gets(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer of rank 1, with the messages of its agent and the answer of the real rank 0."""
    own = package_version()

    def version_of_thread() -> str:
        return own if threading.current_thread() is coordinator.links._thread else "9.9"

    monkeypatch.setattr(membership_links, "package_version", version_of_thread)
    agent, trainer = socket.socketpair()
    with agent, trainer:
        generations = generations_of(trainer)
        generations.start()
        agent.sendall(encode(coordinator.assignments[1]))
        with pytest.raises(WorkerError) as error:
            generations.enter()
        assert "this replica has version 9.9 of adascale-operator" in str(error.value)
        assert f"have version {own}: use the same image" in str(error.value)
        generations.close()
        generations._listener.close()
    coordinator.links.arrive(STATE)
    assert coordinator.changed.wait(PATIENCE)
    assert not coordinator.links.broken, "the others continue"
