"""The installed operator and metrics service, and jobs that run on them."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from kubernetes import client
from kubernetes.client.exceptions import ApiException

from adascale_core import names
from cluster.adascalejobs import Jobs, document
from support import launch

DEPLOY = Path(__file__).parents[2] / "deploy"
TESTS = Path(__file__).parents[1]
PROGRAMS = {
    "paced.py": TESTS / "e2e" / "programs" / "paced.py",
    "chaos/program.py": TESTS / "chaos" / "program.py",
    "support/streams.py": TESTS / "support" / "streams.py",
}
"""The programs that jobs can run, and what they import, by their paths in the folder /programs."""
VOLUMES = "/var/tmp/adascale-test-volumes"
"""The folder for volumes on a node, on clusters without dynamic provisioning."""

wait_until = partial(launch.wait_until, pause=0.2)
"""Polls less often than `launch.wait_until`, since each call costs the cluster time."""

Kubectl = Callable[..., "subprocess.CompletedProcess[str]"]
Manifest = dict[str, Any]


def succeeded(done: subprocess.CompletedProcess[str]) -> str:
    """Check that a command has succeeded. Returns its output."""
    assert done.returncode == 0, f"{done.args}: {done.stderr or done.stdout}"
    return done.stdout


class Storage:
    """Volumes for tests: of the default storage class, or else folders on the nodes.

    Args:
        api: a client with all permissions.
    """

    def __init__(self, api: client.ApiClient) -> None:
        self._core: Any = client.CoreV1Api(api)
        listed: Any = client.StorageV1Api(api).list_storage_class()
        mark = "storageclass.kubernetes.io/is-default-class"
        self.dynamic = any((item.metadata.annotations or {}).get(mark) == "true" for item in listed.items)

    @property
    def shared(self) -> bool:
        """Whether a volume can be mounted on several nodes at the same time."""
        return not self.dynamic

    def claim(self, namespace: str, name: str = "shared") -> str:
        """Create a claim for checkpoints. Returns its name."""
        if self.dynamic:
            self._create_claim(namespace, name, ["ReadWriteOnce"], None)
        else:
            self.provide(namespace, name, ["ReadWriteMany"])
            self._create_claim(namespace, name, ["ReadWriteMany"], "")
        return name

    def provide(self, namespace: str, name: str, modes: list[str]) -> None:
        """Create a volume for a claim, which may not exist yet."""
        folder = f"{namespace}-{name}"
        existing = self._core.list_persistent_volume(field_selector=f"metadata.name=test-{folder}").items
        if existing:
            return
        self._create_folder(folder)
        volume = {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": f"test-{folder}"},
            "spec": {
                "capacity": {"storage": "10Gi"},
                "accessModes": modes,
                "storageClassName": "",
                "persistentVolumeReclaimPolicy": "Retain",
                "hostPath": {"path": f"{VOLUMES}/{folder}"},
                "claimRef": {"namespace": namespace, "name": name},
            },
        }
        try:
            self._core.create_persistent_volume(volume)
        except ApiException as error:
            if error.status != 409:
                raise

    def _create_claim(self, namespace: str, name: str, modes: list[str], storage_class: str | None) -> None:
        spec: Manifest = {"accessModes": modes, "resources": {"requests": {"storage": "1Gi"}}}
        if storage_class is not None:
            spec["storageClassName"] = storage_class
        claim = {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": name},
            "spec": spec,
        }
        self._core.create_namespaced_persistent_volume_claim(namespace, claim)

    def _create_folder(self, folder: str) -> None:
        """Create an empty folder that every user may write to, on the node that its pod is scheduled to."""
        name = f"folder-{folder}"[:60].rstrip("-")
        # An earlier cluster on the same machine may have left a folder of this name.
        code = (
            f"import os, shutil; path = '/volumes/{folder}'; shutil.rmtree(path, ignore_errors=True); "
            "os.makedirs(path); os.chmod(path, 0o777)"
        )
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name},
            "spec": {
                "restartPolicy": "Never",
                "securityContext": {"runAsUser": 0},
                "containers": [
                    {
                        "name": "folder",
                        "image": "adascale-controller:dev",
                        "command": ["python", "-c", code],
                        "volumeMounts": [{"name": "volumes", "mountPath": "/volumes"}],
                    }
                ],
                "volumes": [{"name": "volumes", "hostPath": {"path": VOLUMES, "type": "DirectoryOrCreate"}}],
            },
        }
        self._core.create_namespaced_pod("kube-system", pod)
        try:

            def done() -> bool:
                return bool(self._core.read_namespaced_pod(name, "kube-system").status.phase == "Succeeded")

            wait_until(done, f"folder {folder}")
        finally:
            self._core.delete_namespaced_pod(name, "kube-system", grace_period_seconds=0)


class System:
    """The installed operator and metrics service.

    Args:
        api: a client with all permissions.
        kubectl: a function that runs kubectl.
    """

    def __init__(self, api: client.ApiClient, kubectl: Kubectl) -> None:
        self.api = api
        self.kubectl = kubectl
        self.core: Any = client.CoreV1Api(api)
        self.storage = Storage(api)

    def install(self) -> None:
        """Install with kubectl, as users do, and wait until everything runs."""
        if not self.storage.dynamic:
            self.storage.provide(names.SYSTEM_NAMESPACE, f"data-{names.API_SERVICE}-0", ["ReadWriteOnce"])
        # Server-side, because a CRD that kubectl did not create has no last-applied annotation.
        succeeded(
            self.kubectl(
                "apply", "-k", str(DEPLOY / "kind"), "--server-side", "--force-conflicts", timeout=120
            )
        )
        for workload in (f"statefulset/{names.API_SERVICE}", f"deployment/{names.CONTROLLER}"):
            self._wait_for_rollout(workload)

    def _wait_for_rollout(self, workload: str) -> None:
        command = ("-n", names.SYSTEM_NAMESPACE, "rollout", "status", workload, "--timeout=180s")
        succeeded(self.kubectl(*command, timeout=200))

    def pods_of(self, part: str) -> list[str]:
        """Return the names of the pods of the operator or of the metrics service."""
        selector = f"app.kubernetes.io/name={part}"
        found = self.core.list_namespaced_pod(names.SYSTEM_NAMESPACE, label_selector=selector).items
        return [pod.metadata.name for pod in found]

    def kill(self, part: str) -> None:
        """Delete the pods of the operator or of the metrics service without a grace period."""
        for pod in self.pods_of(part):
            succeeded(
                self.kubectl(
                    "-n", names.SYSTEM_NAMESPACE, "delete", "pod", pod, "--grace-period=0", "--force"
                )
            )

    def get(self, path: str) -> Any:
        """Return the JSON of a GET of the metrics service, through the API server's proxy."""
        service = f"https:{names.API_SERVICE}:{names.DEFAULT_API_PORT}"
        answer = self.kubectl(
            "get", "--raw", f"/api/v1/namespaces/{names.SYSTEM_NAMESPACE}/services/{service}/proxy{path}"
        )
        return json.loads(succeeded(answer))

    @contextmanager
    def scaled(self, workload: str, replicas: int) -> Iterator[None]:
        """Scale a workload (`deployment/adascale-controller`) for the duration of the context."""

        def scale(count: int) -> None:
            succeeded(self.kubectl("-n", names.SYSTEM_NAMESPACE, "scale", workload, f"--replicas={count}"))

        scale(replicas)
        try:
            yield
        finally:
            scale(1)
            self._wait_for_rollout(workload)

    def apply(self, objects: list[Manifest]) -> None:
        """Apply manifests with kubectl."""
        listed = {"apiVersion": "v1", "kind": "List", "items": objects}
        succeeded(self.kubectl("apply", "--server-side", "-f", "-", input=json.dumps(listed)))

    @contextmanager
    def operator_barred_from(self, namespace: str) -> Iterator[None]:
        """Reject what the installed operator writes in a namespace, for the duration of the context."""
        rules = _admission_rules(namespace)
        try:
            self.apply(rules)
            wait_until(lambda: not self._may_operator_write(namespace), "the operator to be barred")
            yield
        finally:
            for rule in rules:
                kind, name = rule["kind"], rule["metadata"]["name"]
                succeeded(self.kubectl("delete", kind, name, "--ignore-not-found"))

    def _may_operator_write(self, namespace: str) -> bool:
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": "tried", "namespace": namespace},
            "involvedObject": {"namespace": namespace},
        }
        answer = self.kubectl(
            "create", "--dry-run=server", f"--as={_OPERATOR}", "-f", "-", input=json.dumps(event)
        )
        return answer.returncode == 0


_OPERATOR = f"system:serviceaccount:{names.SYSTEM_NAMESPACE}:{names.CONTROLLER}"


def _admission_rules(namespace: str) -> list[Manifest]:
    """Return admission rules that reject the writes of the installed operator in a namespace."""
    group = "admissionregistration.k8s.io"
    name = f"{namespace}-is-not-yours"
    rule = {"apiGroups": ["*"], "apiVersions": ["*"], "operations": ["*"], "resources": ["*/*"]}
    return [
        {
            "apiVersion": f"{group}/v1",
            "kind": "ValidatingAdmissionPolicy",
            "metadata": {"name": name},
            "spec": {
                "matchConstraints": {"resourceRules": [rule]},
                "validations": [
                    {"expression": f"request.userInfo.username != '{_OPERATOR}'", "message": "it has its own"}
                ],
            },
        },
        {
            "apiVersion": f"{group}/v1",
            "kind": "ValidatingAdmissionPolicyBinding",
            "metadata": {"name": name},
            "spec": {
                "policyName": name,
                "validationActions": ["Deny"],
                "matchResources": {
                    "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}
                },
            },
        },
    ]


class JobUnderTest:
    """An AdaScaleJob of a test.

    Args:
        system: the installation.
        namespace, name: its identity.
    """

    def __init__(self, system: System, namespace: str, name: str) -> None:
        self._system = system
        self.namespace = namespace
        self.name = name
        self.id = f"{namespace}.{name}"
        self._jobs = Jobs(system.api, namespace)

    def kubectl(self, *arguments: str, **options: Any) -> str:
        """Run kubectl in the job's namespace."""
        return succeeded(self._system.kubectl("-n", self.namespace, *arguments, **options))

    def raw(self) -> Manifest:
        """Return the object."""
        return self._jobs.get(self.name)

    def status(self) -> Manifest:
        """Return its status. Empty before the operator has written it."""
        return dict(self.raw().get("status") or {})

    def edit(self, **spec: Any) -> None:
        """Patch fields of the spec, by their names in YAML."""
        self._jobs.edit(self.name, **spec)

    def delete(self) -> None:
        self._jobs.delete(self.name)

    def condition(self, kind: str) -> Manifest:
        """Return its condition of a type. Empty if it has none."""
        conditions = self.status().get("conditions") or ()
        return next((condition for condition in conditions if condition["type"] == kind), {})

    def wait_for(
        self, description: str, holds: Callable[[Manifest], Any], timeout: float = 120.0
    ) -> Manifest:
        """Wait until a condition on the status holds. Returns the status."""
        deadline = time.monotonic() + timeout
        while True:
            status = self.status()
            if holds(status):
                return status
            assert time.monotonic() < deadline, f"no {description} within {timeout:.0f} s; {self.report()}"
            time.sleep(0.25)

    def wait_until_training(self, replicas: int, timeout: float = 120.0) -> Manifest:
        """Wait until it trains on a number of replicas and is not rescaling. Returns its status."""

        def trains(status: Manifest) -> bool:
            return status.get("replicas") == replicas and status.get("state") == "Running"

        return self.wait_for(f"training on {replicas} replicas", trains, timeout)

    def wait_for_condition(
        self, kind: str, *reasons: str, status: str = "True", timeout: float = 120.0
    ) -> Manifest:
        """Wait until a condition has a status and one of some reasons, or any. Returns the condition."""

        def holds(_: Manifest) -> bool:
            condition = self.condition(kind)
            expected = not reasons or condition.get("reason") in reasons
            return condition.get("status") == status and expected

        self.wait_for(f"{kind}={status} ({', '.join(reasons) or 'any reason'})", holds, timeout)
        return self.condition(kind)

    def pods(self, *, ended: bool = False) -> dict[int, Any]:
        """Return the newest pod of each replica; without pods that have ended, unless `ended`."""
        selector = f"{names.LABEL_JOB}={self.name}"
        found = self._system.core.list_namespaced_pod(self.namespace, label_selector=selector).items
        pods = [pod for pod in found if ended or pod.status.phase in ("Pending", "Running")]
        pods.sort(key=lambda pod: pod.metadata.creation_timestamp)
        return {int(pod.metadata.labels[names.LABEL_REPLICA]): pod for pod in pods}

    def uids(self) -> dict[int, str]:
        """Return the uids of its pods, by rank."""
        return {rank: pod.metadata.uid for rank, pod in sorted(self.pods().items())}

    def logs(self, rank: int = 0) -> str:
        """Return the output of the newest pod of a rank."""
        return self.kubectl("logs", self.pods(ended=True)[rank].metadata.name, "--tail=-1")

    def run_in(self, rank: int, code: str) -> str:
        """Run a Python program in the container of a rank. Returns its output."""
        return self.kubectl(
            "exec", self.pods()[rank].metadata.name, "-c", "worker", "--", "python", "-c", code
        )

    def entered(self) -> int:
        """Wait until the program has entered the active generation. Returns the step."""

        def find() -> re.Match[str] | None:
            active = self.view()["active"]
            line = re.compile(
                rf"^enters generation {active['generation'] if active else 0} at step (\d+)$", re.M
            )
            # A pod that is being created has no output.
            with contextlib.suppress(AssertionError, KeyError):
                return line.search(self.logs())
            return None

        return int(wait_until(find, "the program to enter the active generation", pause=0.2)[1])

    def saved_step(self) -> int:
        """Return the step of the newest checkpoint on rank 0. 0 if there is none."""
        code = (
            "import json, os, pathlib; folder = pathlib.Path(os.environ['ADASCALE_CHECKPOINT_DIR']); "
            "found = sorted(folder.glob('checkpoint-*.json')); "
            "print(json.loads(found[-1].read_text())['step'] if found else 0)"
        )
        return int(self.run_in(0, code))

    def view(self) -> Manifest:
        """Return the job in the metrics service."""
        found: Manifest = self._system.get(f"/jobs/{self.id}")
        return found

    def history(self) -> list[Manifest]:
        """Return the reports of its gain in the metrics service."""
        found: list[Manifest] = self._system.get(f"/jobs/{self.id}/gain/history?points=5000")["points"]
        return found

    def events(self) -> list[tuple[str, str]]:
        """Return reason and message of its Events, by creation time."""
        found = self._system.core.list_namespaced_event(
            self.namespace, field_selector=f"involvedObject.name={self.name}"
        ).items
        events = [event for event in found if event.involved_object.kind == names.KIND]
        events.sort(key=lambda event: event.metadata.creation_timestamp)
        return [(event.reason, event.message) for event in events]

    def wait_for_event(self, reason: str) -> list[str]:
        """Wait until there is such an Event. Returns the reasons of all by creation time.

        The operator writes Events beside the status, so the last one may come after the status it is about.
        """
        wait_until(lambda: any(each == reason for each, _ in self.events()), f"Event {reason}")
        return [each for each, _ in self.events()]

    def report(self) -> str:
        """Return its status, pods and Events, for the message of a failed test."""
        pods = {rank: (pod.metadata.name, pod.status.phase) for rank, pod in self.pods(ended=True).items()}
        return f"status {json.dumps(self.status(), indent=1)}\npods {pods}\nevents {self.events()}"


def job_manifest(name: str = "paced", *, pace: float = 0.05, **spec: Any) -> Manifest:
    """Return an AdaScaleJob whose steps take `pace` seconds on any number of replicas.

    Its gradients are noisy, so that more replicas increase its goodput: it grows to 1, 2 and 4 replicas.

    Args:
        name: name of the job.
        pace: seconds per step.
        spec: fields of the spec, by their names in YAML; `container` and `pod` for fields of the template.
    """
    container: Manifest = {
        "name": "worker",
        "image": "adascale-worker:dev",
        "imagePullPolicy": "IfNotPresent",
        "command": ["python", "/programs/paced.py"],
        "env": [
            {"name": "PACE", "value": str(pace)},
            {"name": "NOISE", "value": "20"},
            {"name": "OMP_NUM_THREADS", "value": "1"},
        ],
        "volumeMounts": [{"name": "programs", "mountPath": "/programs"}],
        "resources": {"requests": {"cpu": "50m", "memory": "256Mi"}},
    }
    container |= spec.pop("container", {})
    items = [{"key": path.replace("/", "."), "path": path} for path in PROGRAMS]
    pod: Manifest = {
        "containers": [container],
        "volumes": [{"name": "programs", "configMap": {"name": "programs", "items": items}}],
    }
    pod |= spec.pop("pod", {})
    defaults: Manifest = {
        "batchSize": 4,
        "maxBatchSize": 16,
        "localBszBounds": {"lower": 4, "upper": 4},
        "maxReplicas": 4,
        "checkpoint": {"claimName": "shared", "intervalSeconds": 2},
        "template": {"spec": pod},
    }
    return document(defaults | spec, name)


class Workspace:
    """A namespace with a program for jobs and a claim for their checkpoints.

    Args:
        system: the installation.
        namespace: name of the namespace.
    """

    def __init__(self, system: System, namespace: str) -> None:
        self._system = system
        self.namespace = namespace
        self._jobs = Jobs(system.api, namespace)
        system.core.create_namespaced_config_map(
            namespace,
            {
                "metadata": {"name": "programs"},
                "data": {path.replace("/", "."): file.read_text() for path, file in PROGRAMS.items()},
            },
        )
        system.storage.claim(namespace)

    def describe(self) -> str:
        """Return the objects, events and logs of the namespace, for a person."""
        commands = [
            ["get", "adascalejobs,jobs,pods", "--output=wide"],
            ["get", "adascalejobs", "--output=jsonpath={range .items[*]}{.status}{'\\n'}{end}"],
            ["get", "events", "--sort-by=.metadata.creationTimestamp"],
            ["logs", f"--selector={names.LABEL_JOB}", "--prefix", "--tail=60", "--all-containers"],
        ]
        outputs = [self._system.kubectl(*each, f"--namespace={self.namespace}") for each in commands]
        outputs.append(
            self._system.kubectl(
                "logs", f"--namespace={names.SYSTEM_NAMESPACE}", f"deployment/{names.CONTROLLER}", "--tail=60"
            )
        )
        return "\n".join(output.stdout + output.stderr for output in outputs)

    def submit(self, manifest: Mapping[str, Any]) -> JobUnderTest:
        """Create a job."""
        self._jobs.submit(manifest)
        return JobUnderTest(self._system, self.namespace, manifest["metadata"]["name"])
