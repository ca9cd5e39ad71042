"""Keeps the errors of one job from the other jobs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from adascale_client import ServiceError, ServiceRefusedError
from adascale_controller.operator.apply.kubernetes_cluster import ApiServerError, PodRefusedError

logger = logging.getLogger(__name__)

RETRY_INTERVAL = 1.0
"""Seconds until what has failed is tried again, the first time."""
MAX_RETRY_INTERVAL = 60.0
"""The same at most. It doubles with each time that a server refuses."""
TOO_MANY_REQUESTS = 429
"""The status of a server that will take the request later."""


@dataclass
class _Failure:
    """The last error of a job."""

    message: str = ""
    retry_at: float = 0.0  # when to try again, in seconds since 1970
    interval: float = RETRY_INTERVAL  # seconds from an error to the next attempt


class ErrorIsolation:
    """Logs each error of a job once and suppresses it.

    What a server refuses is tried again after intervals that double, so that many jobs of which writes are
    refused, by a quota for example, send few requests.
    """

    def __init__(
        self, on_error: Callable[[], None] = lambda: None, clock: Callable[[], float] = time.time
    ) -> None:
        self._on_error = on_error
        self._clock = clock
        self._failures: dict[str, _Failure] = {}
        self._failed: set[str] = set()
        self.cache_is_stale = False
        """Whether an object at the API server was not as the caches have it."""

    @contextmanager
    def isolate(self, job_id: str) -> Iterator[None]:
        """Log and suppress the errors of one job."""
        try:
            yield
        except (ApiServerError, ServiceError) as error:
            # A server that is away or has too much to do serves all jobs as soon as it can.
            status = error.status if isinstance(error, ApiServerError | ServiceRefusedError) else 0
            is_refused = 400 <= status < 500 and status != TOO_MANY_REQUESTS
            # For a webhook that is down, the API server answers 500.
            is_refused |= isinstance(error, PodRefusedError)
            if self._is_new(job_id, str(error), is_lasting=is_refused):
                logger.warning("%s: %s; retrying", job_id, error)
            self.cache_is_stale |= isinstance(error, ApiServerError) and error.status in {404, 409}
        except Exception as error:
            # Broad on purpose: an object that no schema rules out, or a bug of ours, must not stop the
            # operator for all other jobs.
            if self._is_new(job_id, repr(error), is_lasting=True):
                logger.exception("%s: unexpected error; the job is skipped", job_id)

    def take_failed(self) -> dict[str, float]:
        """Return the jobs that have had an error since the last call, and when to look at them again."""
        failed, self._failed = self._failed, set()
        return {job_id: self.retry_at(job_id) for job_id in failed}

    def retry_at(self, job_id: str) -> float:
        """Return when to try again what has failed for a job, in seconds since 1970; 0 if nothing has."""
        failure = self._failures.get(job_id)
        if failure is None:
            return 0.0
        # A time that is too far away was set before the clock was set back.
        return min(failure.retry_at, self._clock() + failure.interval)

    def retry_now(self, job_ids: Iterable[str]) -> None:
        """Try again at once for jobs that have changed."""
        for job_id in job_ids:
            if job_id in self._failures:
                self._failures[job_id].retry_at = 0.0

    def clear(self, job_id: str) -> None:
        """Drop a job's last error, so that the next error is logged even if it is the same."""
        self._failures.pop(job_id, None)

    def retain(self, job_ids: set[str]) -> None:
        """Drop the errors of all other jobs."""
        for job_id in self._failures.keys() - job_ids:
            del self._failures[job_id]

    def _is_new(self, job_id: str, message: str, *, is_lasting: bool) -> bool:
        self._on_error()
        self._failed.add(job_id)
        failure = self._failures.get(job_id)
        is_new = failure is None or failure.message != message
        if failure is None or not is_lasting:
            failure = self._failures[job_id] = _Failure()
        else:
            failure.interval = min(2 * failure.interval, MAX_RETRY_INTERVAL)
        failure.message = message
        failure.retry_at = self._clock() + failure.interval
        return is_new
