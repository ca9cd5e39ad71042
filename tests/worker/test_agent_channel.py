"""Tests of a trainer's connection with its agent."""

import queue
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from adascale_core.messages.channel import Assignment, Hold, Limited, Release, Terminate, encode
from adascale_worker.membership.generations import Membership
from adascale_worker.membership.links import AgentChannel

LONG = 60.0
"""Seconds that no wait of these tests may take."""


class Receiver:
    """Collects the messages that a trainer is to act on."""

    def __init__(self) -> None:
        self.received: queue.Queue[Assignment | Hold | Terminate] = queue.Queue()

    def assign(self, assignment: Assignment) -> None:
        self.received.put(assignment)

    def hold(self, generation: int) -> None:
        self.received.put(Hold(generation))

    def terminate(self) -> None:
        self.received.put(Terminate())


@pytest.fixture
def connection() -> Iterator[tuple[AgentChannel, socket.socket]]:
    own, agent = socket.socketpair()
    with own, agent:
        yield AgentChannel(own), agent


def test_what_happens_between_two_waits_ends_the_second_one(
    connection: tuple[AgentChannel, socket.socket],
) -> None:
    channel, _agent = connection
    began = time.monotonic()
    channel.notify()
    channel.wait(LONG)
    threading.Timer(0.05, channel.notify).start()
    channel.wait(LONG)
    assert time.monotonic() - began < LONG


def test_a_message_that_arrived_before_the_wait_ends_it(
    connection: tuple[AgentChannel, socket.socket],
) -> None:
    channel, agent = connection
    receiver = Receiver()
    channel.start(cast(Membership, receiver))
    agent.sendall(encode(Release(3, last=True)) + encode(Hold(4)))
    assert receiver.received.get(timeout=LONG) == Hold(4)
    began = time.monotonic()
    channel.wait(LONG)
    assert time.monotonic() - began < LONG
    assert channel.newest == Release(3, last=True)
    agent.close()
    while not channel.is_closed:
        channel.wait(LONG)
    assert time.monotonic() - began < LONG


def test_a_trainer_saves_and_exits_when_its_agent_requests_it_or_is_gone(
    connection: tuple[AgentChannel, socket.socket],
) -> None:
    channel, agent = connection
    receiver = Receiver()
    channel.start(cast(Membership, receiver))
    agent.sendall(encode(Terminate()))
    assert receiver.received.get(timeout=LONG) == Terminate()
    assert not channel.is_closed
    agent.close()
    assert receiver.received.get(timeout=LONG) == Terminate()
    assert channel.is_closed


def test_a_later_process_whose_agent_is_gone_sends_no_limit(tmp_path: Path) -> None:
    """An error in its place would hide that it lacks memory."""
    AgentChannel(None, str(tmp_path / "gone" / "processes")).send(Limited(4))
    AgentChannel(None, str(tmp_path / "processes")).send(Limited(4))
    assert [path.name for path in tmp_path.iterdir()] == ["processes-limit"]
