"""Keeps the errors of one job from the other jobs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from adascale_client import ServiceError
from adascale_controller.operator.apply.cluster import ClusterError

logger = logging.getLogger(__name__)


class ErrorIsolation:
    """Logs each error of a job once and suppresses it.

    Args:
        on_error: is called for each error.
    """

    def __init__(self, on_error: Callable[[], None] = lambda: None) -> None:
        self._on_error = on_error
        self._last_errors: dict[str, str] = {}
        self._failed: set[str] = set()
        self.cache_is_stale = False
        """Whether an object at the API server was not as the caches have it."""

    @contextmanager
    def isolate(self, job_id: str) -> Iterator[None]:
        """Log and suppress the errors of one job."""
        try:
            yield
        except (ClusterError, ServiceError) as error:
            self._on_error()
            if self._is_new(job_id, str(error)):
                logger.warning("%s: %s; retrying", job_id, error)
            self.cache_is_stale |= isinstance(error, ClusterError) and error.status in {404, 409}
        except Exception as error:
            # Broad on purpose: an object that no schema rules out, or a bug of ours, must not stop the
            # operator for all other jobs.
            self._on_error()
            if self._is_new(job_id, repr(error)):
                logger.exception("%s: unexpected error; the job is skipped", job_id)

    def take_failed(self) -> set[str]:
        """Return the jobs that have had an error since the last call."""
        failed, self._failed = self._failed, set()
        return failed

    def clear(self, job_id: str) -> None:
        """Drop a job's last error, so that the next error is logged even if it is the same."""
        self._last_errors.pop(job_id, None)

    def retain(self, job_ids: set[str]) -> None:
        """Drop the errors of all other jobs."""
        for job_id in self._last_errors.keys() - job_ids:
            del self._last_errors[job_id]

    def _is_new(self, job_id: str, error: str) -> bool:
        self._failed.add(job_id)
        last = self._last_errors.get(job_id)
        self._last_errors[job_id] = error
        return error != last
