"""Tests of a program that resumes with other hyperparameters than those of its checkpoint."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    PolynomialLR,
    SequentialLR,
    StepLR,
)

from adascale_worker.errors import WorkerError
from adascale_worker.program.hyperparameters import Choice
from support.training import FIXED, MakeTrainer, network, samples, sgd, train

pytestmark = pytest.mark.usefixtures("durable_checkpoints")

MakeScheduler = Callable[[torch.optim.Optimizer], LRScheduler]


@pytest.fixture
def resume(
    make_trainer: MakeTrainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[torch.optim.SGD, LRScheduler | None, str]]:
    """Returns a function that trains one epoch of 6 steps in another run of the program.

    It returns the optimizer and the scheduler as they are when training begins, and the output until then.
    """
    ends = iter(range(1, 10))

    def run(
        scheduler: MakeScheduler | None = None, hyperparameters: Choice = "checkpoint", **options: Any
    ) -> tuple[torch.optim.SGD, LRScheduler | None, str]:
        trainer = make_trainer(**FIXED, checkpoint_dir=tmp_path, checkpoint_interval=0)
        model = network()
        optimizer = sgd(model, **options)
        schedule = scheduler(optimizer) if scheduler else None
        state = trainer.program_reentry(model, optimizer, schedule, hyperparameters=hyperparameters)
        output = capsys.readouterr().out
        observed = sgd(network(), lr=1.0), schedule, output
        for new, group in zip(observed[0].param_groups, optimizer.param_groups, strict=True):
            new.update(deepcopy({name: value for name, value in group.items() if name != "params"}))
        epochs = range(state.epoch, next(ends))
        train(trainer, model, optimizer, schedule, epochs=epochs, data=samples(48))
        return observed

    return run


Resume = Callable[..., tuple[torch.optim.SGD, LRScheduler | None, str]]


def value(optimizer: torch.optim.Optimizer, name: str) -> Any:
    return optimizer.param_groups[0][name]


def test_an_unchanged_program_is_not_told_of_the_learning_rate_that_its_schedule_has_changed(
    resume: Resume,
) -> None:
    halving: MakeScheduler = lambda optimizer: StepLR(optimizer, step_size=3, gamma=0.5)  # noqa: E731
    resume(halving)
    optimizer, _, output = resume(halving)
    assert value(optimizer, "lr") == pytest.approx(0.1 * 0.25)
    assert output == ""


def test_changed_values_are_said_with_both_and_those_of_the_checkpoint_are_used(resume: Resume) -> None:
    resume()
    for _ in range(2):
        optimizer, _, output = resume(lr=0.05, momentum=0.8, nesterov=True)
        assert output == (
            "adascale: lr is 0.1 in the checkpoint, 0.05 in the program; momentum is 0.9 in the checkpoint, "
            "0.8 in the program; nesterov is False in the checkpoint, True in the program. Training "
            "continues with the values of the checkpoint; to continue with those of the program, pass "
            'program_reentry(..., hyperparameters="program")\n'
        )
        assert [value(optimizer, name) for name in ("lr", "momentum", "nesterov")] == [0.1, 0.9, False]


def test_values_of_the_program_are_used_if_it_says_so(resume: Resume) -> None:
    resume()
    optimizer, _, output = resume(hyperparameters="program", lr=0.05, weight_decay=0.0, dampening=0.5)
    assert "weight_decay is 0.01 in the checkpoint, 0 in the program" in output
    assert "dampening is 0 in the checkpoint, 0.5 in the program" in output
    assert "Training continues with the values of the program; " in output
    assert [value(optimizer, name) for name in ("lr", "weight_decay", "dampening")] == [0.05, 0.0, 0.5]
    _, _, output = resume(lr=0.05, weight_decay=0.0, dampening=0.5)
    assert output == "", "they are those of the checkpoint now"


def test_a_tensor_as_learning_rate_is_changed_in_place(resume: Resume) -> None:
    resume(lr=torch.tensor(0.1))
    optimizer, _, _ = resume(hyperparameters="program", lr=torch.tensor(0.05))
    assert value(optimizer, "lr") == pytest.approx(0.05)
    assert isinstance(value(optimizer, "lr"), torch.Tensor)


def test_the_same_learning_rate_as_a_tensor_is_no_difference(resume: Resume) -> None:
    resume(lr=0.1)
    assert resume(lr=torch.tensor(0.1))[2] == ""
    assert "lr is 0.1 in the checkpoint, 0.100001 in the program" in resume(lr=torch.tensor(0.100001))[2]


@pytest.mark.parametrize("in_tensors", [False, True])
def test_changed_betas_keep_their_type(
    make_trainer: MakeTrainer, tmp_path: Path, *, in_tensors: bool
) -> None:
    """Tensors keep their place in memory too, so that a compiled step isn't compiled again."""
    for end, betas in enumerate([(0.9, 0.999), (0.8, 0.99)], 1):
        model = network()
        given: Any = tuple(map(torch.tensor, betas)) if in_tensors else betas
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=given)
        trainer = make_trainer(**FIXED, checkpoint_dir=tmp_path, checkpoint_interval=0)
        state = trainer.program_reentry(model, optimizer, hyperparameters="program")
        used = value(optimizer, "betas")
        assert type(used) is tuple
        assert [type(each) for each in used] == [torch.Tensor if in_tensors else float] * 2
        assert tuple(map(float, used)) == pytest.approx(betas)
        train(trainer, model, optimizer, epochs=range(state.epoch, end), data=samples(48))
        assert list(map(id, value(optimizer, "betas"))) == list(map(id, used)) or not in_tensors


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda optimizer: StepLR(optimizer, step_size=4, gamma=0.5),
        lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        lambda optimizer: CosineAnnealingLR(optimizer, T_max=40),
        lambda optimizer: OneCycleLR(optimizer, max_lr=optimizer.param_groups[0]["lr"], total_steps=40),
        lambda optimizer: SequentialLR(
            optimizer, [LinearLR(optimizer, total_iters=4), StepLR(optimizer, 4)], milestones=[4]
        ),
    ],
    ids=["StepLR", "LambdaLR", "CosineAnnealingLR", "OneCycleLR", "SequentialLR"],
)
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step:UserWarning")
@pytest.mark.filterwarnings("ignore:The epoch parameter in:UserWarning")
def test_a_schedule_continues_at_its_position_from_the_learning_rate_of_the_program(
    resume: Resume, scheduler: MakeScheduler
) -> None:
    resume(scheduler)
    optimizer, schedule, output = resume(scheduler, hyperparameters="program", lr=0.02)
    assert "lr is " in output
    assert schedule is not None
    undisturbed = sgd(network(), lr=0.02)
    expected = scheduler(undisturbed)
    for _ in range(6):
        undisturbed.step()
        expected.step()
    assert value(optimizer, "lr") == pytest.approx(value(undisturbed, "lr"))
    for _ in range(6):
        undisturbed.step()
        expected.step()
    assert schedule.get_last_lr() == pytest.approx(expected.get_last_lr())


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda optimizer, steps: CosineAnnealingLR(optimizer, T_max=steps),
        lambda optimizer, steps: LinearLR(optimizer, 1.0, 0.0, total_iters=steps),
        lambda optimizer, steps: PolynomialLR(optimizer, total_iters=steps),
        lambda optimizer, steps: StepLR(optimizer, step_size=max(steps // 4, 1), gamma=0.5),
    ],
    ids=["cosine", "linear", "polynomial", "step"],
)
@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_a_schedule_that_has_ended_continues_if_the_program_makes_it_longer(
    resume: Resume, scheduler: Callable[[torch.optim.Optimizer, int], LRScheduler], lr: float | torch.Tensor
) -> None:
    def own() -> float | torch.Tensor:
        return lr.clone() if isinstance(lr, torch.Tensor) else lr

    resume(lambda optimizer: scheduler(optimizer, 6), lr=own())
    optimizer, schedule, _ = resume(
        lambda optimizer: scheduler(optimizer, 24), hyperparameters="program", lr=own()
    )
    undisturbed = sgd(network(), lr=0.1)
    expected = scheduler(undisturbed, 24)

    def make_epoch() -> None:
        for _ in range(6):
            undisturbed.step()
            expected.step()

    make_epoch()
    assert float(value(optimizer, "lr")) == pytest.approx(value(undisturbed, "lr"))
    make_epoch()
    assert schedule is not None
    assert [float(each) for each in schedule.get_last_lr()] == pytest.approx(expected.get_last_lr())


def test_arguments_of_the_schedule_are_compared_too(resume: Resume) -> None:
    resume(lambda optimizer: StepLR(optimizer, step_size=4, gamma=0.5))
    changed: MakeScheduler = lambda optimizer: StepLR(optimizer, step_size=3, gamma=0.5)  # noqa: E731
    _, schedule, output = resume(changed)
    assert "adascale: step_size of the scheduler is 4 in the checkpoint, 3 in the program. " in output
    assert isinstance(schedule, StepLR)
    assert schedule.step_size == 4
    _, schedule, _ = resume(changed, hyperparameters="program")
    assert isinstance(schedule, StepLR)
    assert (schedule.step_size, schedule.last_epoch) == (3, 18), "after the epoch that it has trained since"


def test_another_choice_is_refused(resume: Resume) -> None:
    with pytest.raises(WorkerError, match="hyperparameters='new': it must be 'checkpoint' or 'program'"):
        resume(hyperparameters="new")


def test_another_seed_than_that_of_the_checkpoint_is_said(
    make_trainer: MakeTrainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for end, seed in enumerate([3, 3, 4], 1):
        model = network()
        optimizer = sgd(model)
        trainer = make_trainer(**FIXED, checkpoint_dir=tmp_path, checkpoint_interval=0, seed=seed)
        state = trainer.program_reentry(model, optimizer)
        output = capsys.readouterr().out
        assert ("seed is 3 in the checkpoint, 4 in the program" in output) is (seed == 4)
        train(trainer, model, optimizer, epochs=range(state.epoch, end), data=samples(48))
