"""Calls of the Kubernetes API, against a server of HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio.client import ApiClient, Configuration

from adascale_controller.operator.apply.cluster import ApiServerError
from adascale_controller.operator.apply.kubernetes_cluster import MAX_TRIES, KubernetesCluster

Answer = Callable[[int], web.Response]
"""Returns the answer to the call of a number, from 0."""
POD = {"metadata": {"name": "digits-0-0", "namespace": "team"}}


@asynccontextmanager
async def served(
    answer: Answer,
    calls: list[float],
    statuses: list[int | None],
    queries: list[dict[str, str]] | None = None,
    **options: Any,
) -> AsyncIterator[KubernetesCluster]:
    """An API server, which adds the time of each call to `calls`, and the client the status to `statuses`."""

    async def handle(request: web.Request) -> web.Response:
        calls.append(time.monotonic())
        if queries is not None:
            queries.append(dict(request.query))
        return answer(len(calls) - 1)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        async with ApiClient(Configuration(host=f"http://127.0.0.1:{port}")) as api:
            yield KubernetesCluster(api, "team", lambda _method, status: statuses.append(status), **options)
    finally:
        await runner.cleanup()


def busy(seconds: int | None) -> web.Response:
    """What an API server answers that has too many requests."""
    headers = {} if seconds is None else {"Retry-After": str(seconds)}
    return web.json_response({"message": "too many requests"}, status=429, headers=headers)


def test_a_call_waits_as_long_as_the_api_server_requests_and_all_others_with_it() -> None:
    calls: list[float] = []
    statuses: list[int | None] = []

    def answer(number: int) -> web.Response:
        return busy(1) if number == 0 else web.json_response({})

    async def main() -> None:
        async with served(answer, calls, statuses) as cluster:
            first = asyncio.create_task(cluster.get("persistentvolumeclaims", "team", "first"))
            while not statuses:
                await asyncio.sleep(0.01)
            await asyncio.gather(first, cluster.get("persistentvolumeclaims", "team", "second"))

    asyncio.run(main())
    assert statuses == [429, 200, 200]
    assert min(calls[1:]) - calls[0] >= 1


def test_an_api_server_that_stays_busy_is_an_error() -> None:
    statuses: list[int | None] = []

    async def main() -> None:
        answers = [None, 3600, 1]
        async with served(
            lambda number: busy(answers[number]), [], statuses, max_retry_after=0.01
        ) as cluster:
            with pytest.raises(ApiServerError, match=r"GET .*first: too many requests") as rejected:
                await cluster.get("persistentvolumeclaims", "team", "first")
            assert rejected.value.status == 429

    asyncio.run(main())
    assert statuses == [429] * MAX_TRIES


def test_unknown_fields_of_a_template_are_rejected() -> None:
    queries: list[dict[str, str]] = []

    async def main() -> None:
        async with served(lambda _: web.json_response({}), [], [], queries) as cluster:
            await cluster.create("pods", POD)

    asyncio.run(main())
    assert [query["fieldValidation"] for query in queries] == ["Strict"]
