"""Every scheduler of torch.optim.lr_scheduler in the trainer, at scale 1 and where steps overshoot."""

import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from adascale.errors import WorkerError
from support.training import ACCUMULATING, FIXED, MakeTrainer, make_step, network, samples, sgd

STEPS = 22
GAIN = 1.75


def sequential(optimizer: torch.optim.Optimizer) -> LRScheduler:
    warmup = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=4)
    cycle = lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=STEPS - 4)
    return lr_scheduler.SequentialLR(optimizer, [warmup, cycle], milestones=[4])


def chained(optimizer: torch.optim.Optimizer) -> LRScheduler:
    warmup = lr_scheduler.ConstantLR(optimizer, factor=0.1, total_iters=4)
    return lr_scheduler.ChainedScheduler([warmup, lr_scheduler.ExponentialLR(optimizer, 0.9)], optimizer)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], LRScheduler]] = {
    "ChainedScheduler": chained,
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, total_iters=5),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=STEPS),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=5),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.2, step_size_up=3),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=7),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, milestones=[3, 9]),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.9),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=STEPS),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=STEPS),
    "SequentialLR": sequential,
    "StepLR": lambda o: lr_scheduler.StepLR(o, step_size=5),
}


def train(
    trainer: Any,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: LRScheduler,
    first: int,
    end: int = 10,
) -> list[tuple[int, float]]:
    """Train to the end, and return the whole progress and the lr after each step."""
    lrs = []
    for epoch in range(first, end):
        for _, x, y in trainer.dataloader(samples()):
            make_step(model, optimizer, x, y)
            scheduler.step()
            lrs.append((int(trainer.progress), float(optimizer.param_groups[0]["lr"])))
        trainer.step(epoch)
        if trainer.finished:
            break
    return lrs


def test_the_table_has_every_scheduler_of_torch() -> None:
    """ReduceLROnPlateau is stepped with a metric: see test_trainer.py."""
    of_torch = {
        name
        for name, kind in vars(lr_scheduler).items()
        if inspect.isclass(kind) and issubclass(kind, LRScheduler) and not name.startswith("_")
    }
    assert of_torch - {"LRScheduler", "ReduceLROnPlateau"} == set(SCHEDULERS)


@pytest.mark.parametrize("gain", [1.0, GAIN])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_follows_progress_to_the_end_and_is_restored(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, gain: float
) -> None:
    plain_optimizer = sgd(network())
    plain = SCHEDULERS[name](plain_optimizer)
    expected = [float(plain_optimizer.param_groups[0]["lr"])]
    for _ in range(STEPS):
        plain_optimizer.step()
        plain.step()
        expected.append(float(plain_optimizer.param_groups[0]["lr"]))

    for steps in (STEPS // 2, STEPS):
        trainer = make_trainer(**FIXED, scale_invariant_steps=steps, checkpoint_dir=tmp_path)
        model = network()
        optimizer = sgd(model)
        scheduler = SCHEDULERS[name](optimizer)
        state = trainer.program_reentry(model, optimizer, scheduler)
        monkeypatch.setattr(trainer.adascale, "gain", lambda: gain)
        lrs = train(trainer, model, optimizer, scheduler, state.epoch)
        assert lrs[-1][0] == (steps if gain == 1.0 else math.ceil(steps / gain) * gain // 1)
        assert [lr for _, lr in lrs] == pytest.approx([expected[min(whole, steps)] for whole, _ in lrs])


@pytest.mark.parametrize("known", [True, False], ids=["the end is known", "the end is unknown"])
def test_a_last_step_that_overshoots_ends_a_one_cycle_schedule(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    trainer = make_trainer(**FIXED, scale_invariant_steps=12 if known else None)
    model = network()
    optimizer = sgd(model)
    scheduler = lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=12)
    trainer.program_reentry(model, optimizer, scheduler)
    monkeypatch.setattr(trainer.adascale, "gain", lambda: 5.0)
    assert [whole for whole, _ in train(trainer, model, optimizer, scheduler, 0, 2)] == [5, 10, 15]
    assert scheduler.last_epoch == 12


@pytest.mark.parametrize("end", [{"scale_invariant_steps": 12}, {"epochs": 2}])
def test_a_schedule_is_not_asked_beyond_the_end_of_training(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, end: dict[str, int]
) -> None:
    trainer = make_trainer(**FIXED, **end)
    model = network()
    optimizer = sgd(model)
    table = [1.0 / (1 + step) for step in range(13)]
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: table[step])
    trainer.program_reentry(model, optimizer, scheduler)
    monkeypatch.setattr(trainer.adascale, "gain", lambda: 5.0)
    assert [whole for whole, _ in train(trainer, model, optimizer, scheduler, 0)] == [5, 10, 15]
    assert scheduler.last_epoch == 12


@pytest.mark.parametrize("name", ["CosineAnnealingWarmRestarts", "StepLR"])
def test_a_position_that_the_program_passes_has_to_come_from_progress(
    make_trainer: MakeTrainer, name: str
) -> None:
    trainer = make_trainer(**ACCUMULATING)
    model = network()
    optimizer = sgd(model)
    scheduler: Any = SCHEDULERS[name](optimizer)
    trainer.program_reentry(model, optimizer, scheduler)
    for number, (_, x, y) in enumerate(trainer.dataloader(samples())):
        make_step(model, optimizer, x, y)
        if number == 0:
            with pytest.raises(WorkerError, match=r"step\(0\.5\).*scheduler\.step\(trainer\.progress \* "):
                scheduler.step(0.5)
        elif name == "CosineAnnealingWarmRestarts":
            scheduler.step(trainer.progress / 4)
            assert scheduler.T_cur == trainer.progress / 4


class Wrapper:
    """Iterates as tqdm does."""

    def __init__(self, iterable: Any) -> None:
        self._iterable = iterable

    def __iter__(self) -> Any:
        yield from self._iterable


@pytest.mark.parametrize("wrap", [lambda loader: loader, Wrapper], ids=["alone", "wrapped"])
def test_a_scheduler_steps_per_epoch_after_a_loop_that_was_left(
    make_trainer: MakeTrainer, wrap: Callable[[Any], Any]
) -> None:
    """Also if a variable refers to what was iterated over, which may be the same in each epoch."""
    trainer = make_trainer(batch_size=8)
    model = network()
    optimizer = sgd(model, lr=0.1)
    scheduler = lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    trainer.program_reentry(model, optimizer, scheduler)
    loader = wrap(trainer.dataloader(samples()))
    indices: list[int] = []
    for epoch in range(3):
        for number, (index, x, y) in enumerate(loader):
            indices += index.tolist()
            make_step(model, optimizer, x, y)
            if number == 1:
                break
        scheduler.step()
        trainer.step(epoch)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5 ** (epoch + 1))
    assert trainer.steps == 6
    assert len(set(indices)) == 48, "each sample of the pass once"
