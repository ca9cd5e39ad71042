"""The copies that one agent gets from another one, over real connections: later ones, complete, or none."""

import json
import os
import socket
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from itertools import count
from math import inf
from pathlib import Path

import pytest
import torch

from adascale_core.messages.allocation import ActiveAllocation, Allocation, AllocationView, Member
from adascale_worker.agent import snapshots
from adascale_worker.agent.snapshots import SnapshotChannel, Snapshots
from adascale_worker.process.snapshot_place import Condition, SnapshotPlace
from adascale_worker.state.state import SnapshotMemory
from adascale_worker.state.store import CheckpointInfo
from support.launch import free_port, wait_until

KEY = "secret"
Number = tuple[int, int, int]


class Agent:
    """The agent of replica 2: its memory, what it sends and what it receives."""

    def __init__(self) -> None:
        self.key = KEY
        self.available = inf
        self.snapshots = Snapshots(2, "127.0.0.1", lambda: self.key, lambda: None, lambda: self.available)
        self.paths = self.snapshots.files.split(":")
        self.memory = SnapshotMemory(self.paths, lambda: inf)

    def save(self, number: Number, value: float = 0.0, rows: int = 1000) -> None:
        incarnation, generation, step = number
        info = CheckpointInfo(
            step, 1.0, 0, 1, generation, finished=False, saved_at=0.0, incarnation=incarnation
        )
        state = {"weights": torch.full((rows, 1000), value), "nothing": torch.empty(0), "step": step}
        self.memory.save(state, info, {"accuracy": value})

    @property
    def number(self) -> Number | None:
        kept = self.memory.newest()
        return None if kept is None else kept.number

    def follow(self, port: int) -> None:
        self.snapshots.follow(generation(3, port))

    def stop(self) -> None:
        """Be assigned to a generation in which another member has the state."""
        members = tuple(Member(replica, f"{replica}.1", "127.0.0.1", 1) for replica in (0, 2))
        assert self.snapshots.is_ready(ActiveAllocation(4, 2, members))

    def finish(self) -> None:
        """Be assigned to a generation alone."""
        alone = ActiveAllocation(4, 1, (Member(2, "2.1", "127.0.0.1", 1),))
        wait_until(lambda: self.snapshots.is_ready(alone), "the end of the transfers")

    def end(self) -> None:
        self.stop()
        for path in self.paths:
            os.close(int(Path(path).name))


def generation(number: int, *ports: int) -> AllocationView:
    members = tuple(
        Member(replica, f"{replica}.1", "127.0.0.1", 1, snapshot_port=port)
        for replica, port in enumerate(ports)
    )
    active = ActiveAllocation(number, len(members), members)
    return AllocationView(number, Allocation(number, 1, spares=1), active, broken=False, complete=False)


@pytest.fixture
def agents() -> Iterator[tuple[Agent, Agent]]:
    """The agent of the only replica that trains, and that of one that waits."""
    made = Agent(), Agent()
    yield made
    for agent in made:
        agent.end()


def test_a_copy_is_received_as_it_was_written_again_and_again(agents: tuple[Agent, Agent]) -> None:
    source, spare = agents
    spare.follow(source.snapshots.port)
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
    agents: tuple[Agent, Agent], own: Number | None, offered: Number, is_received: bool
) -> None:
    source, spare = agents
    if own is not None:
        spare.save(own)
    source.save(offered)
    spare.follow(source.snapshots.port)
    spare.finish()
    assert spare.number == (offered if is_received else own)


@pytest.fixture
def in_a_pause(agents: tuple[Agent, Agent], monkeypatch: pytest.MonkeyPatch) -> tuple[Agent, Agent]:
    """The agents between two transfers: the spare has the copy of step 1, and the source that of step 2."""
    monkeypatch.setattr(snapshots, "POLL", 1000.0)
    source, spare = agents
    source.save((100, 3, 1))
    spare.follow(source.snapshots.port)
    wait_until(lambda: spare.number == (100, 3, 1), "the first copy")
    source.save((100, 3, 2))
    return agents


def test_the_last_copy_is_received_before_the_transfers_end(in_a_pause: tuple[Agent, Agent]) -> None:
    _, spare = in_a_pause
    spare.finish()
    assert spare.number == (100, 3, 2)


def test_transfers_end_if_the_other_agent_is_gone(agents: tuple[Agent, Agent]) -> None:
    _, spare = agents
    spare.save((100, 3, 1))
    spare.follow(free_port())
    spare.finish()
    assert spare.number == (100, 3, 1)


def test_a_copy_whose_restoring_process_has_ended_is_not_sent(agents: tuple[Agent, Agent]) -> None:
    source, spare = agents
    source.save((100, 3, 9))
    kept = source.memory.newest()
    assert kept is not None
    kept.place.condition = Condition.RESTORING
    spare.follow(source.snapshots.port)
    spare.finish()
    assert spare.number is None


def test_a_copy_is_not_received_again_after_the_process_that_restored_it_has_ended(
    agents: tuple[Agent, Agent],
) -> None:
    source, spare = agents
    for agent in agents:
        agent.save((100, 3, 9))
    kept = spare.memory.newest()
    assert kept is not None
    kept.place.condition = Condition.RESTORING
    spare.follow(source.snapshots.port)
    spare.finish()
    assert spare.number is None


@pytest.mark.parametrize("other", ["key", "version"])
def test_an_agent_of_another_job_or_version_gets_nothing(
    agents: tuple[Agent, Agent], other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, spare = agents
    source.save((100, 3, 9))
    if other == "key":
        spare.key = "another"
    else:
        # Each end has another one, each time.
        versions = map(str, count())
        monkeypatch.setattr(snapshots, "package_version", lambda: next(versions))
    spare.follow(source.snapshots.port)
    spare.finish()
    assert spare.number is None


@pytest.mark.parametrize(
    "sent", [b"", b"no line", b"[]\n", b'{"mac": 3}\n', b'{"mac": "x"}\n{"after": null}\n']
)
def test_who_does_not_know_the_secret_gets_nothing_and_disturbs_nobody(
    agents: tuple[Agent, Agent], sent: bytes
) -> None:
    source, spare = agents
    source.save((100, 3, 9))
    with socket.create_connection(("127.0.0.1", source.snapshots.port)) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        received = b"".join(iter(lambda: connection.recv(4096), b""))
    assert [*json.loads(received)] == ["challenge"]
    spare.follow(source.snapshots.port)
    spare.finish()
    assert spare.number == (100, 3, 9)


class Interrupting:
    """An agent that sends a part of a copy, and then closes the connection, or sends nothing more."""

    def __init__(self, *, closes: bool) -> None:
        self._closes = closes
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.has_sent = threading.Event()
        self.ends = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        with closing(self._listener), connection:
            channel = SnapshotChannel(connection, KEY)
            channel.accept()
            channel.answer((1 << 20, 100, (100, 3, 10)))
            channel.send_content(memoryview(bytes(1 << 19)))
            self.has_sent.set()
            if not self._closes:
                self.ends.wait()


def test_a_copy_that_is_not_complete_leaves_the_one_before(agents: tuple[Agent, Agent]) -> None:
    _, spare = agents
    spare.save((100, 3, 8))
    spare.save((100, 3, 9))
    source = Interrupting(closes=True)
    spare.follow(source.port)
    source.has_sent.wait()
    spare.finish()
    assert spare.number == (100, 3, 9)


def test_nothing_is_written_after_the_transfers_are_stopped(agents: tuple[Agent, Agent]) -> None:
    _, spare = agents
    spare.save((100, 3, 9))
    source = Interrupting(closes=False)
    spare.follow(source.port)
    source.has_sent.wait()
    spare.stop()
    for path in spare.paths:
        with SnapshotPlace(path).locked(exclusively=True) as is_free:
            assert is_free
    assert spare.number == (100, 3, 9)
    source.ends.set()


def test_without_enough_memory_no_copy_is_kept(
    agents: tuple[Agent, Agent], capsys: pytest.CaptureFixture[str]
) -> None:
    source, spare = agents
    spare.available = 1000.0
    source.save((100, 3, 9))
    spare.follow(source.snapshots.port)
    spare.finish()
    assert spare.number is None
    assert not spare.memory.is_taken
    output = capsys.readouterr().out
    assert (
        output.count("adascale-agent: no copies of the state of replica 0 are kept: the state has 4 MiB") == 1
    )


def test_a_copy_that_is_deleted_while_it_is_sent_does_not_arrive(agents: tuple[Agent, Agent]) -> None:
    """The trainer deletes it when others have the state. It has 64 MB, more than a connection buffers."""
    source, _ = agents
    source.save((100, 3, 9), rows=16_000)
    with socket.create_connection(("127.0.0.1", source.snapshots.port), timeout=30) as connection:
        channel = SnapshotChannel(connection, KEY)
        copy = channel.request(None)
        assert copy is not None
        length, _, number = copy
        assert (length >= 64_000_000, number) == (True, (100, 3, 9))
        source.memory.release()
        with pytest.raises(ConnectionError, match="closed"):
            deque(channel.receive_content(length), maxlen=0)


def test_without_memory_for_the_last_copy_the_one_before_is_kept(in_a_pause: tuple[Agent, Agent]) -> None:
    """The trainer is about to use it."""
    _, spare = in_a_pause
    spare.available = 1000.0
    spare.finish()
    assert spare.number == (100, 3, 1)


def test_an_agent_copies_the_state_until_several_others_keep_it(agents: tuple[Agent, Agent]) -> None:
    source, spare = agents
    spare.follow(source.snapshots.port)
    for step in (1, 2):
        source.save((100, 3, step))
        wait_until(lambda step=step: spare.number == (100, 3, step), "the copy")  # type: ignore[misc]
    spare.snapshots.follow(generation(4, source.snapshots.port, source.snapshots.port))
    assert not spare.memory.is_taken


def test_the_trainer_replaces_the_copy_that_is_not_being_sent(agents: tuple[Agent, Agent]) -> None:
    """It does not wait for a receiver that is slow."""
    source, _ = agents
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
