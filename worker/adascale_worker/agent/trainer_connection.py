"""The connection of an agent with its trainer, and what the trainer has reported over it.

Only processes of the same user, or of root, may connect.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from adascale_core.messages.channel import (
    Exiting,
    Finished,
    Holding,
    Limited,
    Ready,
    Refuse,
    Running,
    SavedElsewhere,
    Stalled,
    Stepped,
    Terminated,
    TrainerMessage,
    TrainingSaved,
    encode,
)
from adascale_core.messages.registration import ReplicaState
from adascale_core.names import MAX_ACCELERATOR_LENGTH, MAX_STALL_LENGTH
from adascale_worker.errors import WorkerError
from adascale_worker.process.environment import ONE_PROCESS, require_same_user


@dataclass(frozen=True)
class TrainerStatus:
    """The state of a trainer, from its messages."""

    port: int | None = None  # where it listens for other members; None before it is ready for a generation
    # its process id, which is not that of the agent's child process if a shell has started it. None
    # before it is ready, or if unknown.
    pid: int | None = None
    state: ReplicaState = ReplicaState.WAITING  # WAITING before its first generation, RUNNING or HOLDING
    generation: int = 0  # the generation that it runs in or has held for; 0 before the first
    step: int | None = None  # while it holds, the step of its state; None if it has no state
    lost: tuple[int, ...] = ()  # while it holds, the indices of the replicas whose loss it has noticed
    stepped: int = 0  # the newest generation in which it has finished a step; 0 if none
    final: bool = False  # whether the end of training is saved. The program may still evaluate.
    finished: bool = False  # whether training is finished, and the program ends by itself
    terminated: bool = False  # whether it was requested to save and exit
    # while no step ends: where it is, or that it waits for the others. Empty while steps end.
    stall: str = ""
    accelerator: str = ""  # the type of accelerator that it computes on; empty if unknown
    # the largest local batch size that it can still try, because a larger one did not fit into memory;
    # None if none has failed in its generation
    local_bsz_limit: int | None = None
    # the generation of the checkpoint that it cannot replace, because it runs in an earlier one
    saved: int = 0
    # the exit code with which it ends. None if it runs, was killed or has ended by os._exit.
    exit_code: int | None = None

    def after(self, message: TrainerMessage) -> TrainerStatus:
        """Return the status after a message."""
        match message:
            case Ready(port, accelerator, pid):
                return replace(self, port=port, accelerator=accelerator[:MAX_ACCELERATOR_LENGTH], pid=pid)
            case Running(generation):
                return replace(
                    self,
                    state=ReplicaState.RUNNING,
                    generation=generation,
                    step=None,
                    lost=(),
                    stall="",
                    local_bsz_limit=None,
                )
            case Holding(generation, step, lost):
                return replace(
                    self,
                    state=ReplicaState.HOLDING,
                    generation=generation,
                    step=step,
                    lost=tuple(sorted(set(lost))),
                )
            case Stepped(generation):
                return replace(self, stepped=max(self.stepped, generation))
            case Limited(limit):
                return replace(self, local_bsz_limit=limit)
            case SavedElsewhere(generation):
                return replace(self, saved=max(self.saved, generation))
            case Stalled(stall):
                return replace(self, stall=stall[:MAX_STALL_LENGTH])
            case TrainingSaved():
                return replace(self, final=True)
            case Finished():
                return replace(self, finished=True)
            case Terminated():
                return replace(self, terminated=True)
            case Exiting(code):
                return replace(self, exit_code=code)


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
        """Wait for the trainer, and return the connection and its process id; None if that is unknown."""
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
        """Delete the socket, and end the calls of other threads, which first accept waiting connections."""
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
