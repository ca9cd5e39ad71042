"""What the phases pass on: a failed placement from `schedule`, the actions from `reconcile` to `apply`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from adascale_core.messages.allocation import Allocation
from adascale_core.messages.job_spec import JobSpec

Status = dict[str, Any]
"""`status` of an AdaScaleJob, as JSON."""

Isolation = Callable[[str], AbstractContextManager[None]]
"""Takes a job id; its context logs the errors of that job and suppresses them."""


@dataclass(frozen=True)
class FailedPlacement:
    """A replica count that could not be placed.

    Args:
        count: the replica count.
        limit: the largest count that may be scheduled until `until`.
        reason, message: why the placement failed.
        until: when the count may be scheduled again, in seconds since 1970.
        capacity: how many replicas seemed to fit when the placement failed.
        pause: seconds from the failure to `until`.
    """

    count: int
    limit: int
    reason: str
    message: str
    until: float
    capacity: int
    pause: float


@dataclass(frozen=True)
class Event:
    """A Kubernetes Event about an AdaScaleJob."""

    reason: str
    message: str
    warning: bool = False


@dataclass(frozen=True)
class Actions:
    """The writes for one job. Each may be repeated without harm.

    Args:
        status: the new status.
        status_changed: whether the status differs from the current status in more than telemetry.
        telemetry_changed: whether the status differs from the current status at all.
        deregister: whether to delete the job of an earlier AdaScaleJob of this name from the metrics service.
        declare: the spec to declare at the metrics service.
        allocate: the allocation to request at the metrics service.
        create_claim: whether to create the job's own PersistentVolumeClaim.
        create_indexed_job: the parallelism of the Indexed Job to create.
        accelerator: the type of accelerator that its pods require. None if they require none.
        resize: the new parallelism of the Indexed Job; 0 suspends it.
        active_deadline_seconds: `activeDeadlineSeconds` of a resized Indexed Job. None for no deadline.
        delete_indexed_job: whether to delete the Indexed Job.
        delete_pods: names of pods to delete by force, together with the Job controller's finalizer.
        release_pods: names of pods that lose the Job controller's finalizer.
        delete_job: whether to delete the AdaScaleJob.
        events: the Events to record if the status is new.
    """

    status: Status
    status_changed: bool = True
    telemetry_changed: bool = True
    deregister: bool = False
    declare: JobSpec | None = None
    allocate: Allocation | None = None
    create_claim: bool = False
    create_indexed_job: int | None = None
    accelerator: str | None = None
    resize: int | None = None
    active_deadline_seconds: int | None = None
    delete_indexed_job: bool = False
    delete_pods: tuple[str, ...] = ()
    release_pods: tuple[str, ...] = ()
    delete_job: bool = False
    events: tuple[Event, ...] = ()

    @property
    def are_urgent(self) -> bool:
        """Whether they have more than telemetry."""
        changes = (self.declare, self.allocate, self.create_indexed_job, self.resize)
        return (
            self.status_changed
            or self.deregister
            or self.delete_indexed_job
            or self.delete_job
            or bool(self.delete_pods or self.release_pods)
            or any(change is not None for change in changes)
        )
