"""Shards of a stream, without reading: each record is dealt once per pass, however long the shards are."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from adascale_core.batch.plans import BatchPlan
from adascale_worker.batches.shard_feed import (
    Deal,
    Path,
    Shard,
    ShardOrder,
    ShardPlace,
    Stretch,
    advance,
    available,
    deal,
)

plans = st.builds(
    BatchPlan, replicas=st.integers(1, 4), local_bsz=st.integers(1, 4), accumulation=st.integers(1, 2)
)


def follow(shards: tuple[Shard, ...], lengths: list[int], ahead: int) -> tuple[Path, list[tuple[int, int]]]:
    """Return what a reader finds, and the records: index and offset."""
    path: list[Stretch] = []
    records: list[tuple[int, int]] = []
    for shard in shards:
        if len(records) >= ahead:
            break
        count = min(lengths[shard.index] - shard.offset, ahead - len(records))
        ends = shard.offset + count == lengths[shard.index]
        path.append(Stretch(shard.number, shard.index, shard.offset, count, ends))
        records += [(shard.index, shard.offset + number) for number in range(count)]
    return tuple(path), records


def deal_enough(
    place: ShardPlace, order: ShardOrder, lengths: list[int], plan: BatchPlan, before: int
) -> tuple[ShardPlace, Deal, list[Path], list[list[tuple[int, int]]]]:
    """Deal until each replica has enough records for a step."""
    for _ in range(100):
        dealt = deal(place, order, plan.replicas)
        share = plan.global_bsz if dealt.is_shared else plan.global_bsz // plan.replicas
        found = [follow(each, lengths, 3 * share + 1) for each in dealt.lists]
        paths, records = [path for path, _ in found], [each for _, each in found]
        if all(available(path) >= share for path in paths):
            return place, dealt, paths, records
        place = advance(place, dealt, paths, order, before=before, count=0)
    raise AssertionError("never enough")


@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=12).filter(lambda each: sum(each) >= 16),
    shuffles=st.booleans(),
    schedule=st.lists(st.tuples(plans, st.integers(1, 6)), min_size=1, max_size=5),
)
def test_each_record_is_dealt_once_per_pass_over_plans(
    lengths: list[int], shuffles: bool, schedule: list[tuple[BatchPlan, int]]
) -> None:
    order = ShardOrder(len(lengths), 3, shuffles)
    place, consumed = ShardPlace(0, 0, order.of(0)), 0
    trained: list[tuple[int, int]] = []
    total = sum(lengths)
    for plan, steps in schedule:
        while steps:
            place, dealt, paths, records = deal_enough(place, order, lengths, plan, consumed)
            share = plan.global_bsz if dealt.is_shared else plan.global_bsz // plan.replicas
            made = min(steps, *(available(path) // share for path in paths))
            for each in records:
                trained += each[: made * share]
            place = advance(place, dealt, paths, order, before=consumed, count=made * plan.global_bsz)
            place = ShardPlace.from_state(place.state_dict())
            consumed += made * plan.global_bsz
            steps -= made
            passes, rest = divmod(consumed, total)
            assert (place.number, place.begin) == (passes, passes * total)
            assert place.length == (total if passes else None)
            left = sum(lengths[shard.index] - shard.offset for shard in place.rest)
            assert left == total - rest
    counts = Counter(trained)
    everything = [(index, offset) for index, length in enumerate(lengths) for offset in range(length)]
    passes = consumed // total
    assert all(passes <= counts[record] <= passes + 1 for record in everything)
    assert sum(counts.values()) == consumed


def test_shards_that_were_begun_stay_with_their_replicas() -> None:
    order = ShardOrder(8, 3, shuffles=True)
    lengths = [20] * 8
    place = ShardPlace(0, 0, order.of(0))
    dealt = deal(place, order, 3)
    assert not dealt.is_shared
    paths = [follow(each, lengths, 10)[0] for each in dealt.lists]
    place = advance(place, dealt, paths, order, before=0, count=3 * 7)
    again = deal(place, order, 3)
    assert [each[0].index for each in again.lists] == [each[0].index for each in dealt.lists]
    assert [each[0].offset for each in again.lists] == [7, 7, 7]


def test_replicas_read_the_same_list_if_too_few_shards_are_left() -> None:
    order = ShardOrder(3, 3, shuffles=False)
    dealt = deal(ShardPlace(0, 0, (Shard(0, 2, 5),)), order, 2)
    assert dealt.is_shared
    assert [(shard.number, shard.index) for shard in dealt.of(1)][:4] == [(0, 2), (1, 0), (1, 1), (1, 2)]
