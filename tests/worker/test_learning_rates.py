"""What sets the learning rate: schedulers that are passed, others beside them, and the program itself."""

import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from adascale import ElasticTrainer
from adascale_worker.errors import WorkerError
from support.training import ACCUMULATING, FIXED, MakeTrainer, learn, network, samples, sgd

GAIN = 1.75
STEPS = 24
BESIDE = (
    r"learning rate was set between two steps by something else .* progress .*ChainedScheduler.*Seq.*"
    r'register=\{"plateau": plateau\}.*int\(trainer\.progress\)'
)


class CosineByUpdates:
    """A scheduler of the shape of timm's: a function of a count, which saves all its attributes."""

    def __init__(self, optimizer: Optimizer, updates: int, *, t_in_epochs: bool = False) -> None:
        self.optimizer = optimizer
        self.updates = updates
        self.t_in_epochs = t_in_epochs
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        self.base_values = [group["initial_lr"] for group in optimizer.param_groups]
        self.metric: float | None = None

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "optimizer"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.__dict__.update(state_dict)

    def lr_at(self, t: int, base: float = 0.1) -> float:
        return base * 0.5 * (1 + math.cos(math.pi * min(t, self.updates) / self.updates))

    def _set(self, t: int) -> None:
        for group, base in zip(self.optimizer.param_groups, self.base_values, strict=True):
            group["lr"] = self.lr_at(t, base)

    def step(self, epoch: int, metric: float | None = None) -> None:
        self.metric = metric
        if self.t_in_epochs:
            self._set(epoch)

    def step_update(self, num_updates: int, metric: float | None = None) -> None:
        self.metric = metric
        if not self.t_in_epochs:
            self._set(num_updates)


class Program:
    """A trainer whose steps are worth GAIN steps, and what a program needs around it."""

    def __init__(
        self,
        trainer: ElasticTrainer,
        monkeypatch: pytest.MonkeyPatch,
        passed: Callable[[Optimizer], Any] = lambda _: None,
        registered: Callable[[Optimizer], dict[str, Any]] = lambda _: {},
    ) -> None:
        self.trainer = trainer
        self.model: nn.Module = network()
        self.optimizer = sgd(self.model, lr=0.1)
        self.passed = passed(self.optimizer)
        self.registered = registered(self.optimizer)
        self.state = trainer.program_reentry(
            self.model, self.optimizer, self.passed, register=self.registered
        )
        monkeypatch.setattr(trainer.adascale, "gain", lambda: GAIN)

    @property
    def lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def steps(self, epochs: range = range(1)) -> Iterator[int]:
        """Make the steps of a loop, and yield their numbers."""
        for epoch in epochs:
            for _, x, y in self.trainer.dataloader(samples()):
                self.optimizer.zero_grad()
                learn(self.model, x, y)
                self.optimizer.step()
                yield self.trainer.steps
            self.trainer.step(epoch)

    def train(self, after_step: Callable[[int], object], epochs: range = range(1)) -> None:
        """Make the steps of a loop, and call `after_step` after each."""
        for number in self.steps(epochs):
            after_step(number)


Make = Callable[..., Program]


@pytest.fixture
def make(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> Make:
    return lambda *arguments, **options: Program(
        make_trainer(**{**FIXED, **options}), monkeypatch, *arguments
    )


@pytest.fixture
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# -- two schedulers of one optimizer -----------------------------------------------------------------------


@pytest.mark.parametrize("order", [1, -1], ids=["after the one passed", "before the one passed"])
@pytest.mark.parametrize("after_reentry", [True, False], ids=["made after reentry", "made before"])
def test_a_second_scheduler_of_the_optimizer_is_named_once(
    make: Make, after_reentry: bool, order: int
) -> None:
    made: list[LRScheduler] = []

    def passed(optimizer: Optimizer) -> LRScheduler:
        if not after_reentry:
            made.append(CosineAnnealingLR(optimizer, STEPS))
        return LinearLR(optimizer, 0.1, total_iters=4)

    program = make(passed)
    if after_reentry:
        made.append(CosineAnnealingLR(program.optimizer, STEPS))

    def step_both(_: int) -> None:
        for each in [program.passed, made[0]][::order]:
            each.step()

    with pytest.warns(RuntimeWarning, match=BESIDE) as found:
        program.train(step_both)
    assert len(found) == 1


def test_a_plateau_beside_a_scheduler_is_named_once_it_sets_the_learning_rate(make: Make) -> None:
    program = make(lambda optimizer: LinearLR(optimizer))
    plateau = ReduceLROnPlateau(program.optimizer, patience=0)
    with pytest.warns(RuntimeWarning, match=BESIDE):
        program.train(lambda _: plateau.step(1.0))


class Warmup(LRScheduler):
    """Steps another scheduler after its own steps, as packages for warm-up do."""

    def __init__(self, optimizer: Optimizer, after: LRScheduler) -> None:
        self.after = {"scheduler": after}
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        if self.last_epoch > 2:
            self.after["scheduler"].step()

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch, "after": self.after["scheduler"].state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_epoch = state_dict["last_epoch"]
        self.after["scheduler"].load_state_dict(state_dict["after"])


SCHEDULERS_OF_OTHERS: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "ChainedScheduler": lambda o: ChainedScheduler([LinearLR(o, total_iters=9), ExponentialLR(o, 0.9)], o),
    "SequentialLR": lambda o: SequentialLR(o, [LinearLR(o), ExponentialLR(o, 0.9)], milestones=[4]),
    "a scheduler of a library": lambda o: Warmup(o, ExponentialLR(o, 0.9)),
}


@pytest.mark.usefixtures("no_warnings")
@pytest.mark.parametrize("kind", SCHEDULERS_OF_OTHERS)
def test_schedulers_that_another_one_steps_are_not_taken_for_others(
    make: Make, tmp_path: Path, kind: str
) -> None:
    rates = []
    for epochs in (range(1), range(1, 2)):
        program = make(SCHEDULERS_OF_OTHERS[kind], checkpoint_dir=tmp_path, epochs=epochs.stop)
        for _ in program.steps(epochs):
            program.passed.step()
        rates.append(program.lr)
    assert rates[1] < rates[0] < 0.1


@pytest.mark.usefixtures("no_warnings")
def test_a_scheduler_that_is_registered_may_follow_progress_by_hand(make: Make, tmp_path: Path) -> None:
    for epochs in (range(1), range(1, 2)):
        program = make(
            lambda optimizer: LinearLR(optimizer, 0.1, total_iters=4),
            lambda optimizer: {"decay": ExponentialLR(optimizer, 0.9)},
            checkpoint_dir=tmp_path,
            epochs=epochs.stop,
        )
        decay = program.registered["decay"]
        for _ in program.steps(epochs):
            program.passed.step()
            while decay.last_epoch < int(program.trainer.progress):
                decay.step()
    assert decay.last_epoch == int(program.trainer.progress) == 12
    assert program.lr == pytest.approx(0.1 * 0.9**12)


def test_a_scheduler_that_was_not_passed_is_warned_of_once(make: Make) -> None:
    made: list[LRScheduler] = []
    message = r"learning-rate scheduler that was not passed"
    with pytest.warns(RuntimeWarning, match=message):
        program = make(lambda optimizer: made.append(StepLR(optimizer, 1)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Not a second time when it is stepped.
        program.train(lambda _: made[0].step())


# -- schedulers that are no LRScheduler --------------------------------------------------------------------


@pytest.mark.usefixtures("no_warnings")
@pytest.mark.parametrize("options", [{}, ACCUMULATING], ids=["one micro-batch", "several"])
def test_a_scheduler_with_step_update_follows_progress_and_is_restored(
    make: Make, tmp_path: Path, options: dict[str, Any]
) -> None:
    calls = 0
    for steps in (STEPS // 2, STEPS):
        program = make(
            lambda optimizer: CosineByUpdates(optimizer, STEPS),
            checkpoint_dir=tmp_path,
            scale_invariant_steps=steps,
            **options,
        )
        scheduler = program.passed
        if steps == STEPS:
            assert scheduler.metric == 0.5, "the state of the checkpoint"
        for epoch in range(program.state.epoch, 9):
            for _ in program.steps(range(epoch, epoch + 1)):
                calls += 1
                scheduler.step_update(calls, metric=0.5)
                assert program.lr == scheduler.lr_at(int(program.trainer.progress))
                scheduler.step_update(num_updates=calls, metric=0.5)
            if program.trainer.finished:
                break
    assert program.trainer.progress >= STEPS > program.trainer.steps
    assert program.lr == 0.0


@pytest.mark.usefixtures("no_warnings")
def test_a_scheduler_with_step_update_counts_epochs_outside_the_loop(make: Make) -> None:
    program = make(lambda optimizer: CosineByUpdates(optimizer, 3, t_in_epochs=True))
    for epoch in range(3):
        for step in program.steps(range(epoch, epoch + 1)):
            program.passed.step_update(step)
            assert program.lr == program.passed.lr_at(epoch)
        program.passed.step(epoch + 1)
        assert program.lr == program.passed.lr_at(epoch + 1)


class WithoutUpdates:
    def step(self) -> None:
        raise AssertionError("it is refused before")

    def state_dict(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize("scheduler", [WithoutUpdates(), 7], ids=["scheduler", "number"])
def test_an_object_that_cannot_follow_progress_is_refused(make: Make, scheduler: object) -> None:
    message = (
        rf"a scheduler of type {type(scheduler).__name__}: it must be an LRScheduler .* no step_update.*"
        r" load_state_dict\. .*int\(trainer\.progress\)"
    )
    with pytest.raises(WorkerError, match=message):
        make(lambda _: scheduler)


# -- other code that sets the learning rate ---------------------------------------------------------------


def by_calls(program: Program) -> Callable[[int], None]:
    return CosineByUpdates(program.optimizer, STEPS).step_update


def by_program(program: Program) -> Callable[[int], None]:
    def adjust(step: int) -> None:
        for group in program.optimizer.param_groups:
            group["lr"] = 0.1 * 0.9**step

    return adjust


def by_tensor(program: Program) -> Callable[[int], None]:
    program.optimizer.param_groups[0]["lr"] = rate = torch.tensor(0.1)

    def adjust(step: int) -> None:
        rate.fill_(0.1 * 0.9**step)

    return adjust


def by_scheduler(program: Program) -> Callable[[int], None]:
    decay = LambdaLR(program.optimizer, lambda step: 0.9**step)

    def adjust(_: int) -> None:
        decay.step()

    return adjust


SETTERS = {
    "timm's": by_calls,
    "the program": by_program,
    "the program, with a tensor": by_tensor,
    "a scheduler": by_scheduler,
}


@pytest.mark.parametrize("options", [{}, ACCUMULATING], ids=["one micro-batch", "several"])
@pytest.mark.parametrize("name", SETTERS)
def test_what_sets_the_learning_rate_by_another_count_is_warned_of_once(
    make: Make, name: str, options: dict[str, Any]
) -> None:
    program = make(**options)
    adjust = SETTERS[name](program)
    with pytest.warns(RuntimeWarning, match=BESIDE) as found:
        program.train(adjust)
    assert len(found) == 1


def test_a_setter_beside_a_scheduler_that_was_passed_is_named(make: Make) -> None:
    program = make(lambda optimizer: LinearLR(optimizer))
    adjust = by_calls(program)

    def step_both(step: int) -> None:
        program.passed.step()
        adjust(step)

    with pytest.warns(RuntimeWarning, match=BESIDE) as found:
        program.train(step_both)
    assert len(found) == 1


@pytest.mark.usefixtures("no_warnings")
@pytest.mark.parametrize("make_setter", [by_calls, by_program, by_tensor])
def test_a_setter_that_reads_progress_is_accepted(
    make: Make, make_setter: Callable[[Program], Callable[[int], None]]
) -> None:
    program = make()
    adjust = make_setter(program)
    for _ in program.steps(range(2)):
        adjust(int(program.trainer.progress))


@pytest.mark.usefixtures("no_warnings")
def test_a_learning_rate_that_is_set_once_per_epoch_is_accepted(make: Make) -> None:
    program = make()
    for epoch in range(3):
        program.optimizer.param_groups[0]["lr"] = 0.1 / (1 + epoch)
        for _ in program.steps(range(epoch, epoch + 1)):
            pass
        program.optimizer.param_groups[0]["lr"] /= 2
