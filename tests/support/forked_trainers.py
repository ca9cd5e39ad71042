"""Runs programs in processes that are forked from one with torch imported, which takes most of their time.

    python forked_trainers.py DESCRIPTOR

reads requests from a Unix socket: a JSON line with `program`, `environ` and `output`, and the descriptor of
the trainer's channel. It answers with the process id, and later with `{"pid": ..., "code": ...}` for each
exit.
"""

from __future__ import annotations

import array
import atexit
import json
import os
import runpy
import signal
import socket
import sys
from typing import Any, NoReturn


def serve(channel: socket.socket) -> None:
    """Fork a process for each request, until the channel is closed."""
    import torch
    import torch._dynamo

    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    import adascale_worker.trainer  # noqa: F401

    children: set[int] = set()
    channel.sendall(b'{"ready": true}\n')
    signal.signal(signal.SIGCHLD, lambda *_: None)
    channel.settimeout(0.02)
    while True:
        try:
            data, ancillary, *_ = channel.recvmsg(1 << 16, 64)
            if not data:
                break
            descriptor = array.array("i", ancillary[0][2])[0]
            request = json.loads(data)
            pid = os.fork()
            if pid == 0:
                channel.close()
                run(request, descriptor)
            os.close(descriptor)
            children.add(pid)
            channel.sendall(json.dumps({"started": pid}).encode() + b"\n")
        except TimeoutError:
            pass
        for pid in list(children):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                children.remove(pid)
                code = os.waitstatus_to_exitcode(status)
                channel.sendall(json.dumps({"pid": pid, "code": code}).encode() + b"\n")
    for pid in children:
        os.kill(pid, signal.SIGKILL)


def run(request: dict[str, Any], descriptor: int) -> NoReturn:
    """Run a program as its own process would."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setpgid(0, 0)
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.clear()
    os.environ.update(request["environ"], ADASCALE_AGENT_FD=str(descriptor), PYTHONUNBUFFERED="1")
    sys.argv = [request["program"]]
    code: object = 0
    try:
        runpy.run_path(request["program"], run_name="__main__")
    except SystemExit as exit_:
        code = exit_.code
    except BaseException as error:  # noqa: BLE001 - the process ends as it would by itself
        code = 1
        sys.excepthook(type(error), error, error.__traceback__)
    atexit._run_exitfuncs()
    os._exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
