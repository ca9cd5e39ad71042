"""The API server in memory: the calls of `KubernetesCluster` for the objects of a `World`."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from adascale_controller.operator.apply.kubernetes_cluster import ApiServerError, KubernetesCluster
from adascale_controller.operator.observe.adascalejob import AdaScaleJob
from adascale_controller.operator.observe.pods import END_DEADLINE
from adascale_controller.operator.types.actions import Event, Stop, StoppedPod
from adascale_controller.operator.types.kubernetes import ApiObject, Resource

if TYPE_CHECKING:
    from support.world import World

Object = dict[str, Any]
CRD = yaml.safe_load((Path(__file__).parents[2] / "deploy" / "base" / "crd.yaml").read_text())
ROOT = CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
STATUS_FIELDS = ROOT["properties"]["status"]["properties"].keys()


class FakeCluster(KubernetesCluster):
    """The API server of a world. It has each call of the base class, of which nothing else is used."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.secrets: dict[tuple[str, str], Object] = {}
        self.config_maps: dict[tuple[str, str], Object] = {}

    # -- reading --------------------------------------------------------------------------------------------

    async def list(self, resource: Resource) -> tuple[list[ApiObject], int]:
        return list(deepcopy(self._world.objects[resource]).values()), self._world.version

    async def may_list_nodes(self) -> bool:
        return Resource.NODES in self._world.objects

    async def admit_pod(self, manifest: ApiObject) -> ApiObject:
        return self._world.admit(deepcopy(dict(manifest)))

    async def get(self, plural: str, namespace: str, name: str) -> ApiObject | None:
        get = {"pods": self.get_pod, "persistentvolumeclaims": self.get_claim, "secrets": self.get_secret}
        return await get[plural](namespace, name)

    async def create(self, plural: str, manifest: ApiObject) -> ApiObject | None:
        if plural == "pods":
            return await self.create_pod(manifest)
        is_new = plural == "secrets" and _key(manifest) not in self.secrets
        return self._put_secret(manifest) if is_new else None

    async def replace(self, plural: str, manifest: ApiObject) -> ApiObject | None:
        """As `KubernetesCluster.replace`, of a Secret."""
        known = self.secrets[_key(manifest)]["metadata"]["resourceVersion"]
        return self._put_secret(manifest) if manifest["metadata"]["resourceVersion"] == known else None

    async def create_pod(self, manifest: ApiObject) -> ApiObject | None:
        name = manifest["metadata"]["name"]
        self._world.before_write(f"create pod {name}")
        if name in self._world.objects[Resource.PODS]:
            return None
        return self._world.create_pod(deepcopy(dict(manifest)))

    async def get_pod(self, namespace: str, name: str) -> ApiObject | None:
        return self._world.objects[Resource.PODS].get(name)

    async def get_claim(self, namespace: str, name: str) -> ApiObject | None:
        """Return a claim: every claim exists."""
        return {"spec": {"accessModes": ["ReadWriteMany"]}}

    async def get_secret(self, namespace: str, name: str) -> ApiObject | None:
        return deepcopy(self.secrets.get((namespace, name)))

    async def list_events(self, namespace: str, field_selector: str) -> Sequence[ApiObject]:
        """As `KubernetesCluster.list_events`: there are none."""
        return ()

    async def list_kueue(self, plural: str, namespace: str | None = None) -> Sequence[ApiObject] | None:
        """As `KubernetesCluster.list_kueue`: there is no Kueue."""
        return None

    # -- writing --------------------------------------------------------------------------------------------

    async def apply_status(self, job: AdaScaleJob, status: ApiObject) -> ApiObject:
        self._world.before_write("status")
        # The API server drops others.
        assert status.keys() <= STATUS_FIELDS
        raw = self._find(Resource.ADASCALEJOBS, job.name, job.uid)
        current = (raw.get("status") or {}).get("allocation", {"generation": 0})
        new = status.get("allocation", {"generation": 0})
        assert new["generation"] >= current["generation"], "a generation in the status fell"
        return self._world.write(Resource.ADASCALEJOBS, {**raw, "status": deepcopy(dict(status))})

    def _put_secret(self, manifest: ApiObject) -> ApiObject:
        self._world.version += 1
        metadata = {**manifest["metadata"], "resourceVersion": str(self._world.version)}
        self.secrets[_key(manifest)] = {**deepcopy(dict(manifest)), "metadata": metadata}
        return self.secrets[_key(manifest)]

    async def apply_config_map(self, manifest: ApiObject) -> None:
        self._world.before_write("apply a ConfigMap")
        self.config_maps[_key(manifest)] = deepcopy(dict(manifest))

    async def stop_pod(self, namespace: str, pod: StoppedPod) -> bool:
        self._world.before_write(f"{pod.how.name.lower()} pod {pod.name}")
        raw = self._world.objects[Resource.PODS].get(pod.name)
        if raw is None or raw["metadata"]["uid"] != pod.uid:
            return False
        self._world.check_saved(pod.name)
        if pod.how is Stop.FORCE:
            self._world.delete_pod(pod.name)
        elif pod.how is Stop.DELETE:
            self._world.terminate_pod(pod.name)
        else:
            spec = {**raw["spec"], "activeDeadlineSeconds": END_DEADLINE}
            self._world.write(Resource.PODS, {**raw, "spec": spec})
        return True

    async def delete_workload(self, namespace: str, name: str) -> None:
        """As `KubernetesCluster.delete_workload`: there is no Kueue."""
        self._world.before_write(f"delete Workload {name}")

    async def delete_job(self, job: AdaScaleJob) -> None:
        self._world.before_write("delete the AdaScaleJob")
        self._find(Resource.ADASCALEJOBS, job.name, job.uid)
        self._world.delete(Resource.ADASCALEJOBS, job.name)

    async def record_event(self, job: AdaScaleJob, event: Event, now: float, reporter: str) -> None:
        self._world.before_write(f"event {event.reason}")
        self._world.events.append(event)

    def _find(self, resource: Resource, name: str, uid: str | None = None) -> Object:
        raw = self._world.objects[resource].get(name)
        if raw is None:
            raise ApiServerError(f"{resource} {name} not found", 404)
        if uid is not None and raw["metadata"]["uid"] != uid:
            raise ApiServerError("the uid in the precondition does not match", 409)
        return raw


def _key(manifest: ApiObject) -> tuple[str, str]:
    return manifest["metadata"]["namespace"], manifest["metadata"]["name"]
