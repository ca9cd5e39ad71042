"""Connections of a process group over which nothing arrives any more."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from adascale_worker.membership import gloo
from chaos import network

WAITS = """
import socket, subprocess, time
from adascale_worker.membership import gloo

subprocess.run(["ip", "link", "set", "dev", "lo", "up"], check=True)
listener = socket.create_server(("127.0.0.1", 0))
waits = socket.create_connection(listener.getsockname())
other, _ = listener.accept()
sockets = gloo.open_sockets()
connections = gloo.connected_to(sockets, gloo.listening_ports(sockets))
assert len(connections) == 2
gloo.keep_alive(connections, 3.0)
time.sleep(4.0)
other.send(b".")
assert waits.recv(1) == b".", "a connection fails because nothing is sent"
subprocess.run(["ip", "link", "set", "dev", "lo", "down"], check=True)
try:
    waits.recv(1)
except OSError as error:
    print("failed:", error.strerror)
"""


RECEIVES = """
import os, subprocess, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
from adascale_worker.membership import gloo
from adascale_worker.torch_private.distributed import is_lost_peer

subprocess.run(["ip", "link", "set", "dev", "lo", "up"], check=True)
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
child = os.fork()
rank = 0 if child else 1
before = gloo.open_sockets()
options = {"rank": rank, "world_size": 2, "timeout": timedelta(hours=1)}
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", **options)
tensor = torch.ones(4)
dist.all_reduce(tensor)
gloo.keep_alive(gloo.open_sockets() - before, 3.0)
if rank == 1:
    time.sleep(60)
    os._exit(0)
subprocess.run(["ip", "link", "set", "dev", "lo", "down"], check=True)
try:
    dist.recv(tensor, src=1)
except RuntimeError as error:
    print("lost:", is_lost_peer(error), error, flush=True)
os.kill(child, 9)
os._exit(0)
"""


def connection(listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    """Return both ends of a connection over TCP."""
    return socket.create_connection(listener.getsockname()), listener.accept()[0]


def test_a_socket_that_gets_the_number_of_a_closed_one_is_not_shut_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        before = gloo.open_sockets()
        (one, its_peer), duplicate = connection(listener), os.dup
        sockets = gloo.open_sockets() - before
        other, peer = connection(listener)

        def dup(descriptor: int) -> int:
            """Another thread closes a connection of the group at the last moment, and opens another one."""
            if descriptor in (one.fileno(), its_peer.fileno()):
                os.dup2(other.fileno(), descriptor)
            return duplicate(descriptor)

        with one, its_peer, other, peer:
            monkeypatch.setattr(os, "dup", dup)
            gloo.shut_down(sockets)
            monkeypatch.undo()
            peer.send(b".")
            assert other.recv(1) == b"."


@pytest.mark.slow
def test_what_waits_on_a_connection_fails_if_nothing_arrives_from_the_other_host() -> None:
    if missing := network.missing():
        pytest.skip(f"the network cannot be interrupted here: {missing}")
    command = [*network.UNSHARE, sys.executable, "-c", WAITS]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.stdout.startswith("failed: "), ended.stdout + ended.stderr


@pytest.mark.slow
def test_a_collective_whose_peer_can_no_longer_be_reached_has_lost_it(tmp_path: Path) -> None:
    if missing := network.missing():
        pytest.skip(f"the network cannot be interrupted here: {missing}")
    command = [*network.UNSHARE, sys.executable, "-c", RECEIVES, str(tmp_path / "store")]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    assert ended.stdout.startswith("lost: True"), ended.stdout
