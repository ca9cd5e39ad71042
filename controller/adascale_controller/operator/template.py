"""The pods of a job: the user's template, and what makes a replica of it.

What the template says stays as it is, except for the little that a replica can't do without: how it is
started, where it reports, which token it has. Each thing of the template that is taken out or replaced is
told as a warning. All else is added only where the template says nothing.
"""

from __future__ import annotations

import copy
import hashlib
import json
import posixpath
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from adascale_controller.job import Job, trainer_environment
from adascale_core import names

Manifest = dict[str, Any]
"""An object of the Kubernetes API, or a part of one, as its JSON."""

TOKEN_FOLDER: Final = "/var/run/secrets/adascale"
TOKEN_FILE: Final = "token"
CHECKPOINT_FOLDER: Final = "/var/lib/adascale/checkpoints"
"""Where a volume claim is mounted; each job has a folder of its own in it."""

AGENT: Final = "adascale-agent"

_COMPLETION_INDEX: Final = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_TERMINATION_LOG: Final = "/dev/termination-log"
_GRACE_SECONDS: Final = 30
"""Kubernetes' own, where a template says nothing."""
_GRACE_LEFT: Final = 5
"""Seconds of the grace period that are the agent's, for leaving after its trainer has."""
_GROUP: Final = 65532
"""The group that a volume is given to, so that a program that isn't root can write to it."""
_LOST_NODE_SECONDS: Final = 5
"""How long a replica waits for its lost node: its peers stand still, so not Kubernetes' five minutes."""


@dataclass(frozen=True)
class PodSettings:
    """What pods are told of the cluster they run in.

    Args:
        api_url: base URL of the metrics service, as pods reach it.
    """

    api_url: str


@dataclass(frozen=True)
class Workload:
    """An AdaScaleJob, as its objects are made from it.

    Args:
        name: of the AdaScaleJob.
        namespace: of the AdaScaleJob, and of all its objects.
        uid: of the AdaScaleJob.
        job: what is asked for.
        template: `spec.template` as the user wrote it.
        created_at: when the AdaScaleJob was made, in seconds since 1970.
        settings: what its pods are told of the cluster.
    """

    name: str
    namespace: str
    uid: str
    job: Job
    template: Mapping[str, Any]
    created_at: int
    settings: PodSettings

    @property
    def labels(self) -> dict[str, str]:
        """The labels of all its objects."""
        return {
            names.LABEL_JOB: self.name,
            "app.kubernetes.io/name": "adascale",
            "app.kubernetes.io/instance": self.name,
            "app.kubernetes.io/component": "worker",
            "app.kubernetes.io/managed-by": names.FIELD_MANAGER,
        }

    @property
    def claim_name(self) -> str | None:
        """The volume claim that its state is saved in; None where the template mounts the place itself."""
        if self.job.checkpoint.path is not None:
            return None
        return self.job.checkpoint.claim_name or f"{self.name}-checkpoints"

    @property
    def checkpoint_dir(self) -> str:
        """Where its trainers save: the path that the user names, or a folder of its own in the claim."""
        return self.job.checkpoint.path or f"{CHECKPOINT_FOLDER}/{self.namespace}.{self.name}"


@dataclass(frozen=True)
class PodTemplate:
    """A PodTemplateSpec, ready for a Job.

    Args:
        manifest: the PodTemplateSpec.
        worker: the name of the container that trains.
        warnings: what of the user's template could not stay, in words.
    """

    manifest: Manifest
    worker: str
    warnings: tuple[str, ...]


def template_digest(workload: Workload, *, one_node: bool) -> str:
    """A digest of all that goes into the pods and changes with new pods only.

    That is: the user's template, where and how often state is saved, where the service is, and whether all
    replicas share a node. The bounds are not in it, since replicas learn of new ones from the service. What
    the operator adds by itself is not in it either: another version of it may add something else, and must
    not restart every job of the cluster for that.
    """
    checkpoint = workload.job.checkpoint
    parts = {
        "template": workload.template,
        "checkpoint": [workload.claim_name, checkpoint.path, checkpoint.interval_seconds],
        "apiUrl": workload.settings.api_url,
        "oneNode": one_node,
    }
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), default=dict)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def pod_template(workload: Workload, *, one_node: bool) -> PodTemplate:
    """What the Job of `workload` makes its pods from.

    Args:
        workload: the job.
        one_node: whether all replicas must share a node, because only one node can mount the volume.
    """
    template: Manifest = copy.deepcopy(dict(workload.template))
    warnings: list[str] = []
    _label(template, workload, warnings)
    spec = _section(template, "spec")
    _govern(spec, warnings)
    worker = _worker(spec)
    _start_by_agent(worker)
    _tell(worker, workload, spec, warnings)
    _mount(worker, spec, workload, warnings)
    _restrict(spec)
    _leave_lost_nodes(spec)
    if one_node:
        _share_a_node(spec, workload)
    return PodTemplate(template, worker["name"], tuple(warnings))


# -- the parts of a template -------------------------------------------------------------------------------
#
# They may be absent, null, or, since the schema leaves most of a PodSpec open, of any other type. What is
# wrong stays as it is, without what we would have added to it: the API server then refuses the Job, and says
# which field is wrong better than we could.


def _section(parent: Manifest, key: str) -> Manifest:
    """The object `parent[key]`, made where it is not there; what is no object, is not touched."""
    if parent.get(key) is None:
        parent[key] = {}
    section = parent[key]
    return section if isinstance(section, dict) else {}


def _items(parent: Manifest, key: str) -> list[Any]:
    """The list `parent[key]`, made where it is not there; what is no list, is not touched."""
    if parent.get(key) is None:
        parent[key] = []
    items = parent[key]
    return items if isinstance(items, list) else []


def _objects(items: Iterable[Any]) -> list[Manifest]:
    return [one for one in items if isinstance(one, dict)]


def _fill(section: Manifest, key: str, value: object) -> None:
    """Give `key` a value where it has none."""
    if section.get(key) is None:
        section[key] = value


def _all_containers(spec: Manifest) -> list[Manifest]:
    init = spec.get("initContainers")
    return [*spec["containers"], *_objects(init if isinstance(init, list) else [])]


# -- the pod -----------------------------------------------------------------------------------------------


def _label(template: Manifest, workload: Workload, warnings: list[str]) -> None:
    labels = _section(_section(template, "metadata"), "labels")
    if labels.get(names.LABEL_JOB, workload.name) != workload.name:
        warnings.append(
            f"the template's label {names.LABEL_JOB} is replaced: by it the pods of a job are found"
        )
    labels[names.LABEL_JOB] = workload.name
    for key, value in workload.labels.items():
        _fill(labels, key, value)


def _govern(spec: Manifest, warnings: list[str]) -> None:
    """What the operator decides for all pods, whatever the template says."""
    policy = spec.get("restartPolicy")
    if policy not in (None, "Never"):
        warnings.append(
            f"the template's restartPolicy {policy} is replaced by Never: the operator replaces replicas"
        )
    spec["restartPolicy"] = "Never"
    if spec.get("automountServiceAccountToken"):
        warnings.append(
            "the template's automountServiceAccountToken is replaced by false: "
            "a replica has no rights on the Kubernetes API"
        )
    spec["automountServiceAccountToken"] = False
    _fill(spec, "enableServiceLinks", False)  # thousands of variables in a namespace of many Services


def _leave_lost_nodes(spec: Manifest) -> None:
    tolerations = _items(spec, "tolerations")
    for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"):
        # The same rule as that of the admission plugin, which would otherwise add 300 seconds.
        told = any(
            (one.get("key") or key) == key and (one.get("effect") or "NoExecute") == "NoExecute"
            for one in _objects(tolerations)
        )
        if not told:
            tolerations.append(
                {
                    "key": key,
                    "operator": "Exists",
                    "effect": "NoExecute",
                    "tolerationSeconds": _LOST_NODE_SECONDS,
                }
            )


def _share_a_node(spec: Manifest, workload: Workload) -> None:
    affinity = _section(_section(spec, "affinity"), "podAffinity")
    _items(affinity, "requiredDuringSchedulingIgnoredDuringExecution").append(
        {
            "labelSelector": {"matchLabels": {names.LABEL_JOB: workload.name}},
            "topologyKey": "kubernetes.io/hostname",
        }
    )


# -- the container that trains -----------------------------------------------------------------------------


def _worker(spec: Manifest) -> Manifest:
    """The container named `worker`, or the first."""
    containers: Sequence[Manifest] = spec["containers"]
    worker = next((one for one in containers if one.get("name") == names.WORKER_CONTAINER), containers[0])
    _fill(worker, "name", names.WORKER_CONTAINER)
    return worker


def _start_by_agent(worker: Manifest) -> None:
    """Put the agent before the program.

    Without a command the image's own entry point is meant, and that of a worker image is the agent.
    """
    command = worker.get("command") or []
    if command and posixpath.basename(command[0]) != AGENT:
        worker["command"] = [AGENT, "--", *command, *(worker.pop("args", None) or [])]


def _tell(worker: Manifest, workload: Workload, spec: Manifest, warnings: list[str]) -> None:
    """Give the worker our environment variables, before its own, so that these may refer to them."""
    log = worker.get("terminationMessagePath") or _TERMINATION_LOG
    told: list[Manifest] = [
        *({"name": name, "value": _literal(value)} for name, value in _environment(workload).items()),
        {
            "name": names.ENV_TERMINATION_LOG,
            "value": log,
        },
        {"name": names.ENV_TERMINATION_GRACE, "value": str(_trainer_grace(spec))},
        {
            "name": names.ENV_REPLICA,
            "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": _COMPLETION_INDEX}},
        },
        {
            "name": names.ENV_ADDRESS,
            "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "status.podIP"}},
        },
    ]
    ours = {one["name"] for one in told}
    theirs: list[Manifest] = worker.get("env") or []
    warnings.extend(
        f"the template's environment variable {one['name']} is replaced: the operator sets it"
        for one in theirs
        if one.get("name") in ours
    )
    worker["env"] = told + [one for one in theirs if one.get("name") not in ours]


def _environment(workload: Workload) -> dict[str, str]:
    return trainer_environment(workload.job) | {
        names.ENV_JOB_ID: workload.job.id,
        names.ENV_INCARNATION: str(workload.created_at),
        names.ENV_API_URL: workload.settings.api_url,
        names.ENV_TOKEN_FILE: f"{TOKEN_FOLDER}/{TOKEN_FILE}",
        names.ENV_CHECKPOINT_DIR: workload.checkpoint_dir,
        names.ENV_CHECKPOINT_INTERVAL: repr(workload.job.checkpoint.interval_seconds),
    }


def _literal(value: str) -> str:
    """`value` so that the kubelet, which expands `$(NAME)`, leaves it as it is."""
    return value.replace("$", "$$")


def _trainer_grace(spec: Manifest) -> int:
    grace = spec.get("terminationGracePeriodSeconds")
    return max(1, (grace if isinstance(grace, int) else _GRACE_SECONDS) - _GRACE_LEFT)


# -- volumes -----------------------------------------------------------------------------------------------


def _mount(worker: Manifest, spec: Manifest, workload: Workload, warnings: list[str]) -> None:
    """Mount the token and the checkpoints, and what PyTorch needs to write to."""
    token = {
        "serviceAccountToken": {
            "audience": names.job_audience(workload.job.id),
            "expirationSeconds": names.TOKEN_EXPIRATION_SECONDS,
            "path": TOKEN_FILE,
        }
    }
    volumes: dict[str, tuple[str, Manifest]] = {TOKEN_FOLDER: ("token", {"projected": {"sources": [token]}})}
    if workload.claim_name is not None:
        claim = {"persistentVolumeClaim": {"claimName": workload.claim_name}}
        volumes[CHECKPOINT_FOLDER] = ("checkpoints", claim)
    mounts, pod_volumes = _items(worker, "volumeMounts"), _items(spec, "volumes")
    warnings.extend(
        f"what the template mounts at {place} is left out: the operator mounts a volume of its own there"
        for place in sorted(_places(mounts) & volumes.keys())
    )
    mounts[:] = [one for one in mounts if not (isinstance(one, dict) and _place(one) in volumes)]

    taken = _places(mounts)
    if "/dev/shm" not in taken:
        # The 64 MiB of a container runtime are too few for the batches that data loaders pass through it.
        # Without a limit of its own it may grow to the pod's memory limit, which it counts against.
        volumes["/dev/shm"] = ("shm", {"emptyDir": {"medium": "Memory"}})
    if "/tmp" not in taken and _section(worker, "securityContext").get("readOnlyRootFilesystem"):
        volumes["/tmp"] = ("tmp", {"emptyDir": {}})
        if not worker.get("envFrom") and all(one.get("name") != "HOME" for one in worker["env"]):
            worker["env"].append({"name": "HOME", "value": "/tmp"})  # PyTorch's caches are under it

    used = {str(one.get("name")) for one in _objects(pod_volumes)}
    for place, (role, source) in volumes.items():
        name = _unused(f"adascale-{role}", used)
        pod_volumes.append({"name": name} | source)
        mount: Manifest = {"name": name, "mountPath": place}
        mounts.append(mount | {"readOnly": True} if place == TOKEN_FOLDER else mount)


def _place(mount: Mapping[str, Any]) -> str:
    return posixpath.normpath(str(mount.get("mountPath") or "/"))


def _places(mounts: Iterable[Any]) -> set[str]:
    return {_place(one) for one in _objects(mounts)}


def _unused(name: str, used: set[str]) -> str:
    candidate, number = name, 2
    while candidate in used:
        candidate, number = f"{name}-{number}", number + 1
    return candidate


# -- the Pod Security Standard `restricted` ----------------------------------------------------------------


def _restrict(spec: Manifest) -> None:
    """Meet the standard where the template says nothing; what it says is for the namespace to judge."""
    pod = _section(spec, "securityContext")
    containers = _all_containers(spec)
    contexts = [pod, *(_section(one, "securityContext") for one in containers)]
    if not any(one.get("runAsUser") == 0 for one in contexts):
        _fill(pod, "runAsNonRoot", True)
    _fill(pod, "seccompProfile", {"type": "RuntimeDefault"})
    if pod.get("fsGroup") is None:
        pod["fsGroup"] = _GROUP
        _fill(pod, "fsGroupChangePolicy", "OnRootMismatch")
    for container in containers:
        _fill(container, "terminationMessagePolicy", "FallbackToLogsOnError")
        context = _section(container, "securityContext")
        capabilities = _section(context, "capabilities")
        _fill(capabilities, "drop", ["ALL"])
        # The API server refuses `false` beside these.
        added = capabilities.get("add")
        admin = isinstance(added, list) and ("SYS_ADMIN" in added or "CAP_SYS_ADMIN" in added)
        if not context.get("privileged") and not admin:
            _fill(context, "allowPrivilegeEscalation", False)
