"""The explained decision about the replica count of a job, which the controller stores."""

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends

from adascale_api.bodies.requests import DecisionBody
from adascale_api.data.sql import Transaction
from adascale_api.data.store import decisions, jobs
from adascale_api.data.store.jobs import JobNotFoundError
from adascale_api.errors import FieldError, InvalidInputError
from adascale_api.http.request_body import JsonBody
from adascale_api.routes.common import CONTROLLER, READER, JobId, MayKnowJobs, ServiceOf, errors
from adascale_core.job_id import parse_job_id
from adascale_core.views.decision import DecisionView

router = APIRouter(prefix="/jobs/{job}/decision", tags=["decision"])
decision_body = JsonBody(DecisionBody)


class DecisionNotFoundError(JobNotFoundError):
    """There is no decision about the job."""

    def __init__(self, job_id: str) -> None:
        super(JobNotFoundError, self).__init__(
            f"there is no decision about job {job_id} yet: the controller stores one soon after the start"
        )


@router.put(
    "",
    summary="Store the decision about the replica count",
    dependencies=CONTROLLER,
    status_code=204,
    responses=errors(401, 403, 404, 413, 415, 422, 500, 503),
    openapi_extra=decision_body.openapi,
)
async def put_decision(
    service: ServiceOf, job: JobId, body: Annotated[DecisionBody, Depends(decision_body)]
) -> None:
    """Replaces the last one. It explains the allocation, and does not change it."""
    if parse_job_id(body.job) != job:
        raise InvalidInputError(
            [FieldError(field="job", got=body.job, expected=f"{job}, the job in the path")]
        )
    decision = body.to_decision(job)
    await service.database.write(partial(decisions.store, decision=decision), job_id=job, is_report=True)


@router.get(
    "",
    summary="Read why the job has its replica count",
    dependencies=READER,
    responses=errors(401, 403, 404, 422, 500, 503),
)
async def get_decision(service: ServiceOf, job: JobId, may_know_jobs: MayKnowJobs) -> DecisionView:
    """Returns the last decision: the replica count and its reason, what other counts would give, which other
    jobs would have to give up replicas for them, and what limits the count. If reads are protected, a job's
    own token does not show which other jobs."""

    def query(transaction: Transaction) -> DecisionView:
        found = decisions.find(transaction, jobs.find_job(transaction, job))
        if found is None:
            raise DecisionNotFoundError(job)
        return found if may_know_jobs else found.without_other_jobs()

    return await service.database.read(query)
