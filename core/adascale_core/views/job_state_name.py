"""The names of a job's states, as lists of jobs show them."""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum

from adascale_core.messages.allocation import ActiveAllocation, Allocation
from adascale_core.messages.registration import Registration, ReplicaState


class JobStateName(StrEnum):
    """What a job does, the same in `kubectl get`, `adascale list` and the metrics service."""

    PENDING = "Pending"
    """It has no replicas yet, or waits for capacity."""
    STARTING = "Starting"
    """Its replicas start."""
    RUNNING = "Running"
    """It trains on the desired replicas."""
    RESCALING = "Rescaling"
    """It trains, and a change of the replica count is in progress."""
    RECOVERING = "Recovering"
    """A replica was lost, and the next generation has not begun."""
    STOPPING = "Stopping"
    """The user has stopped it, and its replicas save their state."""
    STOPPED = "Stopped"
    """It has no replicas any more, and has not ended."""
    SUSPENDED = "Suspended"
    """It is stopped by `suspend`, or by a `replicaLimit` of 0."""
    FAILED = "Failed"
    """It has failed for good, or its program has failed on all replicas that are there."""
    COMPLETE = "Complete"
    """Its program has finished."""
    UNKNOWN = "Unknown"
    """Its checkpoints cannot be read, which record whether it has finished."""


def training_replicas(active: ActiveAllocation | None, replicas: Collection[Registration]) -> int:
    """Return how many of the registered replicas train in the active generation."""
    return sum(
        active is not None
        and replica.state is ReplicaState.RUNNING
        and replica.generation == active.generation
        for replica in replicas
    )


def is_spare(
    desired: Allocation | None, active: ActiveAllocation | None, replica: int, *, broken: bool
) -> bool:
    """Whether a replica is beyond those that train, while as many as desired do.

    Args:
        desired, active, broken: as of `registered_state`.
        replica: its index.
    """
    if desired is None or active is None or broken or not desired.spares:
        return False
    return active.replicas == desired.replicas and replica not in active.indices


def waiting_spares(
    desired: Allocation | None,
    active: ActiveAllocation | None,
    replicas: Collection[Registration],
    *,
    broken: bool,
) -> int:
    """Return how many spares are ready to take the place of a lost replica."""
    return sum(
        replica.state is ReplicaState.WAITING and is_spare(desired, active, replica.replica, broken=broken)
        for replica in replicas
    )


def registered_state(
    desired: Allocation | None,
    active: ActiveAllocation | None,
    replicas: Collection[Registration],
    *,
    broken: bool,
    complete: bool,
) -> JobStateName:
    """Return the state of a job, as far as the metrics service knows it.

    Args:
        desired: the newest allocation. None before the first.
        active: the allocation that trainers run in or move to. None before the first.
        replicas: the last registration of each replica.
        broken: whether the active generation has lost a member.
        complete: whether the program has finished.
    """
    training = training_replicas(active, replicas)
    if complete:
        return JobStateName.COMPLETE
    if {replica.state for replica in replicas} == {ReplicaState.FAILED}:
        return JobStateName.FAILED
    if desired is None:
        return JobStateName.PENDING
    if desired.failed:
        return JobStateName.FAILED
    if desired.replicas == 0:
        return JobStateName.RESCALING if training else JobStateName.STOPPED
    if broken:
        return JobStateName.RECOVERING
    if active is None or not training:
        return JobStateName.STARTING
    return JobStateName.RUNNING if active.generation == desired.generation else JobStateName.RESCALING
