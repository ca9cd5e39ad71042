"""Evaluation on one replica, and the sums."""

import contextlib
import math
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from functools import partial
from random import Random
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

from adascale import ElasticTrainer
from adascale_worker.errors import DatasetError, WorkerError
from adascale_worker.loop import evaluation as exchanges
from adascale_worker.loop.evaluation import Evaluation, Exchange, condensed, total
from adascale_worker.membership.process_group import ReplicaGroup
from support.examples import examples
from support.training import ACCUMULATING, FIXED, MakeTrainer, make_step, network, samples, sgd


def entered(make_trainer: MakeTrainer, **options: object) -> tuple[ElasticTrainer, nn.Module]:
    trainer, model = make_trainer(**(options or FIXED)), network()
    trainer.program_reentry(model, sgd(model))
    model.eval()
    return trainer, model


@torch.no_grad()
def test_on_one_replica_it_is_a_plain_loop(make_trainer: MakeTrainer) -> None:
    trainer, model = entered(make_trainer)
    data = samples(50)
    evaluation = trainer.evaluation(data, batch_size=16)
    sizes, losses, correct = [], [], 0
    for _, x, y in evaluation:
        output = model(x)
        loss = nn.functional.cross_entropy(output, y, reduction="sum")
        evaluation.add(loss=loss, correct=(output.argmax(1) == y).sum(), batches=1)
        sizes.append(len(x))
        losses.append(loss.item())
        correct += int((output.argmax(1) == y).sum())
    assert sizes == [16, 16, 16, 2]
    assert evaluation.sums == {"loss": math.fsum(losses), "correct": correct, "batches": 4}
    assert evaluation.means["correct"] == correct / 50


def test_an_evaluation_inside_the_data_loop_does_not_disturb_training(make_trainer: MakeTrainer) -> None:
    final = []
    for evaluates in (False, True):
        trainer, model = make_trainer(**ACCUMULATING), network(dropout=0.3)
        optimizer = sgd(model)
        trainer.program_reentry(model, optimizer)
        for _, x, y in trainer.dataloader(samples()):
            make_step(model, optimizer, x, y)
            if evaluates:
                model.eval()
                with torch.no_grad():
                    for _ in (evaluation := trainer.evaluation(samples(), batch_size=48)):
                        evaluation.add(samples=48)
                model.train()
        trainer.step(0)
        final.append([parameter.tolist() for parameter in model.parameters()])
    assert final[0] == final[1]


def test_numbers_of_numpy_are_added(make_trainer: MakeTrainer) -> None:
    trainer, model = entered(make_trainer)
    model.eval()
    evaluation = trainer.evaluation(samples(), batch_size=8)
    batches = 0
    for _ in evaluation:
        batches += 1
        evaluation.add(loss=np.float32(0.5), correct=np.int64(2), best=np.array(1), any=True)
    assert evaluation.sums == {"loss": 0.5 * batches, "correct": 2 * batches, "best": batches, "any": batches}
    assert isinstance(evaluation.sums["correct"], int)


def test_tensors_that_the_program_changes_later_are_added_as_they_were(make_trainer: MakeTrainer) -> None:
    trainer, model = entered(make_trainer)
    model.eval()
    evaluation = trainer.evaluation(samples(), batch_size=8)
    count = torch.zeros(())
    for _, x, _ in evaluation:
        evaluation.add(count=count.zero_().add_(len(x)))
    assert evaluation.sums == {"count": len(samples())}


def test_a_complex_sum_is_refused(make_trainer: MakeTrainer) -> None:
    trainer, model = entered(make_trainer)
    model.eval()
    evaluation = trainer.evaluation(samples(), batch_size=48)
    next(iter(evaluation))
    with pytest.raises(WorkerError, match=r"got a tensor of shape \(\) and type torch\.complex64 for loss"):
        evaluation.add(loss=torch.zeros((), dtype=torch.complex64))


@torch.no_grad()
def test_outputs_of_batches_are_collected_in_their_order(make_trainer: MakeTrainer) -> None:
    trainer, _ = entered(make_trainer)
    evaluation = trainer.evaluation(samples(50), batch_size=16)
    output = torch.zeros(2)
    for index, _, _ in evaluation:
        evaluation.collect({"index": index, "nested": (output.fill_(len(index)), [None, "text", 1.5])})
    assert [found["index"].tolist() for found in evaluation.outputs] == [
        [*range(start, min(start + 16, 50))] for start in range(0, 50, 16)
    ]
    # Copies: the program has changed its tensor since.
    assert [found["nested"][0].tolist() for found in evaluation.outputs] == [[16.0] * 2] * 3 + [[2.0] * 2]
    assert evaluation.outputs[0]["nested"][1] == [None, "text", 1.5]


def test_an_output_that_cannot_be_sent_and_one_outside_of_the_loop_are_refused(
    make_trainer: MakeTrainer,
) -> None:
    trainer, _ = entered(make_trainer)
    evaluation = trainer.evaluation(samples(), batch_size=48)
    with pytest.raises(WorkerError, match="was called outside of the loop"):
        evaluation.collect(1)
    for _ in evaluation:
        with pytest.raises(WorkerError, match=r"got <class 'set'>: pass tensors, numbers"):
            evaluation.collect([{1, 2}])
    with pytest.raises(WorkerError, match="was called outside of the loop"):
        evaluation.collect(1)
    assert evaluation.outputs == []


def test_wrong_uses_are_refused(make_trainer: MakeTrainer) -> None:
    trainer, model = entered(make_trainer)
    data = samples()
    with pytest.raises(WorkerError, match="before its loop has ended"):
        trainer.evaluation(data, batch_size=8).sums  # noqa: B018
    with pytest.raises(WorkerError, match=r"got a tensor of shape \(2,\) .* for loss: pass a real number"):
        trainer.evaluation(data, batch_size=8).add(loss=torch.ones(2))
    for size in (0, 2.0):
        with pytest.raises(WorkerError, match=rf"batch_size={size}: it must be an integer of at least 1"):
            trainer.evaluation(data, batch_size=size)  # type: ignore[arg-type]
    with pytest.raises(DatasetError, match="got sampler, but the trainer chooses the batches"):
        trainer.evaluation(data, batch_size=8, sampler=[])
    with pytest.raises(DatasetError, match="has 0 samples"):
        trainer.evaluation(TensorDataset(torch.ones(0, 1)), batch_size=8)
    model.train()
    with pytest.raises(WorkerError, match=r"call model\.eval\(\) before the loop"):
        next(trainer.evaluation(data, batch_size=8))


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32)), st.randoms())
def test_sums_do_not_depend_on_the_order_of_replicas(numbers: list[float], random: Random) -> None:
    expected = float(sum(map(Fraction, numbers)))
    random.shuffle(numbers)
    assert total(numbers) == expected
    middle = random.randint(0, len(numbers))
    assert total([*condensed(numbers[:middle]), *condensed(numbers[middle:])]) == expected


def test_sums_of_integers_stay_integers_and_those_that_are_not_finite_stay_so() -> None:
    assert total([2**60, 1]) == 2**60 + 1
    assert total([1, math.inf]) == math.inf
    assert math.isnan(total([1.0, math.inf, math.nan]))


# -- gathered values --------------------------------------------------------------------------------------


class SharedStore:
    """What the replicas of one evaluation exchange, and which of them are lost."""

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas
        self.values: dict[tuple[str, int], list[Any]] = {}
        self.lost: set[int] = set()
        self.changed = threading.Condition()
        self.changes = 0

    def has_changed(self, changes: int) -> bool:
        return self.changes != changes


class MemoryGroup:
    """The group of a replica that is lost before it announces for the n-th time."""

    has_failed = False

    def __init__(self, store: SharedStore, rank: int, lost_before: int | None) -> None:
        self.store, self.rank, self.replicas = store, rank, store.replicas
        self._left = math.inf if lost_before is None else lost_before

    def announce(self, event: str, value: list[Any]) -> None:
        with self.store.changed:
            if self._left == 0:
                self.store.lost.add(self.rank)
            else:
                self.store.values[event, self.rank] = value
            self._left -= 1
            assert len(value[1]) <= exchanges.PART_LENGTH
            self.store.changes += 1
            self.store.changed.notify_all()
            if self.rank in self.store.lost:
                raise InterruptedError

    def retract(self, event: str, ranks: Iterable[int]) -> None:
        with self.store.changed:
            for rank in ranks:
                del self.store.values[event, rank]

    def announced(self, event: str) -> dict[int, Any]:
        with self.store.changed:
            values = self.store.values
            return {rank: values[event, rank] for rank in range(self.replicas) if (event, rank) in values}

    def poll(self, *events: str, timeout: float) -> Iterator[list[dict[int, Any]]]:
        del timeout
        ranks = range(self.replicas)
        has_ended = False
        while not has_ended:
            with self.store.changed:
                found = [self.announced(event) for event in events]
                has_ended = all(rank in found[-1] or rank in self.store.lost for rank in ranks)
                changes = self.store.changes
            yield found
            with self.store.changed:
                assert has_ended or self.store.changed.wait_for(partial(self.store.has_changed, changes), 60)


def gather_all(
    store: SharedStore, rank: int, samples: int, lost_before: int | None
) -> list[list[int]] | None:
    """Gather the samples of each batch of two in two calls, and return what came; None if it is lost."""
    group = cast(ReplicaGroup, MemoryGroup(store, rank, lost_before))
    exchange = Exchange(group, (0, 0, 0), 1)
    model = nn.Identity().eval()
    evaluation = Evaluation(range(samples), 2, model, exchange, {}, contextlib.nullcontext, gathers=True)
    gathered: list[list[int]] = [[], []]
    try:
        for batch in evaluation:
            for call in gathered:
                call += [int(each) for value in evaluation.gather(batch) for each in value]
    except InterruptedError:
        return None
    return gathered


@settings(max_examples=examples(40), deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 30),
    st.lists(st.one_of(st.none(), st.integers(0, 20)), min_size=3, max_size=3),
    st.sampled_from([exchanges.PART_LENGTH, 500]),
)
def test_each_replica_gathers_each_sample_once_whichever_others_are_lost(
    replicas: int, samples: int, lost: list[int | None], part_length: int
) -> None:
    store = SharedStore(replicas)
    lost_before = [None, *lost][:replicas]  # one replica stays
    with (
        mock.patch.object(exchanges, "PART_LENGTH", part_length),
        ThreadPoolExecutor(replicas) as threads,
    ):
        results: list[Any] = list(
            threads.map(lambda rank: gather_all(store, rank, samples, lost_before[rank]), range(replicas))
        )
    for rank, gathered in enumerate(results):
        assert (gathered is None) == (rank in store.lost)
        if gathered is not None:
            assert [sorted(call) for call in gathered] == [list(range(samples))] * 2


def test_gathering_needs_an_evaluation_that_is_divided_for_it(make_trainer: MakeTrainer) -> None:
    trainer, _ = entered(make_trainer)
    evaluation = trainer.evaluation(samples(), batch_size=48)
    for index, _, _ in evaluation:
        with pytest.raises(
            WorkerError, match=r"gather\(\) needs trainer\.evaluation\(\.\.\., gathers=True\)"
        ):
            evaluation.gather(index)
    evaluation = trainer.evaluation(samples(), batch_size=20, gathers=True)
    assert [evaluation.gather(len(x)) for _, x, _ in evaluation] == [[20], [20], [8]]
