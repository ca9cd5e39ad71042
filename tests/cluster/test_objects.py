"""The objects of an AdaScaleJob on a real API server."""

from __future__ import annotations

import json
from typing import Any

import pytest
from kubernetes import client

from adascale_controller.job_definition import JobDefinition
from adascale_controller.operator.apply.manifests import claim_manifest, pod_manifest
from adascale_controller.operator.observe.adascalejob import AdaScaleJob
from adascale_controller.operator.observe.pods import read_pod
from adascale_controller.operator.types.actions import NewPod
from adascale_controller.operator.types.settings import OperatorSettings
from adascale_controller.schema import Checkpoint
from adascale_core.messages.job_spec import JobSpec
from support.observed_jobs import checkpoint_settings

pytestmark = pytest.mark.cluster

NOWHERE = {"example.com/no-such-node": "true"}
ENFORCED = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}


@pytest.fixture
def restricted(api_client: client.ApiClient, namespace: str) -> str:
    client.CoreV1Api(api_client).patch_namespace(namespace, ENFORCED)
    return namespace


def workload(namespace: str, checkpoint: Checkpoint | None = None, **worker: Any) -> AdaScaleJob:
    template = {
        "spec": {
            "containers": [{"name": "worker", "image": "trainer:1", "command": ["python", "t.py"], **worker}],
            "initContainers": [{"name": "fetch", "image": "fetch:1"}],
            "nodeSelector": NOWHERE,
        }
    }
    return AdaScaleJob(
        name="digits",
        generation=1,
        namespace=namespace,
        uid="0b0e1b0c-8e5b-4a52-a4b8-3f1f9e8d7c6b",
        job=JobDefinition(
            f"{namespace}.digits",
            JobSpec(4, 256, (4, 64), 1, 4, 1000),
            checkpoint=checkpoint or checkpoint_settings(path="/data"),
            active_deadline_seconds=3600,
        ),
        template=template,
        created_at=1_700_000_000,
        settings=OperatorSettings("http://adascale-api.adascale-system:8265"),
    )


def ask(api: client.ApiClient, method: str, path: str, body: object = None, **query: str) -> dict[str, Any]:
    """Return the JSON of the API server's answer. What it would only warn about is an error."""
    strict = {} if method == "GET" else {"fieldValidation": "Strict"}
    request = api.param_serialize(
        method,
        path,
        query_params=list((query | strict).items()),
        header_params={"Accept": "application/json", "Content-Type": "application/json"},
        body=body,
        auth_settings=["BearerToken"],
    )
    answer = api.call_api(*request)
    reply: dict[str, Any] = json.loads(answer.read())
    assert answer.status < 300, reply["message"]
    return reply


@pytest.mark.parametrize("single_node", [False, True])
@pytest.mark.parametrize(
    "checkpoint",
    [checkpoint_settings(), checkpoint_settings(claim_name="shared"), checkpoint_settings(path="/data")],
)
def test_a_namespace_that_enforces_the_restricted_standard_accepts_every_field_of_the_pods(
    api_client: client.ApiClient, restricted: str, checkpoint: Checkpoint, single_node: bool
) -> None:
    manifest = pod_manifest(workload(restricted, checkpoint), NewPod(1, 2), single_node=single_node)
    path = f"/api/v1/namespaces/{restricted}/pods"
    made = ask(api_client, "POST", path, manifest, dryRun="All")
    read = read_pod(made)
    assert (read.name, read.rank, read.attempt) == ("digits-1-2", 1, 2)
    assert read.controller[2] == manifest["metadata"]["ownerReferences"][0]["uid"]


def test_the_api_server_accepts_the_claim(api_client: client.ApiClient, restricted: str) -> None:
    manifest = claim_manifest(workload(restricted, checkpoint_settings(storage_class_name="none")))
    path = f"/api/v1/namespaces/{restricted}/persistentvolumeclaims"
    ask(api_client, "POST", path, manifest, dryRun="All")


def test_the_namespace_rejects_a_privileged_template(api_client: client.ApiClient, restricted: str) -> None:
    made = pod_manifest(workload(restricted, securityContext={"privileged": True}), NewPod(0, 0))
    with pytest.raises(AssertionError, match="violates PodSecurity"):
        ask(api_client, "POST", f"/api/v1/namespaces/{restricted}/pods", made, dryRun="All")
