"""Calls of the metrics service."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from adascale_client.transport import ServiceTransport, ServiceUnreachableError, Transport
from adascale_core.messages.allocation import Allocation, AllocationView, MemberView
from adascale_core.messages.job_spec import JobSpec
from adascale_core.messages.registration import Registration
from adascale_core.messages.reports import GainReport
from adascale_core.views.decision import DecisionView
from adascale_core.views.gain import GainView, HistoryView, StoredReports
from adascale_core.views.goodput import GoodputList, GoodputView
from adascale_core.views.jobs import GenerationsView, JobChanges, JobList, JobView

T = TypeVar("T")
L = TypeVar("L", JobList, GoodputList)

PAGE_SIZE = 100
"""Jobs in one page of the list."""


class MetricsServiceClient:
    """Calls the metrics service. Threads may share it.

    Every call raises `ServiceUnreachableError` if the service does not answer, and `ServiceRefusedError` if
    it answers with an error status.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        token_file: Path | None = None,
        transport: ServiceTransport | None = None,
        ca_file: Path | None = None,
    ) -> None:
        self._transport = Transport(url, token, token_file, ca_file) if transport is None else transport

    # -- jobs -----------------------------------------------------------------------------------------------

    def declare_job(self, job_id: str, spec: JobSpec) -> None:
        """Create a job, or replace its declaration."""
        self._transport.request("PUT", _path(job_id), spec.to_json())

    def delete_job(self, job_id: str) -> None:
        """Delete a job with its reports, allocations and replicas. Status 404 if it does not exist."""
        self._transport.request("DELETE", _path(job_id))

    def get_job(self, job_id: str) -> JobView:
        """Return all that the service stores of a job. Status 404 if it does not exist."""
        return self._parse(JobView.from_json, self._transport.request("GET", _path(job_id)))

    def list_jobs(self) -> list[JobView]:
        """Return all jobs, by id."""
        return list(self.read_jobs().jobs)

    def read_jobs(self, share: float = 1.0) -> JobList:
        """Return all jobs, by id, with the cursor from which `read_changes` reads later changes.

        `share` is the share of the time that the requests take: in the rest, the caller's thread sleeps.
        """
        jobs: list[JobView] = []
        cursor: str | None = None
        begun = time.monotonic()
        for page in self._pages("jobs", JobList.from_json):
            jobs += page.jobs
            cursor = page.cursor if cursor is None else cursor
            if page.next is not None:
                time.sleep((time.monotonic() - begun) * (1 / share - 1))
            begun = time.monotonic()
        return JobList(jobs, None, cursor or "")

    def _pages(self, path: str, parse: Callable[[dict[str, Any]], L]) -> Iterator[L]:
        """Yield the pages of a list of jobs."""
        after: str | None = ""
        while after is not None:
            query = f"limit={PAGE_SIZE}&after={quote(after, safe='')}"
            page = self._parse(parse, self._transport.request("GET", f"{path}?{query}"))
            yield page
            after = page.next

    def read_changes(self, cursor: str, wait: float = 0.0) -> JobChanges:
        """Return the jobs that have changed since a cursor. Status 410 if the cursor has expired.

        While nothing has changed, the service waits for `wait` seconds.
        """
        query = f"since={quote(cursor, safe='')}&wait={wait:g}&limit={PAGE_SIZE}"
        answer = self._transport.request("GET", f"changes?{query}", wait=wait)
        return self._parse(JobChanges.from_json, answer)

    # -- allocations ----------------------------------------------------------------------------------------

    def allocate(self, job_id: str, allocation: Allocation) -> AllocationView:
        """Set the desired allocation. Status 409 if a newer allocation is desired already."""
        answer = self._transport.request("PUT", f"{_path(job_id)}/allocation", allocation.to_json())
        return self._parse(AllocationView.from_json, answer)

    def get_allocation(
        self, job_id: str, known_version: int | None = None, wait: float = 0.0
    ) -> AllocationView:
        """Return the job's generations. Status 404 if the job does not exist.

        While the version is still `known_version`, the service waits for `wait` seconds.
        """
        query = "" if known_version is None else f"?version={known_version}&wait={wait:g}"
        answer = self._transport.request("GET", f"{_path(job_id)}/allocation{query}", wait=wait)
        return self._parse(AllocationView.from_json, answer)

    def register(self, job_id: str, registration: Registration) -> MemberView:
        """Record the state of a replica, which is also its heartbeat. Returns the job's generations.

        Status 409 if members with state have another version of the package.
        """
        path = f"{_path(job_id)}/replicas/{registration.replica}"
        answer = self._transport.request("PUT", path, registration.to_json())
        return self._parse(MemberView.from_json, answer)

    # -- decisions ------------------------------------------------------------------------------------------

    def put_decision(self, decision: DecisionView) -> None:
        """Store the explained decision about a job. Status 404 if the job does not exist."""
        self._transport.request("PUT", f"{_path(decision.job)}/decision", decision.to_json())

    def get_decision(self, job_id: str) -> DecisionView:
        """Return the last decision about a job. Status 404 if there is none."""
        return self._parse(
            DecisionView.from_json, self._transport.request("GET", f"{_path(job_id)}/decision")
        )

    def get_generations(self, job_id: str) -> GenerationsView:
        """Return the generations of a job. Status 404 if the job does not exist."""
        return self._parse(
            GenerationsView.from_json, self._transport.request("GET", f"{_path(job_id)}/generations")
        )

    def get_goodput(self, job_id: str) -> GoodputView:
        """Return where the time of a job's replicas went. Status 404 if the job does not exist."""
        return self._parse(GoodputView.from_json, self._transport.request("GET", f"{_path(job_id)}/goodput"))

    def list_goodput(self) -> GoodputList:
        """Return where the time of the replicas of all jobs went."""
        pages = list(self._pages("goodput", GoodputList.from_json))
        jobs = [job for page in pages for job in page.jobs]
        return GoodputList(jobs, None, pages[-1].replica_seconds)

    # -- gain -----------------------------------------------------------------------------------------------

    def post_gain(self, job_id: str, reports: Sequence[GainReport]) -> StoredReports:
        """Store reports; a report whose generation and step are stored already is left out."""
        body = [report.to_json() for report in reports]
        answer = self._transport.request("POST", f"{_path(job_id)}/gain", body)
        return self._parse(StoredReports.from_json, answer)

    def get_gain(self, job_id: str) -> GainView:
        """Return the latest report, with predictions. Status 404 if the job has no report."""
        return self._parse(GainView.from_json, self._transport.request("GET", f"{_path(job_id)}/gain"))

    def get_history(self, job_id: str, points: int) -> HistoryView:
        """Return at most `points` of the job's reports. Status 404 if the job does not exist."""
        answer = self._transport.request("GET", f"{_path(job_id)}/gain/history?points={points}")
        return self._parse(HistoryView.from_json, answer)

    # -- the client -----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the idle connections."""
        self._transport.close()

    def _parse(self, parse: Callable[[dict[str, Any]], T], answer: Any) -> T:
        try:
            return parse(answer)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ServiceUnreachableError(
                f"{self._transport.url} is not the address of a metrics service, or the service has another "
                f"version: its answer can't be parsed ({error!r})"
            ) from error


def _path(job_id: str) -> str:
    return f"jobs/{quote(job_id, safe='')}"
