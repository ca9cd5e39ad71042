"""Keeps the metrics service up, and asks it what it knows."""

from __future__ import annotations

import time
from collections import deque

from adascale_client import MetricsServiceClient, ServiceError
from adascale_controller.local.display import Display
from adascale_controller.local.service_process import ServiceProcess, ServiceProcessError
from adascale_controller.local.stop_signals import StopSignals
from adascale_core.exit_codes import describe_exit
from adascale_core.views import JobView

MIN_WAIT = 0.02
"""Seconds between two looks, at least."""
MAX_RESTARTS = 5
"""Restarts within a minute; after more of them it won't be up again."""


class ServiceSupervisor:
    """Looks after the metrics service of a run.

    Args:
        process: the service.
        client: the way to it.
        job_id: the job that is run.
        display: what the user sees.
        signals: by which the user asks to leave.
    """

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
        self._restarts: deque[float] = deque(maxlen=MAX_RESTARTS)
        self._unanswered = 0
        self._version: int | None = None

    def keep_up(self, now: float) -> None:
        """Start the service again if it has ended.

        Raises:
            ServiceProcessError: it ends again and again, or doesn't start.
        """
        code = self._process.exit_code
        if code is None:
            return
        if len(self._restarts) == MAX_RESTARTS and now - self._restarts[0] < 60:
            raise ServiceProcessError(
                f"the metrics service ended {MAX_RESTARTS + 1} times within a minute "
                f"({describe_exit(code)}): see {self._process.log}"
            )
        self._restarts.append(now)
        self._display.note(
            f"The metrics service is gone ({describe_exit(code)}); starting it again at the same address",
            "yellow",
        )
        self._process.start(lambda: self._signals.asked)

    def look(self) -> JobView | None:
        """What the service knows of the job; none if it doesn't answer, which training doesn't wait for."""
        try:
            view = self._client.get_job(self._job_id)
        except ServiceError as error:
            self._unanswered += 1
            # Once, it may just be ending: then that is what there is to tell.
            if self._unanswered == 2 and self._process.exit_code is None:
                self._display.note(
                    f"No answer from the metrics service; training goes on ({error})", "yellow"
                )
            return None
        if self._unanswered > 1:
            self._display.note("The metrics service answers again")
        self._unanswered = 0
        self._version = view.version
        return view

    def wait(self, seconds: float) -> None:
        """Wait for the job's generations to change since the last look, but no longer than some seconds."""
        give_up = time.monotonic() + seconds
        # Changes come in flocks: let them gather for a moment.
        time.sleep(MIN_WAIT)
        try:
            if self._version is not None:
                self._client.get_allocation(self._job_id, self._version, seconds)
                return
        except ServiceError:
            # The next look will say so.
            self._version = None
        time.sleep(max(give_up - time.monotonic(), 0.0))
