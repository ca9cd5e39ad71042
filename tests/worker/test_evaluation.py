"""Evaluation on one replica, and the sums."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

from adascale import ElasticTrainer
from adascale_worker.errors import DatasetError, WorkerError
from adascale_worker.loop.evaluation import ExactSum
from support.training import ACCUMULATING, FIXED, MakeTrainer, learn, network, samples, sgd


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
            optimizer.zero_grad()
            learn(model, x, y)
            optimizer.step()
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


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32)), st.integers(1, 5))
def test_sums_do_not_depend_on_the_shares(numbers: list[float], shares: int) -> None:
    total = ExactSum()
    for rank in reversed(range(shares)):
        share = ExactSum()
        for number in numbers[rank::shares]:
            share.add(number)
        total.add_sum(ExactSum.decoded(share.encoded()))
    assert total.result() == float(sum(map(Fraction, numbers)))


def test_sums_that_are_not_finite_stay_so() -> None:
    total = ExactSum()
    for number in (1.0, math.inf):
        total.add(number)
    assert ExactSum.decoded(total.encoded()).result() == math.inf
    total.add(math.nan)
    assert math.isnan(ExactSum.decoded(total.encoded()).result(3))
