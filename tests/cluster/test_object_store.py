"""A job saves its checkpoints in an object store, with credentials from a Secret: an S3 server in a pod."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from adascale_core import names
from cluster.system import Manifest, System, Workspace, job_manifest, succeeded, wait_until
from support import s3

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

PORT = 7070
FOLDER = "/data"
START = f"""
import os, time
while not os.path.exists("{FOLDER}/versitygw"):
    time.sleep(0.2)
os.makedirs("{FOLDER}/objects/{s3.BUCKET}", exist_ok=True)
arguments = ["--port", ":{PORT}", "--quiet", "posix", "{FOLDER}/objects"]
os.execv("{FOLDER}/versitygw", ["versitygw", *arguments])
"""
RECEIVE = f"""
import os, shutil, sys
with open("{FOLDER}/part", "wb") as part:
    shutil.copyfileobj(sys.stdin.buffer, part)
os.chmod("{FOLDER}/part", 0o755)
os.rename("{FOLDER}/part", "{FOLDER}/versitygw")
"""
ACCEPTS = f"""
import socket
with socket.create_connection(("127.0.0.1", {PORT}), timeout=5):
    pass
"""


class StoreInPod:
    """An S3 server in a pod of a workspace.

    Args:
        workspace: where it runs.
        system: the installation.
    """

    NAME = "object-store"

    def __init__(self, workspace: Workspace, system: System) -> None:
        self._namespace = workspace.namespace
        self._system = system

    def start(self, program: Path) -> None:
        """Start it, and wait until it answers.

        Args:
            program: versitygw, which the image has not, and the pod gets over `kubectl exec`.
        """
        self._system.core.create_namespaced_pod(self._namespace, self._pod())
        succeeded(self._kubectl("wait", f"pod/{self.NAME}", "--for=condition=Ready", "--timeout=90s"))
        with program.open("rb") as content:
            # The fixture `kubectl` sends no files. This one reads KUBECONFIG too.
            copied = subprocess.run(
                ["kubectl", "-n", self._namespace, "exec", "-i", self.NAME, "--", "python", "-c", RECEIVE],
                stdin=content,
                capture_output=True,
                check=False,
                timeout=120,
            )
        assert copied.returncode == 0, copied.stderr.decode()
        accepts = ("exec", self.NAME, "--", "python", "-c", ACCEPTS)
        wait_until(lambda: self._kubectl(*accepts).returncode == 0, "the start of the S3 server")

    @property
    def url(self) -> str:
        """Its address for other pods."""
        pod = self._system.core.read_namespaced_pod(self.NAME, self._namespace)
        address: str = pod.status.pod_ip
        return f"http://[{address}]:{PORT}" if ":" in address else f"http://{address}:{PORT}"

    def saved_step(self, job: str) -> int:
        """Return the step of the newest checkpoint of a job; 0 if there is none."""
        folder = f"{FOLDER}/objects/{s3.BUCKET}/jobs/{self._namespace}.{job}"
        code = (
            f"import json, pathlib; found = sorted(pathlib.Path('{folder}').glob('checkpoint-*.json')); "
            "print(json.loads(found[-1].read_text())['step'] if found else 0)"
        )
        # The manifest that was the newest may have been deleted since.
        read = self._kubectl("exec", self.NAME, "--", "python", "-c", code)
        return int(read.stdout) if read.returncode == 0 else 0

    def _kubectl(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self._system.kubectl("-n", self._namespace, *arguments, timeout=120)

    def _pod(self) -> Manifest:
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": self.NAME},
            "spec": {
                "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
                "containers": [
                    {
                        "name": "server",
                        "image": "adascale-controller:dev",
                        "command": ["python", "-c", START],
                        "env": [
                            {"name": "ROOT_ACCESS_KEY", "value": s3.ACCESS_KEY},
                            {"name": "ROOT_SECRET_KEY", "value": s3.SECRET_KEY},
                        ],
                        "securityContext": {
                            "allowPrivilegeEscalation": False,
                            "capabilities": {"drop": ["ALL"]},
                        },
                        "volumeMounts": [{"name": "data", "mountPath": FOLDER}],
                    }
                ],
                "volumes": [{"name": "data", "emptyDir": {}}],
            },
        }


def on_different_nodes(system: System) -> Manifest:
    """Return fields of a pod that let a node take one replica of the job only, if there are two nodes."""
    nodes: list[Any] = system.core.list_node().items
    free = [node for node in nodes if not node.spec.unschedulable and not node.spec.taints]
    if len(free) < 2:
        return {}
    term = {
        "labelSelector": {"matchExpressions": [{"key": names.LABEL_JOB, "operator": "Exists"}]},
        "topologyKey": "kubernetes.io/hostname",
    }
    return {"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}}


def test_a_job_whose_pods_are_all_lost_continues_from_an_object_store(
    workspace: Workspace, system: System
) -> None:
    """It has no volume, its replicas run on any nodes, and its credentials are only in the Secret."""
    store = StoreInPod(workspace, system)
    store.start(Path(s3.require_server()))
    credentials = s3.environment(PORT) | {"AWS_ENDPOINT_URL": store.url}
    literals = [f"--from-literal={name}={value}" for name, value in credentials.items()]
    succeeded(system.kubectl("-n", workspace.namespace, "create", "secret", "generic", "s3", *literals))
    url = f"s3://{s3.BUCKET}/jobs"
    manifest = job_manifest(
        minReplicas=2,
        maxReplicas=2,
        checkpoint={"url": url, "credentialsSecret": "s3", "intervalSeconds": 2},
    )
    placement = on_different_nodes(system)
    manifest["spec"]["template"]["spec"] |= placement
    job = workspace.submit(manifest)
    job.wait_until_training(2)
    first = job.pods()
    if placement:
        assert first[0].spec.node_name != first[1].spec.node_name
    assert all(
        volume.persistent_volume_claim is None for pod in first.values() for volume in pod.spec.volumes
    )
    assert "SingleNode" not in [reason for reason, _ in job.events()]
    described = job.kubectl("get", "asj,pods", f"--selector={names.LABEL_JOB}={job.name}", "-o", "json")
    assert s3.SECRET_KEY not in described + json.dumps(job.raw())

    saved = wait_until(lambda: store.saved_step(job.name), "a checkpoint in the object store")
    lost = [pod.metadata.name for pod in first.values()]
    job.kubectl("delete", "pod", *lost, "--force", "--grace-period=0")

    def trains_again(status: Manifest) -> bool:
        return bool(status["disruptions"] >= 1 and status["state"] == "Running" and status["replicas"] == 2)

    status = job.wait_for("training after the loss of all pods", trains_again, 180)
    assert status["failures"] == 0, job.report()
    assert not {pod.metadata.uid for pod in first.values()} & set(job.uids().values())
    assert job.entered() >= saved
    wait_until(lambda: store.saved_step(job.name) > saved, "another checkpoint in the object store")
    job.delete()
