"""Reads a list of shards of a stream, one after the other, see `shards`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy

from adascale_worker.batches.order import pass_seed
from adascale_worker.batches.permutation import permute
from adascale_worker.batches.seeding import mix
from adascale_worker.batches.shards import Path, Shard, Stretch
from adascale_worker.batches.stream_reader import Generators
from adascale_worker.errors import DatasetError
from adascale_worker.torch_private.workers import hidden_worker_info

MakeShard = Callable[[int], Iterable[Any]]
"""Returns the records of a shard, in the same order each time. Gets its index."""


@dataclass(frozen=True)
class ShardPosition:
    """A position in the list of a replica."""

    position: int  # records of the list before it
    path: Path
    reread: int  # records that were read in vain so far, to begin inside a shard


class ShardReader:
    """Reads records of a list forward, and returns those of a micro-batch."""

    def __init__(self, make_shard: MakeShard, seed: int, *, shuffle_buffer: int = 0) -> None:
        self._make_shard = make_shard
        self._seed = seed
        self._shuffles = shuffle_buffer > 1
        self._block = max(1, shuffle_buffer)
        self._generators = Generators()
        self._list: tuple[Shard, ...] = ()
        self._iterator: Iterator[Any] | None = None
        """Of the shard that is read. None before one is begun."""
        self._read = 0
        """Records of this shard that were read."""
        self._begins: list[int] = []
        """Position of the first record of each shard of the list that was begun."""
        self._window: list[Any] = []
        self._base = 0
        """Position of the first record of the window."""
        self._reread = 0

    def take(
        self, first: int, count: int, end: int, keep_from: int, start: tuple[Shard, ...] | None, ahead: int
    ) -> tuple[list[Any], ShardPosition]:
        """Return records, and the position after the micro-batches that they are a share of."""
        with hidden_worker_info(), self._generators.used():
            try:
                if start is not None:
                    self._begin(start)
                self._drop_before(min(keep_from, first))
                while self._next < end + ahead and self._has_more:
                    self._read_block()
            except BaseException:
                self._list, self._iterator = (), None
                raise
        offset = first - self._base
        return self._window[offset : offset + count], ShardPosition(
            end, self._path(end, end + ahead), self._reread
        )

    @property
    def _next(self) -> int:
        return self._base + len(self._window)

    @property
    def _has_more(self) -> bool:
        return self._iterator is not None or len(self._begins) < len(self._list)

    # -- another list -------------------------------------------------------------------------------------

    def _begin(self, shards: tuple[Shard, ...]) -> None:
        if self._continues(shards):
            return
        self._list, self._iterator, self._read = shards, None, 0
        self._begins, self._window, self._base = [], [], 0

    def _continues(self, shards: tuple[Shard, ...]) -> bool:
        """Use what was read of the last list, if the next one begins inside it; return whether it does."""
        if not shards:
            return False
        first = shards[0]
        begun_shards = [(shard.number, shard.index) for shard in self._list[: len(self._begins)]]
        if (first.number, first.index) not in begun_shards:
            return False
        place = begun_shards.index((first.number, first.index))
        position = self._begins[place] + first.offset - self._list[place].offset
        begun = [(each.number, each.index, each.offset) for each in self._list[place + 1 : len(self._begins)]]
        following = [(each.number, each.index, each.offset) for each in shards[1 : len(begun) + 1]]
        end = self._begins[place + 1] if begun else self._next
        if not self._base <= position <= end or begun != following:
            return False
        del self._window[: position - self._base]
        self._begins = [0, *(each - position for each in self._begins[place + 1 :])]
        self._base = 0
        self._list = shards
        return True

    # -- reading ------------------------------------------------------------------------------------------

    def _read_block(self) -> None:
        """Read a block of the present shard, or begin the next one."""
        if self._iterator is None:
            self._begin_shard()
        shard = self._list[len(self._begins) - 1]
        assert self._iterator is not None
        block = list(itertools.islice(self._iterator, self._block))
        is_end = len(block) < self._block
        if self._shuffles and block:
            key = mix(self._shard_seed(shard) + self._read)
            block = [block[place] for place in permute(numpy.arange(len(block)), len(block), key)]
        skipped = min(max(shard.offset - self._read, 0), len(block))
        self._reread += skipped
        self._window += block[skipped:]
        self._read += len(block)
        if not is_end:
            return
        self._iterator = None
        known = shard.end if shard.end is not None else self._read
        if self._read != known or self._read < shard.offset:
            raise DatasetError(
                f"shard {shard.index} of the stream has ended after {self._read} records in pass "
                f"{shard.number} (both counted from 0), but it had {max(shard.offset, known)} before: a "
                "shard has to yield the same records in the same order in each process, and after a restart"
            )

    def _begin_shard(self) -> None:
        shard = self._list[len(self._begins)]
        self._begins.append(self._next)
        self._read = 0
        self._generators.seed(mix(self._shard_seed(shard)))
        records: Any = self._make_shard(shard.index)
        if callable(getattr(records, "set_epoch", None)):
            records.set_epoch(shard.number)
        self._iterator = iter(records)

    def _shard_seed(self, shard: Shard) -> int:
        return mix(pass_seed(self._seed, shard.number) + shard.index)

    def _drop_before(self, position: int) -> None:
        count = min(position - self._base, len(self._window))
        if count > 0:
            del self._window[:count]
            self._base += count

    def _path(self, start: int, end: int) -> Path:
        """Return the stretches between two positions, also that of a shard which ends at the first."""
        path = []
        ends = [*self._begins[1:], self._next]
        for place, (shard, begin, stop) in enumerate(zip(self._list, self._begins, ends, strict=False)):
            low, high = max(start, begin), min(end, stop)
            is_ended = place < len(self._begins) - 1 or self._iterator is None
            if low <= high:
                offset = shard.offset + low - begin
                path.append(Stretch(shard.number, shard.index, offset, high - low, is_ended and high == stop))
        return tuple(path)
