"""How an AdaScaleJob asks Kueue to queue it: names of Kueue's API, and what is carried to the Indexed Job.

Kueue knows Jobs, and not AdaScaleJobs. So its labels and annotations of an AdaScaleJob are carried to the
Indexed Job, which Kueue suspends and resumes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Self

from adascale_controller.operator.types.kubernetes import ApiObject
from adascale_core import names

KUEUE_GROUP: Final = "kueue.x-k8s.io"
QUEUE_NAME: Final = names.LABEL_QUEUE
ELASTIC_JOB: Final = f"{KUEUE_GROUP}/elastic-job"
"""Annotation of a Job whose replica count may change while it is admitted, and the scheduling gate of its
pods until their quota is reserved."""
_PREFIXES: Final = (f"{KUEUE_GROUP}/", f"provreq.{KUEUE_GROUP}/")


@dataclass(frozen=True)
class Queueing:
    """The labels and annotations of Kueue on an AdaScaleJob."""

    labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    annotations: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    @classmethod
    def read(cls, metadata: ApiObject) -> Self:
        """Return those in the metadata of an object."""
        return cls(_of_kueue(metadata.get("labels") or {}), _of_kueue(metadata.get("annotations") or {}))

    @classmethod
    def of_extra_pods(cls, queue: str | None) -> Self:
        """Return those of the Job of extra pods, whose count changes while it is admitted."""
        return cls() if queue is None else cls({QUEUE_NAME: queue}, {ELASTIC_JOB: "true"})

    @property
    def queue(self) -> str | None:
        """The LocalQueue. None if the job is not queued."""
        return self.labels.get(QUEUE_NAME) or None

    @property
    def request(self) -> str | None:
        """What can't be changed in a Job that runs, as a text: the queue, and whether it is elastic."""
        if self.queue is None:
            return None
        return f"{self.queue},elastic" if self.annotations.get(ELASTIC_JOB) == "true" else self.queue


def _of_kueue(fields: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in sorted(fields.items()) if name.startswith(_PREFIXES)}
