"""Tests of a trainer's connection with its agent."""

import json
import queue
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from adascale_worker.membership.agent_channel import AgentChannel, Release

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
    handled = threading.Event()
    channel.start(lambda _: None, lambda _: handled.set(), lambda: None)
    agent.sendall(json.dumps({"type": "release", "generation": 3, "last": True}).encode() + b"\n")
    agent.sendall(json.dumps({"type": "hold", "generation": 4}).encode() + b"\n")
    assert handled.wait(LONG)
    began = time.monotonic()
    channel.wait(LONG)
    assert time.monotonic() - began < LONG
    assert channel.newest == Release(3, is_last=True)
    agent.close()
    while not channel.is_closed:
        channel.wait(LONG)
    assert time.monotonic() - began < LONG


def test_a_trainer_saves_and_exits_when_its_agent_requests_it_or_is_gone(
    connection: tuple[AgentChannel, socket.socket],
) -> None:
    channel, agent = connection
    requests: queue.Queue[None] = queue.Queue()
    channel.start(lambda _: None, lambda _: None, lambda: requests.put(None))
    agent.sendall(json.dumps({"type": "terminate"}).encode() + b"\n")
    requests.get(timeout=LONG)
    assert not channel.is_closed
    agent.close()
    requests.get(timeout=LONG)
    assert channel.is_closed
