"""A trainer as a child process of its agent, or as a process that this child has started.

Such a child is a shell or a launcher, for example. It dies with its agent, which forwards its output and
keeps the last lines. Over a connection that lasts for its whole life, as lines of JSON, the agent assigns the
trainer to generations, and the trainer reports what it does.

A replica of several processes has other trainers beside the one that communicates with the agent. They run
the same program, and end with the first: none of them can continue without the others.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from adascale_core.failures import EXIT_FINISHED, EXIT_PEER_LOST, EXIT_REENTRY, signal_number
from adascale_core.messages.channel import (
    AgentMessage,
    Exiting,
    Finished,
    Holding,
    Limited,
    Ready,
    Refuse,
    Running,
    SavedElsewhere,
    Spent,
    Stalled,
    Stepped,
    Terminated,
    TrainerMessage,
    TrainingSaved,
    encode,
    trainer_message,
)
from adascale_core.messages.registration import ReplicaState
from adascale_core.names import (
    ENV_AGENT_SOCKET,
    ENV_LOCAL_RANK,
    ENV_PROCESSES_PER_REPLICA,
    ENV_REPLICA_STORE,
    LIMIT_FILE_SUFFIX,
    MAX_ACCELERATOR_LENGTH,
    MAX_STALL_LENGTH,
)
from adascale_worker.errors import WorkerError
from adascale_worker.process.environment import ONE_PROCESS, require_same_user

LOG_LINES = 40
"""Last lines of output that are kept for the report of a failure."""
MAX_LINE_LENGTH = 1000
OUTPUT_TIMEOUT = 2.0
"""Seconds after the exit of a trainer within which the rest of its output is read."""
DEFAULTS = {"THP_MEM_ALLOC_ENABLE": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
"""Environment of a trainer unless the user has set it.

With the first, torch asks for transparent huge pages for tensors of 2 MiB and more on the host, which the
kernel maps with 512 times fewer faults. Without the second, torch ends a process whose collective on a GPU
fails, but a trainer stays in its process when a peer is lost: it aborts the collective itself."""
REPLICA_STORE = "processes"
"""Name of the file in which the processes of a replica find each other."""
FINISH_GRACE = 10.0
"""Seconds that the other processes of a replica have to end after the first has ended without an error."""
INTENDED = (EXIT_FINISHED, EXIT_REENTRY)
"""Exit codes with which all processes of a replica end by themselves, each after its own exit functions."""
_CONSEQUENCES = (0, EXIT_PEER_LOST, -signal.SIGKILL)
"""Exit codes of processes that end because another one has ended."""
_PR_SET_PDEATHSIG = 1  # prctl(2)

_unreaped: set[int] = set()
"""Process ids of trainers that are not reaped yet. Only their own thread may reap them."""


class ChildProcess:
    """A process that leads a process group, and dies with this process.

    Only the thread that waits for events may make one, see `reap_orphans`.
    """

    def __init__(
        self, command: Sequence[str], environ: Mapping[str, str], forward: Callable[[IO[str]], None]
    ) -> None:
        self._process = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # Ctrl-C in a terminal must only reach the agent, which lets the trainer save its state.
            process_group=0,
            preexec_fn=_die_with_parent(os.getpid()),
            text=True,
            errors="replace",
        )
        _unreaped.add(self._process.pid)
        self.pid = self._process.pid
        self._killing = threading.Lock()
        """Held while it is killed or reaped: until it is reaped, its process id cannot be reused."""
        self._output = threading.Thread(
            target=forward, args=[self._process.stdout], name="adascale-output", daemon=True
        )
        self._output.start()

    @property
    def exit_code(self) -> int | None:
        """Its exit code; None until `reap` has returned."""
        return self._process.returncode

    def kill(self) -> None:
        """Kill it and what else is in its process group, unless it is reaped."""
        with self._killing:
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        """Wait until it has ended."""
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

    def reap(self) -> None:
        """Kill what it has left in its process group, and wait for it.

        Processes of data loaders would keep its connections and its output open.
        """
        self.kill()
        with self._killing:
            self._process.wait()

    def finish(self) -> None:
        """Wait for the rest of its output. A process that has moved to another group may keep it open."""
        _unreaped.discard(self.pid)
        self._output.join(OUTPUT_TIMEOUT)


def _die_with_parent(parent: int) -> Callable[[], None] | None:
    """Return the function that a child runs before the program, so that it dies with its agent."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            raise ProcessLookupError("the agent has ended before the call of prctl")

    return prepare


def reap_orphans() -> None:
    """Reap exited processes that trainers have left behind, if the kernel makes this process their parent.

    They would stay as zombies. Call it from time to time, in the thread that starts trainers.
    """
    if os.getpid() != 1:
        return
    with contextlib.suppress(ChildProcessError):
        while True:
            # Without reaping: the exit code of a trainer is for its own thread.
            exited = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if exited is None or exited.si_pid in _unreaped:
                return
            os.waitpid(exited.si_pid, os.WNOHANG)


@dataclass(frozen=True)
class TrainerStatus:
    """The state of a trainer, from its messages."""

    port: int | None = None  # where it listens for other members; None before it is ready for a generation
    state_port: int = 0  # where it sends its state to replicas that wait; 0 if nowhere
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
    spent: Spent = field(default_factory=Spent)  # how it has spent its time
    # the exit code with which it ends. None if it runs, was killed or has ended by os._exit.
    exit_code: int | None = None

    def after(self, message: TrainerMessage) -> TrainerStatus:
        """Return the status after a message."""
        # Most messages have fields of the status.
        changes: dict[str, Any] = dict(vars(message))
        match message:
            case Ready():
                changes["accelerator"] = message.accelerator[:MAX_ACCELERATOR_LENGTH]
            case Running():
                changes |= {"state": ReplicaState.RUNNING, "step": None, "lost": ()}
                changes |= {"stall": "", "local_bsz_limit": None}
            case Holding():
                changes |= {"state": ReplicaState.HOLDING, "lost": tuple(sorted(set(message.lost)))}
            case Stepped(generation):
                changes = {"stepped": max(self.stepped, generation)}
            case SavedElsewhere(generation):
                changes = {"saved": max(self.saved, generation)}
            case Spent():
                changes = {"spent": message}
            case Stalled(stall):
                changes = {"stall": stall[:MAX_STALL_LENGTH]}
            case TrainingSaved():
                changes = {"final": True}
            case Finished():
                changes = {"finished": True}
            case Terminated():
                changes = {"terminated": True}
            case Exiting(code):
                changes = {"exit_code": code}
        return replace(self, **changes)


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


class TrainerProcess:
    """A trainer process, and the other processes of its replica."""

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        on_change: Callable[[], None],
        *,
        processes: int = 1,
    ) -> None:
        self._lines: deque[str] = deque(maxlen=LOG_LINES)
        self._on_change = on_change
        self._socket = TrainerSocket()
        self.status = TrainerStatus()
        """What it has reported."""
        self._channel: socket.socket | None = None
        self._connected: int | None = None
        """The process that has connected; None if there is none, or if it is unknown."""
        self._descriptor: int | None = None
        """Of that process: its process id can be reused."""
        self._closing = threading.Lock()
        """Held while this descriptor is used or closed."""
        environ = {**DEFAULTS, **environ, "PYTHONUNBUFFERED": "1"}
        if ENV_PROCESSES_PER_REPLICA in environ:
            environ[ENV_REPLICA_STORE] = self._socket.path_beside(REPLICA_STORE)
        of_first = {ENV_AGENT_SOCKET: self._socket.path}
        if ENV_PROCESSES_PER_REPLICA in environ:
            of_first[ENV_LOCAL_RANK] = "0"
        try:
            self._first = ChildProcess(command, {**environ, **of_first}, self._forward)
        except OSError:
            self._socket.close()
            raise
        self._others = [
            ChildProcess(command, {**environ, ENV_LOCAL_RANK: str(process)}, self._forward)
            for process in range(1, processes)
        ]
        self._outgoing: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._exited = False
        others = [_thread(self._wait_for_other, each) for each in self._others]
        reports = _thread(self._connect)
        _thread(self._wait_for_exit, others, reports)

    @property
    def pid(self) -> int:
        """The process id of the child process."""
        return self._first.pid

    @property
    def exit_code(self) -> int | None:
        """Its exit code, -n for signal n; None until it has exited and its output is read.

        That of a replica is the first code which is no consequence of the end of another process.
        """
        if not self._exited:
            return None
        codes = [self._first_exit_code(), *(each.exit_code or 0 for each in self._others)]
        first = next(filter(None, codes), 0)
        return next((code for code in codes if code not in _CONSEQUENCES), first)

    def _first_exit_code(self) -> int:
        """Return the code that the trainer has reported if another process has started it, else its own.

        A shell may exit with the code of another command, as in `python train.py | tee log`, and launchers
        such as torchrun exit with 1 if the trainer is killed. A trainer without a report was killed.
        """
        code, status = self._first.exit_code or 0, self.status
        trainer = status.pid if self._connected is None else self._connected
        if trainer in (None, self.pid):
            return code
        if status.exit_code is None:
            has_signal = signal_number(code) is not None
            return code if status.port is None or has_signal else -signal.SIGKILL
        return status.exit_code or code

    @property
    def log(self) -> str:
        """The last lines of its output."""
        return "\n".join(self._lines)

    def send(self, message: AgentMessage) -> None:
        """Send it a message. Does not wait until it is received."""
        self._outgoing.put(encode(message))

    def kill(self) -> None:
        """Kill all processes of the replica, and what else is in their process groups."""
        for each in (self._first, *self._others):
            each.kill()
        # A launcher may have started the trainer in another process group.
        with self._closing, contextlib.suppress(ProcessLookupError):
            if self._descriptor is not None:
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def _wait_for_other(self, process: ChildProcess) -> None:
        """Wait for the exit of another process than the first, and kill all of them after a failure."""
        process.wait()
        process.reap()
        if process.exit_code not in INTENDED:
            self.kill()

    def _wait_for_exit(self, others: Sequence[threading.Thread], reports: threading.Thread) -> None:
        """Wait for the exit of all processes, and close what belongs to them."""
        self._first.wait()
        if self._descriptor is not None:
            # The child process may have exited before the trainer that it has started.
            select.select([self._descriptor], [], [])
        self._first.reap()
        deadline = time.monotonic() + (FINISH_GRACE if self._first.exit_code in INTENDED else 0.0)
        for thread in others:
            thread.join(max(deadline - time.monotonic(), 0.0))
        for each in self._others:
            each.kill()
        for thread in others:
            thread.join(OUTPUT_TIMEOUT)
        if self._others:
            self._read_limit()
        for each in (self._first, *self._others):
            each.finish()
        self._socket.stop()
        reports.join(OUTPUT_TIMEOUT)
        self._socket.close()
        if self._channel is not None:
            with contextlib.suppress(OSError):
                self._channel.shutdown(socket.SHUT_RDWR)
            self._outgoing.put(b"")
            self._channel.close()
        with self._closing:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None
        self._exited = True
        self._on_change()

    def _read_limit(self) -> None:
        """Read what another process than the first has reported about its memory."""
        with contextlib.suppress(OSError, ValueError):
            path = self._socket.path_beside(f"{REPLICA_STORE}{LIMIT_FILE_SUFFIX}")
            message = trainer_message(Path(path).read_text(encoding="utf-8"))
            if isinstance(message, Limited):
                self.status = self.status.after(message)

    def _connect(self) -> None:
        """Wait for the connection of the trainer, and receive its messages until it is closed."""
        with contextlib.suppress(OSError):
            self._channel, self._connected = self._socket.accept()
            with contextlib.suppress(OSError):  # it has exited already
                if self._connected is not None and hasattr(os, "pidfd_open"):
                    self._descriptor = os.pidfd_open(self._connected)
            _thread(self._socket.refuse_others, self._connected)
            _thread(self._send, self._channel)
            self._receive(self._channel)

    def _receive(self, channel: socket.socket) -> None:
        with channel.makefile("r", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                try:
                    message = trainer_message(line)
                except ValueError:
                    print(f"adascale-agent: the trainer sent {line[:100]!r}, which is ignored", flush=True)
                    continue
                if message is not None:
                    self.status = self.status.after(message)
                    self._on_change()

    def _send(self, channel: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while line := self._outgoing.get():
                channel.sendall(line)

    def _forward(self, output: IO[str]) -> None:
        with output as lines:
            for line in lines:
                self._lines.append(line.rstrip("\n")[:MAX_LINE_LENGTH])
                try:
                    sys.stdout.write(line)
                    sys.stdout.flush()
                except OSError:
                    # The reader of the agent's output has closed it. Training continues.
                    continue


def _thread(target: Callable[..., None], *args: object) -> threading.Thread:
    """Start a thread that does not keep the agent from ending."""
    thread = threading.Thread(target=target, args=args, name=f"adascale{target.__name__}", daemon=True)
    thread.start()
    return thread
