"""AdaScale with schedulers and torch.compile, which replace methods of the optimizer."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import SWALR

from adascale_worker.adascale import AdaScale
from worker.adascale_problem import assert_matches_reference, backward, batches, network, squared_error
from worker.reference import Batch, Reference

Optimizer = torch.optim.Optimizer
Make = Callable[[Optimizer], Any]

# A constructor of each class, from torch's own tests (test/optim/test_lrscheduler.py).
SCHEDULERS: dict[str, Make] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lr_lambda=lambda epoch: 0.95**epoch),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lr_lambda=lambda epoch: 0.95),
    "StepLR": lambda o: lr_scheduler.StepLR(o, gamma=0.1, step_size=3),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, gamma=0.1, milestones=[2, 5, 9]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, factor=0.4, total_iters=4),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, start_factor=0.3, total_iters=4),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, gamma=0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, power=0.9, total_iters=8),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=5, eta_min=1e-3),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=3, T_mult=2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, base_lr=0.01, max_lr=0.1, step_size_up=3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=30),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1, factor=0.5),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o,
        schedulers=[lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)],
        milestones=[3],
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: SWALR(o, swa_lr=0.01, anneal_epochs=4),
}


def test_all_public_schedulers_are_tested() -> None:
    public = {
        name
        for name in lr_scheduler.__all__
        if inspect.isclass(getattr(lr_scheduler, name)) and name != "LRScheduler"
    }
    assert public <= set(SCHEDULERS)


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("of_inner", [True, False])
def test_a_scheduler_reads_the_unscaled_lr(*, name: str, of_inner: bool) -> None:
    """Made for AdaScale or for the inner optimizer, the schedule is that of plain SGD."""
    make = SCHEDULERS[name]
    model, other = network(), network()
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = make(sgd) if of_inner else None
    optimizer = AdaScale(sgd, num_gradients_to_accumulate=2)
    if scheduler is None:
        scheduler = make(optimizer)
    plain = torch.optim.SGD(other.parameters(), lr=0.05, momentum=0.9)
    plain_scheduler = make(plain)
    reference = Reference(other, plain, squared_error, 2.0)
    data = iter(batches(24))
    for _ in range(12):
        step = [next(data), next(data)]
        for batch in step:
            backward(squared_error(model, batch) / 2)
        optimizer.step()
        optimizer.zero_grad()
        reference.step(step)
        for each in (scheduler, plain_scheduler):
            each.step(1.0) if isinstance(each, lr_scheduler.ReduceLROnPlateau) else each.step()
        assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
        for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    if isinstance(scheduler, LRScheduler):
        assert scheduler.get_last_lr() == plain_scheduler.get_last_lr()


# -- torch.compile -----------------------------------------------------------------------------------------


@contextmanager
def compiling() -> Iterator[None]:
    """Without a backend: graphs are captured, guarded and recompiled as usual, and run in eager mode."""
    torch._dynamo.reset()
    before = torch._dynamo.config.error_on_recompile
    try:
        yield
    finally:
        torch._dynamo.config.error_on_recompile = before
        torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("micro", [1, 2])
def test_a_compiled_model(micro: int) -> None:
    with compiling():
        compiled: dict[int, Any] = {}

        def loop(optimizer: AdaScale, model: nn.Module, step: list[Batch]) -> None:
            fast = compiled.setdefault(id(model), torch.compile(model, backend="aot_eager"))
            for batch in step:
                backward(squared_error(fast, batch) / len(step))
            optimizer.step()
            optimizer.zero_grad()

        assert_matches_reference(loop, micro=micro, scale=4.0)
        assert compiled


@pytest.mark.parametrize("tensor", [True, False])
def test_a_compiled_step_of_the_inner_optimizer(*, tensor: bool) -> None:
    """With a tensor lr, a change of the gain compiles nothing again."""
    with compiling():
        model, other = network(), network()
        lr: Any = torch.tensor(0.05, dtype=torch.float64) if tensor else 0.05
        sgd = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        sgd.step = torch.compile(sgd.step, backend="eager")  # type: ignore[method-assign]
        optimizer = AdaScale(sgd, num_gradients_to_accumulate=2)
        reference = Reference(
            other, torch.optim.SGD(other.parameters(), lr=0.05, momentum=0.9), squared_error, 2.0
        )
        data = iter(batches(20))
        for number in range(10):
            if tensor and number == 4:
                torch._dynamo.config.error_on_recompile = True
            step = [next(data), next(data)]
            for batch in step:
                backward(squared_error(model, batch) / 2)
            optimizer.step()
            optimizer.zero_grad()
            reference.step(step)
            for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", ["inner", "own"])
def test_a_compiled_step_of_adam_with_tensors_as_lr_and_betas(compiled: str) -> None:
    """A change of the gain compiles nothing again, also if the backend specializes numbers of Python."""
    with compiling():
        model, other = network(), network()
        values = [torch.tensor(value, dtype=torch.float64) for value in (0.01, 0.9, 0.999)]
        adam = torch.optim.AdamW(model.parameters(), lr=values[0], betas=(values[1], values[2]))
        if compiled == "inner":
            adam.step = torch.compile(adam.step, backend="aot_eager")  # type: ignore[method-assign]
        optimizer = AdaScale(adam, num_gradients_to_accumulate=2)
        step = torch.compile(optimizer.step, backend="aot_eager") if compiled == "own" else optimizer.step
        plain = AdaScale(torch.optim.AdamW(other.parameters(), lr=0.01), num_gradients_to_accumulate=2)
        data = iter(batches(20))
        gains = set()
        for number in range(10):
            torch._dynamo.config.error_on_recompile = number >= 4
            for batch in [next(data), next(data)]:
                backward(squared_error(model, batch) / 2)
                backward(squared_error(other, batch) / 2)
            step()
            plain.step()
            optimizer.zero_grad()
            plain.zero_grad()
            gains.add(optimizer.gain())
            for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
        assert len(gains) > 5
        assert [float(value) for value in values] == [0.01, 0.9, 0.999]


@pytest.mark.slow
def test_our_own_step_compiled() -> None:
    with compiling():
        compiled: dict[int, Any] = {}

        def loop(optimizer: AdaScale, model: nn.Module, step: list[Batch]) -> None:
            fast = compiled.setdefault(id(optimizer), torch.compile(optimizer.step, backend="eager"))
            for batch in step:
                backward(squared_error(model, batch) / len(step))
            fast()
            optimizer.zero_grad()

        assert_matches_reference(loop, micro=2, scale=4.0)
