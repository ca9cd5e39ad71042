"""The API server in memory: implements the protocol `Cluster` for the objects of a `World`."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from adascale_controller.operator.apply.cluster import ApiServerError
from adascale_controller.operator.observe.pods import END_DEADLINE
from adascale_controller.operator.types.actions import Event
from adascale_controller.operator.types.kubernetes import ORPHAN_FINALIZER, ApiObject, Resource, timestamp

if TYPE_CHECKING:
    from support.world import World

Object = dict[str, Any]


class FakeCluster:
    """The API server of a world. `OperatorLoop` accepts it as a `Cluster`, which mypy checks."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.secrets: dict[tuple[str, str], Object] = {}
        self.config_maps: dict[tuple[str, str], Object] = {}

    # -- reading --------------------------------------------------------------------------------------------

    async def list(self, resource: Resource) -> tuple[list[ApiObject], int]:
        """As `Cluster.list`."""
        return list(deepcopy(self._world.objects[resource]).values()), self._world.version

    async def version(self) -> tuple[int, int]:
        """As `Cluster.version`."""
        return (1, 34)

    async def may_list(self, resource: Resource) -> bool:
        """As `Cluster.may_list`: nodes may not be listed."""
        return resource in self._world.objects

    async def may_create_pods(self) -> bool:
        """As `Cluster.may_create_pods`."""
        return True

    async def admit_pod(self, manifest: ApiObject) -> ApiObject:
        """As `Cluster.admit_pod`."""
        return self._world.admit(deepcopy(dict(manifest)))

    async def create_pod(self, manifest: ApiObject) -> None:
        """As `Cluster.create_pod`: these pods are not replicas, and the operator does not watch them."""
        self._world.checks.setdefault(manifest["metadata"]["name"], deepcopy(dict(manifest)))

    async def get_pod(self, namespace: str, name: str) -> ApiObject | None:
        """As `Cluster.get_pod`."""
        if name not in self._world.checks:
            return self._world.objects[Resource.PODS].get(name)
        check, status = self._world.checks[name], self._world.check_status
        is_scheduled = all(each["status"] == "True" for each in status.get("conditions", ()))
        spec = {**check["spec"], **({"nodeName": "node1"} if is_scheduled else {})}
        return {**check, "metadata": {"uid": "check", **check["metadata"]}, "spec": spec, "status": status}

    async def get_claim(self, namespace: str, name: str) -> ApiObject | None:
        """As `Cluster.get_claim`: every claim exists."""
        return {"spec": {"accessModes": ["ReadWriteMany"]}}

    async def get_secret(self, namespace: str, name: str) -> ApiObject | None:
        """As `Cluster.get_secret`."""
        return deepcopy(self.secrets.get((namespace, name)))

    async def list_events(self, namespace: str, field_selector: str) -> Sequence[ApiObject]:
        """As `Cluster.list_events`: there are none."""
        return ()

    async def list_kueue(self, plural: str, namespace: str | None = None) -> Sequence[ApiObject] | None:
        """As `Cluster.list_kueue`: there is no Kueue."""
        return None

    # -- writing --------------------------------------------------------------------------------------------

    async def apply_status(self, namespace: str, name: str, uid: str, status: ApiObject) -> ApiObject:
        """As `Cluster.apply_status`."""
        self._world.before_write("status")
        raw = self._find(Resource.ADASCALEJOBS, name, uid)
        current = (raw.get("status") or {}).get("allocation", {"generation": 0})
        new = status.get("allocation", {"generation": 0})
        assert new["generation"] >= current["generation"], "a generation in the status fell"
        return self._world.write(Resource.ADASCALEJOBS, {**raw, "status": deepcopy(dict(status))})

    async def create_indexed_job(self, manifest: ApiObject) -> ApiObject:
        """As `Cluster.create_indexed_job`."""
        self._world.before_write(f"create a Job with parallelism {manifest['spec']['parallelism']}")
        if manifest["metadata"]["name"] in self._world.objects[Resource.JOBS]:
            raise ApiServerError("already exists", 409)
        return self._world.create(Resource.JOBS, deepcopy(dict(manifest)))

    async def try_indexed_job(self, manifest: ApiObject) -> None:
        """As `Cluster.try_indexed_job`."""
        if self._world.job_rejection:
            raise ApiServerError("invalid", 422, self._world.job_rejection)

    async def patch_indexed_job(self, namespace: str, name: str, uid: str, patch: ApiObject) -> ApiObject:
        """As `Cluster.patch_indexed_job`."""
        spec, marks = patch.get("spec", {}), (patch.get("metadata") or {}).get("annotations") or {}
        raw = self._find(Resource.JOBS, name, uid)
        parallelism = 0 if spec.get("suspend") else spec.get("parallelism", raw["spec"]["parallelism"])
        self._world.before_write(f"resize to {parallelism}" if spec else f"mark Job {name}")
        self._world.check_saved(raw, parallelism)
        annotations = {**raw["metadata"].get("annotations", {}), **marks}
        annotations = {key: value for key, value in annotations.items() if value is not None}
        changed = {
            "metadata": {**raw["metadata"], "annotations": annotations},
            "spec": {**raw["spec"], **spec},
        }
        return self._world.write(Resource.JOBS, {**raw, **changed})

    async def delete_indexed_job(self, namespace: str, name: str, uid: str) -> None:
        """As `Cluster.delete_indexed_job`."""
        self._world.before_write("delete the Job")
        raw = self._find(Resource.JOBS, name, uid)
        self._world.check_saved(raw, 0)
        meta = {**raw["metadata"], "deletionTimestamp": timestamp(self._world.now)}
        self._world.write(Resource.JOBS, {**raw, "metadata": meta})

    async def leave_pods(self, namespace: str, name: str, uid: str) -> None:
        """As `Cluster.leave_pods`."""
        self._world.before_write("delete the Job without its pods")
        raw = self._find(Resource.JOBS, name, uid)
        meta = {
            **raw["metadata"],
            "deletionTimestamp": timestamp(self._world.now),
            "finalizers": [ORPHAN_FINALIZER],
        }
        self._world.write(Resource.JOBS, {**raw, "metadata": meta})

    async def own_pod(self, namespace: str, name: str, owner: ApiObject) -> None:
        """As `Cluster.own_pod`."""
        self._world.before_write(f"own pod {name}")
        raw = self._find(Resource.PODS, name)
        owners = [*raw["metadata"]["ownerReferences"], dict(owner)]
        self._world.write(Resource.PODS, {**raw, "metadata": {**raw["metadata"], "ownerReferences": owners}})

    async def create_claim(self, manifest: ApiObject) -> None:
        """As `Cluster.create_claim`: every claim exists."""

    async def create_secret(self, manifest: ApiObject) -> None:
        """As `Cluster.create_secret`."""
        if _key(manifest) in self.secrets:
            raise ApiServerError("already exists", 409)
        self._put_secret(manifest)

    async def replace_secret(self, manifest: ApiObject) -> None:
        """As `Cluster.replace_secret`."""
        version = self.secrets[_key(manifest)]["metadata"]["resourceVersion"]
        if manifest["metadata"]["resourceVersion"] != version:
            raise ApiServerError("the object has been modified", 409)
        self._put_secret(manifest)

    def _put_secret(self, manifest: ApiObject) -> None:
        self._world.version += 1
        metadata = {**manifest["metadata"], "resourceVersion": str(self._world.version)}
        self.secrets[_key(manifest)] = {**deepcopy(dict(manifest)), "metadata": metadata}

    async def apply_config_map(self, manifest: ApiObject) -> None:
        """As `Cluster.apply_config_map`."""
        self._world.before_write("apply a ConfigMap")
        self.config_maps[_key(manifest)] = deepcopy(dict(manifest))

    async def delete_pod(self, namespace: str, name: str) -> None:
        """As `Cluster.delete_pod`."""
        if self._world.checks.pop(name, None) is None:
            self._world.before_write(f"delete pod {name}")
            self._world.delete_pod(name)

    async def retire_pod(self, namespace: str, name: str) -> None:
        """As `Cluster.retire_pod`."""
        self._world.before_write(f"retire pod {name}")
        if name in self._world.objects[Resource.PODS]:
            self._world.terminate_pod(name)

    async def end_pod(self, namespace: str, name: str) -> None:
        """As `Cluster.end_pod`."""
        self._world.before_write(f"end pod {name}")
        raw = self._world.objects[Resource.PODS][name]
        self._world.write(
            Resource.PODS, {**raw, "spec": {**raw["spec"], "activeDeadlineSeconds": END_DEADLINE}}
        )

    async def release_pod(self, namespace: str, name: str) -> None:
        """As `Cluster.release_pod`: pods have no finalizers."""

    async def delete_job(self, namespace: str, name: str, uid: str) -> None:
        """As `Cluster.delete_job`."""
        self._world.before_write("delete the AdaScaleJob")
        self._find(Resource.ADASCALEJOBS, name, uid)
        self._world.delete(Resource.ADASCALEJOBS, name)

    async def record_event(
        self, namespace: str, name: str, uid: str, event: Event, now: float, reporter: str
    ) -> None:
        """As `Cluster.record_event`."""
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
