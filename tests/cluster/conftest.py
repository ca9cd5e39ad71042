"""Fixtures of the tests on a cluster, which KUBECONFIG names. Without it the tests are skipped.

Each test gets its own namespace, so that several runs may share a cluster.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import yaml
from kubernetes import client, config

from cluster.adascalejobs import Jobs
from cluster.devices import Devices
from cluster.system import System, Workspace, wait_until

DEPLOY = Path(__file__).parents[2] / "deploy"
CRD_FILE = DEPLOY / "base" / "crd.yaml"
APPLY = "application/apply-patch+yaml"

Kubectl = Callable[..., "subprocess.CompletedProcess[str]"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests here, so that `make test` does not use the cluster in KUBECONFIG."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.cluster)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the objects and logs of a failed test's namespace to its report."""
    report = yield
    workspace = getattr(item, "funcargs", {}).get("workspace")
    if report.when == "call" and report.failed and workspace is not None:
        report.sections.append(("Objects and logs of the namespace", workspace.describe()))
    return report


@pytest.fixture(scope="session")
def kubeconfig() -> str:
    """The kubeconfig files, as in KUBECONFIG."""
    path = os.environ.get("KUBECONFIG")
    if not path:
        pytest.skip("needs a Kubernetes cluster: set KUBECONFIG")
    return path


@pytest.fixture(scope="session")
def api_client(kubeconfig: str) -> Iterator[client.ApiClient]:
    """A client with the permissions of the kubeconfig."""
    with config.new_client_from_config(config_file=kubeconfig) as api:
        yield api


@pytest.fixture(scope="session")
def kubectl(kubeconfig: str) -> Kubectl:
    """Runs kubectl with arguments and options of `subprocess.run`. The caller checks the result."""
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl: put it on the PATH")
    return partial(run_kubectl, kubeconfig)


def run_kubectl(kubeconfig: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run kubectl with options of `subprocess.run`. The caller checks the result."""
    return subprocess.run(
        ["kubectl", "--kubeconfig", kubeconfig, *arguments],
        capture_output=True,
        text=True,
        timeout=options.pop("timeout", 60),
        check=False,
        **options,
    )


@pytest.fixture(scope="session")
def crd(api_client: client.ApiClient) -> dict[str, Any]:
    """The CustomResourceDefinition of `deploy/base/crd.yaml`, served by the cluster."""
    definition: dict[str, Any] = yaml.safe_load(CRD_FILE.read_text())
    name = definition["metadata"]["name"]
    definitions = client.ApiextensionsV1Api(api_client)
    definitions.patch_custom_resource_definition(
        name, definition, field_manager="kubectl", force=True, _content_type=APPLY
    )

    def established() -> bool:
        status = definitions.read_custom_resource_definition(name).status
        conditions = (status and status.conditions) or []
        return any(condition.type == "Established" and condition.status == "True" for condition in conditions)

    wait_until(established, f"CustomResourceDefinition {name} to be established")
    return definition


@contextmanager
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No other process of this run of pytest does the same at the same time."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def fresh_namespace(api_client: client.ApiClient, labels: dict[str, str] | None = None) -> Iterator[str]:
    """Create a namespace, and delete it afterwards without waiting."""
    core = client.CoreV1Api(api_client)
    name = f"test-{uuid4().hex[:10]}"
    core.create_namespace(client.V1Namespace(metadata=client.V1ObjectMeta(name=name, labels=labels or {})))
    try:
        yield name
    finally:
        core.delete_namespace(name)


@pytest.fixture
def namespace(api_client: client.ApiClient) -> Iterator[str]:
    """A namespace that no other test uses."""
    with fresh_namespace(api_client) as name:
        yield name


@pytest.fixture(scope="session")
def system(
    api_client: client.ApiClient, kubectl: Kubectl, tmp_path_factory: pytest.TempPathFactory
) -> System:
    """The operator and the metrics service, installed with kubectl. They stay installed after the tests."""
    installed = System(api_client, kubectl)
    with alone(tmp_path_factory):
        installed.install()
    return installed


@pytest.fixture
def workspace(api_client: client.ApiClient, system: System) -> Iterator[Workspace]:
    """A namespace for running jobs that enforces the restricted Pod Security Standard."""
    enforced = {"pod-security.kubernetes.io/enforce": "restricted"}
    with fresh_namespace(api_client, enforced) as name:
        yield Workspace(system, name)


@pytest.fixture
def devices(system: System) -> Iterator[Devices]:
    """What replicas ask for."""
    found = Devices(system)
    found.plug_in()
    yield found
    found.pull_out()


@pytest.fixture(scope="module")
def dry_run_jobs(api_client: client.ApiClient) -> Iterator[Jobs]:
    """AdaScaleJobs of a namespace that all tests of a module share; they only use dry runs."""
    with fresh_namespace(api_client) as namespace:
        yield Jobs(api_client, namespace)


@pytest.fixture
def adascalejobs(api_client: client.ApiClient, namespace: str) -> Jobs:
    """The AdaScaleJobs of a namespace that no other test uses."""
    return Jobs(api_client, namespace)
