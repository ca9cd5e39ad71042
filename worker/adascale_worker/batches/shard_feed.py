"""The micro-batches of a stream whose shards are dealt to the replicas, see `shards`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple
from typing import Any, Protocol

from adascale_core.batch.plans import BatchPlan
from adascale_worker.batches.persistent_loader import PersistentLoader
from adascale_worker.batches.requests import Requests, make_loader
from adascale_worker.batches.shard_reader import MakeShard, ShardPosition, ShardReader
from adascale_worker.batches.shards import (
    Deal,
    Path,
    ShardOrder,
    ShardPlace,
    Stretch,
    advance,
    available,
    deal,
    rest_of,
)
from adascale_worker.batches.stream_feed import StreamOptions
from adascale_worker.errors import DatasetError

STEPS_AHEAD = 4
"""Steps whose records each replica reads ahead, after which the replicas exchange what they have found."""


class Exchange(Protocol):
    """Exchanges values with the other replicas."""

    @property
    def rank(self) -> int:
        """The index of this replica."""

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in the order of ranks, on all ranks."""


class ShardFeed:
    """Loads a replica's micro-batches, and knows what is left of each shard, at each step boundary."""

    def __init__(self, place: ShardPlace | None, consumed: int, group: Exchange) -> None:
        self._place = place
        self._since = consumed
        self._group = group
        self.exchanges = 0
        self._dealt: Deal | None = None
        self._paths: list[Path] = []
        self._steps = 0
        """Steps that the paths are enough for."""
        self._plan = BatchPlan(1, 1, 1)
        self._rank = 0
        self._positions: list[tuple[int, ShardPosition]] = []
        """The positions in the own list at the last step boundary and after each micro-batch since then, each
        after the number of samples that all replicas have got before it."""
        self._batches: Iterator[Any] | None = None
        self._make_shard: MakeShard | None = None
        self._order = ShardOrder(1, 0, shuffles=False)
        self._stream = StreamOptions()
        self._options: dict[str, Any] = {}
        self._seed = 0
        self._reader: ShardReader | None = None
        self._loader: PersistentLoader[Requests] | None = None

    def open(
        self, make_shard: MakeShard, order: ShardOrder, stream: StreamOptions, options: dict[str, Any]
    ) -> None:
        """Use shards from the next micro-batch on. Those that are open already are read on."""
        if self._place is not None and any(shard.index >= order.shards for shard in self._place.rest):
            raise DatasetError(
                f"dataloader() got shards={order.shards}, but shard "
                f"{max(shard.index for shard in self._place.rest)} is not read completely yet: use the same "
                "shards as before"
            )
        if make_shard != self._make_shard or stream.shuffle_buffer != self._stream.shuffle_buffer:
            self._reader, self._batches = None, None
            self.close()
        if stream.transform != self._stream.transform or options != self._options:
            self._batches = None
            self.close()
        self._make_shard, self._order, self._stream, self._options = make_shard, order, stream, options
        self._seed = order.seed
        if self._place is None:
            self._place = ShardPlace(0, self._since, order.of(0))

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

    def restore(self, place: ShardPlace, consumed: int) -> None:
        """Continue at the place of a saved state."""
        self._place, self._since, self._dealt, self._batches = place, consumed, None, None

    @property
    def may_end_pass(self) -> bool:
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
        while len(self._positions) > 1 and self._positions[1][0] <= consumed:
            self._positions.pop(0)
        if self._dealt is not None and consumed - self._since >= self._steps * self._plan.global_bsz:
            self.exchanges += 1
            self._steps += 1

    # -- micro-batches ------------------------------------------------------------------------------------

    def micro_batches(self, consumed: int, plan: BatchPlan) -> Iterator[Any]:
        """Load this replica's micro-batches, without end, until `exchanges` has changed. A
        collective call.
        """
        place = self.place_at(consumed)
        assert place is not None
        rank = self._group.rank
        goes_on = (
            self._batches is not None
            and (self._plan, self._rank) == (plan, rank)
            and bool(self._positions)
            and self._positions[-1][0] == consumed
        )
        paths = self._exchange(self._positions[-1][1].path if goes_on else None)
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
        self._positions = [(consumed, position)]
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
        assert self._make_shard is not None
        self._batches = None
        workers = self._options.get("num_workers", 0)
        requests = (
            self._loader.sampler
            if self._loader is not None
            else Requests((), self._seed, lambda: self._positions[0][1].position)
        )
        requests.sequence = (object(),)
        self._positions = [(consumed, ShardPosition(0, (), 0))]
        rank = self._group.rank
        requests.begin(
            dealt.of(rank),
            0,
            consumed,
            plan,
            rank,
            is_shared=dealt.is_shared,
            readers=max(1, workers),
            ahead=STEPS_AHEAD * self._share(dealt, plan) + 1,
            looks_first=True,
        )
        if self._loader is not None:
            return self._loader.begin()
        if self._reader is None or workers:
            shuffle_buffer = self._stream.shuffle_buffer
            self._reader = ShardReader(self._make_shard, self._seed, shuffle_buffer=shuffle_buffer)
        seed = self._seed + consumed
        loader = make_loader(self._reader, requests, self._stream.transform, self._options, seed=seed)
        if not workers:
            return iter(loader)
        self._reader = None
        self._loader = PersistentLoader(self._make_shard, self._options, loader, requests)
        return self._loader.begin()

    def _delivered(self, loaded: Iterator[Any], consumed: int, step: int) -> Iterator[Any]:
        for batch, position in loaded:
            if position is None:
                raise batch
            consumed += step
            self._positions.append((consumed, position))
            yield batch

    def close(self) -> None:
        """End worker processes. May be called again."""
        self._batches = None
        if self._loader is not None:
            self._loader.close()
            self._loader = None


def make_shard_of(dataset: Any, shards: int) -> MakeShard:
    """Return a function that returns a shard of a data set with the method `shard`."""
    return _ShardOf(dataset, shards)


class _ShardOf:
    def __init__(self, dataset: Any, shards: int) -> None:
        self._dataset = dataset
        self._shards = shards

    def __call__(self, index: int) -> Any:
        return self._dataset.shard(num_shards=self._shards, index=index)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ShardOf) and other._dataset is self._dataset

    __hash__ = None  # type: ignore[assignment]
