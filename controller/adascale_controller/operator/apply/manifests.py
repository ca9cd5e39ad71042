"""Manifests of an AdaScaleJob's objects: its pods and the PersistentVolumeClaim for checkpoints.

A pod is named by job, replica and attempt, so that no second one is created for the same attempt. The
AdaScaleJob owns these objects, so they are deleted with it.

The user's template is kept, except for what a replica needs to work: how the worker starts, where it reports,
its token, the mount of its checkpoints. Everything else is added only where the template sets nothing.
"""

from __future__ import annotations

import copy
import posixpath
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from adascale_controller.operator.observe.adascalejob import AdaScaleJob, template_digest
from adascale_controller.operator.types.actions import NewPod
from adascale_controller.operator.types.kubernetes import ApiObject, Manifest, only
from adascale_controller.operator.types.settings import (
    CHECKPOINT_FOLDER,
    POD_GROUP,
    POD_GROUP_SIZE,
    POD_GROUP_VERSION,
    QUEUE_NAME,
    Queueing,
)
from adascale_controller.schema import DEFAULT_ACCESS_MODE, DEFAULT_CONTAINER, DEFAULT_STORAGE, find_worker
from adascale_core import names

TOKEN_FOLDER: Final = "/var/run/secrets/adascale"
TOKEN_FILE: Final = "token"
AGENT: Final = "adascale-agent"

_TERMINATION_LOG: Final = "/dev/termination-log"
_SAFE_TO_EVICT: Final = "cluster-autoscaler.kubernetes.io/safe-to-evict"
_GRACE_SECONDS: Final = 30
"""Kubernetes' default for `terminationGracePeriodSeconds`."""
_AGENT_GRACE_SECONDS: Final = 5
"""Seconds of the grace period that the agent keeps for itself, after its trainer has ended."""
_OWNED_VOLUMES: Final = frozenset({"persistentVolumeClaim", "ephemeral", "csi"})
"""Volumes that belong to root if no group is set."""
_FS_GROUP: Final = 65532
"""The group that owns volumes, so that a program that is not root can write to them."""
_PLACEMENT_FIELDS: Final = ("podAffinity", "podAntiAffinity")
_NODE_WEIGHT: Final = 100
_ACCELERATOR_WEIGHT: Final = 50
_ZONE_WEIGHT: Final = 10
"""How much replicas of a job prefer to be together on a node, on a type of accelerator and in a zone, from 1
to 100. Replicas wait for each other, so a replica on a slower GPU slows down all."""
_LOST_NODE_SECONDS: Final = 5
"""Seconds that a replica stays on a lost node. Its peers wait for it, so not Kubernetes' 300 seconds."""


def build_pod_template(job: AdaScaleJob, pod: NewPod, *, single_node: bool) -> Manifest:
    """Return the PodTemplateSpec of a pod of a job."""
    template: Manifest = copy.deepcopy(dict(job.template))
    _set_labels(template, job)
    spec = _section(template, "spec")
    _set_pod_policy(spec)
    _set_dns(spec)
    # Its volumes would keep cluster-autoscaler from removing a node, but an eviction loses no step.
    _fill(_section(_section(template, "metadata"), "annotations"), _SAFE_TO_EVICT, "true")
    worker = _worker(template)
    _start_by_agent(worker)
    _set_environment(worker, job, spec, pod)
    if pod.extra and job.valid_job.spec.opportunistic is not None:
        _set_priority(spec, job.valid_job.spec.opportunistic.priority_class_name)
    if pod.accelerator is not None:
        _require_accelerator(spec, job.settings.accelerator_label, pod.accelerator)
    spec |= copy.deepcopy(dict(pod.scheduling))
    _mount_volumes(worker, spec, job)
    _add_credentials(worker, job)
    _restrict(spec)
    if job.settings.fs_group:
        _share_volumes(spec)
    _tolerate_lost_nodes(spec)
    if single_node:
        _share_a_node(spec, job)
    else:
        _prefer_few_nodes(spec, job)
    return template


# -- the parts of a template -------------------------------------------------------------------------------
#
# A part may be absent, null or, since the schema leaves most of a PodSpec open, of any other type. A part of
# a wrong type is left as it is, without what would be added to it: the API server then rejects the pod and
# names the field.


def _section(parent: Manifest, key: str) -> Manifest:
    """Return the object `parent[key]`, created if it is missing. Another type is left unchanged."""
    if parent.get(key) is None:
        parent[key] = {}
    section = parent[key]
    return section if isinstance(section, dict) else {}


def _items(parent: Manifest, key: str) -> list[Any]:
    """Return the list `parent[key]`, created if it is missing. Another type is left unchanged."""
    if parent.get(key) is None:
        parent[key] = []
    items = parent[key]
    return items if isinstance(items, list) else []


def _objects(items: Iterable[Any]) -> list[Manifest]:
    return [item for item in items if isinstance(item, dict)]


def _fill(section: Manifest, key: str, value: object) -> None:
    """Set `key` if it has no value."""
    if section.get(key) is None:
        section[key] = value


def _all_containers(spec: Manifest) -> list[Manifest]:
    init = spec.get("initContainers")
    return [*spec["containers"], *_objects(init if isinstance(init, list) else [])]


# -- the pod -----------------------------------------------------------------------------------------------


def _set_labels(template: Manifest, job: AdaScaleJob) -> None:
    labels = _section(_section(template, "metadata"), "labels")
    labels[names.LABEL_JOB] = job.name
    for key, value in job.labels.items():
        _fill(labels, key, value)


def _set_pod_policy(spec: Manifest) -> None:
    """Set the fields that are the same for all pods."""
    spec["restartPolicy"] = "Never"
    spec["automountServiceAccountToken"] = False
    _fill(spec, "enableServiceLinks", False)  # thousands of variables in a namespace with many Services


def _set_priority(spec: Manifest, priority_class: str) -> None:
    spec["priorityClassName"] = priority_class
    # Those of the PriorityClass: the API server rejects others.
    for field in ("priority", "preemptionPolicy"):
        spec.pop(field, None)


def _set_dns(spec: Manifest) -> None:
    """Let pods in the network of their node find Services too, where the template sets nothing."""
    if spec.get("hostNetwork"):
        _fill(spec, "dnsPolicy", "ClusterFirstWithHostNet")


def _tolerate_lost_nodes(spec: Manifest) -> None:
    tolerations = _items(spec, "tolerations")
    for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"):
        # The rule of the admission plugin DefaultTolerationSeconds, which would otherwise add 300 seconds.
        tolerated = any(
            (item.get("key") or key) == key and (item.get("effect") or "NoExecute") == "NoExecute"
            for item in _objects(tolerations)
        )
        if not tolerated:
            tolerations.append(
                {
                    "key": key,
                    "operator": "Exists",
                    "effect": "NoExecute",
                    "tolerationSeconds": _LOST_NODE_SECONDS,
                }
            )


def _share_a_node(spec: Manifest, job: AdaScaleJob) -> None:
    affinity = _section(_section(spec, "affinity"), "podAffinity")
    _items(affinity, "requiredDuringSchedulingIgnoredDuringExecution").append(
        _same_topology(job, "kubernetes.io/hostname")
    )


def _prefer_few_nodes(spec: Manifest, job: AdaScaleJob) -> None:
    """Prefer the nodes of the job's other pods, because communication between nodes is slower.

    A template that places its pods by itself is left as it is.
    """
    if spec.get("topologySpreadConstraints"):
        return
    affinity = _section(spec, "affinity")
    if any(affinity.get(field) for field in _PLACEMENT_FIELDS):
        return
    affinity["podAffinity"] = {
        "preferredDuringSchedulingIgnoredDuringExecution": [
            {"weight": weight, "podAffinityTerm": _same_topology(job, topology)}
            for topology, weight in (
                ("kubernetes.io/hostname", _NODE_WEIGHT),
                (job.settings.accelerator_label, _ACCELERATOR_WEIGHT),
                ("topology.kubernetes.io/zone", _ZONE_WEIGHT),
            )
            if topology
        ]
    }


def _require_accelerator(spec: Manifest, label: str, accelerator: str) -> None:
    """Restrict pods to nodes with one type of accelerator, in addition to their own requirements."""
    expression: Manifest = {"key": label, "operator": "In", "values": [accelerator]}
    if accelerator == names.NO_ACCELERATOR_LABEL:
        expression = {"key": label, "operator": "DoesNotExist"}
    affinity = _section(_section(spec, "affinity"), "nodeAffinity")
    terms = _items(_section(affinity, "requiredDuringSchedulingIgnoredDuringExecution"), "nodeSelectorTerms")
    if not terms:
        terms.append({"matchExpressions": [expression]})
        return
    # A node must match all expressions of one of the terms. A term without expressions matches no node.
    for term in _objects(terms):
        if term.get("matchExpressions") or term.get("matchFields"):
            _items(term, "matchExpressions").append(dict(expression))


def _same_topology(job: AdaScaleJob, topology: str) -> Manifest:
    """Return the affinity to the pods of a job in the same namespace."""
    return {"labelSelector": {"matchLabels": {names.LABEL_JOB: job.name}}, "topologyKey": topology}


# -- the container that trains -----------------------------------------------------------------------------


def _worker(template: Manifest) -> Manifest:
    """Return the container that trains, and annotate the pod with its name.

    Admission may add containers, also before it, so its name is looked up in the pod, and not found again.
    A container without a name is named `worker`.
    """
    containers: Sequence[Manifest] = template["spec"]["containers"]
    worker = containers[find_worker(template)]
    _fill(worker, "name", names.WORKER_CONTAINER)
    annotations = _section(_section(template, "metadata"), "annotations")
    annotations[names.ANNOTATION_WORKER] = worker["name"]
    _fill(annotations, DEFAULT_CONTAINER, worker["name"])
    return worker


def _start_by_agent(worker: Manifest) -> None:
    """Put the agent before the program's command.

    Without a command the image's entry point runs, which is the agent in a worker image.
    """
    command = worker.get("command") or []
    if command and posixpath.basename(command[0]) != AGENT:
        worker["command"] = [AGENT, "--", *command, *(worker.pop("args", None) or [])]


def _set_environment(worker: Manifest, job: AdaScaleJob, spec: Manifest, pod: NewPod) -> None:
    """Set our environment variables, before the user's own, so that these may refer to them."""
    log = worker.get("terminationMessagePath") or _TERMINATION_LOG
    values = _environment(job)
    if pod.accelerator is not None:
        values[names.ENV_ACCELERATOR] = pod.accelerator
    values[names.ENV_REPLICA] = str(pod.rank)
    ours: list[Manifest] = [
        *({"name": name, "value": _literal(value)} for name, value in values.items()),
        {"name": names.ENV_TERMINATION_LOG, "value": log},
        {"name": names.ENV_TERMINATION_GRACE, "value": str(_trainer_grace(spec))},
        {
            "name": names.ENV_ADDRESS,
            "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "status.podIP"}},
        },
        {
            "name": names.ENV_NODE_NAME,
            "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "spec.nodeName"}},
        },
    ]
    reserved = {variable["name"] for variable in ours}
    theirs: list[Manifest] = worker.get("env") or []
    worker["env"] = ours + [variable for variable in theirs if variable.get("name") not in reserved]


def _environment(job: AdaScaleJob) -> dict[str, str]:
    authority = {names.ENV_CA_FILE: f"{TOKEN_FOLDER}/{names.AUTHORITY_FILE}"}
    return (
        job.valid_job.environment
        | (authority if job.settings.tls_secret is not None else {})
        | {
            names.ENV_JOB_ID: job.id,
            names.ENV_INCARNATION: str(job.created_at),
            names.ENV_API_URL: job.settings.url_in_pods,
            names.ENV_TOKEN_FILE: f"{TOKEN_FOLDER}/{TOKEN_FILE}",
            names.ENV_CHECKPOINT_DIR: job.checkpoint_dir,
        }
    )


def _add_credentials(worker: Manifest, job: AdaScaleJob) -> None:
    """Add the variables of the Secret with credentials for the object store, before the user's own sources.

    A later source takes precedence over an earlier one, and `env` over both.
    """
    secret = job.valid_job.spec.checkpoint.credentials_secret
    if secret is not None:
        _items(worker, "envFrom").insert(0, {"secretRef": {"name": secret}})


def _literal(value: str) -> str:
    """Return `value` escaped, so that the kubelet does not expand `$(NAME)` in it."""
    return value.replace("$", "$$")


def _trainer_grace(spec: Manifest) -> int:
    grace = spec.get("terminationGracePeriodSeconds")
    return max(1, (grace if isinstance(grace, int) else _GRACE_SECONDS) - _AGENT_GRACE_SECONDS)


# -- volumes -----------------------------------------------------------------------------------------------


def _mount_volumes(worker: Manifest, spec: Manifest, job: AdaScaleJob) -> None:
    """Mount the token, the authority of the metrics service, the checkpoints, and PyTorch's own folders."""
    mounts, volumes = _items(worker, "volumeMounts"), _items(spec, "volumes")
    token: Manifest = {
        "serviceAccountToken": {
            "audience": names.job_audience(job.id),
            "expirationSeconds": names.TOKEN_EXPIRATION_SECONDS,
            "path": TOKEN_FILE,
        }
    }
    sources = [token]
    if job.settings.tls_secret is not None:
        item = {"key": names.AUTHORITY_FILE, "path": names.AUTHORITY_FILE}
        sources.append({"configMap": {"name": names.AUTHORITY, "items": [item]}})
    token_volume = _add_volume(volumes, "token", {"projected": {"sources": sources}})
    required: list[Manifest] = [{"name": token_volume, "mountPath": TOKEN_FOLDER, "readOnly": True}]
    if job.claim_name is not None:
        volume = _claim_volume(spec, volumes, job.claim_name)
        required.append({"name": volume, "mountPath": CHECKPOINT_FOLDER})

    paths = {mount["mountPath"] for mount in required}
    mounts[:] = [mount for mount in mounts if not isinstance(mount, dict) or _mount_path(mount) not in paths]
    taken = {_mount_path(mount) for mount in _objects(mounts)}
    if "/dev/shm" not in taken:
        # The container runtime's 64 MiB are too small for the batches of data loaders. Without a size limit
        # the volume may grow to the pod's memory limit, which it counts against.
        volume = _add_volume(volumes, "shm", {"emptyDir": {"medium": "Memory"}})
        required.append({"name": volume, "mountPath": "/dev/shm"})
    if "/tmp" not in taken and _section(worker, "securityContext").get("readOnlyRootFilesystem"):
        required.append({"name": _add_volume(volumes, "tmp", {"emptyDir": {}}), "mountPath": "/tmp"})
        if not worker.get("envFrom") and all(item.get("name") != "HOME" for item in worker["env"]):
            worker["env"].append({"name": "HOME", "value": "/tmp"})  # the parent of PyTorch's caches
    mounts.extend(required)


def _claim_volume(spec: Manifest, volumes: list[Any], claim_name: str) -> str:
    """Return the name of the pod's volume of a claim: the user's if it has one, or a new volume.

    The kubelet mounts a claim once per pod: a pod with two of its volumes stays in ContainerCreating.
    A volume that is read-only becomes writable, and the user's mounts of it read-only.
    """
    for volume in _objects(volumes):
        source = volume.get("persistentVolumeClaim")
        if not isinstance(source, dict) or source.get("claimName") != claim_name or not volume.get("name"):
            continue
        name = str(volume["name"])
        if source.pop("readOnly", None):
            for container in _all_containers(spec):
                mounts = container.get("volumeMounts")
                for mount in _objects(mounts if isinstance(mounts, list) else []):
                    if mount.get("name") == name:
                        mount["readOnly"] = True
        return name
    return _add_volume(volumes, "checkpoints", {"persistentVolumeClaim": {"claimName": claim_name}})


def _add_volume(volumes: list[Any], role: str, source: Manifest) -> str:
    """Add a volume and return its name."""
    name = _unused(f"adascale-{role}", {str(volume.get("name")) for volume in _objects(volumes)})
    volumes.append({"name": name} | source)
    return name


def _mount_path(mount: Mapping[str, Any]) -> str:
    return posixpath.normpath(str(mount.get("mountPath") or "/"))


def _unused(name: str, used: set[str]) -> str:
    candidate, number = name, 2
    while candidate in used:
        candidate, number = f"{name}-{number}", number + 1
    return candidate


def _share_volumes(spec: Manifest) -> None:
    """Let a program that is not root write to volumes that belong to root.

    Other volumes can be written to, or not at all, by everyone.
    """
    volumes = spec.get("volumes")
    pod = _section(spec, "securityContext")
    needed = any(
        _OWNED_VOLUMES & volume.keys() for volume in _objects(volumes if isinstance(volumes, list) else [])
    )
    if needed and pod.get("fsGroup") is None:
        pod["fsGroup"] = _FS_GROUP
        _fill(pod, "fsGroupChangePolicy", "OnRootMismatch")


# -- the Pod Security Standard `restricted` ----------------------------------------------------------------


def _restrict(spec: Manifest) -> None:
    """Meet the standard where the template sets nothing. The namespace enforces what the template sets."""
    pod = _section(spec, "securityContext")
    containers = _all_containers(spec)
    contexts = [pod, *(_section(container, "securityContext") for container in containers)]
    if not any(context.get("runAsUser") == 0 for context in contexts):
        _fill(pod, "runAsNonRoot", True)
    _fill(pod, "seccompProfile", {"type": "RuntimeDefault"})
    for container in containers:
        _fill(container, "terminationMessagePolicy", "FallbackToLogsOnError")
        context = _section(container, "securityContext")
        capabilities = _section(context, "capabilities")
        _fill(capabilities, "drop", ["ALL"])
        # The API server rejects `false` with these.
        added = capabilities.get("add")
        admin = isinstance(added, list) and ("SYS_ADMIN" in added or "CAP_SYS_ADMIN" in added)
        if not context.get("privileged") and not admin:
            _fill(context, "allowPrivilegeEscalation", False)


def pod_manifest(job: AdaScaleJob, pod: NewPod, *, single_node: bool = False) -> Manifest:
    """Return a pod of a replica."""
    template = build_pod_template(job, pod, single_node=single_node)
    metadata, added = template["metadata"], _metadata(job, f"{job.name}-{pod.rank}-{pod.attempt}")
    queue, digest = job.queue_of(extra=pod.extra), template_digest(job, single_node=single_node)
    queueing = job.queueing if queue is not None and not pod.extra else Queueing()
    template["spec"].pop("schedulingGroup", None)  # one of the template would wait for the pods of another
    if pod.gang is not None:
        template["spec"]["schedulingGroup"] = {"podGroupName": pod.gang}
    labels = {
        **queueing.labels,
        **({QUEUE_NAME: queue} if queue is not None else {}),
        **({POD_GROUP: job.group_name} if pod.group_size else {}),
        names.LABEL_JOB_UID: job.uid,
        names.LABEL_REPLICA: str(pod.rank),
        names.LABEL_ATTEMPT: str(pod.attempt),
        **({names.LABEL_EXTRA: "true"} if pod.extra else {}),
    }
    annotations = {
        **queueing.annotations,
        **({POD_GROUP_SIZE: str(pod.group_size)} if pod.group_size else {}),
        names.ANNOTATION_TEMPLATE: digest,
        **({names.ANNOTATION_ACCELERATOR: pod.accelerator} if pod.accelerator is not None else {}),
    }
    for field, values in (("labels", labels), ("annotations", annotations)):
        # A part of a wrong type stays: the API server names it.
        if isinstance(metadata, dict) and isinstance(metadata.get(field), dict):
            metadata[field].update(values)
    for field in ("name", "namespace", "ownerReferences"):
        metadata[field] = added[field]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def pod_group_manifest(job: AdaScaleJob, gang: str, pod_spec: ApiObject) -> Manifest:
    """Return the PodGroup by which the scheduler of Kubernetes places pods together, of their priority."""
    spec: Manifest = {"schedulingPolicy": {"gang": {"minCount": job.valid_job.core_replicas}}}
    return {
        "apiVersion": POD_GROUP_VERSION,
        "kind": "PodGroup",
        "metadata": _metadata(job, gang),
        "spec": spec | only(pod_spec, ["priorityClassName"]),
    }


def claim_manifest(job: AdaScaleJob) -> Manifest | None:
    """Return the claim that the operator creates. None if the user names a claim or a path."""
    checkpoint = job.valid_job.spec.checkpoint
    if checkpoint.path is not None or checkpoint.claim_name is not None or job.claim_name is None:
        return None
    spec: dict[str, Any] = {
        "accessModes": [checkpoint.access_mode or DEFAULT_ACCESS_MODE],
        "resources": {"requests": {"storage": str(checkpoint.storage or DEFAULT_STORAGE)}},
    }
    if checkpoint.storage_class_name is not None:
        spec["storageClassName"] = checkpoint.storage_class_name
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": _metadata(job, job.claim_name),
        "spec": spec,
    }


def _metadata(job: AdaScaleJob, name: str) -> Manifest:
    owner = {
        "apiVersion": names.GROUP_VERSION,
        "kind": names.KIND,
        "name": job.name,
        "uid": job.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
    return {
        "name": name,
        "namespace": job.namespace,
        "labels": job.labels,
        "ownerReferences": [owner],
    }
