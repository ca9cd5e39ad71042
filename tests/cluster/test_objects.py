"""The objects of an AdaScaleJob on a real API server."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from kubernetes import client

from adascale_controller.operator.apply.manifests import claim_manifest, pod_manifest
from adascale_controller.operator.observe.adascalejob import AdaScaleJob
from adascale_controller.operator.observe.pods import read_pod
from adascale_controller.operator.types.actions import NewPod
from adascale_controller.schema import Checkpoint
from support import pod_templates
from support.observed_jobs import checkpoint_settings
from support.pod_templates import container

pytestmark = pytest.mark.cluster

NOWHERE = {"example.com/no-such-node": "true"}
ENFORCED = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}


@pytest.fixture
def restricted(api_client: client.ApiClient, namespace: str) -> str:
    client.CoreV1Api(api_client).patch_namespace(namespace, ENFORCED)
    return namespace


def workload(namespace: str, checkpoint: Checkpoint | None = None, **worker: Any) -> AdaScaleJob:
    made_of = pod_templates.template(
        container(command=["python", "t.py"], **worker),
        initContainers=[container("fetch")],
        nodeSelector=NOWHERE,
    )
    made = pod_templates.workload(
        made_of,
        checkpoint=checkpoint or checkpoint_settings(path="/data"),
        active_deadline_seconds=3600,
    )
    return replace(made, namespace=namespace, uid="0b0e1b0c-8e5b-4a52-a4b8-3f1f9e8d7c6b")


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
