"""The Helm chart on a cluster: installed, upgraded, rolled back and uninstalled while a job trains.

The release has one namespace and names of its own, beside the installation of the other tests. It takes over
their CustomResourceDefinition, and leaves it there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kubernetes import client

from adascale_core import names
from cluster.conftest import DEPLOY, Kubectl, fresh_namespace
from cluster.system import JobUnderTest, System, Workspace, job_manifest, succeeded, wait_until

pytestmark = pytest.mark.cluster

RELEASE = "adascale"


class Helm:
    """Helm with the chart of this clone, and its release in a namespace."""

    def __init__(self, kubeconfig: str, folder: Path, namespace: str) -> None:
        self._environ = {**os.environ, "KUBECONFIG": kubeconfig}
        self._namespace = namespace
        self._chart = folder / "adascale-operator"
        subprocess.run([sys.executable, DEPLOY / "chart.py", self._chart], check=True, timeout=60)
        values = (
            "oneNamespace=true",
            f"clusterNameSuffix=-{namespace}",
            "image.tag=dev",
            "image.pullPolicy=Never",
        )
        self._values = [argument for value in values for argument in ("--set", value)]

    def run(self, command: str, *arguments: str) -> str:
        """Run a command about the release. Returns its output."""
        return succeeded(
            subprocess.run(
                ["helm", command, RELEASE, *arguments, "--namespace", self._namespace],
                env=self._environ,
                capture_output=True,
                text=True,
                timeout=600,
                check=False,
            )
        )

    def apply(self, command: str, *values: str) -> str:
        """Install or upgrade the release, and wait until it runs."""
        changed = [argument for value in values for argument in ("--set", value)]
        # The CRD of the installation of the other tests becomes one of this release.
        options = ("--take-ownership", "--force-conflicts", "--wait", "--timeout", "8m")
        return self.run(command, str(self._chart), *self._values, *changed, *options)


@pytest.fixture
def namespace(api_client: client.ApiClient) -> Iterator[str]:
    with fresh_namespace(api_client, {"pod-security.kubernetes.io/enforce": "restricted"}) as name:
        yield name


@pytest.fixture
def helm(kubeconfig: str, namespace: str, tmp_path: Path) -> Iterator[Helm]:
    if shutil.which("helm") is None:
        pytest.skip("needs helm: put it on the PATH")
    made = Helm(kubeconfig, tmp_path, namespace)
    yield made
    made.run("uninstall", "--ignore-not-found")


def continues_to_train(job: JobUnderTest, uid: str) -> None:
    """Check that the first replica is still the same pod, and goes on."""
    step = job.saved_step()
    wait_until(lambda: job.saved_step() > step, f"training after step {step}")
    assert job.uids()[0] == uid


@pytest.fixture
def workspace(api_client: client.ApiClient, kubectl: Kubectl, namespace: str) -> Iterator[Workspace]:
    """The namespace of the release, in which only its own operator may act."""
    system = System(api_client, kubectl)
    if not system.storage.dynamic:
        system.storage.provide(namespace, f"data-{names.API_SERVICE}-0", ["ReadWriteOnce"])
    with system.operator_barred_from(namespace):
        yield Workspace(system, namespace)


@pytest.mark.timeout(900)
def test_a_job_trains_with_an_installed_release(
    workspace: Workspace, namespace: str, helm: Helm, kubectl: Kubectl
) -> None:
    notes = helm.apply("install")
    assert f"kubectl -n {namespace} rollout status deployment/{names.CONTROLLER}" in notes
    job = workspace.submit(job_manifest(maxReplicas=2))
    try:
        job.wait_until_training(2, timeout=300)
        log = succeeded(kubectl("-n", namespace, "logs", f"deployment/{names.CONTROLLER}", "--tail=-1"))
        assert "Not allowed to list nodes" in log
    finally:
        job.delete()


@pytest.mark.disturbs
@pytest.mark.release
@pytest.mark.timeout(1800)
def test_a_job_trains_while_a_release_is_installed_upgraded_rolled_back_and_uninstalled(
    kubectl: Kubectl, workspace: Workspace, namespace: str, helm: Helm
) -> None:
    helm.apply("install")
    job = workspace.submit(job_manifest(maxReplicas=2, replicaLimit=1))
    try:
        job.wait_until_training(1, timeout=300)
        uid = job.uids()[0]

        arguments = "controller.arguments={--request-nodes},api.arguments={--protect-reads}"
        helm.apply("upgrade", arguments)
        continues_to_train(job, uid)
        job.edit(replicaLimit=2)
        job.wait_until_training(2, timeout=300)
        assert job.uids()[0] == uid

        helm.run("rollback", "1", "--wait", "--timeout", "8m")
        job.edit(replicaLimit=1)
        job.wait_until_training(1, timeout=300)
        continues_to_train(job, uid)

        helm.run("uninstall", "--wait", "--timeout", "8m")
        # Helm does not wait for the end of the pods.
        wait_until(
            lambda: names.CONTROLLER not in succeeded(kubectl("-n", namespace, "get", "deployments,pods")),
            "the end of the operator",
        )
        continues_to_train(job, uid)
        succeeded(kubectl("get", "crd", f"{names.PLURAL}.{names.API_GROUP}"))
    finally:
        job.delete()
