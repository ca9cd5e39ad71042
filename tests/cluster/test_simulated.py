"""Jobs on simulated nodes (KWOK), whose pods have no processes: an autoscaler, and limits of a namespace.

The operator and the metrics service are real, in processes of their own. The agents are played by the
benchmark `bench/at_scale.py`.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

from api.client import TOKEN, ServiceProcess
from cluster import system
from cluster.adascalejobs import Jobs
from cluster.conftest import fresh_namespace
from support.operator_process import OperatorProcess

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from at_scale import SIMULATED, Agents, manifest

pytestmark = pytest.mark.cluster

POOL = "adascale-test-pool"
"""The label of the nodes for the pods of a namespace; its value is the namespace."""
Object = dict[str, Any]
wait_until = partial(system.wait_until, patience=180.0)


class Place:
    """A namespace, its jobs, and the simulated nodes for their pods."""

    def __init__(self, api: client.ApiClient, namespace: str) -> None:
        self.core: Any = client.CoreV1Api(api)
        self.namespace = namespace
        self.nodes: list[str] = []
        self.jobs = Jobs(api, namespace)

    def add_node(self, gpus: int) -> None:
        name = f"{self.namespace}-{len(self.nodes)}"
        has = {"cpu": "96", "memory": "1Ti", "pods": "250", "nvidia.com/gpu": str(gpus)}
        labels = {"type": "kwok", POOL: self.namespace, "kubernetes.io/hostname": name}
        metadata = {"name": name, "annotations": {SIMULATED: "fake"}, "labels": labels}
        taint = {"key": SIMULATED, "value": "fake", "effect": "NoSchedule"}
        status = {"allocatable": has, "capacity": has}
        self.core.create_node({"metadata": metadata, "spec": {"taints": [taint]}, "status": status})
        self.nodes.append(name)

    def submit(self, name: str, **spec: Any) -> None:
        """Create a job."""
        body = manifest(name, 0)
        body["spec"] |= spec
        body["spec"]["template"]["spec"]["nodeSelector"] = {POOL: self.namespace}
        self.jobs.submit(body)

    def status(self, name: str) -> Object:
        """Return the status of a job."""
        status: Object = self.jobs.get(name).get("status", {})
        return status

    def condition(self, name: str) -> Object:
        """Return the condition Running of a job; without fields if it has none yet."""
        conditions: list[Object] = self.status(name).get("conditions", [])
        return next((each for each in conditions if each["type"] == "Running"), {"reason": "", "message": ""})

    def trains_on(self, name: str, replicas: int) -> bool:
        """Whether a job trains on this number of replicas."""
        return bool(
            self.condition(name)["reason"] == "Training" and self.status(name)["replicas"] == replicas
        )

    def unschedulable_pods(self) -> list[str]:
        """Return the uids of the pods for which the scheduler finds no node."""
        pods = self.core.list_namespaced_pod(self.namespace, field_selector="status.phase=Pending").items
        return [
            pod.metadata.uid
            for pod in pods
            if any(each.reason == "Unschedulable" for each in pod.status.conditions or ())
        ]


@pytest.fixture
def place(
    api_client: client.ApiClient, kubeconfig: str, crd: dict[str, Any], tmp_path: Path
) -> Iterator[Place]:
    """A place with an operator, a metrics service and agents."""
    core: Any = client.CoreV1Api(api_client)
    if not core.list_node(label_selector="type=kwok").items:
        pytest.skip("needs simulated nodes: install KWOK, with nodes that have the label type=kwok")
    token = tmp_path / "token"
    token.write_text(TOKEN)
    with fresh_namespace(api_client) as namespace, ServiceProcess(tmp_path) as service:
        url = f"http://127.0.0.1:{service.port}"
        # Of all namespaces, so that it watches nodes.
        operator = OperatorProcess(kubeconfig, url, token, tmp_path, "--lease-namespace", namespace)
        made = Place(api_client, namespace)
        try:
            with Agents(url, heartbeat=3.0, report=1.0, token=TOKEN).following(api_client, namespace):
                yield made
        finally:
            operator.stop(signal.SIGKILL)
            for node in made.nodes:
                core.delete_node(node)


@contextmanager
def autoscaler(place: Place, most: int) -> Iterator[None]:
    """Add a node of one GPU for each pod that the scheduler finds no node for, up to `most`."""
    stopping = threading.Event()

    def run() -> None:
        served: set[str] = set()
        while not stopping.wait(0.5):
            for uid in place.unschedulable_pods():
                if uid not in served and len(place.nodes) < most:
                    served.add(uid)
                    place.add_node(gpus=1)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()


def test_nodes_are_added_for_the_smallest_count_and_for_growth(place: Place) -> None:
    with autoscaler(place, most=2):
        place.submit("waits")
        wait_until(
            lambda: place.condition("waits")["reason"] == "InsufficientCapacity",
            "a job that requests no nodes",
        )
        assert (place.unschedulable_pods(), place.nodes) == ([], [])
        # It would get the node first.
        place.jobs.delete("waits")
        place.submit("requests", requestNodes=True, maxReplicas=2)
        wait_until(lambda: place.trains_on("requests", 1), "training on 1 replica")
        wait_until(lambda: place.trains_on("requests", 2), "training on 2 replicas")
        assert len(place.nodes) == 2
        assert place.status("requests")["disruptions"] == 0
        assert place.unschedulable_pods() == []


def test_a_job_whose_limits_are_exceeded_says_so_and_starts_once_they_are_raised(place: Place) -> None:
    """A quota of pods, then a LimitRange, which refuses a pod before its quota is counted."""
    core, namespace = place.core, place.namespace
    place.add_node(gpus=8)
    hard = {"pods": "0"}
    core.create_namespaced_resource_quota(namespace, {"metadata": {"name": "pods"}, "spec": {"hard": hard}})
    place.submit("digits")
    wait_until(lambda: place.condition("digits")["reason"] == "QuotaExceeded", "the quota of pods")
    assert "exceeded quota: pods" in place.condition("digits")["message"]
    most = [{"type": "Container", "max": {"memory": "16Mi"}}]
    core.create_namespaced_limit_range(namespace, {"metadata": {"name": "memory"}, "spec": {"limits": most}})
    core.delete_namespaced_resource_quota("pods", namespace)
    wait_until(lambda: place.condition("digits")["reason"] == "PodCreationFailed", "the LimitRange")
    assert "maximum memory usage per Container is 16Mi" in place.condition("digits")["message"]
    core.delete_namespaced_limit_range("memory", namespace)
    wait_until(lambda: place.condition("digits")["reason"] == "Training", "training")
    assert place.status("digits")["failures"] == 0
