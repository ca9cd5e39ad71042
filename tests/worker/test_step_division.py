"""The steps of a single replica that are divided, to measure the gain."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

from adascale import ElasticTrainer
from adascale_core.batch.plans import BatchBounds, BatchPlan
from adascale_core.errors import InvalidJobError
from adascale_worker.batches.feed import LoadedBatches, MicroBatches
from adascale_worker.batches.order import shuffled
from adascale_worker.gradients.step_division import StepDivision, StepPlan, interval_at
from support.training import (
    MakeTrainer,
    adamw,
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
from worker import reference

ELASTIC = BatchBounds(8, 64, (1, 8))
OPTIONS: dict[str, Any] = {"batch_size": 8, "max_batch_size": 48, "local_bsz_bounds": (8, 16)}
ONE = BatchPlan(1, 8)


def division(bounds: BatchBounds = ELASTIC, **options: Any) -> StepDivision:
    return StepDivision(lambda: bounds, **{"observed_steps": 0, **options})


# -- which steps ----------------------------------------------------------------------------------------


@given(st.integers(0, 10**7))
def test_the_interval_is_that_of_the_reference(number: int) -> None:
    assert interval_at(number) == reference.division_interval(number)


@given(st.integers(2, 64), st.integers(1, 6000))
def test_few_micro_batches_are_added_whatever_the_batch(local_bsz: int, steps: int) -> None:
    """8 for each time that the number of steps doubles, then one in 128 steps."""
    plan = BatchPlan(1, local_bsz)
    made = [division().step_at(number * local_bsz, plan).plan for number in range(steps)]
    added = sum(each.accumulation - 1 for each in made)
    assert added <= 8 * 8 + steps / 128 + 8 * local_bsz
    assert all(each.global_bsz == local_bsz and each.replicas == 1 for each in made)


def test_an_interval_covers_the_steps_up_to_the_next_divided_one() -> None:
    for local_bsz, parts in ((8, 2), (9, 3), (5, 5)):
        plan = BatchPlan(1, local_bsz)
        made = {
            number: step
            for number in range(2048, 8192)
            if (step := division().step_at(number * local_bsz, plan)).interval
        }
        distances = {after - before for before, after in zip(made, list(made)[1:], strict=False)}
        assert distances == {128 * (parts - 1)} == {step.interval for step in made.values()}
        assert {step.plan for step in made.values()} == {BatchPlan(1, local_bsz // parts, parts)}


@pytest.mark.parametrize(
    ("bounds", "plan", "options"),
    [
        (ELASTIC, BatchPlan(1, 1), {}),
        (ELASTIC, BatchPlan(2, 4), {}),
        (ELASTIC, BatchPlan(1, 4, 2), {}),
        (BatchBounds(8), ONE, {}),
        (BatchBounds(8, 8, (1, 8)), ONE, {}),
        (ELASTIC, ONE, {"is_allowed": False}),
        (ELASTIC, BatchPlan(1, 2), {"has_batch_norm": True}),
        (ELASTIC, BatchPlan(1, 7), {"has_batch_norm": True}),
    ],
    ids=[
        "one sample", "two replicas", "accumulation", "a fixed batch",
        "bounds that fix the batch", "not allowed",
        "one sample to normalize", "a prime number of samples to normalize",
    ],
)  # fmt: skip
def test_steps_that_cannot_be_divided_stay_whole(
    bounds: BatchBounds, plan: BatchPlan, options: dict[str, Any]
) -> None:
    made = division(bounds, **options)
    assert not made.is_possible(plan)
    assert all(made.step_at(position, plan) == StepPlan(plan) for position in range(0, 800, 8))


def test_steps_are_observed_before_the_first_one_is_divided() -> None:
    made = division(observed_steps=2)
    for _ in range(2):
        assert made.step_at(0, ONE) == StepPlan(ONE)
        assert made.is_possible(ONE)
        made.observe_step(is_divisible=True)
    assert made.step_at(8, ONE) == StepPlan(BatchPlan(1, 4, 2), 1)

    made.observe_step(is_divisible=False)

    assert not made.is_possible(ONE)
    assert made.step_at(8, ONE) == StepPlan(ONE)


def test_steps_that_were_loaded_ahead_as_whole_ones_are_whole_after_a_restart() -> None:
    made = division(observed_steps=2)
    loaded_ahead = [made.step_at(position, ONE) for position in (0, 8, 16, 24)]
    for _ in range(2):
        made.observe_step(is_divisible=True)
    resumed = division()
    resumed.load_state_dict(made.state_dict())
    assert [resumed.step_at(position, ONE) for position in (16, 24)] == loaded_ahead[2:]
    assert resumed.step_at(32, ONE) == StepPlan(BatchPlan(1, 4, 2), 1)


def test_no_step_is_divided_whose_parts_cannot_be_loaded() -> None:
    made = division()
    made.loads_parts = False
    assert not made.is_possible(ONE)
    assert made.compares_steps(ONE)
    assert made.step_at(0, ONE) == StepPlan(ONE)


def test_divided_steps_have_the_samples_of_whole_ones_in_their_order() -> None:
    sequence = shuffled(50, 1)
    whole = iter(MicroBatches(sequence, 24, ONE, 0))
    sampler = MicroBatches(sequence, 24, ONE, 0, division())
    loaded = LoadedBatches(iter(sampler), ONE, sampler.drawn)
    for number in range(3, 200):
        step, (first, *_) = next(whole), [next(loaded)]
        if loaded.step.interval:
            assert (loaded.step.plan, loaded.index) == (BatchPlan(1, 4, 2), 0)
            first = [*first, *next(loaded)]
            assert loaded.index == 1
        assert bool(loaded.step.interval) == (number % interval_at(number) == 0)
        assert first == step


# -- training -------------------------------------------------------------------------------------------


def trained(
    make_trainer: MakeTrainer,
    *,
    adam: bool = False,
    epochs: int = 12,
    model: nn.Module | None = None,
    data: TensorDataset | None = None,
    **options: Any,
) -> tuple[ElasticTrainer, nn.Module, list[list[int]]]:
    """Train on one replica; return the trainer, the model, and the indices of each micro-batch."""
    trainer = make_trainer(**{**OPTIONS, **options})
    model = model or network()
    optimizer = adamw(model) if adam else sgd(model)
    trainer.program_reentry(model, optimizer)
    return trainer, model, train(trainer, model, optimizer, epochs=range(epochs), data=data)


@pytest.mark.parametrize("adam", [False, True])
def test_training_is_that_of_whole_steps_up_to_rounding(make_trainer: MakeTrainer, adam: bool) -> None:
    trainer, divided, batches = trained(make_trainer, adam=adam)
    other, whole, whole_batches = trained(make_trainer, adam=adam, single_replica_gain="consecutive")

    assert {len(each) for each in whole_batches} == {8}
    assert {len(each) for each in batches} == {4, 8}
    assert concatenate(batches) == concatenate(whole_batches)
    assert (trainer.steps, trainer.progress, trainer.samples) == (other.steps, other.progress, other.samples)
    torch.testing.assert_close(parameters_of(divided), parameters_of(whole), rtol=1e-4, atol=1e-5)
    assert not equal(parameters_of(divided), parameters_of(whole)), "no step was divided"


def test_the_limit_of_the_gain_is_in_the_estimates_of_a_trainer(make_trainer: MakeTrainer) -> None:
    free, *_ = trained(make_trainer, adam=True)
    limited, *_ = trained(make_trainer, adam=True, max_gain=3.0)
    assert free.adascale.estimate is not None
    assert limited.adascale.estimate == free.adascale.estimate.limited(3.0)
    assert limited.adascale.predict_gain(1e9) <= 3.0 < free.adascale.predict_gain(1e9)


@pytest.mark.parametrize("adam", [False, True])
def test_the_estimate_is_that_of_the_reference(make_trainer: MakeTrainer, adam: bool) -> None:
    data = samples()
    _, features, classes = data.tensors
    start = network()
    trainer, _, batches = trained(make_trainer, adam=adam, model=deepcopy(start), data=data)

    twin = reference.Reference(
        start,
        adamw(start) if adam else sgd(start),
        lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        1.0,
        compares_steps=False,
    )
    position = number = 0
    while position < len(batches):
        parts = batches[position : position + 8 // len(batches[position])]
        theta = reference.divided_smoothing(number) if len(parts) > 1 else None
        twin.step([(features[part], classes[part]) for part in parts], theta=theta)
        position, number = position + len(parts), number + 1

    estimate = trainer.adascale.estimate
    assert estimate is not None
    assert not estimate.biased
    assert (estimate.grad_sqr, estimate.grad_var) == pytest.approx(twin.estimate(), rel=1e-3)
    assert estimate.grad_sqr_error == pytest.approx(twin.grad_sqr_error(), rel=1e-3)
    assert trainer.adascale.predict_gain(16.0) == pytest.approx(
        reference.gain(twin.estimate(), 16.0), rel=1e-3
    )


def test_the_first_steps_are_whole_then_some_are_divided(make_trainer: MakeTrainer) -> None:
    trainer, _, batches = trained(make_trainer, epochs=10)
    sizes = [len(each) for each in batches]
    assert sizes[:8] == [8] * 8
    assert sizes[8:24] == [4] * 16
    assert sizes[24:30] == [4, 4, 8, 4, 4, 8]
    assert trainer.get_local_bsz() == 8


def test_no_gradient_is_copied(make_trainer: MakeTrainer) -> None:
    trainer, model, optimizer = entered(make_trainer, **OPTIONS)
    seen = set()
    for epoch in range(8):
        for _, x, y in trainer.dataloader(samples()):
            make_step(model, optimizer, x, y)
            seen.add(trainer.accumulation)
            statistics = trainer.adascale.state_dict()["adascale"]["statistics"]
            assert statistics["previous_gradient"] is None
        trainer.step(epoch)
    assert seen == {1, 2}


def test_a_batch_of_one_sample_is_compared_with_the_step_before(make_trainer: MakeTrainer) -> None:
    trainer, _, batches = trained(
        make_trainer, epochs=2, batch_size=1, max_batch_size=16, local_bsz_bounds=(1, 4)
    )
    assert {len(each) for each in batches} == {1}
    assert trainer.adascale.estimate is not None
    assert trainer.adascale.estimate.biased


def test_a_fixed_batch_needs_no_gain_and_measures_none(make_trainer: MakeTrainer) -> None:
    trainer, _, batches = trained(make_trainer, epochs=2, max_batch_size=None, local_bsz_bounds=None)
    assert {len(each) for each in batches} == {8}
    statistics = trainer.adascale.state_dict()["adascale"]["statistics"]
    assert statistics["previous_gradient"] is None
    assert trainer.adascale.estimate is None


@pytest.mark.parametrize(("batch_size", "sizes"), [(8, {4, 8}), (2, {2})])
def test_batch_norm_gets_at_least_two_samples(
    make_trainer: MakeTrainer, batch_size: int, sizes: set[int]
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    _, _, batches = trained(
        make_trainer, epochs=2, model=model, batch_size=batch_size, local_bsz_bounds=(1, 16)
    )
    assert {len(each) for each in batches} == sizes


def test_a_program_with_two_backward_passes_per_batch_gets_whole_batches(make_trainer: MakeTrainer) -> None:
    """As sharpness-aware minimization, whose zero_grad() would delete the first half of a step."""
    trainer, model, optimizer = entered(make_trainer, **OPTIONS)
    sizes: list[int] = []
    for epoch in range(4):
        for _, x, y in trainer.dataloader(samples()):
            for _ in range(2):
                optimizer.zero_grad()
                learn(model, x, y)
            optimizer.step()
            sizes.append(len(x))
        trainer.step(epoch)
    assert sizes == [8] * 24


def test_a_second_backward_pass_may_begin_later(make_trainer: MakeTrainer) -> None:
    weights = []
    for begin in (8, 10**6):
        trainer, model, optimizer = entered(make_trainer, **OPTIONS)
        for epoch in range(2):
            for _, x, y in trainer.dataloader(samples()):
                for _ in range(1 + (trainer.steps >= begin)):
                    optimizer.zero_grad()
                    learn(model, x, y)
                optimizer.step()
            trainer.step(epoch)
        weights.append(list(model.parameters()))
        trainer.close()
    for found, expected in zip(*weights, strict=True):
        assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("every", [1, 3])
def test_steps_of_several_optimizers_are_divided_if_each_makes_a_step_per_batch(
    make_trainer: MakeTrainer, every: int
) -> None:
    trainer = make_trainer(**OPTIONS)
    models = {"first": network(), "second": network()}
    optimizers = {name: sgd(model) for name, model in models.items()}
    trainer.program_reentry(models, optimizers)
    sizes: list[int] = []
    for epoch in range(4):
        for _, x, y in trainer.dataloader(samples()):
            for name, model in models.items():
                if name == "first" or len(sizes) % every == 0:
                    optimizers[name].zero_grad()
                    learn(model, x, y)
                    optimizers[name].step()
            sizes.append(len(x))
        trainer.step(epoch)
    assert sizes[:8] == [8] * 8
    assert (4 in sizes[8:]) == (every == 1)


@pytest.mark.parametrize("part", [0, 1])
def test_a_step_that_is_left_out_in_a_part_is_left_out_as_a_whole(
    make_trainer: MakeTrainer, part: int
) -> None:
    trainer, model, optimizer = entered(make_trainer, **OPTIONS)
    stream: list[list[int]] = []
    for epoch in range(3):
        for index, x, y in trainer.dataloader(samples()):
            optimizer.zero_grad()
            learn(model, x, y)
            stream.append(index.tolist())
            if len(stream) != 11 + part:  # The parts of the tenth step have the numbers 11 and 12.
                optimizer.step()
        trainer.step(epoch)
    delivered = [len(each) for each in stream]
    assert delivered[:8] == [8] * 8
    assert delivered[8 : 13 + part] == [4] * (5 + part)
    assert trainer.samples == sum(delivered) + (4 if part == 0 else 0)
    assert trainer.samples == 8 * (trainer.steps + 1)


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}])
def test_worker_processes_load_the_parts_of_steps(make_trainer: MakeTrainer, options: dict[str, Any]) -> None:
    trainer, model, optimizer = entered(make_trainer, **OPTIONS)
    data, seen, sizes = samples(), [], []
    if options:
        options = {**options, "multiprocessing_context": "fork"}
    for epoch in range(6):
        for index, x, y in trainer.dataloader(data, **options):
            make_step(model, optimizer, x, y)
            sizes.append(len(index))
            seen += index.tolist()
        trainer.step(epoch)
    assert {4, 8} == set(sizes)
    assert trainer.samples == len(seen) == 6 * 48
    assert all(sorted(seen[start : start + 48]) == list(range(48)) for start in range(0, len(seen), 48))


def test_weights_of_micro_batches_hold_in_divided_steps(make_trainer: MakeTrainer) -> None:
    """With weights, a divided step is that of the whole batch, however valid samples are distributed."""

    def run(**options: Any) -> Sequence[torch.Tensor]:
        trainer, model, optimizer = entered(make_trainer, **OPTIONS, **options)
        for epoch in range(4):
            for index, x, y in trainer.dataloader(samples()):
                optimizer.zero_grad()
                valid = index % 3 > 0
                loss = nn.functional.cross_entropy(model(x)[valid], y[valid])
                trainer.weighted(loss, valid.sum()).backward()
                optimizer.step()
            trainer.step(epoch)
        return parameters_of(model)

    torch.testing.assert_close(run(), run(single_replica_gain="consecutive"), rtol=1e-4, atol=1e-5)


def test_the_time_of_divided_steps_is_left_out(make_trainer: MakeTrainer) -> None:
    trainer, _, batches = trained(make_trainer, epochs=12)
    (measured,) = trainer._require_training().telemetry.step_timer.step_times()
    assert measured.plan == ONE
    assert measured.reports < sum(len(each) == 8 for each in batches)


def test_an_unknown_way_to_measure_is_refused(make_trainer: MakeTrainer) -> None:
    with pytest.raises(InvalidJobError, match="single_replica_gain must be 'divided' or 'consecutive', got"):
        make_trainer(**OPTIONS, single_replica_gain="halves")
