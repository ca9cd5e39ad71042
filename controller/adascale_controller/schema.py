"""What an AdaScaleJob may contain, as pydantic models of its YAML.

Only the shape: which fields there are, of which type, within which limits. What their values must be to
each other is the core's to say (`jobfile` asks it). A field without a value (`suspend:`) counts as left
out, as it does on a cluster. The pod template is Kubernetes' own and is passed through: of it only what
a local run reads is looked at.

`deploy/base/crd.yaml` says the same to the API server, field by field; tests hold the two together.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, field_validator, model_validator
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from adascale_core.names import (
    DEFAULT_BACKOFF_LIMIT,
    DEFAULT_CHECKPOINT_INTERVAL,
    DEFAULT_EFFICIENCY_TARGET,
    DEFAULT_NAMESPACE,
    MAX_BATCH_SIZE,
    MAX_NAME_LENGTH,
    MAX_REPLICAS,
    MAX_STEPS,
    InvalidJobIdError,
    job_id,
)

MAX_INTEGER = 2**31 - 1
"""Integers up to here are exact in any JSON reader."""
DNS_LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
OBJECT_NAME = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
"""What the names of most Kubernetes objects must be: a DNS subdomain."""
OBJECT_NAME_OR_EMPTY = rf"^({OBJECT_NAME[1:-1]})?$"

Samples = Annotated[int, Field(ge=1, le=MAX_BATCH_SIZE)]
Replicas = Annotated[int, Field(ge=1, le=MAX_REPLICAS)]
Count = Annotated[int, Field(ge=0, le=MAX_INTEGER)]

_NAME = re.compile(rf"(?=.{{1,{MAX_NAME_LENGTH}}}\Z){DNS_LABEL[1:-1]}\Z")
_SIZE = re.compile(r"[0-9]+([.][0-9]+)?([kMGTPE]|[KMGTPE]i)?\Z", re.ASCII)


def told(message: str) -> PydanticCustomError:
    """An error whose message is ready for the user; in braces pydantic would look for values."""
    return PydanticCustomError("told", "{message}", {"message": message})


def expected(what: str) -> PydanticCustomError:
    """An error that says what a value must be; what was got is still to be told."""
    return PydanticCustomError("expected", "{message}", {"message": what})


class _Section(BaseModel):
    """A part of the file in which each field is known."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, alias_generator=to_camel, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _leave_out_nulls(cls, value: Any) -> Any:
        # A field that there isn't is wrong without a value, too.
        if isinstance(value, dict):
            known = {field.alias for field in cls.model_fields.values()}
            return {key: member for key, member in value.items() if member is not None or key not in known}
        return value


class _Kubernetes(_Section):
    """A part whose fields are Kubernetes' own; those that are not named here pass through."""

    model_config = ConfigDict(extra="allow")


class LocalBszBounds(_Section):
    """Bounds of the batch on one replica, in samples."""

    lower: Samples
    upper: Samples


class Checkpoint(_Section):
    """Where state is saved, and how often.

    A volume claim, a folder that every replica sees, or, where neither is given, a claim that the operator
    makes: only then is there anything to say of its size, class and access mode.
    """

    claim_name: str | None = Field(default=None, max_length=253, pattern=OBJECT_NAME)
    path: str | None = Field(default=None, max_length=4096)
    storage: StrictInt | Annotated[StrictStr, Field(max_length=32)] | None = None
    storage_class_name: str | None = Field(default=None, max_length=253, pattern=OBJECT_NAME_OR_EMPTY)
    access_mode: Literal["ReadWriteOnce", "ReadWriteMany"] | None = None
    interval_seconds: float = Field(default=DEFAULT_CHECKPOINT_INTERVAL, gt=0)

    @field_validator("path")
    @classmethod
    def _from_the_root(cls, path: str) -> str:
        if not path.startswith("/"):
            raise expected("must be a path from the root, as in /state")
        return path

    @field_validator("storage", mode="before")
    @classmethod
    def _a_size(cls, storage: Any) -> Any:
        if isinstance(storage, str):
            right = bool(_SIZE.match(storage) and re.search("[1-9]", storage))
        else:
            right = isinstance(storage, int) and not isinstance(storage, bool) and 0 < storage < 2**63
        if not right:
            raise expected("must be a size, as in 10Gi, and more than 0")
        return storage

    @model_validator(mode="after")
    def _one_place(self) -> Checkpoint:
        if self.claim_name is not None and self.path is not None:
            raise told("has both claimName and path; state is saved at one place: give one of them")
        place = "claimName" if self.claim_name is not None else "path" if self.path is not None else None
        of_a_claim = {
            "storage": self.storage,
            "accessMode": self.access_mode,
            "storageClassName": self.storage_class_name,
        }
        useless = next((field for field, value in of_a_claim.items() if value is not None), None)
        if place and useless:
            raise told(
                f"has {place}, so no claim is made; that is what {useless} is for: leave it out, "
                f"or leave out {place}"
            )
        return self


class EnvVar(_Kubernetes):
    """An environment variable of a container."""

    name: str = Field(pattern=r"^[ -<>-~]+$")
    value: str | None = None
    value_from: dict[str, Any] | None = None


class Container(_Kubernetes):
    """A container of the pod template. On a cluster it also needs an image."""

    name: str = Field(max_length=63, pattern=DNS_LABEL)
    image: str | None = Field(default=None, min_length=1)
    command: list[str] = Field(default_factory=list)
    args: list[str] = Field(default_factory=list)
    env: list[EnvVar] = Field(default_factory=list)
    env_from: list[dict[str, Any]] = Field(default_factory=list)
    working_dir: str | None = None


class PodSpec(_Kubernetes):
    """The specification of a pod."""

    containers: list[Container] = Field(min_length=1)

    @field_validator("containers")
    @classmethod
    def _one_of_each_name(cls, containers: list[Container]) -> list[Container]:
        seen: set[str] = set()
        for container in containers:
            if container.name in seen:
                raise told(f"has two containers named {container.name}: each needs its own name")
            seen.add(container.name)
        return containers


class PodMetadata(_Kubernetes):
    """`metadata` of the pods."""

    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)

    @field_validator("labels", "annotations", mode="before")
    @classmethod
    def _leave_out_nulls_in(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: member for key, member in value.items() if member is not None}
        return value


class PodTemplate(_Section):
    """A PodTemplateSpec."""

    metadata: PodMetadata = Field(default_factory=PodMetadata)
    spec: PodSpec


class JobSection(_Section):
    """`spec` of an AdaScaleJob."""

    batch_size: Samples
    max_batch_size: Samples | None = None
    local_bsz_bounds: LocalBszBounds | None = None
    min_replicas: Replicas = 1
    max_replicas: Replicas
    replicas: int | None = Field(default=None, ge=0, le=MAX_REPLICAS)
    scale_invariant_steps: int | None = Field(default=None, ge=1, le=MAX_STEPS)
    efficiency_target: float = Field(default=DEFAULT_EFFICIENCY_TARGET, gt=0, le=1)
    suspend: bool = False
    backoff_limit: Count = DEFAULT_BACKOFF_LIMIT
    active_deadline_seconds: int | None = Field(default=None, ge=1, le=MAX_INTEGER)
    ttl_seconds_after_finished: Count | None = None
    checkpoint: Checkpoint = Checkpoint()
    template: PodTemplate


class Metadata(_Kubernetes):
    """`metadata` of any Kubernetes object."""

    name: str
    namespace: str = DEFAULT_NAMESPACE

    @field_validator("name")
    @classmethod
    def _valid_name(cls, name: str) -> str:
        if not _NAME.match(name):
            raise told(
                f"'{name}' is not valid: use lower case letters, digits and '-', beginning and ending with a "
                f"letter or digit, at most {MAX_NAME_LENGTH} of them"
            )
        return name

    @field_validator("namespace")
    @classmethod
    def _valid_namespace(cls, namespace: str) -> str:
        try:
            job_id("any", namespace)
        except InvalidJobIdError as error:
            raise told(str(error)) from None
        return namespace


class Document(_Section):
    """An AdaScaleJob. `status` is there in what `kubectl get -o yaml` prints, and of no interest here."""

    api_version: str
    kind: str
    metadata: Metadata
    spec: JobSection
    status: Any = None
