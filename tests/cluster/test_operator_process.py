"""The operator as a process of its own, whose jobs have pods that no node takes."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import urllib3
from kubernetes import client

from api.client import TOKEN, ServiceProcess
from cluster.adascalejobs import Jobs
from cluster.conftest import Kubectl, fresh_namespace
from cluster.system import JobUnderTest, System, job_manifest, wait_until
from support.operator_process import WRITES, OperatorProcess

pytestmark = pytest.mark.cluster

NOWHERE: dict[str, Any] = {"nodeSelector": {"example.com/no-such-node": "true"}, "volumes": []}
STATE: dict[str, Any] = {"volumeMounts": []}


@pytest.fixture
def installation(api_client: client.ApiClient, kubectl: Kubectl, crd: dict[str, Any]) -> System:
    return System(api_client, kubectl)


@dataclass
class Place:
    """A namespace with operators and a metrics service of its own."""

    installation: System
    kubeconfig: str
    service: ServiceProcess
    folder: Path
    namespace: str
    operators: list[OperatorProcess] = field(default_factory=list)

    def operator(self, *options: str) -> OperatorProcess:
        """Start an operator."""
        token = self.folder / "token"
        token.write_text(TOKEN)
        url = f"http://127.0.0.1:{self.service.port}"
        arguments = ("--namespace", self.namespace, "--lease-namespace=", *options)
        started = OperatorProcess(self.kubeconfig, url, token, self.folder, *arguments)
        self.operators.append(started)
        return started

    def submit(self, name: str, **spec: Any) -> JobUnderTest:
        """Make a job whose pods no node takes."""
        manifest = job_manifest(name, pod=NOWHERE, container=STATE, **spec)
        Jobs(self.installation.api, self.namespace).submit(manifest)
        return JobUnderTest(self.installation, self.namespace, name)

    def desired(self, job: JobUnderTest) -> tuple[int, int] | None:
        """Generation and count that the service wants."""
        url = f"http://127.0.0.1:{self.service.port}/jobs/{job.id}"
        answer = urllib3.request("GET", url, retries=False)
        desired = answer.json().get("desired") if answer.status == 200 else None
        return (desired["generation"], desired["replicas"]) if desired else None


@pytest.fixture
def place(
    installation: System, api_client: client.ApiClient, kubeconfig: str, tmp_path: Path
) -> Iterator[Place]:
    with ServiceProcess(tmp_path) as service, fresh_namespace(api_client) as namespace:
        volume = client.V1PersistentVolumeClaim(
            metadata=client.V1ObjectMeta(name="shared"),
            spec=client.V1PersistentVolumeClaimSpec(
                access_modes=["ReadWriteMany"],
                storage_class_name="",
                resources=client.V1VolumeResourceRequirements(requests={"storage": "1Gi"}),
            ),
        )
        client.CoreV1Api(api_client).create_namespaced_persistent_volume_claim(namespace, volume)
        made = Place(installation, kubeconfig, service, tmp_path, namespace)
        yield made
        for operator in made.operators:
            operator.stop(signal.SIGKILL)


def test_an_idle_operator_makes_no_calls(place: Place) -> None:
    jobs = [place.submit(f"idle-{number}", suspend=True) for number in range(5)]
    operator = place.operator()
    wait_until(lambda: all(job.status().get("state") == "Suspended" for job in jobs), "all of them suspended")
    observed: list[Counter[str]] = []

    def waits() -> int:
        """How often the operator has begun to wait for changes of the metrics service."""
        return sum(count for kind, count in operator.calls.items() if kind.endswith("GET changes"))

    def is_quiet() -> bool:
        """Whether the operator sent nothing to the cluster between two waits for changes."""
        versions = [job.raw()["metadata"]["resourceVersion"] for job in jobs]
        before, first = operator.calls, waits()
        wait_until(lambda: waits() > first, "another wait for changes", patience=60)
        made = operator.calls - before
        print(dict(made))
        observed.append(made)
        same = [job.raw()["metadata"]["resourceVersion"] for job in jobs] == versions
        return same and not any(kind.startswith("cluster") for kind in made)

    # A watch that the API server ends is started again, so some intervals may have calls.
    wait_until(is_quiet, "a wait without a call to the cluster", patience=150)
    assert not any(kind.split()[1] in WRITES for made in observed[1:] for kind in made), observed
    assert operator.stop() == 0
