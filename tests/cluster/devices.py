"""A resource that two nodes of a cluster have, for jobs to request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import pytest

from cluster.system import System, Workspace, succeeded, wait_until

EACH = 2
"""How much of the resource a node has."""
RESTRICTED: dict[str, Any] = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}
"""The security context of a container that the restricted standard accepts."""


class Devices:
    """A resource that two nodes have.

    Args:
        system: the installation.
        each: how much of it each of them has.
    """

    def __init__(self, system: System, each: int = EACH) -> None:
        self._system = system
        self._each = each
        self.name = f"test.adascale.dev/{uuid4().hex[:10]}"
        ready = [
            node.metadata.name
            for node in system.core.list_node().items
            if not node.spec.taints and not node.spec.unschedulable
        ]
        if len(ready) < 2:
            pytest.skip(f"needs two nodes that take pods, and has {ready}")
        self.nodes: tuple[str, str] = (ready[0], ready[1])

    def plug_in(self) -> None:
        """Have the nodes offer it."""
        for node in self.nodes:
            self._patch(node, [{"op": "add", "path": self._path("capacity"), "value": str(self._each)}])
        # The kubelet takes it over.
        wait_until(lambda: all(self.is_offered(node) for node in self.nodes), f"nodes to offer {self.name}")

    def pull_out(self) -> None:
        """Have them offer it no more."""
        for node in self.nodes:
            offers = self.is_offered(node)
            places = ("capacity", "allocatable") if offers else ("capacity",)
            self._patch(node, [{"op": "remove", "path": self._path(place)} for place in places])

    def container(self) -> dict[str, Any]:
        """Fields of a container that requests a device."""
        return {
            "resources": {
                "requests": {"cpu": "50m", "memory": "256Mi", self.name: "1"},
                "limits": {self.name: "1"},
            }
        }

    @contextmanager
    def taken(
        self, workspace: Workspace, node: str, *, count: int = 1, priority: str | None = None, **labels: str
    ) -> Iterator[None]:
        """Some of them are taken by a pod that is no replica, on this node, unless it is preempted.

        Args:
            workspace: where the pod is.
            node: its node.
            count: how many it takes.
            priority: the name of its PriorityClass. None for none.
            labels: its labels.
        """
        core, name = self._system.core, f"other-{uuid4().hex[:5]}"
        resources = {**self.container()["resources"]}
        for kind in ("requests", "limits"):
            resources[kind] = {**resources[kind], self.name: str(count)}
        pod = {
            "metadata": {"name": name, "labels": labels},
            "spec": {
                **({"priorityClassName": priority} if priority is not None else {}),
                "terminationGracePeriodSeconds": 0,
                "nodeSelector": {"kubernetes.io/hostname": node},
                "containers": [
                    {
                        "name": "other",
                        "image": "adascale-controller:dev",
                        "imagePullPolicy": "IfNotPresent",
                        "command": ["python", "-c", "import signal; signal.pause()"],
                        "securityContext": RESTRICTED,
                        "resources": resources,
                    }
                ],
            },
        }
        core.create_namespaced_pod(workspace.namespace, pod)

        def runs() -> bool:
            return bool(core.read_namespaced_pod(name, workspace.namespace).status.phase == "Running")

        wait_until(runs, "the other pod")
        try:
            yield
        finally:
            options = ("--ignore-not-found", "--wait=false")
            succeeded(self._system.kubectl("-n", workspace.namespace, "delete", "pod", name, *options))

    def is_offered(self, node: str) -> bool:
        """Whether a node offers it."""
        return self.name in self._system.core.read_node(node).status.allocatable

    def _path(self, place: str) -> str:
        return f"/status/{place}/{self.name.replace('/', '~1')}"

    def _patch(self, node: str, patch: list[dict[str, str]]) -> None:
        succeeded(
            self._system.kubectl(
                "patch", "node", node, "--subresource=status", "--type=json", "-p", json.dumps(patch)
            )
        )
