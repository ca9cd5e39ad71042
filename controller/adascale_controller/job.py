"""An AdaScaleJob as the rest of the controller sees it: checked, and free of YAML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from adascale_core import names
from adascale_core.messages import JobSpec

DEFAULT_STORAGE = "1Gi"
DEFAULT_ACCESS_MODE = "ReadWriteOnce"


@dataclass(frozen=True)
class Checkpointing:
    """Where a job's state is saved, and how often.

    Args:
        claim_name: a volume claim of the job's namespace; a local run uses its state folder instead.
        path: a folder that every replica sees at this place.
        storage: where neither is given, the size of the claim that the operator makes, as Kubernetes has it.
        storage_class_name: of that claim; none: the cluster's default.
        access_mode: of that claim.
        interval_seconds: seconds between two checkpoints while training goes on undisturbed.
    """

    claim_name: str | None = None
    path: str | None = None
    storage: str = DEFAULT_STORAGE
    storage_class_name: str | None = None
    access_mode: str = DEFAULT_ACCESS_MODE
    interval_seconds: float = names.DEFAULT_CHECKPOINT_INTERVAL


@dataclass(frozen=True)
class Job:
    """What is asked for.

    Args:
        id: `<namespace>.<name>`.
        spec: what the metrics service is told of it.
        command: the program and its arguments; empty where the image's own is meant.
        env: the environment variables that the file gives a value.
        working_dir: where the program runs, if the file says so.
        replicas: how many replicas a person or an autoscaler wants at most for now, if any does.
        suspend: whether it is not to run for now.
        backoff_limit: how many times the program may fail before the job does.
        active_deadline_seconds: how long it may run, if bounded.
        ttl_seconds_after_finished: how long a cluster keeps it when it has ended, if bounded.
        checkpoint: where its state is saved.
        left_out: what the file asks for that only a cluster can give, in words.
    """

    id: str
    spec: JobSpec
    command: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    working_dir: str | None = None
    replicas: int | None = None
    suspend: bool = False
    backoff_limit: int = names.DEFAULT_BACKOFF_LIMIT
    active_deadline_seconds: int | None = None
    ttl_seconds_after_finished: int | None = None
    checkpoint: Checkpointing = Checkpointing()
    left_out: tuple[str, ...] = ()

    @property
    def short_id(self) -> str:
        """The id as one would type it: without the namespace `default`."""
        return self.id.removeprefix(f"{names.DEFAULT_NAMESPACE}.")


def trainer_environment(job: Job) -> dict[str, str]:
    """What a trainer of `job` is told by environment variables, besides where its checkpoints are."""
    told = {name: value for name, value in job.spec.environment().items() if value is not None}
    return {**told, names.ENV_CHECKPOINT_INTERVAL: repr(job.checkpoint.interval_seconds)}
