"""Jobs, which the controller declares and deletes."""

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Response
from sqlalchemy import Connection

from adascale_api.request_body import JsonBody
from adascale_api.request_models import JobSpecBody
from adascale_api.routes.common import CONTROLLER, READER, JobId, ServiceOf, errors
from adascale_api.store import jobs, replicas, reports
from adascale_api.store.jobs import Job
from adascale_api.store.replicas import Replica
from adascale_core.batch import require_valid_replicas
from adascale_core.views import JobList, JobView, ReplicaView

router = APIRouter(prefix="/jobs", tags=["jobs"])
spec_body = JsonBody(JobSpecBody)


@router.get("", summary="List all jobs", dependencies=READER, responses=errors(401, 403, 422, 503))
async def get_jobs(
    service: ServiceOf,
    limit: Annotated[int, Query(ge=1, le=1000, description="The maximum number of jobs.")] = 100,
    after: Annotated[str, Query(max_length=127, description="The `next` of the previous page.")] = "",
) -> JobList:
    """Returns a page of jobs, by id. `next` is the `after` of the next page, null on the last page."""

    def query(connection: Connection) -> JobList:
        found = jobs.list_jobs(connection, after, limit + 1)
        views = [_view(connection, job, service.clock()) for job in found[:limit]]
        return JobList(views, next=views[-1].id if len(found) > limit else None)

    return await service.database.read(query)


@router.get("/{job}", summary="Read a job", dependencies=READER, responses=errors(401, 403, 404, 422, 503))
async def get_job(service: ServiceOf, job: JobId) -> JobView:
    """Returns the job's declaration, generations, replicas, latest report and measured step times."""
    return await service.database.read(partial(_find_view, job_id=job, now=service.clock()))


@router.put(
    "/{job}",
    summary="Declare a job, or replace its declaration",
    dependencies=CONTROLLER,
    responses={
        200: {"description": "The declaration of an existing job was replaced."},
        201: {"description": "The job was created.", "model": JobView},
        **errors(401, 403, 413, 415, 422, 503),
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
    if await service.database.write(partial(jobs.declare, job_id=job, spec=spec, now=now)):
        response.status_code = 201
    return await service.database.read(partial(_find_view, job_id=job, now=now))


@router.delete(
    "/{job}",
    summary="Delete a job with its reports and replicas",
    dependencies=CONTROLLER,
    status_code=204,
    responses=errors(401, 403, 404, 422, 503),
)
async def delete_job(service: ServiceOf, job: JobId) -> None:
    """Waiting requests for the job are answered with 404. A later report or registration creates it again."""
    await service.database.write(partial(jobs.delete_job, job_id=job))
    service.changes.notify(job)


def _find_view(connection: Connection, job_id: str, now: float) -> JobView:
    return _view(connection, jobs.find_job(connection, job_id), now)


def _view(connection: Connection, job: Job, now: float) -> JobView:
    state = job.rendezvous
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
        replicas=[_replica_view(replica, now) for replica in replicas.list_replicas(connection, job)],
        latest=reports.latest_report(connection, job),
        step_times=reports.step_times(connection, job),
        created_at=job.created_at,
    )


def _replica_view(replica: Replica, now: float) -> ReplicaView:
    received_at = replica.heartbeat_at
    return ReplicaView.of(replica.registration, None if received_at is None else max(now - received_at, 0.0))
