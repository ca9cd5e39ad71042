"""The changes of all jobs, for clients that follow them."""

import logging
from typing import Annotated

from fastapi import APIRouter, Query, Response
from pydantic import TypeAdapter

from adascale_api.data.job import UnreadableJobError
from adascale_api.data.sql import Transaction
from adascale_api.data.store.jobs import JobNotFoundError, PageRoom
from adascale_api.routes.allocation import MAX_WAIT
from adascale_api.routes.common import ClosedOf, MayReadAll, ServiceOf, answer, errors
from adascale_api.routes.job_views import find_view
from adascale_core.views.jobs import JobChanges, JobView

logger = logging.getLogger(__name__)

router = APIRouter(tags=["jobs"])
_changes = TypeAdapter(JobChanges)


@router.get(
    "/changes",
    summary="Read the jobs that have changed, and optionally wait for a change",
    response_model=JobChanges,
    responses=errors(401, 403, 410, 422, 500, 503),
)
async def get_changes(
    service: ServiceOf,
    closed: ClosedOf,
    shows_all: MayReadAll,
    since: Annotated[str, Query(max_length=64, description="The `cursor` of the last answer.")],
    wait: Annotated[
        float,
        Query(
            ge=0, le=MAX_WAIT, allow_inf_nan=False, description="Seconds to wait while nothing has changed."
        ),
    ] = 0.0,
    limit: Annotated[int, Query(ge=1, le=1000, description="The maximum number of jobs.")] = 100,
) -> Response:
    """Returns the jobs that have changed since the cursor, as they are now, and the ids of those that no
    longer exist. Reports alone do not change a job. If there are more than `limit`, the next request returns
    them. Logs and addresses are empty without a token that may read all jobs."""
    with service.anonymous_followers.one(counts=not shows_all and wait > 0):
        await service.log.wait(since, wait, closed)
    found = service.log.since(since, limit)

    def query(transaction: Transaction) -> JobChanges:
        views: list[JobView] = []
        deleted: list[str] = []
        cursor, room = since, PageRoom()
        for job_id, after in found:
            try:
                # The first reads of the transaction follow the changes, so it sees them.
                found_view = find_view(transaction, job_id, service, shows_logs=shows_all)
                if not room.takes(found_view.size):
                    break
                views.append(found_view.view)
            except JobNotFoundError:
                deleted.append(job_id)
            except UnreadableJobError as error:
                logger.error("%s", error)
            cursor = after
        return JobChanges(views, deleted, cursor)

    changes = await service.database.read(query, is_long=True) if found else JobChanges([], [], since)
    return answer(_changes, changes, shows_all=shows_all)
