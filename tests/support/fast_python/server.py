"""Runs programs in processes that are forked from this one, which has torch imported.

    python -m support.fast_python.server SOCKET [MODULE ...]

imports more modules, and prints `ready` once it listens. Each connection is a program: see `command.py`.
"""

from __future__ import annotations

import array
import atexit
import fcntl
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from support.fast_python.command import NUMBER_SIZE


def import_what_programs_import(modules: list[str]) -> None:
    """Import it and more modules, without anything that starts a thread."""
    import torch
    import torch._dynamo
    import torch.distributed.run

    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    import adascale_controller.cli  # noqa: F401
    import adascale_worker.trainer  # noqa: F401

    for module in modules:
        importlib.import_module(module)
    # No program looks through what is imported, or copies it, when it collects its garbage.
    gc.freeze()


class Server:
    """Forks a process for each connection, and sends its exit code.

    Args:
        address: the path of the socket.
    """

    def __init__(self, address: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen(128)
        self._ended, self._wakeup = socket.socketpair()
        self._wakeup.setblocking(False)
        signal.set_wakeup_fd(self._wakeup.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._ended, selectors.EVENT_READ)
        self._channels: dict[int, socket.socket] = {}

    def serve(self) -> NoReturn:
        """Fork for each request."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._ended:
                    self._ended.recv(4096)
                elif key.data in self._channels:
                    self._forward(key.data)
            self._reap()

    def _accept(self) -> None:
        channel, _ = self._listener.accept()
        size, ancillary, *_ = channel.recvmsg(NUMBER_SIZE, socket.CMSG_SPACE(4 * 250))
        descriptors = array.array("i")
        for _, _, data in ancillary:
            descriptors.frombytes(data)
        body = channel.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL) if size else b""
        if not body:  # the command was killed
            channel.close()
            return
        pid = os.fork()
        if pid == 0:
            self._selector.close()
            for ours in (channel, *self._channels.values(), self._listener, self._ended, self._wakeup):
                ours.close()
            run(json.loads(body), list(descriptors))
        for each in descriptors:
            os.close(each)
        self._channels[pid] = channel
        self._selector.register(channel, selectors.EVENT_READ, pid)
        self._send(channel, pid)

    def _forward(self, pid: int) -> None:
        """Send a program the signals that its command has got; kill it if the command was killed."""
        try:
            numbers = self._channels[pid].recv(64)
        except ConnectionResetError:
            numbers = b""
        if not numbers:
            self._selector.unregister(self._channels[pid])
        for number in numbers or [signal.SIGKILL]:
            os.kill(pid, number)

    def _reap(self) -> None:
        while self._channels:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            channel = self._channels.pop(pid)
            with suppress(KeyError):
                self._selector.unregister(channel)
            self._send(channel, os.waitstatus_to_exitcode(status))
            channel.close()

    def _send(self, channel: socket.socket, number: int) -> None:
        with suppress(OSError):  # the command was killed
            channel.sendall(number.to_bytes(NUMBER_SIZE, "big", signed=True))


def run(request: dict[str, Any], descriptors: list[int]) -> NoReturn:
    """Run a program as the process of its command would."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    os.setpgid(0, 0)
    take_descriptors(descriptors, request["descriptors"])
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environ"])
    if "PYTHONUNBUFFERED" in os.environ:
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    added = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*added, *(path for path in sys.path[1:] if path not in added)]
    code = execute(request["arguments"])
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    # Without the end of the interpreter, which takes half a second with torch: other tests have it.
    os._exit(code & 0xFF)


def take_descriptors(received: list[int], wanted: list[int]) -> None:
    """Give descriptors the numbers that they had in the process that sent them."""
    unused = max(wanted) + 1
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD, unused) for each in received]
    for each in received:
        os.close(each)
    for each, number in zip(moved, wanted, strict=True):
        os.dup2(each, number)
        os.close(each)


def execute(arguments: list[str]) -> int:
    """Execute a program. Returns its exit code."""
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            sys.path.insert(0, str(Path.cwd()))
            sys.modules.pop(arguments[1], None)
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        elif arguments[0] == "-c":
            sys.argv = ["-c", *arguments[2:]]
            sys.path.insert(0, "")
            namespace = {"__name__": "__main__"}
            exec(compile(arguments[1], "<string>", "exec"), namespace)
        else:
            sys.argv = arguments
            sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as exit_:
        if exit_.code is None or isinstance(exit_.code, int):
            return exit_.code or 0
        print(exit_.code, file=sys.stderr)
        return 1
    except BaseException as error:  # noqa: BLE001 - the interpreter reports it so
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
            trace = trace.tb_next
        sys.last_value = error
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        return 1
    return 0


if __name__ == "__main__":
    import_what_programs_import(sys.argv[2:])
    server = Server(sys.argv[1])
    print("ready", flush=True)
    server.serve()
