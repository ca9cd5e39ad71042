"""What the phases pass on: a failed placement from `schedule`, the actions from `reconcile` to `apply`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from adascale_controller.operator.types.conditions import Reason
from adascale_core.messages.allocation import Allocation
from adascale_core.messages.job_spec import JobSpec

Status = dict[str, Any]
"""`status` of an AdaScaleJob, as JSON."""


@dataclass(frozen=True)
class FailedPlacement:
    """A replica count that could not be placed."""

    count: int
    limit: int  # the largest count that may be scheduled until `until`
    reason: str
    message: str
    until: float  # when the count may be scheduled again, in seconds since 1970
    capacity: int  # how many replicas seemed to fit when the placement failed
    pause: float  # seconds from the failure to `until`


@dataclass(frozen=True)
class CapacityRequest:
    """A replica count that is requested although it does not fit."""

    count: int
    fitting: int  # the largest count that fits; 0 if none does
    # of the condition while its pods are not placed
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
    """The writes for one job. Each may be repeated without harm."""

    status: Status
    status_changed: bool = True  # whether the status differs from the current status
    # whether it differs in more than the fields of the last report and predictions, which change all the time
    status_is_urgent: bool = True
    # whether to delete the job of an earlier AdaScaleJob of this name from the metrics service
    deregister: bool = False
    declare: JobSpec | None = None  # the spec to declare at the metrics service
    allocate: Allocation | None = None  # the allocation to request at the metrics service
    create_claim: bool = False  # the job's own PersistentVolumeClaim
    create_indexed_job: int | None = None  # the parallelism of the Indexed Job to create
    accelerator: str | None = None  # the type that its pods require
    resize: int | None = None  # the new parallelism of the Indexed Job; 0 suspends it
    # of a resized Indexed Job; None for no deadline
    active_deadline_seconds: int | None = None
    delete_indexed_job: bool = False
    # the same for the Indexed Job of extra pods
    create_extra_job: int | None = None
    resize_extra_job: int | None = None
    delete_extra_job: bool = False
    # names of pods to delete by force, together with the Job controller's finalizer
    delete_pods: tuple[str, ...] = ()
    # names of pods to end because their worker has ended and other containers run on, with the Event
    # about each
    end_pods: tuple[tuple[str, Event], ...] = ()
    release_pods: tuple[str, ...] = ()  # names of pods that lose the Job controller's finalizer
    # uids of Indexed Jobs to change so that Kueue looks at the gates of their pods
    check_gates: tuple[str, ...] = ()
    # names of pods that stay when the Indexed Job is deleted, for one of another template
    hand_over_pods: tuple[str, ...] = ()
    adopts_pods: bool = False  # whether the created Indexed Job takes over pods that have no other controller
    retire_pods: tuple[str, ...] = ()  # names of pods to delete with their grace period
    delete_job: bool = False
    events: tuple[Event, ...] = ()  # the Events to record if the status is new

    @property
    def are_urgent(self) -> bool:
        """Whether they have more than a status that is not urgent."""
        changes = (
            self.declare,
            self.allocate,
            self.create_indexed_job,
            self.resize,
            self.create_extra_job,
            self.resize_extra_job,
        )
        return (
            self.status_is_urgent
            or self.deregister
            or self.delete_indexed_job
            or self.delete_extra_job
            or self.delete_job
            or bool(self.delete_pods or self.end_pods or self.release_pods)
            or bool(self.hand_over_pods or self.retire_pods or self.check_gates)
            or any(change is not None for change in changes)
        )
