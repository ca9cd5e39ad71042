"""Tests of the elastic trainer on one replica, in the test's own process."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import MultiStepLR, ReduceLROnPlateau, StepLR
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    SequentialSampler,
    WeightedRandomSampler,
)

from adascale import AdaScale
from adascale.errors import StaleBatchSizeError, UnsupportedOptimizerError
from adascale_core.batch.plans import BatchPlan
from adascale_core.errors import InvalidJobError
from adascale_worker.batches.order import SampleSequence
from adascale_worker.batches.seeding import seed_generators
from adascale_worker.errors import DatasetError, WorkerError
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.process.device import select_device
from adascale_worker.scaling.statistics.all_reduce import StatisticsAllReduce
from support.training import (
    ACCUMULATING,
    FIXED,
    MakeTrainer,
    adamw,
    concatenate,
    equal,
    learn,
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
    sequence = SampleSequence(48, seed=5)
    for start in range(0, 3 * 48, 8):
        seed_generators(5, start, 0)
        order = torch.tensor(sequence[start : start + 8])
        twin_optimizer.zero_grad()
        learn(twin, features[order], targets[order])
        twin_optimizer.step()
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
        twin_optimizer.zero_grad()
        learn(twin, features[order], targets[order])
        twin_optimizer.step()
    for ours, theirs in zip(parameters_of(model), parameters_of(twin), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert trainer.progress == 8


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
    trainer = make_trainer(**FIXED)
    model = network()
    optimizer = sgd(model)
    trainer.program_reentry(model, optimizer)
    for epoch in range(3):
        batches = train(trainer, model, optimizer, epochs=range(epoch, epoch + 1))
        assert sorted(concatenate(batches)) == list(range(48))
    assert trainer.progress == 18


def test_epochs_average_the_same_number_of_steps_if_the_batch_size_does_not_divide_the_data_set(
    make_trainer: MakeTrainer,
) -> None:
    trainer = make_trainer(batch_size=9)
    model = network()
    optimizer = sgd(model)
    trainer.program_reentry(model, optimizer)
    steps = [
        len(train(trainer, model, optimizer, epochs=range(e, e + 1), data=samples(20))) for e in range(9)
    ]
    assert steps == [3, 2, 2, 2, 3, 2, 2, 2, 2], "20/9 steps per epoch on average, in whole steps"
    assert sum(steps) == trainer.progress == 20


def test_unshuffled_epochs_are_in_the_order_of_the_data_set(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(**FIXED)
    model = network()
    optimizer = sgd(model)
    trainer.program_reentry(model, optimizer)
    batches = []
    for index, x, y in trainer.dataloader(samples(), shuffle=False):
        optimizer.zero_grad()
        learn(model, x, y)
        optimizer.step()
        batches += index.tolist()
    assert batches == list(range(48))


def test_training_is_finished_after_the_requested_scale_invariant_steps(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(**FIXED, scale_invariant_steps=8)
    model = network()
    optimizer = sgd(model)
    trainer.program_reentry(model, optimizer)
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
    trainer = make_trainer(**FIXED)
    model = network()
    optimizer = sgd(model)
    trainer.program_reentry(model, optimizer)
    batches: list[int] = []
    for _ in range(3):
        for index, x, y in trainer.dataloader(samples()):
            optimizer.zero_grad()
            learn(model, x, y)
            optimizer.step()
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
        optimizer.zero_grad()
        learn(model, x, y)
        optimizer.step()
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
    trainer = make_trainer(**ACCUMULATING)
    model = network()
    optimizer = sgd(model)
    trainer.program_reentry(model, optimizer)

    def fail_in_the_middle_of_a_step() -> None:
        for number, (_, x, y) in enumerate(trainer.dataloader(samples())):
            if number == 4:
                raise ArithmeticError
            optimizer.zero_grad()
            learn(model, x, y)
            optimizer.step()

    with pytest.raises(ArithmeticError):
        fail_in_the_middle_of_a_step()
    assert trainer.progress == 1
    assert len(train(trainer, model, optimizer)) == 9


def test_a_batch_without_an_optimizer_step_is_not_delivered_again(make_trainer: MakeTrainer) -> None:
    """A GradScaler makes no step if gradients are not finite."""
    trainer = make_trainer(**FIXED)
    model = network()
    optimizer = sgd(model)
    trainer.program_reentry(model, optimizer)
    taken: list[int] = []
    skipped: list[int] = []
    for _ in range(2):
        for number, (index, x, y) in enumerate(trainer.dataloader(samples())):
            if number == 1:
                skipped += index.tolist()
                continue
            optimizer.zero_grad()
            learn(model, x, y)
            optimizer.step()
            taken += index.tolist()
            if number == 2:
                break
    assert sorted(taken + skipped) == list(range(48))


def test_nested_data_loops_are_an_error(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(**FIXED)
    model = network()
    optimizer = sgd(model)
    trainer.program_reentry(model, optimizer)
    outer = trainer.dataloader(samples())
    next(outer)
    inner = trainer.dataloader(samples())
    next(inner)
    with pytest.raises(WorkerError, match=r"another loop over trainer\.dataloader"):
        next(outer)


# -- the local batch size -------------------------------------------------------------------------------


def test_training_with_the_previous_local_batch_size_is_an_error(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(batch_size=8, local_bsz_bounds=(2, 8))
    model = network()
    optimizer = sgd(model)
    trainer.program_reentry(model, optimizer)
    monkeypatch.setattr("adascale_worker.batches.planning.REPLAN_INTERVAL", 0.0)
    train(trainer, model, optimizer)
    # The plan of a single replica does not change; this plan is that of a larger job.
    monkeypatch.setattr("adascale_worker.batches.planning.plan_batch", lambda *_, **__: BatchPlan(1, 4, 2))
    _, x, y = samples()[:8]
    learn(model, x, y)
    optimizer.step()
    trainer.step(1)
    assert trainer.accumulation == 2
    learn(model, x, y)
    with pytest.raises(StaleBatchSizeError, match=r"is now 4.*get_local_bsz\(\) or trainer.dataloader\(\)"):
        optimizer.step()
    assert trainer.get_local_bsz() == 4
    optimizer.step()


@pytest.mark.parametrize("seed", [1.5, "1", True, 2**64])
def test_a_seed_that_is_no_integer_of_64_bits_is_an_error(make_trainer: MakeTrainer, seed: object) -> None:
    with pytest.raises(WorkerError, match="it must be an integer of 64 bits"):
        make_trainer(**FIXED, seed=seed)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "batch_size is not set"),
        ({"batch_size": 0}, "batch_size must be a positive integer, got 0"),
        ({"batch_size": 8, "max_batch_size": 4}, "max_batch_size 4 is less than batch_size 8"),
        ({"batch_size": 8, "local_bsz_bounds": (4, 2)}, "lower 4 is greater than upper 2"),
        ({"batch_size": 8, "local_bsz_bounds": [4]}, "must be a pair"),
        ({"batch_size": 8, "local_bsz_bounds": 4}, r"must be a pair \(lower, upper\), got 4"),
        ({"batch_size": 8, "local_bsz_bounds": [4, "auto"]}, "upper is auto, which needs max_batch_size"),
        ({"batch_size": 8, "local_bsz_bounds": [4, "Auto"]}, "positive integer or 'auto', got 'Auto'"),
        (
            {"batch_size": 7, "local_bsz_bounds": (2, 6)},
            "1 replica is not valid with batch_size 7, local_bsz_bounds 2 to 6: valid are",
        ),
    ],
)
def test_contradictory_bounds_are_an_error(
    make_trainer: MakeTrainer, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidJobError, match=message):
        make_trainer(**arguments)


# -- the data set ---------------------------------------------------------------------------------------


class Doubled:
    """A collate_fn that pickle supports."""

    def __call__(self, items: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[list[int], Tensor, Tensor]:
        index, x, y = zip(*items, strict=True)
        return [int(i) for i in index], 2 * torch.stack(x), torch.stack(y)


@pytest.mark.parametrize("workers", [0, 2])
def test_dataloader_passes_its_options_to_torch(make_trainer: MakeTrainer, workers: int) -> None:
    trainer = make_trainer(**FIXED)
    model = network()
    optimizer = sgd(model)
    trainer.program_reentry(model, optimizer)
    data = samples()
    batches: list[int] = []
    for index, x, y in trainer.dataloader(data, num_workers=workers, collate_fn=Doubled(), pin_memory=False):
        assert torch.equal(x, 2 * data.tensors[1][index])
        optimizer.zero_grad()
        learn(model, x, y)
        optimizer.step()
        batches += index
    assert sorted(batches) == list(range(48))


@pytest.mark.parametrize("option", ["batch_size", "sampler", "batch_sampler", "drop_last", "generator"])
def test_options_that_choose_the_batches_are_an_error(make_trainer: MakeTrainer, option: str) -> None:
    trainer = make_trainer(**FIXED)
    model = network()
    trainer.program_reentry(model, sgd(model))
    with pytest.raises(DatasetError, match=f"got {option}, but the trainer chooses the batches"):
        trainer.dataloader(samples(), shuffle=True, **{option: None})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("option", "sampler"),
    [
        ("sampler", WeightedRandomSampler([1.0] * 48, 48)),
        ("batch_sampler", BatchSampler(SequentialSampler(range(48)), 8, drop_last=False)),
    ],
)
def test_a_sampler_is_refused_with_a_line_that_works(
    make_trainer: MakeTrainer, option: str, sampler: Any
) -> None:
    trainer, model = make_trainer(**FIXED), network()
    trainer.program_reentry(model, sgd(model))
    data = samples()
    with pytest.raises(DatasetError, match=rf"got {option}={type(sampler).__name__}\(\.\.\.\)") as error:
        trainer.dataloader(data, **{option: sampler})
    lines = [line.strip() for line in str(error.value).splitlines() if line.startswith("    ")]
    names = {"trainer": trainer, "torch": torch, "dataset": data, "weights": torch.ones(48)}
    for line in lines:
        assert eval(line, {**names, "lengths": range(48)}) is not None
    assert len(lines) == 2


class Unmeasured(Dataset[int]):
    """Has no length."""

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("bounds", "data", "message"),
    [
        (FIXED, samples(7), r"has 7 samples, fewer than batch_size \(8\)"),
        (
            {"batch_size": 8, "max_batch_size": 64},
            samples(48),
            r"has 48 samples, fewer than max_batch_size \(64\)",
        ),
        (
            {"batch_size": 8, "local_bsz_bounds": (4, 64)},
            samples(7),
            r"has 7 samples, fewer than batch_size \(8\)",
        ),
        (
            {"batch_size": 8, "max_batch_size": 64},
            samples(7),
            r"fewer than max_batch_size \(64\): set batch_size and max_batch_size to at most 7",
        ),
        (
            {"batch_size": 8},
            samples(1),
            r"has 1 sample, fewer .* set batch_size to at most 1, in the job file if there is one, or",
        ),
        ({"batch_size": 8, "max_batch_size": 64}, samples(0), r"\(type TensorDataset\) has 0 samples: check"),
        (FIXED, DataLoader(samples(48)), r"got a DataLoader in place of a data set, but the trainer makes"),
        (FIXED, 3, r"\(type int\) has no length"),
        (FIXED, Unmeasured(), r"\(type Unmeasured\) has no length"),
    ],
)
def test_an_unsuitable_data_set_is_an_error(
    make_trainer: MakeTrainer, bounds: dict[str, Any], data: Any, message: str
) -> None:
    trainer = make_trainer(**bounds)
    model = network()
    trainer.program_reentry(model, sgd(model))
    with pytest.raises(DatasetError, match=message):
        trainer.dataloader(data)


def test_a_data_set_of_another_length_is_an_error(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(**FIXED)
    model = network()
    trainer.program_reentry(model, sgd(model))
    trainer.dataloader(samples(48))
    for allow_other_length in (False, True):
        with pytest.raises(DatasetError, match="has 40 samples, but had 48 before: a job trains on one data"):
            trainer.dataloader(samples(40), allow_other_length=allow_other_length)


def test_dataloader_before_program_reentry_is_an_error(make_trainer: MakeTrainer) -> None:
    with pytest.raises(WorkerError, match="call program_reentry"):
        make_trainer(**FIXED).dataloader(samples())


# -- invalid calls --------------------------------------------------------------------------------------


def test_a_second_program_reentry_is_an_error(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(**FIXED)
    model = network()
    optimizer = sgd(model)
    trainer.program_reentry(model, optimizer)
    with pytest.raises(WorkerError, match="was called before"):
        trainer.program_reentry(model, optimizer)


def test_another_optimizer_is_an_error(make_trainer: MakeTrainer) -> None:
    model = network()
    with pytest.raises(UnsupportedOptimizerError, match=r"got Adagrad; .*torch.optim.SGD"):
        make_trainer(**FIXED).program_reentry(model, torch.optim.Adagrad(model.parameters()))


def test_a_module_with_sparse_gradients_is_an_error(make_trainer: MakeTrainer) -> None:
    model = nn.Sequential(nn.Embedding(10, 3, sparse=True), nn.Linear(3, 2))
    with pytest.raises(WorkerError, match=r"the module '0' \(Embedding\) of the model has sparse=True"):
        make_trainer(**FIXED).program_reentry(model, sgd(model))


def test_a_module_with_an_attribute_named_sparse_trains(make_trainer: MakeTrainer) -> None:
    trainer, model = make_trainer(**FIXED), network()
    model[0].sparse = True  # type: ignore[assignment]
    trainer.program_reentry(model, sgd(model))


def test_a_list_of_models_is_an_error_that_shows_the_dicts(make_trainer: MakeTrainer) -> None:
    models: Any = [network(), network()]
    optimizers: Any = [sgd(each) for each in models]
    with pytest.raises(WorkerError, match=r"of type list: .*program_reentry\(\{name: model, \.\.\.\}"):
        make_trainer(**FIXED).program_reentry(models, optimizers)


def test_gradients_of_autograd_grad_may_be_assigned(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(**FIXED)
    model, plain = network(), network()
    optimizer, same = sgd(model), sgd(plain)
    trainer.program_reentry(model, optimizer)
    batches: list[tuple[Tensor, Tensor]] = []

    def assign(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
        parameters = list(model.parameters())
        loss = nn.functional.cross_entropy(model(x), y)
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient

    for _, x, y in trainer.dataloader(samples(48)):
        assign(model, x, y)
        optimizer.step()
        batches.append((x, y))
    trainer.step(0)
    for x, y in batches:
        assign(plain, x, y)
        same.step()
    assert trainer.steps == 6
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
def test_a_closure_that_computes_the_gradients_is_called_once_for_each_micro_batch(
    make_trainer: MakeTrainer, make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
) -> None:
    def trained(*, by_closure: bool) -> tuple[list[Tensor], list[float], int]:
        trainer, model, losses = make_trainer(**ACCUMULATING), network(), []
        optimizer = make_optimizer(model)
        trainer.program_reentry(model, optimizer)

        batches = []
        for _, x, y in trainer.dataloader(samples()):

            def compute(x: Tensor = x, y: Tensor = y) -> Tensor:
                batches.append(x)
                optimizer.zero_grad()
                return learn(model, x, y)

            if by_closure:
                with torch.no_grad():  # torch's optimizers compute gradients here too
                    loss: Any = optimizer.step(compute)  # type: ignore[arg-type]
            else:
                loss = compute()
                optimizer.step()
            losses.append(float(loss.detach()))
        trainer.step(0)
        assert trainer.steps == 4
        trainer.close()
        return parameters_of(model), losses, len(batches)

    weights, losses, calls = trained(by_closure=True)
    same_weights, same_losses, _ = trained(by_closure=False)
    assert calls == 12
    assert losses == same_losses
    assert equal(weights, same_weights)


def test_lbfgs_is_refused_by_name(make_trainer: MakeTrainer) -> None:
    model = network()
    with pytest.raises(
        UnsupportedOptimizerError, match="got LBFGS, which computes the gradients of one step"
    ):
        make_trainer(**FIXED).program_reentry(model, torch.optim.LBFGS(model.parameters()))


class MuonWithAdam(torch.optim.AdamW):
    """As programs write it: AdamW, and another step for matrices."""


class Lion(torch.optim.SGD):
    """A subclass of a supported optimizer with another step."""


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (torch.optim.Muon, "whose step has singular values of 1"),
        (MuonWithAdam, "whose step has singular values of 1"),
        (Lion, "whose step is the sign of its momentum"),
        (torch.optim.Adafactor, "which keeps no second moment of each parameter"),
    ],
)
def test_optimizers_without_a_measured_rule_are_refused_by_name_also_beside_another(
    make_trainer: MakeTrainer, kind: type[torch.optim.Optimizer], reason: str
) -> None:
    matrix, rest = nn.Linear(6, 6, bias=False), nn.Linear(6, 2)
    optimizer = kind(matrix.parameters(), lr=0.01)  # type: ignore[call-arg]
    message = rf"got {kind.__name__}, {reason}.*Use torch\.optim\.AdamW for all parameters"
    with pytest.raises(UnsupportedOptimizerError, match=message):
        make_trainer(**FIXED).program_reentry(matrix, optimizer)
    others = {"matrices": optimizer, "rest": torch.optim.AdamW(rest.parameters())}
    with pytest.raises(UnsupportedOptimizerError, match=message):
        make_trainer(**FIXED).program_reentry({"all": nn.Sequential(matrix, rest)}, others)


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
        optimizer.zero_grad()
        learn(model, x, y)
        optimizer.step()
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
            optimizer.zero_grad()
            learn(model, x, y)
            optimizer.step()
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
        train(trainer, model, optimizer, epochs=range(epoch, epoch))
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
    trainer = make_trainer(**FIXED)
    model = network()
    optimizer = sgd(model)
    trainer.program_reentry(model, optimizer)
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
    record(ReplicaGroup, "wait_for_device")
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
    assert calls[:2] == ["wait", "wait_for_device"]
    assert calls[-1] == "step"


# -- values that cannot be saved or reported ------------------------------------------------------------


def test_registering_a_value_without_state_is_an_error_at_once(make_trainer: MakeTrainer) -> None:
    model = network()
    with pytest.raises(WorkerError, match=r"register\['best'\] is of type float, .*register_buffer\('best'"):
        make_trainer(**FIXED).program_reentry(model, sgd(model), register={"best": 0.0})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, r"got no value: call trainer\.log\(loss=loss"),
        ({"lr": "0.1"}, "got a str for lr: pass a number or a tensor"),
        ({"best": True}, "got a bool for best"),
        ({"loss": torch.zeros(0)}, "got an empty or complex tensor for loss"),
        ({"flops": 10**400}, "got a number that no float can have for flops"),
        ({"genauigkeit_ü": 1.0}, "got the name 'genauigkeit_ü': use at most 64 of a-z"),
        ({f"m{number}": 1.0 for number in range(17)}, "a job has at most 16, the loss included"),
    ],
)
def test_logging_what_cannot_be_reported_is_an_error(
    make_trainer: MakeTrainer, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(WorkerError, match=message):
        make_trainer(**FIXED).log(**values)


def test_at_most_16_metrics_are_logged_in_one_call_or_several(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(**FIXED)
    for _ in range(2):
        for number in range(15):
            trainer.log(**{f"m{number}": number})
        trainer.log(loss=torch.ones(2))
    with pytest.raises(WorkerError, match="got accuracy, loss after 15 other metrics"):
        trainer.log(accuracy=1.0, loss=1.0)
