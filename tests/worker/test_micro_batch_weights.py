"""A loss that is a mean over valid tokens: the gradient of a step is that of its whole batch."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from adascale import ElasticTrainer
from adascale_worker.batches.order import shuffled
from adascale_worker.errors import WorkerError
from support.training import MakeTrainer, adamw, network, parameters_of, sgd
from worker import reference

TOKENS = 20
Batch = tuple[Tensor, Tensor]


def sequences(count: int = 48, *, empty: range = range(0)) -> TensorDataset:
    """Return index, features of the tokens and their classes; -1 for padding."""
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(count, TOKENS, 6, generator=generator)
    classes = (features.sum(2) > 0).long()
    lengths = torch.tensor([1 if index % 3 else TOKENS for index in range(count)])
    lengths[list(empty)] = 0
    classes[torch.arange(TOKENS) >= lengths[:, None]] = -1
    return TensorDataset(torch.arange(count), features, classes)


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean over valid tokens; zero without any."""
    features, classes = batch
    losses = nn.functional.cross_entropy(
        model(features).flatten(0, 1), classes.flatten(), ignore_index=-1, reduction="sum"
    )
    return losses / tokens_of(batch).clamp(min=1)


def tokens_of(batch: Batch) -> Tensor:
    return (batch[1] != -1).sum()


def learn(trainer: ElasticTrainer, model: nn.Module, batch: Batch) -> None:
    trainer.weighted(mean_loss(model, batch), tokens_of(batch)).backward()


def enter(trainer: ElasticTrainer, **objects: Any) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = network()
    optimizer = sgd(model)
    trainer.program_reentry(model, optimizer, register=objects)
    return model, optimizer


def whole_batches(size: int, data: TensorDataset) -> Iterator[Batch]:
    """Yield the batches of the steps of an epoch."""
    _, features, classes = data.tensors
    sequence = shuffled(len(data), 0)
    for start in range(0, len(data), size):
        order = torch.tensor(sequence[start : start + size])
        yield features[order], classes[order]


def close(ours: nn.Module, theirs: nn.Module) -> None:
    for mine, other in zip(parameters_of(ours), parameters_of(theirs), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


def divided(local_bsz: int, batch_size: int = 8) -> dict[str, Any]:
    return {"batch_size": batch_size, "local_bsz_bounds": (1, local_bsz)}


@pytest.mark.parametrize("local_bsz", [8, 4, 1])
def test_the_gradient_does_not_depend_on_how_the_batch_is_divided(
    make_trainer: MakeTrainer, local_bsz: int
) -> None:
    trainer = make_trainer(**divided(local_bsz))
    model, optimizer = enter(trainer)
    twin = copy.deepcopy(model)
    whole = next(whole_batches(8, sequences()))
    mean_loss(twin, whole).backward()
    for _, *batch in trainer.dataloader(sequences()):
        optimizer.zero_grad()
        learn(trainer, model, (batch[0], batch[1]))
        if trainer.completes_step:
            break
        optimizer.step()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)


@pytest.mark.parametrize("scales", [False, True])
def test_clipping_and_a_grad_scaler_act_on_the_gradient_of_the_whole_batch(
    make_trainer: MakeTrainer, *, scales: bool
) -> None:
    trainer = make_trainer(**divided(2))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2, enabled=scales)
    model, optimizer = enter(trainer, scaler=scaler)
    twin = copy.deepcopy(model)
    plain = sgd(twin)
    for _, *batch in trainer.dataloader(sequences()):
        optimizer.zero_grad()
        loss = mean_loss(model, (batch[0], batch[1]))
        scaler.scale(trainer.weighted(loss, tokens_of((batch[0], batch[1])))).backward()
        scaler.unscale_(optimizer)
        clip(model)
        scaler.step(optimizer)
        scaler.update()
    for whole in whole_batches(8, sequences()):
        plain.zero_grad()
        mean_loss(twin, whole).backward()
        clip(twin)
        plain.step()
    assert trainer.steps == 6
    close(model, twin)


# -- the gain ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [sgd, adamw])
def test_weights_and_estimates_are_those_of_the_reference(make_trainer: MakeTrainer, make: Any) -> None:
    """One of the micro-batches has no tokens."""
    data = sequences(empty=range(4, 6))
    trainer = make_trainer(**divided(2))
    model = network().double()
    theirs = copy.deepcopy(model)
    optimizer = make(model)
    trainer.program_reentry(model, optimizer)
    twin = reference.Reference(theirs, make(theirs), mean_loss, trainer.adascale.scale)
    batches: list[Batch] = []
    for _, features, classes in trainer.dataloader(data, shuffle=False):
        batch = features.double(), classes
        optimizer.zero_grad()
        learn(trainer, model, batch)
        optimizer.step()
        batches.append(batch)
    trainer.step(0)
    for start in range(0, 24, 4):
        step = batches[start : start + 4]
        twin.step(step, [float(tokens_of(batch)) for batch in step])
    assert trainer.steps == 6
    for ours, other in zip(model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(ours, other)
    assert (trainer.adascale.grad_sqr, trainer.adascale.grad_var) == pytest.approx(twin.estimate(), rel=1e-6)


def test_the_estimates_are_unbiased_for_means_over_unequal_numbers() -> None:
    generator = torch.Generator().manual_seed(5)
    truth = torch.tensor([1.0, -0.5, 0.25])
    weights = [1.0, 100.0, 7.0, 0.0, 30.0]
    sums = torch.zeros(2)
    for _ in range(20_000):
        noise = torch.randn(len(weights), 3, generator=generator)
        gradients = truth + noise / torch.tensor(weights).clamp(min=1e-9).sqrt()[:, None]
        sums += torch.tensor(reference.sample(gradients.tolist(), 4.0, weights))
    grad_sqr, grad_var = (sums / 20_000).tolist()
    assert grad_sqr == pytest.approx(float(truth.square().sum()), rel=0.02)
    assert grad_var == pytest.approx(3.0 / sum(weights) * 4.0, rel=0.02), "of the step's gradient, times S"


# -- micro-batches without weight -------------------------------------------------------------------------


@pytest.mark.parametrize("local_bsz", [8, 2])
def test_a_step_without_valid_tokens_has_a_gradient_of_zero(
    make_trainer: MakeTrainer, local_bsz: int
) -> None:
    trainer = make_trainer(**divided(local_bsz))
    model, optimizer = enter(trainer)
    gradients = []
    for _, *batch in trainer.dataloader(sequences(empty=range(8, 16)), shuffle=False):
        optimizer.zero_grad()
        learn(trainer, model, (batch[0], batch[1]))
        if trainer.completes_step:
            gradients.append(sum(float(p.grad.abs().sum()) for p in model.parameters() if p.grad is not None))
        optimizer.step()
    assert trainer.steps == 6
    assert [gradient == 0.0 for gradient in gradients] == [False, True, False, False, False, False]
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_a_step_that_is_left_out_leaves_no_weights_behind(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(**divided(4))
    model, optimizer = enter(trainer)
    twin = copy.deepcopy(model)
    plain = sgd(twin)
    for number, (_, *batch) in enumerate(trainer.dataloader(sequences())):
        optimizer.zero_grad()
        learn(trainer, model, (batch[0], batch[1]))
        if number not in (0, 4):  # a first micro-batch, and the last of a step
            optimizer.step()
        if trainer.steps == 2:
            break
    parts = list(whole_batches(4, sequences()))
    for pair in (parts[1:3], parts[5:7]):
        plain.zero_grad()
        mean_loss(twin, (torch.cat([x for x, _ in pair]), torch.cat([y for _, y in pair]))).backward()
        plain.step()
    close(model, twin)


def test_other_backward_passes_and_torch_autograd_grad_have_no_weight(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(**divided(4))
    model, optimizer = enter(trainer)
    critic = nn.Linear(6, 1)
    for _, *batch in trainer.dataloader(sequences()):
        optimizer.zero_grad()
        loss = trainer.weighted(mean_loss(model, (batch[0], batch[1])), 3)
        critic.zero_grad()
        critic(batch[0]).mean().backward()
        torch.testing.assert_close(critic.bias.grad, torch.ones(1))
        torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        loss.backward()
        optimizer.step()
    assert trainer.steps == 6


# -- several optimizers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("local_bsz", [8, 2])
def test_several_optimizers_have_the_gradients_of_the_whole_batch(
    make_trainer: MakeTrainer, local_bsz: int
) -> None:
    trainer = make_trainer(**divided(local_bsz))
    models = {"body": nn.Linear(6, 6), "head": network()}
    twins = copy.deepcopy(models)
    optimizers: dict[str, torch.optim.Optimizer] = {name: sgd(model) for name, model in models.items()}
    plain = {name: sgd(twin) for name, twin in twins.items()}
    trainer.program_reentry(dict(models), optimizers)

    def step(both: dict[str, Any], own: dict[str, Any], batch: Batch, *, is_weighted: bool) -> None:
        for optimizer in own.values():
            optimizer.zero_grad()
        for _ in range(2):  # passes
            loss = mean_loss(nn.Sequential(both["body"], both["head"]), batch) / 2
            (trainer.weighted(loss, tokens_of(batch)) if is_weighted else loss).backward()
        for name, optimizer in own.items():
            clip(both[name])
            optimizer.step()

    for _, *batch in trainer.dataloader(sequences()):
        step(models, optimizers, (batch[0], batch[1]), is_weighted=True)
    for whole in whole_batches(8, sequences()):
        step(twins, plain, whole, is_weighted=False)
    assert trainer.steps == 6
    for name, model in models.items():
        close(model, twins[name])


# -- wrong calls --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf")])
def test_a_weight_that_is_no_number_of_at_least_0_is_an_error(
    make_trainer: MakeTrainer, weight: float
) -> None:
    trainer = make_trainer(**divided(8))
    enter(trainer)
    with pytest.raises(
        WorkerError, match=r"got weight=.*: it must be a finite number of at least 0, such as"
    ):
        trainer.weighted(torch.zeros(()), weight)


def train(trainer: ElasticTrainer, weights: Sequence[float | None]) -> nn.Module:
    """Make a backward pass and call step() for micro-batches with and without weights."""
    model, optimizer = enter(trainer)
    for weight, (_, *batch) in zip(weights, trainer.dataloader(sequences()), strict=False):
        optimizer.zero_grad()
        loss = mean_loss(model, (batch[0], batch[1]))
        (loss if weight is None else trainer.weighted(loss, weight)).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize(
    ("weights", "found"),
    [
        ([3, None], "1 of the 2 micro-batches"),
        ([None, 3], "1 of the 2 micro-batches"),
        ([3, 4, None, None], "0 of the 2 micro-batches"),
    ],
)
def test_weights_for_some_micro_batches_are_an_error(
    make_trainer: MakeTrainer, weights: list[float | None], found: str
) -> None:
    trainer = make_trainer(**divided(4))
    with pytest.raises(WorkerError, match=f"was used in {found} of a step, .*with a weight of 0"):
        train(trainer, weights)
    assert trainer.steps == len(weights) // 2 - 1, "the step was not made"


def test_weights_after_steps_without_them_are_an_error(make_trainer: MakeTrainer) -> None:
    with pytest.raises(WorkerError, match="but the steps before were made without weights"):
        train(make_trainer(**divided(8)), [None, 3])


def test_two_weights_for_one_micro_batch_are_an_error(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(**divided(8))
    model, _ = enter(trainer)
    batches = iter(trainer.dataloader(sequences()))
    _, *batch = next(batches)
    trainer.weighted(mean_loss(model, (batch[0], batch[1])), 3).backward()
    with pytest.raises(WorkerError, match="got the weights 3 and 4 for one micro-batch"):
        trainer.weighted(mean_loss(model, (batch[0], batch[1])), 4).backward()


@pytest.mark.parametrize("local_bsz", [8, 4])
@pytest.mark.parametrize("weights", [[3, None], [None, 3]])
def test_another_backward_pass_without_the_weight_is_an_error(
    make_trainer: MakeTrainer, local_bsz: int, weights: list[float | None]
) -> None:
    trainer = make_trainer(**divided(local_bsz))
    model, optimizer = enter(trainer)

    def learn_all() -> None:
        for _, *batch in trainer.dataloader(sequences()):
            optimizer.zero_grad()
            for weight in weights if trainer.completes_step else [3]:
                loss = mean_loss(model, (batch[0], batch[1]))
                (loss if weight is None else trainer.weighted(loss, weight)).backward()
            optimizer.step()

    with pytest.raises(
        WorkerError, match=r"and some have made another backward pass without it.*with a weight of 0"
    ):
        learn_all()
    assert trainer.steps == 0


def test_weights_may_begin_after_a_step_without_gradients(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(**divided(8))
    model, optimizer = enter(trainer)
    for number, (_, *batch) in enumerate(trainer.dataloader(sequences())):
        optimizer.zero_grad()
        if number > 0:
            learn(trainer, model, (batch[0], batch[1]))
        optimizer.step()
    assert trainer.steps == 6
