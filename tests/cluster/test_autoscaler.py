"""A simulated autoscaler adds a simulated node (KWOK) for each pending pod: a pool at zero, and growth."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

from cluster import system
from cluster.conftest import fresh_namespace
from cluster.simulated import PATIENCE, Jobs, Pool, operator_at_work, require_simulated_nodes

pytestmark = pytest.mark.cluster

wait_until = partial(system.wait_until, patience=PATIENCE)


class Autoscaler:
    """Adds a node of one GPU to a pool for each pod that the scheduler finds no node for.

    Args:
        pool: the pool, at zero.
        most: the number of nodes at most.
    """

    def __init__(self, pool: Pool, most: int) -> None:
        self._pool = pool
        self._most = most
        self._stopping = threading.Event()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Add nodes during the context, and delete them afterwards."""
        thread = threading.Thread(target=self._run, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stopping.set()
            thread.join()
            self._pool.delete()

    def pending(self) -> list[str]:
        """Return the uids of the pods for which the scheduler finds no node."""
        pods = self._pool.core.list_namespaced_pod(
            self._pool.namespace, field_selector="status.phase=Pending"
        ).items
        return [
            pod.metadata.uid
            for pod in pods
            if any(each.reason == "Unschedulable" for each in pod.status.conditions or ())
        ]

    def _run(self) -> None:
        served: set[str] = set()
        while not self._stopping.wait(0.5):
            for uid in self.pending():
                if uid not in served and len(self._pool.nodes) < self._most:
                    served.add(uid)
                    self._pool.add()


@pytest.fixture
def namespace(api_client: client.ApiClient, crd: dict[str, Any]) -> Iterator[str]:
    require_simulated_nodes(api_client)
    with fresh_namespace(api_client) as name:
        yield name


def test_nodes_are_added_for_the_smallest_count_and_for_growth(
    api_client: client.ApiClient, kubeconfig: str, namespace: str, tmp_path: Path
) -> None:
    jobs, pool = Jobs(api_client, namespace), Pool(api_client, namespace)
    autoscaler = Autoscaler(pool, most=2)
    with operator_at_work(api_client, kubeconfig, namespace, tmp_path), autoscaler.running():
        jobs.submit("waits")
        wait_until(
            lambda: jobs.condition("waits")["reason"] == "InsufficientCapacity",
            "a job that requests no nodes",
        )
        assert (autoscaler.pending(), pool.nodes) == ([], [])
        # It would get the node first.
        jobs.delete("waits")
        jobs.submit("requests", requestNodes=True, maxReplicas=2)
        wait_until(lambda: jobs.trains_on("requests", 1), "training on 1 replica")
        wait_until(lambda: jobs.trains_on("requests", 2), "training on 2 replicas")
        assert len(pool.nodes) == 2
        assert jobs.status("requests")["disruptions"] == 0
        assert autoscaler.pending() == []
