"""The replicas compare their data, and those of before a restart."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from itertools import count
from threading import Barrier, Lock, Thread
from types import SimpleNamespace
from typing import Any, cast

import numpy
import pytest
import torch
from torch.utils.data import Subset, random_split

from adascale_core.batch.plans import BatchBounds, BatchPlan
from adascale_worker.batches import comparison
from adascale_worker.batches.feed import DataFeed, LoadedBatches
from adascale_worker.errors import DatasetError
from adascale_worker.gradients.step_division import StepDivision
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.reporting.progress import TrainingProgress

Dataset = Sequence[Any]
Make = Callable[[int], Any]
"""Makes a data set, or another object, of a replica."""
FORKED = {"num_workers": 2, "multiprocessing_context": "fork"}
PERSISTENT = {**FORKED, "persistent_workers": True}


class Exchange:
    """Threads of which one runs at a time, until it gathers."""

    def __init__(self, members: int) -> None:
        self.barrier, self.turn, self.values = Barrier(members, timeout=20), Lock(), [None] * members

    def gather(self, member: int, value: Any) -> list[Any]:
        self.values[member] = value
        self.turn.release()
        try:
            self.barrier.wait()
            values = list(self.values)
            self.barrier.wait()
        finally:
            self.turn.acquire()
        return values


class Group:
    """The group of a replica."""

    process, is_elastic = 0, True

    def __init__(self, rank: int, replicas: int, exchange: Exchange, processes: int = 1) -> None:
        self.rank, self.replicas, self.processes, self.generation = rank, replicas, processes, 1
        self.is_main = rank == 0
        self._exchange = exchange
        self.own = SimpleNamespace(exchange=lambda value: [value] * self.processes)

    def gather(self, value: Any) -> list[Any]:
        return self._exchange.gather(self.rank, value)

    def broadcast(self, value: Any) -> Any:
        return self.gather(value)[0]


class Replica:
    """A replica that opens a data set and begins to load it."""

    def __init__(self, rank: int = 0, replicas: int = 1, exchange: Exchange | None = None) -> None:
        self.group = Group(rank, replicas, exchange or Exchange(1))
        if exchange is None:
            self.group.gather = lambda value: [value]  # type: ignore[method-assign]
        self.progress = TrainingProgress()
        self.feed = DataFeed(
            BatchBounds(4),
            cast(ReplicaGroup, self.group),
            3,
            self.progress,
            StepDivision(lambda: BatchBounds(4)),
            is_saved=True,
        )

    def load(self, data: Any, options: dict[str, Any] | None = None, **arguments: Any) -> LoadedBatches:
        """Begin to load a data set."""
        load = self.feed.open(data, **{**(options or {}), **arguments})
        plan = BatchPlan(self.group.replicas, 4 // self.group.replicas, 1)
        loaded = load(self.progress.consumed, plan)
        self.feed.compare()
        return loaded


def in_turn(replicas: list[Replica], exchange: Exchange, call: Callable[[int, Replica], object]) -> list[str]:
    """Call a function for each replica in a thread, and return the errors."""
    errors: list[str] = []

    def run(rank: int, replica: Replica) -> None:
        with exchange.turn:
            try:
                call(rank, replica)
            except DatasetError as error:
                errors.append(str(error))

    threads = [Thread(target=run, args=each) for each in enumerate(replicas)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def errors_of(
    make: Make, options: dict[str, Any] | None = None, order: Make | None = None, joins: bool = False
) -> list[str]:
    """Load data sets of two replicas, and return the errors."""
    exchange = Exchange(2)
    replicas = [Replica(rank, 2, exchange) for rank in range(2)]
    data = [make(rank) for rank in range(2)]
    if joins:
        alone = Replica()
        alone.load(data[0], options)
        replicas[0].feed, replicas[0].progress = alone.feed, alone.progress
        alone.feed._group = alone.feed._comparison._group = cast(ReplicaGroup, replicas[0].group)
        replicas[1].feed.load_state_dict(alone.feed.state_dict())
        for replica in replicas:
            replica.group.generation = 2

    def load(rank: int, replica: Replica) -> None:
        replica.load(data[rank], options, order=order and order(rank))
        replica.feed.close()

    return in_turn(replicas, exchange, load)


def split(seed: int) -> Subset[int]:
    generator = torch.Generator().manual_seed(seed)
    return random_split(cast(Any, list(range(100))), [80, 20], generator)[0]


class Made:
    """Makes each sample by a function of the index."""

    def __init__(self, make: Callable[[int], Any], length: int = 40) -> None:
        self.make, self.length = make, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


class MadeTogether(Made):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self.make(index) for index in indices]


def augmented(index: int) -> torch.Tensor:
    return index + torch.rand(3) + random.random() + numpy.random.rand()


def rounded(rank: int) -> Made:
    return Made(lambda index: torch.sin(torch.arange(60.0) + index) * (1 + 1e-6 * rank))


def of_order(number: int) -> Callable[[int, int], Any]:
    """Return a function that draws a pass without its seed."""
    return lambda *_: numpy.random.default_rng(number).permutation(40)


def flipping(rank: int) -> Made:
    generator = random.Random(rank)
    return Made(lambda _: torch.ones(3) * generator.randint(0, 1))


def counting(rank: int) -> Made:
    calls = count(100 * rank)
    return Made(lambda _: next(calls))


def pairs(samples: list[Any]) -> Any:
    """Collate, with more than one sample only."""
    return torch.stack([samples[0], samples[1]])


DIFFERENT: dict[str, Make] = {
    "random_split without a generator": split,
    "labels in the order of a set": lambda rank: Made(lambda index: (torch.ones(3), (index + rank) % 7)),
    "files in another order": lambda rank: Made(lambda index: {"text": f"text {(index + 3 * rank) % 40}"}),
    "all at once": lambda rank: MadeTogether(lambda index: augmented(index + rank)),
}
EQUAL: dict[str, Make] = {
    "drawn by the generators": lambda _: Made(augmented),
    "drawn by a generator of its own": flipping,
    "counted": counting,
    "the time": lambda _: Made(lambda _: time.time_ns()),
    "rounded otherwise": rounded,
    "in other folders": lambda rank: Made(lambda index: (f"/folder-{rank}/{index}.png", index)),
    "of an unknown type": lambda rank: Made(lambda index: slice(index, rank)),
    "refused": lambda rank: Made(lambda index: [][rank + index]),
}


@pytest.mark.parametrize(
    ("kind", "options"),
    [(kind, {}) for kind in DIFFERENT]
    + [("all at once", {**options, "collate_fn": pairs}) for options in ({}, FORKED, PERSISTENT)],
)
def test_other_samples_on_a_replica_are_named(kind: str, options: dict[str, Any]) -> None:
    errors = errors_of(DIFFERENT[kind], options)
    assert len(errors) == 2
    assert errors[0] == errors[1]
    assert "of the data set is another one on rank 1 than on rank 0" in errors[0]


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize(
    ("kind", "options"),
    [(kind, {}) for kind in EQUAL] + [("drawn by the generators", FORKED), ("counted", FORKED)],
)
def test_equal_samples_are_never_refused(kind: str, options: dict[str, Any], joins: bool) -> None:
    assert errors_of(EQUAL[kind], options, joins=joins) == []


@pytest.mark.parametrize("options", [{}, PERSISTENT], ids=["here", "persistent"])
def test_a_replica_that_joins_is_compared(options: dict[str, Any]) -> None:
    assert len(errors_of(split, options, joins=True)) == 2
    assert errors_of(lambda _: split(1), options, joins=True) == []


def test_lengths_are_compared_first() -> None:
    errors = errors_of(lambda rank: range(320 - 20 * rank))
    assert len(errors) == 2
    assert errors[0].startswith("the data set has 320 samples on rank 0, but 300 on rank 1. ")


def test_an_order_that_is_drawn_without_its_seed_is_refused() -> None:
    errors = errors_of(lambda _: range(40), order=of_order)
    assert len(errors) == 2
    assert "the order of the samples differs between replicas" in errors[0]
    assert "draw from the seed that it gets" in errors[0]
    assert errors_of(lambda _: range(40), order=lambda _: of_order(1)) == []


def test_an_order_that_changes_inside_a_pass_is_refused() -> None:
    replica = Replica()
    replica.load(range(40), order=of_order(1))
    replica.progress.epoch, replica.progress.consumed = 1, 20
    with pytest.raises(DatasetError, match="the order of the samples has changed"):
        replica.load(range(40), order=of_order(2))
    replica.progress.consumed = 40
    replica.load(range(40), order=of_order(2))


def resumed(data: Any, state: dict[str, Any], epoch: int, consumed: int = 0, **arguments: Any) -> DataFeed:
    replica = Replica()
    replica.progress.consumed = consumed
    replica.feed.load_state_dict(state)
    replica.feed.begin_from_checkpoint()
    replica.progress.epoch = epoch
    replica.load(data, **arguments)
    return replica.feed


def test_the_data_after_a_restart_are_compared_with_the_checkpoint(
    capsys: pytest.CaptureFixture[str],
) -> None:
    replica = Replica()
    replica.load(split(1))
    state = replica.feed.state_dict()
    resumed(split(1), state, 0)
    with pytest.raises(DatasetError, match=r"than when the checkpoint was saved.*allow_other_length=True"):
        resumed(split(2), state, 0)
    feed = resumed(split(2), state, 0, allow_other_length=True)
    assert "with the present data" in capsys.readouterr().err
    resumed(split(2), feed.state_dict(), 0)
    # The program may make other data for each epoch.
    resumed(split(2), state, 1)


def test_another_order_after_a_restart_is_refused_unless_it_is_of_another_kind() -> None:
    replica = Replica()
    replica.load(range(40), order=of_order(1))
    replica.progress.consumed = 20
    state = replica.feed.state_dict()
    resumed(range(40), state, 0, consumed=20, order=of_order(1))
    with pytest.raises(DatasetError, match=r"has changed: .* when the checkpoint was saved .*allow_other"):
        resumed(range(40), state, 0, consumed=20, order=of_order(2))
    resumed(range(40), state, 0, consumed=20, order=of_order(2), allow_other_length=True)
    resumed(range(40), state, 0, consumed=20)


def test_data_that_the_program_makes_for_each_epoch_may_differ_after_a_restart() -> None:
    replica = Replica()
    for epoch in range(3):
        replica.progress.epoch = epoch
        replica.load(split(epoch))
    resumed(split(3), replica.feed.state_dict(), 3)
    with pytest.raises(DatasetError, match="than when the checkpoint was saved"):
        resumed(split(3), replica.feed.state_dict(), 2)


def test_few_samples_are_fetched_for_the_comparison_and_the_generators_stay() -> None:
    fetched: list[int] = []

    class Recorded(Made):
        def __getitem__(self, index: int) -> Any:
            fetched.append(index)
            return super().__getitem__(index)

    data = Recorded(augmented)
    replica = Replica()
    torch.manual_seed(1)
    random.seed(1)
    replica.load(data)
    assert len(set(fetched)) == len(fetched) == comparison.SAMPLES
    replica.progress.epoch = 1
    replica.load(data)
    assert len(fetched) == 2 * comparison.SAMPLES
    replica.load(data)
    assert len(fetched) == 2 * comparison.SAMPLES
    drawn = torch.rand(1).item(), random.random()
    torch.manual_seed(1)
    random.seed(1)
    assert drawn == (torch.rand(1).item(), random.random())


def test_a_process_of_a_replica_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = Replica()
    replica.group.processes = 2
    replica.load(range(40))
    monkeypatch.setattr(replica.group.own, "exchange", lambda value: [value, [39, *value[1:]]])
    replica.group.generation = 2
    with pytest.raises(
        DatasetError, match="40 samples on process 0 of rank 0, but 39 on process 1 of rank 0"
    ):
        replica.load(range(40))


def test_worker_processes_of_another_number_fetch_the_same() -> None:
    replica = Replica()
    replica.load(Made(augmented))
    resumed(Made(augmented), replica.feed.state_dict(), 0, options=FORKED).close()
