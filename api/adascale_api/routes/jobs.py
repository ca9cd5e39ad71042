"""Jobs, which the controller declares and deletes."""

from dataclasses import replace
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Response
from pydantic import TypeAdapter

from adascale_api.job import Job
from adascale_api.request_body import JsonBody
from adascale_api.request_models import JobSpecBody
from adascale_api.routes.common import CONTROLLER, READER, JobId, MayReadAll, ServiceOf, answer, errors
from adascale_api.service import Service
from adascale_api.sql import Transaction
from adascale_api.store import generations, jobs, replicas, reports
from adascale_api.store.replicas import Log
from adascale_core.batch import require_valid_replicas
from adascale_core.messages import GainReport, LocalBszLimit, Registration, StepTime
from adascale_core.views import GenerationsView, JobList, JobView, ReplicaView

MAX_PAGE = 4 * 1024 * 1024
"""Bytes of the states of the jobs in one page, unless a single job has more."""

router = APIRouter(prefix="/jobs", tags=["jobs"])
spec_body = JsonBody(JobSpecBody)
_job_list, _job_view = TypeAdapter(JobList), TypeAdapter(JobView)


@router.get("", summary="List all jobs", response_model=JobList, responses=errors(401, 403, 422, 500, 503))
async def get_jobs(
    service: ServiceOf,
    shows_all: MayReadAll,
    limit: Annotated[int, Query(ge=1, le=1000, description="The maximum number of jobs.")] = 100,
    after: Annotated[str, Query(max_length=127, description="The `next` of the previous page.")] = "",
) -> Response:
    """Returns a page of jobs, by id. `next` is the `after` of the next page, null on the last page. `cursor`
    is the `since` of `/changes`: that of the first page. Logs and addresses are empty without a token that
    may read all jobs."""

    # Before the snapshot: what changes in between is read again, and none is missed.
    cursor = service.log.cursor

    def query(transaction: Transaction) -> Response:
        found = jobs.list_jobs(transaction, after, limit + 1)
        page_jobs: list[Job] = []
        size = 0
        for job in found[:limit]:
            # Jobs of many replicas make pages of fewer jobs.
            size += len(job.rendezvous_text)
            if page_jobs and size > MAX_PAGE:
                break
            page_jobs.append(job)
        last = page_jobs[-1].id if page_jobs else ""
        latest = reports.latest_reports(transaction, after, last)
        step_times = reports.step_times_of_page(transaction, after, last)
        logs = replicas.logs_of_page(transaction, after, last)
        views = [
            _view(job, service, logs.get(job.id, {}), latest.get(job.id), step_times.get(job.id, []))
            for job in page_jobs
        ]
        page = JobList(views, next=views[-1].id if len(found) > len(views) else None, cursor=cursor)
        return answer(_job_list, page, shows_all=shows_all)

    return await service.database.read(query, is_long=True)


@router.get(
    "/{job}", summary="Read a job", response_model=JobView, responses=errors(401, 403, 404, 422, 500, 503)
)
async def get_job(service: ServiceOf, job: JobId, shows_all: MayReadAll) -> Response:
    """Returns the job's declaration, generations, replicas, latest report and measured step times. Logs and
    addresses are empty without a token that may read the job."""
    view = await service.database.read(partial(find_view, job_id=job, service=service), is_long=True)
    return answer(_job_view, view, shows_all=shows_all)


@router.put(
    "/{job}",
    summary="Declare a job, or replace its declaration",
    dependencies=CONTROLLER,
    responses={
        200: {"description": "The declaration of an existing job was replaced."},
        201: {"description": "The job was created.", "model": JobView},
        **errors(401, 403, 413, 415, 422, 500, 503),
    },
    openapi_extra=spec_body.openapi,
)
async def put_job(
    service: ServiceOf, job: JobId, response: Response, body: Annotated[JobSpecBody, Depends(spec_body)]
) -> JobView:
    """Predictions need the declaration. Bounds that no replica count satisfies are refused."""
    spec = body.to_spec()
    require_valid_replicas(spec.bounds, spec.min_replicas, spec.max_replicas)
    now = service.clock()
    if await service.database.write(partial(jobs.declare, job_id=job, spec=spec, now=now), job_id=job):
        response.status_code = 201
    return await service.database.read(partial(find_view, job_id=job, service=service))


@router.delete(
    "/{job}",
    summary="Delete a job with its reports and replicas",
    dependencies=CONTROLLER,
    status_code=204,
    responses=errors(401, 403, 404, 422, 500, 503),
)
async def delete_job(service: ServiceOf, job: JobId) -> None:
    """Waiting requests for the job are answered with 404. A later report or registration creates it again."""
    now = service.clock()
    await service.database.write(partial(jobs.delete_job, job_id=job, now=now), job_id=job)


@router.get(
    "/{job}/generations",
    summary="Read the generations of a job",
    dependencies=READER,
    responses=errors(401, 403, 404, 422, 500, 503),
)
async def get_generations(service: ServiceOf, job: JobId) -> GenerationsView:
    """Returns when each generation was active, with how many replicas, and why it began."""

    def query(transaction: Transaction) -> GenerationsView:
        return GenerationsView(job, generations.generations(transaction, jobs.find_job(transaction, job)))

    return await service.database.read(query, is_long=True)


def find_view(transaction: Transaction, job_id: str, service: Service) -> JobView:
    """Return the view of a job; errors as for `jobs.find_job`."""
    job = jobs.find_job(transaction, job_id)
    return _view(
        job,
        service,
        replicas.logs(transaction, job),
        reports.latest_report(transaction, job),
        reports.step_times(transaction, job),
    )


def _view(
    job: Job,
    service: Service,
    logs: dict[int, Log],
    latest: GainReport | None,
    step_times: list[StepTime],
) -> JobView:
    state = job.rendezvous
    ages = service.heartbeats.ages(job.id)
    return JobView(
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


def _replica_view(registration: Registration, log: Log | None, age: float | None) -> ReplicaView:
    if log is not None and log.instance == registration.instance:
        registration = replace(registration, log=log.text)
    return ReplicaView.of(registration, age)
