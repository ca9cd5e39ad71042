"""Jobs: declared by the controller, read by whoever wants to know."""

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Response
from sqlalchemy import Connection

from adascale_api import store
from adascale_api.bodies import Body
from adascale_api.routes.common import CONTROL, READ, JobId, ServiceOf, errors
from adascale_api.schemas import JobSpecBody
from adascale_api.store import Job
from adascale_core.batch import require_valid_replicas
from adascale_core.views import JobList, JobView, ReplicaView

router = APIRouter(prefix="/jobs", tags=["jobs"])
body = Body(JobSpecBody)


@router.get("", summary="All jobs", dependencies=READ, responses=errors(401, 403, 422, 503))
async def get_jobs(
    service: ServiceOf,
    limit: Annotated[int, Query(ge=1, le=1000, description="At most so many jobs.")] = 100,
    after: Annotated[str, Query(max_length=127, description="The `next` of the list before.")] = "",
) -> JobList:
    """By id; `next` leads on where there are more."""

    def query(connection: Connection) -> JobList:
        jobs = store.find_jobs(connection, after, limit + 1)
        views = [_view(connection, job, service.clock()) for job in jobs[:limit]]
        return JobList(views, next=views[-1].id if len(jobs) > limit else None)

    return await service.database.read(query)


@router.get(
    "/{job}", summary="What is known of a job", dependencies=READ, responses=errors(401, 403, 404, 422, 503)
)
async def get_job(service: ServiceOf, job: JobId) -> JobView:
    """Its declaration, generations, replicas, latest report and measured step times."""
    return await service.database.read(partial(_find_view, job_id=job, now=service.clock()))


@router.put(
    "/{job}",
    summary="Declare a job, or edit its declaration",
    dependencies=CONTROL,
    responses={
        200: {"description": "It was known, and is declared so now."},
        201: {"description": "It is new.", "model": JobView},
        **errors(401, 403, 413, 415, 422, 503),
    },
    openapi_extra=body.openapi,
)
async def put_job(
    service: ServiceOf, job: JobId, response: Response, declared: Annotated[JobSpecBody, Depends(body)]
) -> JobView:
    """Predictions need it. Bounds that no replica count could satisfy are refused."""
    spec = declared.spec()
    require_valid_replicas(spec.bounds, spec.min_replicas, spec.max_replicas)
    now = service.clock()
    if await service.database.write(partial(store.declare, job_id=job, spec=spec, now=now)):
        response.status_code = 201
    return await service.database.read(partial(_find_view, job_id=job, now=now))


@router.delete(
    "/{job}",
    summary="Remove a job and all that is known of it",
    dependencies=CONTROL,
    status_code=204,
    responses=errors(401, 403, 404, 422, 503),
)
async def delete_job(service: ServiceOf, job: JobId) -> None:
    """Its agents, if there are any left, are told that it is unknown."""
    await service.database.write(partial(store.remove, job_id=job))
    service.waiting.notify(job)


def _find_view(connection: Connection, job_id: str, now: float) -> JobView:
    return _view(connection, store.find_job(connection, job_id), now)


def _view(connection: Connection, job: Job, now: float) -> JobView:
    state = job.state
    replicas = [
        ReplicaView.of(
            replica.registration, None if replica.seen_at is None else max(now - replica.seen_at, 0.0)
        )
        for replica in store.replicas(connection, job)
    ]
    return JobView(
        id=job.id,
        spec=job.spec,
        desired=state.desired,
        active=state.active,
        broken=state.broken,
        complete=state.complete,
        version=job.version,
        failures=state.failures,
        disruptions=state.disruptions,
        replicas=replicas,
        latest=store.latest_report(connection, job),
        step_times=store.step_times(connection, job),
        created_at=job.created_at,
    )
