"""States of a rendezvous, and registrations of its replicas."""

from adascale_core.messages.allocation import Allocation
from adascale_core.messages.job_spec import JobSpec
from adascale_core.messages.registration import Registration, ReplicaState
from adascale_core.messages.reports import GainReport
from adascale_core.rendezvous.rendezvous import Rendezvous, allocate, register

WAITING, RUNNING, HOLDING, REENTERING, LOST = (
    ReplicaState.WAITING,
    ReplicaState.RUNNING,
    ReplicaState.HOLDING,
    ReplicaState.REENTERING,
    ReplicaState.LOST,
)
FAILED, TERMINATED, FINISHED = ReplicaState.FAILED, ReplicaState.TERMINATED, ReplicaState.FINISHED
ELASTIC = JobSpec(8, 64, (1, 8), max_replicas=8)
"""All replica counts up to 8 are valid."""


def registration(
    replica: int,
    replica_state: ReplicaState,
    generation: int = 0,
    *,
    trainer: str = "",
    lost: tuple[int, ...] = (),
    rank: int | None = None,
    replicas: int | None = None,
    stepped: int = 0,
) -> Registration:
    """The registration of an agent; by default, each replica has one trainer."""
    trainer = trainer or f"trainer-{replica}"
    return Registration(
        *(replica, trainer, replica_state, generation, f"host-{replica}", 1000 + replica),
        step=7 if replica_state is HOLDING else None,
        lost=lost,
        rank=replica if rank is None and generation else rank,
        replicas=replicas,
        stepped=stepped,
    )


def holding(replica: int, generation: int, *lost: int) -> Registration:
    """The registration of a replica that has lost peers and holds its state."""
    return registration(replica, HOLDING, generation, lost=lost)


def after(
    state: Rendezvous, *events: Registration | Allocation, spec: JobSpec | None = ELASTIC
) -> Rendezvous:
    """Return the state after registrations and allocations, in order."""
    for event in events:
        rule = allocate if isinstance(event, Allocation) else register
        state = rule(state, event, spec)  # type: ignore[arg-type]
    return state


def running(generation: int, replicas: int, *, spec: JobSpec | None = ELASTIC) -> Rendezvous:
    """Return the state of a job whose trainers run in `generation`, its first."""
    indices = range(replicas)
    return after(
        Rendezvous(),
        *(registration(index, WAITING) for index in indices),
        Allocation(generation, replicas),
        *(registration(index, RUNNING, generation) for index in indices),
        spec=spec,
    )


def active(state: Rendezvous) -> tuple[int, list[int]] | None:
    """Generation and members of the active allocation, by rank; None if it is broken."""
    if state.active is None or state.broken:
        return None
    return state.active.generation, [member.replica for member in state.active.members]


def desired(state: Rendezvous) -> tuple[int, int] | None:
    """Generation and replicas of the desired allocation."""
    return (state.desired.generation, state.desired.replicas) if state.desired else None


def with_spares(replicas: int, spares: int, *, spec: JobSpec = ELASTIC) -> Rendezvous:
    """Return the state of a job that trains in generation 1 on the first replicas; the others wait."""
    return after(
        Rendezvous(),
        *(registration(index, WAITING) for index in range(replicas + spares)),
        Allocation(1, replicas, spares=spares),
        *(registration(index, RUNNING, 1) for index in range(replicas)),
        spec=spec,
    )


# -- slow replicas --------------------------------------------------------------------------------------

NOW = 1_800_000_000.0


def reported(generation: int, slow: int | None, replicas: int = 3) -> GainReport:
    """A report of rank 0 that names a slow replica, or none."""
    factor = 1.3 if slow is not None else None
    numbers = (generation, 10, 500.0, 0, replicas, 8, 1, 2.0, 2.0, 1.0, 2.0, 0.1, 1.0)
    return GainReport(*numbers, slow_replica=slow, slow_factor=factor)
