"""Connections of a process group over which nothing arrives any more."""

import subprocess
import sys

import pytest

from chaos import network

WAITS = """
import socket, subprocess, time
from adascale_worker import gloo_sockets

subprocess.run(["ip", "link", "set", "dev", "lo", "up"], check=True)
listener = socket.create_server(("127.0.0.1", 0))
waits = socket.create_connection(listener.getsockname())
other, _ = listener.accept()
sockets = gloo_sockets.open_sockets()
connections = gloo_sockets.connected_to(sockets, gloo_sockets.listening_ports(sockets))
assert len(connections) == 2
gloo_sockets.keep_alive(connections, 3.0)
time.sleep(4.0)
other.send(b".")
assert waits.recv(1) == b".", "a connection fails because nothing is sent"
subprocess.run(["ip", "link", "set", "dev", "lo", "down"], check=True)
try:
    waits.recv(1)
except OSError as error:
    print("failed:", error.strerror)
"""


@pytest.mark.slow
def test_what_waits_on_a_connection_fails_if_nothing_arrives_from_the_other_host() -> None:
    if missing := network.missing():
        pytest.skip(f"the network cannot be interrupted here: {missing}")
    command = [*network.UNSHARE, sys.executable, "-c", WAITS]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.stdout.startswith("failed: "), ended.stdout + ended.stderr
