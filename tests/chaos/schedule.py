"""Schedules of faults, drawn from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """What happens. Trainers and agents are chosen by `Fault.target` among those that run."""

    KILL_TRAINER = "kill -9 a trainer"
    KILL_TRAINERS = "kill -9 all trainers"
    KILL_AGENT = "kill -9 an agent"
    KILL_AGENTS = "kill -9 all agents"
    KILL_SERVICE = "kill -9 the metrics service"
    KILL_CONTROLLER = "kill -9 adascale run, and start it again"
    INTERRUPT = "Ctrl-C, and start adascale run again"
    INTERRUPT_HOLD = "kill -9 a trainer, Ctrl-C while the others hold, and start adascale run again"
    TERMINATE_TRAINER = "SIGTERM to a trainer"
    TERMINATE_AGENT = "SIGTERM to an agent"
    FREEZE_TRAINER = "freeze a trainer"
    FREEZE_AGENT = "freeze an agent and its trainers"
    FREEZE_SERVICE = "freeze the metrics service"
    FREEZE_CONTROLLER = "freeze adascale run"
    SLOW = "slow a trainer down"
    SLOW_NETWORK = "slow the network down"
    SCALE = "adascale scale"
    ALLOCATE = "another allocation"
    EDIT = "stop adascale run, change the bounds, and start it again"


WEIGHTS = {
    Kind.KILL_TRAINER: 6,
    Kind.KILL_TRAINERS: 1,
    Kind.KILL_AGENT: 3,
    Kind.KILL_AGENTS: 1,
    Kind.KILL_SERVICE: 2,
    Kind.KILL_CONTROLLER: 1,
    Kind.INTERRUPT: 1,
    Kind.INTERRUPT_HOLD: 1,
    Kind.TERMINATE_TRAINER: 2,
    Kind.TERMINATE_AGENT: 2,
    Kind.FREEZE_TRAINER: 4,
    Kind.FREEZE_AGENT: 2,
    Kind.FREEZE_SERVICE: 1,
    Kind.FREEZE_CONTROLLER: 1,
    Kind.SLOW: 2,
    Kind.SLOW_NETWORK: 3,
    Kind.SCALE: 4,
    Kind.ALLOCATE: 5,
    Kind.EDIT: 1,
}
ELASTIC_ONLY = {Kind.SCALE, Kind.ALLOCATE, Kind.EDIT}
LIMITS = {
    # `adascale run` gives up on a service that exits more than five times within a minute.
    Kind.KILL_SERVICE: 3,
    # Each takes the seconds of a start.
    Kind.KILL_CONTROLLER: 2,
    Kind.INTERRUPT: 1,
    Kind.INTERRUPT_HOLD: 1,
    Kind.EDIT: 1,
}
DATA = ("items", "stream", "stream with states", "shards")
"""Data sets of the program."""
LOOPS = ("plain", "accelerate")
"""Who has the training loop of the program."""
LONGEST_FREEZE = 8.0
"""Seconds; longer than members wait for a silent peer."""
CHANCE_OF_SHARDS = 0.3
"""Of a run to have replicas of two processes, over which the model is sharded."""
CHANCE_OF_SPARE = 0.4
"""Of a run to have a spare."""
CHANCE_OF_OVERLAP = 0.4
"""Of a fault to follow another at once or within seconds, instead of at a point of the training."""


@dataclass(frozen=True)
class Fault:
    """A fault and its moment.

    Args:
        kind: what happens.
        progress: the part of the training after which it happens; None for `delay` after the fault before.
        delay: seconds after the fault before.
        target: chooses the process, the replica count, or the rate of the network.
        seconds: how long a process is frozen, or a process or the network is slow.
    """

    kind: Kind
    progress: float | None
    delay: float
    target: int
    seconds: float

    def __str__(self) -> str:
        moment = f"+{self.delay:.2f} s" if self.progress is None else f"at {self.progress:.0%}"
        lasting = self.kind in (
            Kind.FREEZE_TRAINER,
            Kind.FREEZE_AGENT,
            Kind.FREEZE_SERVICE,
            Kind.FREEZE_CONTROLLER,
            Kind.SLOW,
            Kind.SLOW_NETWORK,
        )
        return f"{moment} {self.kind}{f' for {self.seconds:.1f} s' if lasting else ''}"


@dataclass(frozen=True)
class Schedule:
    """A run and its faults.

    Args:
        seed: of the run.
        fixed: the fixed number of replicas; None for an elastic job.
        spec: the fields of the job's spec.
        later_spec: the fields that `Kind.EDIT` changes.
        faults: in order.
        data: what the data set is, one of `DATA`.
        loop: who has the training loop, one of `LOOPS`.
    """

    seed: int
    fixed: int | None
    spec: dict[str, Any]
    later_spec: dict[str, Any] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()
    data: str = DATA[0]
    loop: str = LOOPS[0]

    @property
    def spares(self) -> int:
        """The replicas beyond those that train."""
        return int(self.spec.get("spareReplicas", 0))

    @property
    def name(self) -> str:
        """The kind of job, for messages."""
        processes = self.spec.get("processesPerReplica")
        return (
            f"{f'{self.fixed} replicas' if self.fixed else 'elastic'}, {self.data}, {self.loop} loop"
            f"{f', {processes} processes per replica' if processes else ''}"
            f"{', a spare' if self.spares else ''}"
        )


def undisturbed(replicas: int, steps: int) -> Schedule:
    """Return a run of a fixed number of replicas without faults."""
    return Schedule(0, replicas, {**_fixed_spec(replicas), "scaleInvariantSteps": steps})


def draw(seed: int, faults: int) -> Schedule:
    """Return the run of a seed with this number of faults."""
    rng = random.Random(seed)
    fixed = rng.choice([None, None, None, 2, 3, 4])
    spec = _fixed_spec(fixed) if fixed else _elastic_spec(rng)
    later = {} if fixed else _elastic_spec(rng)
    drawn: list[Kind] = []
    while len(drawn) < faults:
        kind = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        if (fixed and kind in ELASTIC_ONLY) or drawn.count(kind) >= LIMITS.get(kind, faults):
            continue
        drawn.append(kind)
    moments = sorted(rng.uniform(0.02, 0.85) for _ in drawn)
    planned = []
    for number, (kind, moment) in enumerate(zip(drawn, moments, strict=True)):
        overlaps = number > 0 and rng.random() < CHANCE_OF_OVERLAP
        delay = rng.choice([0.0, rng.uniform(0, 0.5), rng.uniform(0, 2)])
        target, seconds = (
            rng.randrange(1 << 16),
            rng.choice([rng.uniform(0.1, 1), rng.uniform(1, LONGEST_FREEZE)]),
        )
        planned.append(Fault(kind, None if overlaps else moment, delay, target, seconds))
    data = rng.choice(DATA)
    # Accelerate's adapter loads data sets with items by index only.
    loop = rng.choice(LOOPS) if data == "items" else LOOPS[0]
    if rng.random() < CHANCE_OF_SHARDS:
        # With a plain loop and items by index only.
        spec, later, data, loop = _sharded(spec), _sharded(later) if later else {}, DATA[0], LOOPS[0]
    if rng.random() < CHANCE_OF_SPARE:
        spec, later = {**spec, "spareReplicas": 1}, {**later, "spareReplicas": 1} if later else {}
    return Schedule(seed, fixed, spec, later, tuple(planned), data, loop)


def _fixed_spec(replicas: int) -> dict[str, Any]:
    return {
        "batchSize": 4 * replicas,
        "localBszBounds": {"lower": 4, "upper": 4},
        "minReplicas": replicas,
        "maxReplicas": replicas,
        "scaleInvariantSteps": 500,
    }


def _sharded(spec: dict[str, Any]) -> dict[str, Any]:
    # The normalization of the model needs two samples in each process.
    bounds = {**spec["localBszBounds"], "lower": 4}
    return {**spec, "localBszBounds": bounds, "processesPerReplica": 2}


def _elastic_spec(rng: random.Random) -> dict[str, Any]:
    return {
        "batchSize": 8,
        "maxBatchSize": rng.choice([16, 32, 48]),
        "localBszBounds": {"lower": rng.choice([2, 4]), "upper": rng.choice([8, 16])},
        "minReplicas": rng.choice([1, 1, 2]),
        "maxReplicas": rng.choice([2, 3, 4]),
        "scaleInvariantSteps": 700,
    }
