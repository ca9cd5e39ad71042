"""The page that shows the jobs, with headers that keep its files harmless, and what only the page reads."""

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Annotated

from fastapi import APIRouter, HTTPException, Query, Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from adascale_api.data.sql import Transaction
from adascale_api.data.store import jobs
from adascale_api.routes.common import READER, Address, MayReadAll, ServiceOf, errors
from adascale_api.service.job_feed import Subscription
from adascale_core.views.usage import UsageGroup, UsageView, usage

MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
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
files_router = APIRouter()
"""The files of the page, which hold no data."""


@dataclass(frozen=True)
class PageFile:
    """A file of the page."""

    content: bytes
    media_type: str
    etag: str


def load_page() -> dict[str, PageFile]:
    """Return the files of the page, by name."""
    found = {}
    for file in files("adascale_api").joinpath("page").iterdir():
        suffix = "." + file.name.rpartition(".")[2]
        if suffix in MEDIA_TYPES:
            content = file.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            found[file.name] = PageFile(content, MEDIA_TYPES[suffix], etag)
    return found


_files = cache(load_page)


@files_router.get("/", include_in_schema=False)
async def get_page(request: Request) -> Response:
    """The page. It holds no data: it reads them as any other client does."""
    return _answer(request, _files()["index.html"])


@files_router.get("/page/{name}", include_in_schema=False)
async def get_page_file(request: Request, name: str) -> Response:
    """A file of the page."""
    file = _files().get(name)
    if file is None:
        raise HTTPException(404)
    return _answer(request, file)


@router.get("/events", include_in_schema=False)
async def get_events(service: ServiceOf, address: Address, may_read_all: MayReadAll) -> Response:
    """The summaries of all jobs and their changes, as server-sent events. Without logs and addresses."""
    return EventStream(service.feed.connect(address, is_reader=may_read_all))


class EventStream(StreamingResponse):
    """The events of a subscription, which ends with the answer."""

    media_type = "text/event-stream"

    def __init__(self, subscription: Subscription) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(subscription.events(), headers=headers)
        self._subscription = subscription

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until the client disconnects or loses its place."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._subscription.end()


@router.get(
    "/usage",
    summary="Read how many replicas jobs have used over time",
    dependencies=READER,
    responses=errors(401, 403, 422, 503),
)
async def get_usage(
    service: ServiceOf,
    seconds: Annotated[
        int, Query(ge=60, le=MAX_USAGE_SECONDS, description="The length of the time until now.")
    ] = 3600,
    points: Annotated[int, Query(ge=1, le=MAX_POINTS, description="The number of intervals.")] = 240,
    by: Annotated[UsageGroup, Query(description="What the replicas are summed by.")] = UsageGroup.JOB,
) -> UsageView:
    """Returns the mean number of replicas in each interval, for each of the jobs or namespaces that have used
    most, and for all others together."""
    now = service.clock()

    def query(transaction: Transaction) -> UsageView:
        used = jobs.used_replicas(transaction, now - seconds, now)
        return usage(used, now - seconds, now, points, LISTED, by)

    return await service.database.read(query, is_long=True)


def _answer(request: Request, file: PageFile) -> Response:
    headers = {**HEADERS, "ETag": file.etag}
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)
