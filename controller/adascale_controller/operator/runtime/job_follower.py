"""Follows the jobs of the metrics service by their changes, and deregisters those that are deleted."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

from adascale_client import MetricsServiceClient, ServiceError, ServiceRefusedError
from adascale_controller.operator.runtime.object_cache import ObjectCache
from adascale_controller.operator.types.kubernetes import Resource, job_key
from adascale_core.views.jobs import JobView

logger = logging.getLogger(__name__)

MAX_WAIT = 20.0
"""Seconds for which a request waits for a change."""
PAUSE = 0.1
"""Seconds between two requests, so that changes at the same time are read together."""
RETRY_INTERVAL = 1.0
"""Seconds until the next request after one that has failed."""
IDLE_REFRESH_INTERVAL = 60.0
"""Seconds between two reads of all jobs while no job trains, so that there are no new reports."""
READ_SHARE = 0.5
"""The share of the time that the requests of a read of all jobs take: the cycles go on beside it."""
EXPECTED_WITHIN = 1.0
"""Seconds after which a job is no longer behind, whatever was written."""
_GONE = 410


class JobFollower:
    """The jobs of the metrics service, as of now.

    A thread waits for changes. Reports are not among them, so it reads all jobs once in `refresh_interval`
    while a job trains.
    """

    def __init__(self, service: MetricsServiceClient, on_news: Callable[[], None]) -> None:
        # Nobody else may use the connections of `service`: a cursor is valid at one of several services only.
        self.views: Mapping[str, JobView] | None = None
        """All jobs by id. None while the metrics service does not answer."""
        self.refresh_interval = 1.0
        """Seconds between two reads of all jobs, at least."""
        self.reads = 0
        """The number of reads of all jobs."""
        self.refresh_cost = 0.0
        """Seconds of processor time of the last read of all jobs."""
        self._service = service
        self._on_news = on_news
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped = threading.Event()
        self._failure: Exception | None = None
        self._expected: dict[str, tuple[Callable[[JobView], bool], float]] = {}
        self._complete_since = 0.0
        """The begin of the last read of all jobs: `views` has all that was written before."""
        self._lock = threading.Lock()
        self._changed: dict[str, None] = {}
        self._reported: dict[str, None] = {}
        self._answers = True
        self._cursor: str | None = None
        self._listed_at = 0.0

    def start(self) -> None:
        """Start following, in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._stopped = threading.Event()
        # A daemon, because a request that waits for a change would delay the end of the process.
        threading.Thread(target=self._run, args=[self._stopped], name="job-follower", daemon=True).start()

    def stop(self) -> None:
        """Stop after the current request."""
        self._stopped.set()

    def expect(self, job_id: str, has_written: Callable[[JobView], bool]) -> None:
        """Count a job as behind until `views` shows what the operator has written about it."""
        self._expected[job_id] = has_written, time.monotonic()

    def is_behind(self, job_id: str) -> bool:
        """Whether `views` lacks what the operator has written about a job within `EXPECTED_WITHIN`."""
        if job_id not in self._expected:
            return False
        (has_written, written_at), views = self._expected[job_id], self.views
        present = views.get(job_id) if views is not None else None
        is_read = views is None or self._complete_since > written_at
        is_read = is_read or (present is not None and has_written(present))
        if is_read or time.monotonic() >= written_at + EXPECTED_WITHIN:
            del self._expected[job_id]
            return False
        return True

    def check(self) -> None:
        """Check that the thread still runs."""
        if self._failure is not None:
            raise self._failure

    def take_changes(self) -> tuple[Collection[str], Collection[str]]:
        """Return the jobs that have changed since the last call, and the jobs that only have new reports."""
        with self._lock:
            changed, reported = self._changed, self._reported
            self._changed, self._reported = {}, {}
        return changed, [job_id for job_id in reported if job_id not in changed]

    # -- in the thread --------------------------------------------------------------------------------------

    def _run(self, stopped: threading.Event) -> None:
        try:
            while not stopped.is_set():
                stopped.wait(self._read())
        except Exception as error:  # noqa: BLE001 (raised where the loop waits)
            self._failure = error
            self._notify()

    def refresh(self) -> None:
        """Read all jobs. To be called while the thread does not run."""
        self._guarded(self._read_all)

    def _read(self) -> float:
        """Send the request that is due, and return the seconds until the next one."""
        remaining = self._listed_at + self._interval() - time.monotonic()
        views, cursor = self.views, self._cursor
        if views is None or cursor is None or remaining <= 0:
            return self._guarded(self._read_all)
        return self._guarded(lambda: self._read_changes(views, cursor, min(remaining, MAX_WAIT)))

    def _guarded(self, read: Callable[[], None]) -> float:
        try:
            read()
        except ServiceError as error:
            self._cursor = None
            if not (isinstance(error, ServiceRefusedError) and error.status == _GONE):
                self._note_failure(error)
                return RETRY_INTERVAL
        return PAUSE

    def _read_all(self) -> None:
        begun, begun_at = time.thread_time(), time.monotonic()
        page = self._service.read_jobs(READ_SHARE)
        self._cursor, self._listed_at = page.cursor, time.monotonic()
        self._publish({view.id: view for view in page.jobs})
        self._complete_since = begun_at
        self.refresh_cost = time.thread_time() - begun
        self.reads += 1

    def _read_changes(self, views: Mapping[str, JobView], cursor: str, wait: float) -> None:
        changes = self._service.read_changes(cursor, wait)
        self._cursor = changes.cursor
        if changes.jobs or changes.deleted:
            deleted = set(changes.deleted)
            kept = {job_id: view for job_id, view in views.items() if job_id not in deleted}
            self._publish({**kept, **{view.id: view for view in changes.jobs}})

    def _interval(self) -> float:
        trains = any(
            view.active is not None and not view.broken and not view.complete
            for view in (self.views or {}).values()
        )
        return self.refresh_interval if trains else max(self.refresh_interval, IDLE_REFRESH_INTERVAL)

    def _note_failure(self, error: ServiceError) -> None:
        if self._answers:
            logger.warning("%s; training continues, replica counts stay as they are", error)
        self._answers = False
        if self.views is not None:
            self._publish(None)

    def _publish(self, views: Mapping[str, JobView] | None) -> None:
        if views is not None and not self._answers:
            logger.warning("The metrics service answers again")
            self._answers = True
        before, self.views = self.views, views
        self._note_changes(before or {}, views or {})
        self._notify()

    def _note_changes(self, before: Mapping[str, JobView], views: Mapping[str, JobView]) -> None:
        changed = dict.fromkeys(job_id for job_id in before if job_id not in views)
        reported: dict[str, None] = {}
        for job_id, view in views.items():
            known = before.get(job_id)
            if known is view:
                continue
            if known is None or (known.version, known.spec) != (view.version, view.spec):
                changed[job_id] = None
            elif known != view:
                reported[job_id] = None
        with self._lock:
            self._changed.update(changed)
            self._reported.update(reported)

    def _notify(self) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._on_news)


class Deregistration:
    """Removes jobs from the metrics service that the cluster no longer has."""

    def __init__(self, service: MetricsServiceClient, namespace: str | None, cache: ObjectCache) -> None:
        self._service = service
        self._namespace = namespace
        self._cache = cache

    def deleted(self, views: Mapping[str, JobView]) -> Sequence[str]:
        """Return the jobs of the metrics service that the cluster no longer has."""
        present = {".".join(key) for key in self._cache.keys(Resource.ADASCALEJOBS)}
        deleted = [view.id for view in views.values() if view.id not in present and self._is_ours(view)]
        # Pods would register again. Reading all of them is expensive, and most cycles find no deleted job.
        ending = {".".join(key) for key in self._cache.jobs_with_pods()} if deleted else ()
        return [job_id for job_id in deleted if job_id not in ending]

    async def deregister(self, deleted: Sequence[str]) -> None:
        """Delete these jobs from the metrics service. What fails is logged, and left to the next call."""
        for job_id in deleted:
            if self._cache.get(Resource.ADASCALEJOBS, job_key(job_id)) is not None:
                # It was created again meanwhile.
                continue
            try:
                await asyncio.to_thread(self._service.delete_job, job_id)
                logger.info("%s is deleted; removed it from the metrics service", job_id)
            except ServiceError as error:
                if not (isinstance(error, ServiceRefusedError) and error.status == 404):
                    logger.warning("%s: %s", job_id, error)

    def _is_ours(self, view: JobView) -> bool:
        """Whether the operator may delete a job that has no AdaScaleJob.

        A job that only has reports was created by hand and stays.
        """
        watched = self._namespace in (None, view.id.partition(".")[0])
        return watched and (view.spec is not None or view.desired is not None or bool(view.replicas))
