"""Jobs on simulated nodes (KWOK), whose pods have no processes.

The operator and the metrics service are real, in processes of their own. The agents are played by the
benchmark `bench/at_scale.py`. Each namespace has nodes of its own, the nodes of a pool.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

from adascale_core import names
from api.client import TOKEN, ServiceProcess
from cluster.conftest import fresh_namespace
from support.operator_process import OperatorProcess

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from at_scale import SIMULATED, Agents, manifest

PATIENCE = 180.0
POOL = "adascale-test-pool"
"""The label of the nodes of a pool; its value is the namespace."""
OBJECT = (names.API_GROUP, names.API_VERSION)
Object = dict[str, Any]


def require_simulated_nodes(api: client.ApiClient) -> None:
    """Skip the test on a cluster without KWOK."""
    core: Any = client.CoreV1Api(api)
    if not core.list_node(label_selector="type=kwok").items:
        pytest.skip("needs simulated nodes: install KWOK, with nodes that have the label type=kwok")


class Pool:
    """Simulated nodes for the pods of a namespace.

    Args:
        api: a client with all permissions.
        namespace: the namespace.
    """

    def __init__(self, api: client.ApiClient, namespace: str) -> None:
        self.core: Any = client.CoreV1Api(api)
        self.namespace = namespace
        self.nodes: list[str] = []

    def add(self, gpus: int = 1, **labels: str) -> None:
        """Add a node."""
        name = f"{self.namespace}-{len(self.nodes)}"
        has = {"cpu": "96", "memory": "1Ti", "pods": "250", "nvidia.com/gpu": str(gpus)}
        marks = {"type": "kwok", POOL: self.namespace, "kubernetes.io/hostname": name}
        metadata = {"name": name, "annotations": {SIMULATED: "fake"}, "labels": marks | labels}
        taint = {"key": SIMULATED, "value": "fake", "effect": "NoSchedule"}
        status = {"allocatable": has, "capacity": has}
        self.core.create_node({"metadata": metadata, "spec": {"taints": [taint]}, "status": status})
        self.nodes.append(name)

    def delete(self) -> None:
        """Delete all nodes of the pool."""
        for name in self.nodes:
            self.core.delete_node(name)


class Jobs:
    """The jobs of a namespace, on the nodes of its pool."""

    def __init__(self, api: client.ApiClient, namespace: str) -> None:
        self._objects: Any = client.CustomObjectsApi(api)
        self._core: Any = client.CoreV1Api(api)
        self.namespace = namespace

    def submit(self, name: str, metadata: Object | None = None, **spec: Any) -> None:
        """Create a job."""
        body = manifest(name, 0)
        body["metadata"] |= metadata or {}
        body["spec"] |= spec
        body["spec"]["template"]["spec"]["nodeSelector"] = {POOL: self.namespace}
        self._objects.create_namespaced_custom_object(*OBJECT, self.namespace, names.PLURAL, body)

    def delete(self, name: str) -> None:
        """Delete a job."""
        self._objects.delete_namespaced_custom_object(*OBJECT, self.namespace, names.PLURAL, name)

    def status(self, name: str) -> Object:
        """Return the status of a job."""
        raw = self._objects.get_namespaced_custom_object(*OBJECT, self.namespace, names.PLURAL, name)
        status: Object = raw.get("status", {})
        return status

    def condition(self, name: str, kind: str = "Running") -> Object:
        """Return a condition of a job; without fields if there is none yet."""
        conditions: list[Object] = self.status(name).get("conditions", [])
        return next((each for each in conditions if each["type"] == kind), {"reason": "", "message": ""})

    def trains_on(self, name: str, replicas: int) -> bool:
        """Whether a job trains on this number of replicas."""
        return bool(
            self.condition(name)["reason"] == "Training" and self.status(name)["replicas"] == replicas
        )

    def pods(self, name: str) -> dict[str, Any]:
        """Return the pods of a job that are not being deleted, by uid."""
        found = self._core.list_namespaced_pod(
            self.namespace, label_selector=f"{names.LABEL_JOB}={name}"
        ).items
        return {pod.metadata.uid: pod for pod in found if pod.metadata.deletion_timestamp is None}


@contextmanager
def operator_at_work(
    api: client.ApiClient, kubeconfig: str, namespace: str, folder: Path
) -> Iterator[OperatorProcess]:
    """Run the operator, the metrics service and the agents of a namespace during the context."""
    token = folder / "token"
    token.write_text(TOKEN)
    with ServiceProcess(folder) as service:
        url = f"http://127.0.0.1:{service.port}"
        # Of all namespaces, so that it watches nodes.
        operator = OperatorProcess(kubeconfig, url, token, folder, "--lease-namespace", namespace)
        try:
            with Agents(url, heartbeat=3.0, report=1.0, token=TOKEN).following(api, namespace):
                yield operator
        finally:
            operator.stop(signal.SIGKILL)


class Place:
    """A namespace with a pool of nodes, in which an operator works."""

    def __init__(self, api: client.ApiClient, namespace: str) -> None:
        self.api = api
        self.namespace = namespace
        self.jobs = Jobs(api, namespace)
        self.pool = Pool(api, namespace)


@contextmanager
def place_at_work(api: client.ApiClient, kubeconfig: str, folder: Path) -> Iterator[Place]:
    """Make a place for the context. Skip the test on a cluster without KWOK."""
    require_simulated_nodes(api)
    with fresh_namespace(api) as namespace, operator_at_work(api, kubeconfig, namespace, folder):
        place = Place(api, namespace)
        yield place
        place.pool.delete()
