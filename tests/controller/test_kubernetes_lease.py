"""The lease of the API server: its requests, and what each answer does."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from kubernetes.aio.client import ApiClient

from adascale_controller.operator.apply.kubernetes_cluster import KubernetesCluster
from adascale_controller.operator.runtime.lease import Election
from support.event_loops import in_virtual_time


@asynccontextmanager
async def answering(*answers: tuple[int, bytes] | Exception) -> AsyncIterator[tuple[ApiClient, list[Any]]]:
    """Yield a client that gets these answers, and the list of its requests."""
    remaining = list(answers)
    requests: list[Any] = []

    class Answer:
        def __init__(self, status: int, content: bytes) -> None:
            self.status = status
            self.content = content
            self.headers: dict[str, str] = {}

        async def read(self) -> bytes:
            return self.content

    async with ApiClient() as api:

        async def call(
            method: str, url: str, header_params: Any = None, body: Any = None, *rest: Any, **more: Any
        ) -> Answer:
            requests.append((method, url.partition("/apis")[2].partition("?")[0], body))
            answer = remaining.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return Answer(*answer)

        api.call_api = call
        yield api, requests


def body(spec: Mapping[str, Any], version: str = "7") -> bytes:
    return json.dumps({"metadata": {"name": "l", "resourceVersion": version}, "spec": spec}).encode()


@in_virtual_time
async def test_a_missing_lease_is_created() -> None:
    made = body({"holderIdentity": "me", "acquireTime": "t"})
    async with answering((404, b"{}"), (201, made)) as (api, requests):
        candidate = Election(KubernetesCluster(api, None), ("system", "controller"), "me")
        await candidate.acquire()
        assert candidate.held
    (_, read, _), (method, path, sent) = requests
    assert read == "/coordination.k8s.io/v1/namespaces/system/leases/controller"
    assert (method, path) == ("POST", "/coordination.k8s.io/v1/namespaces/system/leases")
    assert sent["metadata"] == {"name": "controller", "namespace": "system"}
    assert sent["spec"]["holderIdentity"] == "me"
    assert sent["spec"]["leaseDurationSeconds"] == 30
    assert len(sent["spec"]["renewTime"]) == len("2026-03-01T10:00:00.000000Z")


@in_virtual_time
async def test_a_lease_is_replaced_with_its_resource_version() -> None:
    mine = body({"holderIdentity": "me"}, "8")
    async with answering((200, body({"holderIdentity": "", "leaseTransitions": 4})), (200, mine)) as (
        api,
        requests,
    ):
        await Election(KubernetesCluster(api, None), ("system", "controller"), "me").acquire()
    method, path, sent = requests[1]
    assert (method, path.rpartition("/")[2]) == ("PUT", "controller")
    assert sent["metadata"]["resourceVersion"] == "7"
    assert sent["spec"]["leaseTransitions"] == 5


@pytest.mark.parametrize(
    "failure",
    [
        (403, b'{"message": "leases is forbidden"}'),
        (500, b"{}"),
        (502, b"<html>bad gateway</html>"),
        (200, b"[]"),
        (200, b"{}"),
        ConnectionResetError("reset"),
        TimeoutError(),
    ],
)
@in_virtual_time
async def test_every_unexpected_answer_is_retried(failure: tuple[int, bytes] | Exception) -> None:
    mine = (200, body({"holderIdentity": "me", "acquireTime": "t"}))
    async with answering(failure, mine, (409, b"{}"), failure, mine, mine) as (api, requests):
        candidate = Election(KubernetesCluster(api, None), ("system", "controller"), "me")
        await candidate.acquire()
        assert candidate.held
        assert len(requests) == 6
