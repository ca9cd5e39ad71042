"""Posts gain reports from a background thread, so that no training step waits for the metrics service.

While the service does not answer, the newest reports are queued. A report that the service refuses is
dropped, and the others of its request are posted without it.
"""

from __future__ import annotations

import threading
from collections import deque
from itertools import islice

from adascale_client import Backoff, MetricsServiceClient, ServiceError, ServiceRefusedError
from adascale_core.messages.registration import MAX_INTERVAL, report_interval
from adascale_core.messages.reports import GainReport
from adascale_core.names import REPORT_INTERVAL

MAX_QUEUED = 1000
"""Reports that are queued while the service does not answer, and the maximum in one request."""
INVALID_REPORT = frozenset({400, 413, 422})
"""Statuses that the same reports would get again."""


class Reporter:
    """Posts reports in the background."""

    def __init__(self, client: MetricsServiceClient, job_id: str) -> None:
        self._client = client
        self._job_id = job_id
        self._queue: deque[GainReport] = deque(maxlen=MAX_QUEUED)
        self._changed = threading.Condition()
        self._closing = False
        self.interval = 0.0
        """Seconds between two reports, at least, as the service asks for."""
        self._failing = False
        self._status: int | None = None
        """Of the refusal that was logged last; None if the service did not answer."""
        self._thread = threading.Thread(target=self._run, name="adascale-reporter", daemon=True)
        self._thread.start()

    def report(self, report: GainReport) -> None:
        """Queue a report. Does not wait for the service."""
        with self._changed:
            self._queue.append(report)
            self._changed.notify()

    def close(self, timeout: float = 2.0) -> None:
        """Post the queued reports, and stop the thread. May be called again."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout)

    def _run(self) -> None:
        backoff = Backoff()
        max_reports = MAX_QUEUED
        while True:
            with self._changed:
                if not self._queue and not self._closing:
                    self._changed.wait()
                reports = list(islice(self._queue, max_reports))
                if not reports:
                    if self._closing:
                        return
                    continue
            try:
                answer = self._client.post_gain(self._job_id, reports)
            except ServiceError as error:
                status = error.status if isinstance(error, ServiceRefusedError) else None
                if status in INVALID_REPORT:
                    # Find the invalid report by bisection.
                    max_reports = len(reports) // 2
                    if max_reports == 0:
                        print(f"adascale: {error}; dropping this report", flush=True)
                        self._dequeue(reports)
                        max_reports = MAX_QUEUED
                    continue
                self._log_error(error, status)
                with self._changed:
                    if self._closing:
                        return
                    self._changed.wait(backoff.next())
                continue
            if self._failing:
                self._failing = False
                print("adascale: the metrics service answers again", flush=True)
            backoff.reset()
            self._dequeue(reports)
            self._wait_for_next(answer.post_interval)

    def _wait_for_next(self, post_interval: float) -> None:
        """Collect reports for the next request, if the service asks for fewer requests than reports."""
        self.interval = 0.0
        if post_interval > REPORT_INTERVAL:
            self.interval = report_interval(post_interval)
            with self._changed:
                self._changed.wait_for(lambda: self._closing, min(post_interval, MAX_INTERVAL))

    def _dequeue(self, reports: list[GainReport]) -> None:
        """Remove reports from the queue, unless newer ones have displaced them already."""
        with self._changed:
            for report in reports:
                if self._queue and self._queue[0] is report:
                    self._queue.popleft()

    def _log_error(self, error: ServiceError, status: int | None) -> None:
        """Log an error once, although its reason may change while a service stops and starts again."""
        if not self._failing or self._status != status:
            self._failing, self._status = True, status
            print(f"adascale: {error}; training continues, reports are queued", flush=True)
