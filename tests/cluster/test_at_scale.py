"""Many jobs on simulated nodes (KWOK): an operator that ends, however it does, changes none of them.

The agents are played by the benchmark `bench/at_scale.py`; the pods have no processes.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from operator import gt
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

from adascale_core import names
from api.client import TOKEN, ServiceProcess
from cluster.adascalejobs import Jobs
from cluster.conftest import fresh_namespace
from cluster.system import wait_until
from support.operator_process import OperatorProcess

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from at_scale import Agents, manifest

pytestmark = pytest.mark.cluster

JOBS = 30
REPLICAS = 2
PATIENCE = 180.0


class ManyJobs(Jobs):
    """The jobs of a namespace."""

    def __init__(self, api: client.ApiClient, namespace: str) -> None:
        super().__init__(api, namespace)
        self._core: Any = client.CoreV1Api(api)
        self._namespace = namespace

    def submit_number(self, number: int) -> None:
        """Create a job that grows to `REPLICAS` replicas, for which all nodes have room."""
        body = manifest(f"job-{number:02d}", number % 5)
        body["spec"]["maxReplicas"] = REPLICAS
        self.submit(body)

    def have_grown(self) -> bool:
        """Whether all jobs train on as many replicas as they want."""
        wanted = ("Running", REPLICAS, REPLICAS)
        statuses = [raw.get("status", {}) for raw in self.all()]
        return all((s.get("state"), s.get("replicas"), s.get("desiredReplicas")) == wanted for s in statuses)

    def progress(self) -> list[int]:
        """The progress of each job, as the operator has written it."""
        return [raw["status"].get("progress", 0) for raw in self.all()]

    def is_observed(self, number: int) -> bool:
        """Whether an operator has seen the last edit of a job."""
        raw = self.get(f"job-{number:02d}")
        return bool(raw["status"].get("observedGeneration") == raw["metadata"]["generation"])

    def made(self) -> dict[str, Any]:
        """What must stay as it is: pods and generations."""
        pods = self._core.list_namespaced_pod(self._namespace, label_selector=names.LABEL_JOB).items
        return {
            "pods": sorted(pod.metadata.uid for pod in pods),
            "counts": [
                [
                    raw["status"].get(name)
                    for name in ("allocation", "rescales", "restarts", "desiredReplicas")
                ]
                for raw in self.all()
            ],
        }


@pytest.fixture
def namespace(api_client: client.ApiClient, crd: dict[str, Any]) -> Iterator[str]:
    core: Any = client.CoreV1Api(api_client)
    if not core.list_node(label_selector="type=kwok").items:
        pytest.skip("needs simulated nodes: install KWOK, with nodes that have the label type=kwok")
    with fresh_namespace(api_client) as name:
        yield name


def test_no_end_of_the_operator_changes_a_job(
    api_client: client.ApiClient, kubeconfig: str, namespace: str, tmp_path: Path
) -> None:
    jobs = ManyJobs(api_client, namespace)
    token = tmp_path / "token"
    token.write_text(TOKEN)
    with ServiceProcess(tmp_path) as service:
        url = f"http://127.0.0.1:{service.port}"
        operators: list[OperatorProcess] = []

        def start(name: str) -> OperatorProcess:
            folder = tmp_path / name
            folder.mkdir()
            # Of all namespaces, so that it watches nodes.
            options = ("--lease-namespace", namespace, "--identity", name)
            operators.append(OperatorProcess(kubeconfig, url, token, folder, *options))
            return operators[-1]

        def works(number: int) -> None:
            """Wait until an operator has followed an edit, and has looked at the reports of all jobs."""
            jobs.edit(f"job-{number:02d}", backoffLimit=4 + number)  # has no effect on the pods
            wait_until(lambda: jobs.is_observed(number), "an operator at work", patience=PATIENCE)
            before = jobs.progress()
            wait_until(
                lambda: all(map(gt, jobs.progress(), before)), "the progress of all jobs", patience=PATIENCE
            )

        try:
            with Agents(url, heartbeat=3.0, report=1.0, token=TOKEN).following(api_client, namespace):
                first = start("first")
                with ThreadPoolExecutor(4) as threads:
                    list(threads.map(jobs.submit_number, range(JOBS)))
                wait_until(jobs.have_grown, "training of all jobs", patience=PATIENCE)
                assert "Not allowed to list nodes" not in first.log
                made = jobs.made()
                assert len(made["pods"]) == REPLICAS * JOBS
                assert first.stop() == 0
                second = start("second")
                works(0)
                assert jobs.made() == made, "after a restart"
                third = start("third")
                wait_until(lambda: "second holds it" in third.log, "an operator that waits")
                assert second.stop() == 0
                works(1)
                assert jobs.made() == made, "after a takeover from an operator that ends"
                fourth = start("fourth")
                wait_until(lambda: "third holds it" in fourth.log, "an operator that waits")
                third.stop(signal.SIGKILL)
                works(2)
                assert jobs.made() == made, "after a takeover from a killed operator"
        finally:
            for operator in operators:
                operator.stop(signal.SIGKILL)
