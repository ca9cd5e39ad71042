"""What the controller calls: jobs, their allocations and explained decisions, and the changes of all jobs."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Response

from adascale_api.bodies import AllocationBody, DecisionBody, JobSpecBody
from adascale_api.data.job import StoredJob
from adascale_api.data.sql import Transaction
from adascale_api.data.store import jobs, reports
from adascale_api.errors import ConflictBody, FieldError, InvalidInputError, NotFoundError
from adascale_api.http.request_body import object_body
from adascale_api.routes.common import (
    CONTROLLER,
    DELETED,
    OF_A_JOB,
    READER,
    After,
    ClosedOf,
    JobId,
    Limit,
    MayKnowJobs,
    MayReadAll,
    ServiceOf,
    Wait,
    answer,
    error_response,
    errors,
)
from adascale_api.service.changes import one_of
from adascale_api.service.service import Service, delete_in_pieces
from adascale_core.batch.plans import require_valid_replicas
from adascale_core.errors import InvalidJobError
from adascale_core.job_id import parse_job_id
from adascale_core.messages.allocation import Allocation, AllocationView
from adascale_core.messages.job_spec import JobSpec, LocalBszLimit
from adascale_core.performance.throughput import single_replica_seconds
from adascale_core.rendezvous.rendezvous import StaleAllocationError
from adascale_core.views.decision import DecisionView
from adascale_core.views.jobs import (
    Comparison,
    GenerationsView,
    GenerationView,
    JobChanges,
    JobList,
    JobView,
    ReplicaView,
)

_STEP_TIME_SIZE = 150
"""Bytes of a step time in an answer, approximately."""


router = APIRouter(prefix="/jobs", tags=["jobs"], responses=OF_A_JOB)
spec_body = object_body(JobSpecBody, lambda body: JobSpec(**vars(body)))
allocation_body = object_body(AllocationBody, lambda body: Allocation(**vars(body)))
decision_body = object_body(DecisionBody, lambda body: DecisionView.from_json(body.model_dump()))
changes_router = APIRouter(tags=["jobs"], responses=OF_A_JOB)


@router.get("", summary="List all jobs", response_model=JobList)
async def get_jobs(
    service: ServiceOf,
    shows_all: MayReadAll,
    limit: Limit = 100,
    after: After = "",
) -> Response:
    """Returns a page of jobs, by id. `next` is the `after` of the next page, null on the last page. `cursor`
    is the `since` of `/changes`: that of the first page. Logs and addresses are empty without a token that
    may read all jobs."""

    # Before the snapshot: what changes in between is read again, and none is missed.
    cursor = service.log.cursor

    def query(transaction: Transaction) -> Response:
        views, following = jobs.list_jobs(transaction, after, limit, view_reader(service))
        return answer(JobList(views, following, cursor), shows_all=shows_all)

    return await service.database.read_long(query)


@router.get("/{job}", summary="Read a job", response_model=JobView, responses=errors(404))
async def get_job(service: ServiceOf, job: JobId, shows_all: MayReadAll) -> Response:
    """Returns the job's declaration, generations, replicas, latest report and measured step times. Logs and
    addresses are empty without a token that may read the job."""
    view = await service.database.read_long(find_view, job, service)
    return answer(view, shows_all=shows_all)


@router.put(
    "/{job}",
    summary="Declare a job, or replace its declaration",
    dependencies=CONTROLLER,
    responses={
        200: {"description": "The declaration of an existing job was replaced."},
        201: {"description": "The job was created.", "model": JobView},
        **DELETED,
        **errors(413, 415),
    },
    openapi_extra=spec_body.openapi,
)
async def put_job(
    service: ServiceOf, job: JobId, response: Response, spec: Annotated[JobSpec, Depends(spec_body)]
) -> JobView:
    """Predictions need the declaration. Bounds that no replica count satisfies are refused."""
    if None not in (steps := spec.scale_invariant_steps, samples := spec.train_samples):
        raise InvalidJobError(
            f"scale_invariant_steps ({steps}) and train_samples ({samples}) are both set; set at most one of "
            "them"
        )
    require_valid_replicas(spec.bounds, spec.min_replicas, spec.max_replicas)
    now = service.clock()
    if await service.database.write(jobs.declare, job_id=job, spec=spec, now=now):
        response.status_code = 201
    return await service.database.read(find_view, job, service)


@router.delete(
    "/{job}",
    summary="Delete a job with its reports and replicas",
    dependencies=CONTROLLER,
    status_code=204,
    responses=errors(404),
)
async def delete_job(service: ServiceOf, job: JobId) -> None:
    """Waiting requests for the job are answered with 404. A later report or registration creates it again."""
    await delete_in_pieces(service.database, job, service.clock())


@router.get(
    "/{job}/generations",
    summary="Read the generations of a job",
    dependencies=READER,
    responses=errors(404),
)
async def get_generations(service: ServiceOf, job: JobId) -> GenerationsView:
    """Returns when each generation was active, with how many replicas, and why it began; when the last
    decision was made that `/jobs/{job}/decision` explains; and what the job has taken beside one replica."""

    def query(transaction: Transaction) -> GenerationsView:
        found = jobs.find_job(transaction, job)
        decision = jobs.find_decision(transaction, found)
        decided_at = None if decision is None else decision.time
        generations = jobs.generations(transaction, found)
        return GenerationsView(job, generations, decided_at, _compare(transaction, found, generations))

    return await service.database.read_long(query)


def _compare(
    transaction: Transaction, job: StoredJob, generations: Sequence[GenerationView]
) -> Comparison | None:
    latest = reports.latest_reports(transaction, [job.id])(job.id)
    if latest is None or job.spec is None or not generations or generations[0].generation > 1:
        return None
    bounds = job.spec.with_limit(job.rendezvous.local_bsz_limit).bounds
    step_times = reports.step_times(transaction, [job.id])(job.id)
    measured = [each for each in step_times if each.accelerator == latest.accelerator]
    single = single_replica_seconds(latest.progress, bounds, measured)
    seconds = sum(max((each.ended_at or latest.time) - each.started_at, 0.0) for each in generations)
    return single and Comparison(latest.step, seconds, round(latest.progress), single)


@router.put(
    "/{job}/allocation",
    summary="Set the desired number of replicas",
    dependencies=CONTROLLER,
    response_model=AllocationView,
    responses={
        **DELETED,
        **errors(413, 415),
        409: {"model": ConflictBody, "description": "This generation or a newer one is desired already."},
    },
    openapi_extra=allocation_body.openapi,
)
async def put_allocation(
    service: ServiceOf, job: JobId, desired: Annotated[Allocation, Depends(allocation_body)]
) -> AllocationView | Response:
    """The allocation becomes active once all its replicas are ready. Repeating the request has no effect."""
    try:
        stored = await service.database.write(
            jobs.allocate, job_id=job, allocation=desired, now=service.clock()
        )
        return stored.view
    except StaleAllocationError as error:
        current = (await service.find_job(job)).view
        return error_response(409, ConflictBody(error=str(error), allocation=current))


@router.put(
    "/{job}/decision",
    summary="Store the decision about the replica count",
    dependencies=CONTROLLER,
    status_code=204,
    responses=errors(404, 413, 415),
    openapi_extra=decision_body.openapi,
)
async def put_decision(
    service: ServiceOf, job: JobId, body: Annotated[DecisionView, Depends(decision_body)]
) -> None:
    """Replaces the last one. It explains the allocation, and does not change it."""
    if parse_job_id(body.job) != job:
        raise InvalidInputError(
            [FieldError(field="job", got=body.job, expected=f"{job}, the job in the path")]
        )
    decision = replace(body, job=job)
    await service.database.write(jobs.store_decision, job_id=job, decision=decision)


@router.get(
    "/{job}/decision",
    summary="Read why the job has its replica count",
    dependencies=READER,
    responses=errors(404),
)
async def get_decision(service: ServiceOf, job: JobId, may_know_jobs: MayKnowJobs) -> DecisionView:
    """Returns the last decision: the replica count and its reason, what other counts would give, which other
    jobs would have to give up replicas for them, and what limits the count. If reads are protected, a job's
    own token does not show which other jobs."""

    def query(transaction: Transaction) -> DecisionView:
        found = jobs.find_decision(transaction, jobs.find_job(transaction, job))
        if found is None:
            raise NotFoundError(
                f"there is no decision about job {job} yet: the controller stores one soon after the start"
            )
        return found if may_know_jobs else found.without_other_jobs()

    return await service.database.read(query)


@changes_router.get(
    "/changes",
    summary="Read the jobs that have changed, and optionally wait for a change",
    response_model=JobChanges,
    responses=errors(410),
)
async def get_changes(
    service: ServiceOf,
    closed: ClosedOf,
    shows_all: MayReadAll,
    since: Annotated[str, Query(max_length=64, description="The `cursor` of the last answer.")],
    wait: Wait = 0.0,
    limit: Limit = 100,
) -> Response:
    """Returns the jobs that have changed since the cursor, as they are now, and the ids of those that no
    longer exist. Reports alone do not change a job. If there are more than `limit`, the next request returns
    them. Logs and addresses are empty without a token that may read all jobs."""
    async with one_of(service.anonymous_followers, counts=not shows_all and wait > 0):
        await service.log.wait(since, wait, closed)
    found = service.log.since(since, limit)

    # The transaction begins after the changes, so it sees them.
    changes: tuple[list[JobView], list[str], str] = ([], [], since)
    if found:
        changes = await service.database.read_long(jobs.read_jobs, found, since, view_reader(service))
    return answer(JobChanges(*changes), shows_all=shows_all)


def view_reader(service: Service) -> jobs.Reader[JobView]:
    """Return what makes the views of jobs. Logs may be large, and are read with each."""

    def read(transaction: Transaction, ids: Sequence[str]) -> Callable[[StoredJob], tuple[JobView, int]]:
        latest = reports.latest_reports(transaction, ids)
        step_times = reports.step_times(transaction, ids)

        def view(job: StoredJob) -> tuple[JobView, int]:
            state = job.rendezvous
            ages = service.heartbeats.ages(job.id)
            logs = jobs.logs(transaction, job)
            times = step_times(job.id)
            found = JobView(
                id=job.id,
                spec=job.spec,
                **vars(job.view),
                failures=state.failures,
                disruptions=state.disruptions,
                restarts_without_progress=state.restarts_without_progress,
                replicas=[
                    ReplicaView.of(replace(each, log=logs.get((rank, each.instance))), ages.get(rank))
                    for rank, each in sorted(state.replicas.items())
                ],
                latest=latest(job.id),
                step_times=times,
                created_at=job.created_at,
                local_bsz_limits=[LocalBszLimit(*each) for each in sorted(state.local_bsz_limits.items())],
                local_bsz_limit=state.local_bsz_limit,
            )
            return found, sum(map(len, logs.values())) + _STEP_TIME_SIZE * len(times)

        return view

    return read


def find_view(transaction: Transaction, job_id: str, service: Service) -> JobView:
    """Return the view of a job; errors as for `jobs.find_job`."""
    view, _ = view_reader(service)(transaction, [job_id])(jobs.find_job(transaction, job_id))
    return view
