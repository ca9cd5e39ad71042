"""The metrics service as a process of this run, at one address for as long as the run lasts."""

from __future__ import annotations

import contextlib
import errno
import secrets
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from adascale_controller.local.processes import Process, tail
from adascale_controller.local.state_dir import StateDir
from adascale_core.errors import AdaScaleError
from adascale_core.names import ENV_TOKEN

HOST = "127.0.0.1"
START_TIMEOUT = 60.0
"""Seconds within which the service must tell its port."""
STOP_TIMEOUT = 5.0


class ServiceProcessError(AdaScaleError):
    """The metrics service can't be started."""

    exit_code = 69


class PortTakenError(AdaScaleError):
    """The port that was asked for is in use."""

    exit_code = 2


class ServiceProcess:
    """Starts the metrics service, and starts it again where it was.

    Args:
        folder: the state folder.
        environ: its environment.
        port: where it listens; 0: anywhere.
        lock: the descriptor of the folder's lock.
    """

    def __init__(self, folder: StateDir, environ: Mapping[str, str], port: int, lock: int) -> None:
        self.token = secrets.token_urlsafe(24)
        self.port = port
        self._folder = folder
        self._environ = {**environ, ENV_TOKEN: self.token}
        self._lock = lock
        self._process: Process | None = None

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://{HOST}:{self.port}"

    @property
    def log(self) -> Path:
        """What it writes."""
        return self._folder.service_log

    @property
    def exit_code(self) -> int | None:
        """Its exit code, negative for a signal; none while it runs."""
        return self._process.exit_code if self._process else None

    def start(self, stop: Callable[[], bool]) -> bool:
        """Start it and wait until it listens; false if `stop` said not to.

        Raises:
            ServiceProcessError: it doesn't come up.
        """
        self._folder.port_file.unlink(missing_ok=True)
        # -P: what lies in the user's folder must not be taken for a library.
        command = [sys.executable, "-P", "-m", "adascale_api", "--host", HOST, "--port", str(self.port)]
        command += ["--database", f"sqlite:///{self._folder.database.absolute()}"]
        command += ["--port-file", str(self._folder.port_file.absolute())]
        self._process = Process(command, self._environ, self._folder.service_log, [self._lock])
        give_up = time.monotonic() + START_TIMEOUT
        while (port := self._told_port()) is None:
            if stop():
                return False
            if self._process.exit_code is not None:
                raise ServiceProcessError(
                    f"the metrics service ended with exit code {self._process.exit_code}:\n"
                    f"{tail(self._folder.service_log)}"
                )
            if time.monotonic() > give_up:
                raise ServiceProcessError(
                    f"the metrics service did not start within {START_TIMEOUT:.0f} s: "
                    f"see {self._folder.service_log}"
                )
            time.sleep(0.02)
        self.port = port
        return True

    def stop(self) -> None:
        """End it."""
        if self._process is None or self._process.exit_code is not None:
            return
        self._process.terminate()
        if not self._process.wait(STOP_TIMEOUT):
            self._process.kill()
            self._process.wait(STOP_TIMEOUT)

    def _told_port(self) -> int | None:
        with contextlib.suppress(OSError, ValueError):
            return int(self._folder.port_file.read_text())
        return None


def choose_port(preferred: int, *, insist: bool) -> int:
    """`preferred` if it is free, else 0, for any free one.

    Raises:
        PortTakenError: it is taken, and the user insists on it.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, preferred))
        except OSError as error:
            if not insist and error.errno == errno.EADDRINUSE:
                return 0
            raise PortTakenError(
                f"port {preferred} can't be used: {error.strerror.lower() if error.strerror else error}; "
                "give another with --port, or none to have a free one chosen"
            ) from None
    return preferred
