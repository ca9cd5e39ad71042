"""The API server in memory: implements the protocol `Cluster` for the objects of a `World`."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from adascale_controller.operator.apply.cluster import ClusterError
from adascale_controller.operator.types.actions import Event
from adascale_controller.operator.types.kubernetes import ApiObject, Resource, timestamp

if TYPE_CHECKING:
    from support.world import World

Object = dict[str, Any]


class FakeCluster:
    """The API server of a world. `ControlLoop` accepts it as a `Cluster`, which mypy checks."""

    def __init__(self, world: World) -> None:
        self._world = world

    # -- reading --------------------------------------------------------------------------------------------

    async def list(self, resource: Resource) -> tuple[list[ApiObject], int]:
        """As `Cluster.list`."""
        return list(deepcopy(self._world.objects[resource]).values()), self._world.version

    async def may_list(self, resource: Resource) -> bool:
        """As `Cluster.may_list`: nodes may not be listed."""
        return resource in self._world.objects

    async def get_claim(self, namespace: str, name: str) -> ApiObject | None:
        """As `Cluster.get_claim`: every claim exists."""
        return {"spec": {"accessModes": ["ReadWriteMany"]}}

    async def list_events(self, namespace: str, field_selector: str) -> Sequence[ApiObject]:
        """As `Cluster.list_events`: there are none."""
        return ()

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
            raise ClusterError("already exists", 409)
        return self._world.create(Resource.JOBS, deepcopy(dict(manifest)))

    async def patch_indexed_job(self, namespace: str, name: str, uid: str, patch: ApiObject) -> ApiObject:
        """As `Cluster.patch_indexed_job`."""
        spec = patch["spec"]
        parallelism = 0 if spec["suspend"] else spec["parallelism"]
        self._world.before_write(f"resize to {parallelism}")
        raw = self._find(Resource.JOBS, name, uid)
        self._world.check_saved(parallelism)
        return self._world.write(Resource.JOBS, {**raw, "spec": {**raw["spec"], **spec}})

    async def delete_indexed_job(self, namespace: str, name: str, uid: str) -> None:
        """As `Cluster.delete_indexed_job`."""
        self._world.before_write("delete the Job")
        self._world.check_saved(0)
        raw = self._find(Resource.JOBS, name, uid)
        meta = {**raw["metadata"], "deletionTimestamp": timestamp(self._world.now)}
        self._world.write(Resource.JOBS, {**raw, "metadata": meta})

    async def create_claim(self, manifest: ApiObject) -> None:
        """As `Cluster.create_claim`: every claim exists."""

    async def delete_pod(self, namespace: str, name: str) -> None:
        """As `Cluster.delete_pod`."""
        self._world.before_write(f"delete pod {name}")
        self._world.delete_pod(name)

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

    def _find(self, resource: Resource, name: str, uid: str) -> Object:
        raw = self._world.objects[resource].get(name)
        if raw is None:
            raise ClusterError(f"{resource} {name} not found", 404)
        if raw["metadata"]["uid"] != uid:
            raise ClusterError("the uid in the precondition does not match", 409)
        return raw
