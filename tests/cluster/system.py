"""The operator and the metrics service as they are installed for tests, and jobs to try them with."""

from __future__ import annotations

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
from support import launch

DEPLOY = Path(__file__).parents[2] / "deploy"
PROGRAM = Path(__file__).parents[1] / "e2e" / "programs" / "paced.py"
VOLUMES = "/var/tmp/adascale-test-volumes"
"""Where volumes of tests are on a node, on clusters that make none by themselves."""

wait_until = partial(launch.wait_until, pause=0.2)
"""As elsewhere, but asking a cluster takes time from what is waited for."""

Kubectl = Callable[..., "subprocess.CompletedProcess[str]"]
Manifest = dict[str, Any]


def succeeded(done: subprocess.CompletedProcess[str]) -> str:
    """What a command wrote, if it went well."""
    assert done.returncode == 0, f"{done.args}: {done.stderr or done.stdout}"
    return done.stdout


class Storage:
    """Volumes for tests: of the default storage class, or else folders of the nodes.

    Args:
        api: a client with all rights.
    """

    def __init__(self, api: client.ApiClient) -> None:
        self._core: Any = client.CoreV1Api(api)
        listed: Any = client.StorageV1Api(api).list_storage_class()
        mark = "storageclass.kubernetes.io/is-default-class"
        self.dynamic = any((one.metadata.annotations or {}).get(mark) == "true" for one in listed.items)

    @property
    def shared(self) -> bool:
        """Whether a volume can be mounted on several nodes at once."""
        return not self.dynamic

    def claim(self, namespace: str, name: str = "shared") -> str:
        """A claim for the state of jobs."""
        if self.dynamic:
            self._make_claim(namespace, name, ["ReadWriteOnce"], None)
        else:
            self.provide(namespace, name, ["ReadWriteMany"])
            self._make_claim(namespace, name, ["ReadWriteMany"], "")
        return name

    def provide(self, namespace: str, name: str, modes: list[str]) -> None:
        """A volume for a claim that is there already, or will be."""
        folder = f"{namespace}-{name}"
        known = self._core.list_persistent_volume(field_selector=f"metadata.name=test-{folder}").items
        if known:
            return
        self._make_folder(folder)
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

    def _make_claim(self, namespace: str, name: str, modes: list[str], storage_class: str | None) -> None:
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

    def _make_folder(self, folder: str) -> None:
        """Make a folder that every user may write, by a pod, on the node that it comes to run on."""
        name = f"folder-{folder}"[:60].rstrip("-")
        code = (
            f"import os; path = '/volumes/{folder}'; os.makedirs(path, exist_ok=True); os.chmod(path, 0o777)"
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
        api: a client with all rights.
        kubectl: runs kubectl.
    """

    def __init__(self, api: client.ApiClient, kubectl: Kubectl) -> None:
        self.api = api
        self.kubectl = kubectl
        self.core: Any = client.CoreV1Api(api)
        self.storage = Storage(api)

    def install(self) -> None:
        """Install as a user does, and wait until all is up."""
        if not self.storage.dynamic:
            self.storage.provide(names.SYSTEM_NAMESPACE, f"data-{names.API_SERVICE}-0", ["ReadWriteOnce"])
        # A job that kubectl did not make has no record of what was applied; the server needs none.
        succeeded(
            self.kubectl(
                "apply", "-k", str(DEPLOY / "kind"), "--server-side", "--force-conflicts", timeout=120
            )
        )
        for what in (f"statefulset/{names.API_SERVICE}", f"deployment/{names.CONTROLLER}"):
            succeeded(
                self.kubectl(
                    "-n", names.SYSTEM_NAMESPACE, "rollout", "status", what, "--timeout=180s", timeout=200
                )
            )

    def pods_of(self, part: str) -> list[str]:
        """The pods of the operator or of the service."""
        selector = f"app.kubernetes.io/name={part}"
        found = self.core.list_namespaced_pod(names.SYSTEM_NAMESPACE, label_selector=selector).items
        return [one.metadata.name for one in found]

    def kill(self, part: str) -> None:
        """Kill the operator or the service, without a chance to end in order."""
        for pod in self.pods_of(part):
            succeeded(
                self.kubectl(
                    "-n", names.SYSTEM_NAMESPACE, "delete", "pod", pod, "--grace-period=0", "--force"
                )
            )

    def ask(self, path: str) -> Any:
        """What the metrics service answers, through the API server."""
        place = f"{names.API_SERVICE}:{names.DEFAULT_API_PORT}"
        answer = self.kubectl(
            "get", "--raw", f"/api/v1/namespaces/{names.SYSTEM_NAMESPACE}/services/{place}/proxy{path}"
        )
        return json.loads(succeeded(answer))

    @contextmanager
    def scaled(self, what: str, replicas: int) -> Iterator[None]:
        """Have so many replicas of a workload meanwhile, as in `deployment/adascale-controller`."""

        def scale(count: int) -> None:
            succeeded(self.kubectl("-n", names.SYSTEM_NAMESPACE, "scale", what, f"--replicas={count}"))

        scale(replicas)
        try:
            yield
        finally:
            scale(1)
            succeeded(
                self.kubectl(
                    "-n", names.SYSTEM_NAMESPACE, "rollout", "status", what, "--timeout=180s", timeout=200
                )
            )


class JobUnderTest:
    """An AdaScaleJob of a test.

    Args:
        system: the installation.
        namespace, name: which one.
    """

    def __init__(self, system: System, namespace: str, name: str) -> None:
        self._system = system
        self.namespace = namespace
        self.name = name
        self.id = f"{namespace}.{name}"
        self._objects: Any = client.CustomObjectsApi(system.api)
        self._batch: Any = client.BatchV1Api(system.api)

    def kubectl(self, *arguments: str, **options: Any) -> str:
        """Run kubectl in the job's namespace."""
        return succeeded(self._system.kubectl("-n", self.namespace, *arguments, **options))

    def raw(self) -> Manifest:
        """The object."""
        found: Manifest = self._objects.get_namespaced_custom_object(
            names.API_GROUP, names.API_VERSION, self.namespace, names.PLURAL, self.name
        )
        return found

    def status(self) -> Manifest:
        """Its status; empty before there is one."""
        return dict(self.raw().get("status") or {})

    def edit(self, **spec: Any) -> None:
        """Change fields of the spec, by their names in the YAML."""
        self._objects.patch_namespaced_custom_object(
            names.API_GROUP,
            names.API_VERSION,
            self.namespace,
            names.PLURAL,
            self.name,
            {"spec": spec},
            _content_type="application/merge-patch+json",
        )

    def delete(self) -> None:
        """Delete it, as `kubectl delete` does."""
        self._objects.delete_namespaced_custom_object(
            names.API_GROUP, names.API_VERSION, self.namespace, names.PLURAL, self.name
        )

    def condition(self, kind: str) -> Manifest:
        """One of its conditions; empty if it has none such."""
        found = (one for one in self.status().get("conditions") or () if one["type"] == kind)
        return next(found, {})

    def wait_for(self, what: str, holds: Callable[[Manifest], Any], patience: float = 120.0) -> Manifest:
        """The first status that something holds for."""
        deadline = time.monotonic() + patience
        while True:
            status = self.status()
            if holds(status):
                return status
            assert time.monotonic() < deadline, f"no {what} in {patience:.0f} s; {self.story()}"
            time.sleep(0.25)

    def wait_until_training(self, replicas: int, patience: float = 120.0) -> Manifest:
        """Wait until it trains on so many replicas, and nothing is under way."""

        def trains(status: Manifest) -> bool:
            return status.get("replicas") == replicas and status.get("state") == "Running"

        return self.wait_for(f"training on {replicas} replicas", trains, patience)

    def wait_for_condition(
        self, kind: str, reason: str | None = None, status: str = "True", patience: float = 120.0
    ) -> Manifest:
        """Wait until a condition is so; the condition."""

        def is_so(_: Manifest) -> bool:
            found = self.condition(kind)
            return found.get("status") == status and reason in (None, found.get("reason"))

        self.wait_for(f"{kind}={status} ({reason or 'any reason'})", is_so, patience)
        return self.condition(kind)

    def pods(self, *, ended: bool = False) -> dict[int, Any]:
        """Its pods by rank; without those that have ended, unless asked for."""
        selector = f"{names.LABEL_JOB}={self.name}"
        found = self._system.core.list_namespaced_pod(self.namespace, label_selector=selector).items
        index = "batch.kubernetes.io/job-completion-index"
        alive = [one for one in found if ended or one.status.phase in ("Pending", "Running")]
        # Of a rank that has had several, the newest.
        alive.sort(key=lambda one: one.metadata.creation_timestamp)
        return {int(one.metadata.annotations[index]): one for one in alive}

    def uids(self) -> dict[int, str]:
        """The uids of its pods, by rank."""
        return {rank: pod.metadata.uid for rank, pod in sorted(self.pods().items())}

    def batch_jobs(self) -> list[Any]:
        """The Jobs that belong to it."""
        selector = f"{names.LABEL_JOB}={self.name}"
        return list(self._batch.list_namespaced_job(self.namespace, label_selector=selector).items)

    def logs(self, rank: int = 0) -> str:
        """What the newest pod of a rank has written."""
        return self.kubectl("logs", self.pods(ended=True)[rank].metadata.name, "--tail=-1")

    def run_in(self, rank: int, code: str) -> str:
        """What a Python program writes in the container of a rank."""
        return self.kubectl(
            "exec", self.pods()[rank].metadata.name, "-c", "worker", "--", "python", "-c", code
        )

    def entered(self) -> int:
        """The step at which the program has entered the active generation, once it has."""
        line = re.compile(rf"^enters generation {self.view()['active']['generation']} at step (\d+)$", re.M)
        return int(wait_until(lambda: line.search(self.logs()), line.pattern)[1])

    def saved_step(self) -> int:
        """The step of the newest checkpoint, as rank 0 sees it; 0 if there is none."""
        code = (
            "import json, os, pathlib; folder = pathlib.Path(os.environ['ADASCALE_CHECKPOINT_DIR']); "
            "found = sorted(folder.glob('checkpoint-*.json')); "
            "print(json.loads(found[-1].read_text())['step'] if found else 0)"
        )
        return int(self.run_in(0, code))

    def view(self) -> Manifest:
        """What the metrics service knows of it."""
        found: Manifest = self._system.ask(f"/jobs/{self.id}")
        return found

    def history(self) -> list[Manifest]:
        """The reports of its gain, as the metrics service keeps them."""
        found: list[Manifest] = self._system.ask(f"/jobs/{self.id}/gain/history?points=5000")["points"]
        return found

    def events(self) -> list[tuple[str, str]]:
        """What it was told of: reason and message, in order."""
        found = self._system.core.list_namespaced_event(
            self.namespace, field_selector=f"involvedObject.name={self.name}"
        ).items
        mine = [one for one in found if one.involved_object.kind == names.KIND]
        mine.sort(key=lambda one: one.metadata.creation_timestamp)
        return [(one.reason, one.message) for one in mine]

    def story(self) -> str:
        """All that helps to see why a test has failed."""
        pods = {rank: (pod.metadata.name, pod.status.phase) for rank, pod in self.pods(ended=True).items()}
        return f"status {json.dumps(self.status(), indent=1)}\npods {pods}\nevents {self.events()}"


def job_manifest(name: str = "paced", *, pace: float = 0.05, **spec: Any) -> Manifest:
    """An AdaScaleJob whose steps take `pace` seconds on any number of replicas.

    The gradients are noisy, so that each replica is worth its while: it goes to 1, 2, 4 by itself.

    Args:
        name: of the job.
        pace: seconds.
        spec: fields of the spec, by their names in the YAML; `container` for fields of the container.
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
    pod: Manifest = {
        "containers": [container],
        "volumes": [{"name": "programs", "configMap": {"name": "programs"}}],
    }
    pod |= spec.pop("pod", {})
    whole: Manifest = {
        "batchSize": 4,
        "maxBatchSize": 16,
        "localBszBounds": {"lower": 4, "upper": 4},
        "maxReplicas": 4,
        "checkpoint": {"claimName": "shared", "intervalSeconds": 2},
        "template": {"spec": pod},
        **spec,
    }
    return {
        "apiVersion": names.GROUP_VERSION,
        "kind": names.KIND,
        "metadata": {"name": name},
        "spec": whole,
    }


class Workspace:
    """A namespace with what jobs of tests need: the program, and a volume for state.

    Args:
        system: the installation.
        namespace: its name.
    """

    def __init__(self, system: System, namespace: str) -> None:
        self._system = system
        self.namespace = namespace
        self._objects: Any = client.CustomObjectsApi(system.api)
        system.core.create_namespaced_config_map(
            namespace, {"metadata": {"name": "programs"}, "data": {PROGRAM.name: PROGRAM.read_text()}}
        )
        system.storage.claim(namespace)

    def submit(self, manifest: Mapping[str, Any]) -> JobUnderTest:
        """Make a job."""
        self._objects.create_namespaced_custom_object(
            names.API_GROUP, names.API_VERSION, self.namespace, names.PLURAL, dict(manifest)
        )
        return JobUnderTest(self._system, self.namespace, manifest["metadata"]["name"])
