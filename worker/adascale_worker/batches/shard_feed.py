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

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy

from adascale_core.batch.plans import BatchPlan
from adascale_worker.batches.records import RecordFeed, RecordReader, StreamOptions
from adascale_worker.batches.seeding import mix, pass_seed, permute
from adascale_worker.errors import DatasetError
from adascale_worker.membership.process_group import ReplicaGroup

_PASSES_AHEAD = 2
"""Passes that a list for all replicas has after the present one, because a step may have the end of one."""
STEPS_AHEAD = 4
"""Steps whose records each replica reads ahead, after which the replicas exchange what they have found."""


@dataclass(frozen=True)
class ShardOf:
    """Returns the shards of a data set with the method `shard`."""

    dataset: Any
    shards: int

    def __call__(self, index: int) -> Any:
        """Return a shard."""
        return self.dataset.shard(num_shards=self.shards, index=index)


@dataclass(frozen=True)
class Shards:
    """The shards of a stream."""

    make: Callable[[int], Iterable[Any]]  # returns the records of a shard, in the same order each time
    count: int

    @classmethod
    def of(cls, dataset: Any, shards: int | None, how: StreamOptions) -> Shards | None:
        """Return the shards of a stream; None to read it as a whole.

        The data set is such a function, if `shards` is given; or it has `num_shards` and `shard()`, as those
        of Hugging Face.
        """
        if shards is not None:
            return cls(dataset, shards)
        count = getattr(dataset, "num_shards", None)
        if type(count) is int and count > 1 and callable(getattr(dataset, "shard", None)) and how.is_exact:
            return cls(ShardOf(dataset, count), count)
        return None


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


# -- reading ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShardPosition:
    """A position in the list of a replica."""

    position: int  # records of the list before it
    path: Path


class ShardReader(RecordReader):
    """Reads the records of a list of shards."""

    def __init__(
        self, make_shard: Callable[[int], Iterable[Any]], seed: int, *, shuffle_buffer: int = 0
    ) -> None:
        super().__init__(seed, shuffle_buffer)
        self._make_shard = make_shard
        self._list: tuple[Shard, ...] = ()
        self._read = 0
        """Records of this shard that were read."""
        self._begins: list[int] = []
        """Position of the first record of each shard of the list that was begun."""

    def _read_until(self, end: int, ahead: int) -> None:
        while self._next < end + ahead and self._has_more:
            self._read_block()

    def _place_at(self, position: int, ahead: int) -> ShardPosition:
        return ShardPosition(position, self._path(position, position + ahead))

    def _close(self) -> None:
        self._list, self._iterator = (), None

    @property
    def _has_more(self) -> bool:
        return self._iterator is not None or len(self._begins) < len(self._list)

    # -- another list -------------------------------------------------------------------------------------

    def _begin_at(self, start: tuple[Shard, ...]) -> None:
        if self._continues(start):
            return
        self._list, self._iterator, self._read = start, None, 0
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
        block = self._next_block(self._shard_seed(shard) + self._read)
        self._window += block[max(shard.offset - self._read, 0) :]
        self._read += len(block)
        if self._iterator is not None:
            return
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


class ShardFeed(RecordFeed[ShardPosition]):
    """Loads a replica's micro-batches, and knows what is left of each shard, at each step boundary."""

    def __init__(self, place: ShardPlace | None, consumed: int, group: ReplicaGroup) -> None:
        super().__init__()
        self._place = place
        self._since = consumed
        self._group = group
        self._dealt: Deal | None = None
        self._paths: list[Path] = []
        self._steps = 0
        """Steps that the paths are enough for."""
        self._plan = BatchPlan(1, 1, 1)
        self._rank = 0
        self._batches: Iterator[Any] | None = None
        self._order = ShardOrder(1, 0, shuffles=False)

    def open(self, source: Shards, how: StreamOptions, options: dict[str, Any], *, seed: int) -> None:
        """Use shards from the next micro-batch on. Those that are open already are read on."""
        last = max((shard.index for shard in self._place.rest), default=0) if self._place is not None else 0
        if last >= source.count:
            raise DatasetError(
                f"dataloader() got shards={source.count}, but shard {last} is not read completely yet: use "
                "the same shards as before"
            )
        super().open(source, how, options, seed=seed)
        self._order = ShardOrder(source.count, seed, how.shuffles_shards)
        if self._place is None:
            self._place = ShardPlace(0, self._since, self._order.of(0))

    def _is_open(self, source: Shards) -> bool:
        return self._source is not None and source.make == self._source.make

    # -- places -------------------------------------------------------------------------------------------

    def place_at(self, consumed: int) -> ShardPlace | None:
        """Return what is left at a step boundary, after the last exchange; None before the first `open`."""
        if self._place is None or self._dealt is None or consumed == self._since:
            return self._place
        return advance(
            self._place,
            self._dealt,
            self._paths,
            self._order,
            before=self._since,
            count=consumed - self._since,
        )

    def restore(self, state: dict[str, Any], consumed: int) -> None:
        """Continue at the place of a saved state."""
        self._place, self._since = ShardPlace.from_state(state), consumed
        self._dealt = self._batches = None

    def length_at(self, consumed: int) -> int | None:
        """Return the records of the first pass; None while it has not ended."""
        place = self.place_at(consumed) if self._may_end_pass else None
        return None if place is None else place.length

    @property
    def _may_end_pass(self) -> bool:
        """Whether a pass may end before the next exchange."""
        if self._dealt is None:
            return True
        if self._dealt.is_shared:
            return any(stretch.ends for stretch in self._paths[0])
        return all(
            sum(stretch.ends for stretch in path) >= len(shards)
            for path, shards in zip(self._paths, self._dealt.lists, strict=True)
        )

    def finished_step(self, consumed: int) -> None:
        """Record that training is at a step boundary, after `consumed` samples of all replicas."""
        super().finished_step(consumed)
        if self._dealt is not None and consumed - self._since >= self._steps * self._plan.global_bsz:
            self.exchanges += 1
            self._steps += 1

    # -- micro-batches ------------------------------------------------------------------------------------

    def micro_batches(self, consumed: int, plan: BatchPlan, rank: int) -> Iterator[Any]:
        """Load this replica's micro-batches until `exchanges` has changed. A collective call."""
        place = self.place_at(consumed)
        assert place is not None
        continues = (
            self._batches is not None
            and (self._plan, self._rank) == (plan, rank)
            and bool(self._places)
            and self._places[-1][0] == consumed
        )
        paths = self._exchange(self._places[-1][1].path if continues else None)
        if None not in paths and self._dealt is not None and self._batches is not None:
            found = [path for path in paths if path is not None]
            dealt = self._after(consumed)
            # With the ends that were found since.
            place = advance(place, dealt, found, self._order, before=consumed, count=0)
            is_new_pass = dealt.is_shared and not deal(place, self._order, plan.replicas).is_shared
            if not is_new_pass and self._is_enough(dealt, found, plan):
                self._use(place, consumed, dealt, found, plan)
                return self._batches
        # Some members may know the ends of more shards, if others were lost while they exchanged them.
        place = ShardPlace.from_state(self._group.gather(place.state_dict())[0])
        return self._deal(place, consumed, plan)

    def _deal(self, place: ShardPlace, consumed: int, plan: BatchPlan) -> Iterator[Any]:
        """Deal what is left, until each replica has enough records for a step."""
        while True:
            dealt = deal(place, self._order, plan.replicas)
            loaded = self._begin(dealt, consumed, plan)
            nothing, position = next(loaded)
            if position is None:
                raise nothing
            paths = [path for path in self._exchange(position.path) if path is not None]
            if self._is_enough(dealt, paths, plan):
                break
            if dealt.is_shared:
                raise DatasetError(
                    f"the {self._order.shards} shards of the stream have {available(paths[0])} records in "
                    f"several passes, fewer than a step of {plan.global_bsz} samples: check the path"
                )
            place = advance(place, dealt, paths, self._order, before=consumed, count=0)
        self._places = [(consumed, position)]
        self._use(place, consumed, dealt, paths, plan)
        self._batches = self._delivered(loaded, consumed, plan.replicas * plan.local_bsz)
        return self._batches

    def _use(self, place: ShardPlace, consumed: int, dealt: Deal, paths: list[Path], plan: BatchPlan) -> None:
        share = self._share(dealt, plan)
        self._place, self._since, self._dealt, self._paths = place, consumed, dealt, paths
        self._plan, self._rank = plan, self._group.rank
        # One record more is needed to find that the pass has ended.
        self._steps = max(1, min((available(path) - 1) // share for path in paths))

    def _exchange(self, path: Path | None) -> list[Path | None]:
        row = None if path is None else [list(astuple(stretch)) for stretch in path]
        rows = self._group.gather(row)
        return [None if row is None else tuple(Stretch(*each) for each in row) for row in rows]

    def _after(self, consumed: int) -> Deal:
        """Return the lists of the present deal, without what was trained."""
        assert self._dealt is not None
        lists, paths = self._dealt.lists, self._paths
        count = (consumed - self._since) // (1 if self._dealt.is_shared else len(lists))
        rest = (rest_of(each, paths[rank], count, rank) for rank, each in enumerate(lists))
        return Deal(tuple(rest), self._dealt.is_shared)

    @staticmethod
    def _share(dealt: Deal, plan: BatchPlan) -> int:
        """Return the records of a list in a step."""
        return plan.global_bsz if dealt.is_shared else plan.global_bsz // plan.replicas

    def _is_enough(self, dealt: Deal, paths: list[Path], plan: BatchPlan) -> bool:
        return all(available(path) >= self._share(dealt, plan) for path in paths)

    def _begin(self, dealt: Deal, consumed: int, plan: BatchPlan) -> Iterator[Any]:
        """Begin with a list, and return what is loaded, first without samples."""
        self._batches = None
        self._places = [(consumed, ShardPosition(0, ()))]
        rank = self._group.rank
        return self._load(
            (object(),),  # Another list than before.
            dealt.of(rank),
            0,
            consumed,
            plan,
            rank,
            is_shared=dealt.is_shared,
            ahead=STEPS_AHEAD * self._share(dealt, plan) + 1,
            looks_first=True,
        )

    def _make_reader(self) -> ShardReader:
        return ShardReader(self._source.make, self._seed, shuffle_buffer=self.how.shuffle_buffer)

    def close(self) -> None:
        """End worker processes. May be called again."""
        self._batches = None
        super().close()
