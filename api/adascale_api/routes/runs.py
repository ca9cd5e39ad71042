"""What `adascale ui` shows: the runs of state folders. It has what the page reads, and changes nothing."""

from contextlib import AsyncExitStack

from starlette.types import ASGIApp, Receive, Scope, Send

from adascale_api.errors import ErrorBody, NotFoundError, UnavailableError
from adascale_api.routes.common import SERVICE, error_response, response_to
from adascale_api.service.run_services import RunServices


class RunPaths:
    """Sends a request for a run to the routes of a job, with the service that reads the run."""

    def __init__(self, app: ASGIApp, runs: RunServices) -> None:
        self._app = app
        self._runs = runs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        if scope["method"] not in ("GET", "HEAD"):
            body = ErrorBody(error=f"method {scope['method']} is not allowed: runs are only shown here")
            return await error_response(405, body, {"Allow": "GET"})(scope, receive, send)
        path: str = scope["path"]
        if path in ("/jobs", "/jobs/"):
            hint = "`adascale list` lists those on this machine, and /jobs/<run> shows one of them"
            body = ErrorBody(error=f"runs are not listed here: {hint}")
            return await error_response(404, body)(scope, receive, send)
        if path.startswith("/jobs/"):
            run, slash, rest = path.removeprefix("/jobs/").partition("/")
            async with AsyncExitStack() as opened:
                try:
                    job, service = await opened.enter_async_context(self._runs.open(run))
                except (NotFoundError, UnavailableError) as error:
                    return await response_to(error)(scope, receive, send)
                path = f"/jobs/{job}{slash}{rest}"
                state = {**scope.get("state", {}), SERVICE: service}
                scope = {**scope, "path": path, "raw_path": path.encode(), "state": state}
                return await self._app(scope, receive, send)
        return await self._app(scope, receive, send)
