"""The Unix socket at which an agent waits for its trainer.

The trainer finds it by its path, so other programs, such as launchers, may be between the agent and it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
from pathlib import Path

from adascale_core.messages.channel import Refuse, encode
from adascale_worker.errors import WorkerError
from adascale_worker.process.environment import ONE_PROCESS
from adascale_worker.process.unix_peer import require_same_user

MAX_PATH_LENGTH = 100
"""Bytes. The kernel allows 108 on Linux, and 104 on other systems."""


SHARED_MEMORY = Path("/dev/shm")
"""Is writable in a container whose root file system is read-only, and that has no volume at /tmp."""


class TrainerSocket:
    """Accepts the connection of one trainer, and refuses other connections."""

    def __init__(self) -> None:
        self._folder = _make_folder()
        self.path = f"{self._folder}/trainer"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen(128)

    def path_beside(self, name: str) -> str:
        """Return the path of a file in the same folder, which is deleted with the socket."""
        return f"{self._folder}/{name}"

    def accept(self) -> tuple[socket.socket, int | None]:
        """Wait for the trainer."""
        while True:
            connection, _ = self._listener.accept()
            try:
                return connection, require_same_user(connection)
            except PermissionError as error:
                _refuse(connection, f"the agent of this replica refuses the connection: {error}")

    def refuse_others(self, trainer: int | None) -> None:
        """Refuse all further connections, until this socket is closed."""
        process = "" if trainer is None else f", process {trainer}"
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                _refuse(
                    connection,
                    f"the command of the job has started a trainer already{process}, but a replica is one "
                    f"process: {ONE_PROCESS}",
                )

    def stop(self) -> None:
        """Delete the socket, and end the calls of other threads when they have accepted who has connected."""
        shutil.rmtree(self._folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Delete the socket, and accept nothing more."""
        self.stop()
        self._listener.close()


def _make_folder() -> str:
    """Make a folder for temporary files whose path is short enough for a socket."""
    for parent in (None, "/tmp", SHARED_MEMORY):
        with contextlib.suppress(OSError):
            folder = tempfile.mkdtemp(prefix="adascale-agent-", dir=parent)
            if len(os.fsencode(folder)) + len("/trainer") <= MAX_PATH_LENGTH:
                return folder
            shutil.rmtree(folder)
    raise WorkerError(
        f"the agent has no folder for temporary files: neither TMPDIR, /tmp nor {SHARED_MEMORY} can be "
        "written. Mount a volume at /tmp, such as an emptyDir"
    )


def _refuse(connection: socket.socket, reason: str) -> None:
    with connection, contextlib.suppress(OSError):
        connection.sendall(encode(Refuse(reason)))
