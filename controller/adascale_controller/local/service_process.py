"""The metrics service of a run: its process, which keeps its address, and the file with this address."""

from __future__ import annotations

import errno
import os
import secrets
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from pydantic import TypeAdapter

from adascale_client import MetricsServiceClient, ServiceError
from adascale_controller.local.display import Display
from adascale_controller.local.machine import ADDRESS
from adascale_controller.local.processes import ChildProcess, StopSignals, tail
from adascale_controller.local.state_dir import StateDir, replace_file
from adascale_core.errors import AdaScaleError, UsageError
from adascale_core.failures import ExitClass, classify_exit, describe_exit
from adascale_core.names import ENV_OTLP_ENDPOINT, ENV_READ_TOKEN, ENV_TOKEN
from adascale_core.views.jobs import JobView

START_TIMEOUT = 60.0
"""Seconds that the service has to start listening."""
BACKLOG = 2048
"""Connections that may wait for the service to accept them, such as those made while it restarts."""
STOP_TIMEOUT = 5.0
"""Seconds that the service has to exit before it is killed."""
MAX_KILLED_STARTS = 5
"""How often the service is started again if it is killed before it listens."""


MIN_WAIT = 0.02
"""Seconds between two reads of the job, at least."""
MAX_RESTARTS_PER_MINUTE = 5


class ServiceProcessError(AdaScaleError):
    """A metrics service that does not start."""

    exit_code = os.EX_UNAVAILABLE


class ServiceProcess:
    """Starts the metrics service, and restarts it at the same address."""

    def __init__(
        self,
        folder: StateDir,
        options: Sequence[str],
        environ: Mapping[str, str],
        listener: socket.socket,
        inherited: Sequence[int] = (),  # descriptors, such as that of the folder's lock
    ) -> None:
        self.token = secrets.token_urlsafe(24)
        self.read_token = secrets.token_urlsafe(24)
        self._listener = listener
        self._folder = folder
        self.log = folder.service_log  # the file with its output
        self._options = options
        self._environ = {**environ, ENV_TOKEN: self.token, ENV_READ_TOKEN: self.read_token}
        # Of the user's own program, whose trainers have it.
        self._environ.pop(ENV_OTLP_ENDPOINT, None)
        self._inherited = inherited
        self._process: ChildProcess | None = None

    @property
    def url(self) -> str:
        """The service's address."""
        return f"http://{ADDRESS}:{self._listener.getsockname()[1]}"

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
        raise UsageError(
            f"cannot listen on port {preferred}: {reason}; use another --port, or omit it to use a free port"
        ) from None


@dataclass(frozen=True)
class RunningService:
    """The metrics service of a run."""

    url: str
    pid: int
    job: str
    stopping: bool = False  # whether the run saves and stops
    read_token: str = ""  # the token with which the page shows the output of replicas


_RUNNING_SERVICE: Final = TypeAdapter(RunningService)


def write_service(folder: StateDir, service: RunningService) -> None:
    """Write the address of the metrics service of a job's run."""
    # Only this user may read the token.
    replace_file(folder.service_file, _RUNNING_SERVICE.dump_json(service) + b"\n", mode=0o600)


def mark_stopping(folder: StateDir) -> None:
    """Record that the run saves and stops, so that `adascale stop` does not request it again."""
    service = read_service(folder)
    if service is not None:
        write_service(folder, replace(service, stopping=True))


def remove_service(folder: StateDir) -> None:
    """Remove the address of the metrics service."""
    folder.service_file.unlink(missing_ok=True)
    folder.port_file.unlink(missing_ok=True)


def read_service(folder: StateDir) -> RunningService | None:
    """Return the metrics service of the run in a state folder; None if there is none."""
    try:
        return _RUNNING_SERVICE.validate_json(folder.service_file.read_bytes())
    except (OSError, ValueError):
        return None


@dataclass(eq=False)
class ServiceSupervisor:
    """Supervises the metrics service of a run."""

    process: ServiceProcess
    client: MetricsServiceClient
    job_id: str
    display: Display
    signals: StopSignals

    def __post_init__(self) -> None:
        self._restarts: deque[float] = deque(maxlen=MAX_RESTARTS_PER_MINUTE)
        self._failed_reads = 0
        self._version: int | None = None

    def restart_if_exited(self, now: float) -> None:
        """Restart the service if it has exited."""
        code = self.process.exit_code
        if code is None:
            return
        if len(self._restarts) == MAX_RESTARTS_PER_MINUTE and now - self._restarts[0] < 60:
            raise ServiceProcessError(
                f"the metrics service exited {MAX_RESTARTS_PER_MINUTE + 1} times within a minute "
                f"({describe_exit(code)}): see {self.process.log}"
            )
        self._restarts.append(now)
        self.display.message(
            f"The metrics service exited ({describe_exit(code)}); restarting it at the same address", "yellow"
        )
        self.process.start(lambda: self.signals.stop_requested)

    def get_job(self) -> JobView | None:
        """Return the service's view of the job; None if it does not answer, while training continues."""
        try:
            view = self.client.get_job(self.job_id)
        except ServiceError as error:
            self._failed_reads += 1
            # The first failed read may be due to an exit, which has its own message.
            if self._failed_reads == 2 and self.process.exit_code is None:
                self.display.message(f"Training continues without the metrics service: {error}", "yellow")
            return None
        if self._failed_reads > 1:
            self.display.message("The metrics service answers again")
        self._failed_reads = 0
        self._version = view.version
        return view

    def wait_for_change(self, seconds: float) -> None:
        """Wait until the job's allocation or generation changes, at most `seconds`."""
        deadline = time.monotonic() + seconds
        # Several changes at once, such as the registrations of all replicas, are read together.
        time.sleep(MIN_WAIT)
        try:
            if self._version is not None:
                self.client.get_allocation(self.job_id, self._version, seconds)
                return
        except ServiceError:
            self._version = None  # The next read of the job reports the error.
        time.sleep(max(deadline - time.monotonic(), 0.0))
