"""Measures the operator with many jobs on simulated nodes: reaction times, processor time, memory, calls.

    KUBECONFIG=... .venv/bin/python bench/at_scale.py [--jobs 1000] [--seconds 60] [--profile]

The cluster has a real API server and nodes that exist in it only, by KWOK: their pods are Running at once.
The nodes have the label `type: kwok` and the taint `kwok.x-k8s.io/node`. The operator and the metrics service
run in processes of their own on this machine, and this process plays the agents of all pods: it registers
them, sends their heartbeats, and reports steps. With the jobs all training, it measures

- apply: from the creation of another job to its Indexed Job,
- edit: from an edit of a job to the status with `observedGeneration`,
- lost pod: from the deletion of a pod to the pod's replacement,

and the processor time and calls of the operator while nothing changes but reports. --profile needs py-spy.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, PriorityQueue
from statistics import quantiles
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from kubernetes import client, config, watch

from adascale_client import MetricsServiceClient, ServiceError
from adascale_client.transport import Transport
from adascale_core import names
from adascale_core.instruction import Instruction, instruction
from adascale_core.messages import GainReport, MemberView, Registration, ReplicaState
from api.client import ServiceProcess, environment
from cluster.conftest import fresh_namespace
from support.launch import wait_until
from support.operator_process import OperatorProcess

TOKEN = "token-of-the-measurement"
TEMPLATES = 20
THREADS = 8
COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"
JOBS_TIMEOUT = 1800.0


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=20, help="measured changes of each kind")
    parser.add_argument("--seconds", type=float, default=60.0, help="of measuring while nothing changes")
    parser.add_argument("--heartbeat", type=float, default=10.0, help="seconds between two of an agent")
    parser.add_argument("--report", type=float, default=10.0, help="seconds between two reports of a job")
    parser.add_argument("--profile", type=Path, metavar="SVG", help="a flame graph of the idle operator")
    arguments = parser.parse_args()
    kubeconfig = os.environ["KUBECONFIG"]
    with (
        config.new_client_from_config(config_file=kubeconfig) as api,
        tempfile.TemporaryDirectory() as folder,
        fresh_namespace(api) as namespace,
    ):
        Measurement(api, kubeconfig, namespace, Path(folder), arguments).run()


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
        self._api = api
        self._kubeconfig = kubeconfig
        self._namespace = namespace
        self._folder = folder
        self._arguments = arguments
        self._objects: Any = client.CustomObjectsApi(api)
        self._core: Any = client.CoreV1Api(api)
        self._batch = client.BatchV1Api(api)

    def run(self) -> None:
        """Start everything, measure, and stop everything."""
        arguments = self._arguments
        nodes = len(self._core.list_node(label_selector="type=kwok").items)
        token_file = self._folder / "token"
        token_file.write_text(TOKEN)
        with ServiceProcess(self._folder, environ=environment(ADASCALE_TOKEN=TOKEN)) as service:
            url = f"http://127.0.0.1:{service.port}"
            operator = OperatorProcess(
                *(self._kubeconfig, url, token_file, self._folder),
                *("--lease-namespace", self._namespace),
            )
            agents = Agents(url, arguments.heartbeat, arguments.report)
            try:
                wait_until(lambda: "Running in" in operator.log, "a running operator")
                with agents.following(self._api, self._namespace):
                    self._measure(operator, agents, service, nodes)
            finally:
                operator.stop()

    def _measure(
        self, operator: OperatorProcess, agents: Agents, service: ServiceProcess, nodes: int
    ) -> None:
        arguments = self._arguments
        print(f"{arguments.jobs} jobs, {nodes} nodes", flush=True)
        begun, cpu = time.monotonic(), operator.cpu
        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(self._submit, range(arguments.jobs)))
        print(f"created in {time.monotonic() - begun:.0f} s", flush=True)
        wait_until(
            lambda: self._training(agents.url) >= arguments.jobs, "training", patience=JOBS_TIMEOUT, pause=2.0
        )
        print(
            f"all jobs train after {time.monotonic() - begun:.0f} s, {operator.cpu - cpu:.0f} s of processor "
            f"time of the operator, {len(agents.agents)} pods",
            flush=True,
        )
        self._wait_until_stable(agents)
        before, cpu, service_cpu = operator.calls, operator.cpu, cpu_of(service.process.pid)
        self._profile(operator)
        time.sleep(arguments.seconds)
        calls = operator.calls - before
        to_cluster = sum(number for kind, number in calls.items() if kind.startswith("cluster"))
        share = 100 / arguments.seconds
        print(f"operator, nothing changes   {share * (operator.cpu - cpu):6.1f} % of a core")
        service_cpu = cpu_of(service.process.pid) - service_cpu
        print(f"metrics service             {share * service_cpu:6.1f} % of a core")
        print(f"operator, memory            {operator.memory / 2**20:6.0f} MiB")
        print(f"calls per job and minute    {to_cluster * 60 / arguments.seconds / arguments.jobs:6.2f}")
        kinds: list[tuple[str, Callable[[int], float]]] = [
            ("apply to Indexed Job", self._apply),
            ("edit to status", self._edit),
            ("lost pod to another pod", self._lose),
        ]
        for name, measure in kinds:
            cpu, begun = operator.cpu, time.monotonic()
            seconds = [measure(number) for number in range(arguments.samples)]
            used = 100 * (operator.cpu - cpu) / (time.monotonic() - begun)
            p50, p99 = percentiles(seconds)
            print(f"{name:27} {p50:6.2f} s p50 {p99:6.2f} s p99; operator {used:.0f} % of a core", flush=True)

    def _training(self, url: str) -> int:
        jobs = MetricsServiceClient(url, TOKEN).list_jobs()
        return sum(job.active is not None and job.latest is not None for job in jobs)

    def _wait_until_stable(self, agents: Agents) -> None:
        """Wait until no pod was added or removed for some seconds."""
        seen, since = -1, time.monotonic()
        deadline = since + 300
        while time.monotonic() < min(since + 20, deadline):
            if agents.changes != seen:
                seen, since = agents.changes, time.monotonic()
            time.sleep(1)

    def _profile(self, operator: OperatorProcess) -> None:
        if self._arguments.profile is not None:
            command = ["py-spy", "record", "--pid", str(operator.process.pid), "--duration", "20"]
            subprocess.Popen([*command, "--output", str(self._arguments.profile)])

    # -- changes ------------------------------------------------------------------------------------------

    def _submit(self, number: int) -> str:
        name = f"job-{number:05d}"
        body = manifest(name, number % TEMPLATES)
        self._objects.create_namespaced_custom_object(
            names.API_GROUP, names.API_VERSION, self._namespace, names.PLURAL, body
        )
        return name

    def _apply(self, number: int) -> float:
        name = self._submit(self._arguments.jobs + number)
        begun = time.monotonic()
        wait_until(lambda: self._exists(name), f"the Indexed Job of {name}", pause=0.02)
        return time.monotonic() - begun

    def _exists(self, name: str) -> bool:
        try:
            self._batch.read_namespaced_job(name, self._namespace)
        except client.ApiException as error:
            if error.status == 404:
                return False
            raise
        return True

    def _edit(self, number: int) -> float:
        name = f"job-{number:05d}"
        patched = self._objects.patch_namespaced_custom_object(
            *(names.API_GROUP, names.API_VERSION, self._namespace, names.PLURAL, name),
            {"spec": {"maxBatchSize": 256 - 32 * (1 + number % 3)}},
        )
        begun = time.monotonic()

        def observed() -> bool:
            raw = self._objects.get_namespaced_custom_object(
                names.API_GROUP, names.API_VERSION, self._namespace, names.PLURAL, name
            )
            return bool(raw["status"]["observedGeneration"] >= patched["metadata"]["generation"])

        wait_until(observed, f"the status of {name}", pause=0.02)
        return time.monotonic() - begun

    def _lose(self, number: int) -> float:
        name = f"job-{number:05d}"
        selector = f"{names.LABEL_JOB}={name}"

        def pods() -> set[str]:
            listed = self._core.list_namespaced_pod(self._namespace, label_selector=selector).items
            return {pod.metadata.uid for pod in listed if pod.metadata.deletion_timestamp is None}

        before = pods()
        pod = self._core.list_namespaced_pod(self._namespace, label_selector=selector).items[0]
        self._core.delete_namespaced_pod(pod.metadata.name, self._namespace, grace_period_seconds=0)
        begun = time.monotonic()
        wait_until(lambda: pods() - before, f"another pod of {name}", pause=0.05)
        return time.monotonic() - begun


def manifest(name: str, template: int) -> dict[str, Any]:
    """Return a job whose pods run on simulated nodes. Checkpoints are not written."""
    container = {
        "name": "worker",
        "image": f"trainer:{template}",
        "resources": {"limits": {"cpu": "100m", "memory": "1Gi", "nvidia.com/gpu": "1"}},
    }
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
                    "tolerations": [{"key": "kwok.x-k8s.io/node", "operator": "Exists"}],
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


class Agents:
    """Plays the agents of all pods.

    Args:
        url: the metrics service.
        heartbeat: seconds between two heartbeats of an agent.
        report: seconds between two reports of a job.
        token: a token that may write for all jobs.
    """

    def __init__(self, url: str, heartbeat: float, report: float, token: str = TOKEN) -> None:
        self.url = url
        self.agents: dict[str, Agent] = {}
        self.changes = 0
        self._heartbeat = heartbeat
        self._report = report
        self._transport = Transport(url, token, None)
        self._due: PriorityQueue[tuple[float, int, Agent]] = PriorityQueue()
        self._number = 0
        self._steps: dict[str, int] = {}
        self._reported_at: dict[str, float] = {}
        self._stopping = threading.Event()

    @contextmanager
    def following(self, api: client.ApiClient, namespace: str) -> Iterator[None]:
        """Follow the pods of a namespace during the context."""
        watcher = threading.Thread(target=self._watch, args=(api, namespace), daemon=True)
        threads = [threading.Thread(target=self._run, daemon=True) for _ in range(THREADS)]
        for thread in (watcher, *threads):
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
            stream = watch.Watch().stream(
                core.list_namespaced_pod, namespace, label_selector=names.LABEL_JOB, timeout_seconds=300
            )
            try:
                for event in stream:
                    self._update(event["type"], event["object"])
            except client.ApiException:
                continue

    def _update(self, kind: str, pod: Any) -> None:
        uid = pod.metadata.uid
        known = self.agents.get(uid)
        if kind == "DELETED" or pod.metadata.deletion_timestamp is not None:
            if known is not None:
                known.gone = True
                del self.agents[uid]
                self.changes += 1
        elif known is None and pod.status.phase == "Running":
            job = f"{pod.metadata.namespace}.{pod.metadata.labels[names.LABEL_JOB]}"
            agent = Agent(job, int(pod.metadata.annotations[COMPLETION_INDEX]), uid)
            self.agents[uid] = agent
            self.changes += 1
            self._schedule(agent, 0.0)

    def _schedule(self, agent: Agent, delay: float) -> None:
        self._number += 1
        self._due.put((time.monotonic() + delay, self._number, agent))

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                due, _, agent = self._due.get(timeout=0.5)
            except Empty:
                continue
            wait = due - time.monotonic()
            if wait > 0.2:
                self._due.put((due, -1, agent))
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
        if agent.rank == 0 and running:
            self._report_step(agent)
        settled = running and view.desired is not None and view.desired.generation == agent.generation
        return self._heartbeat * random.uniform(0.8, 1.0) if settled else 1.0

    def _report_step(self, agent: Agent) -> None:
        now = time.monotonic()
        if now - self._reported_at.get(agent.job, float("-inf")) < self._report:
            return
        self._reported_at[agent.job] = now
        step = self._steps[agent.job] = self._steps.get(agent.job, 0) + 1
        count = agent.replicas
        report = GainReport(
            generation=agent.generation,
            step=step,
            progress=float(step),
            epoch=0,
            replicas=count,
            local_bsz=32,
            accumulation=1,
            scale=float(count),
            gain=1.0 + 0.8 * (count - 1),
            grad_sqr=1.0,
            grad_var=8.0,
            step_time=0.1 * random.uniform(0.97, 1.03),
            time=time.time(),
        )
        self._transport.request("POST", f"jobs/{agent.job}/gain", [report.to_json()])


if __name__ == "__main__":
    main()
