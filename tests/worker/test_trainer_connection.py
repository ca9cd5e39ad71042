"""The socket at which an agent waits for its trainer: one is accepted, others are refused."""

import errno
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from adascale_worker.agent import trainer_process
from adascale_worker.agent.trainer_process import TrainerSocket
from adascale_worker.errors import WorkerError

NOBODY = 65534


@pytest.fixture
def waiting() -> Iterator[TrainerSocket]:
    opened = TrainerSocket()
    yield opened
    opened.close()


def connect(waiting: TrainerSocket) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(60)
    connection.connect(waiting.path)
    return connection


def test_only_this_user_can_reach_the_socket(waiting: TrainerSocket) -> None:
    folder = Path(waiting.path).parent
    assert (folder.stat().st_mode & 0o777, folder.stat().st_uid) == (0o700, os.geteuid())


def test_a_long_name_of_the_folder_for_temporary_files_does_no_harm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    waiting = TrainerSocket()
    try:
        with connect(waiting):
            waiting.accept()[0].close()
    finally:
        waiting.close()
    assert not list(folder.iterdir())


def test_a_container_whose_root_file_system_is_read_only_has_a_socket_in_shared_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make: Any = tempfile.mkdtemp
    memory = Path(make(prefix="shm-", dir="/tmp"))  # The path of a socket is short.
    refused: set[object] = {None, "/tmp"}

    def make_folder(**options: Any) -> Any:
        if options["dir"] in refused:
            raise OSError(errno.EROFS, "Read-only file system")
        return make(**options)

    monkeypatch.setattr("tempfile.mkdtemp", make_folder)
    monkeypatch.setattr(trainer_process, "SHARED_MEMORY", memory)
    waiting = TrainerSocket()
    assert Path(waiting.path).parents[1] == memory
    waiting.close()
    refused.add(memory)
    with pytest.raises(WorkerError, match=r"Mount a volume at /tmp"):
        TrainerSocket()
    memory.rmdir()


def test_the_first_trainer_is_accepted_and_others_are_refused_with_a_reason(waiting: TrainerSocket) -> None:
    with connect(waiting) as first, connect(waiting) as second:
        accepted, process = waiting.accept()
        assert process == os.getpid()
        thread = threading.Thread(target=waiting.refuse_others, args=[process])
        thread.start()
        message = json.loads(second.makefile().readline())
        assert message["type"] == "refuse"
        assert f"already, process {os.getpid()}" in message["reason"]
        assert "let the command start one (torchrun --nproc-per-node 1" in message["reason"]
        with accepted:
            accepted.sendall(b"assign\n")
            assert first.makefile().readline() == "assign\n"
        waiting.stop()
        thread.join()
    assert not Path(waiting.path).parent.exists()


def test_a_wait_for_a_trainer_ends_when_the_socket_is_closed(waiting: TrainerSocket) -> None:
    ended = threading.Event()

    def wait() -> None:
        with pytest.raises(OSError, match=r"Invalid argument|Bad file descriptor"):
            waiting.accept()
        ended.set()

    thread = threading.Thread(target=wait)
    thread.start()
    waiting.close()
    assert ended.wait(60)
    thread.join()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_a_process_of_another_user_is_refused(waiting: TrainerSocket) -> None:
    path = Path(waiting.path)
    path.parent.chmod(0o711)
    path.chmod(0o666)
    program = (
        "import os, socket, sys; os.setuid(int(sys.argv[2]));"
        "it = socket.socket(socket.AF_UNIX); it.connect(sys.argv[1]);"
        "print(it.makefile().readline())"
    )
    command = [sys.executable, "-S", "-c", program, waiting.path, str(NOBODY)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        accepted: list[int | None] = []

        def accept() -> None:
            connection, process = waiting.accept()
            accepted.append(process)
            connection.close()

        thread = threading.Thread(target=accept)
        thread.start()
        output, _ = other.communicate(timeout=60)
        assert f"belongs to user {NOBODY}" in json.loads(output)["reason"]
        assert not accepted
        with connect(waiting):
            thread.join()
    assert accepted == [os.getpid()]
