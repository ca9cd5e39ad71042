"""Calls of the Kubernetes API, against a server of HTTP."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from kubernetes.aio.client import ApiClient, Configuration

from adascale_controller.operator.apply.kubernetes_cluster import MAX_TRIES, ApiServerError, KubernetesCluster
from adascale_controller.operator.observe.pods import Pod
from adascale_controller.operator.types.actions import Event, Stop, StoppedPod
from adascale_controller.operator.types.kubernetes import Resource
from support.observed_jobs import job

Answer = Callable[[int], web.Response]
"""Returns the answer to the call of a number, from 0."""
POD = {"metadata": {"name": "digits-0-0", "namespace": "team"}}


@asynccontextmanager
async def served(
    answer: Answer,
    calls: list[float],
    statuses: list[int | None],
    queries: list[dict[str, str]] | None = None,
    seen: list[tuple[str, str]] | None = None,
    **options: Any,
) -> AsyncIterator[KubernetesCluster]:
    """An API server, which adds the time of each call to `calls`, and the client the status to `statuses`."""

    async def handle(request: web.Request) -> web.Response:
        calls.append(time.monotonic())
        if queries is not None:
            queries.append(dict(request.query))
        if seen is not None:
            seen.append((request.method, request.path))
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


def test_an_object_that_can_not_be_read_is_left_out_of_a_list() -> None:
    good = {**POD, "spec": {"containers": [{"name": "worker"}]}}
    good["metadata"] = {**POD["metadata"], "uid": "a", "resourceVersion": "1"}
    bad = {**good, "spec": {"containers": []}}
    page = {"items": [bad, good], "metadata": {"resourceVersion": "7"}}

    async def main() -> None:
        async with served(lambda _: web.json_response(page), [], []) as cluster:
            pods, version = await cluster.list(Resource.PODS)
        assert [each.name for each in pods if isinstance(each, Pod)] == ["digits-0-0"]
        assert version == 7

    asyncio.run(main())


# -- rights ------------------------------------------------------------------------------------------------

VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
NOT_CALLED = {
    # An object that is applied and does not exist is created.
    ("", "configmaps", "create"),
    # For owner references with blockOwnerDeletion, where the admission plugin checks them.
    ("adascale.dev", "adascalejobs/finalizers", "update"),
    # kopf watches them.
    ("adascale.dev", "adascalejobs", "watch"),
    ("", "pods", "watch"),
    ("", "nodes", "watch"),
}


def right(method: str, path: str) -> tuple[str, str, str]:
    """Return the API group, the resource and the verb of a call."""
    found = re.fullmatch(r"/(?:api|apis/([^/]+))/v\w+(?:/namespaces/[^/]+)?/(\w+)(/[^/]+)?(/status)?", path)
    assert found is not None, path
    group, resource, name, status = found.groups()
    verb = VERBS.get(method, "get" if name else "list")
    return group or "", resource + (status or ""), verb


def test_the_operator_has_the_rights_for_its_calls_and_no_others() -> None:
    seen: list[tuple[str, str]] = []
    answer = {
        "items": [],
        "metadata": {"resourceVersion": "1"},
        "preferredVersion": {"version": "v1beta1"},
        "status": {"allowed": True},
    }
    named = {"metadata": {"name": "a", "namespace": "team"}}

    async def main() -> None:
        async with served(lambda _: web.json_response(answer), [], [], seen=seen) as cluster:
            for resource in Resource:
                await cluster.list(resource)
            await cluster.may_list_nodes()
            await cluster.admit_pod(POD)
            await cluster.list_events("team", "")
            await cluster.list_kueue("clusterqueues")
            await cluster.list_kueue("workloads", "team")
            await cluster.delete_workload("team", "a")
            await cluster.apply_status(job(), {})
            await cluster.apply_config_map(named)
            for how in Stop:
                await cluster.stop_pod("team", StoppedPod("a", "uid", how))
            await cluster.delete_job(job())
            await cluster.record_event(job(), Event("Started", "message"), 0.0, "operator")
            for plural in ("pods", "persistentvolumeclaims", "secrets", "leases"):
                await cluster.get(plural, "team", "a")
                await cluster.create(plural, named)
            assert await cluster.create("podgroups", named)
            for plural in ("secrets", "leases"):
                await cluster.replace(plural, named)

    asyncio.run(main())
    # Everyone may ask which versions there are, and for the own rights.
    calls = [each for each in seen if each[1].count("/") > 2 and "selfsubject" not in each[1]]
    deploy = Path(__file__).parents[2] / "deploy"
    given = {
        (group, resource, verb)
        for file in ("base/rights.yaml", "all-namespaces/rights.yaml")
        for item in yaml.safe_load_all((deploy / file).read_text())
        if item["metadata"]["labels"]["app.kubernetes.io/name"] == "adascale-controller"
        for rule in item.get("rules", ())
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert given == {right(*each) for each in calls} | NOT_CALLED
