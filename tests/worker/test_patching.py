"""Tests of method overrides: they apply to the program's own objects, and not to copies of them."""

import copy
import inspect
import io
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, StepLR

from support.training import ACCUMULATING, FIXED, MakeTrainer, learn, network, samples, sgd


def enter(make_trainer: MakeTrainer) -> tuple[nn.Module, torch.optim.SGD, LRScheduler]:
    """Return a program between the first two micro-batches of a step."""
    trainer = make_trainer(**ACCUMULATING)
    model = network()
    optimizer = sgd(model)
    scheduler = StepLR(optimizer, step_size=1)
    trainer.program_reentry(model, optimizer, scheduler)
    batches = trainer.dataloader(samples())
    _, x, y = next(batches)
    learn(model, x, y)
    optimizer.step()
    return model, optimizer, scheduler


def save_and_load(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


def test_a_copy_of_the_model_zeroes_its_own_gradients(make_trainer: MakeTrainer) -> None:
    model, _, _ = enter(make_trainer)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for twin in (copy.deepcopy(model), save_and_load(model)):
        for parameter in twin.parameters():
            parameter.grad = torch.ones_like(parameter)
        twin.zero_grad()
        assert all(parameter.grad is None for parameter in twin.parameters())
        assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_copy_of_the_optimizer_steps_by_itself(make_trainer: MakeTrainer) -> None:
    _, optimizer, _ = enter(make_trainer)
    twin = copy.deepcopy(optimizer)
    parameter = twin.param_groups[0]["params"][0]
    before = parameter.detach().clone()
    parameter.grad = torch.ones_like(parameter)
    twin.step()
    assert not torch.equal(parameter, before)


def test_state_dicts_are_those_of_unpatched_objects(make_trainer: MakeTrainer) -> None:
    model, optimizer, scheduler = enter(make_trainer)
    twin = network()
    twin_optimizer = sgd(twin)
    twin_scheduler = StepLR(twin_optimizer, step_size=1)
    assert list(model.state_dict()) == list(twin.state_dict())
    assert optimizer.state_dict().keys() == twin_optimizer.state_dict().keys()
    assert scheduler.state_dict().keys() == twin_scheduler.state_dict().keys()
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), scheduler.state_dict()], file)
    file.seek(0)
    assert len(torch.load(file, weights_only=True)) == 3


class WithMask(nn.Module):
    """A model whose parameters' names a framework reads, as Hugging Face's Trainer selects columns."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 2)

    def forward(self, inputs: torch.Tensor, *, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Return the outputs, where `mask` is 1."""
        outputs: torch.Tensor = self.inner(inputs)
        return outputs if mask is None else outputs * mask


class PerUpdate:
    """A scheduler as those of timm."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step_update(self, num_updates: int, metric: float | None = None) -> None:
        """Set the learning rate."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def described(call: Callable[..., Any]) -> tuple[object, ...]:
    # The wrapper of a scheduler around optimizer.step has the signature of a method that is not bound.
    parameters = [str(each) for each in inspect.signature(call).parameters.values() if each.name != "self"]
    return parameters, call.__name__, call.__qualname__, call.__doc__, call.__module__


def several(one: bool) -> Any:
    """Return how the parts of a program are passed: as they are, or by name."""
    return (lambda part: part) if one else (lambda part: {"only": part})


@pytest.mark.parametrize("one", [True, False])
@pytest.mark.parametrize("make_scheduler", [lambda it: StepLR(it, step_size=1), PerUpdate])
def test_replaced_methods_have_the_signatures_names_and_docstrings_of_the_original_ones(
    make_trainer: MakeTrainer, one: bool, make_scheduler: Callable[..., Any]
) -> None:
    trainer, pass_as = make_trainer(**FIXED), several(one)
    model, scaler = WithMask(), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = make_scheduler(optimizer)
    objects: list[object] = [model, optimizer, scheduler, scaler, torch.autograd, sys]
    names = [
        "forward", "zero_grad", "step", "add_param_group", "step_update", "state_dict", "load_state_dict",
        "unscale_", "update", "backward", "exit",
    ]  # fmt: skip
    found = [
        (each, name) for each in objects for name in names if hasattr(each, name)
        if (each, name) != (torch.autograd, "forward")
    ]  # fmt: skip
    before = [(getattr(each, name), described(getattr(each, name))) for each, name in found]
    trainer.program_reentry(
        pass_as(model), pass_as(optimizer), pass_as(scheduler), register={"scaler": scaler}
    )
    after = [(getattr(each, name), described(getattr(each, name))) for each, name in found]
    assert [description for _, description in after] == [description for _, description in before]
    assert list(inspect.signature(model.forward).parameters) == ["inputs", "mask"]
    replaced = [
        name for (_, name), (was, _), (now, _) in zip(found, before, after, strict=True) if was != now
    ]
    assert {
        "forward",
        "zero_grad",
        "step",
        "add_param_group",
        "unscale_",
        "update",
        "backward",
        "exit",
    } <= set(replaced), replaced


# torch.jit.trace is deprecated in later versions.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("one", [True, False])
def test_a_model_can_be_exported_while_it_trains(make_trainer: MakeTrainer, one: bool) -> None:
    trainer, pass_as = make_trainer(**FIXED), several(one)
    model = WithMask()
    trainer.program_reentry(pass_as(model), pass_as(sgd(model)))
    inputs, mask = torch.randn(3, 6), torch.ones(3, 2)
    exported = torch.export.export(model, (inputs,), {"mask": mask})
    assert torch.equal(exported.module()(inputs, mask=mask), model(inputs, mask=mask))
    assert list(exported.state_dict) == ["inner.weight", "inner.bias"]
    traced = torch.jit.trace(model, inputs)
    assert torch.equal(traced(inputs), model(inputs))
    learn(model, inputs, torch.tensor([0, 1, 0]))


def test_a_trainer_that_is_closed_leaves_the_objects_to_another_one(make_trainer: MakeTrainer) -> None:
    """Closed in the middle of a step. Copies have none of its methods and hooks, and train alike."""
    first = make_trainer(**ACCUMULATING)
    program: Any = enter(lambda **_: first)
    first.close()
    twin = copy.deepcopy(program[0])
    copied = sgd(twin)
    copies: Any = twin, copied, StepLR(copied, step_size=1)
    for original, copy_of_it in zip(program[1:], copies[1:], strict=True):
        copy_of_it.load_state_dict(original.state_dict())
    for model, optimizer, scheduler in (program, copies):
        trainer = make_trainer(**ACCUMULATING)
        trainer.program_reentry(model, optimizer, scheduler)
        for _, x, y in trainer.dataloader(samples()):
            optimizer.zero_grad()
            learn(model, x, y)
            optimizer.step()
            scheduler.step()
        assert trainer.steps > 1
        trainer.close()
    for left, right in zip(program[0].parameters(), copies[0].parameters(), strict=True):
        assert torch.equal(left, right)
