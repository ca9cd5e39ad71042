"""A small world in memory for the operator: an API server, a Job controller, agents, and the metrics service.

The service's generations are the real state machine; the operator is the real one, from its store to its
writes. What goes on between any two of its calls, and whether it is killed there, is up to the test.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, cast

from adascale_client import ServiceRefusedError
from adascale_controller.operator.apply.cluster import ClusterError
from adascale_controller.operator.runtime.control_loop import ControlLoop
from adascale_controller.operator.runtime.object_cache import ObjectCache
from adascale_controller.operator.runtime.settings import OperatorSettings
from adascale_controller.operator.types.actions import Event
from adascale_controller.operator.types.kubernetes import ApiObject, Resource, timestamp
from adascale_core import names
from adascale_core.messages import Allocation, AllocationView, GainReport, JobSpec, Registration, ReplicaState
from adascale_core.rendezvous import IDLE_STATES, Rendezvous, StaleAllocationError, allocate, expire, register
from adascale_core.views import JobView, ReplicaView

Object = dict[str, Any]

JOB_ID = "team.digits"
INDEX = "indexed_job.kubernetes.io/job-completion-index"
KINDS = (Resource.ADASCALEJOBS, Resource.JOBS, Resource.PODS)
GRACE = 30


class KilledError(BaseException):
    """The operator is killed. No Exception, so that nothing catches it."""


# -- agents -------------------------------------------------------------------------------------------------


@dataclass
class Agent:
    """The agent in a pod: what it does, as it last told the service."""

    rank: int
    instance: str
    state: ReplicaState = ReplicaState.WAITING
    generation: int = 0
    port: int = 1

    def told(self) -> Registration:
        """What it tells the service."""
        return Registration(
            self.rank, self.instance, self.state, self.generation, f"host-{self.instance}", self.port
        )

    def step(self, view: AllocationView) -> None:
        """Do what the service's view asks for."""
        if self.state is ReplicaState.RUNNING and view.has_ended(self.generation):
            self.state = ReplicaState.REENTERING
        elif self.state in IDLE_STATES:
            following = view.next_allocation(self.generation)
            if following is not None and following.admits(self.rank, self.instance):
                self.state, self.generation = ReplicaState.RUNNING, following.generation
                self.port += 1
            elif self.rank == 0 and view.used_port == self.port:
                self.port += 1


# -- the metrics service ------------------------------------------------------------------------------------


class Service:
    """The metrics service, with one job."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.state = Rendezvous()
        self.spec: JobSpec | None = None
        self.latest: GainReport | None = None

    def list_jobs(self) -> list[JobView]:
        """As `MetricsServiceClient.list_jobs`."""
        state = self.state
        if state == Rendezvous() and self.spec is None and self.latest is None:
            return []
        told = state.view(1)
        found = JobView(
            id=JOB_ID,
            spec=self.spec,
            version=1,
            desired=told.desired,
            active=told.active,
            broken=told.broken,
            complete=told.complete,
            failures=state.failures,
            disruptions=state.disruptions,
            replicas=tuple(ReplicaView.of(replica, 0.0) for replica in state.replicas.values()),
            latest=self.latest,
            step_times=(),
            created_at=0.0,
        )
        return [found]

    def declare_job(self, job_id: str, spec: JobSpec) -> None:
        """As `MetricsServiceClient.declare_job`."""
        self._world.before_write(f"declare {job_id}")
        self.spec = spec

    def delete_job(self, job_id: str) -> None:
        """As `MetricsServiceClient.delete_job`."""
        self._world.before_write(f"forget {job_id}")
        self.state, self.spec, self.latest = Rendezvous(), None, None

    def lose_everything(self) -> None:
        """Its volume is gone, and it begins anew."""
        self.state, self.spec, self.latest = Rendezvous(), None, None

    def allocate(self, job_id: str, allocation: Allocation) -> AllocationView:
        """As `MetricsServiceClient.allocate`."""
        self._world.before_write(f"want {allocation.generation}: {allocation.replicas}")
        try:
            self.state = allocate(self.state, allocation)
        except StaleAllocationError as error:
            raise ServiceRefusedError(str(error), 409) from error
        return self.state.view(1)

    def close(self) -> None:
        """As `MetricsServiceClient.close`."""


# -- the API server -----------------------------------------------------------------------------------------


class Api:
    """The calls of `Cluster` that the operator makes, for objects in memory."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def list(self, resource: Resource) -> tuple[list[ApiObject], int]:
        """All objects of a resource."""
        return list(deepcopy(self._world.objects[resource]).values()), self._world.version

    async def may_list(self, resource: Resource) -> bool:
        """Nodes are not listed."""
        return False

    async def get_claim(self, namespace: str, name: str) -> ApiObject | None:
        """The claim that the user has made."""
        return {"spec": {"accessModes": ["ReadWriteMany"]}}

    async def list_events(
        self, namespace: str, involved_uid: str, reason: str | None = None
    ) -> Sequence[ApiObject]:
        """There are none."""
        return []

    async def create_claim(self, manifest: ApiObject) -> None:
        """Make a claim: there is one."""

    async def apply_status(self, namespace: str, name: str, uid: str, status: ApiObject) -> Object:
        """Write the status of the AdaScaleJob."""
        self._world.before_write("status")
        raw = self._found(Resource.ADASCALEJOBS, name, uid)
        before = (raw.get("status") or {}).get("allocation", {"generation": 0})
        after = status.get("allocation", {"generation": 0})
        assert after["generation"] >= before["generation"], "a generation in the status fell"
        return self._world.write(Resource.ADASCALEJOBS, {**raw, "status": deepcopy(dict(status))})

    async def create_indexed_job(self, manifest: ApiObject) -> Object:
        """Make a Job."""
        self._world.before_write(f"create a Job of {manifest['spec']['parallelism']}")
        if manifest["metadata"]["name"] in self._world.objects[Resource.JOBS]:
            raise ClusterError("there is one already", 409)
        return self._world.create(Resource.JOBS, deepcopy(dict(manifest)))

    async def patch_indexed_job(self, namespace: str, name: str, uid: str, patch: ApiObject) -> Object:
        """Change a Job."""
        spec = patch["spec"]
        size = 0 if spec["suspend"] else spec["parallelism"]
        self._world.before_write(f"resize to {size}")
        raw = self._found(Resource.JOBS, name, uid)
        self._world.check_nothing_unsaved(size)
        return self._world.write(Resource.JOBS, {**raw, "spec": {**raw["spec"], **spec}})

    async def delete_indexed_job(self, namespace: str, name: str, uid: str) -> None:
        """Delete a Job with its pods."""
        self._world.before_write("remove the Job")
        self._world.check_nothing_unsaved(0)
        raw = self._found(Resource.JOBS, name, uid)
        meta = {**raw["metadata"], "deletionTimestamp": timestamp(self._world.now)}
        self._world.write(Resource.JOBS, {**raw, "metadata": meta})

    async def release_pod(self, namespace: str, name: str) -> None:
        """Remove the finalizer of a pod, which has none."""

    async def delete_job(self, namespace: str, name: str, uid: str) -> None:
        """Delete the AdaScaleJob."""
        self._world.before_write("delete the AdaScaleJob")
        self._found(Resource.ADASCALEJOBS, name, uid)
        self._world.delete(Resource.ADASCALEJOBS, name)

    async def delete_pod(self, namespace: str, name: str) -> None:
        """Delete a pod by force."""
        self._world.before_write(f"remove pod {name}")
        self._world.remove_pod(name)

    async def record_event(
        self, namespace: str, name: str, uid: str, event: Event, now: float, reporter: str
    ) -> None:
        """Create an Event."""
        self._world.before_write("record an Event")

    def _found(self, resource: Resource, name: str, uid: str) -> Object:
        raw = self._world.objects[resource].get(name)
        if raw is None:
            raise ClusterError(f"there is no {resource} {name}", 404)
        if raw["metadata"]["uid"] != uid:
            raise ClusterError("it is another one", 409)
        return raw


# -- all of it ----------------------------------------------------------------------------------------------


@dataclass
class World:
    """All there is. What the operator sees of it comes late, by `tell_operator`."""

    objects: dict[Resource, dict[str, Object]] = field(
        default_factory=lambda: {resource: {} for resource in KINDS}
    )
    agents: dict[str, Agent] = field(default_factory=dict)
    now: float = 1_800_000_000.0
    version: int = 100
    writes: list[str] = field(default_factory=list)
    """What the operator has written in its last cycle."""
    kill_before: int | None = None
    """Before which write of a cycle the operator is killed."""
    meanwhile: Callable[[], None] = lambda: None
    """What goes on before each of its writes."""

    def __post_init__(self) -> None:
        self.service = Service(self)
        self._news: list[tuple[str, Resource, Object]] = []
        self.start_operator()

    # -- the operator ---------------------------------------------------------------------------------------

    def start_operator(self) -> None:
        """Start it anew: it remembers nothing."""
        self._store = ObjectCache()
        self._operator = ControlLoop(
            self._store,
            Api(self),
            self.service,
            OperatorSettings("http://api", namespace="team"),
            KINDS,
            clock=lambda: self.now,
        )
        asyncio.run(self._operator.list_all())
        self._news = []

    def cycle(self) -> None:
        """Let it have one cycle; where it is killed, another one starts."""
        self.now += 1
        self.writes = []
        try:
            asyncio.run(self._operator.cycle())
        except KilledError:
            self.kill_before = None
            self.start_operator()

    def run(self, seconds: float) -> None:
        """Let the operator run by itself, for which nothing of the news comes."""

        async def run() -> None:
            async with asyncio.timeout(seconds):
                await self._operator.run()

        with suppress(TimeoutError):
            asyncio.run(run())

    def miss_news(self) -> None:
        """Have its watches miss what is new."""
        self._news.clear()

    def tell_operator(self, count: int | None = None) -> None:
        """Let its watches tell the next news, all by default."""
        count = len(self._news) if count is None else count
        for what, resource, raw in self._news[:count]:
            (self._store.remove if what == "DELETED" else self._store.put)(resource, raw)
        del self._news[:count]

    def before_write(self, what: str) -> None:
        """What happens before each write of the operator."""
        if self.kill_before is not None and len(self.writes) >= self.kill_before:
            raise KilledError
        self.writes.append(what)
        self.meanwhile()

    # -- objects --------------------------------------------------------------------------------------------

    def create(self, resource: Resource, raw: Object) -> Object:
        """Make an object."""
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
        self._news.append(("MODIFIED", resource, raw))
        return raw

    def delete(self, resource: Resource, name: str) -> None:
        """Have an object gone."""
        raw = self.objects[resource].pop(name)
        self.version += 1
        last = {**raw, "metadata": {**raw["metadata"], "resourceVersion": str(self.version)}}
        self._news.append(("DELETED", resource, last))

    @property
    def job(self) -> Object | None:
        """The AdaScaleJob."""
        return self.objects[Resource.ADASCALEJOBS].get("digits")

    @property
    def indexed_job(self) -> Object | None:
        """Its Job."""
        return self.objects[Resource.JOBS].get("digits")

    # -- what users do --------------------------------------------------------------------------------------

    def submit(self, **spec: Any) -> None:
        """Make the AdaScaleJob."""
        worker = {"name": "worker", "image": "trainer:1"}
        whole = {
            "batchSize": 4,
            "maxBatchSize": 256,
            "localBszBounds": {"lower": 4, "upper": 64},
            "maxReplicas": 4,
            "checkpoint": {"claimName": "shared"},
            "template": {"spec": {"containers": [worker]}},
        }
        self.create(
            Resource.ADASCALEJOBS,
            {"metadata": {"name": "digits"}, "spec": {**whole, **spec}},
        )

    def edit(self, **spec: Any) -> None:
        """Edit its spec."""
        assert self.job is not None
        meta = {**self.job["metadata"], "generation": self.job["metadata"]["generation"] + 1}
        self.write(
            Resource.ADASCALEJOBS, {**self.job, "metadata": meta, "spec": {**self.job["spec"], **spec}}
        )

    # -- what Kubernetes does -------------------------------------------------------------------------------

    def collect_garbage(self) -> None:
        """Delete what belongs to an AdaScaleJob that is no more."""
        owner = self.job["metadata"]["uid"] if self.job is not None else None
        indexed_job = self.indexed_job
        if indexed_job is not None and indexed_job["metadata"]["ownerReferences"][0]["uid"] != owner:
            meta = {**indexed_job["metadata"], "deletionTimestamp": timestamp(self.now)}
            if "deletionTimestamp" not in indexed_job["metadata"]:
                self.write(Resource.JOBS, {**indexed_job, "metadata": meta})

    def control_jobs(self) -> None:
        """Make the pods that the Job asks for, and have the others end."""
        indexed_job = self.indexed_job
        desired = range(0)
        if (
            indexed_job is not None
            and "deletionTimestamp" not in indexed_job["metadata"]
            and not indexed_job["spec"]["suspend"]
        ):
            desired = range(indexed_job["spec"]["parallelism"])
        uid = indexed_job["metadata"]["uid"] if indexed_job is not None else None
        present = set()
        for raw in list(self.objects[Resource.PODS].values()):
            rank, mine = int(raw["metadata"]["annotations"][INDEX]), _owner(raw) == uid
            present |= {rank} if mine else set()
            if not (mine and rank in desired) and "deletionTimestamp" not in raw["metadata"]:
                self.end_pod(raw["metadata"]["name"])
        for rank in desired:
            if rank not in present:
                self._make_pod(rank, cast(str, uid))
        going = indexed_job is not None and "deletionTimestamp" in indexed_job["metadata"]
        if going and not any(_owner(raw) == uid for raw in self.objects[Resource.PODS].values()):
            self.delete(Resource.JOBS, "digits")

    def _make_pod(self, rank: int, job_uid: str) -> None:
        name = f"digits-{rank}-{self.version + 1}"
        meta = {
            "name": name,
            "labels": {names.LABEL_JOB: "digits"},
            "annotations": {INDEX: str(rank)},
            "ownerReferences": [{"resource": "Job", "uid": job_uid, "controller": True}],
        }
        spec = {"containers": [{"name": "worker"}], "nodeName": "node1"}
        started = {"name": "worker", "state": {"running": {}}}
        status = {"phase": "Running", "containerStatuses": [started]}
        self.create(Resource.PODS, {"metadata": meta, "spec": spec, "status": status})
        self.agents[name] = Agent(rank, name)

    def end_pod(self, name: str) -> None:
        """Ask a pod to end."""
        raw = self.objects[Resource.PODS][name]
        meta = {**raw["metadata"], "deletionTimestamp": timestamp(self.now + GRACE)}
        self.write(Resource.PODS, {**raw, "metadata": meta})

    def remove_pod(self, name: str) -> None:
        """Have a pod gone, with its agent, who says nothing."""
        if name in self.objects[Resource.PODS]:
            self.delete(Resource.PODS, name)
            self.agents.pop(name, None)

    def kubelet(self) -> None:
        """End the pods that were asked to: their agents save, say so, and leave."""
        for name, raw in list(self.objects[Resource.PODS].items()):
            if "deletionTimestamp" in raw["metadata"]:
                agent = self.agents[name]
                agent.state = ReplicaState.TERMINATED
                self.service.state = register(self.service.state, agent.told())
                self.remove_pod(name)

    # -- what agents do -------------------------------------------------------------------------------------

    def step(self, name: str) -> None:
        """Let one agent, if it is still there, hear of the service, do what it is asked to, and tell."""
        agent = self.agents.get(name)
        if agent is None:
            return
        agent.step(self.service.state.view(1))
        self.service.state = register(self.service.state, agent.told())

    def miss_the_silent(self) -> None:
        """Have the service forget the replicas that are no more."""
        alive = {agent.instance for agent in self.agents.values()}
        told = self.service.state.replicas
        gone = [rank for rank, one in told.items() if one.instance not in alive]
        self.service.state = expire(self.service.state, gone)

    # -- what must hold -------------------------------------------------------------------------------------

    def check_nothing_unsaved(self, size: int) -> None:
        """No pod may be taken from a generation that is whole and at work."""
        state = self.service.state
        for agent in self.agents.values():
            at_work = agent.state is ReplicaState.RUNNING and not state.view(1).has_ended(agent.generation)
            known = state.active is not None and state.active.generation == agent.generation
            assert not (at_work and known and agent.rank >= size), f"rank {agent.rank} was not saved"

    @property
    def current(self) -> set[int]:
        """The generations that take themselves for current."""
        view = self.service.state.view(1)
        running = [agent for agent in self.agents.values() if agent.state is ReplicaState.RUNNING]
        return {agent.generation for agent in running if not view.has_ended(agent.generation)}

    def settle(self, cycles: int = 60) -> None:
        """Let everything go its way, with nothing new happening."""
        for _ in range(cycles):
            self.collect_garbage()
            self.control_jobs()
            self.kubelet()
            for name in list(self.agents):
                self.step(name)
            self.miss_the_silent()
            self.tell_operator()
            self.cycle()
            self.tell_operator()


def _owner(raw: Object) -> str:
    return str(raw["metadata"]["ownerReferences"][0]["uid"])
