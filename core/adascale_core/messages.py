"""What workers, api and controller tell each other, as frozen dataclasses.

The edge (pydantic in the api, JSON in the clients) builds these; field names are the names in the JSON.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from typing import Any, Self

from adascale_core import names
from adascale_core.batch import BatchBounds, BatchPlan, is_valid_replicas
from adascale_core.names import DEFAULT_EFFICIENCY_TARGET


class Message:
    """Something that travels as a JSON object."""

    def to_json(self) -> dict[str, Any]:
        """The message as the JSON object's members."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]

    @classmethod
    def from_json(cls, members: dict[str, Any]) -> Self:
        """The message from a JSON object's members; unknown members are left aside."""
        known = {field.name for field in fields(cls)}  # type: ignore[arg-type]
        return cls(**{name: value for name, value in members.items() if name in known})


@dataclass(frozen=True)
class GainReport(Message):
    """A snapshot of training, posted by rank 0.

    Args:
        generation: the allocation that it was measured in.
        step: optimizer steps since the job began, over all generations.
        progress: sum of gains so far, in steps at `batch_size`.
        epoch: the epoch being trained, from 0.
        replicas, local_bsz, accumulation: the batch plan (K, b, a).
        scale: S = K*b*a / batch_size.
        gain: how many steps at `batch_size` one step is worth, between 1 and S for S >= 1.
        grad_sqr: estimated squared norm of the true gradient.
        grad_var: estimated variance of a gradient at `batch_size`.
        step_time: mean seconds per optimizer step since the last report; 0: not measured yet.
        time: when the step was done, in seconds since 1970 by the worker's clock.
        loss: mean training loss since the last report, if the program told it.
    """

    generation: int
    step: int
    progress: float
    epoch: int
    replicas: int
    local_bsz: int
    accumulation: int
    scale: float
    gain: float
    grad_sqr: float
    grad_var: float
    step_time: float
    time: float
    loss: float | None = None

    @property
    def efficiency(self) -> float:
        """gain / scale."""
        return self.gain / self.scale

    @property
    def plan(self) -> BatchPlan:
        """The batch plan it was measured with."""
        return BatchPlan(self.replicas, self.local_bsz, self.accumulation)


@dataclass(frozen=True)
class StepTime(Message):
    """The time that a step takes with one batch plan, in seconds: the median of `reports` reports."""

    replicas: int
    local_bsz: int
    accumulation: int
    step_time: float
    reports: int = 1

    @property
    def plan(self) -> BatchPlan:
        """The batch plan it was measured with."""
        return BatchPlan(self.replicas, self.local_bsz, self.accumulation)


@dataclass(frozen=True)
class JobSpec(Message):
    """What the metrics service has to know of a job to predict its gain, as the controller declares it."""

    batch_size: int
    max_batch_size: int | None = None
    local_bsz_bounds: tuple[int, int] | None = None
    min_replicas: int = 1
    max_replicas: int = 1
    scale_invariant_steps: int | None = None
    efficiency_target: float = DEFAULT_EFFICIENCY_TARGET

    @classmethod
    def from_json(cls, members: dict[str, Any]) -> Self:
        """The spec from a JSON object's members."""
        pair = members.get("local_bsz_bounds")
        return super().from_json({**members, "local_bsz_bounds": None if pair is None else tuple(pair)})

    @property
    def bounds(self) -> BatchBounds:
        """The batch sizes that the job allows."""
        return BatchBounds(self.batch_size, self.max_batch_size, self.local_bsz_bounds)

    def environment(self) -> dict[str, str | None]:
        """What a trainer is told of the job by environment variables; none: it must not be set."""
        pair = self.local_bsz_bounds
        steps = self.scale_invariant_steps
        return {
            names.ENV_BATCH_SIZE: str(self.batch_size),
            names.ENV_MAX_BATCH_SIZE: None if self.max_batch_size is None else str(self.max_batch_size),
            names.ENV_LOCAL_BSZ_BOUNDS: None if pair is None else f"{pair[0]},{pair[1]}",
            names.ENV_EFFICIENCY_TARGET: repr(self.efficiency_target),
            names.ENV_SCALE_INVARIANT_STEPS: None if steps is None else str(steps),
        }


@dataclass(frozen=True)
class Allocation(Message):
    """The replica count that a job is given, numbered by its generation (from 1)."""

    generation: int
    replicas: int


@dataclass(frozen=True)
class ActiveAllocation(Allocation):
    """An allocation whose replicas are all there, with the address at which rank 0 serves its rendezvous.

    Args:
        master_addr, master_port: that address; port 0 where nobody can enter it any more, since it was
            found running by a service that had lost its data.
        instances: the agents it was given to, by rank; empty: not told.
        spec: what its trainers work with, the same for all of them; none: what they were started with.
    """

    master_addr: str
    master_port: int
    instances: tuple[str, ...] = ()
    spec: JobSpec | None = None

    @classmethod
    def from_json(cls, members: dict[str, Any]) -> Self:
        """The allocation from a JSON object's members."""
        spec = members.get("spec")
        return super().from_json(
            {
                **members,
                "instances": tuple(members.get("instances", ())),
                "spec": JobSpec.from_json(spec) if spec else None,
            }
        )

    def with_spec(self, declared: JobSpec | None, before: JobSpec | None) -> ActiveAllocation:
        """This allocation with the spec for its trainers, to be chosen once, when it becomes active.

        Args:
            declared: what the job is declared to be by now.
            before: what the trainers of the last generation worked with. It stays where this replica
                count is not valid for what is declared: one that is comes with a later allocation, and no
                program is to fail until then.
        """
        fits = declared is not None and is_valid_replicas(declared.bounds, self.replicas)
        return replace(self, spec=declared if fits else before)

    def admits(self, rank: int, instance: str) -> bool:
        """Whether the agent `instance` of `rank` may enter: neither surplus, nor replaced, nor unheard of."""
        return rank < self.replicas and (not self.instances or self.instances[rank] == instance)


@dataclass(frozen=True)
class AllocationView(Message):
    """What an agent, a trainer and the controller are told of a job's generations.

    Args:
        version: changes whenever anything here does; a reader waits for a version other than its own.
        desired: the newest allocation, if there is one.
        active: the allocation that trainers run in or are moving to, if there is one.
        broken: whether the active generation has lost a replica and is over.
        complete: whether the job has come to its end.
        used_port: the port that rank 0 tells, where a generation was given it already; else 0. Where
            rank 0 is idle and there is nothing to enter, it was given in vain: another one is needed.
    """

    version: int
    desired: Allocation | None
    active: ActiveAllocation | None
    broken: bool
    complete: bool
    used_port: int = 0

    @classmethod
    def from_json(cls, members: dict[str, Any]) -> Self:
        """The view from a JSON object's members."""
        desired, active = members.get("desired"), members.get("active")
        return cls(
            version=members["version"],
            desired=Allocation.from_json(desired) if desired else None,
            active=ActiveAllocation.from_json(active) if active else None,
            broken=members["broken"],
            complete=members["complete"],
            used_port=members.get("used_port", 0),
        )

    def is_over(self, generation: int) -> bool:
        """Whether trainers of `generation` have to leave it: it is broken, or a newer one is active."""
        if self.active is None or self.active.generation < generation:
            return False
        return self.broken or self.active.generation > generation

    def next_after(self, generation: int) -> ActiveAllocation | None:
        """The allocation to enter after `generation`, once there is one."""
        if self.active is None or self.broken or self.active.generation <= generation:
            return None
        return self.active


class ReplicaState(StrEnum):
    """What an agent is doing, as it registers it."""

    WAITING = "waiting"
    """Ready for the next generation."""
    RUNNING = "running"
    """Its trainer runs in the generation that it names."""
    REENTERING = "reentering"
    """Its trainer has saved and left the generation; ready for the next one."""
    LOST = "lost"
    """Its trainer was killed, or lost a peer; ready for the next generation."""
    FAILED = "failed"
    """The user's program failed; the agent leaves."""
    TERMINATED = "terminated"
    """The agent was asked to leave, and did so with the state saved where a step was left to do it."""
    FINISHED = "finished"
    """The user's program came to its end; the agent leaves."""


@dataclass(frozen=True)
class Registration(Message):
    """What the agent of one replica is doing and where it is.

    Args:
        rank: index of the replica, from 0.
        instance: random text that tells this agent from an earlier one of the same rank.
        state: what the agent is doing.
        generation: the last generation that its trainer has run in, or runs in; 0 if none.
        address: host name or IP address at which the other replicas reach it.
        port: port of the listening socket kept for the next generation.
        exit_code: of the trainer, where it has ended; negative for a signal.
        log: the last lines that the trainer wrote, where it failed.
        prepared: while its trainer runs, the newest generation that it has the next one ready for; none
            where it makes nothing ready.
    """

    rank: int
    instance: str
    state: ReplicaState
    generation: int
    address: str
    port: int
    exit_code: int | None = None
    log: str | None = None
    prepared: int | None = None

    @classmethod
    def from_json(cls, members: dict[str, Any]) -> Self:
        """The registration from a JSON object's members.

        Raises:
            ValueError: the state is not one.
        """
        return super().from_json({**members, "state": ReplicaState(members["state"])})
