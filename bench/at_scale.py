"""Measures the operator with many jobs on simulated nodes: reaction times, processor time, memory, requests.

    KUBECONFIG=... .venv/bin/python bench/at_scale.py [--jobs 1000] [--nodes 500] [--gpus 8] [--profile SVG]

The cluster has a real API server and nodes that exist in it only, by KWOK (https://kwok.sigs.k8s.io), which
manages nodes with the annotation `kwok.x-k8s.io/node: fake` and has their pods Running at once. Nodes that
are missing are created, and deleted at the end. The operator and the metrics service run in processes of
their own on this machine, and another process plays the agents of all pods: it registers them, sends their
heartbeats, and reports steps, as often as the metrics service requests. With all jobs training, on as many
replicas as they want, it measures the operator while nothing changes but reports, and then the times

- apply: from the answer to the creation of another job to its first pod,
- edit: from the answer to an edit of a job to the status with its `observedGeneration`,
- lost pod: from the eviction of a pod to the creation of the next one.

The times are those at which watches of this process see the results. The jobs have 20 templates, which differ
in image, processor and memory. --profile writes a flame graph of the operator during the changes, by py-spy
(`pip install py-spy`), which needs the right to trace processes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from multiprocessing.synchronize import Event as Flag
from pathlib import Path
from queue import Empty, PriorityQueue
from statistics import quantiles
from typing import Any
from urllib.request import urlopen

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from kubernetes import client, config, watch

from adascale_client import MetricsServiceClient, ServiceError
from adascale_client.transport import Transport
from adascale_controller.operator.types.kubernetes import replica_index
from adascale_core import names
from adascale_core.messages.allocation import MemberView
from adascale_core.messages.registration import Registration, ReplicaState
from adascale_core.messages.reports import GainReport
from adascale_core.rendezvous.instruction import Instruction, instruction
from api.client import ServiceProcess, environment
from cluster.conftest import fresh_namespace
from support.launch import free_port, wait_until

TOKEN = "token-of-the-measurement"
TEMPLATES = 20
THREADS = 8
SIMULATED = "kwok.x-k8s.io/node"
JOBS_TIMEOUT = 1800.0
STABLE_SECONDS = 30.0
"""Seconds without a change of a replica count after which the jobs have as many replicas as they want."""
QUIET_SECONDS = 120.0
"""Seconds after the last report until the operator has read it and decided with it."""
IMAGE_ENVIRONMENT = {"MALLOC_ARENA_MAX": "2"}
"""What the image of the controller sets."""
OBJECT = (names.API_GROUP, names.API_VERSION)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument(
        "--nodes", type=int, default=0, help="simulated nodes; those that are missing are created"
    )
    parser.add_argument("--gpus", type=int, default=8, help="GPUs of a created node")
    parser.add_argument("--samples", type=int, default=50, help="measured changes of each kind")
    parser.add_argument("--seconds", type=float, default=60.0, help="of measuring while nothing changes")
    parser.add_argument("--heartbeat", type=float, default=names.HEARTBEAT_INTERVAL, help="seconds, at least")
    parser.add_argument("--report", type=float, default=1.0, help="seconds between two reports, at least")
    parser.add_argument(
        "--settle", type=float, default=300.0, help="seconds to wait for stable counts, at most"
    )
    parser.add_argument("--log", type=Path, help="where the operator's log is copied to")
    parser.add_argument("--profile", type=Path, metavar="SVG", help="write a flame graph of the operator")
    arguments = parser.parse_args()
    if arguments.profile is not None and shutil.which("py-spy") is None:
        parser.error("--profile needs py-spy on the PATH: pip install py-spy")
    kubeconfig = os.environ["KUBECONFIG"]
    with (
        config.new_client_from_config(config_file=kubeconfig) as api,
        tempfile.TemporaryDirectory() as folder,
        simulated_nodes(api, arguments.nodes, arguments.gpus) as nodes,
        fresh_namespace(api) as namespace,
    ):
        Measurement(api, kubeconfig, namespace, Path(folder), arguments).run(nodes)


@contextmanager
def simulated_nodes(api: client.ApiClient, wanted: int, gpus: int) -> Iterator[int]:
    """Create the simulated nodes that are missing, and return the number of all."""
    core: Any = client.CoreV1Api(api)
    present = len(core.list_node(label_selector="type=kwok").items)
    created = [f"simulated-{number:04d}" for number in range(wanted - present)]
    has = {"cpu": "96", "memory": "1Ti", "pods": "250", "nvidia.com/gpu": str(gpus)}
    try:
        for name in created:
            labels = {"type": "kwok", "kubernetes.io/hostname": name}
            metadata = {"name": name, "annotations": {SIMULATED: "fake"}, "labels": labels}
            taint = {"key": SIMULATED, "value": "fake", "effect": "NoSchedule"}
            status = {"allocatable": has, "capacity": has}
            core.create_node({"metadata": metadata, "spec": {"taints": [taint]}, "status": status})
        yield present + len(created)
    finally:
        for name in created:
            core.delete_node(name)


class Operator:
    """The operator in a process of its own.

    Args:
        kubeconfig: the kubeconfig of the cluster.
        url, token_file: the metrics service, and the token for it.
        folder: the folder for its log.
        options: command line options.
    """

    def __init__(self, kubeconfig: str, url: str, token_file: Path, folder: Path, *options: str) -> None:
        self._log = folder / "operator.log"
        self._port = free_port()
        program = "from adascale_controller.cli import main; main()"
        probe = f"127.0.0.1:{self._port}"
        required = ("--api-url", url, "--token-file", str(token_file), "--liveness", probe)
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", program, "operator", *required, *options],
                stdout=log,
                stderr=log,
                env={**os.environ, "KUBECONFIG": kubeconfig, **IMAGE_ENVIRONMENT},
            )

    @property
    def log(self) -> str:
        """Its log."""
        return self._log.read_text()

    @property
    def memory(self) -> dict[str, float]:
        """Its resident memory, in MiB: present (VmRSS) and largest (VmHWM)."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return {kind: int(size) / 1024 for kind, size in re.findall(r"(VmRSS|VmHWM):\s+(\d+) kB", status)}

    def figures(self) -> Figures:
        """Return what it has used and done until now."""
        with urlopen(f"http://127.0.0.1:{self._port}/metrics") as answer:
            text = answer.read().decode()

        def total(name: str) -> float:
            return sum(
                float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
            )

        return Figures(
            time.monotonic(),
            cpu_of(self.process.pid),
            total("adascale_operator_cycle_duration_seconds_count"),
            total("adascale_operator_cycle_cpu_seconds_total"),
            total("adascale_operator_api_requests_total"),
        )

    def stop(self) -> None:
        """Stop it."""
        self.process.terminate()
        self.process.wait(60)


@dataclass(frozen=True)
class Figures:
    """What the operator has used and done.

    Args:
        time: seconds on the monotonic clock.
        cpu: seconds of processor time.
        cycles: the number of cycles.
        cycle_cpu: seconds of processor time in cycles.
        requests: requests to the API server, without watches.
    """

    time: float
    cpu: float
    cycles: float
    cycle_cpu: float
    requests: float

    def __sub__(self, other: Figures) -> Figures:
        return Figures(
            self.time - other.time,
            self.cpu - other.cpu,
            self.cycles - other.cycles,
            self.cycle_cpu - other.cycle_cpu,
            self.requests - other.requests,
        )

    @property
    def cores(self) -> float:
        """The processors that it has used on average."""
        return self.cpu / self.time

    @property
    def ms_per_cycle(self) -> float:
        """Processor time of a cycle, in ms."""
        return 1000 * self.cycle_cpu / max(self.cycles, 1)


class Measurement:
    """A run with many jobs."""

    def __init__(
        self,
        api: client.ApiClient,
        kubeconfig: str,
        namespace: str,
        folder: Path,
        arguments: argparse.Namespace,
    ) -> None:
        self._kubeconfig = kubeconfig
        self._namespace = namespace
        self._folder = folder
        self._arguments = arguments
        self._objects: Any = client.CustomObjectsApi(api)
        self._core: Any = client.CoreV1Api(api)
        self._seen = Seen(api, namespace)
        self._processes = multiprocessing.get_context("spawn")
        self._reports = self._processes.Event()
        self._reports.set()
        self._rows: list[tuple[str, str]] = []

    def run(self, nodes: int) -> None:
        """Start everything, measure, and stop everything."""
        arguments = self._arguments
        token_file = self._folder / "token"
        token_file.write_text(TOKEN)
        with ServiceProcess(
            self._folder, environ=environment(ADASCALE_TOKEN=TOKEN), own_interpreter=True
        ) as service:
            url = f"http://127.0.0.1:{service.port}"
            operator = Operator(
                *(self._kubeconfig, url, token_file, self._folder), "--lease-namespace", self._namespace
            )
            playing = (self._kubeconfig, self._namespace, url, arguments.heartbeat, arguments.report)
            agents = self._processes.Process(
                target=play_agents,
                args=(*playing, self._reports),
                daemon=True,
            )
            agents.start()
            try:
                wait_until(
                    lambda: "Running in" in operator.log or operator.process.poll() is not None,
                    "a running operator",
                )
                if operator.process.poll() is not None:
                    sys.exit(f"the operator has ended: {operator.log.splitlines()[-1]}")
                with self._seen.watching():
                    self._measure(operator, url, service.pid)
            except BaseException:
                print(operator.log[-4000:], file=sys.stderr)
                raise
            finally:
                operator.stop()
                if arguments.log is not None:
                    arguments.log.write_text(operator.log)
                agents.terminate()
                agents.join()
        print(f"\n| | {arguments.jobs:,} jobs, {nodes:,} nodes |\n| --- | --- |")
        for name, value in self._rows:
            print(f"| {name} | {value} |")

    def _measure(self, operator: Operator, url: str, service: int) -> None:
        # Pods of an earlier run may still be terminating.
        selector = names.LABEL_JOB
        wait_until(
            lambda: not self._core.list_pod_for_all_namespaces(label_selector=selector, limit=1).items,
            "nodes without pods of other jobs",
            patience=600.0,
            pause=2.0,
        )
        arguments, begun = self._arguments, operator.figures()
        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(self._submit, range(arguments.jobs)))
        self._note(f"{arguments.jobs} jobs created", begun)
        wait_until(
            lambda: self._training(url)[0] >= arguments.jobs, "training", patience=JOBS_TIMEOUT, pause=5.0
        )
        self._note("all jobs train", begun)
        self._add("time until all jobs train", f"{time.monotonic() - begun.time:.0f} s")
        self._wait_until_stable(url)
        started = operator.figures() - begun
        self._note(f"the jobs have as many replicas as they want: {self._training(url)[1]}", begun)
        self._add("operator, processor time until then", f"{started.cpu:.0f} s")
        before, service_cpu = operator.figures(), cpu_of(service)
        time.sleep(arguments.seconds)
        idle, service_cpu = operator.figures() - before, cpu_of(service) - service_cpu
        self._add("operator, while nothing changes but reports", f"{idle.cores:.3f} cores")
        self._add("metrics service, then", f"{service_cpu / arguments.seconds:.2f} cores")
        per_job = idle.requests * 60 / idle.time / arguments.jobs
        self._add("requests to the API server per job and minute, then", f"{per_job:.2f}")
        self._reports.clear()
        time.sleep(QUIET_SECONDS)
        before = operator.figures()
        time.sleep(arguments.seconds)
        quiet = operator.figures() - before
        self._reports.set()
        self._add("operator, processor time of a cycle without news", f"{quiet.ms_per_cycle:.1f} ms")
        self._add("operator, without reports", f"{quiet.cores:.3f} cores")
        self._note("without reports", begun)
        kinds: list[tuple[str, Callable[[int], float]]] = [
            ("apply to first pod", self._apply),
            ("edit of the spec to new status", self._edit),
            ("lost pod to its deletion by the operator", self._lose),
        ]
        before = operator.figures()
        with self._profiled(operator):
            for name, measure in kinds:
                p50, p99 = percentiles([measure(number) for number in range(arguments.samples)])
                self._add(f"{name}, p50 / p99 of {arguments.samples}", f"{p50:.2f} / {p99:.2f} s")
                self._note(name, begun)
        changes = operator.figures() - before
        self._add(
            "operator, processor time of a cycle, changes all the time", f"{changes.ms_per_cycle:.0f} ms"
        )
        self._add("operator, during these changes", f"{changes.cores:.2f} cores")
        memory = operator.memory
        self._add("operator, memory, then / at most", f"{memory['VmRSS']:.0f} / {memory['VmHWM']:.0f} MiB")

    def _add(self, name: str, value: str) -> None:
        self._rows.append((name, value))
        print(f"{name}: {value}", flush=True)

    def _note(self, what: str, begun: Figures) -> None:
        print(f"{time.monotonic() - begun.time:6.0f} s: {what}", file=sys.stderr, flush=True)

    def _training(self, url: str) -> tuple[int, int]:
        """Return how many jobs train, and on how many replicas."""
        try:
            jobs = MetricsServiceClient(url, TOKEN).list_jobs()
        except ServiceError:  # an overloaded machine
            return 0, 0
        active = [job.active.replicas for job in jobs if job.active is not None and job.latest is not None]
        return len(active), sum(active)

    def _wait_until_stable(self, url: str) -> None:
        """Wait until no job has changed its replica count for some seconds."""
        seen, since = (0, 0), time.monotonic()
        deadline = since + self._arguments.settle
        while time.monotonic() < min(since + STABLE_SECONDS, deadline):
            training = self._training(url)
            if training != seen:
                seen, since = training, time.monotonic()
            time.sleep(3)

    @contextmanager
    def _profiled(self, operator: Operator) -> Iterator[None]:
        """Profile the operator during the context, if that is requested."""
        file = self._arguments.profile
        if file is None:
            yield
            return
        command = ["py-spy", "record", "--pid", str(operator.process.pid), "--threads", "--output", str(file)]
        profiler = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            yield
        finally:
            profiler.send_signal(signal.SIGINT)
            if code := profiler.wait(60):
                print(f"py-spy has failed with exit code {code}: there is no profile", file=sys.stderr)

    # -- changes ------------------------------------------------------------------------------------------

    def _submit(self, number: int) -> str:
        name = f"job-{number:05d}"
        body = manifest(name, number % TEMPLATES)
        self._objects.create_namespaced_custom_object(*OBJECT, self._namespace, names.PLURAL, body)
        return name

    def _apply(self, number: int) -> float:
        name = self._submit(self._arguments.jobs + number)
        return self._seen.seconds_until(lambda: name in self._seen.first_pods)

    def _edit(self, number: int) -> float:
        name = f"job-{number:05d}"
        patched = self._objects.patch_namespaced_custom_object(
            *(*OBJECT, self._namespace, names.PLURAL, name),
            {"spec": {"maxBatchSize": 256 - 32 * (1 + number % 3)}},
        )
        wanted = patched["metadata"]["generation"]
        return self._seen.seconds_until(lambda: self._seen.observed.get(name, 0) >= wanted)

    def _lose(self, number: int) -> float:
        job = f"job-{number + self._arguments.samples:05d}"
        name, uid = self._seen.first_pods[job]
        self._core.patch_namespaced_pod_status(name, self._namespace, {"status": evicted()})
        return self._seen.seconds_until(lambda: self._seen.first_pods[job][1] != uid)


class Seen:
    """What watches have seen of the objects in a namespace."""

    def __init__(self, api: client.ApiClient, namespace: str) -> None:
        self._api = api
        self._namespace = namespace
        self._changed = threading.Condition()
        self.observed: dict[str, int] = {}
        self.first_pods: dict[str, tuple[str, str]] = {}
        """Job -> name and uid of the newest pod of its first replica."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch during the context. The threads end with the process."""
        objects: Any = client.CustomObjectsApi(self._api)
        core = client.CoreV1Api(self._api)
        kinds: list[tuple[Callable[..., Any], tuple[str, ...], Callable[[str, Any], None]]] = [
            (
                objects.list_namespaced_custom_object,
                (*OBJECT, self._namespace, names.PLURAL),
                self._see_job,
            ),
            (core.list_namespaced_pod, (self._namespace,), self._see_pod),
        ]
        for kind in kinds:
            threading.Thread(target=self._watch, args=kind, daemon=True).start()
        yield

    def seconds_until(self, condition: Callable[[], bool]) -> float:
        """Wait for a condition, and return how long."""
        begun = time.monotonic()
        with self._changed:
            if not self._changed.wait_for(condition, timeout=60):
                raise TimeoutError("not seen within 60 s")
        return time.monotonic() - begun

    def _watch(
        self, read: Callable[..., Any], path: tuple[str, ...], see: Callable[[str, Any], None]
    ) -> None:
        while True:
            try:
                # Without `timeout_seconds`, it goes on where it has ended, so that no deletion is missed.
                for event in watch.Watch().stream(read, *path):
                    with self._changed:
                        see(event["type"], event["raw_object"])
                        self._changed.notify_all()
            except client.ApiException:
                continue

    def _see_job(self, _: str, raw: Any) -> None:
        generation = (raw.get("status") or {}).get("observedGeneration", 0)
        self.observed[raw["metadata"]["name"]] = generation

    def _see_pod(self, kind: str, raw: Any) -> None:
        metadata = raw["metadata"]
        if kind == "ADDED" and replica_index(metadata) == 0:
            self.first_pods[metadata["labels"][names.LABEL_JOB]] = metadata["name"], metadata["uid"]


def evicted() -> dict[str, Any]:
    """Return the status that a kubelet writes when it evicts a pod."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    ended = {"exitCode": 137, "reason": "Error", "startedAt": now, "finishedAt": now}
    container = {"name": "worker", "image": "trainer", "imageID": "", "ready": False, "restartCount": 0}
    return {
        "phase": "Failed",
        "reason": "Evicted",
        "conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"}],
        "containerStatuses": [{**container, "state": {"terminated": ended}}],
    }


def manifest(name: str, template: int) -> dict[str, Any]:
    """Return a job whose pods run on simulated nodes. Checkpoints are not written."""
    resources = {
        "cpu": f"{100 * (1 + template % 4)}m",
        "memory": f"{1 + template % 5}Gi",
        "nvidia.com/gpu": "1",
    }
    container = {"name": "worker", "image": f"trainer:{template}", "resources": {"limits": resources}}
    return {
        "apiVersion": names.GROUP_VERSION,
        "kind": names.KIND,
        "metadata": {"name": name},
        "spec": {
            "batchSize": 32,
            "maxBatchSize": 256,
            "localBszBounds": {"lower": 16, "upper": 64},
            "maxReplicas": 4,
            "checkpoint": {"url": "s3://bench/checkpoints"},
            "template": {
                "spec": {
                    "containers": [container],
                    "nodeSelector": {"type": "kwok"},
                    "tolerations": [{"key": SIMULATED, "operator": "Exists"}],
                }
            },
        },
    }


def cpu_of(pid: int) -> float:
    """Return the processor time of a process, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def percentiles(seconds: Sequence[float]) -> tuple[float, float]:
    """Return the median and the 99th percentile."""
    cuts = quantiles(seconds, n=100, method="inclusive")
    return cuts[49], cuts[98]


def play_agents(
    kubeconfig: str, namespace: str, url: str, heartbeat: float, report: float, reports: Flag
) -> None:
    """Play the agents of all pods until the process is ended. They report while `reports` is set."""
    agents = Agents(url, heartbeat, report, reports=reports)
    with config.new_client_from_config(config_file=kubeconfig) as api, agents.following(api, namespace):
        threading.Event().wait()


# -- agents -----------------------------------------------------------------------------------------------


@dataclass
class Agent:
    """The agent in a pod, and its trainer."""

    job: str
    replica: int
    uid: str
    generation: int = 0
    rank: int | None = None
    replicas: int = 0
    gone: bool = False
    turn: int = 0
    """The number of its entry in the queue. Earlier entries do not count."""


class Agents:
    """Plays the agents of all pods.

    Args:
        url: the metrics service.
        heartbeat: seconds between two heartbeats of an agent, if the metrics service requests no longer ones.
        report: seconds between two reports of a job, likewise.
        token: a token that may write for all jobs.
        reports: whether jobs report. None if they always do.
    """

    def __init__(
        self, url: str, heartbeat: float, report: float, token: str = TOKEN, reports: Flag | None = None
    ) -> None:
        self.url = url
        self.agents: dict[str, Agent] = {}
        self.changes = 0
        self._heartbeat = heartbeat
        self._report = report
        self._transport = Transport(url, token, None)
        self._client = MetricsServiceClient(url, token)
        self._due: PriorityQueue[tuple[float, int, Agent]] = PriorityQueue()
        self._numbers = count(1)
        self._steps: dict[str, int] = {}
        self._report_due: dict[str, float] = {}
        self._reports = reports
        self._stopping = threading.Event()

    @contextmanager
    def following(self, api: client.ApiClient, namespace: str) -> Iterator[None]:
        """Follow the pods of a namespace during the context."""
        watchers = [
            threading.Thread(target=self._watch, args=(api, namespace), daemon=True),
            threading.Thread(target=self._follow_generations, daemon=True),
        ]
        threads = [threading.Thread(target=self._run, daemon=True) for _ in range(THREADS)]
        for thread in (*watchers, *threads):
            thread.start()
        try:
            yield
        finally:
            self._stopping.set()
            for thread in threads:
                thread.join()

    def _watch(self, api: client.ApiClient, namespace: str) -> None:
        core = client.CoreV1Api(api)
        while not self._stopping.is_set():
            stream = watch.Watch().stream(core.list_namespaced_pod, namespace, label_selector=names.LABEL_JOB)
            try:
                for event in stream:
                    self._update(event["type"], event["object"])
            except client.ApiException:
                continue

    def _follow_generations(self) -> None:
        """Send the heartbeats of the agents of a job at once when its generations change.

        Agents wait for changes of their job with a request each; one request waits for those of all.
        """
        cursor: str | None = None
        desired: dict[str, tuple[object, ...]] = {}
        while not self._stopping.is_set():
            try:
                if cursor is None:
                    cursor = self._client.read_jobs().cursor
                changes = self._client.read_changes(cursor, wait=20.0)
            except ServiceError:
                cursor = None
                time.sleep(1.0)
                continue
            cursor = changes.cursor
            changed = set()
            for view in changes.jobs:
                generations = (view.active, view.desired, view.broken)
                if desired.get(view.id) != generations:
                    desired[view.id] = generations
                    changed.add(view.id)
            for agent in list(self.agents.values()) if changed else ():
                if agent.job in changed:
                    self._schedule(agent, 0.0)

    def _update(self, kind: str, pod: Any) -> None:
        uid = pod.metadata.uid
        known = self.agents.get(uid)
        ended = pod.status.phase in ("Succeeded", "Failed")
        if kind == "DELETED" or ended or pod.metadata.deletion_timestamp is not None:
            if known is not None:
                known.gone = True
                del self.agents[uid]
                self.changes += 1
        elif known is None and pod.status.phase == "Running":
            job = f"{pod.metadata.namespace}.{pod.metadata.labels[names.LABEL_JOB]}"
            agent = Agent(job, replica_index({"labels": pod.metadata.labels}), uid)
            self.agents[uid] = agent
            self.changes += 1
            self._schedule(agent, 0.0)

    def _schedule(self, agent: Agent, delay: float) -> None:
        agent.turn = number = next(self._numbers)
        self._due.put((time.monotonic() + delay, number, agent))

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                due, number, agent = self._due.get(timeout=0.5)
            except Empty:
                continue
            if number != agent.turn:
                continue
            wait = due - time.monotonic()
            if wait > 0.2:
                self._due.put((due, number, agent))
                time.sleep(0.1)
                continue
            time.sleep(max(wait, 0.0))
            if agent.gone:
                continue
            try:
                delay = self._beat(agent)
            except ServiceError:
                delay = 1.0
            self._schedule(agent, delay)

    def _beat(self, agent: Agent) -> float:
        """Send a heartbeat, follow the generations, and return the seconds until the next heartbeat."""
        running = agent.generation > 0
        registration = Registration(
            *(agent.replica, agent.uid, ReplicaState.RUNNING if running else ReplicaState.WAITING),
            *(agent.generation, "10.0.0.1", 29500),
            assigned=agent.generation,
            rank=agent.rank,
            stepped=agent.generation,
        )
        path = f"jobs/{agent.job}/replicas/{agent.replica}"
        view = MemberView.from_json(self._transport.request("PUT", path, registration.to_json()))
        what = instruction(view, agent.replica, agent.uid, agent.generation, holds=False)
        if what is Instruction.ASSIGN and view.active is not None:
            agent.generation = view.active.generation
            agent.rank = view.active.rank_of(agent.replica, agent.uid)
            agent.replicas = view.active.replicas
            return 0.0
        if what is Instruction.RELEASE:
            agent.generation, agent.rank = 0, None
            return 0.0
        if agent.rank == 0 and running:
            self._report_step(agent)
        settled = running and view.desired is not None and view.desired.generation == agent.generation
        return max(self._heartbeat, view.heartbeat_interval) if settled else 1.0

    def _report_step(self, agent: Agent) -> None:
        now = time.monotonic()
        is_quiet = self._reports is not None and not self._reports.is_set()
        if is_quiet or now < self._report_due.get(agent.job, 0.0):
            return
        step = self._steps[agent.job] = self._steps.get(agent.job, 0) + 1
        replicas = agent.replicas
        report = GainReport(
            generation=agent.generation,
            step=step,
            progress=float(step),
            epoch=0,
            replicas=replicas,
            local_bsz=32,
            accumulation=1,
            scale=float(replicas),
            gain=1.0 + 0.8 * (replicas - 1),
            grad_sqr=1.0,
            grad_var=8.0,
            step_time=0.1 * (1 + 0.1 * replicas) * random.uniform(0.97, 1.03),
            time=time.time(),
        )
        answer = self._transport.request("POST", f"jobs/{agent.job}/gain", [report.to_json()])
        self._report_due[agent.job] = now + max(self._report, answer["post_interval"])


if __name__ == "__main__":
    main()
