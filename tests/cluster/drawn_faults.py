"""Faults for a job on a cluster, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

LATEST = 0.85
"""The part of the training after which no fault happens."""
EARLY = {"kill_service": 0.4, "freeze_node": 0.4, "stop_api_server": 0.4}
"""The same for kinds during which training continues, and may end. The scheduler needs a while after a stop
of the API server, and could leave the pods of the next test pending for minutes."""
SECONDS = (1.0, 9.0)
"""How long something is frozen or down."""
LONGER = {"freeze_trainer": (6.0, 9.0), "freeze_node": (6.0, 9.0)}
"""The same for kinds that have an effect only if members take a silent peer for lost, after 5 s."""
CHANCE_OF_OVERLAP = 0.3
"""Of a fault to happen at the same moment as the one before."""


@dataclass(frozen=True)
class Fault:
    """A fault and its moment.

    Args:
        kind: what happens.
        progress: the part of the training after which it happens.
        choice: chooses the replica, the node or the replica count, from 0 to 1.
        seconds: how long something is frozen or down.
    """

    kind: str
    progress: float
    choice: float
    seconds: float

    def __str__(self) -> str:
        return (
            f"at {self.progress:.0%} {self.kind.replace('_', ' ')} ({self.choice:.2f}, {self.seconds:.1f} s)"
        )


def draw(seed: int, count: int, kinds: Sequence[str]) -> list[Fault]:
    """Return the faults of a seed, in the order of their moments.

    Each kind is drawn once before any is drawn again.

    Args:
        seed: of the random numbers.
        count: of faults.
        kinds: what can happen.
    """
    drawn = random.Random(seed)
    order: list[str] = []
    while len(order) < count:
        order += drawn.sample(kinds, len(kinds))
    timed = sorted((drawn.uniform(0.03, EARLY.get(kind, LATEST)), kind) for kind in order[:count])
    faults: list[Fault] = []
    for moment, kind in timed:
        if faults and drawn.random() < CHANCE_OF_OVERLAP:
            moment = faults[-1].progress
        seconds = drawn.uniform(*LONGER.get(kind, SECONDS))
        faults.append(Fault(kind, moment, drawn.random(), seconds))
    return faults
