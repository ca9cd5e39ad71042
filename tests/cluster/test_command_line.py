"""The command line with a real API server, operator and metrics service, with the rights of a user."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import yaml

from adascale_core import names
from cluster.conftest import Kubectl
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


@pytest.mark.timeout(600)
def test_a_job_is_submitted_watched_scaled_stopped_resumed_and_deleted(
    adascale: Adascale, workspace: Workspace, user: Path, kubectl: Kubectl, tmp_path: Path
) -> None:
    namespace = workspace.namespace
    file = tmp_path / "paced.yaml"
    file.write_text(yaml.safe_dump(job_manifest(scaleInvariantSteps=1_000_000)))

    assert succeeded(adascale("submit", file)).startswith(f"paced created in namespace {namespace}")
    assert succeeded(adascale("submit", file)).startswith(f"paced unchanged in namespace {namespace}")

    def listed() -> dict[str, object]:
        (job,) = json.loads(succeeded(adascale("list", "--cluster", "-o", "json")))
        return dict(job)

    wait_until(lambda: listed()["replicas"], "the job to train", 240)
    header, row = succeeded(adascale("list", "--cluster")).splitlines()
    assert header.split()[:4] == ["NAME", "STATE", "REPLICAS", "DESIRED"]
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

        logs = succeeded(adascale("logs", "paced", "--cluster"))
        assert re.search(r"^\[0\] enters generation \d+ at step \d+$", logs, re.M), logs

        followed = tmp_path / "followed"
        with (
            followed.open("w") as output,
            subprocess.Popen(
                [sys.executable, "-m", "adascale_controller", "logs", "paced", "-f", "-n", namespace],
                env={**os.environ, "KUBECONFIG": str(user)},
                stdout=output,
            ) as following,
        ):
            wait_until(lambda: "[0] enters generation" in followed.read_text(), "output", 60)
            scaled = succeeded(adascale("scale", "paced", "-r", "1", "--cluster"))
            assert scaled == "paced scaled to at most 1 replica\n"
            wait_until(lambda: listed()["replicas"] == 1, "one replica", 120)

            stopped = succeeded(adascale("stop", "paced", "--cluster", "--timeout", "120"))
            assert re.fullmatch(r"paced stopped, saved at progress [\d,]+\n", stopped), stopped
            # Followed logs end with the replicas.
            assert following.wait(timeout=60) == 0
        assert listed()["state"] == "Suspended"

        assert succeeded(adascale("resume", "paced", "--cluster")) == "paced resumed\n"
        wait_until(lambda: listed()["state"] != "Suspended", "the job to start again", 60)
        refused = adascale("rm", "paced", "--cluster", "--yes")
        assert "stop it first" in refused.stderr
        succeeded(adascale("stop", "paced", "--cluster", "--timeout", "120"))

        deleted = succeeded(adascale("rm", "paced", "--cluster", "--yes"))
        assert deleted == "paced deleted; its checkpoints stay in PersistentVolumeClaim shared\n"
        unknown = adascale("status", "paced", "--cluster")
        assert f"no job paced in namespace {namespace}" in unknown.stderr
    finally:
        kubectl("-n", names.SYSTEM_NAMESPACE, "delete", "rolebinding", namespace, "--ignore-not-found")


def test_errors_of_the_api_server_are_shown_as_those_of_a_file(
    adascale: Adascale, workspace: Workspace, kubectl: Kubectl, tmp_path: Path
) -> None:
    file = tmp_path / "paced.yaml"
    file.write_text(yaml.safe_dump(job_manifest(suspend=True)))
    succeeded(adascale("submit", file))
    # The batch size cannot be changed: a rule of the CustomResourceDefinition, which knows the present one.
    file.write_text(yaml.safe_dump(job_manifest(suspend=True, batchSize=8, maxBatchSize=32)))
    failed = adascale("submit", file)
    assert failed.returncode == 2
    line = next(n for n, text in enumerate(file.read_text().splitlines(), 1) if "batchSize: 8" in text)
    assert f"{file}:{line}: spec.batchSize: " in failed.stderr
    assert "field is immutable" in failed.stderr

    workspace_job = json.loads(succeeded(adascale("list", "--cluster", "-o", "json")))
    assert [job["name"] for job in workspace_job] == ["paced"]
    file.write_text(yaml.safe_dump(job_manifest(suspend=True, replicaLimit=2)))
    succeeded(adascale("scale", "paced", "-r", "3", "--cluster"))
    succeeded(adascale("submit", file))
    succeeded(kubectl("-n", workspace.namespace, "scale", "asj/paced", "--replicas=4"))
    conflict = adascale("submit", file)
    assert conflict.returncode == 1
    assert 'spec.replicaLimit: conflict with "kubectl"' in conflict.stderr
    succeeded(adascale("submit", file, "--force-conflicts"))


def test_a_user_without_rights_and_a_wrong_token_get_a_message(
    adascale: Adascale, system: System, user: Path, tmp_path: Path
) -> None:
    denied = adascale("list", "-n", names.SYSTEM_NAMESPACE)
    assert denied.returncode == 1
    assert f"may not list adascalejobs.adascale.dev in namespace {names.SYSTEM_NAMESPACE}" in denied.stderr
    document = json.loads(user.read_text())
    document["users"][0]["user"]["token"] = "not-a-token"
    other = tmp_path / "other"
    other.write_text(json.dumps(document))
    expired = adascale("list", "--kubeconfig", other)
    assert expired.returncode == 1
    assert "does not accept the credentials" in expired.stderr
    assert "Traceback" not in expired.stderr
