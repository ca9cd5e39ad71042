"""What the phases pass on: a failed placement from `schedule`, the actions from `reconcile` to `apply`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from adascale_controller.operator.types.conditions import Reason
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
class CapacityRequest:
    """A replica count that is requested although it does not fit.

    Args:
        count: the replica count.
        fitting: the largest count that fits; 0 if none does.
        reason, message: those of the condition while its pods are not placed.
    """

    count: int
    fitting: int
    reason: Reason
    message: str


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
        create_extra_job, resize_extra_job, delete_extra_job: the same for the Indexed Job of extra pods.
        delete_pods: names of pods to delete by force, together with the Job controller's finalizer.
        end_pods: names of pods to end because their worker has ended and other containers run on, with the
            Event about each.
        release_pods: names of pods that lose the Job controller's finalizer.
        check_gates: uids of Indexed Jobs to change so that Kueue looks at the gates of their pods.
        hand_over_pods: names of pods that stay when the Indexed Job is deleted, for one of another template.
        adopts_pods: whether the created Indexed Job takes over pods that have no other controller.
        retire_pods: names of pods to delete with their grace period.
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
    create_extra_job: int | None = None
    resize_extra_job: int | None = None
    delete_extra_job: bool = False
    delete_pods: tuple[str, ...] = ()
    end_pods: tuple[tuple[str, Event], ...] = ()
    release_pods: tuple[str, ...] = ()
    check_gates: tuple[str, ...] = ()
    hand_over_pods: tuple[str, ...] = ()
    adopts_pods: bool = False
    retire_pods: tuple[str, ...] = ()
    delete_job: bool = False
    events: tuple[Event, ...] = ()

    @property
    def are_urgent(self) -> bool:
        """Whether they have more than telemetry."""
        changes = (
            self.declare,
            self.allocate,
            self.create_indexed_job,
            self.resize,
            self.create_extra_job,
            self.resize_extra_job,
        )
        return (
            self.status_changed
            or self.deregister
            or self.delete_indexed_job
            or self.delete_extra_job
            or self.delete_job
            or bool(self.delete_pods or self.end_pods or self.release_pods)
            or bool(self.hand_over_pods or self.retire_pods or self.check_gates)
            or any(change is not None for change in changes)
        )
