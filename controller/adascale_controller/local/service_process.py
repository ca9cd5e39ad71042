"""The process of the metrics service, which keeps its address for the duration of a run."""

from __future__ import annotations

import errno
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from adascale_controller.local.machine import ADDRESS
from adascale_controller.local.processes import ChildProcess, tail
from adascale_controller.local.state_dir import StateDir
from adascale_core.errors import AdaScaleError
from adascale_core.failures import ExitClass, classify_exit, describe_exit
from adascale_core.names import ENV_READ_TOKEN, ENV_TOKEN

START_TIMEOUT = 60.0
"""Seconds that the service has to start listening."""
BACKLOG = 2048
"""Connections that may wait for the service to accept them, such as those made while it restarts."""
STOP_TIMEOUT = 5.0
"""Seconds that the service has to exit before it is killed."""
MAX_KILLED_STARTS = 5
"""How often the service is started again if it is killed before it listens."""


class ServiceProcessError(AdaScaleError):
    """A metrics service that does not start."""

    exit_code = os.EX_UNAVAILABLE


class PortTakenError(AdaScaleError):
    """A port that was requested and is in use."""

    exit_code = 2


class ServiceProcess:
    """Starts the metrics service, and restarts it at the same address."""

    def __init__(
        self,
        folder: StateDir,
        options: Sequence[str],
        environ: Mapping[str, str],
        listener: socket.socket,
        inherited: Sequence[int] = (),
    ) -> None:
        self.token = secrets.token_urlsafe(24)
        self.read_token = secrets.token_urlsafe(24)
        self._listener = listener
        self._folder = folder
        self._options = options
        self._environ = {**environ, ENV_TOKEN: self.token, ENV_READ_TOKEN: self.read_token}
        self._inherited = inherited
        self._process: ChildProcess | None = None

    @property
    def url(self) -> str:
        """The service's address."""
        return f"http://{ADDRESS}:{self._listener.getsockname()[1]}"

    @property
    def log(self) -> Path:
        """The file with its output."""
        return self._folder.service_log

    @property
    def exit_code(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs or before it is started."""
        return self._process.exit_code if self._process else None

    def start(self, cancelled: Callable[[], bool]) -> bool:
        """Start the service and wait until it accepts connections; False if cancelled before that.

        If it is killed before that, another one is started.
        """
        self._folder.port_file.unlink(missing_ok=True)
        # -P: a file in the user's folder must not shadow a library.
        command = [sys.executable, "-P", "-m", "adascale_api", "--fd", str(self._listener.fileno())]
        command += self._options
        command += ["--port-file", str(self._folder.port_file.absolute())]
        inherited = [*self._inherited, self._listener.fileno()]

        def start() -> ChildProcess:
            return ChildProcess(command, self._environ, self.log, inherited)

        self._process = start()
        deadline, killed = time.monotonic() + START_TIMEOUT, 0
        while not self._folder.port_file.exists():
            if cancelled():
                return False
            code = self._process.exit_code
            if code is not None and classify_exit(code) is ExitClass.KILLED and killed < MAX_KILLED_STARTS:
                killed += 1
                self._process = start()
            elif code is not None:
                raise ServiceProcessError(
                    f"the metrics service did not start ({describe_exit(code)}):\n{tail(self.log)}"
                )
            if time.monotonic() > deadline:
                raise ServiceProcessError(
                    f"the metrics service did not start within {START_TIMEOUT:.0f} s: see {self.log}"
                )
            time.sleep(0.02)
        return True

    def stop(self) -> None:
        """Stop the service."""
        if self._process is None or self._process.exit_code is not None:
            return
        self._process.terminate()
        if not self._process.wait(STOP_TIMEOUT):
            self._process.kill()
            self._process.wait(STOP_TIMEOUT)


def page_url(url: str, token: str, job: str = "") -> str:
    """Return the address of the page at `url`, or of a job there, with the token for reading.

    Browsers do not send what follows the #.
    """
    return f"{url}/#/{f'jobs/{job}' if job else ''}?token={token}"


def listen(preferred: int, *, required: bool) -> socket.socket:
    """Return a socket that listens on `preferred`, or on any free port if `preferred` is in use.

    The run keeps the socket open, so no other program can take its port, even while the service restarts.
    """
    try:
        return socket.create_server((ADDRESS, preferred), backlog=BACKLOG)
    except OSError as error:
        if not required and error.errno == errno.EADDRINUSE:
            return socket.create_server((ADDRESS, 0), backlog=BACKLOG)
        reason = os.strerror(error.errno).lower() if error.errno else error
        raise PortTakenError(
            f"cannot listen on port {preferred}: {reason}; use another --port, or omit it to use a free port"
        ) from None
