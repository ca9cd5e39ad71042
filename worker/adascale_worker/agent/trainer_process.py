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
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO

from adascale_core.failures import EXIT_FINISHED, EXIT_PEER_LOST, EXIT_REENTRY, signal_number
from adascale_core.messages.channel import AgentMessage, Limited, encode, trainer_message
from adascale_core.names import (
    ENV_AGENT_SOCKET,
    ENV_LOCAL_RANK,
    ENV_PROCESSES_PER_REPLICA,
    ENV_REPLICA_STORE,
    LIMIT_FILE_SUFFIX,
)
from adascale_worker.agent.trainer_connection import TrainerSocket, TrainerStatus

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
BACKGROUND_NICE = 19
BACKGROUND_TIME = 10.0
"""Seconds after which a trainer leaves the background, since it would not start on busy processors."""
_PR_SET_PDEATHSIG = 1  # prctl(2)

_unreaped: set[int] = set()
"""Process ids of trainers that are not reaped yet. Only their own thread may reap them."""


def start_process(
    command: Sequence[str], environ: Mapping[str, str], *, in_background: bool = False
) -> subprocess.Popen[str]:
    """Start a process that leads a process group, and dies with this process.

    Only the thread that waits for events may call this, see `reap_orphans`.
    """
    process = subprocess.Popen(
        command,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        # Ctrl-C in a terminal must only reach the agent, which lets the trainer save its state.
        process_group=0,
        preexec_fn=_prepare(os.getpid(), in_background=in_background),
        text=True,
        errors="replace",
    )
    _unreaped.add(process.pid)
    return process


def _prepare(parent: int, *, in_background: bool) -> Callable[[], None] | None:
    """Return the function that a child runs before the program, so that it dies with its agent."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)

    def prepare() -> None:
        if in_background:
            os.setpriority(os.PRIO_PROCESS, 0, BACKGROUND_NICE)
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


def can_leave_background() -> bool:
    """Whether this process may lower a nice value that it has raised.

    That takes the capability CAP_SYS_NICE or a resource limit RLIMIT_NICE, which most users and containers
    do not have.
    """
    if sys.platform != "linux":
        return False
    allowed = False

    def try_it() -> None:
        nonlocal allowed
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, BACKGROUND_NICE)
            os.setpriority(os.PRIO_PROCESS, 0, nice)
            allowed = True

    # Each thread of Linux has a nice value of its own.
    thread = threading.Thread(target=try_it, name="adascale-nice")
    thread.start()
    thread.join()
    return allowed


class FollowerProcesses:
    """The processes of a replica but the first."""

    def __init__(
        self,
        start: Callable[[Mapping[str, str]], subprocess.Popen[str]],
        environ: Mapping[str, str],
        count: int,
        forward: Callable[[IO[str]], None],
        on_failure: Callable[[], None],
    ) -> None:
        self._on_failure = on_failure
        self._killing = threading.Lock()
        """Held while a process is killed or reaped."""
        self._processes: list[subprocess.Popen[str]] = []
        self._threads: list[threading.Thread] = []
        own = {name: value for name, value in environ.items() if name != ENV_AGENT_SOCKET}
        self._processes += [start({**own, ENV_LOCAL_RANK: str(process)}) for process in range(1, count)]
        for each in self._processes:
            assert each.stdout is not None
            for target, argument in ((forward, each.stdout), (self._wait, each)):
                thread = threading.Thread(
                    target=target, args=[argument], name="adascale-follower", daemon=True
                )
                thread.start()
                self._threads.append(thread)

    @property
    def process_ids(self) -> list[int]:
        """Their process ids, in order."""
        return [each.pid for each in self._processes]

    def exit_code(self, first: int) -> int:
        """Return the exit code of the replica, after all processes have ended."""
        if first not in _CONSEQUENCES:
            return first
        codes = [each.returncode for each in self._processes]
        return next(
            (code for code in codes if code not in _CONSEQUENCES), first or next(filter(None, codes), 0)
        )

    def kill(self) -> None:
        """Kill those that run, and what else is in their process groups."""
        with self._killing:
            for each in self._processes:
                if each.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(each.pid, signal.SIGKILL)

    def end(self, grace: float, output_timeout: float) -> None:
        """Wait until they have ended, and kill them after `grace` seconds."""
        deadline = time.monotonic() + grace
        while time.monotonic() < deadline and any(each.returncode is None for each in self._processes):
            time.sleep(0.01)
        self.kill()
        for thread in self._threads:
            thread.join(output_timeout)

    def _wait(self, process: subprocess.Popen[str]) -> None:
        with contextlib.suppress(ChildProcessError):
            # Until it is reaped, its process id cannot be reused.
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        with self._killing:
            process.wait()
        if process.returncode not in INTENDED:
            self._on_failure()


class TrainerProcess:
    """A trainer process. In the background, it gets only the processor time that no other process uses.

    It leaves the background after `BACKGROUND_TIME` at the latest.
    """

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        on_change: Callable[[], None],
        *,
        processes: int = 1,
        in_background: bool = False,
    ) -> None:
        self._in_background = in_background and can_leave_background()
        start = partial(start_process, command, in_background=self._in_background)
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
        self._killing = threading.Lock()
        """Held while the child process is killed or reaped."""
        self._followers: FollowerProcesses | None = None
        """The other processes of the replica; None if it has one."""
        environ = {**DEFAULTS, **environ, "PYTHONUNBUFFERED": "1", ENV_AGENT_SOCKET: self._socket.path}
        if ENV_PROCESSES_PER_REPLICA in environ:
            environ |= {ENV_LOCAL_RANK: "0", ENV_REPLICA_STORE: self._socket.path_beside(REPLICA_STORE)}
        try:
            self._process = start(environ)
        except OSError:
            self._socket.close()
            raise
        if processes > 1:
            self._followers = FollowerProcesses(start, environ, processes, self._forward, self.kill)
        self._outgoing: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._exited = False
        self._background = threading.Timer(BACKGROUND_TIME, self._leave_background)
        self._background.daemon = True
        if self._in_background:
            self._background.start()
        output = threading.Thread(target=self._forward_output, name="adascale-output", daemon=True)
        output.start()
        reports = threading.Thread(target=self._connect, name="adascale-reports", daemon=True)
        reports.start()
        threading.Thread(
            target=self._wait_for_exit, args=[output, reports], name="adascale-exit", daemon=True
        ).start()

    @property
    def process_ids(self) -> list[int]:
        """The process ids of all processes of the replica."""
        return [self.pid, *(self._followers.process_ids if self._followers is not None else [])]

    @property
    def pid(self) -> int:
        """The process id of the child process."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Its exit code, -n for signal n; None until it has exited and its output is read."""
        if not self._exited:
            return None
        code = self._first_exit_code()
        return code if self._followers is None else self._followers.exit_code(code)

    def _first_exit_code(self) -> int:
        """Return the code that the trainer has reported if another process has started it, else its own.

        A shell may exit with the code of another command, as in `python train.py | tee log`, and launchers
        such as torchrun exit with 1 if the trainer is killed. A trainer without a report was killed.
        """
        code, status = self._process.returncode, self.status
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

    def leave_background(self) -> None:
        """Give all processes of the replica the nice value of the agent."""
        if self._in_background:
            self._in_background = False
            self._background.cancel()
            self._leave_background()

    def _leave_background(self) -> None:
        # Until the child is reaped, its process id cannot be reused.
        with self._killing:
            if self._process.returncode is not None:
                return
            groups = {*self.process_ids}
            with contextlib.suppress(OSError):
                # A launcher may have started the trainer in another process group.
                groups.add(os.getpgid(self._connected or self.pid))
            for group in groups:
                with contextlib.suppress(OSError):  # it has exited
                    os.setpriority(os.PRIO_PGRP, group, os.getpriority(os.PRIO_PROCESS, 0))

    def kill(self) -> None:
        """Kill it and what else is in the process group of the child process, unless that has exited."""
        # Until the child is reaped, its process id cannot be reused.
        with self._killing:
            if self._process.returncode is None:
                self._kill_group()
                self._kill_trainer()
        if self._followers is not None:
            self._followers.kill()

    def _wait_for_exit(self, output: threading.Thread, reports: threading.Thread) -> None:
        """Wait for its exit, and kill the processes that are left in the child's process group.

        Processes of data loaders would keep its connections and its output open.
        """
        with contextlib.suppress(ChildProcessError):
            # Until it is reaped, its process id cannot be reused.
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
            if self._descriptor is not None:
                # The child process may have exited before the trainer that it has started.
                select.select([self._descriptor], [], [])
            self._kill_group()
        with self._killing:
            self._process.wait()
        if self._followers is not None:
            grace = FINISH_GRACE if self._process.returncode in INTENDED else 0.0
            self._followers.end(grace, OUTPUT_TIMEOUT)
            self._read_limit()
        _unreaped.difference_update(self.process_ids)
        # A process that has moved to another group is not killed, and may keep the output open.
        output.join(OUTPUT_TIMEOUT)
        self._socket.stop()
        reports.join(OUTPUT_TIMEOUT)
        self._socket.close()
        if self._channel is not None:
            with contextlib.suppress(OSError):
                self._channel.shutdown(socket.SHUT_RDWR)
            self._outgoing.put(b"")
            self._channel.close()
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._exited = True
        self._on_change()

    def _read_limit(self) -> None:
        """Read what another process than the first has reported about its memory."""
        with contextlib.suppress(OSError, ValueError):
            path = self._socket.path_beside(f"{REPLICA_STORE}{LIMIT_FILE_SUFFIX}")
            message = trainer_message(Path(path).read_text(encoding="utf-8"))
            if isinstance(message, Limited):
                self.status = self.status.after(message)

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _kill_trainer(self) -> None:
        """Kill the trainer, which a launcher may have started in another process group."""
        if self._descriptor is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def _connect(self) -> None:
        """Wait for the connection of the trainer, and receive its messages until it is closed."""
        with contextlib.suppress(OSError):
            self._channel, self._connected = self._socket.accept()
            with contextlib.suppress(OSError):  # it has exited already
                if self._connected is not None and hasattr(os, "pidfd_open"):
                    self._descriptor = os.pidfd_open(self._connected)
            threading.Thread(
                target=self._socket.refuse_others, args=[self._connected], name="adascale-others", daemon=True
            ).start()
            threading.Thread(
                target=self._send, args=[self._channel], name="adascale-assignments", daemon=True
            ).start()
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

    def _forward_output(self) -> None:
        assert self._process.stdout is not None
        self._forward(self._process.stdout)

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
