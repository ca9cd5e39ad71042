"""The copies that a replica which waits gets from the only one that trains: later ones, complete, or none."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from math import inf
from pathlib import Path

import pytest
import torch

from adascale_core.messages.allocation import Member
from adascale_core.messages.channel import Follow
from adascale_worker.membership import links
from adascale_worker.membership.links import FollowerServer, PeersLostError, connect_to
from adascale_worker.process.snapshot_place import Condition, SnapshotPlace, make_snapshot_files
from adascale_worker.state.following import Followers, StateFollower
from adascale_worker.state.state import SnapshotMemory
from adascale_worker.state.store import CheckpointInfo
from support.launch import wait_until

KEY = "secret"
SPARE = "spare.1"
Number = tuple[int, int, int]


def connect(port: int, copied: Number | None = None, *, key: str = KEY) -> socket.socket:
    source = Member(0, "0.1", "127.0.0.1", 1, state_port=port)
    connection, ports = connect_to(Follow(source, SPARE, key), copied)
    assert ports == [port]
    return connection


class Replica:
    """A trainer, with the memory of its agent."""

    def __init__(self) -> None:
        self.paths = make_snapshot_files().split(":")
        self.available = inf
        self.memory = SnapshotMemory(self.paths, lambda: self.available)
        self.server = FollowerServer("127.0.0.1")
        self.server.secret = KEY
        self.followers = Followers([], dict, self.paths)
        self.follower = StateFollower([], dict, self.memory)
        self._is_stopped = False
        self._thread = threading.Thread()

    def save(self, number: Number, value: float = 0.0, rows: int = 1000) -> None:
        incarnation, generation, step = number
        info = CheckpointInfo(
            step, 1.0, 0, 1, generation, finished=False, saved_at=0.0, incarnation=incarnation
        )
        state = {"weights": torch.full((rows, 1000), value), "nothing": torch.empty(0), "step": step}
        SnapshotMemory(self.paths, lambda: inf).save(state, info, {"accuracy": value})
        self.followers.copied()

    @property
    def number(self) -> Number | None:
        kept = self.memory.newest()
        return None if kept is None else kept.number

    def accept(self) -> None:
        """Wait for a replica that follows, and send it copies."""
        follower = wait_until(lambda: next(self.server.take(), None), "the connection")
        self.followers.add(follower, gets_copies=True)

    def follow(self, source: Replica) -> None:
        connection = connect(source.server.port, self.memory.newest_number)
        source.accept()
        self.receive(connection)

    def receive(self, connection: socket.socket) -> None:
        def check() -> None:
            if self._is_stopped:
                raise PeersLostError

        def run() -> None:
            with connection, suppress(PeersLostError):
                self.follower.follow(connection, check)

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def wait(self) -> None:
        """Wait until it gets nothing more."""
        self._thread.join()

    def end(self) -> None:
        self.followers.close()
        self._is_stopped = True
        if self._thread.ident is not None:
            self.wait()
        for path in self.paths:
            os.close(int(Path(path).name))


@pytest.fixture
def replicas() -> Iterator[tuple[Replica, Replica]]:
    """The only replica that trains, and one that waits."""
    made = Replica(), Replica()
    yield made
    for each in made:
        each.end()


def test_a_copy_is_received_as_it_was_written_again_and_again(replicas: tuple[Replica, Replica]) -> None:
    source, spare = replicas
    spare.follow(source)
    for step in (1, 2, 3, 4):
        source.save((100, 3, step), value=float(step))
        wait_until(lambda step=step: spare.number == (100, 3, step), "the copy")  # type: ignore[misc]
        kept = spare.memory.newest()
        assert kept is not None
        state = kept.read()
        assert bool((state["weights"] == step).all())
        assert (state["step"], kept.result) == (step, {"accuracy": float(step)})


@pytest.mark.parametrize(
    ("own", "offered", "is_received"),
    [
        (None, (100, 3, 9), True),
        ((100, 3, 9), (100, 3, 10), True),
        ((100, 3, 9), (100, 3, 9), False),
        ((100, 3, 9), (100, 3, 8), False),
        # The job was continued from an earlier state.
        ((100, 3, 9), (100, 4, 5), True),
        # The other replica was replaced, and does not know it yet.
        ((100, 4, 5), (100, 3, 9), False),
        # A later and an earlier job of this name.
        ((100, 3, 9), (200, 1, 1), True),
        ((200, 1, 1), (100, 3, 9), False),
    ],
)
def test_only_a_copy_of_a_later_state_is_received(
    replicas: tuple[Replica, Replica], own: Number | None, offered: Number, is_received: bool
) -> None:
    source, spare = replicas
    if own is not None:
        spare.save(own)
    source.save(offered)
    spare.follow(source)
    if is_received:
        wait_until(lambda: spare.number == offered, "the copy")
    else:
        source.followers.close()
        spare.wait()
        assert spare.number == own


@pytest.mark.parametrize("restores", ["source", "spare"])
def test_a_copy_whose_restoring_process_has_ended_is_not_sent(
    replicas: tuple[Replica, Replica], restores: str
) -> None:
    """Neither by that replica, nor to it again."""
    source, spare = replicas
    source.save((100, 3, 9))
    if restores == "spare":
        spare.save((100, 3, 9))
    kept = (source if restores == "source" else spare).memory.newest()
    assert kept is not None
    kept.place.condition = Condition.RESTORING
    spare.follow(source)
    source.followers.close()
    spare.wait()
    assert spare.number is None


@pytest.mark.parametrize("other", ["key", "version", "no member yet"])
def test_a_replica_of_another_job_or_version_gets_nothing(
    replicas: tuple[Replica, Replica], other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, _ = replicas
    if other == "no member yet":
        source.server.secret = ""
    if other == "version":
        # Each end has another one, each time.
        versions = map(str, count())
        monkeypatch.setattr(links, "package_version", lambda: next(versions))
    with pytest.raises(OSError, match="closed"):
        connect(source.server.port, key="another" if other == "key" else KEY)
    assert next(source.server.take(), None) is None


@pytest.mark.parametrize(
    "sent",
    [b"", b"no line", b"[]\n", b'{"mac": 3}\n', b'{"mac": "x", "copied": null}\n', b"[" * 5000 + b"\n"],
)
def test_who_does_not_know_the_secret_gets_nothing_and_disturbs_nobody(
    replicas: tuple[Replica, Replica], sent: bytes
) -> None:
    source, spare = replicas
    with socket.create_connection(("127.0.0.1", source.server.port)) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        received = b""
        with suppress(ConnectionResetError):  # not all of a long line was read
            while part := connection.recv(4096):
                received += part
    assert [*json.loads(received)] == ["challenge"]
    source.save((100, 3, 9))
    spare.follow(source)
    wait_until(lambda: spare.number == (100, 3, 9), "the copy")


def test_a_source_that_does_not_know_the_secret_is_left() -> None:
    """It may listen at the port of a member that has ended."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection, connection.makefile("rb") as lines:
                connection.sendall(b'{"challenge": "x"}\n')
                lines.readline()
                connection.sendall(b'{"mac": "x"}\n')

        threading.Thread(target=answer).start()
        with pytest.raises(OSError, match="does not know the secret"):
            connect(listener.getsockname()[1])


@pytest.fixture
def interrupted(replicas: tuple[Replica, Replica]) -> tuple[Replica, socket.socket]:
    """A replica with the copies of steps 8 and 9 that has received a part of another, and its other end."""
    _, spare = replicas
    spare.save((100, 3, 8))
    spare.save((100, 3, 9))
    source = Replica()
    source.save((100, 3, 10))
    ours, theirs = socket.socketpair()
    whole = _sent_by(source)
    source.end()
    spare.receive(theirs)
    ours.sendall(whole[: len(whole) // 2])
    wait_until(lambda: spare.follower.heard_at, "a part")
    return spare, ours


def _sent_by(source: Replica) -> bytes:
    """Return what is sent for a copy."""
    ours, theirs = socket.socketpair()
    received = bytearray()
    length = sum(source.memory.newest_place.lengths)

    def read() -> None:
        while len(received) < length and (part := theirs.recv(1 << 20)):
            received.extend(part)

    thread = threading.Thread(target=read)
    thread.start()
    source.followers.add(links.Follower(SPARE, ours, None), gets_copies=True)
    thread.join()
    theirs.close()
    return bytes(received)


@pytest.mark.parametrize("how", ["closed", "stopped"])
def test_a_copy_that_is_not_complete_leaves_the_one_before(
    interrupted: tuple[Replica, socket.socket], how: str
) -> None:
    spare, source = interrupted
    if how == "closed":
        source.close()
    else:
        spare._is_stopped = True
    spare.wait()
    source.close()
    for path in spare.paths:
        with SnapshotPlace(path).locked(exclusively=True) as is_free:
            assert is_free
    assert spare.number == (100, 3, 9)


def test_without_enough_memory_no_copy_is_kept(replicas: tuple[Replica, Replica]) -> None:
    source, spare = replicas
    spare.available = 1000.0
    source.save((100, 3, 9))
    spare.follow(source)
    spare.wait()
    assert spare.number is None
    assert not spare.memory.is_taken
    assert spare.follower.lack.startswith("the state has 4 MiB")


def test_a_copy_that_is_deleted_while_it_is_sent_does_not_arrive(replicas: tuple[Replica, Replica]) -> None:
    """The trainer deletes it when others have the state. It has 64 MB, more than a connection buffers."""
    source, spare = replicas
    source.save((100, 3, 9), rows=16_000)
    connection = connect(source.server.port)
    source.accept()
    assert connection.recv(1, socket.MSG_PEEK)
    source.memory.release()
    spare.receive(connection)
    spare.wait()
    assert spare.number is None


def test_pieces_follow_copies_over_the_same_connection(replicas: tuple[Replica, Replica]) -> None:
    """As when the spare of a single replica becomes a member."""
    source, spare = replicas
    models = [torch.nn.Linear(3, 2) for _ in replicas]
    optimizers = [torch.optim.AdamW(each.parameters()) for each in models]
    source.followers = Followers([optimizers[0]], models[0].state_dict, source.paths)
    spare.follower = StateFollower([optimizers[1]], models[1].state_dict, spare.memory)
    source.save((100, 3, 1))
    spare.follow(source)
    wait_until(lambda: spare.number == (100, 3, 1), "the copy")
    assert source.followers.instances == {SPARE}
    source.followers.send_pieces([SPARE])
    for _ in range(5):
        models[0](torch.ones(3)).sum().backward()
        optimizers[0].step()
    assert source.followers.have_all([SPARE])
    source.followers.finish([SPARE], lambda: None)
    spare.wait()
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


def test_the_trainer_replaces_the_copy_that_is_not_being_sent(replicas: tuple[Replica, Replica]) -> None:
    """It does not wait for a receiver that is slow."""
    source, _ = replicas
    source.save((100, 3, 1), value=1.0)
    source.save((100, 3, 2), value=2.0)
    first = min(map(SnapshotPlace, source.paths), key=lambda place: place.number)
    with first.locked(exclusively=False) as is_free:
        assert is_free
        for step in (3, 4):
            source.save((100, 3, step), value=float(step))
            assert source.number == (100, 3, step)
        assert first.number == 1
    source.save((100, 3, 5))
    assert (source.number, first.number) == ((100, 3, 5), 5)
