"""Where the time of replicas went, of one job and of all."""

from collections.abc import Callable, Sequence

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from adascale_api.data.job import StoredJob
from adascale_api.data.sql import Transaction
from adascale_api.data.store import jobs, replica_seconds
from adascale_api.routes.common import OF_A_JOB, READER, After, JobId, Limit, ServiceOf, errors
from adascale_core.views.goodput import GoodputList, GoodputView

router = APIRouter(prefix="/jobs/{job}", tags=["goodput"], responses=OF_A_JOB)
list_router = APIRouter(tags=["goodput"], responses=OF_A_JOB)
_SIZE = 1000
"""Bytes of a job in the list, approximately."""


@router.get(
    "/goodput",
    summary="Read where the time of a job's replicas went",
    dependencies=READER,
    response_model=GoodputView,
    responses=errors(404),
)
async def get_goodput(service: ServiceOf, job: JobId) -> Response:
    """Returns the seconds of its replicas by cause, which add up to the time of their pods; those of running
    ones up to a few seconds ago. `useful` has the seconds of steps times the efficiency of their batch."""

    def query(transaction: Transaction) -> GoodputView:
        return replica_seconds.goodput(transaction, jobs.find_job(transaction, job))

    return JSONResponse((await service.database.read_long(query)).to_json())


@list_router.get(
    "/goodput",
    summary="Read where the time of the replicas of all jobs went",
    dependencies=READER,
    response_model=GoodputList,
)
async def get_goodput_of_all(
    service: ServiceOf,
    limit: Limit = 100,
    after: After = "",
) -> Response:
    """Returns a page of jobs, by id, without their history. `next` is the `after` of the next page, null on
    the last page. `replica_seconds` are those of all jobs, also of deleted ones."""

    def query(transaction: Transaction) -> GoodputList:
        def read(of: Transaction, _: Sequence[str]) -> Callable[[StoredJob], tuple[GoodputView, int]]:
            return lambda job: (GoodputView(job.id, replica_seconds.of_job(of, job)), _SIZE)

        found, following = jobs.list_jobs(transaction, after, limit, read)
        return GoodputList(found, following, replica_seconds.totals(transaction))

    return JSONResponse((await service.database.read_long(query)).to_json())
