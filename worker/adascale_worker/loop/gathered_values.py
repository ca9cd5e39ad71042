"""What a program gathers from all replicas for each batch of an evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from adascale_worker.loop.stored_values import decoded, encoded, parts_of

if TYPE_CHECKING:
    from adascale_worker.loop.evaluation import Exchange


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
        """Begin with a batch."""
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
