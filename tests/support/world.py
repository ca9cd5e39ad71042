"""A small world in memory for the real operator: its API server, scheduler, node and agents.

The metrics service has the real rules for generations. A test chooses what happens between any two calls of
the operator, and whether the operator is killed there.
"""

from __future__ import annotations

import asyncio
import atexit
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from adascale_controller.operator.runtime.control_loop import OperatorLoop
from adascale_controller.operator.runtime.health import OperatorMetrics
from adascale_controller.operator.runtime.object_cache import ObjectCache
from adascale_controller.operator.schedule.nodes import eligible_nodes
from adascale_controller.operator.types.actions import Event
from adascale_controller.operator.types.kubernetes import Resource, replica_index, timestamp
from adascale_controller.operator.types.settings import QUEUE_NAME, OperatorSettings
from adascale_core import names
from adascale_core.failures import EXIT_REFUSED, TerminationMessage
from adascale_core.messages.registration import ReplicaState
from support.fake_cluster import FakeCluster, Object
from support.fake_service import FakeAgent, FakeService

RESOURCES = (Resource.ADASCALEJOBS, Resource.PODS)
GRACE_PERIOD = 30
GPU = "nvidia.com/gpu"
RUNNING: Object = {"running": {}}
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
    request_nodes: bool = False
    """The operator's setting."""
    api_url: str = "http://api"
    """The address of the metrics service. With TLS, its certificate is of an authority that pods get."""
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
    admit: Callable[[Object], Object] = lambda pod: pod
    """What admission makes of a pod; it may raise an `ApiServerError`."""
    spec: Object = field(default_factory=dict)
    """Fields of the spec of each AdaScaleJob that is submitted."""
    missing_image: str = ""
    """An image that can't be pulled."""
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
        self._operator = OperatorLoop(
            self._cache,
            FakeCluster(self),
            self.service,
            OperatorSettings(
                self.api_url,
                namespace="team",
                request_nodes=self.request_nodes,
                tls_secret=("system", "tls") if self.api_url.startswith("https://") else None,
            ),
            tuple(self.objects),
            metrics=self.metrics,
            clock=lambda: self.now,
        )
        _run_inline(self._operator.list_all())
        self._undelivered = []

    def cycle(self) -> None:
        """Run one cycle. If the operator is killed in it, start another operator."""
        self.now += 1
        self.writes = []
        full, self.full = self.full, False
        try:
            _run_inline(self._operator.cycle(full=full))
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

    def run_until(self, condition: Callable[[], bool]) -> None:
        """Run the operator, deliver each change at once, and let nobody else act, until a condition holds."""

        async def run() -> None:
            running = asyncio.create_task(self._operator.run())
            try:
                async with asyncio.timeout(30):
                    while not condition():
                        if running.done():
                            running.result()
                        self.deliver()
                        await asyncio.sleep(0.005)
                        self.now += 0.005
            finally:
                running.cancel()

        asyncio.run(run())

    @property
    def cached_pods(self) -> list[Any]:
        """The pods of the AdaScaleJob in the operator's cache."""
        return self._cache.pods_of(("team", "digits"))

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
        return [raw for raw in pods if not _has_ended(raw)]

    @property
    def uids(self) -> dict[str, str]:
        """The names of the live pods by their uids."""
        return {raw["metadata"]["uid"]: raw["metadata"]["name"] for raw in self.live_pods}

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
        self.create(
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

    def nodes_of_pods(self) -> set[str]:
        """Return the nodes of the live pods of the AdaScaleJob."""
        return {raw["spec"]["nodeName"] for raw in self.live_pods if "nodeName" in raw["spec"]}

    # -- the controllers of Kubernetes ----------------------------------------------------------------------

    def collect_garbage(self) -> None:
        """Delete the pods of a deleted AdaScaleJob."""
        owner = self.job["metadata"]["uid"] if self.job is not None else None
        for name, raw in list(self.objects[Resource.PODS].items()):
            if _owner(raw) not in ("", owner):
                self.terminate_pod(name)

    def create_pod(self, manifest: Object) -> Object:
        """Create a pod of a replica. No second one of a rank may be there."""
        pod = self.admit({**manifest, "status": {"phase": "Pending"}})
        rank, owner = _rank(pod), _owner(pod)
        others = [raw for raw in self.live_pods if _rank(raw) == rank and _owner(raw) == owner]
        assert not others, f"rank {rank} has a pod: {others[0]['metadata']['name']}"
        return self.create(Resource.PODS, pod)

    def schedule_pods(self) -> None:
        """Assign pending pods to a node while it has free slots, and start them.

        Pods prefer the nodes where their job has other pods, as their affinity says.
        """
        for raw in self.live_pods:
            if "nodeName" in raw["spec"] or raw["spec"].get("schedulingGates"):
                continue
            nodes = ["node1"]
            if self.types:
                own = self.nodes_of_pods()
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
        """End the pods that are being deleted or ended: their agents save the state, register and leave."""
        for name, raw in list(self.objects[Resource.PODS].items()):
            is_ending = "activeDeadlineSeconds" in raw["spec"] and not _has_ended(raw)
            if not is_ending and "deletionTimestamp" not in raw["metadata"]:
                continue
            agent = self.agents.get(name)
            if agent is not None:
                agent.state = ReplicaState.TERMINATED
                self.service.register_agent(agent)
            if is_ending:
                self._fail_pod(name, {"exitCode": 143, "reason": "Error"}, reason="DeadlineExceeded")
            else:
                self.delete_pod(name)

    def terminate_pod(self, name: str) -> None:
        """Delete a pod with its grace period."""
        raw = self.objects[Resource.PODS][name]
        if "nodeName" not in raw["spec"] or _has_ended(raw):
            self.delete_pod(name)
            return
        meta = {**raw["metadata"], "deletionTimestamp": timestamp(self.now + GRACE_PERIOD)}
        self.write(Resource.PODS, {**raw, "metadata": meta})

    def delete_pod(self, name: str) -> None:
        """Delete a pod at once; its agent registers nothing."""
        if name in self.objects[Resource.PODS]:
            self.delete(Resource.PODS, name)
            self.agents.pop(name, None)

    def _used_slots(self, node: str) -> int:
        pods = self.objects[Resource.PODS].values()
        return sum(raw["spec"].get("nodeName") == node for raw in pods if not _has_ended(raw))

    def _start_pod(self, raw: Object, node: str) -> None:
        image, name = raw["spec"]["containers"][0]["image"], raw["metadata"]["name"]
        waiting = {"reason": "ErrImagePull", "message": "not found"}
        is_missing = image == self.missing_image
        worker = {"name": "worker", "image": image, "state": {"waiting": waiting} if is_missing else RUNNING}
        status = {"phase": "Pending" if is_missing else "Running", "containerStatuses": [worker]}
        self.write(Resource.PODS, {**raw, "spec": {**raw["spec"], "nodeName": node}, "status": status})
        if is_missing:
            return
        # Another pod may have the same name later.
        self.agents[name] = FakeAgent(_rank(raw), raw["metadata"]["uid"])

    # -- failures of pods -----------------------------------------------------------------------------------

    def fail_program(self, name: str) -> None:
        """Have the program of a pod fail: its agent registers that and leaves a termination message.

        Each failure differs from the others, because a program that fails twice in the same way before its
        first step is not restarted.
        """
        agent = self.agents[name]
        agent.state = ReplicaState.FAILED
        self.service.register_agent(agent)
        self.program_failures += 1
        message = TerminationMessage(agent.generation, 3, f"ValueError: {self.program_failures}").to_text()
        self._fail_pod(name, {"exitCode": 3, "reason": "Error", "message": message})

    def finish_program(self, name: str) -> None:
        """Have the program of a pod finish: its agent ends with exit code 0."""
        self._fail_pod(name, {"exitCode": 0, "reason": "Completed"}, phase="Succeeded")

    def exceed_memory(self, name: str) -> None:
        """Have the kernel kill a container that exceeds its memory limit; its agent registers nothing."""
        self._fail_pod(name, {"exitCode": 137, "reason": "OOMKilled"})

    def refuse_replica(self, name: str) -> None:
        """Have the metrics service refuse a replica of another version: its agent gives up."""
        message = TerminationMessage(0, EXIT_REFUSED, "replica has adascale 2, but others have 1").to_text()
        self._fail_pod(name, {"exitCode": EXIT_REFUSED, "reason": "Error", "message": message})

    def evict_pod(self, name: str) -> None:
        """Have the kubelet evict a pod under node pressure; its agent registers nothing."""
        disruption = {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"}
        self._fail_pod(name, {"exitCode": 137}, reason="Evicted", conditions=[disruption])

    def _fail_pod(self, name: str, terminated: Object, **status: Any) -> None:
        raw = self.objects[Resource.PODS][name]
        worker = {"name": "worker", "state": {"terminated": terminated}}
        status = {"phase": "Failed", "containerStatuses": [worker], **status}
        self.write(Resource.PODS, {**raw, "status": status})
        self.agents.pop(name, None)

    # -- agents ---------------------------------------------------------------------------------------------

    def run_agent(self, name: str) -> None:
        """Have one agent, if it still exists, read the job's allocation, follow it and register."""
        agent = self.agents.get(name)
        if agent is None:
            return
        agent.follow(self.service.state.view(1))
        self.service.register_agent(agent)

    def expire_missing(self) -> None:
        """Have the metrics service expire the replicas whose agents no longer exist."""
        self.service.expire_missing({agent.instance for agent in self.agents.values()})

    # -- invariants -----------------------------------------------------------------------------------------

    def check_saved(self, name: str) -> None:
        """Check that no pod is stopped whose trainer runs in the active generation, unless it is outdated.

        Jobs that have failed are excepted, because they are not resumed. Their pods can be in the next
        generation already when the failure that exceeds `backoffLimit` is counted.
        """
        if self.job is not None and self.job.get("status", {}).get("state") == "Failed":
            return
        agent, raw = self.agents.get(name), self.objects[Resource.PODS].get(name)
        if agent is None or raw is None or self.job is None:
            return
        state = self.service.state
        running = agent.state is ReplicaState.RUNNING and not state.view(1).has_ended(agent.generation)
        active = state.active is not None and state.active.generation == agent.generation
        spec = self.job["spec"]
        image = spec["template"]["spec"]["containers"][0]["image"]
        core = spec.get("minReplicas", 1) if "opportunistic" in spec else 100
        is_extra = names.LABEL_EXTRA in raw["metadata"]["labels"]
        outdated = raw["spec"]["containers"][0]["image"] != image or is_extra is not (agent.rank >= core)
        digests = [each["metadata"]["annotations"][names.ANNOTATION_TEMPLATE] for each in self.live_pods]
        outdated |= raw["metadata"]["annotations"][names.ANNOTATION_TEMPLATE] != digests[-1]
        desired = state.desired
        # The further pod that was created to replace others.
        outdated |= desired is not None and desired.spares > 0 and agent.rank >= desired.replicas
        assert not (running and active) or outdated, f"rank {agent.rank} has not saved its state"

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

    def run_cycles(self, cycles: int = 30) -> None:
        """Run everything in turn, without new failures or edits."""
        for _ in range(cycles):
            self.collect_garbage()
            self.schedule_pods()
            self.run_kubelet()
            for name in list(self.agents):
                self.run_agent(name)
            self.expire_missing()
            self.deliver()
            self.cycle()
            self.deliver()


def _owner(raw: Object) -> str:
    """Return the uid of the controller of an object; empty if it has none."""
    owners = raw["metadata"].get("ownerReferences", ())
    return next((str(owner["uid"]) for owner in owners if owner.get("controller")), "")


def _rank(raw: Object) -> int:
    return replica_index(raw["metadata"])


def _has_ended(raw: Object) -> bool:
    return raw["status"]["phase"] in ("Succeeded", "Failed")


# -- the event loop of the operator ----------------------------------------------------------------------


class _InlineExecutor(ThreadPoolExecutor):
    """Runs each call at once, so that a cycle starts no threads."""

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        """Run a call. Returns its result."""
        done: Future[Any] = Future()
        try:
            done.set_result(call(*arguments, **options))
        except BaseException as error:  # noqa: BLE001
            done.set_exception(error)
        return done


def _new_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop without threads."""
    loop = asyncio.new_event_loop()
    loop.set_default_executor(_InlineExecutor())
    return loop


_RUNNER = asyncio.Runner(loop_factory=_new_loop)
"""The same for all cycles: a loop for each would take most of the time."""
atexit.register(_RUNNER.close)


def _run_inline(cycle: Coroutine[Any, Any, None]) -> None:
    """Run a cycle of an operator, and cancel the tasks that it leaves."""
    loop = _RUNNER.get_loop()
    try:
        _RUNNER.run(cycle)
    finally:
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks))
