"""The messages between workers, api and controller, as frozen dataclasses.

Their fields have the names of the JSON members. The api validates the JSON (pydantic) before it builds a
message.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, Self

from adascale_core import names
from adascale_core.batch.plans import BatchBounds, BatchPlan, LocalBszBounds, is_valid_replicas
from adascale_core.names import DEFAULT_EFFICIENCY_TARGET, HEARTBEAT_INTERVAL


class Message:
    """A message that is sent as a JSON object."""

    def to_json(self) -> dict[str, Any]:
        """Return the members of the message's JSON object."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]

    @classmethod
    def from_json(cls, members: dict[str, Any]) -> Self:
        """Return the message of a JSON object's members. Unknown members are ignored."""
        own = {field.name for field in fields(cls)}  # type: ignore[arg-type]
        return cls(**{name: value for name, value in members.items() if name in own})


@dataclass(frozen=True)
class GainReport(Message):
    """A snapshot of training, posted by rank 0.

    Args:
        generation: the generation in which it was measured.
        step: optimizer steps since the job was created, over all generations.
        progress: sum of gains so far, in steps at `batch_size`.
        epoch: the present epoch, from 0.
        replicas, local_bsz, accumulation: the batch plan (K, b, a).
        scale: S = K*b*a / batch_size.
        gain: how many steps at `batch_size` one step is worth, between 1 and S for S >= 1.
        grad_sqr: estimated squared norm of the true gradient.
        grad_var: estimated variance of a gradient at `batch_size`.
        step_time: mean seconds per optimizer step since the last report; 0 if not measured yet.
        time: when the step was made, in seconds since 1970 by the worker's clock.
        loss: mean training loss since the last report, or its last mean; None if the program does not log it.
        target: the progress at which training ends; None if the program decides.
        nodes: the number of nodes on which the replicas ran.
        lr_factor: the factor by which the learning rate is multiplied for this gain; None if not reported.
        sync_time: of a step, seconds of gradient exchange that computation does not hide; None if not
            measured since the last report.
        metrics: other values that the program has logged, by name: the mean of each since the last report, or
            its last mean before.
        accelerator: the type of accelerator of the replicas, as in the `Registration` of rank 0.
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
    target: float | None = None
    nodes: int = 1
    lr_factor: float | None = None
    sync_time: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    accelerator: str = ""

    @property
    def efficiency(self) -> float:
        """gain / scale."""
        return self.gain / self.scale

    @property
    def plan(self) -> BatchPlan:
        """The batch plan with which it was measured."""
        return BatchPlan(self.replicas, self.local_bsz, self.accumulation)


@dataclass(frozen=True)
class StepTime(Message):
    """The measured step time of a batch plan on a number of nodes.

    Args:
        replicas, local_bsz, accumulation: the batch plan (K, b, a).
        step_time: seconds per optimizer step, the median over the reports.
        reports: the number of reports.
        nodes: the number of nodes on which the replicas ran.
        sync_time: of `step_time`, seconds of gradient exchange that computation does not hide; None if not
            measured.
        accelerator: the type of accelerator of the replicas, as in `GainReport`.
    """

    replicas: int
    local_bsz: int
    accumulation: int
    step_time: float
    reports: int = 1
    nodes: int = 1
    sync_time: float | None = None
    accelerator: str = ""

    @property
    def plan(self) -> BatchPlan:
        """The batch plan with which it was measured."""
        return BatchPlan(self.replicas, self.local_bsz, self.accumulation)


@dataclass(frozen=True)
class JobSpec(Message):
    """The bounds of a job, as the controller declares them to the metrics service.

    Args:
        batch_size: the batch size for which the learning rate was tuned (B0), in samples.
        max_batch_size: upper bound of the global batch size; None if unbounded.
        local_bsz_bounds: (lower, upper) bounds of the local batch size; None if unbounded. An upper bound of
            "auto" means what fits into memory.
        min_replicas, max_replicas: the bounds of the replica count.
        scale_invariant_steps: steps at `batch_size` after which the job is complete; None if the program
            decides.
        efficiency_target: lower bound of the efficiency while throughput is unknown, 0 to 1.
        elastic_single_replica: whether the batch of a single replica may be larger than `batch_size` too.
        local_bsz_limit: the largest local batch size that is used, since a larger one did not fit into the
            memory of the replicas; None if none has failed. The service sets it.
    """

    batch_size: int
    max_batch_size: int | None = None
    local_bsz_bounds: LocalBszBounds | None = None
    min_replicas: int = 1
    max_replicas: int = 1
    scale_invariant_steps: int | None = None
    efficiency_target: float = DEFAULT_EFFICIENCY_TARGET
    elastic_single_replica: bool = False
    local_bsz_limit: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the members of the spec's JSON object, without those of the service in a declaration."""
        members = super().to_json()
        if self.local_bsz_limit is None:
            del members["local_bsz_limit"]
        return members

    @classmethod
    def from_json(cls, members: dict[str, Any]) -> Self:
        """Return the spec of a JSON object's members."""
        pair = members.get("local_bsz_bounds")
        return super().from_json({**members, "local_bsz_bounds": None if pair is None else tuple(pair)})

    @property
    def bounds(self) -> BatchBounds:
        """The batch sizes that the job allows."""
        return BatchBounds(
            self.batch_size,
            self.max_batch_size,
            self.local_bsz_bounds,
            self.elastic_single_replica,
            self.local_bsz_limit,
        )

    def with_limit(self, limit: int | None) -> JobSpec:
        """Return this spec for devices whose memory holds local batches of at most `limit` samples."""
        return replace(self, local_bsz_limit=self.bounds.with_limit(limit).local_bsz_limit)

    def environment(self) -> dict[str, str | None]:
        """Return the environment variables of a trainer; None for a variable that must not be set."""
        pair = self.local_bsz_bounds
        steps = self.scale_invariant_steps
        return {
            names.ENV_BATCH_SIZE: str(self.batch_size),
            names.ENV_MAX_BATCH_SIZE: None if self.max_batch_size is None else str(self.max_batch_size),
            names.ENV_LOCAL_BSZ_BOUNDS: None if pair is None else f"{pair[0]},{pair[1]}",
            names.ENV_LOCAL_BSZ_LIMIT: None if self.local_bsz_limit is None else str(self.local_bsz_limit),
            names.ENV_ELASTIC_SINGLE_REPLICA: "1" if self.elastic_single_replica else None,
            names.ENV_EFFICIENCY_TARGET: repr(self.efficiency_target),
            names.ENV_SCALE_INVARIANT_STEPS: None if steps is None else str(steps),
        }


@dataclass(frozen=True)
class LocalBszLimit(Message):
    """What fits into the memory of a type of accelerator, as far as training has shown.

    Args:
        accelerator: the type, as in a `Registration`.
        local_bsz: the largest local batch size that is used on it, since a larger one did not fit.
    """

    accelerator: str
    local_bsz: int


@dataclass(frozen=True)
class Allocation(Message):
    """The desired replica count of a job in one generation.

    Args:
        generation: the number of the generation, from 1.
        replicas: the number of replicas.
        failed: whether the job has failed, and so gets no replicas.
    """

    generation: int
    replicas: int
    failed: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class Member(Message):
    """A replica that takes part in a generation.

    Args:
        replica: index of the replica, from 0.
        instance: distinguishes its trainer process from any other, as in its registration.
        address, port: where its trainer listens for the other members.
        holds: whether its trainer has the state of training when the generation becomes active.
        node: the node that it runs on; empty if unknown.
    """

    replica: int
    instance: str
    address: str
    port: int
    holds: bool
    node: str = ""


@dataclass(frozen=True)
class ActiveAllocation(Message):
    """An allocation that trainers run in or move to.

    Args:
        generation: the number of the generation, from 1.
        replicas: the number of replicas.
        members: the replicas that take part, in the order of their ranks. Members that hold state come first.
        spec: the bounds with which all its trainers work; None for those in the environment of their agents.
    """

    generation: int
    replicas: int
    members: tuple[Member, ...] = ()
    spec: JobSpec | None = None

    @classmethod
    def from_json(cls, members: dict[str, Any]) -> Self:
        """Return the allocation of a JSON object's members."""
        spec = members.get("spec")
        return super().from_json(
            {
                **members,
                "members": tuple(map(Member.from_json, members.get("members", ()))),
                "spec": JobSpec.from_json(spec) if spec else None,
            }
        )

    def with_spec(self, declared: JobSpec | None, before: JobSpec | None) -> ActiveAllocation:
        """Return this allocation with the spec for its trainers, chosen once, when it becomes active.

        Args:
            declared: the job's current spec.
            before: the spec of the last active allocation. It stays if the current spec does not allow this
                replica count: an allowed count follows with a later allocation, and until then no program
                    fails.
        """
        fits = declared is not None and is_valid_replicas(declared.bounds, self.replicas)
        return replace(self, spec=declared if fits else before)

    @property
    def indices(self) -> frozenset[int]:
        """The indices of the replicas that take part."""
        return frozenset(member.replica for member in self.members)

    @property
    def has_state(self) -> bool:
        """Whether a member held the state of training when this became active."""
        return any(member.holds for member in self.members)

    def rank_of(self, replica: int, instance: str) -> int | None:
        """Return the rank of a replica's trainer; None if it does not take part."""
        for rank, member in enumerate(self.members):
            if member.replica == replica:
                return rank if member.instance == instance else None
        return None

    def admits(self, replica: int, instance: str) -> bool:
        """Whether the trainer `instance` of `replica` takes part."""
        return self.rank_of(replica, instance) is not None


@dataclass(frozen=True)
class AllocationView(Message):
    """The generations of a job, as agents, trainers and the controller get them.

    Args:
        version: changes whenever another field does. A client waits for a version other than its own.
        desired: the newest allocation; None before the first.
        active: the allocation that trainers run in or move to; None before the first.
        broken: whether the active generation has lost a member, and so has ended.
        complete: whether the program has finished.
    """

    version: int
    desired: Allocation | None
    active: ActiveAllocation | None
    broken: bool
    complete: bool

    @classmethod
    def from_json(cls, members: dict[str, Any]) -> Self:
        """Return the view of a JSON object's members."""
        desired, active = members.get("desired"), members.get("active")
        return super().from_json(
            {
                **members,
                "desired": Allocation.from_json(desired) if desired else None,
                "active": ActiveAllocation.from_json(active) if active else None,
            }
        )

    def has_ended(self, generation: int) -> bool:
        """Whether `generation` has ended: it is broken, or a newer generation is active."""
        if self.active is None or self.active.generation < generation:
            return False
        return self.broken or self.active.generation > generation

    def next_allocation(self, generation: int) -> ActiveAllocation | None:
        """Return the active allocation if it is newer than `generation` and not broken, else None."""
        if self.active is None or self.broken or self.active.generation <= generation:
            return None
        return self.active


@dataclass(frozen=True)
class MemberView(AllocationView):
    """The answer to a registration.

    Args:
        key: the secret by which the members of the job authenticate each other.
        left_out: whether the trainer was a member and is not any more: it can take part in no generation.
        heartbeat_interval: seconds until the agent's next registration, unless its state changes before.
    """

    key: str = ""
    left_out: bool = False
    heartbeat_interval: float = HEARTBEAT_INTERVAL


class ReplicaState(StrEnum):
    """The state of a replica, as its agent registers it."""

    WAITING = "waiting"
    """Its trainer is ready for its first generation."""
    RUNNING = "running"
    """Its trainer runs in the registered generation."""
    HOLDING = "holding"
    """The registered generation has ended for its trainer, by the loss of a member. It waits for the next."""
    REENTERING = "reentering"
    """Its trainer was released from the generation and has exited. The agent starts another trainer."""
    LOST = "lost"
    """Its trainer was killed. The agent starts another trainer."""
    FAILED = "failed"
    """The user's program has failed. The agent exits."""
    TERMINATED = "terminated"
    """The agent was asked to exit, and its trainer has left the generation."""
    FINISHED = "finished"
    """The user's program has finished. The agent exits when rank 0 has finished too."""


@dataclass(frozen=True)
class Registration(Message):
    """The state and address of a replica.

    Args:
        replica: index of the replica, from 0.
        instance: distinguishes the trainer process from any other: `<agent>.<number>`, where <agent> is
            random text, and <number> counts the trainers of that agent.
        state: the state of the replica.
        generation: the last generation that its trainer was in, or has held for; 0 if none.
        address: host name or IP address at which the other replicas reach its trainer.
        port: port on which its trainer listens for the other members; 0 before it listens.
        exit_code: exit code of the trainer, -n for signal n; None if it has not ended.
        log: the last lines of the trainer's output; None if it has not failed.
        assigned: the newest generation that its trainer was assigned to, or whose checkpoint it has read if
            that is later; 0 if none.
        step: while it holds: the step of the state in its trainer's memory; None if it has no state.
        lost: while it holds: the indices of the replicas whose loss its trainer has noticed.
        stepped: the newest generation in which its trainer has finished a step; 0 if none.
        rank, replicas: its rank in the generation, and the size of the generation; None before the first.
        version: the version of the package.
        node: the node that it runs on; empty if unknown.
        key: a random secret. The first one that the service gets becomes the job's.
        stall: while no step of its trainer ends: where that is, or that it waits for the others, as in
            `is at train.py, line 41, in load`. Empty while steps end.
        accelerator: the type of accelerator that its trainer computes on: what the operator has chosen, else
            the kind of the device; empty if unknown.
        local_bsz_limit: the largest local batch size that its trainer can still try, because a larger one
            did not fit into memory; None if none has failed in its generation.
    """

    replica: int
    instance: str
    state: ReplicaState
    generation: int
    address: str
    port: int
    exit_code: int | None = None
    log: str | None = None
    assigned: int = 0
    step: int | None = None
    lost: tuple[int, ...] = ()
    stepped: int = 0
    rank: int | None = None
    replicas: int | None = None
    version: str = ""
    node: str = ""
    key: str = ""
    stall: str = ""
    accelerator: str = ""
    local_bsz_limit: int | None = None

    @classmethod
    def from_json(cls, members: dict[str, Any]) -> Self:
        """Return the registration of a JSON object's members.

        Raises:
            ValueError: the state is not a `ReplicaState`.
        """
        return super().from_json(
            {**members, "state": ReplicaState(members["state"]), "lost": tuple(members.get("lost", ()))}
        )

    @property
    def agent(self) -> str:
        """The agent of its trainer."""
        return self.instance.rpartition(".")[0] or self.instance

    @property
    def trainer(self) -> int:
        """The number of its trainer among those of its agent."""
        number = self.instance.rpartition(".")[2]
        return int(number) if number.isdecimal() and number.isascii() else 0

    @property
    def holds(self) -> bool:
        """Whether its trainer has the state of training."""
        return self.state is ReplicaState.RUNNING or (
            self.state is ReplicaState.HOLDING and self.step is not None
        )
