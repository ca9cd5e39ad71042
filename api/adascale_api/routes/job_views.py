"""Views of jobs, read from the database until an answer has its size."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

from adascale_api.data.job import Job, UnreadableJobError
from adascale_api.data.sql import Transaction
from adascale_api.data.store import jobs, replicas, reports
from adascale_api.data.store.jobs import PageRoom
from adascale_api.data.store.replicas import Log
from adascale_api.service.service import Service
from adascale_core.messages.job_spec import LocalBszLimit
from adascale_core.messages.registration import Registration
from adascale_core.messages.reports import GainReport, StepTime
from adascale_core.views.jobs import JobView, ReplicaView

JOBS_TOGETHER = 25
"""Jobs whose latest reports and step times are read together."""
_STEP_TIME_SIZE = 150
"""Bytes of a step time in an answer, approximately."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SizedView:
    """The view of a job, and the bytes that it has in an answer, approximately."""

    view: JobView
    size: int


def find_view(transaction: Transaction, job_id: str, service: Service, *, shows_logs: bool) -> SizedView:
    """Return the view of a job; errors as for `jobs.find_job`."""
    job = jobs.find_job(transaction, job_id)
    return _view(
        job,
        service,
        replicas.logs(transaction, job, with_texts=shows_logs),
        reports.latest_report(transaction, job),
        reports.step_times(transaction, job),
    )


def list_views(
    transaction: Transaction, after: str, limit: int, service: Service, *, shows_logs: bool
) -> tuple[list[JobView], str | None]:
    """Return the views of a page of jobs, and the `after` of the next page; None after the last.

    The page has at most `limit` jobs, and those that have room together. A job that can't be read is logged,
    and is not in the page.
    """
    page = jobs.list_jobs(transaction, after, limit)
    views: list[JobView] = []
    room, done = PageRoom(), after
    for start in range(0, len(page.jobs), JOBS_TOGETHER):
        part = page.jobs[start : start + JOBS_TOGETHER]
        last = part[-1].id
        latest = reports.latest_rows(transaction, done, last)
        step_times = reports.step_time_rows(transaction, done, last)
        have_logs = replicas.jobs_with_logs(transaction, done, last)
        for job in part:
            try:
                sized = _view(
                    job,
                    service,
                    replicas.logs(transaction, job, with_texts=shows_logs) if job.key in have_logs else {},
                    reports.parse_report(job.id, latest.get(job.id)),
                    reports.parse_step_times(job.id, step_times.get(job.id, [])),
                )
            except UnreadableJobError as error:
                logger.error("%s", error)
            else:
                if not room.takes(sized.size):
                    return views, done
                views.append(sized.view)
            done = job.id
    return views, page.next


def _view(
    job: Job,
    service: Service,
    logs: Mapping[int, Log],
    latest: GainReport | None,
    step_times: list[StepTime],
) -> SizedView:
    state = job.rendezvous
    ages = service.heartbeats.ages(job.id)
    view = JobView(
        id=job.id,
        spec=job.spec,
        version=job.version,
        desired=state.desired,
        active=state.active,
        broken=state.broken,
        complete=state.complete,
        failures=state.failures,
        disruptions=state.disruptions,
        restarts_without_progress=state.restarts_without_progress,
        replicas=[
            _replica_view(registration, logs.get(rank), ages.get(rank))
            for rank, registration in sorted(state.replicas.items())
        ],
        latest=latest,
        step_times=step_times,
        created_at=job.created_at,
        local_bsz_limits=[LocalBszLimit(*each) for each in sorted(state.local_bsz_limits.items())],
        local_bsz_limit=state.local_bsz_limit,
    )
    of_logs = sum(len(log.text) for log in logs.values())
    return SizedView(view, len(job.rendezvous_text) + of_logs + _STEP_TIME_SIZE * len(step_times))


def _replica_view(registration: Registration, log: Log | None, age: float | None) -> ReplicaView:
    if log is not None and log.instance == registration.instance:
        registration = replace(registration, log=log.text)
    return ReplicaView.of(registration, age)
