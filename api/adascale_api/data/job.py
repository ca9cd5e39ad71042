"""A stored job with its state as text for the database, and the cache of stored jobs."""

import json
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

from pydantic import TypeAdapter

from adascale_api.errors import RequestError
from adascale_core.messages.allocation import AllocationView
from adascale_core.messages.job_spec import JobSpec
from adascale_core.messages.registration import Registration
from adascale_core.rendezvous.rendezvous import Rendezvous

_MEMORY_PER_CHARACTER = 8
"""Bytes in memory per character of the state's text, as objects and as text; measured with 1,024 replicas."""
_MEMORY_PER_JOB = 2048
"""Bytes in memory of a job with no replica."""
_view = TypeAdapter(AllocationView)
logger = logging.getLogger(__name__)

MAX_CACHED = 64 * 1024 * 1024
"""Bytes of the cached states."""


class UnreadableJobError(RequestError):
    """The stored state of a job can't be read."""

    status = 500

    def __init__(self, job_id: str, cause: Exception) -> None:
        super().__init__(
            f"the stored state of job {job_id} can't be read ({type(cause).__name__}: {cause}): "
            "delete the job, or restore the database from a backup"
        )


@contextmanager
def reading(job_id: str) -> Iterator[None]:
    """Take what the stored values of a job are not valid for as damage of the job."""
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise UnreadableJobError(job_id, error) from error


@contextmanager
def skip_unreadable() -> Iterator[None]:
    """Log that a job can't be read, and go on without it."""
    try:
        yield
    except UnreadableJobError as error:
        logger.error("%s", error)


@dataclass(frozen=True)
class StoredJob:
    """A stored job, without its reports."""

    key: int
    id: str
    created_at: float  # in seconds since 1970
    version: int  # rises with every change of the other fields
    spec: JobSpec | None  # None if it is not declared
    rendezvous: Rendezvous  # its registrations have no logs, which are stored separately
    unchanging: dict[int, Registration] = field(default_factory=dict, init=False, compare=False)
    """The registrations of replicas that were received again and changed nothing."""

    @classmethod
    def parse(
        cls, key: int, job_id: str, created_at: float, version: int, spec: str | None, rendezvous: str
    ) -> "StoredJob":
        """Return a job from the columns of its row."""
        with reading(job_id):
            parsed_spec = JobSpec.from_json(json.loads(spec)) if spec else None
            state = Rendezvous.from_json(json.loads(rendezvous))
        job = cls(key, job_id, created_at, version, parsed_spec, state)
        job.__dict__["rendezvous_text"] = rendezvous
        return job

    @cached_property
    def view(self) -> AllocationView:
        """The job's generations."""
        return self.rendezvous.view(self.version)

    @cached_property
    def view_json(self) -> bytes:
        """The job's generations as JSON."""
        return _view.dump_json(self.view)

    @cached_property
    def rendezvous_text(self) -> str:
        """The rendezvous as JSON."""
        return json.dumps(self.rendezvous.to_json(), separators=(",", ":"))

    @cached_property
    def spec_text(self) -> str | None:
        """The declaration as JSON."""
        return None if self.spec is None else json.dumps(self.spec.to_json(), separators=(",", ":"))

    @property
    def size(self) -> int:
        """The bytes that the job takes in memory, approximately."""
        return _MEMORY_PER_JOB + _MEMORY_PER_CHARACTER * len(self.rendezvous_text)


class JobCache:
    """The latest committed states of jobs, bounded in bytes. Changed by the event loop, and read by threads.

    Most requests need the state of their job, which rarely changes. Reading and parsing it again would take
    most of their time; one of 1,024 replicas has 300 KB.
    """

    def __init__(self, max_bytes: int = MAX_CACHED) -> None:
        self._max_bytes = max_bytes
        self._jobs: dict[str, StoredJob] = {}
        self._bytes = 0
        self.changes = 0
        """How many changes of jobs the cache has seen."""

    def get(self, job_id: str) -> StoredJob | None:
        """Return the state of a job if it is cached."""
        return self._jobs.get(job_id)

    def add(self, jobs: Iterable[StoredJob], changes: int) -> None:
        """Cache states that were read, unless a job has changed since the cache had seen so many changes."""
        if changes == self.changes:
            for job in jobs:
                self._put(job)

    def put(self, job: StoredJob) -> None:
        """Cache a state that was just committed."""
        known = self._jobs.get(job.id)
        self.changes += known is None or known.version != job.version
        self._put(job)

    def remove(self, job_id: str) -> None:
        """Remove a job that was deleted, or changed by another process."""
        self.changes += 1
        removed = self._jobs.pop(job_id, None)
        self._bytes -= 0 if removed is None else removed.size

    def clear(self) -> None:
        """Remove all jobs."""
        self.changes += 1
        self._jobs.clear()
        self._bytes = 0

    def _put(self, job: StoredJob) -> None:
        before = self._jobs.pop(job.id, None)
        self._bytes += job.size - (0 if before is None else before.size)
        self._jobs[job.id] = job
        # The oldest goes first, unless this one alone is too large.
        while self._bytes > self._max_bytes:
            oldest = self._jobs.pop(job.id if job.size > self._max_bytes else next(iter(self._jobs)))
            self._bytes -= oldest.size
