"""The command line with a real API server, operator and metrics service, with the rights of a user."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import yaml

from adascale_core import names
from cluster.conftest import Kubectl, run_kubectl
from cluster.system import System, Workspace, job_manifest, succeeded, wait_until
from e2e.local_run import adascale_in_process

Adascale = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def user(system: System, workspace: Workspace, kubeconfig: str, kubectl: Kubectl, tmp_path: Path) -> Path:
    """The kubeconfig of a service account with the role `edit` in the namespace of the test alone."""
    namespace, account = workspace.namespace, "person"
    succeeded(kubectl("-n", namespace, "create", "serviceaccount", account))
    subject = f"--serviceaccount={namespace}:{account}"
    succeeded(kubectl("-n", namespace, "create", "rolebinding", account, "--clusterrole=edit", subject))
    token = succeeded(kubectl("-n", namespace, "create", "token", account)).strip()
    document = yaml.safe_load(succeeded(kubectl("config", "view", "--raw", "--minify", "--flatten")))
    document["users"] = [{"name": "person", "user": {"token": token}}]
    document["contexts"][0]["context"].update(user="person", namespace=namespace)
    file = tmp_path / "kubeconfig"
    file.write_text(json.dumps(document))
    return file


@pytest.fixture
def adascale(user: Path) -> Adascale:
    """Runs the command line as that user. The caller checks the result."""

    return partial(adascale_in_process, KUBECONFIG=str(user), COLUMNS="140")


@pytest.fixture
def person(user: Path) -> Kubectl:
    """Runs kubectl as that user. The caller checks the result."""

    return partial(run_kubectl, str(user))


@pytest.mark.timeout(600)
def test_a_job_is_read_with_the_commands_and_deleted_with_kubectl(
    adascale: Adascale, person: Kubectl, workspace: Workspace, kubectl: Kubectl, tmp_path: Path
) -> None:
    namespace = workspace.namespace
    file = tmp_path / "paced.yaml"
    file.write_text(yaml.safe_dump(job_manifest(scaleInvariantSteps=1_000_000)))
    succeeded(person("apply", "-f", str(file)))

    def shown() -> dict[str, object]:
        return dict(json.loads(succeeded(adascale("status", "paced", "--cluster", "-o", "json"))))

    wait_until(lambda: shown()["replicas"], "the job to train", 240)
    header, row = succeeded(person("get", "adascalejobs")).splitlines()
    assert header.split()[:4] == ["NAME", "STATE", "REASON", "REPLICAS"]
    assert row.split()[0] == "paced"

    # The user may not read the metrics service before an administrator has bound the role for it.
    refused = adascale("gain", "paced", "--cluster")
    assert refused.returncode == 1
    who = f"system:serviceaccount:{namespace}:person"
    assert f"{who} may not get services/proxy in namespace {names.SYSTEM_NAMESPACE}" in refused.stderr
    command = re.search(r"^ *kubectl (-n .*)$", refused.stderr, re.M)
    assert command is not None, refused.stderr
    binding = command[1].replace("rolebinding adascale-metrics-reader", f"rolebinding {namespace}")
    succeeded(kubectl(*binding.split()))
    try:
        wait_until(lambda: adascale("gain", "paced", "--cluster").returncode == 0, "the gain", 60)
        assert "efficiency" in succeeded(adascale("gain", "paced", "--cluster"))
        wait_until(lambda: adascale("explain", "paced", "--cluster").returncode == 0, "the decision", 60)
        explained = succeeded(adascale("explain", "paced", "--cluster"))
        assert "decided" in explained
        assert re.search(r"^REPLICA +STATE", succeeded(adascale("status", "paced", "--cluster")), re.M)

        read_logs = ("logs", "-l", f"{names.LABEL_JOB}=paced", "--prefix", "--tail=-1")
        # kubectl refuses while the container of a pod is created.
        wait_until(lambda: person(*read_logs).returncode == 0, "the logs of all pods", 120)
        logs = succeeded(person(*read_logs))
        assert re.search(r"^\[pod/paced-0-\w+/worker\] enters generation \d+ at step \d+$", logs, re.M), logs

        succeeded(person("delete", "adascalejob", "paced", timeout=130))
        unknown = adascale("status", "paced", "--cluster")
        assert f"no job paced in namespace {namespace}" in unknown.stderr
    finally:
        kubectl("-n", names.SYSTEM_NAMESPACE, "delete", "rolebinding", namespace, "--ignore-not-found")


def test_a_user_without_rights_and_a_wrong_token_get_a_message(
    adascale: Adascale, system: System, user: Path, tmp_path: Path
) -> None:
    denied = adascale("status", "paced", "-n", names.SYSTEM_NAMESPACE)
    assert denied.returncode == 1
    assert f"may not get adascalejobs.adascale.dev in namespace {names.SYSTEM_NAMESPACE}" in denied.stderr
    document = json.loads(user.read_text())
    document["users"][0]["user"]["token"] = "not-a-token"
    other = tmp_path / "other"
    other.write_text(json.dumps(document))
    expired = adascale("status", "paced", "--kubeconfig", other)
    assert expired.returncode == 1
    assert "does not accept the credentials" in expired.stderr
    assert "Traceback" not in expired.stderr
