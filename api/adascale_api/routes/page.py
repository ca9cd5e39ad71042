"""The page that shows the jobs, with headers that keep its files harmless, and what only the page reads."""

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.staticfiles import StaticFiles

from adascale_api.routes.common import READER, ServiceOf, answer, errors
from adascale_api.service.summaries import INTERVAL, Document, SummaryList, make_summaries
from adascale_core.views.usage import UsageGroup, UsageView, usage

HEADERS = {
    # Nothing runs or is loaded that is not a file of the page.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    # A later version of the service has other files with the same names.
    "Cache-Control": "no-cache",
}
MAX_USAGE_SECONDS = 366 * 86400
MAX_POINTS = 1000
LISTED = 8
"""Jobs or namespaces whose use is listed; the use of the others is summed."""
router = APIRouter(tags=["page"])


_FILES = StaticFiles(packages=[("adascale_api", "page")])


@router.get("/", include_in_schema=False)
async def get_page(request: Request) -> Response:
    """The page. It holds no data: it reads them as any other client does."""
    return await get_page_file(request, "index.html")


@router.get("/page/{name}", include_in_schema=False)
async def get_page_file(request: Request, name: str) -> Response:
    """A file of the page, which holds no data."""
    response = await _FILES.get_response(name, request.scope)
    response.headers.update(HEADERS)
    return response


@router.get(
    "/summaries",
    summary="Read the summaries of all jobs",
    dependencies=READER,
    response_model=SummaryList,
    responses={304: {"description": "They have the `ETag` of `If-None-Match`."}, **errors(401, 403, 503)},
)
async def get_summaries(service: ServiceOf, request: Request) -> Response:
    """Returns what a list shows of the first 5,000 jobs, without logs and addresses. `interval` is the number
    of seconds after which a page asks again."""
    content, etag, _ = await service.documents.get("summaries", partial(make_summaries, service.summaries))
    headers = {**HEADERS, "ETag": etag}
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type="application/json", headers=headers)


@router.get(
    "/usage",
    summary="Read how many replicas jobs have used over time",
    dependencies=READER,
    response_model=UsageView,
    responses=errors(401, 403, 422, 503),
)
async def get_usage(
    service: ServiceOf,
    seconds: Annotated[
        int, Query(ge=60, le=MAX_USAGE_SECONDS, description="The length of the time until now.")
    ] = 3600,
    points: Annotated[int, Query(ge=1, le=MAX_POINTS, description="The number of intervals.")] = 240,
    by: Annotated[UsageGroup, Query(description="What the replicas are summed by.")] = UsageGroup.JOB,
) -> Response:
    """Returns the mean number of replicas in each interval, for each of the jobs or namespaces that have used
    most, and for all others together."""

    async def make() -> Document:
        now = service.clock()
        used = await service.used_replicas(now - seconds, now)
        found = await run_in_threadpool(usage, used, now - seconds, now, points, LISTED, by)
        return Document(bytes(answer(found, shows_all=True).body), "", min(INTERVAL, seconds / points))

    document = await service.documents.get((seconds, points, by), make)
    return Response(document.content, media_type="application/json")
