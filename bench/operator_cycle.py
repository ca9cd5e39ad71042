"""Measures the processor time of the operator's cycles for many jobs, without an API server.

    .venv/bin/python bench/operator_cycle.py [--jobs 1000] [--nodes 500] [--gpus 8] [--profile]

The real control loop runs with an API server and a metrics service in memory, in which pods start and agents
register at once. When all jobs train on as many replicas as they want, it measures cycles in which nothing
has changed, cycles after a change of one job (its spec, a new job, a lost pod), cycles after new reports of
all jobs, and cycles that look at everything. Then the loop runs for a while in which nothing changes, as it
does beside a cluster. The memory is that of the process, with the objects of the API server.
"""

# ruff: noqa: ARG002 -- the API server in memory has the arguments of the real one.

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import pstats
import random
import resource
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from statistics import median
from typing import Any

from adascale_client import MetricsServiceClient
from adascale_controller.operator.apply.kubernetes_cluster import ApiServerError, KubernetesCluster
from adascale_controller.operator.observe.adascalejob import AdaScaleJob
from adascale_controller.operator.runtime.control_loop import OperatorLoop
from adascale_controller.operator.runtime.main import GC_THRESHOLD
from adascale_controller.operator.runtime.object_cache import ObjectCache
from adascale_controller.operator.types.actions import Event, StoppedPod
from adascale_controller.operator.types.kubernetes import ApiObject, Resource, replica_index, timestamp
from adascale_controller.operator.types.settings import OperatorSettings
from adascale_core import names
from adascale_core.messages.allocation import Allocation, AllocationView
from adascale_core.messages.job_spec import JobSpec
from adascale_core.messages.registration import Registration, ReplicaState
from adascale_core.messages.reports import GainReport, StepTime
from adascale_core.rendezvous.instruction import Instruction, instruction
from adascale_core.rendezvous.rendezvous import Rendezvous, allocate, register
from adascale_core.views.decision import DecisionView
from adascale_core.views.jobs import JobChanges, JobList, JobView, ReplicaView

Object = dict[str, Any]
TEMPLATES = 20
RESOURCES = (Resource.ADASCALEJOBS, Resource.PODS, Resource.NODES)
SETTLE_SECONDS = 40.0
"""Seconds without a write after which no job changes its replica count again."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--nodes", type=int, default=500)
    parser.add_argument("--gpus", type=int, default=8, help="GPUs of a node")
    parser.add_argument("--rounds", type=int, default=5, help="measured cycles of each kind")
    parser.add_argument("--seconds", type=float, default=30.0, help="in which nothing changes")
    parser.add_argument("--profile", action="store_true", help="print what the idle cycles spend time on")
    asyncio.run(measure(parser.parse_args()))


async def measure(arguments: argparse.Namespace) -> None:
    """Run the jobs until they are stable, and measure."""
    gc.set_threshold(GC_THRESHOLD)
    world = World(arguments.nodes, arguments.gpus)
    for number in range(arguments.jobs):
        world.submit(number)
    first = await world.cycle()
    print(f"{arguments.jobs} jobs, {arguments.nodes} nodes of {arguments.gpus} GPUs; processor time in ms")
    print(f"{'first cycle':32}{1000 * first:10.0f}")
    settled_at = time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < settled_at:
        world.writes = 0
        await world.cycle()
        if world.writes:
            settled_at = time.monotonic() + SETTLE_SECONDS
        await asyncio.sleep(0.5)
    print(f"{'pods':32}{len(world.objects[Resource.PODS]):10d}")
    kinds: dict[str, Callable[[int], None]] = {
        "nothing has changed": lambda _: None,
        "the spec of one job": lambda number: world.edit(number),
        "a new job": lambda number: world.submit(arguments.jobs + number),
        "a lost pod": lambda number: world.lose_pod(number),
        "reports of all jobs": lambda _: world.report_all(),
        "a look at everything": lambda _: world.look_at_everything(),
    }
    for name, change in kinds.items():
        profile = cProfile.Profile()
        times = []
        for number in range(arguments.rounds):
            change(number)
            if arguments.profile and name == "nothing has changed":
                profile.enable()
            times.append(await world.cycle())
            profile.disable()
            for _ in range(3):
                await world.cycle()
        print(f"{name:32}{1000 * median(times):10.0f}")
        if arguments.profile and name == "nothing has changed":
            pstats.Stats(profile).sort_stats("cumulative").print_stats(40)
    cpu, reads, writes = await world.idle(arguments.seconds)
    per_minute = 60 / arguments.seconds
    print(f"{'idle, % of a core':32}{100 * cpu / arguments.seconds:10.1f}")
    print(f"{'idle, reads of all jobs a minute':32}{per_minute * reads:10.1f}")
    print(f"{'idle, writes a minute':32}{per_minute * writes:10.1f}")
    print(f"{'peak memory, MiB':32}{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:10.0f}")


class World:
    """An API server and a metrics service in memory, whose pods and agents act at once."""

    def __init__(self, nodes: int, gpus: int) -> None:
        self.objects: dict[Resource, dict[str, Object]] = {kind: {} for kind in RESOURCES}
        self.jobs: dict[str, ServiceJob] = {}
        self.writes = 0
        self.reads = 0
        self._version = 0
        self._gpus = gpus
        self._free = {}
        self._random = random.Random(0)
        for number in range(nodes):
            name = f"node-{number:04d}"
            ready = {"type": "Ready", "status": "True"}
            allocatable = {"cpu": "64", "memory": "512Gi", "pods": "110", "nvidia.com/gpu": str(gpus)}
            self._free[name] = gpus
            self.write(
                Resource.NODES,
                {
                    "metadata": {"name": name, "uid": name, "labels": {"zone": str(number % 3)}},
                    "spec": {},
                    "status": {"conditions": [ready], "allocatable": allocatable},
                },
            )
        self._full = False
        self.cache = ObjectCache()
        self._loop = OperatorLoop(
            self.cache,
            InMemoryCluster(self),
            InMemoryService(self),
            OperatorSettings("http://api"),
            RESOURCES,
        )

    async def cycle(self) -> float:
        """Run a cycle, let pods and agents act, and return the processor time of the cycle in seconds."""
        for kind, objects in self.objects.items():
            for raw in objects.values():
                self.cache.put(kind, raw)
        full, self._full = self._full, False
        begun = time.process_time()
        await self._loop.cycle(full=full)
        seconds = time.process_time() - begun
        self._run_agents()
        return seconds

    async def idle(self, seconds: float) -> tuple[float, int, int]:
        """Run the loop while nothing changes. Returns the processor time in seconds, the reads of all jobs of
        the metrics service, and the writes."""
        running = asyncio.create_task(self._loop.run())
        await asyncio.sleep(5)
        begun, reads, writes = time.process_time(), self.reads, self.writes
        await asyncio.sleep(seconds)
        used = time.process_time() - begun
        running.cancel()
        return used, self.reads - reads, self.writes - writes

    def write(self, kind: Resource, raw: Object) -> Object:
        """Store a new version of an object."""
        self._version += 1
        raw = {**raw, "metadata": {**raw["metadata"], "resourceVersion": str(self._version)}}
        self.objects[kind][raw["metadata"]["name"]] = raw
        return raw

    # -- changes ------------------------------------------------------------------------------------------

    def submit(self, number: int) -> None:
        """Create an AdaScaleJob with one of the templates."""
        template = number % TEMPLATES
        request = {"cpu": str(1 + template % 4), "memory": f"{4 + template % 5}Gi", "nvidia.com/gpu": "1"}
        container = {
            "name": "worker",
            "image": f"trainer:{template}",
            "resources": {"limits": request},
        }
        self.write(
            Resource.ADASCALEJOBS,
            {
                "metadata": {
                    "name": f"job-{number:05d}",
                    "namespace": "team",
                    "uid": f"job-{number}",
                    "generation": 1,
                    "creationTimestamp": timestamp(time.time()),
                },
                "spec": {
                    "batchSize": 32,
                    "maxBatchSize": 1024,
                    "localBszBounds": {"lower": 16, "upper": 64},
                    "maxReplicas": 4,
                    "minReplicas": 1,
                    "checkpoint": {"claimName": "shared"},
                    "template": {"spec": {"containers": [container]}},
                },
            },
        )

    def edit(self, number: int) -> None:
        """Change the largest batch of a job."""
        raw = self.objects[Resource.ADASCALEJOBS][f"job-{number:05d}"]
        metadata = {**raw["metadata"], "generation": raw["metadata"]["generation"] + 1}
        spec = {**raw["spec"], "maxBatchSize": raw["spec"]["maxBatchSize"] - 32}
        self.write(Resource.ADASCALEJOBS, {**raw, "metadata": metadata, "spec": spec})

    def lose_pod(self, number: int) -> None:
        """Fail a pod, as the kubelet does on an eviction."""
        name = f"job-{number:05d}-0-0"
        raw = self.objects[Resource.PODS][name]
        terminated = {"exitCode": 137, "reason": "Error"}
        status = {
            "phase": "Failed",
            "reason": "Evicted",
            "containerStatuses": [{"name": "worker", "state": {"terminated": terminated}}],
        }
        self.write(Resource.PODS, {**raw, "status": status})

    def look_at_everything(self) -> None:
        """Have the next cycle look at everything."""
        self._full = True

    def report_all(self) -> None:
        """Have all jobs report another step."""
        for job in self.jobs.values():
            job.report(self._random)

    # -- what the cluster does ----------------------------------------------------------------------------

    def create_pod(self, manifest: ApiObject) -> ApiObject:
        """Create a pod, which runs at once, as a call of the API server."""
        self.writes += 1
        node = max(self._free, key=lambda each: self._free[each])
        self._free[node] -= 1
        raw, running = deepcopy(dict(manifest)), {"name": "worker", "state": {"running": {}}}
        raw["metadata"] |= {
            "uid": f"{raw['metadata']['name']}-{self._version}",
            "creationTimestamp": timestamp(time.time()),
        }
        raw["spec"]["nodeName"] = node
        raw["status"] = {"phase": "Running", "containerStatuses": [running]}
        return self.write(Resource.PODS, raw)

    def _delete_pod(self, name: str) -> None:
        raw = self.objects[Resource.PODS].pop(name)
        self._free[raw["spec"]["nodeName"]] += 1
        self._version += 1
        metadata = {**raw["metadata"], "resourceVersion": str(self._version)}
        self.cache.remove(Resource.PODS, {**raw, "metadata": metadata})

    def _run_agents(self) -> None:
        replicas: dict[str, dict[int, str]] = {}
        for raw in self.objects[Resource.PODS].values():
            if raw["status"]["phase"] == "Running":
                metadata = raw["metadata"]
                rank = replica_index(metadata)
                replicas.setdefault(metadata["labels"][names.LABEL_JOB], {})[rank] = metadata["uid"]
        for name, instances in replicas.items():
            job = self.jobs.get(f"team.{name}")
            if job is not None:
                job.register(instances, self._random)

    def delete_pod(self, name: str) -> None:
        """Delete a pod, as a call of the API server."""
        self.writes += 1
        self._delete_pod(name)


class ServiceJob:
    """A job of the metrics service, with the real rules for generations."""

    def __init__(self, job_id: str) -> None:
        self.id = job_id
        self.spec: JobSpec | None = None
        self.state = Rendezvous()
        self.latest: GainReport | None = None
        self.version = 1
        self._view: JobView | None = None

    def view(self) -> JobView:
        """Return what the service answers about the job."""
        if self._view is None:
            view, latest = self.state.view(self.version), self.latest
            step_times = (
                (StepTime(latest.replicas, latest.local_bsz, latest.accumulation, latest.step_time, 5),)
                if latest is not None
                else ()
            )
            self._view = JobView(
                id=self.id,
                spec=self.spec,
                version=self.version,
                desired=view.desired,
                active=view.active,
                broken=view.broken,
                complete=view.complete,
                failures=self.state.failures,
                disruptions=self.state.disruptions,
                restarts_without_progress=self.state.restarts_without_progress,
                replicas=tuple(ReplicaView.of(each, 0.0) for each in self.state.replicas.values()),
                latest=latest,
                step_times=step_times,
                created_at=0.0,
            )
        return self._view

    def changed(self) -> None:
        """Count a change."""
        self.version += 1
        self._view = None

    def register(self, instances: dict[int, str], chance: random.Random) -> None:
        """Register the replicas, and have them follow the generations."""
        before = self.state
        for _ in range(2):
            for rank, instance in sorted(instances.items()):
                known = self.state.replicas.get(rank)
                same = known is not None and known.instance == instance
                generation = known.generation if known is not None and same else 0
                running = generation > 0
                what = instruction(self.state.view(1), rank, instance, generation, holds=False)
                if what is Instruction.ASSIGN and self.state.active is not None:
                    generation, running = self.state.active.generation, True
                self.state = register(
                    self.state,
                    Registration(
                        *(rank, instance, ReplicaState.RUNNING if running else ReplicaState.WAITING),
                        *(generation, "10.0.0.1", 1),
                        assigned=generation,
                        rank=rank,
                        stepped=generation,
                    ),
                    self.spec,
                )
        if self.state != before:
            self.changed()
            self.report(chance)

    def report(self, chance: random.Random) -> None:
        """Report a step of the active generation."""
        active = self.state.active
        if active is None:
            return
        step = self.latest.step + 1 if self.latest is not None else 1
        scale = float(active.replicas)
        seconds = 0.1 * (1.0 + 0.1 * active.replicas) * chance.uniform(0.98, 1.02)
        self.latest = GainReport(
            generation=active.generation,
            step=step,
            progress=float(step),
            epoch=0,
            replicas=active.replicas,
            local_bsz=32,
            accumulation=1,
            scale=scale,
            gain=1.0 + 0.6 * (scale - 1),
            grad_sqr=1.0,
            grad_var=3.0,
            step_time=seconds,
            time=time.time(),
        )
        self.changed()


class InMemoryService(MetricsServiceClient):
    """The metrics service, as the operator calls it."""

    def __init__(self, world: World) -> None:
        self._jobs = world.jobs
        self._world = world

    def read_jobs(self, share: float = 1.0) -> JobList:
        """Return all jobs."""
        self._world.reads += 1
        return JobList([job.view() for job in self._jobs.values()], None, "")

    def read_changes(self, cursor: str, wait: float = 0.0) -> JobChanges:
        """Return no changes."""
        time.sleep(wait)
        return JobChanges((), (), cursor)

    def declare_job(self, job_id: str, spec: JobSpec) -> None:
        """Declare a job, or change its spec."""
        self._world.writes += 1
        job = self._jobs.setdefault(job_id, ServiceJob(job_id))
        job.spec = spec
        job.changed()

    def delete_job(self, job_id: str) -> None:
        """Delete a job."""
        self._world.writes += 1
        self._jobs.pop(job_id, None)

    def put_decision(self, decision: DecisionView) -> None:
        """As `MetricsServiceClient.put_decision`."""

    def allocate(self, job_id: str, allocation: Allocation) -> AllocationView:
        """Request an allocation for a job."""
        self._world.writes += 1
        job = self._jobs[job_id]
        job.state = allocate(job.state, allocation, job.spec)
        job.changed()
        return job.state.view(job.version)


class InMemoryCluster(KubernetesCluster):
    """The API server, as the operator calls it."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def list(self, resource: Resource) -> tuple[list[ApiObject], int]:
        """Return all objects of a resource."""
        return list(self._world.objects[resource].values()), 0

    async def version(self) -> tuple[int, int]:
        """Return the version of Kubernetes."""
        return (1, 34)

    async def may_list_nodes(self) -> bool:
        """Whether the operator may list nodes."""
        return True

    async def admit_pod(self, manifest: ApiObject) -> ApiObject:
        """Return a pod, which admission leaves as it is."""
        return manifest

    async def get(self, plural: str, namespace: str, name: str) -> ApiObject | None:
        """Return an object: a claim, which exists, or no other."""
        is_claim = plural == "persistentvolumeclaims"
        return {"spec": {"accessModes": ["ReadWriteMany"]}} if is_claim else None

    async def create(self, plural: str, manifest: ApiObject) -> ApiObject | None:
        """Create a pod, which runs at once."""
        return self._world.create_pod(manifest)

    async def replace(self, plural: str, manifest: ApiObject) -> ApiObject | None:
        """Is not needed here."""

    async def apply_config_map(self, manifest: ApiObject) -> None:
        """Create no ConfigMap."""

    async def list_events(self, namespace: str, field_selector: str) -> Sequence[ApiObject]:
        """Return no events."""
        return ()

    async def list_kueue(self, plural: str, namespace: str | None = None) -> Sequence[ApiObject] | None:
        """Return None: there is no Kueue."""
        return None

    async def apply_status(self, job: AdaScaleJob, status: ApiObject) -> ApiObject:
        """Write the status of an AdaScaleJob."""
        self._world.writes += 1
        raw = self._world.objects[Resource.ADASCALEJOBS][job.name]
        return self._world.write(Resource.ADASCALEJOBS, {**raw, "status": dict(status)})

    async def stop_pod(self, namespace: str, pod: StoppedPod) -> bool:
        """Delete a pod at once."""
        self._world.delete_pod(pod.name)
        return True

    async def delete_workload(self, namespace: str, name: str) -> None:
        """Is not needed here."""

    async def delete_job(self, job: AdaScaleJob) -> None:
        """Is not needed here."""
        raise ApiServerError("not expected")

    async def record_event(self, job: AdaScaleJob, event: Event, now: float, reporter: str) -> None:
        """Record an Event."""
        self._world.writes += 1


if __name__ == "__main__":
    main()
