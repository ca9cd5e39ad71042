"""Starts the metrics service, or another one, for a measurement."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from adascale_core.names import ENV_TOKEN


@dataclass(frozen=True)
class RunningService:
    """A service that answers.

    Args:
        process: its process.
        port: of 127.0.0.1, on which it listens.
    """

    process: subprocess.Popen[bytes]
    port: int

    @property
    def processor_time(self) -> float:
        """The processor time that it has used so far, in seconds."""
        user, system = self._read("stat").rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    @property
    def peak_memory(self) -> float:
        """The memory that it had at most, in MiB."""
        line = next(line for line in self._read("status").splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) / 1024

    @property
    def memory(self) -> float:
        """The memory that it has, in MiB."""
        line = next(line for line in self._read("status").splitlines() if line.startswith("VmRSS"))
        return int(line.split()[1]) / 1024

    def _read(self, name: str) -> str:
        return Path(f"/proc/{self.process.pid}/{name}").read_text()


@contextmanager
def metrics_service(
    database: str, token: str, *options: str, port: int = 0, is_killed: bool = False
) -> Iterator[RunningService]:
    """Run the metrics service, and stop it at the end.

    Args:
        database: URL of its database.
        token: of requests.
        options: other options of `python -m adascale_api`.
        port: on which it listens; 0 for a free one.
        is_killed: whether it gets SIGKILL at the end, and its messages are not shown.
    """
    command = [sys.executable, "-m", "adascale_api", "--port", str(port), "--database", database, *options]
    with running([*command, "--port-file"], {ENV_TOKEN: token}, is_killed=is_killed) as service:
        yield service


@contextmanager
def running(
    command: Sequence[str], environ: Mapping[str, str], *, is_killed: bool = False
) -> Iterator[RunningService]:
    """Run a service that writes its port into a file, whose path is its last argument."""
    with tempfile.TemporaryDirectory() as folder:
        port_file = Path(folder) / "port"
        process = subprocess.Popen(
            [*command, str(port_file)],
            env={**os.environ, **environ},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL if is_killed else None,
        )
        try:
            while not port_file.exists():
                if process.poll() is not None:
                    sys.exit("the service did not start")
                time.sleep(0.05)
            yield RunningService(process, int(port_file.read_text()))
        finally:
            process.kill() if is_killed else process.terminate()
            process.wait()
