"""Streams whose shards are dealt to the replicas: each record once per pass, and reading costs 1/K."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from threading import Barrier, Thread
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adascale_core.batch.plans import BatchPlan
from adascale_worker.batches.stream import Shard, Stream, StreamFeed, StreamPlace, deal
from adascale_worker.errors import DatasetError
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.state.tree import flatten, unflatten
from support.examples import examples
from support.launch import run_python


class Table:
    """Exchanges values between threads."""

    def __init__(self, replicas: int) -> None:
        self.values: list[Any] = [None] * replicas
        self.barrier = Barrier(replicas, timeout=20)


class Member:
    """A replica, its feed, and what it reads."""

    def __init__(self, lengths: list[int], job: Job) -> None:
        self.rank = 0
        self.table = Table(1)
        self.lengths = lengths
        self.read = 0
        self.samples: list[Any] = []
        self.batches: Iterator[Any] | None = None
        self.feed = StreamFeed(job.consumed, group=cast(ReplicaGroup, self))
        if job.place is not None:
            self.feed.restore(unflatten(*flatten(job.place.state_dict())), job.consumed)
        stream = Stream(
            self.make_shard, len(lengths), is_function=True, shuffle_buffer=job.shuffle_buffer, seed=3
        )
        self.feed.open(stream, job.options)
        self.exchanges = -1

    def gather(self, value: Any) -> list[Any]:
        self.table.values[self.rank] = value
        self.table.barrier.wait()
        values = list(self.table.values)
        self.table.barrier.wait()
        return values

    def broadcast(self, value: Any) -> Any:
        return self.gather(value)[0]

    def make_shard(self, index: int) -> Iterator[tuple[int, int]]:
        for offset in range(self.lengths[index]):
            self.read += 1
            yield index, offset

    def step(self, consumed: int, plan: BatchPlan) -> None:
        if self.batches is None or self.exchanges != self.feed.exchanges:
            self.batches = self.feed.micro_batches(consumed, plan, self.rank)
            self.exchanges = self.feed.exchanges
        self.samples = [each for batch in islice(self.batches, plan.accumulation) for each in batch]
        assert len(self.samples) == plan.local_bsz * plan.accumulation


@dataclass
class Job:
    """The replicas of a job, in threads."""

    lengths: list[int]
    shuffle_buffer: int = 0
    options: dict[str, Any] = field(default_factory=lambda: {"collate_fn": list})
    consumed: int = 0
    place: StreamPlace | None = None
    trained: list[tuple[int, int]] = field(default_factory=list)
    members: list[Member] = field(default_factory=list)
    plan: BatchPlan = field(default_factory=lambda: BatchPlan(1, 1, 1))

    def start(self, plan: BatchPlan, kept: list[int]) -> None:
        members = [self.members[rank] for rank in kept if rank < len(self.members)][: plan.replicas]
        for member in self.members:
            if member not in members:
                member.feed.close()
        while len(members) < plan.replicas:
            members.append(Member(self.lengths, self))
        table = Table(plan.replicas)
        for rank, member in enumerate(members):
            member.rank, member.table, member.batches = rank, table, None
        self.members, self.plan = members, plan

    def step(self, *, is_discarded: bool = False) -> None:
        errors: list[BaseException] = []

        def run(member: Member) -> None:
            try:
                member.step(self.consumed, self.plan)
            except BaseException as error:  # noqa: BLE001 - the main thread raises it
                errors.append(error)
                member.table.barrier.abort()

        if len(self.members) == 1:
            self.members[0].step(self.consumed, self.plan)
        else:
            threads = [Thread(target=run, args=[member]) for member in self.members]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if errors:
            raise errors[0]
        if is_discarded:
            return
        self.consumed += self.plan.global_bsz
        for member in self.members:
            self.trained += member.samples
            member.feed.finished_step(self.consumed)
        places = [member.feed.place_at(self.consumed) for member in self.members]
        assert all(place == places[0] for place in places)
        self.place = places[0]

    def require_each_once(self) -> None:
        everything = [
            (index, offset) for index, length in enumerate(self.lengths) for offset in range(length)
        ]
        passes, rest = divmod(self.consumed, len(everything))
        counts = Counter(self.trained)
        assert all(passes <= counts[record] <= passes + 1 for record in everything), counts
        assert sum(counts.values()) == self.consumed
        assert self.place is not None
        assert self.place.begin == self.place.number * len(everything)
        left = sum(self.lengths[shard.index] - shard.offset for shard in self.place.rest)
        assert left % len(everything) == (len(everything) - rest) % len(everything)

    def close(self) -> None:
        for member in self.members:
            member.feed.close()


plans = st.builds(
    BatchPlan, replicas=st.integers(1, 3), local_bsz=st.integers(1, 4), accumulation=st.integers(1, 2)
)


@pytest.mark.parametrize("shuffle_buffer", [0, 4])
@settings(max_examples=examples(30))
@given(
    lengths=st.lists(st.integers(0, 15), min_size=1, max_size=10).filter(lambda each: sum(each) >= 24),
    schedule=st.lists(
        st.tuples(
            plans, st.integers(0, 6), st.lists(st.integers(0, 2), max_size=3, unique=True), st.booleans()
        ),
        min_size=1,
        max_size=4,
    ),
)
def test_each_record_is_trained_once_per_pass_over_joins_losses_plans_and_restarts(
    lengths: list[int], shuffle_buffer: int, schedule: list[tuple[BatchPlan, int, list[int], bool]]
) -> None:
    job = Job(lengths, shuffle_buffer)
    for plan, steps, kept, loses_step in schedule:
        job.start(plan, kept)
        for _ in range(steps):
            job.step()
        if loses_step:
            job.step(is_discarded=True)
    job.start(BatchPlan(2, 2, 1), [0])
    job.step()
    job.require_each_once()


def read_in_worker_processes() -> None:
    options = {"num_workers": 2, "multiprocessing_context": "fork", "collate_fn": list}
    job = Job([13, 7, 20, 9, 11, 16], options=options)
    for replicas, kept in ((1, []), (2, [0]), (1, [1])):
        job.start(BatchPlan(replicas, 3, 2), kept)
        for _ in range(5):
            job.step()
        job.step(is_discarded=True)
    job.start(BatchPlan(1, 3, 2), [0])
    job.step()
    job.close()
    job.require_each_once()


def test_worker_processes_read_each_record_once_over_changes_and_a_discarded_step() -> None:
    # In a process of its own: forks of one that has run other tests and their threads may end at once.
    program = "from worker import test_shard_feed; test_shard_feed.read_in_worker_processes()"
    run_python("-c", program)


def test_each_replica_reads_its_part() -> None:
    job = Job([100] * 40)
    job.start(BatchPlan(4, 5, 1), [])
    for _ in range(150):
        job.step()
    job.require_each_once()
    for member in job.members:
        assert 150 * 5 <= member.read <= 150 * 5 + 5 * 5 + 1
    # Those that stay read on, and one that joins reads the beginning of a shard at most.
    before = [member.read for member in job.members]
    job.start(BatchPlan(4, 5, 1), [0, 1, 2])
    job.step()
    assert all(member.read <= count + 30 for member, count in zip(job.members[:3], before[:3], strict=True))
    assert job.members[3].read <= 100 + 30


def test_a_pass_may_end_on_all_replicas_with_the_same_step() -> None:
    job = Job([12, 12])
    job.start(BatchPlan(2, 4, 1), [])
    for _ in range(7):
        job.step()
    job.require_each_once()


def test_a_pass_may_end_where_a_list_of_one_becomes_that_of_all() -> None:
    job = Job([0, 14, 13])
    for plan, kept, steps in (
        (BatchPlan(2, 3, 1), [], 1),
        (BatchPlan(2, 1, 2), [], 5),
        (BatchPlan(2, 2, 1), [0], 1),
    ):
        job.start(plan, kept)
        for _ in range(steps):
            job.step()
    job.require_each_once()


def test_a_shard_that_is_shorter_than_before_is_an_error() -> None:
    job = Job([30, 30])
    job.start(BatchPlan(1, 5, 1), [])
    for _ in range(5):
        job.step()
    job.lengths = [3, 3]
    job.start(BatchPlan(1, 5, 1), [])
    with pytest.raises(
        DatasetError, match=r"shard \d of the stream has ended after 3 records in pass 0 .* had 25 before"
    ):
        job.step()


@pytest.mark.parametrize("replicas", [1, 2])
def test_shards_without_records_are_an_error(replicas: int) -> None:
    job = Job([0, 0])
    job.start(BatchPlan(replicas, 5, 1), [])
    with pytest.raises(DatasetError, match="has 0 records: check the path of the data"):
        job.step()


def test_shards_that_were_begun_stay_with_their_replicas() -> None:
    job = Job([200] * 8)
    job.start(BatchPlan(3, 7, 1), [])
    job.step()
    assert job.place is not None
    lists = deal(job.place, 3)
    assert [(each[0].offset, each[0].owner) for each in lists] == [(7, 0), (7, 1), (7, 2)]


def test_replicas_read_the_same_list_if_too_few_shards_are_left() -> None:
    left = (Shard(0, 2, 5), Shard(0, 1, 3, end=9))
    assert deal(StreamPlace(0, 0, left), 2) == (left,)
