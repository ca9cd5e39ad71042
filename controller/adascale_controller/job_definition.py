"""An AdaScaleJob as the rest of the controller uses it: validated, with its defaults, independent of YAML."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from adascale_controller.schema import (
    AdaScaleJobDocument,
    AdaScaleJobSpec,
    Checkpoint,
    Container,
    Opportunistic,
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
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    # descriptions of the environment variables that only a cluster can resolve
    cluster_only_env: tuple[str, ...] = ()
    gpus: int = 0  # of a replica
    request_nodes: bool | None = None  # None for the setting of the operator
    opportunistic: Opportunistic | None = None

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
    container, bounds = worker_container(document.spec.template), document.spec.local_bsz_bounds
    sizes = _members_of(JobSpec, document.spec)
    sizes["local_bsz_bounds"] = (bounds.lower, bounds.upper) if bounds else None
    return JobDefinition(
        **_members_of(JobDefinition, document.spec),
        id=job_id(document.metadata.name, document.metadata.namespace),
        spec=JobSpec(**sizes),
        command=(*container.command, *container.args) if container.command else (),
        env=MappingProxyType(
            {variable.name: variable.value or "" for variable in container.env if variable.value_from is None}
        ),
        working_dir=container.working_dir,
        cluster_only_env=tuple(_cluster_only_env(container)),
        gpus=requested_gpus((container.model_extra or {}).get("resources")),
    )


def _members_of(record: type[JobDefinition | JobSpec], spec: AdaScaleJobSpec) -> dict[str, Any]:
    """Return the fields of a record that a spec has by the same names."""
    return {each.name: getattr(spec, each.name) for each in fields(record) if hasattr(spec, each.name)}


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
