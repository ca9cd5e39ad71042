"""The fields of an AdaScaleJob: their types, limits, defaults and descriptions, as pydantic models.

`adascale validate`, `adascale run` and the operator read jobs with these models, and `make crd` generates the
schema of the CustomResourceDefinition from them. They check each field by itself; the core checks the values
against each other (see `validation`). A field that is null counts as unset, as on a cluster. Of the pod
template only the fields that a local run reads are listed; all others are accepted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, field_validator, model_validator
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from adascale_core import names
from adascale_core.batch.plans import AUTO, Auto, require_valid_replicas
from adascale_core.checkpoint_manifest import normalized_url
from adascale_core.job_id import InvalidJobIdError, job_id, short_id
from adascale_core.messages.job_spec import JobSpec
from adascale_core.placement.replica_gpus import requested_gpus

DEFAULT_CONTAINER: Final = "kubectl.kubernetes.io/default-container"
"""The annotation of a pod that names the container which kubectl uses by default."""


MAX_INT32 = 2**31 - 1
DEFAULT_STORAGE = "1Gi"
DEFAULT_ACCESS_MODE = "ReadWriteOnce"
DNS_LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
DNS_SUBDOMAIN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
"""The names of most Kubernetes objects."""
DNS_SUBDOMAIN_OR_EMPTY = rf"^({DNS_SUBDOMAIN[1:-1]})?$"
QUANTITY = r"^[0-9]+([.][0-9]+)?([kMGTPE]|[KMGTPE]i)?$"
URL = r"^[a-z][a-z0-9+.-]*://[^/?#@\s]+(/[^?#\s]*)?$"
"""A URL with a bucket, and without credentials, which do not belong into a spec."""
Samples = Annotated[int, Field(ge=1, le=names.MAX_BATCH_SIZE)]
Replicas = Annotated[int, Field(ge=1, le=names.MAX_REPLICAS)]
Int32 = Annotated[int, Field(ge=0, le=MAX_INT32)]
INVALID_VALUE = "invalid_value"
"""The type of an error whose message lacks the value found."""
INVALID_VALUE_WITHOUT_INPUT = "invalid_value_without_input"
"""The type of an error whose message is complete."""
_JOB_NAME = re.compile(rf"(?=.{{1,{names.MAX_NAME_LENGTH}}}\Z){DNS_LABEL[1:-1]}\Z")
_QUANTITY = re.compile(rf"{QUANTITY[1:-1]}\Z", re.ASCII)


def worker_name(containers: Sequence[str], annotations: Mapping[str, Any]) -> str | None:
    """Return the name of the container that trains. None if it can't be known.

    It is the only container, the container named `worker`, or the container that the annotation
    `kubectl.kubernetes.io/default-container` names.
    """
    named = annotations.get(DEFAULT_CONTAINER)
    for name in (names.WORKER_CONTAINER, named):
        if name in containers:
            return name
    return containers[0] if len(containers) == 1 else None


def find_worker(template: Mapping[str, Any]) -> int:
    """Return the index of the container that trains, in a pod template as JSON that was validated."""
    containers = [str(container.get("name") or "") for container in template["spec"]["containers"]]
    annotations = (template.get("metadata") or {}).get("annotations") or {}
    name = worker_name(containers, annotations)
    return containers.index(name) if name is not None else 0


def _invalid_value(requirement: str) -> PydanticCustomError:
    """Return an error that says what the value must be; the value found is appended to it."""
    return PydanticCustomError(INVALID_VALUE, "{message}", {"message": requirement})


def _invalid(message: str) -> PydanticCustomError:
    """Return an error with a complete message."""
    return PydanticCustomError(INVALID_VALUE_WITHOUT_INPUT, "{message}", {"message": message})


class _ClosedModel(BaseModel):
    """An object that may have only the fields listed here."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, alias_generator=to_camel, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any) -> Any:
        # Not those of unknown fields, which are errors also when they are null.
        if isinstance(value, dict):
            fields = {field.alias for field in cls.model_fields.values()}
            return {key: member for key, member in value.items() if member is not None or key not in fields}
        return value


class _OpenModel(_ClosedModel):
    """An object of the Kubernetes API, which may have fields that are not listed here."""

    model_config = ConfigDict(extra="allow")


class LocalBszBounds(_ClosedModel):
    """Bounds of the batch on one replica, in samples."""

    lower: Samples = Field(description="The smallest batch on one replica.")
    upper: StrictInt | Auto = Field(
        default=AUTO,
        description="The largest batch on one replica, or auto: what fits into memory, up to "
        "maxBatchSize, which is found in training.",
    )

    @field_validator("upper", mode="before")
    @classmethod
    def _samples_or_auto(cls, upper: Any) -> Any:
        is_integer = isinstance(upper, int) and not isinstance(upper, bool)
        if upper != AUTO and not (is_integer and 1 <= upper <= names.MAX_BATCH_SIZE):
            raise _invalid_value(f"must be an integer from 1 to {names.MAX_BATCH_SIZE} or {AUTO}")
        return upper


class Checkpoint(_ClosedModel):
    """Where state is saved, and how often."""

    claim_name: str | None = Field(
        default=None,
        max_length=253,
        pattern=DNS_SUBDOMAIN,
        description="A PersistentVolumeClaim in the job's namespace. Every replica mounts it.",
    )
    path: str | None = Field(
        default=None,
        max_length=4096,
        description="An absolute path at which every replica sees the same folder, through a volume of the "
        "pod template.",
    )
    url: str | None = Field(
        default=None,
        max_length=2048,
        pattern=URL,
        description="The URL of an object store, such as s3://bucket/prefix. The job's own prefix, its "
        "namespace and name, is added to it. Replicas then need no common volume.",
    )
    credentials_secret: str | None = Field(
        default=None,
        max_length=253,
        pattern=DNS_SUBDOMAIN,
        description="With url: a Secret in the job's namespace, whose keys become environment variables of "
        "the worker, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY. On one machine, the environment of "
        "adascale run is used.",
    )
    storage: StrictInt | Annotated[StrictStr, Field(max_length=32)] | None = Field(
        default=None,
        description="The size of the PersistentVolumeClaim that the operator creates, such as 10Gi. "
        f"Defaults to {DEFAULT_STORAGE}.",
    )
    storage_class_name: str | None = Field(
        default=None,
        max_length=253,
        pattern=DNS_SUBDOMAIN_OR_EMPTY,
        description="The storage class of the PersistentVolumeClaim that the operator creates. Defaults to "
        "the cluster's default class; an empty string selects no class.",
    )
    access_mode: Literal["ReadWriteOnce", "ReadWriteMany"] | None = Field(
        default=None,
        description="The access mode of the PersistentVolumeClaim that the operator creates. Defaults to "
        f"{DEFAULT_ACCESS_MODE}, with which all replicas run on one node.",
    )
    interval_seconds: float = Field(
        default=names.DEFAULT_CHECKPOINT_INTERVAL,
        gt=0,
        description="Seconds between two periodic checkpoints; greater than 0.",
    )

    @field_validator("path")
    @classmethod
    def _absolute(cls, path: str) -> str:
        if not path.startswith("/"):
            raise _invalid_value("must be an absolute path such as /state")
        return path

    @field_validator("storage", mode="before")
    @classmethod
    def _positive_quantity(cls, storage: Any) -> Any:
        if isinstance(storage, str):
            valid = bool(_QUANTITY.match(storage) and re.search("[1-9]", storage))
        else:
            valid = isinstance(storage, int) and not isinstance(storage, bool) and 0 < storage < 2**63
        if not valid:
            raise _invalid_value("must be a positive quantity such as 10Gi")
        return storage

    @model_validator(mode="after")
    def _one_location(self) -> Checkpoint:
        locations = {"claimName": self.claim_name, "path": self.path, "url": self.url}
        used = [field for field, value in locations.items() if value is not None]
        if len(used) > 1:
            raise _invalid(f"{' and '.join(used[:2])} are both set; set at most one of them")
        location = used[0] if used else None
        if self.credentials_secret is not None and self.url is None:
            raise _invalid("credentialsSecret applies only to url: set url, or remove credentialsSecret")
        claim_settings = {
            "storage": self.storage,
            "accessMode": self.access_mode,
            "storageClassName": self.storage_class_name,
        }
        unused = next((field for field, value in claim_settings.items() if value is not None), None)
        if location and unused:
            raise _invalid(
                f"{unused} applies only to a PersistentVolumeClaim that the operator creates, but "
                f"{location} is set: remove {unused} or {location}"
            )
        return self


class Opportunistic(_ClosedModel):
    """Where replicas beyond the smallest count run, which may be taken at any time."""

    priority_class_name: str = Field(
        max_length=253,
        pattern=DNS_SUBDOMAIN,
        description="The PriorityClass of the extra pods. Its priority must be lower than that of the other "
        "pods, which is the priority of the pod template.",
    )
    queue_name: str | None = Field(
        default=None,
        max_length=253,
        pattern=DNS_SUBDOMAIN,
        description="The LocalQueue of Kueue that admits the extra pods. Without it, Kueue has no part in "
        "them.",
    )


class EnvVar(_OpenModel):
    """An environment variable. All fields of a Kubernetes EnvVar are allowed."""

    name: str = Field(pattern=r"^[ -<>-~]+$", description="The variable's name.")
    value: str | None = Field(default=None, description="The variable's value.")
    value_from: dict[str, Any] | None = Field(
        default=None, description="The source of the variable's value, on a cluster only."
    )


class Container(_OpenModel):
    """A container. All fields of a Kubernetes Container are allowed."""

    name: str = Field(max_length=63, pattern=DNS_LABEL, description="The container's name.")
    image: str | None = Field(
        default=None,
        min_length=1,
        description="The container's image, required on a cluster. A run on one machine does not use it.",
    )
    command: list[str] = Field(
        default_factory=list,
        description="The training program. Defaults to the image's entry point on a cluster; required in a "
        "run on one machine.",
    )
    args: list[str] = Field(default_factory=list, description="Arguments of the training program.")
    env: list[EnvVar] = Field(default_factory=list, description="Environment variables.")
    env_from: list[dict[str, Any]] = Field(
        default_factory=list, description="Sources of more environment variables, on a cluster only."
    )
    working_dir: str | None = Field(default=None, description="The working directory of the program.")


class PodSpec(_OpenModel):
    """The specification of the pods. All fields of a Kubernetes PodSpec are allowed."""

    containers: list[Container] = Field(
        min_length=1,
        description="The containers. If there are several, the one named worker trains, or the one that the "
        "annotation kubectl.kubernetes.io/default-container of the template names.",
    )

    @field_validator("containers")
    @classmethod
    def _unique_names(cls, containers: list[Container]) -> list[Container]:
        names: set[str] = set()
        for container in containers:
            if container.name in names:
                raise _invalid(f"container names must be unique; {container.name} is used twice")
            names.add(container.name)
        return containers


class PodMetadata(_OpenModel):
    """Labels and annotations of the pods."""

    labels: dict[str, str] = Field(default_factory=dict, description="Labels of the pods.")
    annotations: dict[str, str] = Field(default_factory=dict, description="Annotations of the pods.")

    @field_validator("labels", "annotations", mode="before")
    @classmethod
    def _drop_null_entries(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: member for key, member in value.items() if member is not None}
        return value


class PodTemplateSpec(_ClosedModel):
    """A template of the pods that train."""

    metadata: PodMetadata = Field(
        default_factory=PodMetadata, description="Labels and annotations of the pods."
    )
    spec: PodSpec = Field(
        description="The specification of the pods. All fields of a Kubernetes PodSpec are allowed."
    )

    @model_validator(mode="after")
    def _known_worker(self) -> PodTemplateSpec:
        found = [container.name for container in self.spec.containers]
        if worker_name(found, self.metadata.annotations) is None:
            raise _invalid(
                f"of the {len(found)} containers ({', '.join(found)}) none is named {names.WORKER_CONTAINER}"
                ": give the container that trains this name, or name it in the annotation "
                f"{DEFAULT_CONTAINER} of spec.template.metadata"
            )
        return self


class AdaScaleJobSpec(_ClosedModel):
    """The specification of the job."""

    batch_size: Samples = Field(
        description="The global batch size, in samples, that the learning rate and its schedule were tuned "
        "for. Immutable."
    )
    max_batch_size: Samples | None = Field(
        default=None,
        description="The largest global batch size, in samples. If neither maxBatchSize nor localBszBounds "
        "is set, the global batch size stays batchSize.",
    )
    local_bsz_bounds: LocalBszBounds | None = Field(
        default=None, description="Bounds of the batch on one replica, in samples."
    )
    min_replicas: Replicas = Field(default=1, description="The fewest replicas that the job may run on.")
    max_replicas: Replicas = Field(description="The most replicas that the job may run on.")
    processes_per_replica: int | None = Field(
        default=None,
        ge=1,
        le=names.MAX_REPLICAS,
        description="The number of processes of a replica, for a model that the program shards over them "
        "with fully_shard(model, mesh=trainer.mesh). Each uses one GPU, and they divide the batch of the "
        "replica equally. If unset, a replica is one process with the whole model. A change replaces all "
        "pods.",
    )
    spare_replicas: int = Field(
        default=0,
        ge=0,
        le=names.MAX_REPLICAS,
        description="The number of replicas that are started beyond those that train, and wait with their "
        "model built. A spare takes the place of a lost replica at the next step, and the replacement of "
        "that is the next spare. Each takes the resources of a replica.",
    )
    replica_limit: int | None = Field(
        default=None,
        ge=0,
        le=names.MAX_REPLICAS,
        description="An upper limit on the replicas that a person or an autoscaler sets with the scale "
        "subresource, as `kubectl scale` does. The job may run on fewer; with 0 it does not run. If it "
        "is less than the smallest valid count, that count is the limit. Not limited if unset; an autoscaler "
        "that reads the current value needs it set.",
    )
    request_nodes: bool | None = Field(
        default=None,
        description="Whether replicas that do not fit are requested, so that an autoscaler adds nodes for "
        "their pending pods: the fewest that the job can run on, or one step of growth. On a cluster only. "
        "Defaults to the operator's option --request-nodes.",
    )
    opportunistic: Opportunistic | None = Field(
        default=None,
        description="Runs the smallest count of replicas, the core, as the pod template says, and all "
        "further replicas as extra pods of a lower priority. Extra pods may be taken at any time, which "
        "costs no step. On a cluster only. A change replaces the pods.",
    )
    scale_invariant_steps: int | None = Field(
        default=None,
        ge=1,
        le=names.MAX_STEPS,
        description="The progress at which training ends, in steps at batchSize. A step of a larger batch "
        "adds its gain to the progress. If unset, the program decides when training ends.",
    )
    train_samples: int | None = Field(
        default=None,
        ge=1,
        le=names.MAX_STEPS,
        description="The samples after which training ends, within a batch, in place of scaleInvariantSteps. "
        "Progress is then the samples over batchSize, and a larger batch saves steps and no samples.",
    )
    elastic_single_replica: bool = Field(
        default=False,
        description="Whether the batch of a single replica may be larger than batchSize, by accumulation, "
        "where that is faster.",
    )
    efficiency_target: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="The efficiency (gain divided by scale) that a batch size needs while step times have "
        "not been measured, and always if the length of training is in samples; greater than 0, at most 1. "
        f"If unset, {names.DEFAULT_EFFICIENCY_TARGET}; if the length is in samples, "
        f"{names.DEFAULT_EFFICIENCY_TARGET_OF_SAMPLES}.",
    )
    suspend: bool = Field(
        default=False,
        description="Whether the job is suspended. Its state is saved before its pods are deleted.",
    )
    backoff_limit: Int32 = Field(
        default=names.DEFAULT_BACKOFF_LIMIT,
        description="The number of failures of the program that are retried before the job fails. "
        "Disruptions, such as the loss of a node, and changes of the replica count are not failures.",
    )
    max_restarts_without_progress: Int32 = Field(
        default=names.DEFAULT_MAX_RESTARTS_WITHOUT_PROGRESS,
        description="The number of restarts after losses, such as by a memory limit, that are made without "
        "a training step in between before the job fails.",
    )
    active_deadline_seconds: int | None = Field(
        default=None,
        ge=1,
        le=MAX_INT32,
        description="Seconds after its start at which an unfinished job fails. Not limited if unset.",
    )
    completion_deadline_seconds: int | None = Field(
        default=None,
        ge=1,
        le=MAX_INT32,
        description="Seconds after its creation within which the job should be complete: a target. A job "
        "that needs more replicas for that gets them before others, if any count meets it. The condition "
        "DeadlineFeasible says whether it can be met. A job that misses it goes on. In a run on one machine "
        "the seconds count from the start of the run.",
    )
    step_timeout_seconds: int | None = Field(
        default=None,
        ge=1,
        le=MAX_INT32,
        description="Seconds without an optimizer step after which the replica that is behind is restarted. "
        "It gets the state from the other replicas, or from the last checkpoint if no other has it. "
        "Evaluation inside the data loop counts. Not limited if unset. A change replaces all pods.",
    )
    ttl_seconds_after_finished: Int32 | None = Field(
        default=None,
        description="Seconds after its end at which the job is deleted, with all objects that belong to "
        "it. If unset, the job is not deleted.",
    )
    checkpoint: Checkpoint = Field(
        default=Checkpoint(),
        description="Where state is saved: in the PersistentVolumeClaim claimName, in the folder path, at "
        "the url of an object store, or, if none is set, in a PersistentVolumeClaim named <job>-checkpoints "
        "that the operator creates. Immutable.",
    )
    template: PodTemplateSpec = Field(
        description="A template of the pods that train, as in a Deployment. The operator adds what it "
        "needs and overwrites none of these fields."
    )

    @model_validator(mode="after")
    def _one_end(self) -> AdaScaleJobSpec:
        if self.scale_invariant_steps is not None and self.train_samples is not None:
            raise _invalid("scaleInvariantSteps and trainSamples are both set; set at most one of them")
        return self

    @model_validator(mode="after")
    def _tried_with_spares(self) -> AdaScaleJobSpec:
        if self.spare_replicas and self.opportunistic is not None:
            raise _invalid(
                "spareReplicas and opportunistic are both set, which was not tried; set at most one of them"
            )
        return self


class Metadata(_OpenModel):
    """`metadata` of a Kubernetes object."""

    name: str
    namespace: str = names.DEFAULT_NAMESPACE

    @field_validator("name")
    @classmethod
    def _valid_name(cls, name: str) -> str:
        if not _JOB_NAME.match(name):
            raise _invalid_value(
                "must consist of lower case letters, digits and '-', start and end with a letter or digit, "
                f"and have at most {names.MAX_NAME_LENGTH} characters"
            )
        return name

    @field_validator("namespace")
    @classmethod
    def _valid_namespace(cls, namespace: str) -> str:
        try:
            job_id("any", namespace)
        except InvalidJobIdError as error:
            raise _invalid(str(error)) from None
        return namespace


class JobDefinition(_ClosedModel):
    """An AdaScaleJob. `status` is accepted, since `kubectl get -o yaml` prints it, and not used."""

    api_version: str
    kind: str
    metadata: Metadata
    spec: AdaScaleJobSpec
    status: Any = None

    @cached_property
    def id(self) -> str:
        """`<namespace>.<name>`."""
        return job_id(self.metadata.name, self.metadata.namespace)

    @property
    def short_id(self) -> str:
        """The id without the namespace `default`."""
        return short_id(self.id)

    @cached_property
    def declaration(self) -> JobSpec:
        """What is declared to the metrics service, and what the decision uses."""
        spec, bounds = self.spec, self.spec.local_bsz_bounds
        known = {each.name: getattr(spec, each.name) for each in fields(JobSpec) if hasattr(spec, each.name)}
        return JobSpec(**known | {"local_bsz_bounds": (bounds.lower, bounds.upper) if bounds else None})

    @cached_property
    def core_replicas(self) -> int:
        """The smallest count that the spec allows. With `opportunistic`, further replicas are extra pods."""
        spec = self.declaration
        return require_valid_replicas(spec.bounds, spec.min_replicas, spec.max_replicas)[0]

    @property
    def checkpoint_url(self) -> str | None:
        """The URL below which its checkpoints are saved; None if they are saved in a folder."""
        url = self.spec.checkpoint.url
        return None if url is None else normalized_url(f"{url}/{self.id}")

    @property
    def worker(self) -> Container:
        """The container that trains."""
        containers, metadata = self.spec.template.spec.containers, self.spec.template.metadata
        name = worker_name([container.name for container in containers], metadata.annotations)
        return next(container for container in containers if container.name == name)

    @property
    def gpus(self) -> int:
        """The GPUs of a replica."""
        return requested_gpus((self.worker.model_extra or {}).get("resources"))

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that configure a trainer, without its checkpoint folder."""
        processes, timeout = self.spec.processes_per_replica, self.spec.step_timeout_seconds
        variables = {
            **self.declaration.environment(),
            names.ENV_PROCESSES_PER_REPLICA: None if processes is None else str(processes),
            names.ENV_STEP_TIMEOUT: None if timeout is None else str(timeout),
            names.ENV_CHECKPOINT_INTERVAL: repr(self.spec.checkpoint.interval_seconds),
        }
        return {name: value for name, value in variables.items() if value is not None}
