"""Allocations and explained decisions, which the controller stores, and replicas, which agents register."""

from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Response

from adascale_api.bodies import AllocationBody, DecisionBody, RegistrationBody
from adascale_api.data.sql import Transaction
from adascale_api.data.store import jobs
from adascale_api.errors import ConflictBody, ErrorBody, FieldError, InvalidInputError, NotFoundError
from adascale_api.http.request_body import object_body
from adascale_api.routes.common import (
    CONTROLLER,
    DELETED,
    OF_A_JOB,
    READER,
    WORKER,
    ClosedOf,
    JobId,
    MayKnowJobs,
    MayReadAll,
    ServiceOf,
    answer,
    error_response,
    errors,
)
from adascale_core.job_id import parse_job_id
from adascale_core.messages.allocation import Allocation, AllocationView, MemberView
from adascale_core.messages.registration import Registration
from adascale_core.names import MAX_REPLICAS, MAX_STEPS
from adascale_core.rendezvous.rendezvous import StaleAllocationError
from adascale_core.views.decision import DecisionView

MAX_WAIT = 60.0
"""Seconds that a request may wait for a change."""

router = APIRouter(prefix="/jobs/{job}", tags=["allocation"], responses=OF_A_JOB)
allocation_body = object_body(AllocationBody, lambda body: Allocation(**vars(body)))
registration_body = object_body(RegistrationBody, lambda body: Registration(**vars(body)))
decision_router = APIRouter(prefix="/jobs/{job}/decision", tags=["decision"], responses=OF_A_JOB)
decision_body = object_body(DecisionBody, lambda body: DecisionView.from_json(body.model_dump()))


@router.put(
    "/allocation",
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


@router.get(
    "/allocation",
    summary="Read the job's generations, and optionally wait for a change",
    response_model=AllocationView,
    responses=errors(404),
)
async def get_allocation(
    service: ServiceOf,
    job: JobId,
    closed: ClosedOf,
    shows_all: MayReadAll,
    version: Annotated[
        int | None, Query(ge=0, le=MAX_STEPS, description="The last version that the caller has read.")
    ] = None,
    wait: Annotated[
        float,
        Query(
            ge=0,
            le=MAX_WAIT,
            allow_inf_nan=False,
            description="Seconds to wait while the job still has this version.",
        ),
    ] = 0.0,
) -> Response:
    """Answers at once if the job's version is not `version`; otherwise when it changes, or after `wait`
    seconds. Addresses are empty without a token that may read the job."""
    if version is None:
        found = await service.find_job(job)
    else:
        found = await service.wait_for_change(job, version, wait, is_reader=shows_all, closed=closed)
    if shows_all:
        return Response(found.view_json, media_type="application/json")
    return answer(found.view, shows_all=False)


@router.put(
    "/replicas/{replica}",
    summary="Register the state of a replica",
    dependencies=WORKER,
    response_model=MemberView,
    responses={
        **errors(413, 415),
        409: {
            "model": ErrorBody,
            "description": "Members with state have another version of the package. Those that are gone are "
            "removed within the seconds of `Retry-After`.",
        },
    },
    openapi_extra=registration_body.openapi,
)
async def put_replica(
    service: ServiceOf,
    job: JobId,
    replica: Annotated[int, Path(ge=0, lt=MAX_REPLICAS, description="Index of the replica, from 0.")],
    registration: Annotated[Registration, Depends(registration_body)],
) -> Response:
    """Agents repeat it as a heartbeat, at the interval in the answer, which grows with the number of
    replicas. A replica whose heartbeat has expired is absent. Answers with the job's generations, and with
    the secret of its members."""
    if registration.replica != replica:
        got, expected = str(registration.replica), f"{replica}, the index in the path"
        raise InvalidInputError([FieldError(field="replica", got=got, expected=expected)])
    stored = await service.register(job, registration)
    view = stored.rendezvous.member_view(stored.version, registration.instance)
    return answer(replace(view, heartbeat_interval=service.heartbeats.interval), shows_all=True)


@decision_router.put(
    "",
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


@decision_router.get(
    "", summary="Read why the job has its replica count", dependencies=READER, responses=errors(404)
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
