"""`persistent_workers=True`: worker processes that load data as long as training goes on."""

import gc
import multiprocessing
import os
import random
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from adascale_core.batch.plans import BatchBounds, BatchPlan
from adascale_worker.batches.feed import DataFeed, MicroBatches
from adascale_worker.batches.order import shuffled
from adascale_worker.errors import DatasetError
from adascale_worker.gradients.step_division import StepDivision
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.process.environment import RankAssignment
from adascale_worker.reporting.progress import TrainingProgress
from support.training import ACCUMULATING, FIXED, MakeTrainer, equal, network, parameters_of, sgd

WORKER: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "fork"}
PERSISTENT: dict[str, Any] = {**WORKER, "persistent_workers": True}
ONE, TWO = BatchPlan(1, 8, 1), BatchPlan(2, 4, 2)
INDEX, DRAWN, PROCESS, LOADED = 0, slice(1, 4), 4, 5


class Drawing(Dataset[Tensor]):
    """A sample is its index, random numbers, the process, and how many samples the process has loaded."""

    def __init__(self, count: int = 48) -> None:
        self.count = count
        self.loaded = 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        self.loaded += 1
        drawn = (torch.rand(1).item(), random.random(), float(numpy.random.rand()))
        return torch.tensor([index, *drawn, os.getpid(), self.loaded], dtype=torch.float64)


class Feed:
    """Loads micro-batches of a data set for one replica."""

    def __init__(self, **options: Any) -> None:
        self.data, self.options = Drawing(), options
        assignment = RankAssignment(0, 1)
        self.group = ReplicaGroup(assignment, torch.device("cpu"), is_elastic=True)
        self.feed = DataFeed(
            BatchBounds(8), self.group, 3, TrainingProgress(), StepDivision(lambda: BatchBounds(8))
        )

    def take(self, consumed: int, plan: BatchPlan, batches: int, rank: int = 0) -> Tensor:
        """Return the samples of micro-batches from a place, after a check of their indices."""
        self.group.rank = rank
        loaded = self.feed.open(self.data, **self.options)(consumed, plan)
        stream = shuffled(len(self.data), 3)
        samples = torch.stack(list(islice(loaded, batches)))
        expected = list(islice(iter(MicroBatches(stream, consumed, plan, rank)), batches))
        assert samples[..., INDEX].tolist() == expected
        return samples.flatten(0, 1)


@pytest.fixture
def feed() -> Iterator[Feed]:
    made = Feed(**PERSISTENT)
    yield made
    made.feed.close()
    gc.collect()  # An error of a test refers to the frames that it was raised in.
    assert multiprocessing.active_children() == []


def count_thrown_away(samples: list[Tensor]) -> list[int]:
    """Return how many samples a single worker process has loaded in vain between two series of samples."""
    assert len({sample[PROCESS].item() for each in samples for sample in each}) == 1
    for each in samples:
        assert each[:, LOADED].diff().tolist() == [1.0] * (len(each) - 1)
    return [int(after[0, LOADED] - before[-1, LOADED]) - 1 for before, after in pairwise(samples)]


# -- one process ----------------------------------------------------------------------------------------


def test_the_process_and_its_batches_go_on_in_the_next_epoch(feed: Feed) -> None:
    samples = [feed.take(consumed, ONE, 3) for consumed in (0, 24, 48, 72)]
    assert count_thrown_away(samples) == [0, 0, 0]


def test_the_process_goes_on_with_other_batches_at_another_place(feed: Feed) -> None:
    samples = [
        feed.take(0, ONE, 3),
        feed.take(16, ONE, 2),  # The last step was discarded, or the loop was left before it.
        feed.take(32, TWO, 2, rank=1),
        feed.take(48, TWO, 4, rank=1),
        feed.take(80, TWO, 2, rank=0),  # Another replica became rank 0.
        feed.take(96, ONE, 4),
    ]
    thrown_away = count_thrown_away(samples)
    assert [count > 0 for count in thrown_away] == [True, True, False, True, True]


def test_what_a_data_set_draws_depends_on_the_position_only(feed: Feed) -> None:
    plan, stride = TWO, 8
    undisturbed = torch.cat([feed.take(0, plan, 4), feed.take(4 * stride, plan, 2)])
    drawn = undisturbed[:, DRAWN]
    assert len(drawn.unique(dim=0)) == len(drawn), "each sample draws other numbers"
    feed.take(7, plan, 1)
    for other in (feed, Feed(**{**WORKER, "num_workers": 2})):
        for batch in (5, 0, 2):
            found = other.take(batch * stride, plan, 1)[:, DRAWN]
            first = batch * plan.local_bsz
            assert torch.equal(found, drawn[first : first + plan.local_bsz])


class Short(Drawing):
    """Cannot load some samples at first."""

    def __getitem__(self, index: int) -> Tensor:
        if self.loaded == 12:
            self.loaded += 1
            raise OSError("the storage is away")
        return super().__getitem__(index)


def test_an_error_of_the_data_set_costs_no_sample(feed: Feed) -> None:
    feed.data = Short()
    feed.take(0, ONE, 1)
    with pytest.raises(OSError, match="the storage is away"):
        feed.take(8, ONE, 1)
    feed.take(8, ONE, 3)


# -- a trainer --------------------------------------------------------------------------------------------


def train(trainer: Any, model: nn.Module, epochs: range, *, stop_after: int = 1_000) -> list[int]:
    """Train with noise that worker processes draw, and return the processes of the batches."""
    data = Drawing()
    optimizer = sgd(model)
    trainer.program_reentry(model, optimizer)
    processes: list[int] = []
    for epoch in epochs:
        for number, batch in enumerate(trainer.dataloader(data, **PERSISTENT)):
            optimizer.zero_grad()
            x = batch[:, [0, 1, 2, 3, 1, 2]].float() / 48
            nn.functional.cross_entropy(model(x), (batch[:, INDEX] > 20).long()).backward()
            optimizer.step()
            processes += batch[:, PROCESS].int().tolist()
            if number == stop_after:
                break
        trainer.step(epoch)
    return processes


def test_training_continues_to_the_bit_in_other_processes(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    undisturbed = network()
    processes = train(make_trainer(**ACCUMULATING, epochs=4), undisturbed, range(4))
    assert len(set(processes)) == 1
    assert multiprocessing.active_children() == [], "they end with training"
    for epochs in (range(2), range(2, 4)):
        model = network()
        train(make_trainer(**ACCUMULATING, epochs=epochs.stop, checkpoint_dir=tmp_path), model, epochs)
    assert equal(parameters_of(model), parameters_of(undisturbed))


def test_a_loop_that_is_left_keeps_the_process_until_the_trainer_is_closed(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(**FIXED)
    processes = train(trainer, network(), range(3), stop_after=1)
    assert set(processes) == {child.pid for child in multiprocessing.active_children()}
    assert len(set(processes)) == 1
    trainer.close()
    assert multiprocessing.active_children() == []


def test_another_data_set_or_option_gets_processes_of_its_own(feed: Feed) -> None:
    processes = {feed.take(0, ONE, 1)[0, PROCESS].item()}
    feed.data = Drawing()
    processes.add(feed.take(8, ONE, 1)[0, PROCESS].item())
    feed.options = {**feed.options, "prefetch_factor": 3}
    processes.add(feed.take(16, ONE, 1)[0, PROCESS].item())
    assert len(processes) == 3
    assert len(multiprocessing.active_children()) == 1
    feed.feed.open(Drawing(), **WORKER)
    assert multiprocessing.active_children() == [], "without the option, they end"


def test_a_loop_without_the_option_loads_its_own_data(feed: Feed) -> None:
    """The program may make the arguments of all its loops before the first one."""
    other = Drawing()
    load = feed.feed.open(other)
    feed.take(0, ONE, 1)
    batch = next(load(8, ONE))
    assert {int(sample[PROCESS]) for sample in batch} == {os.getpid()}
    assert (other.loaded, feed.data.loaded) == (8, 0)
    assert count_thrown_away([feed.take(8, ONE, 1), feed.take(16, ONE, 1)]) == [0]


def test_an_evaluation_refuses_the_option(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(**FIXED)
    model = network()
    trainer.program_reentry(model, sgd(model))
    with pytest.raises(DatasetError, match=r"evaluation\(\) got persistent_workers=True, but"):
        trainer.evaluation(Drawing(), batch_size=8, **PERSISTENT)
