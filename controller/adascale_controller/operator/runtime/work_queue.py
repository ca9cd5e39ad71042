"""Which jobs a cycle looks at: those that have changed, are due or had an error, and each now and then."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from adascale_client import ServiceError, ServiceRefusedError
from adascale_controller.operator.apply.kubernetes_cluster import ApiServerError, PodRefusedError

logger = logging.getLogger(__name__)

Key = TypeVar("Key")

SWEEP_INTERVAL = 120.0
"""Seconds after which a job is looked at in any case."""


class WorkQueue(Generic[Key]):
    """The jobs to look at.

    A job that has changed is looked at in the next cycle. Background work is what can wait: the reports of
    all jobs come at the same time, and jobs that have changed must not wait until they are all read.
    """

    def __init__(self) -> None:
        self._changed: dict[Key, None] = {}
        self._reported: dict[Key, None] = {}
        self._due: dict[Key, float] = {}
        self._background_due: dict[Key, float] = {}

    def add(self, keys: Iterable[Key]) -> None:
        """Add jobs to the next cycle."""
        self._changed.update(dict.fromkeys(keys))

    def add_reported(self, keys: Iterable[Key]) -> None:
        """Add jobs with new reports to the background work, in this order."""
        self._reported.update(dict.fromkeys(keys))

    def plan(self, key: Key, now: float, due: float, background_due: float) -> None:
        """Set when a job is looked at next if nothing changes."""
        self._due[key] = due
        self._background_due[key] = min(background_due, now + SWEEP_INTERVAL)

    def retry(self, key: Key, due: float) -> None:
        """Add a job to a cycle not later than `due`, in seconds since 1970."""
        self._due[key] = min(due, self._due.get(key, due))

    def discard(self, keys: Collection[Key]) -> None:
        """Drop jobs that no longer exist."""
        for jobs in (self._changed, self._reported, self._due, self._background_due):
            for key in keys:
                jobs.pop(key, None)

    @property
    def has_changed(self) -> bool:
        """Whether there are jobs that have changed since they were looked at."""
        return bool(self._changed)

    @property
    def has_reported(self) -> bool:
        """Whether there are jobs whose new reports were not looked at yet."""
        return bool(self._reported)

    def take(self, now: float, max_background: int) -> list[Key]:
        """Return the jobs of this cycle. Of the background work, the oldest jobs come first.

        Half of `max_background` is left to the jobs without new reports, if so many are due.
        """
        taken = dict.fromkeys((*self._changed, *self._planned(now)))
        reported = [key for key in self._reported if key not in taken]
        due = [key for key in self._planned_background(now) if key not in taken and key not in self._reported]
        number = max(max_background // 2, max_background - len(reported))
        taken.update(dict.fromkeys(due[:number]))
        taken.update(dict.fromkeys(reported[: max_background - min(number, len(due))]))
        self._changed.clear()
        for key in taken:
            self._reported.pop(key, None)
            # Until it is planned again, after it was looked at.
            self._due.pop(key, None)
            self._background_due[key] = now + SWEEP_INTERVAL
        return list(taken)

    def _planned(self, now: float) -> list[Key]:
        return [key for key, due in self._due.items() if due <= now]

    def _planned_background(self, now: float) -> list[Key]:
        """Return the jobs whose background work is due, the oldest first."""
        # A time that is too far away was planned before the clock was set back.
        latest = now + SWEEP_INTERVAL
        due = [(due, key) for key, due in self._background_due.items() if due <= now or due > latest]
        return [key for _, key in sorted(due, key=lambda each: each[0])]


# -- the errors of jobs ----------------------------------------------------------------------------------

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
