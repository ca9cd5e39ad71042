"""A cluster in memory with the real operator, its metrics service, nodes, and the agents in its pods.

A test chooses what happens between any two calls of the operator, and whether the operator is killed there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from adascale_controller.operator.runtime.control_loop import OperatorLoop
from adascale_controller.operator.runtime.health import OperatorMetrics
from adascale_controller.operator.runtime.object_cache import ObjectCache
from adascale_controller.operator.schedule.nodes import eligible_nodes
from adascale_controller.operator.types.kubernetes import Resource
from adascale_controller.operator.types.settings import OperatorSettings
from adascale_core import names
from adascale_core.failures import TerminationMessage
from adascale_core.messages.registration import ReplicaState
from support.event_loops import run_without_threads
from support.fake_api_server import GPU, FakeApiServer, KilledError, Object, has_ended, owner_of, rank_of
from support.fake_service import FakeAgent, FakeService

UNSCHEDULABLE = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/1 nodes are available: 1 Insufficient cpu.",
}


@dataclass
class FakeCluster(FakeApiServer):
    """The operator's caches are updated only by `deliver`, which `run_cycles` calls."""

    node_slots: int = 100
    """How many pods fit on a node."""
    request_nodes: bool = False
    """The operator's setting."""
    api_url: str = "http://api"
    """The address of the metrics service. With TLS, its certificate is of an authority that pods get."""
    full: bool = False
    """Whether the next cycle looks at everything, and not only at what has changed."""
    missing_image: str = ""
    """An image that can't be pulled."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.agents: dict[str, FakeAgent] = {}
        """By the name of their pod."""
        self.program_failures = 0
        """How many pods of the current AdaScaleJob have failed by a failure of the program."""
        self.service = FakeService(self.before_write, lambda: self.now)
        self.metrics = OperatorMetrics()
        for name in self.types:
            self.add_node(name)
        self.start_operator()

    # -- the operator ---------------------------------------------------------------------------------------

    def start_operator(self) -> None:
        """Start a new operator, without any memory."""
        self.cache = ObjectCache()
        self._operator = OperatorLoop(
            self.cache,
            self,
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
        run_without_threads(self._operator.list_all())
        self.undelivered.clear()

    def cycle(self) -> None:
        """Run one cycle. If the operator is killed in it, start another operator."""
        self.now += 1
        self.writes = []
        full, self.full = self.full, False
        try:
            run_without_threads(self._operator.cycle(full=full))
        except KilledError:
            self.kill_before = None
            self.start_operator()

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

    def deliver(self, count: int | None = None) -> None:
        """Deliver the oldest changes to the operator's caches, all by default."""
        count = len(self.undelivered) if count is None else count
        for kind, resource, raw in self.undelivered[:count]:
            (self.cache.remove if kind == "DELETED" else self.cache.put)(resource, raw)
        del self.undelivered[:count]

    def submit(self, name: str = "digits", **spec: Any) -> None:
        self.program_failures = 0
        super().submit(name, **spec)

    # -- nodes ----------------------------------------------------------------------------------------------

    def add_node(self, name: str) -> None:
        """Add the node of a type of accelerator, if it does not exist."""
        if name not in self.objects[Resource.NODES]:
            meta = {"name": name, "labels": {names.DEFAULT_ACCELERATOR_LABEL: name}}
            status = {
                "conditions": [{"type": "Ready", "status": "True"}],
                "allocatable": {GPU: "100", "pods": "110"},
            }
            self.add(Resource.NODES, {"metadata": meta, "spec": {}, "status": status})

    def remove_node(self, name: str) -> None:
        """Remove the node of a type of accelerator, with its pods."""
        if name in self.objects[Resource.NODES]:
            self.remove(Resource.NODES, name)
            for raw in list(self.objects[Resource.PODS].values()):
                if raw["spec"].get("nodeName") == name:
                    self.remove_pod(raw["metadata"]["name"])

    def nodes_of_pods(self) -> set[str]:
        """Return the nodes of the live pods of the AdaScaleJob."""
        return {raw["spec"]["nodeName"] for raw in self.live_pods if "nodeName" in raw["spec"]}

    def schedule_pods(self) -> None:
        """Assign pending pods to nodes with free slots, a gang as a whole or not at all, and start them.

        Pods prefer the nodes where their job has other pods, as their affinity says.
        """
        waiting: dict[str, list[Object]] = {}
        for raw in self.live_pods:
            if "nodeName" not in raw["spec"] and not raw["spec"].get("schedulingGates"):
                waiting.setdefault(gang_of(raw) or raw["metadata"]["name"], []).append(raw)
        for pods in waiting.values():
            if not self._may_be_placed(pods):
                continue
            nodes: list[str | None] = []
            for raw in pods:
                nodes.append(self._free_node(raw, nodes))
            for raw, node in zip(pods, nodes, strict=True):
                if node is not None and None not in nodes:
                    self._start_pod(raw, node)
                elif not raw["status"].get("conditions"):
                    status = {"phase": "Pending", "conditions": [UNSCHEDULABLE]}
                    self.write(Resource.PODS, {**raw, "status": status})

    def _may_be_placed(self, pods: Sequence[Object]) -> bool:
        """Whether pods are alone, or their gang has enough members, all of its priority."""
        gang = gang_of(pods[0])
        if gang is None:
            return True
        assert self.pod_groups is not None
        group = self.pod_groups[gang]
        members = [raw for raw in self.live_pods if gang_of(raw) == gang]
        enough = len(members) >= group["schedulingPolicy"]["gang"]["minCount"]
        # Without a PriorityClass, a priority is 0.
        return (
            enough and len({each.get("priority", 0) for each in (group, *(r["spec"] for r in members))}) == 1
        )

    def _free_node(self, raw: Object, taken: Sequence[str | None]) -> str | None:
        """Return a node with a free slot for a pod, beside those that others are about to take."""
        nodes = ["node1"]
        if self.types:
            own = {*self.nodes_of_pods(), *taken}
            accepting = eligible_nodes(raw["spec"], self.objects[Resource.NODES].values())
            nodes = sorted(accepting, key=lambda name: (name not in own, name))
        used = {name: self._used_slots(name) + taken.count(name) for name in nodes}
        return next((name for name in nodes if used[name] < self.node_slots), None)

    def _used_slots(self, node: str) -> int:
        pods = self.objects[Resource.PODS].values()
        return sum(raw["spec"].get("nodeName") == node for raw in pods if not has_ended(raw))

    def _start_pod(self, raw: Object, node: str) -> None:
        image, name = raw["spec"]["containers"][0]["image"], raw["metadata"]["name"]
        phase, state = "Running", dict[str, Any](running={})
        if image == self.missing_image:
            phase, state = (
                "Pending",
                dict[str, Any](waiting={"reason": "ErrImagePull", "message": "not found"}),
            )
        else:
            # Another pod may have the same name later.
            self.agents[name] = FakeAgent(rank_of(raw), raw["metadata"]["uid"])
        worker = {"name": "worker", "image": image, "state": state}
        status = {"phase": phase, "containerStatuses": [worker]}
        self.write(Resource.PODS, {**raw, "spec": {**raw["spec"], "nodeName": node}, "status": status})

    def run_kubelet(self) -> None:
        """End the pods that are being deleted or ended: their agents save the state, register and leave."""
        for name, raw in list(self.objects[Resource.PODS].items()):
            is_ending = "activeDeadlineSeconds" in raw["spec"] and not has_ended(raw)
            if not is_ending and "deletionTimestamp" not in raw["metadata"]:
                continue
            if name in self.agents:
                self.agents[name].state = ReplicaState.TERMINATED
                self.service.register_agent(self.agents[name])
            if is_ending:
                self.end_pod(name, {"exitCode": 143, "reason": "Error"}, reason="DeadlineExceeded")
            else:
                self.remove_pod(name)

    def collect_garbage(self) -> None:
        """Delete the pods of a deleted AdaScaleJob."""
        owner = self.job["metadata"]["uid"] if self.job is not None else None
        for name, raw in list(self.objects[Resource.PODS].items()):
            if owner_of(raw) not in ("", owner):
                self.terminate_pod(name)

    # -- ends of pods ---------------------------------------------------------------------------------------

    def remove_pod(self, name: str) -> None:
        """Delete a pod at once; its agent registers nothing."""
        super().remove_pod(name)
        self.agents.pop(name, None)

    def end_pod(self, name: str, terminated: Object, **status: Any) -> None:
        """End the container of a pod; its agent registers nothing.

        Args:
            name: of the pod.
            terminated: the state of the container.
            status: fields of the status of the pod, which has failed by default.
        """
        worker = {"name": "worker", "state": {"terminated": terminated}}
        status = {"phase": "Failed", "containerStatuses": [worker], **status}
        self.write(Resource.PODS, {**self.objects[Resource.PODS][name], "status": status})
        self.agents.pop(name, None)

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
        self.end_pod(name, {"exitCode": 3, "reason": "Error", "message": message})

    def evict_pod(self, name: str) -> None:
        """Have the kubelet evict a pod under node pressure; its agent registers nothing."""
        disruption = {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"}
        self.end_pod(name, {"exitCode": 137}, reason="Evicted", conditions=[disruption])

    def check_stop(self, pod: Object) -> None:
        """Check that no pod is stopped whose trainer runs in the active generation, unless it is outdated.

        Jobs that have failed are excepted, because they are not resumed. Their pods can be in the next
        generation already when the failure that exceeds `backoffLimit` is counted.
        """
        agent = self.agents.get(pod["metadata"]["name"])
        if agent is None or self.job is None or self.job.get("status", {}).get("state") == "Failed":
            return
        state, spec, template = self.service.state, self.job["spec"], names.ANNOTATION_TEMPLATE
        running = agent.state is ReplicaState.RUNNING and not state.view(1).has_ended(agent.generation)
        active = state.active is not None and state.active.generation == agent.generation
        image = spec["template"]["spec"]["containers"][0]["image"]
        core = spec.get("minReplicas", 1) if "opportunistic" in spec else 100
        is_extra = names.LABEL_EXTRA in pod["metadata"]["labels"]
        outdated = pod["spec"]["containers"][0]["image"] != image or is_extra is not (agent.rank >= core)
        newest = self.live_pods[-1]["metadata"]["annotations"][template]
        outdated |= pod["metadata"]["annotations"][template] != newest
        desired = state.desired
        # The further pod that was created to replace others.
        outdated |= desired is not None and desired.spares > 0 and agent.rank >= desired.replicas
        assert not (running and active) or outdated, f"rank {agent.rank} has not saved its state"

    # -- agents ---------------------------------------------------------------------------------------------

    def run_agent(self, name: str) -> None:
        """Have one agent, if it still exists, read the job's allocation, follow it and register."""
        if name in self.agents:
            self.agents[name].follow(self.service.state.view(1))
            self.service.register_agent(self.agents[name])

    def expire_missing(self) -> None:
        """Have the metrics service expire the replicas whose agents no longer exist."""
        self.service.expire_missing({agent.instance for agent in self.agents.values()})

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


def gang_of(raw: Object) -> str | None:
    """Return the name of the PodGroup of a pod."""
    name: str | None = (raw["spec"].get("schedulingGroup") or {}).get("podGroupName")
    return name
