"""A small world in memory for the real operator: its API server, Job controller, scheduler, node and agents.

The metrics service has the real rules for generations. A test chooses what happens between any two calls of
the operator, and whether the operator is killed there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from adascale_controller.operator.runtime.control_loop import ControlLoop
from adascale_controller.operator.runtime.metrics import OperatorMetrics
from adascale_controller.operator.runtime.object_cache import ObjectCache
from adascale_controller.operator.runtime.settings import OperatorSettings
from adascale_controller.operator.schedule.nodes import eligible_nodes
from adascale_controller.operator.types.actions import Event
from adascale_controller.operator.types.kubernetes import COMPLETION_INDEX, Resource, timestamp
from adascale_core import names
from adascale_core.failures.termination_message import TerminationMessage
from adascale_core.messages.registration import ReplicaState
from support.fake_cluster import FakeCluster, Object
from support.fake_service import FakeAgent, FakeService

RESOURCES = (Resource.ADASCALEJOBS, Resource.JOBS, Resource.PODS)
GRACE_PERIOD = 30
GPU = "nvidia.com/gpu"
UNSCHEDULABLE = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/1 nodes are available: 1 Insufficient cpu.",
}


class KilledError(BaseException):
    """The operator is killed. Not an Exception, so that no handler catches it."""


@dataclass
class World:
    """A cluster with one node, which the operator may not read, or with nodes of several types that it reads.

    The operator's caches are updated only by `deliver`.
    """

    objects: dict[Resource, dict[str, Object]] = field(
        default_factory=lambda: {resource: {} for resource in RESOURCES}
    )
    agents: dict[str, FakeAgent] = field(default_factory=dict)
    """The agents by the name of their pod."""
    node_slots: int = 100
    """How many pods fit on a node."""
    types: Sequence[str] = ()
    """The types of accelerators; there is a node of each, which has its name."""
    now: float = 1_800_000_000.0
    version: int = 100
    writes: list[str] = field(default_factory=list)
    """The operator's writes in its last cycle."""
    events: list[Event] = field(default_factory=list)
    """All Events that the operator has recorded."""
    program_failures: int = 0
    """How many pods of the current AdaScaleJob have failed by a failure of the program."""
    kill_before: int | None = None
    """The write of a cycle before which the operator is killed, from 0."""
    full: bool = False
    """Whether the next cycle looks at everything, and not only at what has changed."""
    meanwhile: Callable[[], None] = lambda: None
    """Is called before each write of the operator."""

    def __post_init__(self) -> None:
        self.service = FakeService(self.before_write, lambda: self.now)
        self.metrics = OperatorMetrics()
        self._undelivered: list[tuple[str, Resource, Object]] = []
        if self.types:
            self.objects[Resource.NODES] = {}
        for name in self.types:
            self.add_node(name)
        self.start_operator()

    # -- the operator ---------------------------------------------------------------------------------------

    def start_operator(self) -> None:
        """Start a new operator, without any memory."""
        self._cache = ObjectCache()
        self._operator = ControlLoop(
            self._cache,
            FakeCluster(self),
            self.service,
            OperatorSettings("http://api", namespace="team"),
            tuple(self.objects),
            metrics=self.metrics,
            clock=lambda: self.now,
        )
        asyncio.run(self._operator.list_all())
        self._undelivered = []

    def cycle(self) -> None:
        """Run one cycle. If the operator is killed in it, start another operator."""
        self.now += 1
        self.writes = []
        full, self.full = self.full, False
        try:
            asyncio.run(self._operator.cycle(full=full))
        except KilledError:
            self.kill_before = None
            self.start_operator()

    def run(self, seconds: float) -> None:
        """Run the operator for some seconds without delivering changes."""

        async def run() -> None:
            async with asyncio.timeout(seconds):
                await self._operator.run()

        with suppress(TimeoutError):
            asyncio.run(run())

    def run_until(self, condition: Callable[[], bool], timeout: float = 30.0) -> None:
        """Run the operator, deliver each change at once, and let nobody else act, until a condition holds."""

        async def run() -> None:
            running = asyncio.create_task(self._operator.run())
            try:
                async with asyncio.timeout(timeout):
                    while not condition():
                        if running.done():
                            running.result()
                        self.deliver()
                        await asyncio.sleep(0.005)
                        self.now += 0.005
            finally:
                running.cancel()

        asyncio.run(run())

    def lose_undelivered(self) -> None:
        """Drop the undelivered changes, as when a watch is interrupted."""
        self._undelivered.clear()

    def deliver(self, count: int | None = None) -> None:
        """Deliver the oldest changes to the operator's caches, all by default."""
        count = len(self._undelivered) if count is None else count
        for kind, resource, raw in self._undelivered[:count]:
            (self._cache.remove if kind == "DELETED" else self._cache.put)(resource, raw)
        del self._undelivered[:count]

    def before_write(self, description: str) -> None:
        """Record a write of the operator, or kill it."""
        if self.kill_before is not None and len(self.writes) >= self.kill_before:
            raise KilledError
        self.writes.append(description)
        self.meanwhile()

    # -- objects --------------------------------------------------------------------------------------------

    def create(self, resource: Resource, raw: Object) -> Object:
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
        self._undelivered.append(("MODIFIED", resource, raw))
        return raw

    def delete(self, resource: Resource, name: str) -> None:
        """Delete an object at once."""
        raw = self.objects[resource].pop(name)
        self.version += 1
        last = {**raw, "metadata": {**raw["metadata"], "resourceVersion": str(self.version)}}
        self._undelivered.append(("DELETED", resource, last))

    @property
    def job(self) -> Object | None:
        """The AdaScaleJob `digits`."""
        return self.objects[Resource.ADASCALEJOBS].get("digits")

    @property
    def indexed_job(self) -> Object | None:
        """The Indexed Job of `digits`."""
        return self.objects[Resource.JOBS].get("digits")

    @property
    def live_pods(self) -> list[Object]:
        """The pods that have not ended."""
        return [raw for raw in self.objects[Resource.PODS].values() if not _has_ended(raw)]

    # -- users ----------------------------------------------------------------------------------------------

    def submit(self, name: str = "digits", **spec: Any) -> None:
        """Create an AdaScaleJob."""
        worker = self.worker()
        defaults = {
            "batchSize": 4,
            "maxBatchSize": 256,
            "localBszBounds": {"lower": 4, "upper": 64},
            "maxReplicas": 4,
            "checkpoint": {"claimName": "shared"},
            "template": {"spec": {"containers": [worker]}},
        }
        self.program_failures = 0
        self.create(Resource.ADASCALEJOBS, {"metadata": {"name": name}, "spec": {**defaults, **spec}})

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

    # -- nodes ----------------------------------------------------------------------------------------------

    def add_node(self, name: str) -> None:
        """Add the node of a type of accelerator, if it does not exist."""
        if name not in self.objects[Resource.NODES]:
            meta = {"name": name, "labels": {names.DEFAULT_ACCELERATOR_LABEL: name}}
            status = {
                "conditions": [{"type": "Ready", "status": "True"}],
                "allocatable": {GPU: "100", "pods": "110"},
            }
            self.create(Resource.NODES, {"metadata": meta, "spec": {}, "status": status})

    def remove_node(self, name: str) -> None:
        """Remove the node of a type of accelerator, with its pods."""
        if name in self.objects[Resource.NODES]:
            self.delete(Resource.NODES, name)
            for raw in list(self.objects[Resource.PODS].values()):
                if raw["spec"].get("nodeName") == name:
                    self.delete_pod(raw["metadata"]["name"])

    def nodes_of_jobs(self) -> dict[str, set[str]]:
        """Return the nodes of the live pods of each Indexed Job, by its uid."""
        found: dict[str, set[str]] = {}
        for raw in self.live_pods:
            if "nodeName" in raw["spec"]:
                found.setdefault(_owner(raw), set()).add(raw["spec"]["nodeName"])
        return found

    # -- the controllers of Kubernetes ----------------------------------------------------------------------

    def collect_garbage(self) -> None:
        """Delete the Indexed Job of a deleted AdaScaleJob, and the ended pods of a deleted Indexed Job."""
        owner = self.job["metadata"]["uid"] if self.job is not None else None
        indexed_job = self.indexed_job
        if indexed_job is not None and _owner(indexed_job) != owner:
            meta = {**indexed_job["metadata"], "deletionTimestamp": timestamp(self.now)}
            if "deletionTimestamp" not in indexed_job["metadata"]:
                self.write(Resource.JOBS, {**indexed_job, "metadata": meta})
        uid = self._active_job_uid()
        for name, raw in list(self.objects[Resource.PODS].items()):
            if _has_ended(raw) and _owner(raw) != uid:
                self.delete_pod(name)

    def control_jobs(self) -> None:
        """Create the pods that the Indexed Job lacks, and delete those that are too many."""
        indexed_job, uid = self.indexed_job, self._active_job_uid()
        ranks = range(0)
        if indexed_job is not None and uid is not None and not indexed_job["spec"]["suspend"]:
            ranks = range(indexed_job["spec"]["parallelism"])
        present = set()
        for raw in self.live_pods:
            rank, own = _rank(raw), _owner(raw) == uid
            present |= {rank} if own else set()
            if not (own and rank in ranks) and "deletionTimestamp" not in raw["metadata"]:
                self.terminate_pod(raw["metadata"]["name"])
        for rank in ranks:
            if uid is not None and rank not in present:
                self._create_pod(rank, uid)
        deleting = indexed_job is not None and uid is None
        if indexed_job is not None and deleting:
            pods = self.objects[Resource.PODS].values()
            if not any(_owner(raw) == indexed_job["metadata"]["uid"] for raw in pods):
                self.delete(Resource.JOBS, "digits")

    def schedule_pods(self) -> None:
        """Assign pending pods to a node while it has free slots, and start them.

        Pods prefer the nodes where their Indexed Job has other pods, as its affinity says.
        """
        for raw in self.live_pods:
            if "nodeName" in raw["spec"]:
                continue
            nodes = ["node1"]
            if self.types:
                own = self.nodes_of_jobs().get(_owner(raw), set())
                accepting = eligible_nodes(raw["spec"], self.objects[Resource.NODES].values())
                nodes = sorted(accepting, key=lambda name: (name not in own, name))
            node = next((name for name in nodes if self._used_slots(name) < self.node_slots), None)
            if node is not None:
                self._start_pod(raw, node)
            elif not raw["status"].get("conditions"):
                self.write(
                    Resource.PODS, {**raw, "status": {"phase": "Pending", "conditions": [UNSCHEDULABLE]}}
                )

    def run_kubelet(self) -> None:
        """End the pods that are being deleted: their agents save the state, register and leave."""
        for name, raw in list(self.objects[Resource.PODS].items()):
            if "deletionTimestamp" in raw["metadata"]:
                agent = self.agents.get(name)
                if agent is not None:
                    agent.state = ReplicaState.TERMINATED
                    self.service.register(agent)
                self.delete_pod(name)

    def terminate_pod(self, name: str) -> None:
        """Delete a pod with its grace period."""
        raw = self.objects[Resource.PODS][name]
        meta = {**raw["metadata"], "deletionTimestamp": timestamp(self.now + GRACE_PERIOD)}
        self.write(Resource.PODS, {**raw, "metadata": meta})

    def delete_pod(self, name: str) -> None:
        """Delete a pod at once; its agent registers nothing."""
        if name in self.objects[Resource.PODS]:
            self.delete(Resource.PODS, name)
            self.agents.pop(name, None)

    def _active_job_uid(self) -> str | None:
        """Return the uid of the Indexed Job if it exists and is not being deleted."""
        raw = self.indexed_job
        active = raw is not None and "deletionTimestamp" not in raw["metadata"]
        return str(raw["metadata"]["uid"]) if raw is not None and active else None

    def _used_slots(self, node: str) -> int:
        return sum(raw["spec"].get("nodeName") == node for raw in self.live_pods)

    def _create_pod(self, rank: int, job_uid: str) -> None:
        meta = {
            "name": f"digits-{rank}-{self.version + 1}",
            "labels": {names.LABEL_JOB: "digits"},
            "annotations": {COMPLETION_INDEX: str(rank)},
            "ownerReferences": [{"kind": "Job", "uid": job_uid, "controller": True}],
        }
        indexed_job = self.indexed_job
        assert indexed_job is not None
        spec = indexed_job["spec"]["template"]["spec"]
        self.create(Resource.PODS, {"metadata": meta, "spec": spec, "status": {"phase": "Pending"}})

    def _start_pod(self, raw: Object, node: str) -> None:
        running = {"name": "worker", "state": {"running": {}}}
        status = {"phase": "Running", "containerStatuses": [running]}
        self.write(Resource.PODS, {**raw, "spec": {**raw["spec"], "nodeName": node}, "status": status})
        name = raw["metadata"]["name"]
        self.agents[name] = FakeAgent(_rank(raw), name)

    # -- failures of pods -----------------------------------------------------------------------------------

    def fail_program(self, name: str) -> None:
        """Have the program of a pod fail: its agent registers that and leaves a termination message.

        Each failure differs from the others, because a program that fails twice in the same way before its
        first step is not restarted.
        """
        agent = self.agents[name]
        agent.state = ReplicaState.FAILED
        self.service.register(agent)
        self.program_failures += 1
        message = TerminationMessage(agent.generation, 3, f"ValueError: {self.program_failures}").to_text()
        self._fail_pod(name, {"exitCode": 3, "reason": "Error", "message": message})

    def exceed_memory(self, name: str) -> None:
        """Have the kernel kill a container that exceeds its memory limit; its agent registers nothing."""
        self._fail_pod(name, {"exitCode": 137, "reason": "OOMKilled"})

    def evict_pod(self, name: str) -> None:
        """Have the kubelet evict a pod under node pressure; its agent registers nothing."""
        disruption = {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"}
        self._fail_pod(name, {"exitCode": 137}, reason="Evicted", conditions=[disruption])

    def _fail_pod(self, name: str, terminated: Object, **status: Any) -> None:
        raw = self.objects[Resource.PODS][name]
        worker = {"name": "worker", "state": {"terminated": terminated}}
        status = {"phase": "Failed", "containerStatuses": [worker], **status}
        self.write(Resource.PODS, {**raw, "status": status})
        self.agents.pop(name)

    # -- agents ---------------------------------------------------------------------------------------------

    def run_agent(self, name: str) -> None:
        """Have one agent, if it still exists, read the job's allocation, follow it and register."""
        agent = self.agents.get(name)
        if agent is None:
            return
        agent.follow(self.service.state.view(1))
        self.service.register(agent)

    def expire_missing(self) -> None:
        """Have the metrics service expire the replicas whose agents no longer exist."""
        self.service.expire_missing({agent.instance for agent in self.agents.values()})

    # -- invariants -----------------------------------------------------------------------------------------

    def check_saved(self, parallelism: int) -> None:
        """Check that no pod is removed whose trainer runs in the active generation.

        Jobs that have failed are excepted, because they are not resumed. Their pods can be in the next
        generation already when the failure that exceeds `backoffLimit` is counted.
        """
        if self.job is not None and self.job.get("status", {}).get("state") == "Failed":
            return
        state = self.service.state
        for agent in self.agents.values():
            running = agent.state is ReplicaState.RUNNING and not state.view(1).has_ended(agent.generation)
            active = state.active is not None and state.active.generation == agent.generation
            removed = agent.rank >= parallelism
            assert not (running and active and removed), f"rank {agent.rank} has not saved its state"

    @property
    def current_generations(self) -> set[int]:
        """The generations that are not over and whose members all run in them, so that they can make steps.

        A member that runs alone in a generation whose other members have left it waits for them. Without its
        data, the metrics service does not know that this generation is over.
        """
        view = self.service.state.view(1)
        running = [agent for agent in self.agents.values() if agent.state is ReplicaState.RUNNING]
        there = {(agent.generation, agent.instance) for agent in running}
        return {
            agent.generation
            for agent in running
            if not view.has_ended(agent.generation)
            and all((agent.generation, member) in there for member in agent.members)
        }

    def run_cycles(self, cycles: int = 60) -> None:
        """Run everything in turn, without new failures or edits."""
        for _ in range(cycles):
            self.collect_garbage()
            self.control_jobs()
            self.schedule_pods()
            self.run_kubelet()
            for name in list(self.agents):
                self.run_agent(name)
            self.expire_missing()
            self.deliver()
            self.cycle()
            self.deliver()


def _owner(raw: Object) -> str:
    return str(raw["metadata"]["ownerReferences"][0]["uid"])


def _rank(raw: Object) -> int:
    return int(raw["metadata"]["annotations"][COMPLETION_INDEX])


def _has_ended(raw: Object) -> bool:
    return raw["status"]["phase"] in ("Succeeded", "Failed")
