"""Streams: iterable data sets, of which the replicas train each record once per pass."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, get_worker_info

from adascale_core.batch.plans import BatchPlan
from adascale_worker.batches import stream as stream_module
from adascale_worker.batches.stream import Stream, StreamFeed, StreamPlace, StreamReader
from adascale_worker.errors import DatasetError
from adascale_worker.state.tree import flatten, unflatten
from support.examples import examples
from support.streams import Numbers, Packed, WithIteratorState, WithState

WORKERS = {"num_workers": 2, "multiprocessing_context": "fork"}


@dataclass
class Replica:
    """A replica's own copy of the data set, and its feed."""

    dataset: Any
    feed: StreamFeed
    batches: Iterator[Any] | None = None


@dataclass
class Job:
    """The replicas of a job that trains a stream, without processes.

    Args:
        make: makes a data set, as each process of the program does.
        stream: how it is read.
        options: arguments for DataLoader.
    """

    make: Callable[[], Iterable[Any]]
    stream: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=lambda: {"collate_fn": list})
    consumed: int = 0
    place: StreamPlace | None = None
    trained: list[Any] = field(default_factory=list)
    replicas: list[Replica] = field(default_factory=list)
    plan: BatchPlan = field(default_factory=lambda: BatchPlan(1, 1, 1))

    def start(self, plan: BatchPlan, kept: Iterable[int] = ()) -> None:
        """Begin a generation with the members `kept` of the last one; others join and copy the state."""
        members = [self.replicas[rank] for rank in kept][: plan.replicas]
        for left in set(range(len(self.replicas))) - set(kept):
            self.replicas[left].feed.close()
        while len(members) < plan.replicas:
            dataset = self.make()
            feed = StreamFeed(self.consumed)
            if self.place is not None:
                feed.restore(unflatten(*flatten(self.place.state_dict())), self.consumed)
            feed.open(Stream(dataset, seed=3, **self.stream), self.options)
            members.append(Replica(dataset, feed))
        self.replicas, self.plan = members, plan
        for rank, replica in enumerate(members):
            replica.batches = replica.feed.micro_batches(self.consumed, plan, rank)

    def step(self, *, is_discarded: bool = False) -> list[Any]:
        """Let all replicas make a step, and return its samples."""
        samples: list[Any] = []
        for replica in self.replicas:
            assert replica.batches is not None
            for batch in islice(replica.batches, self.plan.accumulation):
                assert len(batch) == self.plan.local_bsz
                samples += batch
        if not is_discarded:
            self.consumed += self.plan.global_bsz
            self.trained += samples
            for replica in self.replicas:
                replica.feed.finished_step(self.consumed)
            places = [replica.feed.place_at(self.consumed) for replica in self.replicas]
            # torchdata's states of the same position differ in a count that a loaded one begins with.
            plain = [(replace(each, saved=None), each.saved and each.saved[0]) for each in places]
            assert all(each == plain[0] for each in plain) or not self.stream.get("is_exact", True)
            self.place = places[0]
        return samples

    def close(self) -> None:
        for replica in self.replicas:
            replica.feed.close()


def place_of(job: Job) -> StreamPlace:
    assert job.place is not None
    return job.place


def require_each_once(trained: list[int], count: int) -> None:
    """Check that the samples are complete passes over the numbers below `count`, and the part of another."""
    passes, rest = divmod(len(trained), count)
    counts = Counter(trained)
    assert all(passes <= counts[number] <= passes + 1 for number in range(count)), counts
    assert sum(counts.values()) == passes * count + rest
    assert set(counts) <= set(range(count))


@dataclass(frozen=True)
class Event:
    """What happens after some steps.

    Args:
        steps: before it.
        plan: the next one.
        survivors: the share of the members that stay, in this order.
        loses_step: whether a member is lost within a step, which the others discard.
    """

    steps: int
    plan: BatchPlan
    survivors: list[int]
    loses_step: bool


plans = st.builds(
    BatchPlan, replicas=st.integers(1, 3), local_bsz=st.integers(1, 5), accumulation=st.integers(1, 2)
)
events = st.builds(
    Event,
    steps=st.integers(0, 4),
    plan=plans,
    survivors=st.lists(st.integers(0, 2), max_size=3, unique=True),
    loses_step=st.booleans(),
)
DATA_SETS = ("plain", "shuffled by Python", "with states", "with states of the iterator")


def make_data_set(kind: str, count: int) -> Any:
    if kind == "with states":
        return WithState(count)
    if kind == "with states of the iterator":
        return WithIteratorState(count)
    return Numbers(count, shuffles=kind != "plain")


@pytest.mark.parametrize("kind", DATA_SETS)
@settings(max_examples=examples(60))
@given(
    count=st.integers(1, 60),
    interval=st.integers(1, 20),
    shuffle_buffer=st.sampled_from([0, 0, 3, 7, 100]),
    schedule=st.lists(events, min_size=1, max_size=4),
)
def test_each_record_is_trained_once_per_pass_over_joins_losses_plans_and_restarts(
    kind: str, count: int, interval: int, shuffle_buffer: int, schedule: list[Event]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_module, "SAVE_INTERVAL", interval)
        job = Job(lambda: make_data_set(kind, count), {"shuffle_buffer": shuffle_buffer})
        calm = Job(lambda: make_data_set(kind, count), {"shuffle_buffer": shuffle_buffer})
        job.start(BatchPlan(1, 2, 1))
        for event in schedule:
            for _ in range(event.steps):
                job.step()
            if event.loses_step:
                job.step(is_discarded=True)
            # A schedule without survivors is a restart from a checkpoint.
            job.start(event.plan, [rank for rank in event.survivors if rank < len(job.replicas)])
        job.step()
        require_each_once(job.trained, count)
        # The steps have the records that a single reader reads in their place.
        calm.start(BatchPlan(1, job.consumed, 1))
        assert Counter(calm.step()) == Counter(job.trained)
        assert (place_of(calm).number, place_of(calm).begin) == (place_of(job).number, place_of(job).begin)
        assert place_of(job).length == (count if job.consumed >= count else None)


def test_worker_processes_read_each_record_once_over_changes_and_a_discarded_step() -> None:
    job = Job(lambda: WithState(50), options={**WORKERS, "collate_fn": list})
    job.start(BatchPlan(2, 3, 2))
    for kept in ([0, 1], [1], [0, 1, 2]):
        for _ in range(3):
            job.step()
        job.step(is_discarded=True)
        job.start(BatchPlan(4 - len(kept), 2, 1), kept)
    job.step()
    job.close()
    require_each_once(job.trained, 50)


class Dividing(IterableDataset[int]):
    """Divides itself among worker processes, as data sets of Hugging Face do."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        yield from range(40) if info is None else range(info.id, 40, info.num_workers)


def test_a_data_set_that_divides_itself_among_worker_processes_is_read_completely() -> None:
    job = Job(Dividing, options={**WORKERS, "collate_fn": list})
    job.start(BatchPlan(1, 4, 1))
    for _ in range(10):
        job.step()
    job.close()
    assert sorted(job.trained) == list(range(40))


def test_map_is_applied_to_the_own_samples_of_a_replica_only() -> None:
    mapped: list[int] = []

    def transform(number: int) -> int:
        mapped.append(number)
        return -number

    job = Job(lambda: Numbers(100), {"transform": transform})
    job.start(BatchPlan(4, 2, 1))
    for _ in range(6):
        job.step()
    assert sorted(mapped) == list(range(48))
    assert sorted(job.trained) == [-number for number in range(47, -1, -1)]


def test_packed_sequences_come_once_per_pass_also_if_passes_differ_in_length() -> None:
    def sequences(number: int) -> list[tuple[int, ...]]:
        packed = Packed()
        packed.set_epoch(number)
        return [tuple(sequence) for sequence in packed]

    job = Job(Packed, {"transform": tuple})
    job.start(BatchPlan(1, 2, 1))
    for replicas in (1, 3, 2):
        job.start(BatchPlan(replicas, 2, 1), range(len(job.replicas)))
        for _ in range(2):
            job.step()
    expected = [each for number in range(3) for each in sequences(number)]
    assert Counter(job.trained) == Counter(expected[: job.consumed])
    assert place_of(job).length == len(sequences(0))


def test_a_replica_that_joins_reads_from_the_last_state_and_not_from_the_beginning() -> None:
    job = Job(lambda: WithState(50_000))
    job.start(BatchPlan(1, 50, 1))
    for _ in range(200):
        job.step()
    job.start(BatchPlan(2, 50, 1), [0])
    job.step()
    assert place_of(job).saved is not None
    assert job.replicas[1].dataset.read <= stream_module.SAVE_INTERVAL + 101
    # Without states it reads forward.
    plain = Job(lambda: Numbers(50_000))
    plain.start(BatchPlan(1, 50, 1))
    for _ in range(200):
        plain.step()
    plain.start(BatchPlan(2, 50, 1), [0])
    plain.step()
    assert plain.replicas[1].dataset.read == 10_101
    # The one that was there has read nothing again.
    assert plain.replicas[0].dataset.read == 10_101


def test_memory_does_not_grow_with_the_length() -> None:
    job = Job(lambda: Numbers(None))
    job.start(BatchPlan(1, 100, 2))
    sizes = []
    for _ in range(60):
        job.step()
        job.trained.clear()
        reader = job.replicas[0].feed._reader
        assert isinstance(reader, StreamReader)
        kept = (reader._window, reader._begun, reader._saves, job.replicas[0].feed._places)
        sizes.append(sum(map(len, kept)))
    assert max(sizes[1:]) <= 600


def test_what_a_data_set_draws_does_not_depend_on_the_trainers_generators() -> None:
    orders = []
    for seed in (1, 2):
        random.seed(seed)
        numpy.random.seed(seed)
        torch.manual_seed(seed)
        job = Job(lambda: Numbers(30, shuffles=True))
        job.start(BatchPlan(2, 3, 1))
        for _ in range(10):
            job.step()
            random.random()
        orders.append(job.trained)
    assert orders[0] == orders[1]
    assert orders[0][:30] != orders[0][30:]


@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 1, "multiprocessing_context": "fork"}], ids=["here", "worker process"]
)
def test_a_shuffle_buffer_that_a_state_does_not_contain_is_an_error(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "SAVE_INTERVAL", 10)
    job = Job(lambda: WithState(100, buffer=8), options={"collate_fn": list, **options})
    job.start(BatchPlan(1, 5, 1))
    for _ in range(5):
        job.step()
    job.start(BatchPlan(1, 5, 1))
    with pytest.raises(
        DatasetError, match=r"^record 25 of pass 0 .* is another one after load_state_dict\(\)"
    ):
        job.step()
    job.close()


def test_a_stream_that_is_shorter_after_a_restart_is_an_error() -> None:
    lengths = iter([50, 10])
    job = Job(lambda: Numbers(next(lengths)))
    job.start(BatchPlan(1, 5, 1))
    for _ in range(5):
        job.step()
    job.start(BatchPlan(1, 5, 1))
    with pytest.raises(DatasetError, match=r"ended after 10 records in pass 0 .*, but it had 25 before"):
        job.step()


class Once:
    """A stream that can be read only once."""

    def __init__(self, count: int) -> None:
        self._numbers = iter(range(count))

    def __iter__(self) -> Iterator[int]:
        yield from self._numbers


def test_a_pass_without_records_is_an_error() -> None:
    empty = Job(lambda: Numbers(0))
    empty.start(BatchPlan(1, 4, 1))
    with pytest.raises(DatasetError, match=r"\(type Numbers\) has 0 records: check the path"):
        empty.step()
    once = Job(lambda: Once(8))
    once.start(BatchPlan(1, 4, 1))
    once.step()
    once.step()
    with pytest.raises(
        DatasetError, match=r"pass 1 .* has 0 records, and the first one had 8: iter\(dataset\)"
    ):
        once.step()


def test_without_exactly_once_each_replica_trains_all_that_it_reads() -> None:
    job = Job(lambda: Numbers(None), {"is_exact": False})
    job.start(BatchPlan(2, 3, 1))
    first, second = job.step(), job.step(is_discarded=True)
    assert (first, second) == ([0, 1, 2, 0, 1, 2], [3, 4, 5, 3, 4, 5])
    job.start(BatchPlan(3, 2, 1), [0, 1])
    assert job.step() == [3, 4, 3, 4, 0, 1]
