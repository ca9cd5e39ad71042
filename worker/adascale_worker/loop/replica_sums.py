"""Sums of numbers over the replicas, exchanged through the store of the process group."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping

from adascale_worker.errors import WorkerError
from adascale_worker.loop.evaluation import Exchange
from adascale_worker.loop.evaluation_sequence import EvaluationSequence

_KIND = "numbers"


class ReplicaSums:
    """Adds up numbers of all replicas at the same place of the program.

    It is no collective call: a replica that is lost meanwhile does not end the others. It takes no part in
    the sums then, as one that is at another place.
    """

    def __init__(self, sequence: EvaluationSequence) -> None:
        self._sequence = sequence
        self._posted: deque[Exchange] = deque()

    def sum(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return the sums, the same on all replicas."""
        exchange = self._sequence.next()
        others = [rank for rank in range(exchange.replicas) if rank != exchange.rank]
        if not others:
            return {name: float(value) for name, value in values.items()}
        exchange.post(_KIND, json.dumps(list(map(float, values.values()))))
        self._delete_read(exchange)
        found = {exchange.rank: list(map(float, values.values()))}
        for rank, text in exchange.read(_KIND, others).items():
            found[rank] = json.loads(text)
            if len(found[rank]) != len(values):
                raise WorkerError(
                    f"trainer.sum_over_replicas() got {len(values)} values on rank {exchange.rank}, but "
                    f"{len(found[rank])} on rank {rank}: call it with the same names on all replicas"
                )
        # In the order of the ranks, so that rounding is the same on all replicas.
        columns = zip(*(found[rank] for rank in sorted(found)), strict=True)
        return dict(zip(values, map(_sum, columns), strict=True))

    def _delete_read(self, exchange: Exchange) -> None:
        """Delete what this replica has posted before, of which it is known that the others have read it.

        A replica that posts numbers has read those of the exchange before the last one.
        """
        self._posted.append(exchange)
        while len(self._posted) > 2:
            self._posted.popleft().retract_own(_KIND)


def _sum(numbers: tuple[float, ...]) -> float:
    return math.fsum(numbers) if all(map(math.isfinite, numbers)) else sum(numbers)
