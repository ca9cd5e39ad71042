"""What limits of a namespace do to a job, on simulated nodes (KWOK): a quota of pods, a LimitRange."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

from cluster import system
from cluster.simulated import PATIENCE, Jobs, place_at_work

pytestmark = pytest.mark.cluster

wait_until = partial(system.wait_until, patience=PATIENCE)


@pytest.fixture
def jobs(
    api_client: client.ApiClient, kubeconfig: str, crd: dict[str, Any], tmp_path: Path
) -> Iterator[Jobs]:
    """The jobs of a namespace with a node."""
    with place_at_work(api_client, kubeconfig, tmp_path) as place:
        place.pool.add(8)
        yield place.jobs


def test_a_job_whose_limits_are_exceeded_says_so_and_starts_once_they_are_raised(
    api_client: client.ApiClient, jobs: Jobs
) -> None:
    core: Any = client.CoreV1Api(api_client)
    namespace = jobs.namespace
    hard = {"pods": "0"}
    core.create_namespaced_resource_quota(namespace, {"metadata": {"name": "pods"}, "spec": {"hard": hard}})
    jobs.submit("digits")
    wait_until(lambda: jobs.condition("digits")["reason"] == "QuotaExceeded", "the quota of pods")
    assert "exceeded quota: pods" in jobs.condition("digits")["message"]
    # A LimitRange refuses a pod before its quota is counted.
    most = [{"type": "Container", "max": {"memory": "16Mi"}}]
    core.create_namespaced_limit_range(namespace, {"metadata": {"name": "memory"}, "spec": {"limits": most}})
    core.delete_namespaced_resource_quota("pods", namespace)
    wait_until(lambda: jobs.condition("digits")["reason"] == "PodCreationFailed", "the LimitRange")
    assert "maximum memory usage per Container is 16Mi" in jobs.condition("digits")["message"]
    core.delete_namespaced_limit_range("memory", namespace)
    wait_until(lambda: jobs.condition("digits")["reason"] == "Training", "training")
    assert jobs.status("digits")["failures"] == 0
