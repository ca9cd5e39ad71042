"""What an AdaScaleJob may contain, as pydantic models of its YAML.

Only the shape: which fields there are, of which type, within which limits. What their values must be to
each other is the core's to say (`jobfile` asks it). A field without a value (`suspend:`) counts as left
out, as it does on a cluster. The pod template is Kubernetes' own and is passed through: of it only what
a local run reads is looked at.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from adascale_core.names import (
    DEFAULT_BACKOFF_LIMIT,
    DEFAULT_CHECKPOINT_INTERVAL,
    DEFAULT_EFFICIENCY_TARGET,
    DEFAULT_NAMESPACE,
    MOST_REPLICAS,
    InvalidJobIdError,
    job_id,
)


def told(message: str) -> PydanticCustomError:
    """An error whose message is ready for the user; in braces pydantic would look for values."""
    return PydanticCustomError("told", "{message}", {"message": message})


def _require_job_id(name: str, namespace: str) -> None:
    try:
        job_id(name, namespace)
    except InvalidJobIdError as error:
        raise told(str(error)) from None


class _Section(BaseModel):
    """A part of the file in which each field is known."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, alias_generator=to_camel, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _leave_out_nulls(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: member for key, member in value.items() if member is not None}
        return value


class _Kubernetes(_Section):
    """A part whose fields are Kubernetes' own; those that are not named here pass through."""

    model_config = ConfigDict(extra="allow")


class LocalBszBounds(_Section):
    """Bounds of the batch on one replica, in samples."""

    lower: int = Field(ge=1)
    upper: int = Field(ge=1)


class Checkpoint(_Section):
    """Where state is saved: a volume claim, or a folder that every replica sees; and how often."""

    claim_name: str | None = Field(default=None, min_length=1)
    path: str | None = Field(default=None, min_length=1)
    interval_seconds: float = Field(default=DEFAULT_CHECKPOINT_INTERVAL, gt=0)

    @model_validator(mode="after")
    def _one_place(self) -> Checkpoint:
        if self.claim_name is not None and self.path is not None:
            raise told("has both claimName and path; state is saved at one place: give one of them")
        return self


class EnvVar(_Kubernetes):
    """An environment variable of a container."""

    name: str = Field(min_length=1, pattern=r"^[^=\x00]+$")
    value: str | None = None
    value_from: dict[str, Any] | None = None


class Container(_Kubernetes):
    """A container of the pod template."""

    name: str | None = None
    command: list[str] = Field(default_factory=list)
    args: list[str] = Field(default_factory=list)
    env: list[EnvVar] = Field(default_factory=list)
    env_from: list[Any] = Field(default_factory=list)
    working_dir: str | None = None


class PodSpec(_Kubernetes):
    """The specification of a pod."""

    containers: list[Container] = Field(min_length=1)


class PodTemplate(_Kubernetes):
    """A PodTemplateSpec."""

    spec: PodSpec


class JobSection(_Section):
    """`spec` of an AdaScaleJob."""

    batch_size: int = Field(ge=1)
    max_batch_size: int | None = Field(default=None, ge=1)
    local_bsz_bounds: LocalBszBounds | None = None
    min_replicas: int = Field(default=1, ge=1, le=MOST_REPLICAS)
    max_replicas: int = Field(ge=1, le=MOST_REPLICAS)
    scale_invariant_steps: int | None = Field(default=None, ge=1)
    efficiency_target: float = Field(default=DEFAULT_EFFICIENCY_TARGET, gt=0, le=1)
    suspend: bool = False
    backoff_limit: int = Field(default=DEFAULT_BACKOFF_LIMIT, ge=0)
    active_deadline_seconds: int | None = Field(default=None, ge=1)
    ttl_seconds_after_finished: int | None = Field(default=None, ge=0)
    checkpoint: Checkpoint = Checkpoint()
    template: PodTemplate


class Metadata(_Kubernetes):
    """`metadata` of any Kubernetes object."""

    name: str
    namespace: str = DEFAULT_NAMESPACE

    @field_validator("name")
    @classmethod
    def _valid_name(cls, name: str) -> str:
        _require_job_id(name, DEFAULT_NAMESPACE)
        return name

    @field_validator("namespace")
    @classmethod
    def _valid_namespace(cls, namespace: str) -> str:
        _require_job_id("any", namespace)
        return namespace


class Document(_Section):
    """An AdaScaleJob. `status` is there in what `kubectl get -o yaml` prints, and of no interest here."""

    api_version: str
    kind: str
    metadata: Metadata
    spec: JobSection
    status: Any = None
