"""Tests of the elastic trainer on one replica, in the test's own process."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import MultiStepLR, ReduceLROnPlateau, StepLR

from adascale import AdaScale
from adascale_worker.batches.order import seed_generators, shuffled
from adascale_worker.errors import WorkerError
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.process.device import select_device
from adascale_worker.scaling.statistics.all_reduce import StatisticsAllReduce
from adascale_worker.state.following import Followers
from support.training import (
    ACCUMULATING,
    FIXED,
    MakeTrainer,
    concatenate,
    entered,
    equal,
    learn,
    make_step,
    network,
    parameters_of,
    samples,
    sgd,
    train,
)

# -- computation ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_training_at_scale_one_equals_a_plain_loop_bit_for_bit(
    make_trainer: MakeTrainer, dropout: float
) -> None:
    trainer = make_trainer(**FIXED, seed=5)
    model = network(dropout=dropout)
    twin = copy.deepcopy(model)
    optimizer, twin_optimizer = sgd(model), sgd(twin)
    scheduler, twin_scheduler = (
        MultiStepLR(each, milestones=[4, 9], gamma=0.3) for each in (optimizer, twin_optimizer)
    )
    trainer.program_reentry(model, optimizer, scheduler)
    train(trainer, model, optimizer, scheduler, epochs=range(3))

    _, features, targets = samples().tensors
    sequence = shuffled(48, 5)
    for start in range(0, 3 * 48, 8):
        seed_generators(5, start, 0)
        order = torch.tensor(sequence[start : start + 8])
        make_step(twin, twin_optimizer, features[order], targets[order])
        twin_scheduler.step()
    assert equal(parameters_of(model), parameters_of(twin))
    assert scheduler.get_last_lr() == twin_scheduler.get_last_lr()
    assert optimizer.param_groups[0]["lr"] == twin_optimizer.param_groups[0]["lr"]


def test_accumulated_micro_batches_equal_a_step_with_the_large_batch(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(**ACCUMULATING)
    model = network()
    twin = copy.deepcopy(model)
    optimizer, twin_optimizer = sgd(model), sgd(twin)
    trainer.program_reentry(model, optimizer)
    assert (trainer.get_local_bsz(), trainer.accumulation) == (4, 3)
    batches = train(trainer, model, optimizer, epochs=range(2))
    assert {len(micro_batch) for micro_batch in batches} == {4}
    _, features, targets = samples().tensors
    for first in range(0, len(batches), 3):
        order = torch.tensor(concatenate(batches[first : first + 3]))
        make_step(twin, twin_optimizer, features[order], targets[order])
    for ours, theirs in zip(parameters_of(model), parameters_of(twin), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert trainer.progress == 8


@pytest.mark.parametrize("set_to_none", [False, True])
def test_gradients_of_a_step_change_only_after_they_are_copied(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, set_to_none: bool
) -> None:
    waits: list[float] = []
    model = network()
    weight = next(model.parameters())
    monkeypatch.setattr(
        Followers,
        "wait_for_copies",
        lambda _: waits.append(0.0 if weight.grad is None else weight.grad.norm()),
    )
    trainer, optimizer = make_trainer(**FIXED), sgd(model)
    trainer.program_reentry(model, optimizer)
    gradients: list[float] = []
    for _, x, y in trainer.dataloader(samples()):
        seen = len(waits)
        optimizer.zero_grad(set_to_none=set_to_none)
        assert waits[seen:] == ([] if set_to_none else gradients[-1:] or [0.0])
        nn.functional.cross_entropy(model(x), y).backward()
        assert len(waits) == seen + 2 - set_to_none
        optimizer.step()
        assert weight.grad is not None
        gradients.append(weight.grad.norm())


def test_parameters_and_schedule_are_kept_between_micro_batches(
    make_trainer: MakeTrainer,
) -> None:
    trainer = make_trainer(**ACCUMULATING)
    model = network()
    optimizer = sgd(model)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
    trainer.program_reentry(model, optimizer, scheduler)
    batches = iter(trainer.dataloader(samples()))
    before = parameters_of(model)
    for micro_batch in range(3):
        _, x, y = next(batches)
        optimizer.zero_grad()
        model.zero_grad()
        learn(model, x, y)
        optimizer.step()
        scheduler.step()
        assert equal(before, parameters_of(model)) == (micro_batch < 2)
        assert scheduler.last_epoch == (micro_batch == 2)
    next(batches)
    optimizer.zero_grad()
    assert next(model.parameters()).grad is None


def test_adascale_is_available_after_program_reentry(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(**FIXED)
    with pytest.raises(WorkerError, match=r"call program_reentry\(model, optimizer\) first"):
        trainer.adascale  # noqa: B018
    model = network()
    optimizer = sgd(model)
    trainer.program_reentry(model, optimizer)
    assert isinstance(trainer.adascale, AdaScale)
    assert trainer.adascale.optimizer is optimizer


# -- epochs ---------------------------------------------------------------------------------------------


def test_an_epoch_contains_every_sample_once_if_the_batch_size_divides_the_data_set(
    make_trainer: MakeTrainer,
) -> None:
    trainer, model, optimizer = entered(make_trainer, **FIXED)
    for epoch in range(3):
        batches = train(trainer, model, optimizer, epochs=range(epoch, epoch + 1))
        assert sorted(concatenate(batches)) == list(range(48))
    assert trainer.progress == 18


def test_epochs_average_the_same_number_of_steps_if_the_batch_size_does_not_divide_the_data_set(
    make_trainer: MakeTrainer,
) -> None:
    trainer, model, optimizer = entered(make_trainer, batch_size=9)
    steps = [
        len(train(trainer, model, optimizer, epochs=range(e, e + 1), data=samples(20))) for e in range(9)
    ]
    assert steps == [3, 2, 2, 2, 3, 2, 2, 2, 2], "20/9 steps per epoch on average, in whole steps"
    assert sum(steps) == trainer.progress == 20


def test_unshuffled_epochs_are_in_the_order_of_the_data_set(make_trainer: MakeTrainer) -> None:
    trainer, model, optimizer = entered(make_trainer, **FIXED)
    batches = []
    for index, x, y in trainer.dataloader(samples(), shuffle=False):
        make_step(model, optimizer, x, y)
        batches += index.tolist()
    assert batches == list(range(48))


def test_training_is_finished_after_the_requested_scale_invariant_steps(make_trainer: MakeTrainer) -> None:
    trainer, model, optimizer = entered(make_trainer, **FIXED, scale_invariant_steps=8)
    assert len(train(trainer, model, optimizer, epochs=range(1))) == 6
    assert not trainer.finished
    assert len(train(trainer, model, optimizer, epochs=range(1, 2))) == 2
    assert trainer.finished
    assert train(trainer, model, optimizer, epochs=range(2, 4)) == []


def test_step_with_another_epoch_is_an_error(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(**FIXED)
    model = network()
    trainer.program_reentry(model, sgd(model))
    with pytest.raises(WorkerError, match=r"step\(1\) was called, but the current epoch is 0"):
        trainer.step(1)


def test_a_loop_after_a_break_continues_with_the_next_samples(make_trainer: MakeTrainer) -> None:
    trainer, model, optimizer = entered(make_trainer, **FIXED)
    batches: list[int] = []
    for _ in range(3):
        for index, x, y in trainer.dataloader(samples()):
            make_step(model, optimizer, x, y)
            batches += index.tolist()
            if len(batches) % 16 == 0:
                break
    assert sorted(batches) == list(range(48))


def test_a_loop_after_a_break_within_a_step_repeats_that_step(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(**ACCUMULATING)
    model = network()
    twin = copy.deepcopy(model)
    optimizer = sgd(model)
    trainer.program_reentry(model, optimizer)
    for index, x, y in trainer.dataloader(samples()):
        make_step(model, optimizer, x, y)
        first = index.tolist()
        break
    batches = train(trainer, model, optimizer)
    assert batches[0] == first
    assert sorted(concatenate(batches)) == list(range(48))
    undisturbed = make_trainer(**ACCUMULATING)
    optimizer = sgd(twin)
    undisturbed.program_reentry(twin, optimizer)
    train(undisturbed, twin, optimizer)
    assert equal(parameters_of(model), parameters_of(twin))


def test_an_error_within_a_step_does_not_change_the_position(make_trainer: MakeTrainer) -> None:
    trainer, model, optimizer = entered(make_trainer, **ACCUMULATING)

    def fail_in_the_middle_of_a_step() -> None:
        for number, (_, x, y) in enumerate(trainer.dataloader(samples())):
            if number == 4:
                raise ArithmeticError
            make_step(model, optimizer, x, y)

    with pytest.raises(ArithmeticError):
        fail_in_the_middle_of_a_step()
    assert trainer.progress == 1
    assert len(train(trainer, model, optimizer)) == 9


def test_a_batch_without_an_optimizer_step_is_not_delivered_again(make_trainer: MakeTrainer) -> None:
    """A GradScaler makes no step if gradients are not finite."""
    trainer, model, optimizer = entered(make_trainer, **FIXED)
    taken: list[int] = []
    skipped: list[int] = []
    for _ in range(2):
        for number, (index, x, y) in enumerate(trainer.dataloader(samples())):
            if number == 1:
                skipped += index.tolist()
                continue
            make_step(model, optimizer, x, y)
            taken += index.tolist()
            if number == 2:
                break
    assert sorted(taken + skipped) == list(range(48))


def test_nested_data_loops_are_an_error(make_trainer: MakeTrainer) -> None:
    trainer, *_ = entered(make_trainer, **FIXED)
    outer = trainer.dataloader(samples())
    next(outer)
    inner = trainer.dataloader(samples())
    next(inner)
    with pytest.raises(WorkerError, match=r"another loop over trainer\.dataloader"):
        next(outer)


# -- schedules ------------------------------------------------------------------------------------------


def test_a_scheduler_stepped_inside_the_loop_follows_progress(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(**FIXED)
    model = network()
    optimizer = sgd(model)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
    trainer.program_reentry(model, optimizer, scheduler)
    monkeypatch.setattr(trainer.adascale, "gain", lambda: 1.75)
    lrs = []
    for _, x, y in trainer.dataloader(samples()):
        make_step(model, optimizer, x, y)
        scheduler.step()
        lrs.append((int(trainer.progress), optimizer.param_groups[0]["lr"]))
    assert [whole for whole, _ in lrs] == [1, 3, 5, 7], "6 scale-invariant steps in 4 steps"
    assert [lr for _, lr in lrs] == pytest.approx([0.1 * 0.5**whole for whole, _ in lrs])


def test_a_scheduler_stepped_after_the_loop_advances_once_per_epoch(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(**FIXED)
    model = network()
    optimizer = sgd(model)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
    trainer.program_reentry(model, optimizer, scheduler)
    for epoch in range(3):
        for _, x, y in trainer.dataloader(samples()):
            make_step(model, optimizer, x, y)
        scheduler.step()
        trainer.step(epoch)
        assert scheduler.last_epoch == epoch + 1
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5 ** (epoch + 1))


def test_a_scheduler_stepped_with_a_metric_follows_the_metric(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(**FIXED)
    model = network()
    optimizer = sgd(model)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    trainer.program_reentry(model, optimizer, scheduler)
    for epoch, (metric, lr) in enumerate([(1.0, 0.1), (0.5, 0.1), (0.6, 0.05)]):
        for _, x, y in trainer.dataloader(samples()):
            learn(model, x, y)
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step(metric)
        trainer.step(epoch)
        assert optimizer.param_groups[0]["lr"] == lr


def test_a_metric_in_the_loop_counts_once_for_each_optimizer_step(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(**ACCUMULATING)
    model = network()
    optimizer = sgd(model)
    scheduler = ReduceLROnPlateau(optimizer, patience=100)
    trainer.program_reentry(model, optimizer, scheduler)
    for _, x, y in trainer.dataloader(samples(48)):
        optimizer.zero_grad()
        loss = learn(model, x, y)
        optimizer.step()
        scheduler.step(loss.item())
    assert trainer.steps == 4
    assert scheduler.last_epoch == 4


def test_a_scheduler_can_be_made_after_program_reentry(make_trainer: MakeTrainer) -> None:
    trainer, model, optimizer = entered(make_trainer, **FIXED)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
    train(trainer, model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()
    assert trainer.progress == 6
    assert optimizer.param_groups[0]["lr"] == 0.05


# -- the device -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("requested", "local_rank", "device"),
    [
        ("cpu", 1, "cpu"),
        ("cuda", 0, "cuda:0"),
        ("cuda:3", 1, "cuda:3"),
        (torch.device("cuda", 2), 0, "cuda:2"),
    ],
)
def test_cuda_without_an_index_selects_the_gpu_of_the_local_rank(
    requested: Any, local_rank: int, device: str
) -> None:
    assert str(select_device(requested, local_rank)) == device


def test_statistics_are_exchanged_before_the_gpu_is_waited_for_and_weights_change(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, only that wait shows whether an exchange has failed."""
    calls: list[str] = []

    def record(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def recorded(*arguments: Any, **options: Any) -> Any:
            calls.append(name)
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, recorded)

    record(StatisticsAllReduce, "wait")
    record(ReplicaGroup, "commit")
    record(torch.optim.SGD, "step")
    model = network()
    trainer, optimizer = make_trainer(**FIXED, single_replica_gain="consecutive"), sgd(model)
    trainer.program_reentry(model, optimizer)
    for _, x, y in trainer.dataloader(samples()):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        calls.clear()
        optimizer.step()
        break
    assert calls[:2] == ["wait", "commit"]
    assert calls[-1] == "step"
