"""Parts of the system and of the cluster are down for a while: training continues, and the system recovers.

Nodes and the API server can't be stopped through the API. Environment variables name the commands that
stop and start them; the tests append arguments:

    ADASCALE_TEST_NODE         NAME stop|start|freeze|thaw
    ADASCALE_TEST_APISERVER    stop|start

A stopped node is lost to Kubernetes, and its pods run on. `freeze`, which `test_chaos.py` uses, also stops
the processes of its pods, whose connections stay open and silent, until `thaw`. A command that can't freeze
nodes exits with 2 then: that test makes the other faults, and is reported as skipped.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from adascale_core import names
from cluster.system import JobUnderTest, System, Workspace, job_manifest, succeeded, wait_until

pytestmark = [pytest.mark.disturbs, pytest.mark.timeout(600)]

LONG: dict[str, Any] = {"maxReplicas": 2, "minReplicas": 2}
"""A job that stays on two replicas and never ends by itself."""


SPREAD: dict[str, Any] = {
    "topologySpreadConstraints": [
        {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "DoNotSchedule",
            "labelSelector": {"matchLabels": {names.LABEL_JOB: "paced"}},
        }
    ]
}
"""Fields of a pod that put the replicas of a job on different nodes."""


def command(variable: str, what: str) -> Callable[..., None]:
    """What a test may stop and start with."""
    command = os.environ.get(variable)
    if not command:
        pytest.skip(f"needs to stop {what}: set {variable}, see {__file__}")

    def run(*arguments: str) -> None:
        subprocess.run([*shlex.split(command), *arguments], check=True, timeout=120)

    return run


def steps(job: JobUnderTest) -> int:
    """Return the last reported step; 0 if there is no report."""
    latest = job.view()["latest"]
    return latest["step"] if latest else 0


def wait_for_steps(job: JobUnderTest, more: int = 40) -> None:
    """Wait until the job has reported `more` more steps."""
    before = steps(job)
    wait_until(lambda: steps(job) >= before + more, f"{more} more steps after {before}", patience=120)


def assert_one_job(job: JobUnderTest, replicas: int) -> None:
    """Assert that each replica has one pod, and that status and service agree on the generation.

    The operator deletes pods after the replicas that are left train.
    """
    wait_until(lambda: job.pods().keys() == set(range(replicas)), "the pods of these replicas")
    view, status = job.view(), job.status()
    assert view["active"]["generation"] == view["desired"]["generation"] == status["allocation"]["generation"]
    assert view["active"]["replicas"] == status["replicas"] == replicas


def test_training_continues_without_the_operator_and_later_edits_are_applied(
    system: System, workspace: Workspace
) -> None:
    job = workspace.submit(job_manifest(maxReplicas=2))
    job.wait_until_training(2)
    uids = job.uids()
    with system.scaled(f"deployment/{names.CONTROLLER}", 0):
        wait_until(lambda: not system.pods_of(names.CONTROLLER), "the operator's end")
        wait_for_steps(job)
        # A replica is lost meanwhile: service and agents do without the operator, which replaces it later.
        job.kubectl("delete", "pod", job.pods()[1].metadata.name, "--grace-period=0", "--force")
        wait_for_steps(job)
        job.edit(maxReplicas=1, minReplicas=1)
    job.wait_until_training(1)
    wait_until(lambda: job.uids() == {0: uids[0]}, "the end of rank 1")
    assert_one_job(job, 1)
    status = job.status()
    assert status["disruptions"] == 1
    assert status["failures"] == 0


def test_a_killed_metrics_service_keeps_what_it_has_answered(system: System, workspace: Workspace) -> None:
    job = workspace.submit(job_manifest(**LONG))
    job.wait_until_training(2)
    wait_for_steps(job)
    uids = job.uids()
    generation = job.view()["active"]["generation"]
    history = system.get(f"/jobs/{job.id}/gain/history")["points"]
    with system.scaled(f"statefulset/{names.API_SERVICE}", 0):
        system.kill(names.API_SERVICE)
        wait_until(lambda: not system.pods_of(names.API_SERVICE), "the service's end")
        # Longer than its agents' heartbeats take to run out.
        away = time.monotonic()
        wait_until(lambda: time.monotonic() - away > names.HEARTBEAT_TIMEOUT + 1, "the time", patience=60)
        assert job.uids() == uids
    wait_until(lambda: answers(system, job), "the service's answer", patience=120)
    wait_for_steps(job)
    after = system.get(f"/jobs/{job.id}/gain/history?points=5000")["points"]
    known = {(report["generation"], report["step"]) for report in after}
    assert {(report["generation"], report["step"]) for report in history} <= known
    assert job.view()["active"]["generation"] == generation
    assert job.uids() == uids
    assert (job.status()["disruptions"], job.status()["failures"]) == (0, 0)


def answers(system: System, job: JobUnderTest) -> Any:
    """Return the gain view of the service; None if it does not answer."""
    try:
        return system.get(f"/jobs/{job.id}/gain")
    except AssertionError:
        return None


@contextmanager
def stopped(run: Callable[..., None], *names: str) -> Iterator[None]:
    """Something is stopped meanwhile."""
    run(*names, "stop")
    try:
        yield
    finally:
        run(*names, "start")


def test_training_continues_during_an_outage_of_the_api_server(system: System, workspace: Workspace) -> None:
    run = command("ADASCALE_TEST_APISERVER", "the API server")
    job = workspace.submit(job_manifest(**LONG))
    job.wait_until_training(2)
    uids, before = job.uids(), steps(job)
    with stopped(run):
        stopped_at = time.monotonic()
        wait_until(lambda: time.monotonic() - stopped_at > 30, "half a minute", patience=60)
    wait_until(lambda: is_reachable(job), "the API server")
    wait_until(lambda: steps(job) > before, "steps")
    assert job.uids() == uids
    assert (job.status()["disruptions"], job.status()["failures"]) == (0, 0)
    # The operator works, whether it has held out or was started again.
    job.edit(maxReplicas=1, minReplicas=1)
    job.wait_until_training(1)
    assert_one_job(job, 1)


def is_reachable(job: JobUnderTest) -> bool:
    """Whether the API server answers."""
    try:
        job.raw()
    except (ApiException, HTTPError):
        return False
    return True


def test_training_leaves_a_lost_node_and_uses_it_again_when_it_returns(
    system: System, workspace: Workspace
) -> None:
    run = command("ADASCALE_TEST_NODE", "a node")
    nodes = require_two_nodes(system)
    resources = {"requests": {"cpu": "50m"}, "limits": {"nvidia.com/gpu": "1"}}
    capacity = {
        node.metadata.name: node.status.allocatable.get("nvidia.com/gpu")
        for node in system.core.list_node().items
    }
    if any(capacity[name] != "4" for name in nodes[:2]):
        pytest.skip("needs two nodes of four nvidia.com/gpu each, as `--gpus 4` claims")
    # More than a node holds, so that both are needed. Six from the start, which saves the growth.
    job = workspace.submit(
        job_manifest(
            container={"resources": resources}, minReplicas=6, maxReplicas=6, maxBatchSize=24, pace=0.1
        )
    )
    lost = run_operator_beside_service(system, nodes[:2])
    job.wait_until_training(6, timeout=240)
    job.edit(minReplicas=2)
    assert places(job) == {*nodes[:2]}
    with stopped(run, lost):
        wait_until(lambda: not is_ready(system, lost), f"{lost} to be declared lost", patience=120)
        declared = time.monotonic()
        status = job.wait_for(
            "training on the other node",
            lambda status: status.get("replicas") in (2, 3, 4) and places(job) <= {*nodes} - {lost},
            timeout=90,
        )
        assert time.monotonic() - declared < 60
        wait_for_steps(job)
        assert status["failures"] == 0
    wait_until(lambda: is_ready(system, lost), f"{lost} to be back", patience=120)
    job.wait_until_training(6, timeout=300)
    assert places(job) == {*nodes[:2]}
    assert job.status()["failures"] == 0


def test_the_other_members_notice_a_node_that_is_silent_and_continue(
    system: System, workspace: Workspace
) -> None:
    run = command("ADASCALE_TEST_NODE", "a node")
    nodes = require_two_nodes(system)
    job = workspace.submit(job_manifest(pod=SPREAD, maxReplicas=2))
    silent = run_operator_beside_service(system, nodes[:2])
    job.wait_until_training(2, timeout=180)
    assert silent in places(job)
    generation = job.view()["active"]["generation"]
    with frozen(run, silent):
        wait_until(
            lambda: job.view()["active"]["generation"] > generation, "a generation without it", patience=60
        )
        assert job.view()["active"]["replicas"] == 1
        wait_for_steps(job)
    job.wait_until_training(2, timeout=300)
    status = job.status()
    assert (status["failures"], status["disruptions"]) == (0, 1)


@contextmanager
def frozen(run: Callable[..., None], node: str) -> Iterator[None]:
    """Freeze a node and its pods, whose connections stay open."""
    try:
        run(node, "freeze")
        yield
    finally:
        run(node, "thaw")


def require_two_nodes(system: System) -> list[str]:
    """Return the nodes once they are ready; skip the test if there are not two that can share a volume."""
    nodes = [node.metadata.name for node in system.core.list_node().items if not is_reserved(node)]
    if len(nodes) < 2 or not system.storage.shared:
        pytest.skip("needs two nodes and a volume that both can mount")
    # A node of an earlier test may become ready only now.
    wait_until(lambda: all(is_ready(system, name) for name in nodes), "all nodes", patience=120)
    return nodes


def run_operator_beside_service(system: System, nodes: list[str]) -> str:
    """Move the operator to the node of the service. Returns the other node."""
    (service,) = system.pods_of(names.API_SERVICE)
    service_node = system.core.read_namespaced_pod(service, names.SYSTEM_NAMESPACE).spec.node_name
    other = next(name for name in nodes if name != service_node)
    succeeded(system.kubectl("cordon", other))
    try:
        system.kill(names.CONTROLLER)
        what = f"deployment/{names.CONTROLLER}"
        succeeded(
            system.kubectl(
                "-n", names.SYSTEM_NAMESPACE, "rollout", "status", what, "--timeout=120s", timeout=130
            )
        )
    finally:
        succeeded(system.kubectl("uncordon", other))
    return other


def places(job: JobUnderTest) -> set[str]:
    """Return the nodes of the job's pods."""
    return {
        pod.spec.node_name
        for pod in job.pods().values()
        if pod.spec.node_name and pod.metadata.deletion_timestamp is None
    }


def is_reserved(node: Any) -> bool:
    """Whether a node has a taint other than those of an unavailable node."""
    passing = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
    return any(taint.key not in passing for taint in node.spec.taints or ())


def is_ready(system: System, name: str) -> bool:
    """Whether a node is ready."""
    conditions = system.core.read_node(name).status.conditions
    return any(condition.type == "Ready" and condition.status == "True" for condition in conditions)
