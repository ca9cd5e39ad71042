"""Restarts the metrics service when it exits, and reads the job's state from it."""

from __future__ import annotations

import time
from collections import deque

from adascale_client import MetricsServiceClient, ServiceError
from adascale_controller.local.display import Display
from adascale_controller.local.service_process import ServiceProcess, ServiceProcessError
from adascale_controller.local.stop_signals import StopSignals
from adascale_core.failures import describe_exit
from adascale_core.views.jobs import JobView

MIN_WAIT = 0.02
"""Seconds between two reads of the job, at least."""
MAX_RESTARTS_PER_MINUTE = 5


class ServiceSupervisor:
    """Supervises the metrics service of a run."""

    def __init__(
        self,
        process: ServiceProcess,
        client: MetricsServiceClient,
        job_id: str,
        display: Display,
        signals: StopSignals,
    ) -> None:
        self._process = process
        self._client = client
        self._job_id = job_id
        self._display = display
        self._signals = signals
        self._restarts: deque[float] = deque(maxlen=MAX_RESTARTS_PER_MINUTE)
        self._failed_reads = 0
        self._version: int | None = None

    def restart_if_exited(self, now: float) -> None:
        """Restart the service if it has exited."""
        code = self._process.exit_code
        if code is None:
            return
        if len(self._restarts) == MAX_RESTARTS_PER_MINUTE and now - self._restarts[0] < 60:
            raise ServiceProcessError(
                f"the metrics service exited {MAX_RESTARTS_PER_MINUTE + 1} times within a minute "
                f"({describe_exit(code)}): see {self._process.log}"
            )
        self._restarts.append(now)
        self._display.message(
            f"The metrics service exited ({describe_exit(code)}); restarting it at the same address", "yellow"
        )
        self._process.start(lambda: self._signals.stop_requested)

    def get_job(self) -> JobView | None:
        """Return the service's view of the job; None if it does not answer, while training continues."""
        try:
            view = self._client.get_job(self._job_id)
        except ServiceError as error:
            self._failed_reads += 1
            # The first failed read may be due to an exit, which has its own message.
            if self._failed_reads == 2 and self._process.exit_code is None:
                self._display.message(f"Training continues without the metrics service: {error}", "yellow")
            return None
        if self._failed_reads > 1:
            self._display.message("The metrics service answers again")
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
                self._client.get_allocation(self._job_id, self._version, seconds)
                return
        except ServiceError:
            self._version = None  # The next read of the job reports the error.
        time.sleep(max(deadline - time.monotonic(), 0.0))
