"""Jobs, which the controller declares and deletes."""

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Response
from pydantic import TypeAdapter

from adascale_api.bodies.field_types import NO_NUL
from adascale_api.bodies.requests import JobSpecBody
from adascale_api.data.sql import Transaction
from adascale_api.data.store import decisions, generations, jobs
from adascale_api.http.request_body import JsonBody
from adascale_api.routes.common import (
    CONTROLLER,
    DELETED,
    READER,
    JobId,
    MayReadAll,
    ServiceOf,
    answer,
    errors,
)
from adascale_api.routes.job_views import find_view, list_views
from adascale_core.batch.plans import require_valid_replicas
from adascale_core.errors import InvalidJobError
from adascale_core.views.generations import GenerationsView
from adascale_core.views.jobs import JobList, JobView

router = APIRouter(prefix="/jobs", tags=["jobs"])
spec_body = JsonBody(JobSpecBody)
_job_list, _job_view = TypeAdapter(JobList), TypeAdapter(JobView)


@router.get("", summary="List all jobs", response_model=JobList, responses=errors(401, 403, 422, 500, 503))
async def get_jobs(
    service: ServiceOf,
    shows_all: MayReadAll,
    limit: Annotated[int, Query(ge=1, le=1000, description="The maximum number of jobs.")] = 100,
    after: Annotated[
        str, Query(max_length=127, pattern=NO_NUL, description="The `next` of the previous page.")
    ] = "",
) -> Response:
    """Returns a page of jobs, by id. `next` is the `after` of the next page, null on the last page. `cursor`
    is the `since` of `/changes`: that of the first page. Logs and addresses are empty without a token that
    may read all jobs."""

    # Before the snapshot: what changes in between is read again, and none is missed.
    cursor = service.log.cursor

    def query(transaction: Transaction) -> Response:
        views, following = list_views(transaction, after, limit, service, shows_logs=shows_all)
        return answer(_job_list, JobList(views, following, cursor), shows_all=shows_all)

    return await service.database.read(query, is_long=True)


@router.get(
    "/{job}", summary="Read a job", response_model=JobView, responses=errors(401, 403, 404, 422, 500, 503)
)
async def get_job(service: ServiceOf, job: JobId, shows_all: MayReadAll) -> Response:
    """Returns the job's declaration, generations, replicas, latest report and measured step times. Logs and
    addresses are empty without a token that may read the job."""
    query = partial(find_view, job_id=job, service=service, shows_logs=shows_all)
    found = await service.database.read(query, is_long=True)
    return answer(_job_view, found.view, shows_all=shows_all)


@router.put(
    "/{job}",
    summary="Declare a job, or replace its declaration",
    dependencies=CONTROLLER,
    responses={
        200: {"description": "The declaration of an existing job was replaced."},
        201: {"description": "The job was created.", "model": JobView},
        **DELETED,
        **errors(401, 403, 413, 415, 422, 500, 503),
    },
    openapi_extra=spec_body.openapi,
)
async def put_job(
    service: ServiceOf, job: JobId, response: Response, body: Annotated[JobSpecBody, Depends(spec_body)]
) -> JobView:
    """Predictions need the declaration. Bounds that no replica count satisfies are refused."""
    spec = body.to_spec()
    if None not in (steps := spec.scale_invariant_steps, samples := spec.train_samples):
        raise InvalidJobError(
            f"scale_invariant_steps ({steps}) and train_samples ({samples}) are both set; set at most one of "
            "them"
        )
    require_valid_replicas(spec.bounds, spec.min_replicas, spec.max_replicas)
    now = service.clock()
    if await service.database.write(partial(jobs.declare, job_id=job, spec=spec, now=now), job_id=job):
        response.status_code = 201
    query = partial(find_view, job_id=job, service=service, shows_logs=True)
    return (await service.database.read(query)).view


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
    """Returns when each generation was active, with how many replicas, and why it began; and when the last
    decision was made that `/jobs/{job}/decision` explains."""

    def query(transaction: Transaction) -> GenerationsView:
        found = jobs.find_job(transaction, job)
        decision = decisions.find(transaction, found)
        decided_at = None if decision is None else decision.time
        return GenerationsView(job, generations.generations(transaction, found), decided_at)

    return await service.database.read(query, is_long=True)
