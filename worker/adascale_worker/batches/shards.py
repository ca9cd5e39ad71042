"""How the shards of a stream are divided among the replicas, and what of them is left after some steps.

Each replica reads a list of shards of its own, one after the other, so that reading costs 1/K. How long a
shard is turns out when it ends. So each replica reads ahead, and they exchange what they have found: a
path, the records that follow and the shards that end there. As long as each path has enough records for a
step, what is left of each shard is a function of the paths and the number of steps, also for the shards of a
replica that is lost. When a path is too short, the shards that are left are dealt again.

If fewer shards than replicas are left whose end is unknown, all replicas read the same list and take their
share of each micro-batch, until the pass ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from adascale_worker.batches.seeding import pass_seed, permute

_PASSES_AHEAD = 2
"""Passes that a list for all replicas has after the present one, because a step may have the end of one."""


@dataclass(frozen=True)
class Shard:
    """What is left of a shard in a pass."""

    number: int  # of the pass
    index: int
    offset: int = 0  # records of it that were trained
    end: int | None = None  # its number of records; None if it is unknown
    owner: int | None = None  # the rank that has begun to read it; None if none has


@dataclass(frozen=True)
class Stretch:
    """Consecutive records of a shard."""

    number: int  # of the pass
    index: int  # of the shard
    offset: int  # records of the shard before them
    count: int
    ends: bool  # whether the shard ends after them


Path = tuple[Stretch, ...]
"""What follows in the list of a replica, as far as it has read ahead."""


@dataclass(frozen=True)
class Deal:
    """The list of shards of each replica."""

    lists: tuple[tuple[Shard, ...], ...]  # one for each rank; if `is_shared`, one for all
    is_shared: bool  # whether all replicas read the same list

    def of(self, rank: int) -> tuple[Shard, ...]:
        """Return the list of a rank."""
        return self.lists[0 if self.is_shared else rank]


@dataclass(frozen=True)
class ShardPlace:
    """What is left of a pass."""

    number: int
    begin: int  # records of all passes before it
    rest: tuple[Shard, ...]  # the shards that have not ended
    length: int | None = None  # records of the first pass; None while it has not ended

    def state_dict(self) -> dict[str, Any]:
        """Return the place as plain values."""
        rest = [[each.number, each.index, each.offset, each.end, each.owner] for each in self.rest]
        return {"number": self.number, "begin": self.begin, "rest": rest, "length": self.length}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> ShardPlace:
        """Return the place that `state_dict` describes."""
        rest = tuple(Shard(*each) for each in state["rest"])
        return cls(state["number"], state["begin"], rest, state["length"])


@dataclass(frozen=True)
class ShardOrder:
    """The order of the shards in each pass."""

    shards: int
    seed: int
    shuffles: bool  # whether each pass has another order than 0, 1, 2, ..

    def of(self, number: int) -> tuple[Shard, ...]:
        """Return the shards of a pass in their order."""
        indices = numpy.arange(self.shards)
        if self.shuffles:
            indices = permute(indices, self.shards, pass_seed(self.seed, number))
        return tuple(Shard(number, index) for index in indices.tolist())


def deal(place: ShardPlace, order: ShardOrder, replicas: int) -> Deal:
    """Deal the shards that are left to replicas.

    Each gets a shard whose end is unknown, so it finds the end of another one if it has too few records. A
    shard that was begun stays with the rank that reads it.
    """
    unknown = [shard for shard in place.rest if shard.end is None]
    if replicas == 1 or len(unknown) < replicas:
        following = (order.of(place.number + ahead) for ahead in range(1, _PASSES_AHEAD + 1))
        begun_first = sorted(place.rest, key=lambda shard: shard.offset == 0)
        return Deal((tuple(begun_first) + tuple(each for shards in following for each in shards),), True)
    lists: list[list[Shard]] = [[] for _ in range(replicas)]
    others = []
    for shard in unknown:
        if shard.offset and shard.owner is not None and shard.owner < replicas and not lists[shard.owner]:
            lists[shard.owner].append(shard)
        else:
            others.append(shard)
    others.sort(key=lambda shard: shard.offset == 0)
    for shard in others:
        min(lists, key=len).append(shard)
    # Those whose end is known come second, so that a shard that was begun is read on.
    for number, shard in enumerate(shard for shard in place.rest if shard.end is not None):
        lists[number % replicas].insert(1, shard)
    return Deal(tuple(map(tuple, lists)), False)


def available(path: Path) -> int:
    """Return the number of records of a path."""
    return sum(stretch.count for stretch in path)


def rest_of(shards: Sequence[Shard], path: Path, count: int, rank: int) -> tuple[Shard, ...]:
    """Return what is left of the list of a rank after `count` records of its path, at most `available(path)`.

    Ends that the path contains are known then.
    """
    left = []
    found = {(stretch.number, stretch.index): stretch for stretch in path}
    for shard in shards:
        stretch = found.get((shard.number, shard.index))
        if stretch is None:
            left.append(shard)
            continue
        end = stretch.offset + stretch.count if stretch.ends else shard.end
        taken = min(count, stretch.count)
        count -= taken
        offset = stretch.offset + taken
        if not (stretch.ends and offset == end):
            owner = rank if offset or shard.offset else None
            left.append(Shard(shard.number, shard.index, offset, end, owner))
    assert count == 0, "a path has enough records"
    return tuple(left)


def advance(
    place: ShardPlace, dealt: Deal, paths: Sequence[Path], order: ShardOrder, *, before: int, count: int
) -> ShardPlace:
    """Return the place after some steps, whose shares are the same for all replicas."""
    if not any(dealt.lists):
        return place
    if dealt.is_shared:
        rest = rest_of(dealt.lists[0], paths[0], count, rank=0)
        number = rest[0].number if rest else dealt.lists[0][-1].number + 1
        # Complete passes of the path before the present one.
        ended = [
            sum(each.count for each in paths[0] if each.number == gone)
            for gone in range(place.number, number)
        ]
        length = place.length
        if length is None and ended:
            length = before + ended[0] - place.begin
        begin = before + sum(ended) if ended else place.begin
        rest = tuple(shard for shard in rest if shard.number == number)
    else:
        share = count // len(dealt.lists)
        rest = tuple(
            shard
            for rank, shards in enumerate(dealt.lists)
            for shard in rest_of(shards, paths[rank], share, rank)
        )
        number, begin, length = place.number, place.begin, place.length
        if not rest:
            length = before + count - place.begin if length is None else length
            number, begin = number + 1, before + count
    return ShardPlace(number, begin, rest or order.of(number), length)
