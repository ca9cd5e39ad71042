"""A Python that imports torch and this package before it runs a program, and a server that is forked from it.

    python preloaded.py SOCKET PROGRAM [ARGUMENT...]

imports what every trainer imports, forks the server, and runs the program as `python PROGRAM [ARGUMENT...]`
does. For each request over the socket, whose descriptor is `SOCKET`, the server forks a process that runs the
program, too. So the next trainer of an agent does not import torch again, which takes seconds of processor
time.

The server and its processes are forked twice, and their first parents exit. So the kernel makes the agent
their parent: it has requested the orphans of its descendants. The agent's side is
`adascale_worker.agent.trainer_starter`.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import gc
import json
import os
import signal
import socket
import sys
import time
import types
import warnings
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import TracebackType
from typing import Final

from adascale_worker.agent.trainer_starter import NUMBER_BYTES, PR_SET_PDEATHSIG, READY, SERVER_NAME

_ADOPTION_TIMEOUT: Final = 10.0
"""Seconds within which the agent must be the parent of a process whose first parent has exited."""
_PR_SET_NAME: Final = 15  # prctl(2)


def main() -> None:
    """Import, fork the server, and run the program; in processes that the server forks, too."""
    descriptor, *command = sys.argv[1:]
    if not sys.flags.safe_path:
        # The folder of this file. The program has its own.
        del sys.path[0]
    agent = os.getppid()
    channel = socket.socket(fileno=int(descriptor))
    is_server = False
    # The program itself tells what cannot be imported. Without a server it runs, too.
    with contextlib.suppress(Exception):
        _preload()
        is_server = _fork_orphan() == 0
    if is_server:
        _serve(channel, agent)
    channel.close()
    _run(command)


def _preload() -> None:
    """Import what every trainer imports.

    Nothing of it may look for a GPU: a process that is forked after that cannot use one.
    """
    import torch

    import adascale_worker.trainer  # noqa: F401

    # The first optimizer imports more of torch.
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    # A collection would write to all objects, whose memory the forked processes share. At the end, the
    # interpreter collects them, too.
    gc.freeze()
    atexit.register(gc.unfreeze)


def _serve(channel: socket.socket, agent: int) -> None:
    """Fork a process for each request, and return in it. Exit when the agent closes the socket."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _set_output(os.open(os.devnull, os.O_RDWR))
        _set_name(SERVER_NAME)
        _await_adoption(agent)
        channel.sendall(READY)
        while request := _receive(channel):
            environ, output = request
            pid = _fork_orphan()
            if pid == 0:
                break
            os.close(output)
            try:
                channel.sendall(pid.to_bytes(NUMBER_BYTES, "big"))
            except OSError:
                # The agent has not waited for the answer, and may have started another trainer.
                os.kill(pid, signal.SIGKILL)
        else:
            os._exit(0)
    except BaseException:  # noqa: BLE001 - the server must not run the program
        os._exit(1)
    _begin(environ, output, agent)


def _receive(channel: socket.socket) -> tuple[dict[str, str], int] | None:
    """Return the environment of a process and the descriptor of its output; None after the last request."""
    size, descriptors, _, _ = socket.recv_fds(channel, NUMBER_BYTES, 1)
    if not descriptors:
        return None
    body = channel.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL)
    environ: dict[str, str] = json.loads(body)
    return environ, descriptors[0]


def _begin(environ: dict[str, str], output: int, agent: int) -> None:
    """Make a process that the server has forked like one that was started for the program."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _set_output(output)
    _set_name(Path(sys.executable).name)
    _await_adoption(agent)
    os.environ.clear()
    os.environ.update(environ)
    if "numpy" in sys.modules:
        # As when it is imported. The module `random` does so after a fork.
        sys.modules["numpy"].random.seed()


def _fork_orphan() -> int:
    """Fork a process that leads a process group and whose parent exits. Returns its id, and 0 in it."""
    reading, writing = os.pipe()
    parent = _fork()
    if parent != 0:
        os.close(writing)
        answer = os.read(reading, NUMBER_BYTES)
        os.close(reading)
        os.waitpid(parent, 0)
        if not answer:
            raise OSError("no process could be forked")
        return int.from_bytes(answer, "big")
    try:
        pid = _fork()
        if pid != 0:
            os.setpgid(pid, pid)
            os.write(writing, pid.to_bytes(NUMBER_BYTES, "big"))
    except BaseException:  # noqa: BLE001 - only one of them goes on
        os._exit(1)
    if pid != 0:
        os._exit(0)
    os.close(reading)
    os.close(writing)
    return 0


def _fork() -> int:
    with warnings.catch_warnings():
        # There may be threads of libraries for linear algebra, which are prepared for it.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _await_adoption(agent: int) -> None:
    """Wait until the agent is the parent of this process, and have the kernel end it with the agent."""
    deadline = time.monotonic() + _ADOPTION_TIMEOUT
    while os.getppid() != agent:
        if time.monotonic() > deadline:
            os._exit(1)
        time.sleep(0.0005)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != agent:
        # It ended before the call of prctl.
        os._exit(1)


def _set_name(name: str) -> None:
    """Set the name of this process in /proc/PID/comm."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def _set_output(descriptor: int) -> None:
    """Write all output to this descriptor."""
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)


def _run(command: list[str]) -> None:
    """Run a program in this process, as the interpreter does with its first argument."""
    path = command[0]
    sys.argv[:] = command
    sys.orig_argv[sys.orig_argv.index(__file__) :] = command
    if not sys.flags.safe_path:
        sys.path.insert(0, str(Path(path).resolve().parent))
    main_module = types.ModuleType("__main__")
    loader = SourceFileLoader("__main__", path)
    main_module.__dict__.update(__file__=path, __builtins__=builtins, __cached__=None, __loader__=loader)
    sys.modules["__main__"] = main_module
    sys.excepthook = _show_without_own_frames
    source = Path(path).read_bytes()
    exec(compile(source, path, "exec", dont_inherit=True), main_module.__dict__)


def _show_without_own_frames(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """The hook for uncaught errors: shows the frames of the program, and not those that run it."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


if __name__ == "__main__":
    main()
