"""The objects of an AdaScaleJob on a real API server: created, resized and suspended.

The pods of these tests are unschedulable: the Job controller creates them, and they never run.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from kubernetes import client

from adascale_controller.job_definition import CheckpointSettings, JobDefinition
from adascale_controller.operator.apply.indexed_job import claim_manifest, indexed_job_manifest, resize_patch
from adascale_controller.operator.observe.pods import Pod, read_pod
from adascale_controller.operator.types.kubernetes import Manifest
from adascale_controller.operator.types.workload import PodSettings, Workload
from adascale_core import names
from adascale_core.failures import IGNORED_EXIT_CODES
from adascale_core.messages.job_spec import JobSpec
from cluster.system import wait_until

pytestmark = pytest.mark.cluster

NOWHERE = {"example.com/no-such-node": "true"}
ENFORCED = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}


@pytest.fixture
def restricted(api_client: client.ApiClient, namespace: str) -> str:
    client.CoreV1Api(api_client).patch_namespace(namespace, ENFORCED)
    return namespace


def workload(namespace: str, checkpoint: CheckpointSettings | None = None, **worker: Any) -> Workload:
    template = {
        "spec": {
            "containers": [{"name": "worker", "image": "trainer:1", "command": ["python", "t.py"], **worker}],
            "initContainers": [{"name": "fetch", "image": "fetch:1"}],
            "nodeSelector": NOWHERE,
        }
    }
    return Workload(
        name="digits",
        namespace=namespace,
        uid="0b0e1b0c-8e5b-4a52-a4b8-3f1f9e8d7c6b",
        job=JobDefinition(
            f"{namespace}.digits",
            JobSpec(4, 256, (4, 64), 1, 4, 1000),
            checkpoint=checkpoint or CheckpointSettings(path="/data"),
            active_deadline_seconds=3600,
        ),
        template=template,
        created_at=1_700_000_000,
        settings=PodSettings("http://adascale-api.adascale-system:8265"),
    )


def without_owner(manifest: Manifest) -> Manifest:
    """Return the object without its owner: an object whose owner does not exist is garbage-collected."""
    metadata = {key: value for key, value in manifest["metadata"].items() if key != "ownerReferences"}
    return manifest | {"metadata": metadata}


def ask(
    api: client.ApiClient, method: str, path: str, body: object = None, patch: bool = False, **query: str
) -> dict[str, Any]:
    """Return the JSON of the API server's answer. What it would only warn about is an error."""
    strict = {} if method == "GET" else {"fieldValidation": "Strict"}
    content = "application/merge-patch+json" if patch else "application/json"
    request = api.param_serialize(
        method,
        path,
        query_params=list((query | strict).items()),
        header_params={"Accept": "application/json", "Content-Type": content},
        body=body,
        auth_settings=["BearerToken"],
    )
    answer = api.call_api(*request)
    reply: dict[str, Any] = json.loads(answer.read())
    assert answer.status < 300, reply["message"]
    return reply


class Jobs:
    """The Job of a workload."""

    def __init__(self, api: client.ApiClient, made: Workload) -> None:
        self.api = api
        self.made = made
        self.path = f"/apis/batch/v1/namespaces/{made.namespace}/jobs"

    def create(self, replicas: int, *, suspend: bool = False) -> None:
        manifest = indexed_job_manifest(self.made, replicas, suspend=suspend, single_node=True)
        ask(self.api, "POST", self.path, without_owner(manifest))

    def resize(self, replicas: int, *, suspend: bool = False) -> None:
        patch = resize_patch(replicas, suspend=suspend)
        ask(self.api, "PATCH", f"{self.path}/{self.made.name}", patch, patch=True)

    @property
    def pods(self) -> dict[int, Pod]:
        path = f"/api/v1/namespaces/{self.made.namespace}/pods"
        found = ask(self.api, "GET", path, labelSelector=f"{names.LABEL_JOB}={self.made.name}")
        pods = [read_pod(pod) for pod in found["items"]]
        assert len({pod.rank for pod in pods}) == len(pods)
        return {pod.rank: pod for pod in pods}

    def wait_for(self, ranks: int) -> dict[int, Pod]:
        wait_until(lambda: set(self.pods) == set(range(ranks)), f"{ranks} pods to be there")
        return self.pods


def test_the_api_server_accepts_every_field_of_the_indexed_job(
    api_client: client.ApiClient, restricted: str
) -> None:
    path = f"/apis/batch/v1/namespaces/{restricted}/jobs"
    for single_node in (False, True):
        for checkpoint in (
            CheckpointSettings(),
            CheckpointSettings(claim_name="shared"),
            CheckpointSettings(path="/data"),
        ):
            manifest = indexed_job_manifest(
                workload(restricted, checkpoint), 3, suspend=False, single_node=single_node
            )
            made = ask(api_client, "POST", path, manifest, dryRun="All")
            assert made["spec"]["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"] == list(
                IGNORED_EXIT_CODES
            )


def test_the_api_server_accepts_the_claim(api_client: client.ApiClient, restricted: str) -> None:
    manifest = claim_manifest(workload(restricted, CheckpointSettings(storage_class_name="none")))
    path = f"/api/v1/namespaces/{restricted}/persistentvolumeclaims"
    ask(api_client, "POST", path, manifest, dryRun="All")


def test_a_namespace_that_enforces_the_restricted_standard_accepts_the_pods(
    api_client: client.ApiClient, restricted: str
) -> None:
    jobs = Jobs(api_client, workload(restricted))
    jobs.create(2)
    jobs.wait_for(2)


def test_the_namespace_rejects_a_privileged_template(api_client: client.ApiClient, restricted: str) -> None:
    made = workload(restricted, securityContext={"privileged": True})
    template = indexed_job_manifest(made, 1, suspend=False, single_node=False)["spec"]["template"]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": template["spec"]}
    with pytest.raises(AssertionError, match="violates PodSecurity"):
        ask(api_client, "POST", f"/api/v1/namespaces/{restricted}/pods", pod, dryRun="All")


def test_pods_are_kept_when_a_job_grows_and_shrinks(api_client: client.ApiClient, restricted: str) -> None:
    jobs = Jobs(api_client, workload(restricted))
    jobs.create(1)
    first = jobs.wait_for(1)[0]
    jobs.resize(4)
    four = jobs.wait_for(4)
    jobs.resize(2)
    two = jobs.wait_for(2)
    assert (two[0].uid, two[1].uid) == (first.uid, four[1].uid)
    assert four[0].uid == first.uid
    wait_until(lambda: jobs.pods[0].problem is not None, "the condition Unschedulable")


def test_a_job_is_suspended_and_resumed(api_client: client.ApiClient, restricted: str) -> None:
    jobs = Jobs(api_client, workload(restricted))
    jobs.create(0, suspend=True)
    jobs.resize(3)
    jobs.wait_for(3)
    jobs.resize(0, suspend=True)
    jobs.wait_for(0)
    jobs.resize(2)
    jobs.wait_for(2)
