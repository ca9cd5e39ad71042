"""The installation, as a real API server takes it: accepted and restricted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
OVERLAYS = (".", "kind", "plain", "one-namespace")
CLUSTER_SCOPED = ("ClusterRole", "ClusterRoleBinding")

Manifest = dict[str, Any]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is not there"),
    pytest.mark.skipif(not os.environ.get("KUBECONFIG"), reason="KUBECONFIG names no cluster"),
]


def kubectl(*arguments: str, given: object = None, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        ["kubectl", *arguments],
        input=None if given is None else json.dumps(given),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if check and done.returncode:
        pytest.fail(f"kubectl {' '.join(arguments)}: {done.stderr}")
    return done


def listed(objects: list[Manifest]) -> Manifest:
    return {"apiVersion": "v1", "kind": "List", "items": objects}


def render(overlay: str, namespace: str) -> list[Manifest]:
    """The objects of an overlay, in a namespace of this test, and with names of its own in the cluster.

    So the test neither needs nor changes an existing installation.
    """
    text = kubectl("kustomize", str(DEPLOY / overlay)).stdout
    objects = [manifest for manifest in yaml.safe_load_all(text) if manifest]
    (own,) = [manifest["metadata"]["name"] for manifest in objects if manifest["kind"] == "Namespace"]
    for manifest in objects:
        metadata = manifest["metadata"]
        if metadata.get("namespace") == own:
            metadata["namespace"] = namespace
        if manifest["kind"] == "Namespace":
            metadata["name"] = namespace
        if manifest["kind"] in CLUSTER_SCOPED:
            metadata["name"] = f"{namespace}-{metadata['name']}"
        if manifest.get("roleRef", {}).get("kind") == "ClusterRole":
            manifest["roleRef"]["name"] = f"{namespace}-{manifest['roleRef']['name']}"
        for subject in manifest.get("subjects", []):
            if subject["namespace"] == own:
                subject["namespace"] = namespace
    return objects


@pytest.fixture
def namespace() -> Iterator[str]:
    """A name for a namespace, which is removed again."""
    name = f"install-{uuid.uuid4().hex[:8]}"
    yield name
    kubectl("delete", "namespace", name, "--ignore-not-found", "--wait=false")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_overlay_is_accepted_under_the_restricted_standard(overlay: str, namespace: str) -> None:
    objects = render(overlay, namespace)
    kubectl(
        "apply",
        "-f",
        "-",
        given=listed([manifest for manifest in objects if manifest["kind"] == "Namespace"]),
    )
    others = [
        manifest for manifest in objects if manifest["kind"] not in ("Namespace", "CustomResourceDefinition")
    ]
    result = kubectl("create", "--dry-run=server", "--validate=strict", "-f", "-", given=listed(others))
    assert "Warning" not in result.stderr, result.stderr
    # What makes the pods is only warned of; the pods themselves would be refused.
    for workload in others:
        if workload["kind"] in ("Deployment", "StatefulSet"):
            spec = dict(workload["spec"]["template"]["spec"])
            for claim in workload["spec"].get("volumeClaimTemplates", []):
                spec["volumes"] = [*spec["volumes"], {"name": claim["metadata"]["name"], "emptyDir": {}}]
            spec["serviceAccountName"] = "default"
            pod = {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": workload["metadata"]["name"], "namespace": namespace},
                "spec": spec,
            }
            kubectl("wait", "--for=create", "serviceaccount/default", "-n", namespace, "--timeout=30s")
            kubectl("create", "--dry-run=server", "-f", "-", given=pod)


def test_the_crd_is_accepted() -> None:
    kubectl(
        "apply", "--dry-run=server", "--server-side", "--force-conflicts", "-f", str(DEPLOY / "base/crd.yaml")
    )
