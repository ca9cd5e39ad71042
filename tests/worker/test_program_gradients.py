"""What the program does with gradients between `backward()` and `optimizer.step()` with accumulation."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from adascale import ElasticTrainer
from adascale.errors import NonFiniteWeightsError
from adascale_worker.adascale import AdaScale
from adascale_worker.batches.order import shuffled
from adascale_worker.errors import WorkerError
from adascale_worker.loop.steps import MAX_SKIPPED_STEPS
from support.training import (
    ACCUMULATING,
    FIXED,
    MakeTrainer,
    adamw,
    entered,
    equal,
    learn,
    make_step,
    network,
    parameters_of,
    samples,
    sgd,
    train_without,
)

Change = Callable[[nn.Module], object]


def clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def clip_values(model: nn.Module) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 0.003)


def add_weights(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad += 0.1 * parameter.detach()


def require_close(ours: nn.Module, theirs: nn.Module) -> None:
    for mine, other in zip(parameters_of(ours), parameters_of(theirs), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


def twin_of(model: nn.Module, change: Change, epochs: int = 2) -> nn.Module:
    """Train a copy with the whole batch at once."""
    twin = copy.deepcopy(model)
    optimizer = sgd(twin)
    _, features, targets = samples().tensors
    sequence = shuffled(48, 0)
    for start in range(0, epochs * 48, 12):
        order = torch.tensor(sequence[start : start + 12])
        optimizer.zero_grad()
        learn(twin, features[order], targets[order])
        change(twin)
        optimizer.step()
    return twin


@pytest.mark.parametrize("change", [clip, clip_values, add_weights])
def test_a_change_of_accumulated_gradients_acts_on_their_mean(
    make_trainer: MakeTrainer, change: Change
) -> None:
    trainer, model = make_trainer(**ACCUMULATING), network()
    twin = twin_of(model, change)
    optimizer = sgd(model)
    trainer.program_reentry(model, optimizer)
    for epoch in range(2):
        for _, x, y in trainer.dataloader(samples()):
            optimizer.zero_grad()
            learn(model, x, y)
            change(model)
            optimizer.step()
        trainer.step(epoch)
    require_close(model, twin)


def test_the_gradient_is_there_when_the_step_is_complete(make_trainer: MakeTrainer) -> None:
    trainer, model, optimizer = entered(make_trainer, **ACCUMULATING)
    twin = copy.deepcopy(model)
    _, features, targets = samples().tensors
    seen = []
    batches = iter(trainer.dataloader(samples()))
    for _ in range(3):
        _, x, y = next(batches)
        optimizer.zero_grad()
        learn(model, x, y)
        seen.append(trainer.completes_step)
        assert all((parameter.grad is not None) == seen[-1] for parameter in model.parameters())
        if not trainer.completes_step:
            optimizer.step()
    order = torch.tensor(shuffled(48, 0)[0:12])
    learn(twin, features[order], targets[order])
    assert seen == [False, False, True]
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_an_averaged_model_is_updated_once_per_step(make_trainer: MakeTrainer) -> None:
    trainer, model = make_trainer(**ACCUMULATING), network()
    optimizer, averaged = sgd(model), AveragedModel(model)
    trainer.program_reentry(model, optimizer, register={"averaged": averaged})
    for _, x, y in trainer.dataloader(samples()):
        make_step(model, optimizer, x, y)
        if trainer.made_step:
            averaged.update_parameters(model)
    assert int(averaged.n_averaged) == trainer.steps == 4


def test_several_backward_passes_for_a_micro_batch_add_up(make_trainer: MakeTrainer) -> None:
    trainer, model = make_trainer(**ACCUMULATING), network()
    twin = twin_of(model, clip)
    optimizer = sgd(model)
    trainer.program_reentry(model, optimizer)

    for epoch in range(2):
        for _, x, y in trainer.dataloader(samples()):
            optimizer.zero_grad()
            for _ in range(2):
                (nn.functional.cross_entropy(model(x), y) / 2).backward()
            clip(model)
            optimizer.step()
        trainer.step(epoch)
    require_close(model, twin)
    # The first step, which finds that there are several, is not measured.
    estimate = trainer.adascale.estimate
    assert estimate is not None
    assert not estimate.biased


def penalized_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A loss with the squared norm of its gradient by the input, as a critic of a GAN has it."""
    x = x.clone().requires_grad_()
    loss = nn.functional.cross_entropy(torch.tanh(model(x)), y)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + gradient.pow(2).sum(1).mean() * len(x)


def test_a_gradient_of_a_gradient_is_trained(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(**ACCUMULATING)
    model = network()
    twin = copy.deepcopy(model)
    optimizer = sgd(model)
    trainer.program_reentry(model, optimizer)
    batches = []
    for _, x, y in trainer.dataloader(samples()):
        batches.append((x, y))
        optimizer.zero_grad()
        penalized_loss(model, x, y).backward()
        optimizer.step()
    assert trainer.steps == 4
    trainer.close()
    plain = sgd(twin)
    for start in range(0, len(batches), 3):
        plain.zero_grad()
        for x, y in batches[start : start + 3]:
            (penalized_loss(twin, x, y) / 3).backward()
        plain.step()
    require_close(model, twin)


def test_gradients_deleted_by_hand_are_those_of_the_last_step(make_trainer: MakeTrainer) -> None:
    trainer, model = make_trainer(**ACCUMULATING), network()
    twin = twin_of(model, lambda _: None)
    optimizer = sgd(model)
    trainer.program_reentry(model, optimizer)
    for epoch in range(2):
        for _, x, y in trainer.dataloader(samples()):
            for parameter in model.parameters():
                parameter.grad = None
            learn(model, x, y)
            optimizer.step()
        trainer.step(epoch)
    require_close(model, twin)


def test_the_gain_does_not_depend_on_clipping_and_is_that_of_a_plain_loop(make_trainer: MakeTrainer) -> None:
    gains = []
    for change in (clip, lambda _: None):
        trainer, model = make_trainer(**ACCUMULATING), network()
        optimizer = sgd(model, lr=0.0, momentum=0.0, weight_decay=0.0)
        trainer.program_reentry(model, optimizer)
        for _, x, y in trainer.dataloader(samples()):
            optimizer.zero_grad()
            learn(model, x, y)
            change(model)
            optimizer.step()
        trainer.step(0)
        gains.append((trainer.adascale.grad_sqr, trainer.adascale.grad_var))
    assert gains[0] == pytest.approx(gains[1], rel=1e-5)


# -- hooks ------------------------------------------------------------------------------------------------


def test_hooks_on_accumulated_gradients_see_the_gradient_of_each_micro_batch(
    make_trainer: MakeTrainer,
) -> None:
    trainer, model = make_trainer(**ACCUMULATING), network()
    optimizer = sgd(model)
    each: list[torch.Tensor] = []
    accumulated: list[torch.Tensor] = []
    first = next(model.parameters())

    def record(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        accumulated.append(parameter.grad.clone())

    first.register_hook(lambda gradient: each.append(gradient.clone()))
    first.register_post_accumulate_grad_hook(record)
    trainer.program_reentry(model, optimizer)
    for _, x, y in trainer.dataloader(samples(24)):
        make_step(model, optimizer, x, y)
    assert trainer.steps == 2
    assert equal(accumulated, each)


# -- GradScaler -------------------------------------------------------------------------------------------


def make_scaler(**options: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", **{"init_scale": 1024.0, "growth_interval": 10**6, **options})


def train_scaled(
    trainer: ElasticTrainer,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    change: Change | None = clip,
    epochs: int = 2,
    broken: frozenset[int] = frozenset(),
) -> list[float]:
    """Train as the documentation of torch shows, and return the loss scale after each micro-batch."""
    scales: list[float] = []
    for epoch in range(epochs):
        for _, x, y in trainer.dataloader(samples()):
            optimizer.zero_grad()
            factor = float("inf") if len(scales) in broken else 1.0
            scaler.scale(nn.functional.cross_entropy(model(x), y) * factor).backward()
            if change is not None:
                scaler.unscale_(optimizer)
                change(model)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        trainer.step(epoch)
    return scales


def test_a_grad_scaler_with_accumulation_trains_as_the_whole_batch(make_trainer: MakeTrainer) -> None:
    trainer, model = make_trainer(**ACCUMULATING), network()
    twin = twin_of(model, clip)
    optimizer, scaler = sgd(model), make_scaler(growth_interval=2)
    trainer.program_reentry(model, optimizer, register={"scaler": scaler})
    scales = train_scaled(trainer, model, optimizer, scaler)
    require_close(model, twin)
    # It grows after every second step, and so after every sixth micro-batch.
    assert scales[:12] == [1024.0] * 5 + [2048.0] * 6 + [4096.0]


@pytest.mark.parametrize(
    ("make", "fused", "change"),
    [(sgd, False, clip), (sgd, True, None), (adamw, False, None), (adamw, True, clip)],
)
def test_a_step_with_infinite_gradients_is_skipped(
    make_trainer: MakeTrainer, make: Any, *, fused: bool, change: Change | None
) -> None:
    """Also the first, before which a fused Adam has a state already."""
    trainer, model = make_trainer(**ACCUMULATING), network()
    optimizer, scaler = make(model, fused=fused), make_scaler()
    trainer.program_reentry(model, optimizer, register={"scaler": scaler})
    before = parameters_of(model)
    scales = train_scaled(trainer, model, optimizer, scaler, change, 1, frozenset({0, 1}))
    assert scales[:6] == [1024.0] * 2 + [512.0] * 4
    assert trainer.steps == 4, "4 batches: the skipped one is not delivered again, and an epoch has 4 steps"
    assert trainer.samples == 60
    assert not equal(before, parameters_of(model))
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


@pytest.mark.parametrize("unscales", [True, False])
def test_a_program_may_leave_out_a_step_of_a_grad_scaler(
    make_trainer: MakeTrainer, *, unscales: bool
) -> None:
    def train(
        model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, batches: Any
    ) -> list[float]:
        scales = []
        for number, (_, x, y) in enumerate(batches):
            optimizer.zero_grad()
            scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
            if unscales:
                scaler.unscale_(optimizer)
            if number != 2:
                scaler.step(optimizer)
            if number != 2 or unscales:
                scaler.update()
            scales.append(scaler.get_scale())
            if number == 4:
                break
        return scales

    trainer, model = make_trainer(**FIXED), network()
    twin = copy.deepcopy(model)
    optimizer, scaler = sgd(model), make_scaler(growth_interval=2)
    trainer.program_reentry(model, optimizer, register={"scaler": scaler})
    seen: list[Any] = []

    def recorded() -> Iterator[Any]:
        for batch in trainer.dataloader(samples()):
            seen.append(batch)
            yield batch

    scales = train(model, optimizer, scaler, recorded())
    assert train(twin, sgd(twin), make_scaler(growth_interval=2), iter(seen)) == scales
    require_close(model, twin)


def test_training_fails_if_all_steps_are_skipped(make_trainer: MakeTrainer) -> None:
    trainer, model = make_trainer(**FIXED), network()
    optimizer, scaler = sgd(model), make_scaler()
    trainer.program_reentry(model, optimizer, register={"scaler": scaler})
    with pytest.raises(NonFiniteWeightsError, match=f"gradients of {MAX_SKIPPED_STEPS} steps in a row"):
        train_scaled(trainer, model, optimizer, scaler, broken=frozenset(range(10**4)))


@pytest.mark.parametrize(("options", "sparse_from"), [(FIXED, 0), (FIXED, 5), (ACCUMULATING, 3)])
def test_a_sparse_gradient_is_refused(
    make_trainer: MakeTrainer, options: dict[str, Any], sparse_from: int
) -> None:
    trainer, model = make_trainer(**options), nn.Embedding(48, 2)
    optimizer = sgd(model)
    trainer.program_reentry(model, optimizer)

    def train() -> None:
        for indices, _, y in trainer.dataloader(samples()):
            model.sparse = trainer.steps >= sparse_from
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(indices), y).backward()
            optimizer.step()

    with pytest.raises(WorkerError, match=r"shape \(48, 2\) got a gradient of layout torch\.sparse_coo"):
        train()
    assert trainer.steps == sparse_from


def test_a_grad_scaler_that_is_not_registered_is_refused(make_trainer: MakeTrainer) -> None:
    trainer, model, optimizer = entered(make_trainer, **FIXED)
    with pytest.raises(WorkerError, match=r'call program_reentry\(..., register={"scaler": scaler}\)'):
        train_scaled(trainer, model, optimizer, make_scaler())


def test_a_disabled_grad_scaler_does_nothing(make_trainer: MakeTrainer) -> None:
    trainer, model = make_trainer(**ACCUMULATING), network()
    twin = twin_of(model, clip)
    optimizer = sgd(model)
    trainer.program_reentry(model, optimizer)
    train_scaled(trainer, model, optimizer, make_scaler(enabled=False))
    require_close(model, twin)


def test_two_registered_grad_scalers_are_refused(make_trainer: MakeTrainer) -> None:
    trainer, model = make_trainer(**FIXED), network()
    with pytest.raises(WorkerError, match="register has 2 GradScalers"):
        trainer.program_reentry(model, sgd(model), register={"a": make_scaler(), "b": make_scaler()})


def test_a_fused_adam_whose_first_step_is_skipped_has_no_second_moment_yet() -> None:
    model = network()
    optimizer = AdaScale(adamw(model, fused=True), num_gradients_to_accumulate=2)
    scaler = make_scaler()
    _, x, y = samples().tensors
    for step in range(3):
        optimizer.zero_grad()
        for half in (slice(0, 24), slice(24, 48)):
            loss = nn.functional.cross_entropy(model(x[half]), y[half]) / 2
            scaler.scale(loss * (float("inf") if step == 0 else 1.0)).backward()
        scaler.step(optimizer.optimizer)
        optimizer.step() if step else optimizer.statistics.discard_step()
        scaler.update()
    assert optimizer.gain() >= 1.0


def test_gradients_deleted_between_two_passes_for_a_micro_batch_do_not_count(
    make_trainer: MakeTrainer,
) -> None:
    trainer, model = make_trainer(**ACCUMULATING), network()
    twin = twin_of(model, lambda _: None, epochs=1)
    optimizer = sgd(model)
    trainer.program_reentry(model, optimizer)
    for _, x, y in trainer.dataloader(samples()):
        learn(model, 2.0 * x, y)
        make_step(model, optimizer, x, y)
        optimizer.zero_grad()
    require_close(model, twin)


def test_assigned_gradients_of_all_micro_batches_count(make_trainer: MakeTrainer) -> None:
    def keep(_: nn.Module) -> None:
        """Change nothing."""

    trainer, model = make_trainer(**ACCUMULATING), network()
    twin = twin_of(model, keep, epochs=1)
    optimizer = sgd(model)
    trainer.program_reentry(model, optimizer)
    parameters = list(model.parameters())
    for _, x, y in trainer.dataloader(samples()):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient
        optimizer.step()
    require_close(model, twin)


def test_only_the_parameters_of_the_optimizer_have_to_be_zeroed(make_trainer: MakeTrainer) -> None:
    trainer, model = make_trainer(**FIXED), network()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    trainer.program_reentry(model, optimizer)
    for _, x, y in trainer.dataloader(samples()):
        make_step(model, optimizer, x, y)
    assert trainer.steps == 6


@pytest.mark.parametrize(
    ("weighted", "bad"),
    [
        (False, (0,)),
        (True, (1,)),
        (False, (0, 1)),
        (True, (2,)),
        (False, (2,)),
        (True, (0, 4)),
        (False, (0, 1, 2, 3)),
    ],
)
def test_a_step_is_the_mean_over_the_micro_batches_that_are_not_left_out(
    make_trainer: MakeTrainer, bad: tuple[int, ...], weighted: bool
) -> None:
    """It is left out as a whole with its last one, because the program makes no step then."""
    trainer = make_trainer(**ACCUMULATING)
    model, plain = network(), network()
    optimizer, plain_optimizer = sgd(model), sgd(plain)
    trainer.program_reentry(model, optimizer)
    batches = []
    for number, (index, x, y) in enumerate(trainer.dataloader(samples(36))):
        batches.append(index.tolist())
        if number in bad:
            continue
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        (trainer.weighted(loss, len(x)) if weighted else loss).backward()
        optimizer.step()
    train_without(bad, plain, plain_optimizer, batches)
    for found, expected in zip(parameters_of(model), parameters_of(plain), strict=True):
        assert torch.allclose(found, expected, atol=1e-6)
    assert trainer.steps == 3
    assert trainer.samples == 4 * len(batches) == 12 * (3 + (2 in bad))
