"""Tests of a trainer's connection with its agent."""

import queue
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from adascale_core.messages.channel import AgentMessage, Limited, Release, Terminate, encode
from adascale_worker.membership.links import AgentChannel

LONG = 60.0
"""Seconds that no wait of these tests may take."""


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
    received: queue.Queue[AgentMessage] = queue.Queue()
    channel.start(received.put)
    agent.sendall(encode(Release(3, last=True)))
    assert received.get(timeout=LONG) == Release(3, last=True)
    began = time.monotonic()
    channel.wait(LONG)
    assert time.monotonic() - began < LONG
    agent.close()
    while not channel.is_closed:
        channel.wait(LONG)
    assert time.monotonic() - began < LONG


def test_a_trainer_saves_and_exits_when_its_agent_requests_it_or_is_gone(
    connection: tuple[AgentChannel, socket.socket],
) -> None:
    channel, agent = connection
    received: queue.Queue[AgentMessage] = queue.Queue()
    channel.start(received.put)
    agent.sendall(encode(Terminate()))
    assert received.get(timeout=LONG) == Terminate()
    assert not channel.is_closed
    agent.close()
    assert received.get(timeout=LONG) == Terminate()
    assert channel.is_closed


def test_a_later_process_whose_agent_is_gone_sends_no_limit(tmp_path: Path) -> None:
    """An error in its place would hide that it lacks memory."""
    AgentChannel(None, str(tmp_path / "gone" / "processes")).send(Limited(4))
    AgentChannel(None, str(tmp_path / "processes")).send(Limited(4))
    assert [path.name for path in tmp_path.iterdir()] == ["processes-limit"]
