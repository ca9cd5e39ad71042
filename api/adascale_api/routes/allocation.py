"""Allocations and replicas: where the controller and the agents meet."""

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Response
from sqlalchemy import Connection

from adascale_api import store
from adascale_api.bodies import Body
from adascale_api.errors import ConflictBody, InvalidInputError, Problem, error_response
from adascale_api.routes.common import CONTROL, READ, WORK, JobId, ServiceOf, errors
from adascale_api.schemas import MAX_STEP, AllocationBody, RegistrationBody
from adascale_core.messages import AllocationView
from adascale_core.names import MAX_REPLICAS
from adascale_core.rendezvous import StaleAllocationError

MAX_WAIT = 60.0
"""Seconds that a request may wait for a change."""

router = APIRouter(prefix="/jobs/{job}", tags=["allocation"])
allocation_body = Body(AllocationBody)
registration_body = Body(RegistrationBody)


@router.put(
    "/allocation",
    summary="Want a replica count",
    dependencies=CONTROL,
    response_model=AllocationView,
    responses={
        **errors(401, 403, 413, 415, 422, 503),
        409: {"model": ConflictBody, "description": "This generation, or a newer one, is desired already."},
    },
    openapi_extra=allocation_body.openapi,
)
async def put_allocation(
    service: ServiceOf, job: JobId, desired: Annotated[AllocationBody, Depends(allocation_body)]
) -> AllocationView | Response:
    """Becomes active once all its replicas are there. Writing the same one again does no harm."""
    try:
        done = await service.committed(
            job, partial(store.allocate, job_id=job, allocation=desired.allocation(), now=service.clock())
        )
    except StaleAllocationError as error:
        current = await service.database.read(partial(_view, job_id=job))
        return error_response(409, ConflictBody(error=str(error), allocation=current))
    return done.allocation


@router.get(
    "/allocation",
    summary="The job's generations, waited for if asked",
    dependencies=READ,
    responses=errors(401, 403, 404, 422, 503),
)
async def get_allocation(
    service: ServiceOf,
    job: JobId,
    version: Annotated[
        int | None, Query(ge=0, le=MAX_STEP, description="The version that the caller knows.")
    ] = None,
    wait: Annotated[
        float,
        Query(
            ge=0,
            le=MAX_WAIT,
            allow_inf_nan=False,
            description="Seconds to wait while the version is still the known one.",
        ),
    ] = 0.0,
) -> AllocationView:
    """At once if the version is not the one that the caller knows; else when it changes, or `wait` seconds
    are over."""
    read = partial(service.database.read, partial(_view, job_id=job))
    if version is None:
        return await read()
    return await service.waiting.until_changed(job, version, wait, read)


@router.put(
    "/replicas/{rank}",
    summary="Tell what a replica is doing",
    dependencies=WORK,
    responses=errors(401, 403, 413, 415, 422, 503),
    openapi_extra=registration_body.openapi,
)
async def put_replica(
    service: ServiceOf,
    job: JobId,
    rank: Annotated[int, Path(ge=0, lt=MAX_REPLICAS, description="Index of the replica, from 0.")],
    told: Annotated[RegistrationBody, Depends(registration_body)],
) -> AllocationView:
    """To be repeated every few seconds while the agent lives, as a sign of life: one that is silent for too
    long counts as lost. Answers with the job's generations."""
    if told.rank != rank:
        raise InvalidInputError(
            [Problem(field="rank", got=str(told.rank), allowed=f"{rank}, as in the path")]
        )
    done = await service.committed(
        job, partial(store.register, job_id=job, registration=told.registration(), now=service.clock())
    )
    return done.allocation


def _view(connection: Connection, job_id: str) -> AllocationView:
    return store.find_job(connection, job_id).allocation
