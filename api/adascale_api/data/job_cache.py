"""A cache of the latest committed state of jobs, bounded in bytes.

Most requests need the state of their job, which rarely changes. Reading and parsing it again would take most
of their time; one of 1,024 replicas has 300 KB.
"""

from collections import OrderedDict
from threading import Lock

from adascale_api.data.job import Job

MAX_CACHED = 64 * 1024 * 1024
"""Bytes of the cached states."""
_STRIPES = 1024


class JobCache:
    """The latest committed states. Threads may share it."""

    def __init__(self, max_bytes: int = MAX_CACHED) -> None:
        self._max_bytes = max_bytes
        self._lock = Lock()
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._bytes = 0
        self._changes = [0] * _STRIPES

    def get(self, job_id: str) -> Job | None:
        """Return the state of a job if it is cached."""
        with self._lock:
            job = self._jobs.get(job_id)
            if job is not None:
                self._jobs.move_to_end(job_id)
            return job

    def ticket(self, job_id: str) -> int:
        """Return a number that `add` needs; taken before the state is read."""
        return self._changes[hash(job_id) % _STRIPES]

    def add(self, job: Job, ticket: int) -> None:
        """Cache a state that was read, unless the job has changed since the ticket was taken."""
        with self._lock:
            if self._changes[hash(job.id) % _STRIPES] == ticket:
                self._put(job)

    def put(self, job: Job) -> None:
        """Cache a state that was just committed."""
        with self._lock:
            self._changes[hash(job.id) % _STRIPES] += 1
            self._put(job)

    def remove(self, job_id: str) -> None:
        """Remove a job that was deleted, or changed by another process."""
        with self._lock:
            self._changes[hash(job_id) % _STRIPES] += 1
            removed = self._jobs.pop(job_id, None)
            self._bytes -= 0 if removed is None else removed.size

    def clear(self) -> None:
        """Remove all jobs."""
        with self._lock:
            self._changes = [change + 1 for change in self._changes]
            self._jobs.clear()
            self._bytes = 0

    def _put(self, job: Job) -> None:
        before = self._jobs.pop(job.id, None)
        self._bytes -= 0 if before is None else before.size
        if job.size > self._max_bytes:
            return
        self._jobs[job.id] = job
        self._bytes += job.size
        while self._bytes > self._max_bytes:
            _, oldest = self._jobs.popitem(last=False)
            self._bytes -= oldest.size
