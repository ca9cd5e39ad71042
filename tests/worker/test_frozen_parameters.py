"""Parameters that are frozen and unfrozen while a program trains."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import nn

from adascale_core.batch.gain import GradientEstimate
from support.launch import PROGRAMS
from support.members import Members
from support.training import (
    ACCUMULATING,
    FIXED,
    MakeTrainer,
    adversarial,
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

PROGRAM = PROGRAMS / "frozen.py"
FIRST, SECOND = ["0.weight", "0.bias"], ["3.weight", "3.bias"]
BOUNDS: dict[str, object] = {"batch_size": 8}
SCALED_ON_TWO: dict[str, object] = {"batch_size": 4, "max_batch_size": 8, "local_bsz_bounds": [4, 4]}
"""On two replicas, each step has scale 2."""
MICRO_BATCHES: dict[str, object] = {"batch_size": 12, "local_bsz_bounds": [2, 3]}
"""On two replicas, a step has two micro-batches of 3 samples on each."""


def freeze(model: nn.Module, names: list[str]) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in names)


# -- one replica ----------------------------------------------------------------------------------------


def test_parameters_are_frozen_and_unfrozen_as_in_a_plain_loop(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(**FIXED)
    model = network()
    freeze(model, FIRST)
    twin = copy.deepcopy(model)
    optimizer, plain = sgd(model), sgd(twin)
    places: dict[int, list[str]] = {2: [], 5: SECOND, 7: ["0.weight"], 8: [], 10: [*FIRST, "3.bias"]}
    trainer.program_reentry(model, optimizer)
    batches = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for epoch in range(2):
            for _, x, y in trainer.dataloader(samples()):
                freeze(model, places.get(trainer.steps, frozen_of(model)))
                make_step(model, optimizer, x, y)
                batches.append((x, y))
            trainer.step(epoch)
    trainer.close()
    for step, (x, y) in enumerate(batches):
        freeze(twin, places.get(step, frozen_of(twin)))
        plain.zero_grad()
        learn(twin, x, y)
        plain.step()
    assert len(batches) == 12
    assert equal(parameters_of(model), parameters_of(twin))


@pytest.mark.parametrize("micro", [0, 1, 2])
def test_statistics_are_made_again_and_the_step_of_the_change_is_left_out(
    make_trainer: MakeTrainer, micro: int
) -> None:
    trainer = make_trainer(**ACCUMULATING)
    model = network()
    freeze(model, FIRST)
    optimizer = sgd(model)
    trainer.program_reentry(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number, (_, x, y) in enumerate(trainer.dataloader(samples())):
            if number == 3 + micro:
                assert trainer.adascale.estimate is not None
                freeze(model, [])
            make_step(model, optimizer, x, y)
            if number == 5:
                assert trainer.adascale.estimate is None
    estimate = trainer.adascale.estimate
    assert estimate is not None
    assert not estimate.biased


def test_a_parameter_that_is_frozen_in_a_step_keeps_its_value(make_trainer: MakeTrainer) -> None:
    """The gradients of its earlier micro-batches, and the momentum of gradients of zero, do not change it."""
    trainer, model, optimizer = entered(make_trainer, **ACCUMULATING)
    before = None
    for number, (_, x, y) in enumerate(trainer.dataloader(samples())):
        if number == 4:
            freeze(model, FIRST)
            before = parameters_of(model)
        optimizer.zero_grad(set_to_none=False)
        learn(model, x, y)
        optimizer.step()
    after = parameters_of(model)
    assert before is not None
    assert equal(before[:2], after[:2])
    assert not any(map(torch.equal, before[2:], after[2:]))


def test_what_is_trained_is_restored_from_a_checkpoint(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """Also if it was changed after the loop, just before trainer.step, which saves."""

    estimates: dict[str, list[GradientEstimate | None]] = {"whole": [], "parts": []}

    def run(folder: Path, epochs: range, change_after: int | None) -> nn.Module:
        trainer = make_trainer(**ACCUMULATING, epochs=epochs.stop, checkpoint_dir=folder)
        model = network()
        freeze(model, FIRST)
        optimizer = sgd(model)
        assert trainer.program_reentry(model, optimizer).epoch == epochs.start
        for epoch in epochs:
            for _, x, y in trainer.dataloader(samples()):
                make_step(model, optimizer, x, y)
                if trainer.made_step:
                    estimates[folder.name].append(trainer.adascale.estimate)
            if epoch == change_after:
                freeze(model, ["3.weight"])
            trainer.step(epoch)
        trainer.close()
        return model

    whole = run(tmp_path / "whole", range(3), 0)
    run(tmp_path / "parts", range(1), 0)
    again = run(tmp_path / "parts", range(1, 3), None)
    assert [p.requires_grad for p in again.parameters()] == [True, True, False, True]
    assert equal(parameters_of(again), parameters_of(whole))
    assert estimates["parts"] == estimates["whole"]
    assert [number for number, each in enumerate(estimates["whole"]) if each is None] == [4]


@pytest.mark.parametrize("choice", ["checkpoint", "program"])
def test_a_program_that_was_edited_is_told_what_is_used(
    make_trainer: MakeTrainer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    choice: Literal["checkpoint", "program"],
) -> None:
    def enter(frozen: list[str], epoch: int) -> nn.Module:
        trainer = make_trainer(**FIXED, epochs=epoch + 1, checkpoint_dir=tmp_path)
        model = network()
        freeze(model, frozen)
        optimizer = sgd(model)
        trainer.program_reentry(model, optimizer, hyperparameters=choice)
        trained = [parameter.requires_grad for parameter in model.parameters()]
        train(trainer, model, optimizer, epochs=range(epoch, epoch + 1))
        assert [parameter.requires_grad for parameter in model.parameters()] == trained
        trainer.close()
        return model

    enter(["3.bias"], 0)
    capsys.readouterr()
    model = enter(["0.bias"], 1)
    used = ["3.bias"] if choice == "checkpoint" else ["0.bias"]
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == used
    assert (
        "adascale: requires_grad of '0.bias' is True in the checkpoint, False in the program; requires_grad "
        "of '3.bias' is False in the checkpoint, True in the program. Training continues with the values of "
        f"the {choice}"
    ) in capsys.readouterr().out


def test_a_model_without_a_trained_parameter_waits_for_one(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(**FIXED)
    model = network()
    freeze(model, FIRST + SECOND)
    optimizer = sgd(model)
    trainer.program_reentry(model, optimizer)
    freeze(model, FIRST)
    before = parameters_of(model)
    train(trainer, model, optimizer)
    assert equal(before[:2], parameters_of(model)[:2])
    assert not any(map(torch.equal, before[2:], parameters_of(model)[2:]))


# -- changes inside a step --------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:got .* backward passes")
@pytest.mark.parametrize("bounds", [FIXED, ACCUMULATING])
def test_a_change_that_is_undone_before_the_step_changes_nothing(
    make_trainer: MakeTrainer, bounds: dict[str, object]
) -> None:
    """Adversarial training: the inner forward pass, with all parameters frozen, keeps the gradients."""

    def run(*, toggles: bool) -> nn.Module:
        trainer, model, optimizer = entered(make_trainer, **bounds)
        for _, x, y in trainer.dataloader(samples()):
            optimizer.zero_grad()
            learn(model, x, y)
            names = [name for name, _ in model.named_parameters()]
            freeze(model, names if toggles else [])
            moved = adversarial(model, x)
            freeze(model, [])
            learn(model, moved, y)
            optimizer.step()
        trainer.close()
        return model

    assert equal(parameters_of(run(toggles=True)), parameters_of(run(toggles=False)))


@pytest.mark.parametrize("bounds", [{**FIXED, "single_replica_gain": "consecutive"}, ACCUMULATING])
def test_the_gain_is_estimated_although_each_step_freezes_and_unfreezes(
    make_trainer: MakeTrainer, bounds: dict[str, object]
) -> None:
    trainer, model, optimizer = entered(make_trainer, **bounds)
    for _, x, y in trainer.dataloader(samples()):
        freeze(model, FIRST)
        moved = adversarial(model, x)
        freeze(model, [])
        make_step(model, optimizer, moved, y)
        freeze(model, SECOND)
    assert trainer.adascale.estimate is not None
    averages = trainer.adascale.state_dict()["adascale"]
    assert averages["sampling_start"] == 0


def test_a_parameter_that_is_frozen_after_the_forward_pass_is_frozen_in_that_step(
    make_trainer: MakeTrainer,
) -> None:
    trainer, model, optimizer = entered(make_trainer, **ACCUMULATING)
    before = None
    for number, (_, x, y) in enumerate(trainer.dataloader(samples())):
        optimizer.zero_grad()
        learn(model, x, y)
        if number == 5:
            assert trainer.adascale.estimate is not None
            freeze(model, FIRST)
            before = parameters_of(model)
        progress = trainer.progress
        optimizer.step()
        if number == 5:
            # The step is made, and counted, with the same gain.
            assert trainer.adascale.estimate is None
            assert trainer.progress - progress == pytest.approx(1.0)
    assert before is not None
    assert equal(before[:2], parameters_of(model)[:2])
    assert not any(map(torch.equal, before[2:], parameters_of(model)[2:]))


def test_an_optimizer_whose_parameters_are_frozen_for_the_step_of_another_keeps_its_estimate(
    make_trainer: MakeTrainer,
) -> None:
    """A WGAN: the discriminator is frozen for the steps of the generator."""
    trainer = make_trainer(batch_size=8, max_batch_size=16, local_bsz_bounds=(2, 4), epochs=2)
    generator, critic = nn.Linear(2, 6), network()
    optimizers = {"d": sgd(critic, lr=0.01), "g": sgd(generator, lr=0.01)}
    trainer.program_reentry({"d": critic, "g": generator}, optimizers)
    counts = []
    for _, x, _ in trainer.dataloader(samples(96)):
        critic.requires_grad_(True)
        is_last = trainer.steps % 3 == 2
        optimizers["d"].zero_grad()
        noise = torch.randn(len(x), 2)
        (critic(x).square().mean() + critic(generator(noise).detach()).mean()).backward()
        optimizers["d"].step()
        if is_last:
            critic.requires_grad_(False)
            optimizers["g"].zero_grad()
            critic(generator(noise)).square().mean().backward()
            optimizers["g"].step()
        if trainer.made_step:
            state = trainer._training.steps.optimizer.parts["d"].state_dict()["adascale"]  # type: ignore[union-attr]
            counts.append(state["averages"][0]["unbiased"]["count"])
            assert state["sampling_start"] == 0
    assert len(counts) >= 6
    assert counts == sorted(set(counts))


# -- several replicas -------------------------------------------------------------------------------------

CHANGES = {
    "steps": {"step 3": [], "step 7": FIRST, "step 9": ["3.bias"]},
    "micro-batches": {"micro 3": [], "micro 7": FIRST, "micro 9": ["3.bias"]},
    "epochs": {"begin 1": [], "end 1": SECOND},
}


def require_plain(job: Members, changes: dict[str, list[str]]) -> None:
    """Check that the weights are those of a plain loop with the whole batches."""
    steps: dict[int, list[int]] = {}
    epoch_of = {record["step"]: record["epoch"] for record in job.records()}
    for record in job.records():
        steps.setdefault(record["step"], []).extend(record["indices"])
    model = network()
    freeze(model, FIRST)
    optimizer = sgd(model)
    _, features, targets = samples().tensors
    epoch = 0
    for step in range(1, max(steps) + 1):
        while epoch < epoch_of[step]:
            freeze(model, changes.get(f"end {epoch}", frozen_of(model)))
            epoch += 1
            freeze(model, changes.get(f"begin {epoch}", frozen_of(model)))
        freeze(model, changes.get(f"step {step - 1}", frozen_of(model)))
        order = torch.tensor(steps[step])
        make_step(model, optimizer, features[order], targets[order])
    found = torch.load(job.folder / "journal" / "parameters.pt")
    for own, expected in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-5)


def frozen_of(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if not parameter.requires_grad]


def options_of(changes: dict[str, list[str]], bounds: dict[str, object], epochs: int) -> dict[str, object]:
    return {
        "PROGRAM": PROGRAM,
        "BOUNDS": json.dumps(bounds),
        "EPOCHS": epochs,
        "FROZEN": json.dumps(FIRST),
        "CHANGES": json.dumps(changes),
    }


@pytest.mark.parametrize("name", ["epochs", "micro-batches"])
def test_two_replicas_freeze_and_unfreeze_as_a_plain_loop(
    make_members: Callable[..., Members], name: str
) -> None:
    changes = CHANGES[name]
    job = make_members(**options_of(changes, MICRO_BATCHES if "micro" in name else BOUNDS, 3))
    assert len(job.complete(2)) == 1, "both replicas have the same weights"
    if name != "micro-batches":
        require_plain(job, changes)
    assert "Warning" not in job.output()


def test_two_replicas_freeze_and_unfreeze_inside_each_step(make_members: Callable[..., Members]) -> None:
    """For the second loss of each step, a part is frozen."""
    job = make_members(**{**options_of({}, BOUNDS, 2), "FROZEN": "[]", "INSIDE": 1})
    assert len(job.complete(2)) == 1, "both replicas have the same weights"
    assert "Warning" not in job.output()
    indices: dict[int, list[int]] = {}
    for record in job.records():
        indices.setdefault(record["step"], []).extend(record["indices"])
    model = network()
    optimizer = sgd(model)
    _, features, targets = samples().tensors
    for step in range(1, job.last_step() + 1):
        x, y = features[indices[step]], targets[indices[step]]
        optimizer.zero_grad()
        learn(model, x, y)
        freeze(model, SECOND)
        model(x).square().mean().backward()
        freeze(model, [])
        optimizer.step()
    found = torch.load(job.folder / "journal" / "parameters.pt")
    for own, expected in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-5)


def test_a_replica_that_joins_after_a_change_trains_what_the_others_train(
    make_members: Callable[..., Members],
) -> None:
    """Its program begins with other parameters, and is past the places where they change."""
    changes = CHANGES["steps"]
    calm = make_members("calm", **options_of(changes, SCALED_ON_TWO, 4))
    expected = calm.complete(2)
    gains = {(record["step"], record["gain"]) for record in calm.records()}
    assert len(gains) == calm.last_step(), "both replicas have the same gains"
    assert {gain for _, gain in gains if gain > 1.0}
    job = make_members("killed", **options_of(changes, SCALED_ON_TWO, 4), STEP_SECONDS=0.05)
    lost, survivor, spare = job.start(3)
    job.activate([lost, survivor])
    job.wait_step(5)
    lost.kill()
    job.wait_holding([survivor])
    job.activate([survivor, spare])
    assert job.finish() == expected
    assert job.require_complete_stream() == calm.require_complete_stream()
