"""Gradients of several optimizers that some backward passes, micro-batches or replicas do not have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from adascale_worker.gradients.optimizer_gradients import OptimizerGradients
from support.gan import Gan, noise_of
from support.heads import CASES, CASES_OF_ONE, Heads, plain_parameters
from support.launch import PROGRAMS, run_python
from support.training import (
    ACCUMULATING,
    FIXED,
    MakeTrainer,
    equal,
    learn,
    network,
    samples,
    sgd,
    train_without,
)

PROGRAM = PROGRAMS / "heads.py"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of two replicas."""
    folder = tmp_path_factory.mktemp("heads")
    run_python(PROGRAM, replicas=2, OUT=folder)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("case", CASES)
def test_a_gradient_that_a_replica_does_not_have_counts_as_zero(
    results: list[dict[str, Any]], case: str
) -> None:
    first, second = (result[case] for result in results)
    assert all(map(torch.equal, first["parameters"], second["parameters"]))
    assert first["progress"] == second["progress"]
    steps: dict[int, list[tuple[torch.Tensor, str]]] = {}
    for step, index, heads in [*first["done"], *second["done"]]:
        steps.setdefault(step, []).append((index, heads))
    for found, expected in zip(first["parameters"], plain_parameters(steps), strict=True):
        assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("case", CASES_OF_ONE)
def test_gradients_of_earlier_micro_batches_are_used_without_any_in_the_last(
    make_trainer: MakeTrainer, case: str
) -> None:
    heads = Heads()
    trainer = make_trainer(**ACCUMULATING)
    heads.enter(trainer)
    steps: dict[int, list[tuple[torch.Tensor, str]]] = {}
    for step, index, names in heads.train(trainer, CASES_OF_ONE[case]):
        steps.setdefault(step, []).append((index, names))
    assert {len(step) for step in steps.values()} == {3}
    for found, expected in zip(heads.parameters(), plain_parameters(steps), strict=True):
        assert torch.allclose(found, expected, atol=1e-6)


def test_a_restored_optimizer_may_be_without_gradients_at_once(
    make_trainer: MakeTrainer, tmp_path: Path, durable_checkpoints: None
) -> None:
    saves = {**FIXED, "checkpoint_dir": tmp_path, "checkpoint_interval": 0.0}
    for epochs in (1, 3):
        heads = Heads()
        trainer = make_trainer(**saves)
        state = heads.enter(trainer)
        for epoch in range(state.epoch, epochs):
            heads.train(trainer, lambda step, *_: "a" if step else "ab")
            trainer.step(epoch)
        trainer.close()
    assert state.restored
    assert trainer.steps == 18


def test_gradients_are_averaged_once_more_only_if_no_pass_reaches_the_optimizer(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The discriminator's pass does not reach the generator, whose earlier gradients wait for their pass."""
    calls: list[str] = []
    average = OptimizerGradients.begin_average

    def counted(part: OptimizerGradients) -> None:
        calls.append(part.name)
        average(part)

    monkeypatch.setattr(OptimizerGradients, "begin_average", counted)
    gan = Gan()
    trainer = make_trainer(**ACCUMULATING)
    gan.enter(trainer)
    for index, x, _ in trainer.dataloader(samples()):
        gan.learn(x, noise_of(index))
    assert trainer.steps == 4
    assert calls == ["discriminator", "generator"] * 4


@pytest.mark.parametrize("bounds", [FIXED, ACCUMULATING], ids=["fixed", "accumulating"])
def test_parameters_may_be_frozen_at_program_reentry_and_later(
    make_trainer: MakeTrainer, bounds: dict[str, Any]
) -> None:
    def run(*, frozen: bool) -> list[torch.Tensor]:
        heads = Heads()
        trainer = make_trainer(**bounds)
        weight = heads.models["b"].weight
        weight.requires_grad_(not frozen)
        heads.enter(trainer)
        weight.requires_grad_()
        heads.train(trainer, lambda step, *_: "ab" if step < 3 else "a")
        trainer.close()
        return heads.parameters()

    assert equal(run(frozen=True), run(frozen=False))


@pytest.mark.parametrize("bad", [(0, 4), (0, 1, 2, 3)])
def test_each_optimizer_has_the_mean_over_the_micro_batches_that_are_not_left_out(
    make_trainer: MakeTrainer, bad: tuple[int, ...]
) -> None:
    trainer = make_trainer(**ACCUMULATING)
    models = {"a": network(), "b": network()}
    plain = network()
    optimizers = {name: sgd(model) for name, model in models.items()}
    plain_optimizer = sgd(plain)
    trainer.program_reentry(models, optimizers)
    batches = []
    for number, (index, x, y) in enumerate(trainer.dataloader(samples(36))):
        batches.append(index.tolist())
        for name, model in models.items() if number not in bad else ():
            optimizers[name].zero_grad()
            learn(model, x, y)
            optimizers[name].step()
    train_without(bad, plain, plain_optimizer, batches)
    for model in models.values():
        for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(found, expected, atol=1e-6)
    assert trainer.steps == 3
