"""A `python` that has torch, the metrics service and the command line imported already.

That takes most of the time of short programs.

`PYTHON` replaces `[sys.executable]` at the beginning of a command. It starts `command.py`, a process without
imports. That asks `server.py`, which is started once for each process of pytest, to fork, and to run the
program with the arguments, environment, folder and descriptors of the command. The command forwards signals,
exits with the code of the program, and ends it if it is killed.

What differs for the program: its process id is not that of the command, its environment is not in
`/proc/<pid>/environ`, what torch reads once when it is imported (OMP_NUM_THREADS is 1) is that of the server,
and it ends without the interpreter's finalization.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from support.fast_python.command import receive_number, request

FOLDER = Path(__file__).parent


class FastPython(Sequence[str]):
    """The beginning of a command. The server is started when it is read first, and imports more modules."""

    def __init__(self, *modules: str) -> None:
        self._modules = modules

    def __getitem__(self, index: int) -> str:  # type: ignore[override]
        return _command(*self._modules)[index]

    def __iter__(self) -> Iterator[str]:
        return iter(_command(*self._modules))

    def __len__(self) -> int:
        return len(_command(*self._modules))


PYTHON = FastPython()


class Program:
    """A program that the server runs for this process, without a command between them.

    Args:
        arguments: of the interpreter.
        environ: its environment.
        output: the file that its output is appended to.
        descriptors: more descriptors that it gets.
    """

    def __init__(
        self, arguments: list[str], environ: dict[str, str], output: Path, descriptors: Sequence[int] = ()
    ) -> None:
        with output.open("ab") as file:
            passed = {1: file.fileno(), 2: file.fileno(), **{each: each for each in descriptors}}
            self._channel = request(_command()[-1], arguments, environ, passed, [])
        self.pid = receive_number(self._channel)
        self._channel.setblocking(False)
        self._code: int | None = None

    @property
    def code(self) -> int | None:
        """Its exit code; None until it has exited."""
        if self._code is None:
            with suppress(BlockingIOError):
                self._code = receive_number(self._channel)
        return self._code

    def close(self) -> None:
        """Kill it if it runs."""
        self._channel.close()


@cache
def _command(*modules: str) -> tuple[str, ...]:
    """Start the server with these modules. Returns the command that reaches it."""
    folder = tempfile.TemporaryDirectory(prefix="fast-python-")
    address = f"{folder.name}/server"
    reading, writing = os.pipe()
    server = subprocess.Popen(
        [sys.executable, "-m", "support.fast_python.server", address, *modules],
        cwd=FOLDER.parents[1],
        stdin=subprocess.DEVNULL,
        stdout=writing,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
        process_group=0,
    )
    os.close(writing)

    def end() -> None:
        server.kill()
        server.wait()
        folder.cleanup()

    atexit.register(end)
    with os.fdopen(reading) as ready:
        assert ready.readline() == "ready\n", "the server has failed; see its error above"
    return (sys.executable, "-S", "-E", str(FOLDER / "command.py"), address)
