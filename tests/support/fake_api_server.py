"""The API server in memory: the calls of `KubernetesCluster`, and what users do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from adascale_controller.operator.apply.kubernetes_cluster import ApiServerError, KubernetesCluster
from adascale_controller.operator.observe.adascalejob import AdaScaleJob
from adascale_controller.operator.observe.pods import END_DEADLINE
from adascale_controller.operator.types.actions import Event, Stop, StoppedPod
from adascale_controller.operator.types.kubernetes import ApiObject, Resource, replica_index, timestamp
from adascale_controller.operator.types.settings import QUEUE_NAME

Object = dict[str, Any]
CRD = yaml.safe_load((Path(__file__).parents[2] / "deploy" / "base" / "crd.yaml").read_text())
ROOT = CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
STATUS_FIELDS = ROOT["properties"]["status"]["properties"].keys()
GRACE_PERIOD = 30
GPU = "nvidia.com/gpu"


class KilledError(BaseException):
    """The operator is killed. Not an Exception, so that no handler catches it."""


@dataclass
class FakeApiServer(KubernetesCluster):
    """Its objects, and the writes of the operator."""

    types: Sequence[str] = ()
    """The types of accelerators. There is a node of each, which has its name; without types, the operator may
    not read the nodes."""
    admit: Callable[[Object], Object] = lambda pod: pod
    """What admission makes of a pod; it may raise an `ApiServerError`."""
    spec: Object = field(default_factory=dict)
    """Fields of the spec of each AdaScaleJob that is submitted."""
    priorities: dict[str | None, int] = field(default_factory=dict)
    """The values of PriorityClasses by name, and None for the default one; if empty, no priority is set."""
    pod_groups: dict[str, Object] | None = None
    """The specs of PodGroups; None if it serves none."""
    now: float = 1_800_000_000.0
    version: int = 100
    writes: list[str] = field(default_factory=list)
    """The operator's writes in its last cycle."""
    events: list[Event] = field(default_factory=list)
    """All Events that the operator has recorded."""
    kill_before: int | None = None
    """The write of a cycle before which the operator is killed, from 0."""
    meanwhile: Callable[[], None] = lambda: None
    """Is called before each write of the operator."""

    def __post_init__(self) -> None:
        resources = [Resource.ADASCALEJOBS, Resource.PODS, *([Resource.NODES] if self.types else [])]
        self.objects: dict[Resource, dict[str, Object]] = {resource: {} for resource in resources}
        self.secrets: dict[tuple[str, str], Object] = {}
        self.config_maps: dict[tuple[str, str], Object] = {}
        self.undelivered: list[tuple[str, Resource, Object]] = []
        """The changes that no watch has delivered."""

    def before_write(self, description: str) -> None:
        """Record a write of the operator, or kill it."""
        if self.kill_before is not None and len(self.writes) >= self.kill_before:
            raise KilledError
        self.writes.append(description)
        self.meanwhile()

    # -- objects --------------------------------------------------------------------------------------------

    def add(self, resource: Resource, raw: Object) -> Object:
        """Create an object."""
        created = {
            "uid": f"uid-{self.version + 1}",
            "generation": 1,
            "creationTimestamp": timestamp(self.now),
        }
        raw["metadata"] = {"namespace": "team", **raw["metadata"], **created}
        return self.write(resource, raw)

    def write(self, resource: Resource, raw: Object) -> Object:
        """Write a new version of an object."""
        self.version += 1
        raw = {**raw, "metadata": {**raw["metadata"], "resourceVersion": str(self.version)}}
        self.objects[resource][raw["metadata"]["name"]] = raw
        self.undelivered.append(("MODIFIED", resource, raw))
        return raw

    def remove(self, resource: Resource, name: str) -> None:
        """Delete an object at once."""
        last = self.write(resource, self.objects[resource][name])
        del self.objects[resource][name]
        self.undelivered[-1] = ("DELETED", resource, last)

    @property
    def job(self) -> Object | None:
        """The AdaScaleJob `digits`."""
        return self.objects[Resource.ADASCALEJOBS].get("digits")

    @property
    def status(self) -> Object:
        """The status of the AdaScaleJob."""
        assert self.job is not None
        status: Object = self.job["status"]
        return status

    def condition(self, kind: str = "Running") -> Object:
        """Return a condition of the AdaScaleJob."""
        return next(each for each in self.status["conditions"] if each["type"] == kind)

    @property
    def live_pods(self) -> list[Object]:
        """The pods of jobs that have not ended."""
        pods = [raw for raw in self.objects[Resource.PODS].values() if "labels" in raw["metadata"]]
        return [raw for raw in pods if not has_ended(raw)]

    @property
    def uids(self) -> dict[str, str]:
        """The names of the live pods by their uids."""
        return {raw["metadata"]["uid"]: raw["metadata"]["name"] for raw in self.live_pods}

    def terminate_pod(self, name: str) -> None:
        """Delete a pod with its grace period."""
        raw = self.objects[Resource.PODS][name]
        if "nodeName" not in raw["spec"] or has_ended(raw):
            self.remove_pod(name)
            return
        meta = {**raw["metadata"], "deletionTimestamp": timestamp(self.now + GRACE_PERIOD)}
        self.write(Resource.PODS, {**raw, "metadata": meta})

    def remove_pod(self, name: str) -> None:
        """Delete a pod at once."""
        if name in self.objects[Resource.PODS]:
            self.remove(Resource.PODS, name)

    # -- users ----------------------------------------------------------------------------------------------

    def submit(self, name: str = "digits", **spec: Any) -> None:
        """Create an AdaScaleJob."""
        defaults = {
            "batchSize": 4,
            "maxBatchSize": 256,
            "localBszBounds": {"lower": 4, "upper": 64},
            "maxReplicas": 4,
            "checkpoint": {"claimName": "shared"},
            "template": {"spec": {"containers": [self.worker()]}},
        }
        self.add(
            Resource.ADASCALEJOBS, {"metadata": {"name": name}, "spec": {**defaults, **self.spec, **spec}}
        )

    def worker(self, tag: int = 1) -> Object:
        """Return the container of a template. Where nodes have accelerators, it requests one."""
        requests = {"resources": {"limits": {GPU: "1"}}} if self.types else {}
        return {"name": "worker", "image": f"trainer:{tag}", **requests}

    def edit(self, **spec: Any) -> None:
        """Edit the spec of the AdaScaleJob."""
        assert self.job is not None
        meta = {**self.job["metadata"], "generation": self.job["metadata"]["generation"] + 1}
        self.write(
            Resource.ADASCALEJOBS, {**self.job, "metadata": meta, "spec": {**self.job["spec"], **spec}}
        )

    def enter_queue(self) -> None:
        """Label the AdaScaleJob with the name of a queue."""
        assert self.job is not None
        meta = {**self.job["metadata"], "labels": {QUEUE_NAME: "team"}}
        self.write(Resource.ADASCALEJOBS, {**self.job, "metadata": meta})

    # -- the calls of the operator that read ----------------------------------------------------------------

    async def list(self, resource: Resource) -> tuple[list[ApiObject], int]:
        return list(deepcopy(self.objects[resource]).values()), self.version

    async def may_list_nodes(self) -> bool:
        return Resource.NODES in self.objects

    async def admit_pod(self, manifest: ApiObject) -> ApiObject:
        return self._with_priority(self.admit(deepcopy(dict(manifest))))

    def _with_priority(self, raw: ApiObject) -> Object:
        """Return a pod or a PodGroup with the value of its PriorityClass."""
        name = raw["spec"].get("priorityClassName")
        if not self.priorities:
            return dict(raw)
        if name not in self.priorities:
            raise ApiServerError("rejected", 403, f"no PriorityClass with name {name} was found")
        return {**raw, "spec": {**raw["spec"], "priority": self.priorities[name]}}

    async def get(self, plural: str, namespace: str, name: str) -> ApiObject | None:
        """Return an object. There is each claim."""
        if plural == "persistentvolumeclaims":
            return await self.get_claim(namespace, name)
        if plural == "secrets":
            return deepcopy(self.secrets.get((namespace, name)))
        return self.objects[Resource.PODS].get(name)

    async def get_claim(self, namespace: str, name: str) -> ApiObject | None:
        return {"spec": {"accessModes": ["ReadWriteMany"]}}

    async def list_events(self, namespace: str, field_selector: str) -> Sequence[ApiObject]:
        return ()

    async def list_kueue(self, plural: str, namespace: str | None = None) -> Sequence[ApiObject] | None:
        """Return None: there is no Kueue."""
        return None

    # -- the calls that write -------------------------------------------------------------------------------

    async def create(self, plural: str, manifest: ApiObject) -> ApiObject | None:
        if plural == "pods":
            return await self.create_pod(manifest)
        if plural == "podgroups":
            return self._put_pod_group(manifest)
        is_new = plural == "secrets" and key(manifest) not in self.secrets
        return self._put_secret(manifest) if is_new else None

    def _put_pod_group(self, manifest: ApiObject) -> ApiObject | None:
        name, groups = manifest["metadata"]["name"], self.pod_groups
        if groups is None:
            raise ApiServerError("the server could not find the requested resource", 404)
        self.before_write(f"create PodGroup {name}")
        if name in groups:
            return None
        groups[name] = self._with_priority(manifest)["spec"]
        return manifest

    async def create_pod(self, manifest: ApiObject) -> ApiObject | None:
        """Create a pod of a replica. No second one of a rank may be there."""
        name = manifest["metadata"]["name"]
        self.before_write(f"create pod {name}")
        if name in self.objects[Resource.PODS]:
            return None
        admitted = self._with_priority(self.admit(deepcopy(dict(manifest))))
        pod = {**admitted, "status": {"phase": "Pending"}}
        place = owner_of(pod), rank_of(pod)
        others = [raw for raw in self.live_pods if (owner_of(raw), rank_of(raw)) == place]
        assert not others, f"rank {place[1]} has a pod: {others[0]['metadata']['name']}"
        return self.add(Resource.PODS, pod)

    async def replace(self, plural: str, manifest: ApiObject) -> ApiObject | None:
        """Replace a Secret."""
        known = self.secrets[key(manifest)]["metadata"]["resourceVersion"]
        return self._put_secret(manifest) if manifest["metadata"]["resourceVersion"] == known else None

    def _put_secret(self, manifest: ApiObject) -> ApiObject:
        self.version += 1
        metadata = {**manifest["metadata"], "resourceVersion": str(self.version)}
        self.secrets[key(manifest)] = {**deepcopy(dict(manifest)), "metadata": metadata}
        return self.secrets[key(manifest)]

    async def apply_status(self, job: AdaScaleJob, status: ApiObject) -> ApiObject:
        self.before_write("status")
        # The API server drops others.
        assert status.keys() <= STATUS_FIELDS
        raw = self._find(job)
        current = (raw.get("status") or {}).get("allocation", {"generation": 0})
        new = status.get("allocation", {"generation": 0})
        assert new["generation"] >= current["generation"], "a generation in the status fell"
        return self.write(Resource.ADASCALEJOBS, {**raw, "status": deepcopy(dict(status))})

    async def apply_config_map(self, manifest: ApiObject) -> None:
        self.before_write("apply a ConfigMap")
        self.config_maps[key(manifest)] = deepcopy(dict(manifest))

    async def stop_pod(self, namespace: str, pod: StoppedPod) -> bool:
        self.before_write(f"{pod.how.name.lower()} pod {pod.name}")
        raw = self.objects[Resource.PODS].get(pod.name)
        if raw is None or raw["metadata"]["uid"] != pod.uid:
            return False
        self.check_stop(raw)
        if pod.how is Stop.FORCE:
            self.remove_pod(pod.name)
        elif pod.how is Stop.DELETE:
            self.terminate_pod(pod.name)
        else:
            spec = {**raw["spec"], "activeDeadlineSeconds": END_DEADLINE}
            self.write(Resource.PODS, {**raw, "spec": spec})
        return True

    def check_stop(self, pod: Object) -> None:
        """Check that a pod may be stopped."""

    async def delete_workload(self, namespace: str, name: str) -> None:
        self.before_write(f"delete Workload {name}")

    async def delete_job(self, job: AdaScaleJob) -> None:
        self.before_write("delete the AdaScaleJob")
        self._find(job)
        self.remove(Resource.ADASCALEJOBS, job.name)

    async def record_event(self, job: AdaScaleJob, event: Event, now: float, reporter: str) -> None:
        self.before_write(f"event {event.reason}")
        self.events.append(event)

    def _find(self, job: AdaScaleJob) -> Object:
        raw = self.objects[Resource.ADASCALEJOBS].get(job.name)
        if raw is None:
            raise ApiServerError(f"AdaScaleJob {job.name} not found", 404)
        if raw["metadata"]["uid"] != job.uid:
            raise ApiServerError("the uid in the precondition does not match", 409)
        return raw


def key(manifest: ApiObject) -> tuple[str, str]:
    """Return the namespace and the name of an object."""
    return manifest["metadata"]["namespace"], manifest["metadata"]["name"]


def owner_of(raw: Object) -> str:
    """Return the uid of the controller of an object; empty if it has none."""
    owners = raw["metadata"].get("ownerReferences", ())
    return next((str(owner["uid"]) for owner in owners if owner.get("controller")), "")


def rank_of(raw: Object) -> int:
    return replica_index(raw["metadata"])


def has_ended(raw: Object) -> bool:
    return raw["status"]["phase"] in ("Succeeded", "Failed")
