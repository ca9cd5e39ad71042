"""An AdaScaleJob as the API server has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Self

from adascale_controller.job import Job, to_job
from adascale_controller.operator.places import why_not_shared
from adascale_controller.validation import validate_document
from adascale_core import names
from adascale_core.messages import Allocation


def seconds(timestamp: str | None) -> float | None:
    """A time of the Kubernetes API in seconds since 1970."""
    return None if timestamp is None else datetime.fromisoformat(timestamp).timestamp()


def timestamp(moment: float) -> str:
    """Seconds since 1970 as a time of the Kubernetes API."""
    return datetime.fromtimestamp(int(moment), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True)
class ElasticJob:
    """An AdaScaleJob.

    Args:
        namespace, name, uid: which one.
        generation: of its spec; rises with each edit.
        created_at: seconds since 1970.
        deleting: whether it is on its way out.
        job: its spec, where it is valid.
        invalid: why it isn't, in words.
        template: its pod template, as it was given.
        status: as it was last written.
    """

    namespace: str
    name: str
    uid: str
    generation: int
    created_at: int
    deleting: bool
    job: Job | None
    invalid: str | None = None
    template: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    status: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    @classmethod
    def read(cls, raw: Mapping[str, Any], specs: SpecReader) -> Self:
        """The job in an object of the API."""
        meta = raw["metadata"]
        spec = raw.get("spec") or {}
        job, invalid = specs.read(raw)
        return cls(
            namespace=meta["namespace"],
            name=meta["name"],
            uid=meta["uid"],
            generation=meta["generation"],
            created_at=int(seconds(meta["creationTimestamp"]) or 0),
            deleting="deletionTimestamp" in meta,
            job=job,
            invalid=invalid,
            template=spec.get("template") or {},
            status=raw.get("status") or {},
        )

    @property
    def id(self) -> str:
        """The job id, `<namespace>.<name>`."""
        return f"{self.namespace}.{self.name}"

    @property
    def recorded(self) -> Allocation | None:
        """The newest allocation that the status tells of."""
        told = self.status.get("allocation")
        return Allocation(told["generation"], told["replicas"]) if told else None

    @property
    def valid(self) -> Job:
        """Its spec, where it is known to be valid."""
        assert self.job is not None
        return self.job


class SpecReader:
    """Reads specs, each generation of each job once: reading takes about a millisecond."""

    def __init__(self) -> None:
        self._read: dict[str, tuple[int, Job | None, str | None]] = {}

    def read(self, raw: Mapping[str, Any]) -> tuple[Job | None, str | None]:
        """The spec of an object of the API if it is valid, or why it isn't."""
        meta = raw["metadata"]
        known = self._read.get(meta["uid"])
        if known is None or known[0] != meta["generation"]:
            known = (meta["generation"], *_parse(raw))
            self._read[meta["uid"]] = known
        return known[1], known[2]

    def refuse(self, job: ElasticJob, reason: str) -> None:
        """Take in that the API server refuses what is made from a job's spec."""
        self._read[job.uid] = (job.generation, None, reason)

    def forget_all_but(self, uids: set[str]) -> None:
        """Forget jobs that are gone."""
        for uid in self._read.keys() - uids:
            del self._read[uid]


def _parse(raw: Mapping[str, Any]) -> tuple[Job | None, str | None]:
    content = {
        "apiVersion": names.GROUP_VERSION,
        "kind": names.KIND,
        "metadata": {"name": raw["metadata"]["name"], "namespace": raw["metadata"]["namespace"]},
        "spec": raw.get("spec"),
    }
    examined = validate_document(content)
    if isinstance(examined, list):
        return None, "; ".join(map(str, examined))
    job = to_job(examined)
    path = job.checkpoint.path
    if path is not None and job.spec.max_replicas > 1:
        reason = why_not_shared(raw["spec"]["template"], path)
        if reason is not None:
            return None, (
                f"spec.checkpoint.path: {reason}, so replicas would not find what others have saved. Have "
                "spec.template mount a volume there that all replicas share, or give "
                "spec.checkpoint.claimName instead"
            )
    return job, None
