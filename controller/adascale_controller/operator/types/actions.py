"""What the phases pass on: the count from `schedule`, the actions from `reconcile` to `apply`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from types import MappingProxyType
from typing import Any

from adascale_controller.job.failing_counts import FailingCount
from adascale_controller.job.placement_backoff import FailedPlacement
from adascale_controller.schedule.capacity_requests import CapacityRequest
from adascale_core.decision.decide import Decision
from adascale_core.messages.allocation import Allocation
from adascale_core.messages.job_spec import JobSpec

Status = dict[str, Any]
"""`status` of an AdaScaleJob, as JSON."""


@dataclass(frozen=True)
class Schedule:
    """What is scheduled for a job."""

    decision: Decision | None = None  # None if it may not run, or waits for its first decision
    failed_placement: FailedPlacement | None = None  # a larger count that could not be placed
    failing_count: FailingCount | None = None  # a larger count on which the program fails at once
    capacity_request: CapacityRequest | None = None  # the count, if it is requested although it does not fit


@dataclass(frozen=True)
class Event:
    """A Kubernetes Event about an AdaScaleJob."""

    reason: str
    message: str
    warning: bool = False


class StatusChange(Enum):
    """How a status differs from the current status."""

    NONE = auto()
    REPORTED = auto()
    """In fields of the last report and predictions, which change all the time."""
    URGENT = auto()


@dataclass(frozen=True)
class NewPod:
    """A pod to create."""

    rank: int
    attempt: int
    extra: bool = False  # whether it has the priority of extra pods
    group_size: int = 0  # the number of pods that are admitted together with it; 0 if it is admitted alone
    gang: str | None = None  # the PodGroup of Kubernetes that it is placed with. None if it is placed alone.
    accelerator: str | None = None  # the type that it requires
    # `nodeSelector` and `tolerations` of the flavor that Kueue has chosen for the others
    scheduling: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


class Stop(Enum):
    """How a pod is stopped."""

    DELETE = auto()
    """It is deleted with its grace period."""
    FORCE = auto()
    """It is deleted at once: its kubelet does not end it."""
    END = auto()
    """Its containers end with their grace period, and it stays, with its logs."""


@dataclass(frozen=True)
class StoppedPod:
    """A pod to stop."""

    name: str
    uid: str
    how: Stop
    event: Event | None = None  # the Event about it


@dataclass(frozen=True)
class Actions:
    """The writes for one job. Each may be repeated without harm."""

    status: Status
    status_change: StatusChange = StatusChange.URGENT
    # whether to delete the job of an earlier AdaScaleJob of this name from the metrics service
    deregister: bool = False
    declare: JobSpec | None = None  # the spec to declare at the metrics service
    allocate: Allocation | None = None  # the allocation to request at the metrics service
    create_pods: tuple[NewPod, ...] = ()
    stop_pods: tuple[StoppedPod, ...] = ()
    delete_group: bool = False  # the Workload of the pods that Kueue admits together
    delete_job: bool = False
    events: tuple[Event, ...] = ()  # the Events to record if the status is new

    @property
    def are_urgent(self) -> bool:
        """Whether they have more than a status that is not urgent."""
        requests = self.deregister, self.declare, self.allocate
        writes = self.create_pods, self.stop_pods, self.delete_group, self.delete_job
        return self.status_change is StatusChange.URGENT or any((*requests, *writes))
