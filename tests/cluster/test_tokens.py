"""Tokens of service accounts, made and reviewed by a real API server, at a real metrics service."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client

from adascale_core.messages.reports import GainReport
from adascale_core.names import API_AUDIENCE, job_audience
from api.client import Answer, Client, ServiceProcess, a_registration, a_report
from cluster.conftest import fresh_namespace
from cluster.system import wait_until

REPORT = a_report().to_json()
SPEC = {"batch_size": 8, "max_batch_size": 32, "max_replicas": 4}
WORK = {
    "report": ("POST", "/gain", REPORT),
    "register": ("PUT", "/replicas/0", a_registration().to_json()),
}
CONTROL = {
    "declare": ("PUT", "", SPEC),
    "allocate": ("PUT", "/allocation", {"generation": 7, "replicas": 2}),
    "delete": ("DELETE", "", None),
}
CALLS: dict[str, tuple[str, str, object]] = {**WORK, **CONTROL}

TokenOf = Callable[..., str]


@pytest.fixture
def other_namespace(api_client: client.ApiClient) -> Iterator[str]:
    with fresh_namespace(api_client) as name:
        yield name


@pytest.fixture
def token_of(api_client: client.ApiClient) -> TokenOf:
    """Makes a token of an account, and the account where there is none."""
    core = client.CoreV1Api(api_client)

    def make(namespace: str, account: str, *audiences: str, seconds: int = 600) -> str:
        try:
            core.create_namespaced_service_account(
                namespace, client.V1ServiceAccount(metadata=client.V1ObjectMeta(name=account))
            )
        except client.ApiException as error:
            if error.status != 409:
                raise
        request = client.AuthenticationV1TokenRequest(
            spec=client.V1TokenRequestSpec(audiences=list(audiences), expiration_seconds=seconds)
        )
        made = core.create_namespaced_service_account_token(account, namespace, request)
        assert made.status is not None
        return str(made.status.token)

    return make


@pytest.fixture
def service(tmp_path: Path, kubeconfig: str, namespace: str) -> Iterator[ServiceProcess]:
    with reviewing(tmp_path, kubeconfig, f"{namespace}:operator") as running:
        yield running


@contextmanager
def reviewing(folder: Path, kubeconfig: str, controller: str) -> Iterator[ServiceProcess]:
    options = ("--token-review", "--controller-account", controller)
    with ServiceProcess(folder, *options, environ={"KUBECONFIG": kubeconfig}) as running:
        yield running
        assert "Traceback" not in running.log()


def call(service: ServiceProcess, token: str | None, job: str, name: str) -> Answer:
    method, path, body = CALLS[name]
    with Client(service.port, token) as connection:
        return connection.call(method, f"/jobs/{job}{path}", body)


def jobs(service: ServiceProcess) -> Any:
    with Client(service.port, None) as connection:
        return connection.get("/jobs")


def test_the_operators_token_may_write_everything_and_a_workers_its_job(
    service: ServiceProcess, namespace: str, token_of: TokenOf
) -> None:
    job = f"{namespace}.digits"
    operator = token_of(namespace, "operator", API_AUDIENCE)
    worker = token_of(namespace, "default", job_audience(job))
    assert [call(service, operator, job, name).status for name in ("declare", "allocate")] == [201, 200]
    assert [call(service, worker, job, name).status for name in WORK] == [200, 200]
    (known,) = jobs(service)["jobs"]
    assert GainReport.from_json(known["latest"]) == GainReport.from_json(REPORT)
    assert len(known["replicas"]) == 1
    assert [call(service, operator, job, name).status for name in WORK] == [200, 200]
    assert call(service, operator, job, "delete").status == 204
    assert jobs(service)["jobs"] == []


def test_a_write_that_a_token_does_not_allow_changes_nothing(
    service: ServiceProcess,
    namespace: str,
    other_namespace: str,
    token_of: TokenOf,
    api_client: client.ApiClient,
) -> None:
    job = f"{namespace}.digits"
    operator = token_of(namespace, "operator", API_AUDIENCE)
    assert call(service, operator, job, "declare").status == 201
    assert call(service, operator, f"{other_namespace}.digits", "declare").status == 201
    deleted = token_of(namespace, "leaving", job_audience(job))
    client.CoreV1Api(api_client).delete_namespaced_service_account("leaving", namespace)
    worker = token_of(namespace, "default", job_audience(job))
    head, payload, signature = worker.split(".")
    forged = f"{head}.{payload}.{signature[::-1]}"
    unauthorized = {
        "none": None,
        "garbage": "garbage",
        "forged": forged,
        "of a deleted account": deleted,
        "for the API server": token_of(namespace, "default"),
        "for another service": token_of(namespace, "default", "https://example.org"),
    }
    forbidden = {
        "of another job": token_of(namespace, "default", job_audience(f"{namespace}.other")),
        "of another namespace": token_of(other_namespace, "default", job_audience(job)),
        "of another namespace's job": token_of(
            other_namespace, "default", job_audience(f"{other_namespace}.digits")
        ),
        "an operator's elsewhere": token_of(other_namespace, "operator", API_AUDIENCE),
        "not the operator's": token_of(namespace, "default", API_AUDIENCE),
    }
    before = jobs(service)
    for status, tokens in ((401, unauthorized), (403, forbidden)):
        for which, token in tokens.items():
            for name in CALLS:
                answer = call(service, token, job, name)
                assert (answer.status, which, name) == (status, which, name), answer.body
                assert "token" in answer.body["error"]
                assert ("www-authenticate" in answer.headers) is (status == 401)
    for name in CONTROL:
        # Nobody without the operator's token moves a job, not even its own workers.
        answer = call(service, worker, job, name)
        assert (answer.status, name) == (403, name)
        required = f"send a token of {namespace}:operator with the audience adascale.dev/api"
        assert required in answer.body["error"]
    assert jobs(service) == before
    assert token_is_not_told(service, [worker, *filter(None, unauthorized.values()), *forbidden.values()])


def token_is_not_told(service: ServiceProcess, tokens: list[str]) -> bool:
    return not any(token in service.log() for token in tokens if len(token) > 100)


def test_a_metrics_service_that_may_not_review_tokens_names_the_permission(
    tmp_path: Path, kubeconfig: str, namespace: str, token_of: TokenOf, api_client: client.ApiClient
) -> None:
    job = f"{namespace}.digits"
    worker = token_of(namespace, "default", job_audience(job))
    configuration = yaml.safe_load(Path(kubeconfig).read_text())
    for user in configuration["users"]:
        user["user"] = {"token": token_of(namespace, "reviewer", seconds=3600)}
    own = tmp_path / "kubeconfig"
    own.write_text(yaml.safe_dump(configuration))
    binding = client.V1ClusterRoleBinding(
        metadata=client.V1ObjectMeta(name=f"adascale-{namespace}"),
        role_ref=client.V1RoleRef(
            api_group="rbac.authorization.k8s.io", kind="ClusterRole", name="system:auth-delegator"
        ),
        subjects=[client.RbacV1Subject(kind="ServiceAccount", name="reviewer", namespace=namespace)],
    )
    rights = client.RbacAuthorizationV1Api(api_client)
    with reviewing(tmp_path, str(own), f"{namespace}:operator") as service:
        answer = call(service, worker, job, "report")
        assert answer.status == 503
        assert "its account needs permission to create tokenreviews" in answer.body["error"]
        assert answer.headers["retry-after"] == "5"
        assert jobs(service)["jobs"] == []
        rights.create_cluster_role_binding(binding)
        try:
            wait_until(lambda: call(service, worker, job, "report").status == 200, "its being allowed to")
        finally:
            rights.delete_cluster_role_binding(binding.metadata.name)  # type: ignore[union-attr, arg-type]
        assert "the Kubernetes API reviews tokens again" in service.log()
