"""What the program exchanges with the other replicas besides gradients: results of evaluations, sums, means.

Most of it goes through the store of the process group, which is no collective call: a replica that is lost
meanwhile does not end the others.
"""

from __future__ import annotations

import base64
import io
import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from adascale_worker.errors import WorkerError
from adascale_worker.loop.context import Context
from adascale_worker.membership.board import Board, Values
from adascale_worker.membership.links import PeersLostError
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.program.program_loop import ProgramLoop
from adascale_worker.reporting.progress import StepTimer, TrainingProgress

TRAINS = "trains"
"""The event that a replica announces with the place that it has reached, for those that evaluate."""
_NUMBERS = "numbers"
PART_LENGTH = 2**22
"""Characters of a value in the store, which takes at most 8 MiB."""


def encoded(value: Any) -> str:
    """Return tensors, numbers, strings and None, in lists, tuples and dicts, as a text."""
    file = io.BytesIO()
    torch.save(value, file)
    return base64.b64encode(file.getbuffer()).decode()


def decoded(text: str) -> Any:
    """Return the value that `encoded` has returned as a text."""
    return torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)


def parts_of(text: str) -> list[str]:
    """Return parts of a text, each of which the store takes as a value."""
    return [text[start : start + PART_LENGTH] for start in range(0, len(text), PART_LENGTH)]


class Exchange:
    """What the replicas exchange during an evaluation.

    A replica that has passed the place of the evaluation takes no part in it.
    """

    def __init__(self, group: ReplicaGroup, place: tuple[int, int, int], number: int) -> None:
        self._group = group
        self._board = Board(group)
        self._place = place
        self._name = "/".join(map(str, ("evaluation", *place, number)))

    @property
    def rank(self) -> int:
        """The index of this replica."""
        return self._group.rank

    @property
    def replicas(self) -> int:
        """The number of replicas."""
        return self._group.replicas

    def post(self, kind: str, value: Any = "") -> None:
        """Let the others read `value`."""
        if not self._group.has_failed:
            self._board.announce(f"{self._name}/{kind}", value)

    def read(
        self,
        kind: str,
        ranks: Sequence[int],
        timeout: float = math.inf,
        *,
        taking_part: Collection[int] = (),  # ranks that are known to take part
    ) -> Values:
        """Wait for the values of the ranks that take part, and return the values that have come."""
        found: Values = {}
        if not ranks or self._group.has_failed:
            return found
        # In this order: what a rank has posted before it passed is there.
        for places, values in self._board.poll(TRAINS, f"{self._name}/{kind}", timeout=timeout):
            found = {rank: values[rank] for rank in ranks if rank in values}
            passed = {rank for rank, place in places.items() if tuple(place) > self._place}
            if all(rank in found or rank in passed.difference(taking_part) for rank in ranks):
                break
        return found

    def retract(self, kind: str) -> None:
        """Delete what all replicas have posted, because they have read it."""
        self._board.retract(f"{self._name}/{kind}", range(self.replicas))

    def retract_own(self, kind: str) -> None:
        """Delete what this replica has posted, because the others have read it."""
        self._board.retract(f"{self._name}/{kind}", [self.rank])


class GatheredValues:
    """Exchanges what the program gathers for its batches, and knows which values of other ranks are missing.

    Round t has one batch of each rank, and in each batch the program may gather several times. From the first
    value on that does not come from a rank, because it is lost or does not evaluate, none is expected.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._missing: dict[int, tuple[int, int]] = {}
        self._found: set[int] = set()
        self._posted: list[list[str]] = []
        """What others may not have read yet."""
        self._round = self._call = 0
        self._redelivers: int | None = None
        self._is_shared = False

    def begin(self, round_: int, *, is_shared: bool, of_rank: int | None = None) -> None:
        """Begin with a batch: one of the rank `of_rank`, delivered in its place, if it is given.

        It is shared if each other rank has another batch of this round.
        """
        self._round, self._call, self._is_shared, self._redelivers = round_, 0, is_shared, of_rank

    @property
    def missing(self) -> dict[int, int]:
        """The rounds from which on the batches of other ranks are to be evaluated in their place, by rank."""
        return {rank: round_ for rank, (round_, _) in sorted(self._missing.items())}

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks that have a batch of this round and were not lost, by rank."""
        place = self._round, self._call
        self._call += 1
        if self._redelivers is not None:
            return [value] if place >= self._missing[self._redelivers] else []
        if not self._is_shared:
            return [value]
        kind = f"gather/{place[0]}/{place[1]}"
        self._post(kind, encoded(value))
        others = [rank for rank in range(self._exchange.replicas) if rank != self._exchange.rank]
        expected = [rank for rank in others if rank not in self._missing]
        found = self._read(kind, expected)
        self._found.update(found)
        self._missing.update((rank, place) for rank in expected if rank not in found)
        values = {rank: decoded(text) for rank, text in found.items()} | {self._exchange.rank: value}
        return [values[rank] for rank in sorted(values)]

    def _post(self, kind: str, text: str) -> None:
        """Post a value in parts, the first of which comes last, with their number."""
        parts = parts_of(text)
        for number, part in enumerate(parts[1:], 1):
            self._exchange.post(f"{kind}/{number}", part)
        self._exchange.post(kind, f"{len(parts)} {parts[0]}")
        self._posted.append([kind, *(f"{kind}/{number}" for number in range(1, len(parts)))])

    def _read(self, kind: str, ranks: list[int]) -> dict[int, str]:
        """Wait for the values of other ranks, and return those that have come."""
        found = {}
        for rank, text in self._exchange.read(kind, ranks, taking_part=self._found).items():
            count, _, first = text.partition(" ")
            parts = [first]
            for number in range(1, int(count)):
                parts += self._exchange.read(f"{kind}/{number}", [rank], taking_part=[rank]).values()
            if len(parts) == int(count):
                found[rank] = "".join(parts)
        if len(found) == len(ranks) == self._exchange.replicas - 1:
            # A rank posts its next value after it has read those before.
            for posted in self._posted[:-1]:
                for each in posted:
                    self._exchange.retract_own(each)
            del self._posted[:-1]
        return found


class EvaluationSequence:
    """Numbers the evaluations and sums of a program, so that all replicas exchange what belongs together.

    A replica announces the places in training that it has passed: those that evaluate do not wait for it.
    """

    def __init__(
        self, group: ReplicaGroup, progress: TrainingProgress, step_timer: StepTimer, loop: ProgramLoop
    ) -> None:
        self._group = group
        self._board = Board(group)
        self._progress = progress
        self._step_timer = step_timer
        self._loop = loop
        self._count = 0
        """Evaluations at `_place` so far."""
        self._place: tuple[int, int, int] | None = None
        self._sums: deque[Exchange] = deque()
        """Those whose numbers others may not have read yet."""

    def next(self) -> Exchange:
        """Return how the replicas exchange the results of the next evaluation."""
        progress = self._progress
        # A replica passes an evaluation outside of a loop when it begins a loop of the same epoch.
        place = (progress.epoch, progress.step, int(self._loop.has_batch))
        self._count = self._count + 1 if place == self._place else 1
        self._place = place
        return Exchange(self._group, place, self._count)

    def begin(self) -> None:
        """Do not take what follows for training, until `end`."""
        self._step_timer.pause()
        self._loop.is_evaluating = True

    def end(self) -> None:
        """Continue with training."""
        self._step_timer.pause()
        self._loop.is_evaluating = False

    def announce_training(self, *, is_waiting: bool = False) -> None:
        """Let replicas that evaluate know that this one trains, or waits in a step."""
        progress = self._progress
        self.announce_passed([progress.epoch, progress.step, 2 if is_waiting else 1])

    def announce_passed(self, place: Sequence[float]) -> None:
        """Let replicas that evaluate know that this one takes no part in evaluations before a place.

        A place is the epoch, the step, and 1 if the replica trains there, 2 if it waits in the step.
        """
        self._board.announce(TRAINS, place)

    def sum(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return the sums of numbers of all replicas at the same place of the program, the same on all.

        A replica that is lost, or at another place, takes no part.
        """
        exchange = self.next()
        others = [rank for rank in range(exchange.replicas) if rank != exchange.rank]
        if not others:
            return {name: float(value) for name, value in values.items()}
        numbers = list(map(float, values.values()))
        exchange.post(_NUMBERS, numbers)
        self._sums.append(exchange)
        while len(self._sums) > 2:
            # Who posts numbers has read those before the last.
            self._sums.popleft().retract_own(_NUMBERS)
        found = {exchange.rank: numbers, **exchange.read(_NUMBERS, others)}
        for rank, each in found.items():
            if len(each) != len(values):
                raise WorkerError(
                    f"trainer.sum_over_replicas() got {len(values)} values on rank {exchange.rank}, but "
                    f"{len(each)} on rank {rank}: call it with the same names on all replicas"
                )
        # In the order of the ranks, so that rounding is the same on all replicas.
        columns = zip(*(found[rank] for rank in sorted(found)), strict=True)
        return dict(zip(values, map(_sum, columns), strict=True))


def _sum(numbers: tuple[float, ...]) -> float:
    return math.fsum(numbers) if all(map(math.isfinite, numbers)) else sum(numbers)


def average(training: Context, tensor: torch.Tensor) -> bool:
    """Replace a tensor by its mean over the replicas, and return whether that was possible.

    If a replica is lost, the step that the program works on is discarded. In a discarded step nothing is
    exchanged, because the other replicas do not communicate any more.
    """
    if training.group.has_failed or training.failure.is_discarded:
        return False
    try:
        training.group.average([tensor])
    except PeersLostError:
        if training.loop.trains:
            training.failure.discard()
        return False
    return True
