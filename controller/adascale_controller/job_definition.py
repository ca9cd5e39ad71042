"""An AdaScaleJob as the rest of the controller uses it: validated, with its defaults, independent of YAML."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from adascale_controller.schema import (
    DEFAULT_ACCESS_MODE,
    DEFAULT_STORAGE,
    AdaScaleJobDocument,
    Container,
    PodTemplateSpec,
    worker_name,
)
from adascale_core import names
from adascale_core.batch.plans import require_valid_replicas
from adascale_core.checkpoint_manifest import normalized_url
from adascale_core.job_id import job_id
from adascale_core.messages.job_spec import JobSpec
from adascale_core.placement.replica_gpus import requested_gpus


@dataclass(frozen=True)
class CheckpointSettings:
    """Where a job's state is saved, and how often."""

    claim_name: str | None = None  # on a cluster only; a local run uses its state folder instead
    path: str | None = None
    url: str | None = None  # without the job's id
    credentials_secret: str | None = None  # on a cluster only
    # of the claim that the operator creates if no claim, path or URL is given; None for the cluster's default
    storage: str = DEFAULT_STORAGE
    storage_class_name: str | None = None
    access_mode: str = DEFAULT_ACCESS_MODE
    interval_seconds: float = names.DEFAULT_CHECKPOINT_INTERVAL


@dataclass(frozen=True)
class OpportunisticSettings:
    """How replicas beyond the smallest count run."""

    priority_class_name: str
    queue_name: str | None = None  # the LocalQueue of Kueue that admits them


@dataclass(frozen=True)
class JobDefinition:
    """A job as its AdaScaleJob defines it."""

    id: str
    spec: JobSpec  # what the metrics service and the decision use
    # the program and its arguments; empty for the image's entry point, on a cluster only
    command: tuple[str, ...] = ()
    # variables with a literal value
    env: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    working_dir: str | None = None
    spare_replicas: int = 0
    replica_limit: int | None = None  # as `kubectl scale` sets it
    suspend: bool = False
    backoff_limit: int = names.DEFAULT_BACKOFF_LIMIT
    max_restarts_without_progress: int = names.DEFAULT_MAX_RESTARTS_WITHOUT_PROGRESS
    active_deadline_seconds: int | None = None
    completion_deadline_seconds: int | None = None  # a target, after the creation of the job
    step_timeout_seconds: int | None = None  # without a step, until the replica behind restarts
    ttl_seconds_after_finished: int | None = None
    checkpoint: CheckpointSettings = CheckpointSettings()
    # descriptions of the environment variables that only a cluster can resolve
    cluster_only_env: tuple[str, ...] = ()
    gpus: int = 0  # of a replica
    request_nodes: bool | None = None  # None for the setting of the operator
    opportunistic: OpportunisticSettings | None = None

    @property
    def core_replicas(self) -> int:
        """The smallest count that the spec allows. With `opportunistic`, further replicas are extra pods."""
        return require_valid_replicas(self.spec.bounds, self.spec.min_replicas, self.spec.max_replicas)[0]

    @property
    def checkpoint_url(self) -> str | None:
        """The URL below which its checkpoints are saved; None if they are saved in a folder."""
        return None if self.checkpoint.url is None else normalized_url(f"{self.checkpoint.url}/{self.id}")

    @property
    def short_id(self) -> str:
        """The id without the namespace `default`."""
        return self.id.removeprefix(f"{names.DEFAULT_NAMESPACE}.")


def to_job(document: AdaScaleJobDocument) -> JobDefinition:
    """Return the job that a valid document specifies."""
    spec, checkpoint = document.spec, document.spec.checkpoint
    container = worker_container(spec.template)
    bounds = spec.local_bsz_bounds
    return JobDefinition(
        id=job_id(document.metadata.name, document.metadata.namespace),
        spec=JobSpec(
            batch_size=spec.batch_size,
            max_batch_size=spec.max_batch_size,
            local_bsz_bounds=(bounds.lower, bounds.upper) if bounds else None,
            min_replicas=spec.min_replicas,
            max_replicas=spec.max_replicas,
            scale_invariant_steps=spec.scale_invariant_steps,
            train_samples=spec.train_samples,
            efficiency_target=spec.efficiency_target,
            elastic_single_replica=spec.elastic_single_replica,
            processes_per_replica=spec.processes_per_replica,
        ),
        command=(*container.command, *container.args) if container.command else (),
        env=MappingProxyType(
            {variable.name: variable.value or "" for variable in container.env if variable.value_from is None}
        ),
        working_dir=container.working_dir,
        spare_replicas=spec.spare_replicas,
        replica_limit=spec.replica_limit,
        suspend=spec.suspend,
        backoff_limit=spec.backoff_limit,
        max_restarts_without_progress=spec.max_restarts_without_progress,
        active_deadline_seconds=spec.active_deadline_seconds,
        completion_deadline_seconds=spec.completion_deadline_seconds,
        step_timeout_seconds=spec.step_timeout_seconds,
        ttl_seconds_after_finished=spec.ttl_seconds_after_finished,
        checkpoint=CheckpointSettings(
            claim_name=checkpoint.claim_name,
            path=checkpoint.path,
            url=checkpoint.url,
            credentials_secret=checkpoint.credentials_secret,
            storage=DEFAULT_STORAGE if checkpoint.storage is None else str(checkpoint.storage),
            storage_class_name=checkpoint.storage_class_name,
            access_mode=checkpoint.access_mode or DEFAULT_ACCESS_MODE,
            interval_seconds=checkpoint.interval_seconds,
        ),
        cluster_only_env=tuple(_cluster_only_env(container)),
        request_nodes=spec.request_nodes,
        opportunistic=OpportunisticSettings(
            spec.opportunistic.priority_class_name, spec.opportunistic.queue_name
        )
        if spec.opportunistic is not None
        else None,
        gpus=requested_gpus((container.model_extra or {}).get("resources")),
    )


def worker_container(template: PodTemplateSpec) -> Container:
    """Return the container that trains."""
    containers = template.spec.containers
    name = worker_name([container.name for container in containers], template.metadata.annotations)
    return next(container for container in containers if container.name == name)


def trainer_environment(job: JobDefinition) -> dict[str, str]:
    """Return the environment variables that configure a trainer of `job`, without its checkpoint folder."""
    variables = {name: value for name, value in job.spec.environment().items() if value is not None}
    if job.spec.processes_per_replica is not None:
        variables[names.ENV_PROCESSES_PER_REPLICA] = str(job.spec.processes_per_replica)
    if job.step_timeout_seconds is not None:
        variables[names.ENV_STEP_TIMEOUT] = str(job.step_timeout_seconds)
    return {**variables, names.ENV_CHECKPOINT_INTERVAL: repr(job.checkpoint.interval_seconds)}


def _cluster_only_env(container: Container) -> Iterator[str]:
    for variable in container.env:
        if variable.value_from is not None:
            yield f"environment variable {variable.name} (valueFrom {', '.join(variable.value_from)})"
    if container.env_from:
        yield "the environment variables of envFrom"
