"""Definitions of jobs, for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pydantic.alias_generators import to_camel

from adascale_controller.schema import AdaScaleJobSpec, JobDefinition, LocalBszBounds
from adascale_core import names
from adascale_core.job_id import parse_job_id
from adascale_core.messages.job_spec import JobSpec


def define(
    job_id: str,
    spec: JobSpec,
    command: Sequence[str] = ("python", "train.py"),
    *,
    container: Mapping[str, Any] = MappingProxyType({}),
    **fields: Any,
) -> JobDefinition:
    """Return a job with a declaration; `fields` are others of its spec, with their names in Python."""
    worker = {"name": "worker", "command": list(command), **container}
    content = {"template": {"spec": {"containers": [worker]}}}
    members = {to_camel(name): value for name, value in {**_declared(spec), **fields}.items()}
    return _job(job_id, AdaScaleJobSpec.model_validate(content | members))


def changed(job: JobDefinition, spec: JobSpec | None = None, **fields: Any) -> JobDefinition:
    """Return a job with another declaration, or other fields of its spec, with their names in Python."""
    declared = {} if spec is None else _declared(spec)
    return _job(job.id, job.spec.model_copy(update={**declared, **fields}))


def _job(job_id: str, spec: AdaScaleJobSpec) -> JobDefinition:
    namespace, _, name = parse_job_id(job_id).partition(".")
    content = {"apiVersion": names.GROUP_VERSION, "kind": names.KIND, "spec": spec}
    return JobDefinition.model_validate(content | {"metadata": {"name": name, "namespace": namespace}})


def _declared(spec: JobSpec) -> dict[str, Any]:
    members = {name: value for name, value in vars(spec).items() if name in AdaScaleJobSpec.model_fields}
    if spec.local_bsz_bounds is not None:
        lower, upper = spec.local_bsz_bounds
        members["local_bsz_bounds"] = LocalBszBounds(lower=lower, upper=upper)
    return members
