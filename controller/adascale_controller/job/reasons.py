"""Why a job is in its state, as conditions and Events name it."""

from __future__ import annotations

from enum import StrEnum

from adascale_controller.job_definition import JobDefinition


class Reason(StrEnum):
    """The reasons of conditions. `docs/kubernetes.md` describes what to do about each."""

    TRAINING = "Training"
    STALLED = "Stalled"
    STARTING = "Starting"
    REENTERING = "Reentering"
    PREPARING_REPLICAS = "PreparingReplicas"
    STABLE = "Stable"
    INSUFFICIENT_CAPACITY = "InsufficientCapacity"
    SUSPENDED = "Suspended"
    SCALED_TO_ZERO = "ScaledToZero"
    RESUMED = "Resumed"
    QUEUED = "Queued"
    QUEUE_CHANGED = "QueueChanged"
    SCHEDULING_GATED = "SchedulingGated"
    TEMPLATE_CHANGED = "TemplateChanged"
    ACCELERATOR_CHANGED = "AcceleratorChanged"
    METRICS_SERVICE_UNAVAILABLE = "MetricsServiceUnavailable"
    NAME_CONFLICT = "NameConflict"
    CLEANING_UP = "CleaningUp"
    NODES_REQUESTED = "NodesRequested"
    PREEMPTING = "Preempting"
    UNSCHEDULABLE = "Unschedulable"
    METRICS_SERVICE_UNREACHABLE = "MetricsServiceUnreachable"
    VOLUME_NOT_FOUND = "VolumeNotFound"
    VOLUME_NOT_BOUND = "VolumeNotBound"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    CONTAINER_CREATING = "ContainerCreating"
    CONTAINER_START_FAILED = "ContainerStartFailed"
    QUOTA_EXCEEDED = "QuotaExceeded"
    POD_CREATION_FAILED = "PodCreationFailed"
    EXTRA_PODS_REJECTED = "ExtraPodsRejected"
    REPLICA_REFUSED = "ReplicaRefused"
    REPLICA_CHECK_FAILED = "ReplicaCheckFailed"
    PROGRAM_FAILED = "ProgramFailed"
    FINISHED = "Finished"
    FAILED = "Failed"
    BACKOFF_LIMIT_EXCEEDED = "BackoffLimitExceeded"
    NO_PROGRESS = "NoProgress"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    INVALID_SPEC = "InvalidSpec"
    COUNT_SUFFICES = "CountSuffices"
    NO_COUNT_SUFFICES = "NoCountSuffices"
    DEADLINE_MET = "DeadlineMet"
    DEADLINE_MISSED = "DeadlineMissed"
    REPLICA_SLOW = "ReplicaSlow"
    NO_REPLICA_SLOW = "NoReplicaSlow"
    SLOW_REPLICA_REPLACED = "SlowReplicaReplaced"


def requested_stop(job: JobDefinition) -> tuple[Reason, str] | None:
    """Return why the spec of a job lets it have no replicas now; None if it may have some."""
    if job.suspend:
        return Reason.SUSPENDED, "spec.suspend is true"
    if job.replica_limit == 0:
        return Reason.SCALED_TO_ZERO, "spec.replicaLimit is 0"
    return None
